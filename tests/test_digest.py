"""The page digest: keys, the hash in the native core, and seals."""

from __future__ import annotations

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import digest_reference as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard.native._core import HASH_WAYS, HashKey
from hooks.digest import Digester, hkdf_expand, hkdf_extract

VECTORS = json.loads(reference.VECTORS.read_text(encoding="utf-8"))
SECRET = bytes.fromhex(VECTORS["secret"])
DIGESTER = Digester(SECRET)
MATERIAL = DIGESTER.tenant(VECTORS["tenant"]).material
KEYS = {way: HashKey(MATERIAL, way) for way in HASH_WAYS}
KEY = HashKey(MATERIAL)
NONCE = bytes(range(16))
RNG = random.Random(4)


def view(*pages: bytes) -> memoryview:
    """Pages of equal length, not empty, as a pool."""
    return memoryview(b"".join(pages)).cast("B", (len(pages), len(pages[0])))


def hash_of(page: bytes, layers: int = 1) -> bytes:
    return KEY.pages([view(page)], [0], layers)[0]


def digests(*pages: bytes, **changed: Any) -> list[str]:
    """Of a request's pages, in circumstances of which some are changed."""
    how: dict[str, Any] = {
        "tenant": "t", "request": "r", "pages": list(range(len(pages))), "first": 0,
        "generations": [5] * len(pages), "nonce": NONCE, **changed,
    }  # fmt: skip
    return how.pop("digester", DIGESTER).pages([view(*pages)], **how)


# Keys


@pytest.mark.parametrize(
    ("secret", "salt", "info", "key", "expanded"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)).hex(),
            bytes(range(0x60, 0xB0)).hex(),
            bytes(range(0xB0, 0x100)).hex(),
            "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
            "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            "0b" * 22,
            "",
            "",
            "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["A.1", "A.2", "A.3"],
)
def test_keys_are_derived_as_rfc_5869_says(secret: str, salt: str, info: str, key: str, expanded: str) -> None:
    got = hkdf_extract(bytes.fromhex(salt), bytes.fromhex(secret))
    assert got.hex() == key
    assert hkdf_expand(got, bytes.fromhex(info), len(expanded) // 2).hex() == expanded


def test_hkdf_gives_no_more_than_it_may() -> None:
    assert len(hkdf_expand(bytes(32), b"", 8160)) == 8160
    with pytest.raises(ValueError, match="8160"):
        hkdf_expand(bytes(32), b"", 8161)


def test_nothing_of_a_key_is_printed() -> None:
    key = DIGESTER.tenant("t")
    assert repr(key) == "TenantKey()"
    assert key is DIGESTER.tenant("t"), "made once"


def test_whoever_knows_the_secret_can_prove_it() -> None:
    proof = DIGESTER.authenticator(b"challenge")
    assert len(proof) == 32
    assert proof == Digester(SECRET).authenticator(b"challenge")
    assert len({proof, DIGESTER.authenticator(b"another"), Digester(bytes(32)).authenticator(b"challenge")}) == 3


# Test vectors: one file that every implementation is held to


def test_the_reference_gives_the_vectors() -> None:
    assert reference.vectors() == VECTORS, "the reference changed: another version of the digest?"


@pytest.mark.parametrize("way", HASH_WAYS)
def test_the_native_core_gives_the_vectors(way: str) -> None:
    for vector in VECTORS["hashes"]:
        if vector["bytes"]:
            page = reference.filled(vector["fill"], vector["bytes"])
            assert KEYS[way].pages([view(page)], [0], vector["pieces"])[0].hex() == vector["hash"], vector


def test_digests_are_those_of_the_vectors() -> None:
    for vector in VECTORS["digests"]:
        hashes = [reference.page_hash(
            DIGESTER.tenant(vector["tenant"]).material,
            reference.cut(reference.filled(vector["fill"], vector["bytes"]), vector["pieces"]),
        )]  # fmt: skip
        got = DIGESTER.seal(
            hashes, vector["tenant"], vector["request"], vector["place"],
            generations=[vector["generation"]], nonce=bytes.fromhex(vector["nonce"]),
            piece_bytes=vector["bytes"] // vector["pieces"], pieces=vector["pieces"],
        )  # fmt: skip
        assert got == [vector["digest"]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_way_equals_the_reference_at_every_length(size: int, layers: int, rng: random.Random) -> None:
    pages = [rng.randbytes(size * layers) for _ in range(2)]
    expected = [reference.page_hash(MATERIAL, reference.cut(page, layers)) for page in pages]
    for key in KEYS.values():
        assert key.pages([view(*pages)], [1, 0, 1], layers) == [expected[1], expected[0], expected[1]]


# Where the bytes lie


@pytest.mark.parametrize("code", "bBhHiIqQfd")
def test_the_hash_is_over_bytes_whatever_they_mean(code: str) -> None:
    page = RNG.randbytes(4160)
    typed = memoryview(bytearray(page)).cast(code)
    shaped = memoryview(bytearray(page)).cast(code, [1, 2, 5, len(typed) // 10])
    assert KEY.pages([shaped], [0]) == [hash_of(page)]


def test_a_page_may_start_anywhere() -> None:
    page = RNG.randbytes(9001)
    for offset in range(9):
        pool = memoryview(bytes(offset) + page)[offset:].cast("B", (1, len(page)))
        assert KEY.pages([pool], [0]) == [hash_of(page)]


def test_between_pages_may_lie_what_is_not_theirs() -> None:
    numpy = pytest.importorskip("numpy")
    pool = numpy.frombuffer(RNG.randbytes(6 * 5000), dtype=numpy.uint8).reshape(6, 5000)
    cut = pool[::2, 7:4507]
    assert KEY.pages([cut.data], [2, 0]) == [hash_of(pool[4, 7:4507].tobytes()), hash_of(pool[0, 7:4507].tobytes())]


@pytest.mark.parametrize("layer_bytes", [4096, 100, 12289])
def test_a_pool_of_pages_and_pools_of_layers_give_the_same(layer_bytes: int) -> None:
    layers = [[RNG.randbytes(layer_bytes) for _ in range(5)] for _ in range(3)]
    whole = view(*[b"".join(layer[page] for layer in layers) for page in range(5)])
    apart = [view(*layer) for layer in layers]
    circumstances: dict[str, Any] = {"generations": [1, 2], "nonce": NONCE}
    assert KEY.pages([whole], [4, 1], 3) == KEY.pages(apart, [4, 1])
    one = DIGESTER.pages([whole], "t", "r", [4, 1], layers=3, **circumstances)
    assert one == DIGESTER.pages(apart, "t", "r", [4, 1], **circumstances)
    assert one != DIGESTER.pages([whole], "t", "r", [4, 1], **circumstances), "cut otherwise"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=9000), min_size=1, max_size=5), st.data())
def test_layers_hashed_apart_merge_in_any_grouping(layers: list[bytes], data: st.DataObject) -> None:
    parts = [(reference.page_hash(MATERIAL, [layer]), -(-len(layer) // 4096)) for layer in layers]
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        (left, left_blocks), (right, right_blocks) = parts[at : at + 2]
        parts[at : at + 2] = [(KEY.merge(left, right, right_blocks), left_blocks + right_blocks)]
    assert parts[0][0] == reference.page_hash(MATERIAL, layers)


def test_many_threads_hash_at_once() -> None:
    pool = view(*[RNG.randbytes(300_000) for _ in range(8)])
    alone = KEY.pages([pool], range(8))
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: KEY.pages([pool], range(8)), range(32)):
            assert got == alone


# What is noticed


def flips(page: bytes, bits: Any) -> int:
    """How many of the bits, flipped one at a time, change both lanes of the hash; all of them have to."""
    memory = bytearray(page)
    pool = memoryview(memory).cast("B", (1, len(memory)))
    whole = KEY.pages([pool], [0])[0]
    seen = 0
    for bit in bits:
        memory[bit // 8] ^= 1 << bit % 8
        flipped = KEY.pages([pool], [0])[0]
        memory[bit // 8] ^= 1 << bit % 8
        seen += flipped[:8] != whole[:8] and flipped[8:] != whole[8:]
    assert KEY.pages([pool], [0])[0] == whole
    return seen


@pytest.mark.parametrize("size", [1, 7, 260, 5003])
@pytest.mark.parametrize("fill", ["mixed", "zeros", "ones"])
def test_every_flipped_bit_is_noticed(size: int, fill: str) -> None:
    assert flips(reference.filled(fill, size), range(8 * size)) == 8 * size


@pytest.mark.parametrize("size", [65536, 262144, 2 << 20])
def test_flipped_bits_of_large_pages_are_noticed(size: int) -> None:
    bits = [0, 8 * size - 1, *(RNG.randrange(8 * size) for _ in range(1500))]
    assert flips(RNG.randbytes(size), bits) == len(bits)


def test_words_that_change_places_are_noticed() -> None:
    words = [RNG.randbytes(4) for _ in range(2 * 1024 + 5)]
    hashes = {hash_of(b"".join(words))}
    # Of one half, of both halves and one pair, of two blocks, and into the last block, which is not full.
    pairs = [(0, 1), (5, 511), (5, 512 + 5), (0, 512), (700, 1023), (3, 1024 + 3), (1024, 2048), (2047, 2052)]
    pairs += [tuple(RNG.sample(range(len(words)), 2)) for _ in range(500)]
    pairs = sorted({(min(pair), max(pair)) for pair in pairs})
    for a, b in pairs:
        changed = list(words)
        changed[a], changed[b] = changed[b], changed[a]
        hashes.add(hash_of(b"".join(changed)))
    assert len(hashes) == 1 + len(pairs)


def test_halves_and_blocks_that_change_places_are_noticed() -> None:
    parts = [RNG.randbytes(2048) for _ in range(6)]
    assert len({hash_of(b"".join(order)) for order in itertools.permutations(parts)}) == 720


def test_layers_that_change_places_are_noticed() -> None:
    layers = [RNG.randbytes(5000) for _ in range(5)]
    orders = list(itertools.permutations(layers))
    assert len({hash_of(b"".join(order), 5) for order in orders}) == len(orders)


def test_pages_that_change_places_are_noticed() -> None:
    one, other = RNG.randbytes(4096), RNG.randbytes(4096)
    right, swapped = digests(one, other), digests(other, one)
    assert not set(right) & set(swapped)
    zeros = digests(bytes(4096), bytes(4096))
    assert zeros[0] != zeros[1], "alike, at two places"


@pytest.mark.parametrize("fill", ["mixed", "zeros"])
def test_a_page_that_is_cut_off_or_goes_on_is_noticed(fill: str) -> None:
    whole = reference.filled(fill, 9000)
    hashes = {hash_of(whole[:size]) for size in range(1, 9001)}
    assert len(hashes) == 9000
    assert len({digests(whole[:size])[0] for size in (1, 4095, 4096, 4097, 8192, 9000)}) == 6


def test_every_page_of_zeros_has_another_digest() -> None:
    page = bytes(8192)
    changes: list[dict[str, Any]] = [
        {}, {"tenant": "u"}, {"request": "s"}, {"first": 1}, {"generations": [6]}, {"nonce": bytes(16)},
        {"digester": Digester(bytes(32))}, {"layers": 2},
    ]  # fmt: skip
    assert len({digests(page, **change)[0] for change in changes}) == len(changes)
    assert digests(page, tenant="u")[0] != digests(page, tenant="U")[0]


def test_what_a_digest_is_bound_to_cannot_be_moved_from_field_to_field() -> None:
    page = RNG.randbytes(64)
    # Request and nonce stand beside each other under the seal, tenant and secret in the keys.
    assert digests(page, request="\x01r", nonce=bytes(16)) != digests(page, request="r", nonce=bytes(15) + b"\x01")
    assert digests(page, tenant="tr", request="") != digests(page, tenant="t", request="r")
    assert digests(page, first=2, generations=[1]) != digests(page, first=1, generations=[2])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_stale_page_of_the_same_tenant_is_noticed(data: st.DataObject) -> None:
    """A page as it was sent, and what stood there before: of another request, place, generation or transfer."""
    page = data.draw(st.binary(min_size=1, max_size=64))
    now = {"request": "r", "first": 3, "generations": [9], "nonce": NONCE}
    before = {
        "request": data.draw(st.sampled_from(["r", "s"])),
        "first": data.draw(st.integers(0, 4)),
        "generations": [data.draw(st.integers(7, 9))],
        "nonce": data.draw(st.sampled_from([NONCE, bytes(16)])),
    }
    assert (digests(page, **before) == digests(page, **now)) == (before == now)
    other = data.draw(st.binary(min_size=len(page), max_size=len(page)))
    assert (digests(other, **now) == digests(page, **now)) == (other == page)


def test_digests_say_nothing_of_contents() -> None:
    """The same prompt of two tenants, of one tenant twice, and pages of a prompt that are alike: all unlike."""
    pages = [RNG.randbytes(512)] * 3
    seen = [
        digest
        for tenant in ("a", "b")
        for nonce in (bytes(16), NONCE)
        for digest in digests(*pages, tenant=tenant, nonce=nonce)
    ]
    assert len(set(seen)) == 12
    assert all(len(digest) == 32 and set(digest) <= set("0123456789abcdef") for digest in seen)


def test_both_sides_get_the_same_wherever_their_pages_lie() -> None:
    a, b = RNG.randbytes(5000), RNG.randbytes(5000)
    sent = digests(bytes(5000), a, b, pages=[1, 2], generations=[7, 3], first=4)
    arrived = digests(b, bytes(5000), bytes(5000), a, pages=[3, 0], generations=[7, 3], first=4)
    assert sent == arrived
    assert sent[1:] == digests(b, generations=[3], first=5), "in pieces"


# What is no use


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"nonce": bytes(15)}, "nonce: 16 bytes are needed, not 15"),
        ({"generations": [1, 2]}, "generations: one a page is needed, not 2 for 1"),
        ({"generations": [-1]}, "generations"),
        ({"first": 2**64}, "place"),
        ({"pages": [1]}, "there is no page 1 among 1"),
        ({"pages": [-1]}, "there is no page -1 among 1"),
        ({"layers": 3}, "layers: 64 bytes a page do not divide into 3 pieces"),
        ({"layers": 0}, "layers: at least 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        digests(bytes(64), **changed)


def test_what_is_no_hash_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="hashes: 16 bytes each"):
        DIGESTER.seal([bytes(15)], "t", "r", generations=[1], nonce=NONCE, piece_bytes=1)


def test_pools_that_do_not_fit_are_refused() -> None:
    given: dict[str, Any] = {"generations": [1], "nonce": NONCE}
    for pools in ([], [view(bytes(64)), view(bytes(32))]):
        with pytest.raises(ValueError, match="pools: one or more are needed, all of the same bytes a page"):
            DIGESTER.pages(pools, "t", "r", [0], **given)
    with pytest.raises(ValueError, match="not of one dimension"):
        KEY.pages([memoryview(bytes(64))], [0])
    numpy = pytest.importorskip("numpy")
    with pytest.raises(ValueError, match="bytes of each page behind each other"):
        KEY.pages([numpy.zeros((2, 64), numpy.uint8)[:, ::2].data], [0])
    with pytest.raises(TypeError):
        KEY.pages([7], [0])  # type: ignore[list-item]


def test_a_page_of_no_bytes_has_a_digest() -> None:
    numpy = pytest.importorskip("numpy")
    empty = numpy.zeros((2, 0), numpy.uint8).data
    assert KEY.pages([empty], [0]) == [bytes([1, *[0] * 7] * 2)]
    seals = DIGESTER.pages([empty], "t", "r", [0, 1], generations=[1, 1], nonce=NONCE)
    assert seals[0] != seals[1]
    assert KEY.pages([empty], []) == []


def test_keys_and_hashes_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes are needed, not 31"):
        Digester(bytes(31))
    with pytest.raises(ValueError, match="6176"):
        HashKey(bytes(6175))
    with pytest.raises(ValueError, match="no mmx"):
        HashKey(MATERIAL, "mmx")
    good = hash_of(b"x")
    for bad in (b"", good + b"x", b"\xff" * 16):
        with pytest.raises(ValueError, match="left"):
            KEY.merge(bad, good, 1)
        with pytest.raises(ValueError, match="right"):
            KEY.merge(good, bad, 1)
