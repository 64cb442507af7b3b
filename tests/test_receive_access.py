"""Who may send: TLS, client certificates, tokens and users, over both protocols, and what changes at run time."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import httpx
import pytest
from guard_process import Guardd, guards, until
from receiving import PROTOBUF, Authority, RecordingSink, free, over_grpc, over_http, request

from guard.counters import ReceiverCounts
from guard.receive import access
from guard.receive.access import AccessError, Certificates, Tokens
from guard.receive.address import Address
from guard.receive.grpc import SERVICE

guardd = pytest.fixture(guards)
EXPORT = f"/{SERVICE}/Export"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


def send_grpc(
    address: Address, ca: Authority, client: tuple[str, str] | None = None, token: str | None = None
) -> grpc.StatusCode:
    """Sends one record over TLS; how that went."""
    pair = [Path(path).read_bytes() for path in reversed(client)] if client else [None, None]
    credentials = grpc.ssl_channel_credentials(ca.certificate.read_bytes(), *pair)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.secure_channel(str(address), credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            channel.unary_unary(EXPORT)(request(free(0)), timeout=20, metadata=metadata)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def send_http(
    address: Address, ca: Authority, client: tuple[str, str] | None = None, token: str | None = None
) -> int | None:
    """Likewise; the status, or None if there was no answer."""
    context = ssl.create_default_context(cafile=str(ca.certificate))
    if client:
        context.load_cert_chain(*client)
    headers = {"content-type": PROTOBUF} | ({"authorization": f"Bearer {token}"} if token else {})
    try:
        url = f"https://{address}/v1/traces"
        return httpx.post(
            url, content=request(free(0)), headers=headers, verify=context, timeout=30, trust_env=False
        ).status_code
    except httpx.TransportError:
        return None


@contextmanager
def both(sink: RecordingSink, **options: object) -> Iterator[tuple[Address, Address, ReceiverCounts, ReceiverCounts]]:
    counts = ReceiverCounts()
    with over_grpc(sink, counts=counts, **options) as receiver, over_http(sink, **options) as http:
        yield receiver.address, http.receiver.address, counts, http.counts


def test_tls(authority: Authority, stranger: Authority) -> None:
    sink = RecordingSink()
    with both(sink, certificates=authority.server()) as (over_2, over_1, _, counts):
        assert send_grpc(over_2, authority) is grpc.StatusCode.OK
        assert send_http(over_1, authority) == 200
        assert send_grpc(over_2, stranger) is grpc.StatusCode.UNAVAILABLE
        assert send_http(over_1, stranger) is None
        with socket.create_connection((over_1.host, over_1.port), timeout=30) as raw:
            raw.sendall(b"POST /v1/traces HTTP/1.1\r\n\r\n")
            until(lambda: counts.refused["tls"] == 2)
        with grpc.insecure_channel(str(over_2)) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(EXPORT)(request(free(0)), timeout=20)
    assert len(sink.records) == 2


def test_old_tls_is_not_spoken(authority: Authority) -> None:
    with over_http(RecordingSink(), certificates=authority.server()) as http:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        address = http.receiver.address
        with (
            socket.create_connection((address.host, address.port), timeout=30) as raw,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            context.wrap_socket(raw, server_hostname="localhost")


def test_large_messages_over_tls(authority: Authority) -> None:
    sink = RecordingSink()
    with over_http(sink, certificates=authority.server()) as http:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with httpx.Client(verify=context, timeout=30, trust_env=False) as client:
            for seq in range(3):
                body = request(free(seq), {"name": "chat", "text": "x" * 3_000_000})
                url = f"https://{http.receiver.address}/v1/traces"
                assert client.post(url, content=body, headers={"content-type": PROTOBUF}).status_code == 200
                pieces = iter([body[:100], body[100:]])
                assert client.post(url, content=pieces, headers={"content-type": PROTOBUF}).status_code == 200
    assert len(sink.records) == 6


def test_client_certificates(authority: Authority, stranger: Authority) -> None:
    sink = RecordingSink()
    engine, forged = authority.issue("engine"), stranger.issue("engine")
    with both(sink, certificates=authority.server(mutual=True)) as (over_2, over_1, _, counts):
        assert send_grpc(over_2, authority, engine) is grpc.StatusCode.OK
        assert send_http(over_1, authority, engine) == 200
        for client in (None, forged):
            assert send_grpc(over_2, authority, client) is grpc.StatusCode.UNAVAILABLE
            assert send_http(over_1, authority, client) is None
        until(lambda: counts.refused["tls"] == 2)
    assert len(sink.records) == 2


def test_tokens_over_tls(authority: Authority) -> None:
    sink = RecordingSink()
    options = {"certificates": authority.server(), "tokens": Tokens(["swordfish"])}
    with both(sink, **options) as (over_2, over_1, grpc_counts, http_counts):
        for token, code, status in (
            (None, grpc.StatusCode.UNAUTHENTICATED, 401),
            ("sword", grpc.StatusCode.UNAUTHENTICATED, 401),
            ("swordfish", grpc.StatusCode.OK, 200),
        ):
            assert send_grpc(over_2, authority, token=token) is code
            assert send_http(over_1, authority, token=token) == status
    assert len(sink.records) == 2
    assert grpc_counts.refused["unauthenticated"] == http_counts.refused["unauthenticated"] == 2


def test_certificates_that_change_are_taken_up(
    authority: Authority, stranger: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = RecordingSink()
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))

    def install(issuer: Authority) -> None:
        for path, source in zip((cert, key), issuer.issue("server"), strict=True):
            shutil.copy(source, path)
        shutil.copy(issuer.certificate, ca)

    install(authority)
    options = {"certificates": Certificates(str(cert), str(key), str(ca))}
    old, new = authority.issue("engine"), stranger.issue("engine")
    with both(sink, **options) as (over_2, over_1, _, _counts):
        assert send_http(over_1, authority, old) == 200
        assert send_grpc(over_2, authority, old) is grpc.StatusCode.OK

        cert.write_text("-----BEGIN NONSENSE-----\n")
        assert send_http(over_1, authority, old) == 200, "the old ones stay in use"
        assert send_grpc(over_2, authority, old) is grpc.StatusCode.OK
        assert f"{cert} and {key}: are no certificate and its key" in capsys.readouterr().err

        install(stranger)
        assert send_http(over_1, stranger, new) == 200
        assert send_grpc(over_2, stranger, new) is grpc.StatusCode.OK
        assert send_http(over_1, stranger, old) is None, "the old CA counts no more"
        assert send_grpc(over_2, stranger, old) is grpc.StatusCode.UNAVAILABLE


def test_a_connection_that_is_open_outlives_its_certificate(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    for path, source in zip((cert, key), authority.issue("server"), strict=True):
        shutil.copy(source, path)
    with over_http(RecordingSink(), certificates=Certificates(cert, key)) as http:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with httpx.Client(verify=context, timeout=30, trust_env=False) as client:
            for _ in range(2):
                url = f"https://{http.receiver.address}/v1/traces"
                assert client.post(url, content=b"", headers={"content-type": PROTOBUF}).status_code == 200
                for path, source in zip((cert, key), stranger.issue("server"), strict=True):
                    shutil.copy(source, path)


def test_certificates_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("one")
    _, other = authority.issue("two")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(AccessError, match=r"none\.pem: No such file"):
        Certificates(str(tmp_path / "none.pem"), key)
    with pytest.raises(AccessError, match="are no certificate and its key"):
        Certificates(cert, other)
    with pytest.raises(AccessError, match=r"empty\.pem: holds no CA certificates"):
        Certificates(cert, key, str(empty))


def test_a_key_with_a_passphrase_does_not_ask_the_terminal(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.issue("server")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:x", "-out", str(locked)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    with pytest.raises(AccessError, match="are no certificate and its key"):
        Certificates(cert, str(locked))


def test_tokens_in_a_file_are_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(access, "CHECK_EVERY_S", 0)
    file = tmp_path / "tokens"
    file.write_text("# engines\nswordfish\n\n  seahorse\n")
    tokens = Tokens(["fixed"], str(file))

    def accepted() -> list[str]:
        tried = ("fixed", "swordfish", "seahorse", "urchin", "# engines", "")
        return [token for token in tried if tokens.accept(b"Bearer " + token.encode())]

    assert accepted() == ["fixed", "swordfish", "seahorse"]
    (tmp_path / "next").write_text("urchin\nswordfish\n")
    os.replace(tmp_path / "next", file)
    assert accepted() == ["fixed", "swordfish", "urchin"]
    file.write_text("\n")
    assert accepted() == ["fixed", "swordfish", "urchin"], "an empty file lets nobody in and keeps nobody out"
    file.unlink()
    assert accepted() == ["fixed", "swordfish", "urchin"]
    told = capsys.readouterr().err
    assert "is empty" in told
    assert "No such file" in told
    assert "urchin" not in told


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic x", b"swordfish", b"Bearer sword\xff"])
def test_what_shows_no_token(header: bytes | None) -> None:
    assert not Tokens(["swordfish"]).accept(header)


def test_a_socket_is_this_users_alone_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "run" / "http.sock"
    with over_http(RecordingSink(), f"unix:{path}") as http:
        assert http.post(b"").status_code == 200
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()
    with over_http(RecordingSink(), f"unix:{path}", uids=[os.geteuid(), 12345]) as http:
        assert http.post(b"").status_code == 200
        assert path.stat().st_mode & 0o777 == 0o666


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused() -> None:
    # Not tmp_path: no other user can reach into that.
    with TemporaryDirectory() as directory, over_http(RecordingSink(), f"unix:{directory}/sock", uids=[12345]) as http:
        os.chmod(directory, 0o755)

        def answer_to(uid: int) -> bytes:
            """What a process of that user is told."""
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                os.setresuid(uid, uid, uid)
                answer = b"?"
                try:
                    with socket.socket(socket.AF_UNIX) as raw:
                        raw.settimeout(30)
                        raw.connect(f"{directory}/sock")
                        raw.sendall(b"POST /v1/traces HTTP/1.1\r\ncontent-type: application/x-protobuf\r\n\r\n")
                        answer = raw.recv(12)
                except OSError:
                    answer = b""
                finally:
                    os.write(writing, answer or b"none")
                    os._exit(0)
            os.waitpid(child, 0)
            os.close(writing)
            with os.fdopen(reading, "rb") as pipe:
                return pipe.read()

        assert answer_to(12345) == b"HTTP/1.1 200"
        assert answer_to(0) == b"HTTP/1.1 200", "root always"
        assert answer_to(54321) == b"none"
        assert http.counts.refused["uid"] == 1


def test_a_guard_with_mutual_tls_and_tokens(
    guardd: Callable[..., Guardd], authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("server")
    tokens = tmp_path / "tokens"
    tokens.write_text("swordfish\n")
    guard = guardd(
        listen={
            "otlp_grpc": "127.0.0.1:0", "otlp_http": "127.0.0.1:0", "token_file": str(tokens), "tls_cert_file": cert,
            "tls_key_file": key, "tls_client_ca_file": str(authority.certificate),
        }
    )  # fmt: skip
    engine = authority.issue("engine")
    over_2, over_1 = Address.parse(guard.socket), Address.parse(guard.otlp_http)
    assert send_grpc(over_2, authority, engine, "swordfish") is grpc.StatusCode.OK
    assert send_http(over_1, authority, engine, "swordfish") == 200
    assert send_grpc(over_2, authority, engine) is grpc.StatusCode.UNAUTHENTICATED
    assert send_http(over_1, authority, engine) == 401
    assert send_http(over_1, authority, None, "swordfish") is None
    metrics = guard.metrics()
    for protocol in ("grpc", "http"):
        assert metrics[f'kvguard_export_calls_total{{protocol="{protocol}"}}'] == 1
        refused = f'kvguard_export_calls_refused_total{{protocol="{protocol}",reason="unauthenticated"}}'
        assert metrics[refused] == 1


def test_a_guard_without_its_certificate_ends_with_2(guardd: Callable[..., Guardd], tmp_path: Path) -> None:
    guard = guardd(ready=False, listen={"tls_cert_file": f"{tmp_path}/c", "tls_key_file": f"{tmp_path}/k"})
    assert f"listen.tls_cert_file, tls_key_file, tls_client_ca_file: {tmp_path}/c: No such file" in guard.stderr()
    assert guard.process.returncode == 2
