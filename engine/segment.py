"""The memory of a page pool: one shared mapping of KV pages and owner tags.

Layout, without gaps: the pages, each `page_bytes` long and a multiple of 8, then one tag a page of three
unsigned 64-bit words: tenant, request, generation. A page whose tag is all zeros belongs to nobody.

The worker that owns the pool creates the file and removes it; a sender on the same machine maps it to write
pages that the owner granted it. Whether a page may be written or read is not decided here.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.pages import write_pages

TAG_WORDS = 3
_TAG_BYTES = 8 * TAG_WORDS
_SHARED_MEMORY = Path("/dev/shm")


class SegmentError(RuntimeError):
    """A pool's memory cannot be made or mapped; the message names the path and what is wrong."""


class Segment:
    """One pool's memory; `create` and `open` map it from a file.

    Args:
        path: The file behind it.
        memory: [pages · (page_bytes + 24)] uint8 on any device, laid out as the module says.
        pages: Number of pages.
        page_bytes: Bytes a page.

    Attributes:
        path: The file behind it.
        pages: Number of pages.
        page_bytes: Bytes a page.
        data: [pages, page_bytes] uint8, the pages' bytes.
        tags: [pages, 3] int64, the owner tags (the bits of unsigned words).
        address: Where the mapping lies in this process; the pages come first, the tags follow.
        size: Bytes of the mapping.
    """

    def __init__(self, path: Path, memory: Tensor, pages: int, page_bytes: int) -> None:
        self.path = path
        self.pages = pages
        self.page_bytes = page_bytes
        size = pages * page_bytes
        self.data = memory[:size].view(pages, page_bytes)
        self.tags = memory[size:].view(torch.int64).view(pages, TAG_WORDS)
        self.address: int = self.data.data_ptr()
        self.size = memory.numel()
        # numpy's copy is one memcpy, and lets other threads run meanwhile; torch's takes twice as long for bytes.
        self._views = (self.data.numpy(), self.tags.numpy()) if memory.device.type == "cpu" else None

    @classmethod
    def create(cls, path: Path, pages: int, page_bytes: int) -> Self:
        """Makes the file (mode 0600, all zeros) and maps it.

        Raises:
            SegmentError: The sizes make no pool, or the memory is not to be had.
        """
        if pages < 1 or page_bytes < 8 or page_bytes % 8:
            raise SegmentError(f"{path}: {pages} pages of {page_bytes} bytes: at least 1, of a multiple of 8 bytes")
        size = pages * (page_bytes + _TAG_BYTES)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # Reserved now: a full tmpfs is an error here, not a SIGBUS in the middle of a forward pass.
                os.posix_fallocate(descriptor, 0, size)
                memory = mmap.mmap(descriptor, size)
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SegmentError(
                f"{path}: {size} bytes for {pages} pages: {error.strerror}; free memory or set fewer pages"
            ) from error
        return cls(path, torch.frombuffer(memory, dtype=torch.uint8), pages, page_bytes)

    @classmethod
    def open(cls, path: Path, page_bytes: int) -> Self:
        """Maps another worker's pool; its number of pages follows from the size.

        Raises:
            SegmentError: There is none, it is another user's or open to others, or the size does not fit pages of
                `page_bytes`: then the two workers run different models, dtypes or page sizes.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(f"{path}: {error.strerror}; has its worker ended?") from error
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise SegmentError(f"{path}: not a regular file that only this user may open")
            pages, rest = divmod(info.st_size, page_bytes + _TAG_BYTES)
            if not pages or rest:
                raise SegmentError(
                    f"{path}: {info.st_size} bytes are no pool of {page_bytes}-byte pages; "
                    "the workers must agree on model, dtype and page_tokens"
                )
            memory = mmap.mmap(descriptor, info.st_size)
        finally:
            os.close(descriptor)
        return cls(path, torch.frombuffer(memory, dtype=torch.uint8), pages, page_bytes)

    def put(self, first: int, data: Tensor, tags: NDArray[np.int64]) -> None:
        """Writes pages that follow one another and then their tags; while the bytes move they belong to nobody.

        Args:
            first: The first page.
            data: [pages, page_bytes] uint8, or one page's bytes.
            tags: [pages, 3] int64, or one page's tag.
        """
        data, tags = data.view(-1, self.page_bytes), tags.reshape(-1, TAG_WORDS)
        stop = first + len(data)
        if self._views is None:
            write_pages(self.data, self.tags, range(first, stop), data, torch.from_numpy(tags))
            return
        pages, owners = self._views
        owners[first:stop] = 0
        pages[first:stop] = data.numpy()
        owners[first:stop] = tags

    def unlink(self) -> None:
        """Removes the file; mappings stay readable until they go."""
        self.path.unlink(missing_ok=True)


def segment_path(run_dir: Path, worker: str, epoch: int) -> Path:
    """Where a worker's pool lives: in shared memory, under a name of this run directory and this start."""
    return _folder(run_dir) / f"{_stem(run_dir, worker)}{epoch}"


def remove_stale(run_dir: Path, worker: str) -> None:
    """Removes what earlier starts of this worker in this run directory left behind when they were killed."""
    stem = _stem(run_dir, worker)
    for path in _folder(run_dir).iterdir():
        if re.fullmatch(re.escape(stem) + r"\d+", path.name):
            path.unlink(missing_ok=True)


def _folder(run_dir: Path) -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else run_dir


def _stem(run_dir: Path, worker: str) -> str:
    return f"kvguard-{blake2b(os.fsencode(run_dir.resolve()), digest_size=6).hexdigest()}-{worker}-"
