"""Who is asking: API keys and the tenants they stand for."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

from starlette.requests import Request

from engine.api.errors import ApiError


class Caller:
    """Somebody who has shown a key that is known."""

    def __init__(self, tenant: str | None) -> None:
        self.tenant = tenant
        """None: the administrator."""

    @property
    def is_admin(self) -> bool:
        """Whether the key was the admin key."""
        return self.tenant is None


class KeyRing:
    """The keys that are known.

    A key is looked up by a keyed hash of it (RFC 7693) whose key never leaves this process: a guess's hash has
    nothing to do with the hashes of guesses near it, so how long a look-up takes tells nothing about the key.

    Args:
        tenants: API key → tenant.
        admin: The admin key; empty: there is none.
    """

    def __init__(self, tenants: Mapping[str, str], admin: str = "") -> None:
        self._secret = secrets.token_bytes(32)
        self._callers = {self._digest(key.encode()): Caller(tenant) for key, tenant in tenants.items()}
        if admin:
            self._callers[self._digest(admin.encode())] = Caller(None)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()

    def caller(self, request: Request) -> Caller:
        """Who sent the request.

        Raises:
            ApiError: 401, no key or none that is known.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("No API key was given: send it as `Authorization: Bearer KEY`.")
        # Headers arrive as Latin-1; encoding them back gives the bytes that were sent.
        digest = self._digest(key.strip().encode("latin-1"))
        caller = self._callers.get(digest)
        if caller is None:
            raise _unauthorized("The API key is not known.")
        return caller

    def tenant(self, request: Request) -> str:
        """The tenant whose request it is.

        Raises:
            ApiError: 401, no key or none that is known; 403, the admin key, which belongs to no tenant.
        """
        caller = self.caller(request)
        if caller.tenant is None:
            raise ApiError(403, "tenant_key_required", "The admin key generates nothing: use a tenant's key.")
        return caller.tenant


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
