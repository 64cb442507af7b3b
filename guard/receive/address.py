"""Where a listener listens: a Unix socket or a TCP address, and whether only this machine can reach it."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from typing import Any, NamedTuple, Self


class BindError(RuntimeError):
    """An address that cannot be listened on; the message names it and why."""


class Address(NamedTuple):
    """``unix:PATH`` or ``HOST:PORT``."""

    host: str
    """Empty for a Unix socket."""
    port: int
    path: str
    """Empty for TCP."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``unix:/run/kvguard/otlp.sock``, ``127.0.0.1:4317``, ``localhost:4317`` or ``[::1]:4317``.

        Raises:
            ValueError: It is neither.
        """
        scheme, colon, path = text.partition(":")
        if scheme == "unix" and colon:
            path = path.removeprefix("//") if path.startswith("///") else path
            if not os.path.isabs(path):
                raise ValueError(f"{text!r}: the socket's path must be absolute, unix:/run/kvguard/otlp.sock")
            if len(os.fsencode(path)) > 100:
                raise ValueError(f"{text!r}: the socket's path is longer than 100 bytes, which Unix refuses")
            return cls("", 0, path)
        host, colon, port = text.rpartition(":")
        if not colon or not host or not (port.isascii() and port.isdecimal()) or int(port[:6]) > 65535:
            raise ValueError(f"{text!r} is neither unix:PATH nor HOST:PORT")
        if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
            raise ValueError(f"{text!r}: an IPv6 address is written [::1]:4317")
        return cls(host.strip("[]"), int(port), "")

    @property
    def local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def prepare_socket_path(path: str) -> None:
    """Makes room for a Unix socket: its directory, mode 0700 if it is made, and no dead socket in the way.

    Raises:
        BindError: Somebody listens there, or what is there is no socket, or others may write the directory.
    """
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        mode = os.stat(directory).st_mode
        if mode & 0o022 and not mode & stat.S_ISVTX:
            raise BindError(f"unix:{path}: others may write the directory {directory}; make it mode 0700")
        if not os.path.lexists(path):
            return
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise BindError(f"unix:{path}: there is a file that is no socket; remove it or choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                os.unlink(path)
            else:
                raise BindError(f"unix:{path}: another process listens there")
    except OSError as error:
        raise BindError(f"unix:{path}: {error.strerror or error}") from error


def bind(address: Address, *, shared: bool = False) -> socket.socket:
    """Binds and listens.

    Args:
        address: Where.
        shared: Whether other users may connect to a Unix socket. It has mode 0600 otherwise.

    Returns:
        The listening socket, which does not block.

    Raises:
        BindError: The address is taken or cannot be had.
    """
    if address.path:
        prepare_socket_path(address.path)
        family: socket.AddressFamily = socket.AF_UNIX
        where: Any = address.path
    else:
        try:
            family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise BindError(f"{address}: cannot be bound: {error.strerror}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    before = os.umask(0o111 if shared else 0o177) if address.path else None
    try:
        if not address.path:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        taken = "; is another process listening there?" if error.errno == errno.EADDRINUSE else ""
        raise BindError(f"{address}: cannot be bound: {error.strerror}{taken}") from error
    finally:
        if before is not None:
            os.umask(before)
    return listener
