"""Where spans that are no records are forwarded to."""

from __future__ import annotations

from typing import NamedTuple, Self
from urllib.parse import urlsplit

from guard.receive.address import Address


class Target(NamedTuple):
    """Where to: ``grpc://HOST:PORT``, ``grpcs://HOST:PORT``, ``unix:PATH`` (gRPC), ``http://…`` or ``https://…``."""

    protocol: str
    """``grpc`` or ``http``."""
    where: str
    """A gRPC target or a URL."""
    tls: bool
    address: Address

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one. A URL without a path means ``/v1/traces``.

        Raises:
            ValueError: It is none.
        """
        if text.startswith("unix:"):
            address = Address.parse(text)
            return cls("grpc", str(address), False, address)
        scheme, colon, rest = text.partition("://")
        if not colon or scheme not in ("grpc", "grpcs", "http", "https"):
            raise ValueError(f"{text!r} is none of grpc://HOST:PORT, grpcs://HOST:PORT, unix:PATH, http://HOST:PORT")
        if scheme.startswith("grpc"):
            address = Address.parse(rest)
            return cls("grpc", str(address), scheme == "grpcs", address)
        url = urlsplit(text)
        if not url.hostname or url.username is not None:
            raise ValueError(f"{text!r} is not {scheme}://HOST:PORT/v1/traces")
        path = url.path if url.path not in ("", "/") else "/v1/traces"
        port = url.port or (443 if scheme == "https" else 80)
        return cls("http", url._replace(path=path).geturl(), scheme == "https", Address(url.hostname, port, ""))
