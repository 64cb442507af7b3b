"""``/livez``, ``/readyz`` and ``/metrics`` over plain HTTP, for probes and Prometheus."""

from __future__ import annotations

import hmac
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from guard.receive.address import Address, BindError


class Page(NamedTuple):
    """One answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Handler = Callable[[Mapping[str, str]], Page]
"""Makes a page from the request's headers (names in lower case)."""


class HealthServer:
    """A small HTTP server of fixed paths.

    Attributes:
        address: Where it listens, the port resolved.
        pages: Path → what makes its page.
    """

    pages: dict[str, Handler]

    def __init__(self, address: Address, *, token: str | None = None) -> None:
        """Binds at once; `start` serves what is in `pages`.

        Args:
            address: Where; port 0 takes a free one, see `address` afterwards.
            token: What a reader of ``/metrics`` must send as ``authorization: Bearer TOKEN``.

        Raises:
            BindError: The address is taken or cannot be had.
        """

        pages = self.pages = {}

        class Requests(BaseHTTPRequestHandler):
            timeout = 5  # a client that sends nothing must not keep a thread
            protocol_version = "HTTP/1.1"
            server_version = "guardd"
            sys_version = ""

            def do_GET(self) -> None:
                """Serves one of the pages."""
                path = self.path.partition("?")[0]
                handler = pages.get(path)
                headers = {name.lower(): value for name, value in self.headers.items()}
                if handler is None:
                    page = Page(404, f"there are {', '.join(sorted(pages))}\n".encode())
                elif path == "/metrics" and token is not None and not _shows(headers, token):
                    page = Page(401, b"authorization: Bearer TOKEN is missing or wrong\n")
                else:
                    page = handler(headers)
                self.send_response(page.status)
                self.send_header("content-type", page.content_type)
                self.send_header("content-length", str(len(page.body)))
                self.end_headers()
                self.wfile.write(page.body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes are not worth a line."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET

            def handle_error(self, request: object, client_address: object) -> None:
                """A reader that went away is no event."""

        try:
            self._server = Server((address.host, address.port), Requests)
        except OSError as error:
            raise BindError(f"listen.http {address}: {error.strerror or error}; choose another port") from error
        self.address = address._replace(port=self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True
        )

    def start(self) -> None:
        """Begins serving."""
        self._thread.start()

    def stop(self) -> None:
        """Ends."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


def _shows(headers: Mapping[str, str], token: str) -> bool:
    return hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {token}".encode())
