"""A request's body, bounded in size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from engine.api.errors import ApiError

MAX_BYTES = 4 * 1024 * 1024
TIMEOUT_S = 30.0


async def read_body(request: Request) -> bytes:
    """All of the body.

    Raises:
        ApiError: 413 it is too large, 408 it does not come.
        starlette.requests.ClientDisconnect: The client has gone.
    """
    declared = request.headers.get("content-length", "0")
    if len(declared) > 15 or int(declared) > MAX_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BYTES:
                    raise _too_large()
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408,
            "body_timeout",
            f"The body was not sent within {TIMEOUT_S:.0f} s.",
            headers={"connection": "close"},
        ) from None
    return b"".join(parts)


def _too_large() -> ApiError:
    message = f"The body is larger than {MAX_BYTES} bytes."
    # What is still to come of it is not read, so the connection is of no more use.
    return ApiError(413, "body_too_large", message, headers={"connection": "close"})
