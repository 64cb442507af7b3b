from __future__ import annotations

from pathlib import Path

import pytest

from guard.config import Config, ConfigError, load
from guard.findings import Action, Kind
from guard.receive.address import Address


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> Path:
        path = tmp_path / "guard.yaml"
        path.write_text(text)
        return path

    return write


def shown(config: Config, token: bytes) -> bool:
    tokens = config.listen.tokens()
    return tokens is not None and tokens.accept(b"Bearer " + token)


def test_defaults() -> None:
    config = load(environ={})
    assert config == Config()
    assert config.mode == "monitor"
    assert config.listen.otlp_grpc == "127.0.0.1:4317"
    assert config.listen.otlp_http == "127.0.0.1:4318"
    assert config.listen.http == "127.0.0.1:9464"
    assert config.board.path == "/dev/shm/kvguard/board"
    assert config.ledger.reorder_window_ms == 200
    assert config.ledger.leak_grace_s == 30
    assert config.engine.abort_url is None


def test_a_whole_file(write) -> None:  # type: ignore[no-untyped-def]
    config = load(
        write(
            """
mode: enforce
listen: {otlp_grpc: "unix:/run/kvguard/otlp.sock", http: "[::1]:9000", token: "0123"}
board: {path: /tmp/board, requests: 1024}
incidents: {path: /tmp/incidents.db, keep: 10}
engine: {abort_url: "http://127.0.0.1:8000/abort_request", admin_key: secret}
ledger: {reorder_window_ms: 50, leak_grace_s: 1}
policy:
  prefix_sharing: permit
  actions: {foreign-read: alert}
"""
        ),
        environ={},
    )
    assert shown(config, b"0123")
    assert config.engine.key_text() == "secret"
    assert config.ledger.reorder_window_ms == 50
    assert config.policy.action(Kind.FOREIGN_READ) is Action.ALERT
    assert "secret" not in repr(config)
    assert "0123" not in repr(config)


def test_an_empty_file_is_the_defaults(write) -> None:  # type: ignore[no-untyped-def]
    assert load(write(""), environ={}) == Config()
    assert load(write("# nothing\n"), environ={}) == Config()


def test_environment_over_file_and_set_over_both(write) -> None:  # type: ignore[no-untyped-def]
    path = write("mode: monitor\nledger: {leak_grace_s: 1, reorder_window_ms: 10}\n")
    environ = {
        "KVGUARD_MODE": "enforce",
        "KVGUARD_LEDGER__LEAK_GRACE_S": "2",
        "KVGUARD_LISTEN__TOKEN": "0012",
        "KVGUARD_POLICY__ACTIONS": "{page-leak: observe}",
        "KVGUARD_SOMEBODY_ELSES": "x",
        "MODE": "nonsense",
    }
    config = load(path, environ=environ, settings=["ledger.leak_grace_s=3", "policy.actions.double-free=kill"])
    assert config.mode == "enforce"
    assert config.ledger.leak_grace_s == 3
    assert config.ledger.reorder_window_ms == 10
    assert shown(config, b"0012"), "a token that looks like a number stays as it is"
    assert config.policy.action(Kind.PAGE_LEAK) is Action.OBSERVE
    assert config.policy.action(Kind.DOUBLE_FREE) is Action.KILL
    assert load(path, environ={}, settings=["engine.abort_url=null"]).engine.abort_url is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mode: enforced\n", r"guard\.yaml:1: mode: Input should be 'monitor' or 'enforce'"),
        ("\nlisten:\n  prot: 4317\n", r"guard\.yaml:3: listen\.prot: there is no such field"),
        ("modes: x\n", r"guard\.yaml:1: modes: there is no such field"),
        (
            "listen:\n  http: 0.0.0.0:9464\n",
            r"guard\.yaml:2: listen\.http: other machines can reach 0\.0\.0\.0:9464.*insecure_bind",
        ),
        ("listen:\n  otlp_grpc: example.org:4317\n", r"listen\.otlp_grpc: other machines can reach.*tls_cert_file"),
        ("listen:\n  otlp_http: 0.0.0.0:4318\n", r"listen\.otlp_http: other machines can reach.*tls_cert_file"),
        (
            "listen: {otlp_http: '0.0.0.0:4318', tls_cert_file: c, tls_key_file: k}\n",
            r"listen\.otlp_http: .* nobody is asked who they are; give listen\.tls_client_ca_file or .*token_file",
        ),
        (
            "listen: {http: '0.0.0.0:9464', tls_cert_file: c, tls_key_file: k, token: t}\n",
            r"listen\.http: other machines can reach",
        ),
        ("listen: {tls_cert_file: c}\n", r"listen\.tls_cert_file: needs listen\.tls_key_file"),
        ("listen: {tls_key_file: k}\n", r"listen\.tls_key_file: needs listen\.tls_cert_file"),
        ("listen: {tls_client_ca_file: a}\n", r"listen\.tls_client_ca_file: needs listen\.tls_cert_file"),
        ("listen: {unknown_spans: forward}\n", r"listen\.unknown_spans: is forward; say where to.*forward_to"),
        ("listen: {unknown_spans: drop}\n", r"listen\.unknown_spans: "),
        ("listen: {forward_to: 'http://h'}\n", r"listen\.forward_to: does nothing unless listen\.unknown_spans"),
        ("listen: {unknown_spans: forward, forward_to: 'h:1'}\n", r"listen\.forward_to: 'h:1' is none of grpc://"),
        ("listen: {unknown_spans: forward, forward_to: 'grpc://h'}\n", r"listen\.forward_to: 'h' is neither"),
        ("listen: {unknown_spans: forward, forward_to: 'http://u:p@h'}\n", r"listen\.forward_to: .* is not http://"),
        (
            "listen: {unknown_spans: forward, forward_to: 'http://127.0.0.1:4318/v1/traces'}\n",
            r"listen\.forward_to: 127\.0\.0\.1:4318 is this guard's own listen\.otlp_http",
        ),
        ("listen: {otlp_grpc: nowhere}\n", "neither unix:PATH nor HOST:PORT"),
        ("listen: {otlp_grpc: 'unix:relative'}\n", "must be absolute"),
        ("listen: {otlp_grpc: '127.0.0.1:99999'}\n", "neither unix:PATH nor HOST:PORT"),
        ("listen: {otlp_grpc: '::1:4317'}\n", "an IPv6 address is written"),
        (f"listen: {{otlp_grpc: 'unix:/{'x' * 120}'}}\n", "longer than 100 bytes"),
        ("listen: {http: 'unix:/tmp/x'}\n", r"listen\.http: .* needs? HOST:PORT|need HOST:PORT"),
        ("listen: 7\n", r"guard\.yaml:1: listen: "),
        ("board: {requests: 100}\n", r"guard\.yaml:1: board\.requests: 100 is not a power of two"),
        ("ledger: {reorder_window_ms: null}\n", r"ledger\.reorder_window_ms: only a replay"),
        ("ledger: {reorder_window_ms: -1}\n", r"ledger\.reorder_window_ms: "),
        ("policy:\n  actions:\n    foreign-reed: kill\n", r"guard\.yaml:3: policy\.actions\.foreign-reed"),
        ("policy:\n  actions:\n    foreign-read: maim\n", r"guard\.yaml:3: policy\.actions\.foreign-read"),
        ("engine: {abort_url: 'ftp://x'}\n", r"engine\.abort_url: 'ftp://x' is not http://HOST:PORT/PATH"),
        ("engine: {abort_url: 'http:///abort'}\n", r"engine\.abort_url: .* is not http"),
        ("engine: {abort_url: 'http://h:99999/abort'}\n", r"engine\.abort_url: Port out of range"),
        ("engine: {abort_url: 'http://[h/abort'}\n", r"engine\.abort_url: Invalid IPv6 URL"),
        ("mode: monitor\nmode: enforce\n", r"guard\.yaml:2: mode is given twice, first on line 1"),
        ("mode: [\n", r"guard\.yaml:2: is not YAML"),
        ("- mode\n", r"guard\.yaml:1: is not a mapping"),
        ("mode: !!python/object:os.system x\n", "is not YAML"),
        ("a" * 10 + ": " + "[" * 3000, "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_by_field_and_line(write, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        load(write(text), environ={})


def test_bad_variables_and_options_are_named() -> None:
    with pytest.raises(ConfigError, match="KVGUARD_MODE: mode: Input should be"):
        load(environ={"KVGUARD_MODE": "x"})
    with pytest.raises(ConfigError, match=r"--set board\.requests: board\.requests: 9 is not a power"):
        load(environ={}, settings=["board.requests=9"])
    with pytest.raises(ConfigError, match=r"is not field\.field=value"):
        load(environ={}, settings=["mode"])
    with pytest.raises(ConfigError, match="mode is not a section"):
        load(environ={"KVGUARD_MODE": "enforce"}, settings=["mode.x=1"])
    with pytest.raises(ConfigError, match="KVGUARD_POLICY: is not YAML"):
        load(environ={"KVGUARD_POLICY": "{"})


def test_every_error_is_told_at_once(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        load(write("mode: x\nboard: {streams: 9}\n"), environ={})
    assert len(str(error.value).splitlines()) == 2


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load(tmp_path / "none.yaml", environ={})
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path, environ={})
    (tmp_path / "latin.yaml").write_bytes(b"mode: \xff\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml"):
        load(tmp_path / "latin.yaml", environ={})


def test_secrets_in_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("swordfish\n")
    config = load(environ={}, settings=[f"listen.token_file={file}", f"engine.admin_key_file={file}"])
    assert shown(config, b"swordfish")
    assert config.engine.key_text() == "swordfish"
    assert config.listen.metrics_token_text() is None
    file.write_text(" \n")
    with pytest.raises(ConfigError, match=r"listen\.token_file .* is empty"):
        config.listen.tokens()
    file.unlink()
    with pytest.raises(ConfigError, match=r"engine\.admin_key_file .* No such file"):
        config.engine.key_text()


def test_an_error_never_shows_a_secret(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        load(write("listen: {token: [swordfish], metrics_token: ''}\nmode: x\n"), environ={})
    assert "swordfish" not in str(error.value)


def test_insecure_bind_is_the_operators_word() -> None:
    config = load(environ={}, settings=["listen.otlp_grpc=0.0.0.0:4317", "listen.insecure_bind=true"])
    assert config.listen.otlp_grpc == "0.0.0.0:4317"
    load(environ={}, settings=[
        "listen.otlp_http=0.0.0.0:4318", "listen.tls_cert_file=c", "listen.tls_key_file=k", "listen.token_file=t",
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("text", "address", "local"),
    [
        ("unix:/run/x.sock", Address("", 0, "/run/x.sock"), True),
        ("unix:///run/x.sock", Address("", 0, "/run/x.sock"), True),
        ("127.0.0.1:4317", Address("127.0.0.1", 4317, ""), True),
        ("127.9.9.9:0", Address("127.9.9.9", 0, ""), True),
        ("localhost:1", Address("localhost", 1, ""), True),
        ("[::1]:4317", Address("::1", 4317, ""), True),
        ("[::]:4317", Address("::", 4317, ""), False),
        ("10.0.0.1:4317", Address("10.0.0.1", 4317, ""), False),
        ("guard.example:4317", Address("guard.example", 4317, ""), False),
    ],
)
def test_addresses(text: str, address: Address, local: bool) -> None:
    parsed = Address.parse(text)
    assert parsed == address
    assert parsed.local is local
    assert Address.parse(str(parsed)) == address
