"""A request that is not answered, in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

KILLED = "kv_guard_killed"
"""The code of a request that the guard stopped; support looks up the incident id beside it."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "request_aborted",
}
_INCIDENT = re.compile(r"[A-Za-z0-9._:-]{1,24}\Z")


def is_incident(text: str) -> bool:
    """Whether the text can be an incident id; others are not let into headers."""
    return _INCIDENT.match(text) is not None


class ApiError(Exception):
    """An error that a client sees.

    Args:
        status: HTTP status; 499 for a request that somebody aborted, which nobody should retry.
        code: What programs look at.
        message: What people read; it names what is wrong and holds no text of prompts or outputs.
        param: The field that is wrong.
        incident: The guard's incident that explains it.
        headers: Further headers.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        incident: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.incident = incident if incident and is_incident(incident) else None
        self.headers = dict(headers or {})

    @classmethod
    def killed(cls, incident: str | None) -> ApiError:
        """The guard stopped the request. Clients are told not to try again by themselves."""
        known = incident if incident and is_incident(incident) else None
        named = f"incident {known}" if known else "no incident was named"
        message = f"The request was stopped to protect other tenants' data ({named}). Ask support about it."
        return cls(503, KILLED, message, incident=known, headers={"x-should-retry": "false"})

    def body(self) -> bytes:
        """The error object as JSON."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        if self.incident:
            error["incident"] = self.incident
        return msgspec.json.encode({"error": error})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The error as a whole HTTP response."""
        together = {**self.headers, **(headers or {})}
        if self.incident:
            together["x-kvguard-incident"] = self.incident
        return Response(self.body(), self.status, together, media_type="application/json")

    def event(self) -> bytes:
        """The error as the last server-sent event of a stream that had begun."""
        return b"event: error\ndata: " + self.body() + b"\n\n"
