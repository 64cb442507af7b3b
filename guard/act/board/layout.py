"""The bytes of the verdict board, version 1.

All words are unsigned 64-bit in the machine's byte order and 8-byte aligned, and each is
stored whole; ``seq`` is a signed 64-bit word.

======  =====  ===============================================================================
offset  bytes  header (4096 bytes)
======  =====  ===============================================================================
0       8      magic, the ASCII characters ``KVGBOARD``
8       8      version, 1
16      8      request rows R, a power of two
24      8      stream rows S, a power of two
32      8      created: CLOCK_REALTIME in ns
40      8      writer's process id
48      8      heartbeat: CLOCK_MONOTONIC in ns, stored after each round of the ledger
56      8      closed: 1 when this file gets no more verdicts (guard stopped, or a newer file took the path)
64      8      saturated: number of verdicts that found no row; while it is not 0 the board is not alive
======  =====  ===============================================================================

From 4096 on R request rows, then S stream rows, 64 bytes each:

======  =====  =======================================  =======================================
offset  bytes  request row                              stream row
======  =====  =======================================  =======================================
0       8      version; odd while the row is written    same
8       16     BLAKE2b-128 of the request id (UTF-8)    BLAKE2b-128 of the stream id
24      8      0 never used, 1 cleared, 3 quarantine,   0 never used, 1 cleared, 2 live
               4 kill; what is more counts as kill
32      8      set: CLOCK_REALTIME in ns                epoch
40      8      incident id, ASCII, 24 bytes             seq: every record up to it is judged
48      16     with zeros behind                        0
======  =====  =======================================  =======================================

A row's place is the first eight bytes of the digest (as a word) modulo the number of rows, or the next rows
after it (linear probing). A search ends at a row that was never used. A request without a row is allowed, so
the board holds only requests that something was found about. Rows never move; a cleared row goes back to
*never used* only where no live row's search passes over it.

A reader copies a row between two reads of its version and tries again if they differ or are odd. The writer stores
with release semantics: what it wrote before a row's even version, or before the heartbeat, is seen by whoever sees
that, so verdicts come before the watermark that vouches for them. A reader in C loads the version with acquire, and
again behind an acquire fence. A reader in Python has no barriers to give: on x86-64 loads are made in the program's
order all the same; on a machine with a weaker order that is likely (hundreds of instructions lie between) but not
promised.

A restarted guard writes a new file and renames it over the path; then it marks the old one closed. It never
truncates or reuses the old file, so a mapping stays readable for as long as a reader keeps it. Verdicts in
force are carried over.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
from enum import IntEnum
from hashlib import blake2b

MAGIC = int.from_bytes(b"KVGBOARD", sys.byteorder)
VERSION = 1
HEADER_BYTES = 4096
ROW_BYTES = 64

HEADER_WORDS = HEADER_BYTES // 8
ROW_WORDS = ROW_BYTES // 8
W_VERSION, W_REQUESTS, W_STREAMS = 1, 2, 3
W_HEARTBEAT, W_CLOSED, W_SATURATED = 6, 7, 8

EMPTY, LIVE = 0, 2
"""A row's state word; a request's row has `LIVE` plus its verdict."""

INCIDENT = struct.Struct("=QQQ")
_DIGEST = struct.Struct("=QQ")


class BoardError(RuntimeError):
    """A board that cannot be made or read; the message names the path and what is wrong."""


class Verdict(IntEnum):
    """What a request may do, from weakest to strongest."""

    ALLOW = 0
    QUARANTINE = 1
    """It may go on; its pages are not to be reused until they are scrubbed."""
    KILL = 2
    """It gives no further byte."""


def key_of(text: str) -> tuple[int, int]:
    """An id's digest, as the two words that a row holds."""
    low, high = _DIGEST.unpack(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())
    return low, high


def map_board(path: str) -> tuple[memoryview[int], int]:
    """Maps a board for reading, once it is seen to be one.

    Returns:
        Its words and its inode.

    Raises:
        BoardError: As `BoardReader.open` says.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BoardError(f"board {path}: {error.strerror}; is guardd running with this board?") from error
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise BoardError(f"board {path}: is not a regular file")
        if info.st_mode & 0o022:
            raise BoardError(f"board {path}: others than its owner may write it (mode {info.st_mode & 0o777:o})")
        if info.st_size < HEADER_BYTES:
            raise BoardError(f"board {path}: {info.st_size} bytes is too short for a board")
        words = memoryview(mmap.mmap(descriptor, info.st_size, prot=mmap.PROT_READ)).cast("Q")
    except (OSError, TypeError, ValueError) as error:
        raise BoardError(f"board {path}: cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
    _check(path, words, info.st_size)
    return words, info.st_ino


def _check(path: str, words: memoryview[int], size: int) -> None:
    if words[0] != MAGIC:
        raise BoardError(f"board {path}: does not begin with KVGBOARD")
    if words[W_VERSION] != VERSION:
        raise BoardError(
            f"board {path}: has version {words[W_VERSION]}, this reader knows {VERSION}; "
            "run the same kvguard release in engine and guard"
        )
    requests, streams = words[W_REQUESTS], words[W_STREAMS]
    if any(rows < 8 or rows & (rows - 1) for rows in (requests, streams)):
        raise BoardError(f"board {path}: {requests} and {streams} rows are not powers of two")
    if size < HEADER_BYTES + ROW_BYTES * (requests + streams):
        raise BoardError(f"board {path}: {size} bytes is too short for {requests} and {streams} rows")
