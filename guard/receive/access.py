"""Who may send: bearer tokens and certificates, read from files and read anew when these change.

A changed file that cannot be used (half written, a key that is not the certificate's) is logged and changes
nothing: what was valid before stays in force until the files are right again.
"""

from __future__ import annotations

import hmac
import os
import ssl
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from guard.log import log

CHECK_EVERY_S = 1.0
"""How often a file of tokens is looked at, at most; certificates are looked at for every new connection."""


class AccessError(ValueError):
    """Tokens or certificates that cannot be used; the message names the file and what is wrong."""


class Tokens:
    """The bearer tokens that are accepted. Any thread may ask."""

    def __init__(self, fixed: Iterable[str] = (), file: str | None = None) -> None:
        """Args:
            fixed: Tokens that do not change.
            file: Holds one more a line; lines that begin with ``#`` are comments.

        Raises:
            AccessError: The file cannot be read or holds none.
        """
        self._fixed = [token.encode() for token in fixed]
        self._file = file
        self._tokens = list(self._fixed)
        self._lock = threading.Lock()
        self._signature = _signature(file)
        self._next_check = 0.0
        if file is not None:
            self._tokens += _read_tokens(file)

    def accept(self, authorization: bytes | None) -> bool:
        """Whether the header's value, ``Bearer TOKEN``, shows one of them."""
        self._refresh()
        if authorization is None:
            return False
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Every one is compared, so that the time taken tells nothing of which.
        return sum(hmac.compare_digest(given.strip(), token) for token in self._tokens) > 0

    def _refresh(self) -> None:
        if self._file is None or time.monotonic() < self._next_check:
            return
        with self._lock:
            self._next_check = time.monotonic() + CHECK_EVERY_S
            signature = _signature(self._file)
            if signature == self._signature:
                return
            self._signature = signature
            try:
                self._tokens = self._fixed + _read_tokens(self._file)
            except AccessError as error:
                log("error", "tokens cannot be read anew; the old ones stay valid", error=str(error))
            else:
                log("info", "tokens read anew", file=self._file, tokens=len(self._tokens))


class Loaded(NamedTuple):
    """Certificates as they were read."""

    context: ssl.SSLContext
    certificate: bytes
    key: bytes
    client_ca: bytes | None


class Certificates:
    """A server's certificate and key, and the CA that clients' certificates must come from. Any thread may ask."""

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str | None = None) -> None:
        """Args:
            cert_file: The server's certificate chain, PEM.
            key_file: Its key, PEM, without a passphrase.
            client_ca_file: Clients must show a certificate signed by one of these (mTLS); None asks for none.

        Raises:
            AccessError: A file cannot be read, or they do not belong together.
        """
        self.client_ca_file = client_ca_file
        self._files = (cert_file, key_file, client_ca_file)
        self._lock = threading.Lock()
        self._signature = self._signatures()
        self._loaded = self._load()

    def current(self) -> Loaded:
        """Those to use for a new connection."""
        with self._lock:
            signature = self._signatures()
            if signature != self._signature:
                try:
                    loaded = self._load()
                    # Of files that changed while they were read, the next connection decides.
                    if self._signatures() == signature:
                        self._loaded, self._signature = loaded, signature
                        log("info", "certificates read anew", file=self._files[0])
                except AccessError as error:
                    self._signature = signature
                    log("error", "certificates cannot be read anew; the old ones stay in use", error=str(error))
            return self._loaded

    def _signatures(self) -> tuple[object, ...]:
        return tuple(map(_signature, self._files))

    def _load(self) -> Loaded:
        cert_file, key_file, client_ca_file = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        certificate, key = _read(cert_file), _read(key_file)
        client_ca = None if client_ca_file is None else _read(client_ca_file)
        try:
            # The password keeps OpenSSL from asking the terminal for one.
            context.load_cert_chain(cert_file, key_file, password="")
        except (OSError, ValueError) as error:
            raise AccessError(f"{cert_file} and {key_file}: are no certificate and its key ({_why(error)})") from None
        if client_ca is not None:
            try:
                context.load_verify_locations(cadata=client_ca.decode("ascii"))
            except (OSError, ValueError) as error:
                raise AccessError(f"{client_ca_file}: holds no CA certificates ({_why(error)})") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return Loaded(context, certificate, key, client_ca)


def _signature(path: str | None) -> tuple[int, ...] | None:
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise AccessError(f"{path}: {error.strerror or error}") from None


def _read_tokens(path: str) -> list[bytes]:
    lines = [line.strip() for line in _read(path).splitlines()]
    tokens = [line for line in lines if line and not line.startswith(b"#")]
    if not tokens:
        raise AccessError(f"{path}: is empty")
    return tokens


def _why(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
