"""Digests of pages in torch tensors: in the native core where these lie in the CPU's memory, else on the GPU.

`hooks.digest` has the keys and the seals, ``guard/native/include/kvguard/digest.h`` what a digest is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.digest import HashTensors, tobytes
from hooks.digest import Digester

_TENANTS = 256
"""Whose keys are kept on a device, 10 KiB each."""


class PageDigester:
    """What both sides of a transfer compute from a page's bytes. Thread-safe.

    A digest is bound to tenant, request, the page's place in it, generation and length, and sealed for one transfer:
    whoever does not have the key learns nothing from it, not even that two pages are equal.

    Args:
        key: 32 bytes, the same in all workers.
    """

    def __init__(self, key: bytes) -> None:
        self._digester = Digester(key)
        self._tensors = functools.lru_cache(_TENANTS)(self._make_tensors)

    def pages(
        self,
        data: Tensor,
        tenant: str,
        request: str,
        pages: Sequence[int],
        first: int = 0,
        *,
        generations: Sequence[int],
        nonce: bytes,
    ) -> list[str]:
        """Digests of a request's pages, lower-case hexadecimal, 16 bytes each.

        Args:
            data: [pages of the pool, page bytes] uint8.
            tenant: Whose.
            request: Whose.
            pages: Which pages, in order.
            first: The place in the request of the first one.
            generations: Of the destination pages, in the same order.
            nonce: 16 bytes, the transfer's.

        Raises:
            ValueError: Pages, generations and nonce do not fit together; the message names which.
        """
        digester = self._digester
        if self._natively(data):
            view = data.numpy().data
            return digester.pages([view], tenant, request, pages, first, generations=generations, nonce=nonce)
        from engine.kernels.digest_triton import page_hashes

        hashes = page_hashes([data], pages, self._tensors(tenant, data.device))
        return digester.seal(
            tobytes(hashes), tenant, request, first,
            generations=generations, nonce=nonce, piece_bytes=data.shape[1],
        )  # fmt: skip

    def authenticator(self, challenge: bytes) -> bytes:
        """32 bytes that prove to whoever sent the challenge that the key is known."""
        return self._digester.authenticator(challenge)

    @staticmethod
    def _natively(data: Tensor) -> bool:
        return data.device.type == "cpu"

    def _make_tensors(self, tenant: str, device: torch.device) -> HashTensors:
        return HashTensors.of(self._digester.tenant(tenant).material, device)
