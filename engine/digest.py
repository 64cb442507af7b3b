"""Digests of pages: keyed, so that they say nothing of the contents to whoever reads records."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from torch import Tensor

_DIGEST_BYTES = 16


class PageDigester:
    """What both sides of a transfer compute from a page's bytes.

    A digest is BLAKE3 with a key of the tenant, over the request, the page's place in it and the bytes. Equal
    pages of two tenants, or of two requests, have different digests.

    Args:
        key: 32 bytes, the same in all workers.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    def pages(self, data: Tensor, tenant: str, request: str, pages: Sequence[int], first: int = 0) -> list[str]:
        """Digests of a request's pages, lower-case hexadecimal, 16 bytes each.

        Args:
            data: [pages of the pool, page bytes] uint8.
            tenant: Whose.
            request: Whose.
            pages: Which pages, in order.
            first: The place in the request of the first one.
        """
        tenant_key = blake3(b"page digest\0" + tenant.encode(), key=self._key).digest()
        head = blake3(len(request.encode()).to_bytes(8, "little") + request.encode(), key=tenant_key)
        digests = []
        for place, page in enumerate(pages, first):
            hasher = head.copy()
            hasher.update(place.to_bytes(8, "little"))
            hasher.update(data[page].numpy().data)
            digests.append(hasher.hexdigest(length=_DIGEST_BYTES))
        return digests

    def authenticator(self, challenge: bytes) -> bytes:
        """32 bytes that prove to whoever sent the challenge that the key is known."""
        return blake3(b"kv transport\0" + challenge, key=self._key).digest()
