"""The page digest as plainly as it can be put: numbers of Python's, one step after the other.

``python tests/digest_reference.py`` writes the test vectors, ``tests/data/digest_vectors.json``, anew: only when
``kvguard/digest.h`` has another version.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parent / "data" / "digest_vectors.json"
P = 2**61 - 1
H = 512


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def tenant_key(secret: bytes, tenant: str) -> bytes:
    root = _hmac(b"kvguard page digest 1", secret)
    out = block = b""
    for number in range(1, 195):
        block = _hmac(root, block + b"tenant\0" + tenant.encode() + bytes([number]))
        out += block
    return out[:6208]


def words(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]


def page_hash(key: bytes, pieces: Sequence[bytes]) -> bytes:
    k = words(key[:6144])
    points = [1 + int.from_bytes(key[at : at + 16], "little") % (P - 1) for at in (6144, 6160)]
    h = [1, 1]
    for piece in pieces:
        for at in range(0, len(piece), 4096):
            block = piece[at : at + 4096]
            m = words(block + bytes(4096 - len(block)))
            for lane in (0, 1):
                v = len(block)
                for i in range(H):
                    left = (m[i] + k[lane * H + i]) % 2**32
                    right = (m[H + i] + k[lane * H + H + i]) % 2**32
                    v += left * right
                v %= 2**64
                for coefficient in (v >> 32, v % 2**32):
                    h[lane] = (h[lane] * points[lane] + coefficient) % P
    return b"".join(lane.to_bytes(8, "little") for lane in h)


def digest(
    secret: bytes, tenant: str, request: str, place: int, generation: int, nonce: bytes, pieces: Sequence[bytes]
) -> str:
    key = tenant_key(secret, tenant)
    transfer = _hmac(key[6176:], nonce + request.encode())
    numbers = (place, generation, len(pieces[0]), len(pieces))
    said = b"".join(number.to_bytes(8, "little") for number in numbers)
    return hashlib.blake2b(said + page_hash(key, pieces), key=transfer, digest_size=16).hexdigest()


def filled(how: str, size: int) -> bytes:
    """The contents of a page in the vectors."""
    if how == "mixed":
        return bytes((i * 167 + i // 256 * 13 + 11) % 256 for i in range(size))
    return (b"\xff" if how == "ones" else b"\0") * size


def cut(data: bytes, pieces: int) -> list[bytes]:
    size = len(data) // pieces
    return [data[i * size : (i + 1) * size] for i in range(pieces)]


def vectors() -> dict[str, Any]:
    secret, tenant = bytes(range(32)), "tenant-a"
    key = tenant_key(secret, tenant)
    shapes = [(0, 1), (1, 1), (3, 1), (4, 1), (4095, 1), (4096, 1), (4097, 1), (8192, 1), (12345, 1), (8192, 2)]
    shapes += [(30, 3), (3 * 4100, 3), (65536, 1), (65536, 16), (140 * 4096, 1)]
    return {
        "secret": secret.hex(),
        "tenant": tenant,
        "tenant_key_sha256": hashlib.sha256(key).hexdigest(),
        "hashes": [
            {"fill": how, "bytes": size, "pieces": pieces, "hash": page_hash(key, cut(filled(how, size), pieces)).hex()}
            for size, pieces in shapes
            for how in ("mixed", "zeros", "ones")
        ],
        "digests": [
            {
                "tenant": whose, "request": request, "place": place, "generation": generation, "nonce": nonce.hex(),
                "fill": "mixed", "bytes": size, "pieces": pieces,
                "digest": digest(secret, whose, request, place, generation, nonce, cut(filled("mixed", size), pieces)),
            }
            for whose, request, place, generation, nonce, size, pieces in (
                (tenant, "r1", 0, 1, bytes(16), 4096, 1),
                (tenant, "r1", 7, 2**40, bytes(range(16)), 8192, 2),
                ("größer", "anfrage-µ", 3, 0, bytes(range(16, 32)), 100, 1),
                (tenant, "", 0, 0, bytes(16), 0, 1),
            )
        ],
    }  # fmt: skip


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
