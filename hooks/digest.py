"""Digests of pages that may leave the process: keyed, bound to what a page is for, sealed for one transfer.

``guard/native/include/kvguard/digest.h`` says what a digest is. Here are its keys and seals, and the digests of
pages in memory that Python can look at; `engine.digest` adds the torch tensors. Needs the native core and otherwise
the standard library alone: HMAC-SHA256 and BLAKE2b come from there, and HKDF is ten lines on top of the former, so that
an engine need not install a cryptography package for them.
"""

from __future__ import annotations

import functools
import hmac
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from guard.native._core import HashKey

__all__ = ["NONCE_BYTES", "Digester", "TenantKey", "hkdf_expand", "hkdf_extract"]

NONCE_BYTES = 16
SECRET_BYTES = 32
"""The least that a secret has."""
_SALT = b"kvguard page digest 1"
_HASH_KEY_BYTES, _SEALING_KEY_BYTES = 6176, 32
_HASH_BYTES = _DIGEST_BYTES = 16
_pack = struct.Struct("<4Q").pack
_SHA256_BYTES = 32
_TENANTS = 1024
"""Whose keys are kept."""


def hkdf_extract(salt: bytes, secret: bytes) -> bytes:
    """HKDF-Extract with SHA-256, RFC 5869, 2.2: a pseudorandom key of 32 bytes."""
    return hmac.digest(salt or bytes(_SHA256_BYTES), secret, "sha256")


def hkdf_expand(key: bytes, info: bytes, count: int) -> bytes:
    """HKDF-Expand with SHA-256, RFC 5869, 2.3: `count` bytes of keys.

    Raises:
        ValueError: More than 8160 bytes are asked for.
    """
    if not 0 <= count <= 255 * _SHA256_BYTES:
        raise ValueError(f"HKDF gives 0 to {255 * _SHA256_BYTES} bytes, not {count}")
    out, block = bytearray(), b""
    for number in range(1, -(-count // _SHA256_BYTES) + 1):
        block = hmac.digest(key, block + info + bytes([number]), "sha256")
        out += block
    return bytes(out[:count])


@dataclass(frozen=True, slots=True, eq=False)
class TenantKey:
    """A tenant's keys; nothing of them is printed."""

    material: bytes = field(repr=False)
    """6176 bytes: the key of the hash, for those that compute it elsewhere (`engine.kernels.digest`)."""
    sealing: bytes = field(repr=False)
    """32 bytes."""
    hash: HashKey = field(repr=False)
    """`material` ready for use by the native core."""


class Digester:
    """What both sides of a transfer compute from their pages. Thread-safe; hashing lets other threads run.

    Args:
        secret: At least 32 bytes, the same in all workers. The guard, which only compares, does without.

    Raises:
        ValueError: The secret is too short.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"digest key: at least {SECRET_BYTES} bytes are needed, not {len(secret)}")
        self._root = hkdf_extract(_SALT, secret)
        self._transport = hkdf_expand(self._root, b"transport\0", _SHA256_BYTES)
        self.tenant = functools.lru_cache(_TENANTS)(self._tenant)
        """A tenant's keys, by its id."""

    def pages(
        self,
        pools: Sequence[memoryview],
        tenant: str,
        request: str,
        pages: Sequence[int],
        first: int = 0,
        *,
        generations: Sequence[int],
        nonce: bytes,
        layers: int = 1,
    ) -> list[str]:
        """Digests of a request's pages, computed where they lie.

        Args:
            pools: What the pages are in: one view [pages, ...] of any item type, or one for each piece of a page (say
                each layer's, or each layer's keys and values) in order. All bytes of a page in a view are behind each
                other; there may be gaps between pages.
            tenant: Whose.
            request: Whose.
            pages: Which pages of the pools, in order.
            first: The place in the request of the first one.
            generations: Of the destination pages, in the same order.
            nonce: 16 bytes, the transfer's.
            layers: Into how many pieces a page in a view is cut. A pool of whole pages with `layers` n gives what
                n pools of a layer each give.

        Returns:
            32 lower-case hexadecimal digits a page.

        Raises:
            ValueError: Pools, pages, generations and nonce do not fit together; the message names which.
        """
        sizes = {_page_bytes(pool) for pool in pools}
        if len(sizes) != 1:
            raise ValueError(f"pools: one or more are needed, all of the same bytes a page, not of {sorted(sizes)}")
        hashes = self.tenant(tenant).hash.pages(pools, pages, layers)
        return self.seal(
            hashes, tenant, request, first,
            generations=generations, nonce=nonce, piece_bytes=sizes.pop() // layers, pieces=layers * len(pools),
        )  # fmt: skip

    def seal(
        self,
        hashes: Sequence[bytes],
        tenant: str,
        request: str,
        first: int = 0,
        *,
        generations: Sequence[int],
        nonce: bytes,
        piece_bytes: int,
        pieces: int = 1,
    ) -> list[str]:
        """Digests from the pages' hashes, 16 bytes each; see `pages`.

        Raises:
            ValueError: Hashes, generations and nonce do not fit together, or a number is below 0 or above 2⁶⁴ - 1.
        """
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"nonce: {NONCE_BYTES} bytes are needed, not {len(nonce)}")
        if len(generations) != len(hashes):
            raise ValueError(f"generations: one a page is needed, not {len(generations)} for {len(hashes)}")
        if any(len(hash_) != _HASH_BYTES for hash_ in hashes):
            raise ValueError(f"hashes: {_HASH_BYTES} bytes each are needed")
        key = hmac.digest(self.tenant(tenant).sealing, nonce + request.encode(), "sha256")
        try:
            return [
                blake2b(
                    _pack(place, generation, piece_bytes, pieces) + hash_, key=key, digest_size=_DIGEST_BYTES
                ).hexdigest()
                for place, (generation, hash_) in enumerate(zip(generations, hashes, strict=True), first)
            ]
        except struct.error as error:
            raise ValueError(f"place, generations, piece_bytes and pieces: {error}") from error

    def authenticator(self, challenge: bytes) -> bytes:
        """32 bytes that prove to whoever sent the challenge that the secret is known."""
        return hmac.digest(self._transport, challenge, "sha256")

    def _tenant(self, tenant: str) -> TenantKey:
        keys = hkdf_expand(self._root, b"tenant\0" + tenant.encode(), _HASH_KEY_BYTES + _SEALING_KEY_BYTES)
        material = keys[:_HASH_KEY_BYTES]
        return TenantKey(material, keys[_HASH_KEY_BYTES:], HashKey(material))


def _page_bytes(pool: memoryview) -> int:
    return pool.itemsize * math.prod((pool.shape or ())[1:])
