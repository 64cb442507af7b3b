"""The page hash in torch and in Triton's interpreter, bit for bit what the native core and the reference make of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import digest_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined

from engine.digest import PageDigester
from engine.kernels import digest, digest_triton
from engine.kernels.digest import HashTensors, tobytes
from guard.native._core import HashKey
from hooks.digest import Digester

VECTORS = json.loads(reference.VECTORS.read_text(encoding="utf-8"))
SECRET = bytes.fromhex(VECTORS["secret"])
MATERIAL = Digester(SECRET).tenant(VECTORS["tenant"]).material
KEY = HashTensors.of(MATERIAL)
NATIVE = HashKey(MATERIAL)
RNG = random.Random(5)
Hashes = Callable[..., Tensor]
DTYPES = [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


@pytest.fixture(params=["torch", "triton"])
def page_hashes(request: pytest.FixtureRequest) -> Hashes:
    return digest.page_hashes if request.param == "torch" else digest_triton.page_hashes


def pool_of(*pages: bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    flat = torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.uint8)
    return flat.view(len(pages), -1).view(dtype)


def native(pool: Tensor, pages: Sequence[int], layers: int = 1) -> list[bytes]:
    return NATIVE.pages([pool.flatten(1).view(torch.uint8).numpy().data], pages, layers)


def test_the_vectors(page_hashes: Hashes) -> None:
    for vector in VECTORS["hashes"]:
        page = reference.filled(vector["fill"], vector["bytes"])
        pool = pool_of(page) if page else torch.zeros((1, 0), dtype=torch.uint8)
        got = page_hashes([pool], [0], KEY, vector["pieces"])
        assert tobytes(got)[0].hex() == vector["hash"], vector


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_shape(page_hashes: Hashes, dtype: torch.dtype) -> None:
    item = dtype.itemsize
    pool = pool_of(*[RNG.randbytes(1000 * item) for _ in range(3)], dtype=dtype).view(3, 2, 5, 100)
    got = page_hashes([pool], [2, 0, 2], KEY, 2)
    assert tobytes(got) == native(pool, [2, 0, 2], 2)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(0, 9000), layers=st.integers(1, 3), rng=st.randoms(use_true_random=False))
def test_every_length(size: int, layers: int, rng: random.Random) -> None:
    pool = pool_of(*[rng.randbytes(size * layers) for _ in range(2)]) if size else torch.zeros((2, 0)).byte()
    expected = native(pool, [1, 0], layers)
    for page_hashes in (digest.page_hashes, digest_triton.page_hashes):
        assert tobytes(page_hashes([pool], [1, 0], KEY, layers)) == expected


@pytest.mark.parametrize("blocks", [127, 128, 129, 255, 256, 300])
def test_pages_of_many_blocks(page_hashes: Hashes, blocks: int) -> None:
    """Around the sizes at which the polynomial takes one more step."""
    pool = pool_of(RNG.randbytes(4096 * blocks - 8))
    assert tobytes(page_hashes([pool], [0], KEY)) == native(pool, [0])


@pytest.mark.parametrize("width", [4096, 4100, 16, 3], ids=str)
@pytest.mark.parametrize("offset", [0, 4, 1], ids=str)
def test_pages_that_are_scattered_over_layers(page_hashes: Hashes, width: int, offset: int) -> None:
    """Pools a layer, with gaps between pages, at any address; and a K and a V pool as one strided tensor."""
    layers = [
        pool_of(*[RNG.randbytes(width + offset + 9) for _ in range(4)])[:, offset : offset + width] for _ in "abc"
    ]
    whole = torch.cat(layers, 1)
    expected = native(whole, [3, 1], 3)
    assert tobytes(page_hashes(layers, [3, 1], KEY)) == expected
    both = torch.stack((layers[0], layers[1]))  # [2, pages, bytes]
    assert tobytes(page_hashes([both[0], both[1]], [3, 1], KEY)) == native(torch.cat(layers[:2], 1), [3, 1], 2)


def test_a_flipped_bit_a_swap_and_a_cut_are_noticed(page_hashes: Hashes) -> None:
    page = RNG.randbytes(4096 + 40)
    changed = []
    for bit in [0, 8 * len(page) - 1, *(RNG.randrange(8 * len(page)) for _ in range(60))]:
        flipped = bytearray(page)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(flipped))
    for _ in range(20):
        a, b = RNG.sample(range(len(page) // 4), 2)
        words = [page[i : i + 4] for i in range(0, len(page), 4)]
        words[a], words[b] = words[b], words[a]
        changed.append(b"".join(words))
    pool = pool_of(page, *changed)
    got = tobytes(page_hashes([pool], range(len(pool)), KEY))
    assert got == native(pool, range(len(pool)))
    assert len(set(got)) == len(pool)
    zeros = [tobytes(page_hashes([torch.zeros((1, size)).byte()], [0], KEY))[0] for size in (8, 9, 4097)]
    assert len(set(zeros)) == 3


def test_the_kernels_write_nothing_behind_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not notice by itself: the last program's tile goes beyond a piece of 3 blocks."""
    made: list[Tensor] = []
    empty, ones = torch.empty, torch.ones

    def with_redzone(size: Sequence[int], **how: object) -> Tensor:
        made.append(torch.full((size[0] + 8, *size[1:]), -77, dtype=torch.int64))
        return made[-1][: size[0]]

    pool = pool_of(*[RNG.randbytes(3 * 3 * 4096 - 3) for _ in range(2)])
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", with_redzone)
        patched.setattr(torch, "ones", with_redzone)
        got = digest_triton.page_hashes([pool], [1, 0], KEY, 3)
    assert (torch.empty, torch.ones) == (empty, ones)
    assert tobytes(got) == native(pool, [1, 0], 3)
    assert len(made) == 2
    assert all((memory[-8:] == -77).all() and (memory[:-8] != -77).all() for memory in made)


def test_no_pages_have_no_hashes(page_hashes: Hashes) -> None:
    assert page_hashes([pool_of(b"x")], [], KEY).shape == (0, 2)


def test_what_cannot_be_hashed_is_refused(page_hashes: Hashes) -> None:
    pool = pool_of(bytes(64), bytes(64))
    for pages in ([2], [0, -1]):
        with pytest.raises(ValueError, match=f"no page {pages[-1]} among 2"):
            page_hashes([pool], pages, KEY)
    with pytest.raises(ValueError, match="64 bytes a page do not divide into 3"):
        page_hashes([pool], [0], KEY, 3)
    with pytest.raises(ValueError, match="at least one"):
        page_hashes([], [0], KEY)
    with pytest.raises(ValueError, match="the same bytes a page"):
        page_hashes([pool, pool[:, :32]], [0], KEY)
    with pytest.raises(ValueError, match="each page in one run"):
        page_hashes([pool[:, ::2]], [0], KEY)
    with pytest.raises(ValueError, match="6176 bytes are needed"):
        HashTensors.of(MATERIAL[:-1])


def test_the_engine_gets_the_same_digests_where_the_pages_are_not_the_cpus() -> None:
    pool = pool_of(*[RNG.randbytes(5000) for _ in range(3)])
    how = {"generations": [4, 5], "nonce": bytes(16)}
    digester = PageDigester(SECRET)
    here = digester.pages(pool, VECTORS["tenant"], "r", [2, 1], 1, **how)
    assert here == Digester(SECRET).pages([pool.numpy().data], VECTORS["tenant"], "r", [2, 1], 1, **how)

    class Elsewhere(PageDigester):
        _natively = staticmethod(lambda data: False)

    assert Elsewhere(SECRET).pages(pool, VECTORS["tenant"], "r", [2, 1], 1, **how) == here


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.kernels import digest_triton as kernels

def compiled(kernel, constants, **types):
    signature = types | dict.fromkeys(constants, "constexpr")
    wide = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=wide)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

numbers = {"size": "i32", "words": "i32", "per_piece": "i32"}
for whole in (True, False):
    how = dict(HALF_=512, TILE=4, STEPS=4, WORDS=True, ALIGNED=True, WHOLE=whole)
    ptx = compiled(kernels._nh_kernel, how, starts="*i64", table="*i32", values="*i64", **numbers)
    assert ptx.count("ld.global.v4.b32") >= 8 and "mul.wide.u32" in ptx, "loads of 16 bytes"
ptx = compiled(kernels._polynomial_kernel, {"CHUNK_": 128}, values="*i64", powers="*i64", out="*i64", blocks="i32",
               chunks="i32")
assert "mul.hi.u64" in ptx
print("compiled")
"""


def test_the_kernels_compile_for_a_gpu_and_read_it_wide(tmp_path: Path) -> None:
    """As far as one sees without one: what it is measured at, `bench/gpu.py` says."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], cwd=Path(__file__).parent.parent, env=environment,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout == "compiled\n", done.stderr[-4000:]
