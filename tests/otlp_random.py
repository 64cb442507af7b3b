"""OTLP trace messages made at random: right, nearly right, hostile, broken. One seed, one message."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from otlp_wire import (
    BROKEN,
    HARMLESS,
    HOSTILE_VALUES,
    KEYS,
    VARINT,
    group,
    nested,
    pair,
    part,
    request,
    span,
    tag,
    value,
)

from guard.records import KINDS

_IDS = ("r1", "decode-0", "tenant-a", "chatcmpl-5b8efff798038103d269b633813fc60c", "é", "x" * 256)
_PAGES = ("", "0", "0-3", "12-15,40,7", "1,2,3", "0-99,200-299")


def typical(key: str, rng: random.Random) -> str | int | bool:
    """A value that the convention admits for an attribute."""
    if key.endswith(".id") or key == "kv.share.from":
        return rng.choice(_IDS)
    if key in ("kv.pages", "kv.peer.pages"):
        return rng.choice(_PAGES)
    choices = {
        "kv.role": ("prefill", "decode", "unified", "router"),
        "kv.scope": ("tenant", "public"),
        "kv.side": ("send", "recv"),
        "kv.status": ("ok", "failed", "aborted"),
        "kv.outcome": ("finished", "rejected", "aborted", "failed"),
        "kv.digests": ("", "ab", "ab,cd,ef,01"),
        "kv.final": (True, False),
    }
    if key in choices:
        return rng.choice(choices[key])
    number = rng.choice((0, 1, 16, 200, 1 << 20, rng.randrange(1 << 62)))
    return str(number) if rng.random() < 0.2 else number


NAMES = (*KINDS, "kv.transfer", "kv.reads", "kv.Free", "kv.", "", "chat")


def random_span(rng: random.Random) -> bytes:
    """A span that is a record, or nearly one."""
    name = rng.choice(tuple(KINDS))
    same_pages = rng.choice(_PAGES)
    pairs = []
    for key in KEYS:
        optional = key in ("kv.digests", "kv.max_tokens", "kv.share.from", "kv.scope", "kv.pool.id", "kv.final")
        if not (optional and rng.random() < 0.6):
            pairs.append(
                pair(key, value(same_pages if key.endswith("pages") and key != "kv.pool.pages" else typical(key, rng)))
            )
    if rng.random() < 0.3:
        rng.shuffle(pairs)
    more, start = b"", 1790000000000000000 + rng.randrange(1 << 40)
    for change in rng.choices(CHANGES, k=rng.choice((0, 0, 1, 1, 2))):
        change(rng, pairs)
    roll = rng.random()
    if roll < 0.05:
        name = rng.choice(NAMES)
    elif roll < 0.1:
        start = rng.choice((0, 1, -1, 1 << 63, (1 << 63) - 1))
    elif roll < 0.25:
        more = b"".join(rng.choices(HARMLESS, k=2))
    elif roll < 0.27:
        more = rng.choice(BROKEN)
    made = span(name, start, *pairs, more=more)
    return more + made if roll < 0.2 else made


def _drop(rng: random.Random, pairs: list[bytes]) -> None:
    if pairs:
        pairs.pop(rng.randrange(len(pairs)))


def _double(rng: random.Random, pairs: list[bytes]) -> None:
    if pairs:
        pairs.insert(rng.randrange(len(pairs)), rng.choice(pairs))


def _spoil(rng: random.Random, pairs: list[bytes]) -> None:
    key = rng.choice(KEYS)
    pairs[:] = [p for p in pairs if not p.startswith(part(1, key.encode()))]
    pairs.append(pair(key, rng.choice(HOSTILE_VALUES)))


def _override(rng: random.Random, pairs: list[bytes]) -> None:
    """The key or the value of a pair given twice, in one pair."""
    if pairs:
        at = rng.randrange(len(pairs))
        pairs[at] += rng.choice((part(1, rng.choice(KEYS).encode()), part(2, rng.choice(HOSTILE_VALUES))))


def _odd(rng: random.Random, pairs: list[bytes]) -> None:
    odd = (
        b"",
        part(1, b"k"),
        part(2, value("v")),
        pair("", value(1)),
        part(1, b"kv.seq") + tag(3, VARINT) + b"\2",
        pair("kv.seq", b"") + group(4, b""),
        pair("x" * 3000, b""),
        part(3, b""),
        tag(1, VARINT) + b"\1",
    )
    for _ in range(rng.choice((1, 2, 30))):
        pairs.insert(
            rng.randrange(len(pairs) + 1), rng.choice(odd) if rng.random() < 0.5 else pair(f"k{rng.random()}", b"")
        )


CHANGES: Sequence[Callable[[random.Random, list[bytes]], None]] = (
    _drop,
    _double,
    _spoil,
    _spoil,
    _spoil,
    _override,
    _odd,
)


def random_request(rng: random.Random) -> bytes:
    spans = [random_span(rng) for _ in range(rng.choice((1, 1, 2, 5)))]
    whole = request(*spans)
    if rng.random() < 0.3:
        at_resource = (
            part(1, part(1, pair("service.name", value("engine"))) + part(3, part(3, b"id"))),
            part(3, b"schema"),
            part(1, part(3, part(4, b"\xff"))),
            tag(2, VARINT) + b"\1",
            group(1, b""),
            part(2, part(3, b"\x80")),
        )
        whole += part(1, b"".join(rng.choices(at_resource, weights=(4, 4, 1, 2, 2, 1), k=2)))
    if rng.random() < 0.2:
        at_scope = (
            part(1, part(1, b"kv") + part(3, pair("a", nested(3)))),
            part(3, b"s"),
            part(1, part(2, b"\xfe")),
            group(2, b""),
        )
        whole += part(1, part(2, rng.choices(at_scope, weights=(4, 4, 1, 2))[0]))
    return whole


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3:
                out[at:at] = rng.choice((*BROKEN, *HARMLESS, *HOSTILE_VALUES))[:4000]
            case _:
                start = rng.randrange(len(out) + 1)
                out[at:at] = out[start : start + rng.randrange(64)]
    return bytes(out)
