"""OTLP trace messages written byte by byte, so that they can be wrong in every way."""

from __future__ import annotations

VARINT, FIXED64, DELIMITED, GROUP, GROUP_END, FIXED32 = range(6)


def varint(number: int, width: int = 1) -> bytes:
    """`number`, of 64 bits, in at least `width` bytes."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F or len(out) + 1 < width:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def part(number: int, inner: bytes) -> bytes:
    """A delimited field."""
    return tag(number, DELIMITED) + varint(len(inner)) + inner


def group(number: int, inner: bytes) -> bytes:
    return tag(number, GROUP) + inner + tag(number, GROUP_END)


def request(*spans: bytes) -> bytes:
    return part(1, part(2, b"".join(part(2, span) for span in spans)))


def span(name: str | bytes, start_ns: int, *attributes: bytes, more: bytes = b"") -> bytes:
    text = name.encode() if isinstance(name, str) else name
    start = tag(7, FIXED64) + (start_ns % (1 << 64)).to_bytes(8, "little")
    return part(5, text) + start + b"".join(part(9, pair) for pair in attributes) + more


def pair(key: str | bytes, value: bytes) -> bytes:
    return part(1, key.encode() if isinstance(key, str) else key) + part(2, value)


def value(of: str | bool | int) -> bytes:
    """An ``AnyValue``."""
    if isinstance(of, str):
        return part(1, of.encode("utf-8", "surrogatepass"))
    return tag(2 if isinstance(of, bool) else 3, VARINT) + varint(of)


def nested(levels: int) -> bytes:
    """An ``AnyValue`` with arrays in arrays."""
    inner = b""
    for _ in range(levels):
        inner = part(5, part(1, inner))
    return inner


HOSTILE_TEXTS = (
    "",
    "0",
    "7",
    "4",
    " 4",
    "+4",
    "-4",
    "1_0",
    "٣",
    "²",
    "4.0",
    "9" * 19,
    "9" * 20,
    "9" * 21,
    "0" * 19 + "7",
    str(1 << 63),
    str((1 << 63) - 1),
    str(1 << 64),
    "99999999999999999999",
    "x" * 256,
    "x" * 257,
    "é" * 256,
    "é" * 257,
    "𝕏" * 256,
    "\0",
    "a\nb",
    "tenant",
    "prefill",
    "Prefill",
    "router",
    "recv",
    "ok",
    "aborted",
    "finished",
    "rejected",
    "0-4294967295",
    "0-16777215",
    "0-16777216",
    "16777215-0",
    "1-2-3",
    "1-",
    "-1",
    ",",
    "1,",
    ",1",
    "1,,2",
    "1 ,2",
    "0-٣",
    "3,4,5-9,10",
    "9-3",
    "5,5",
    "5-5",
    "1099511627775",
    "1099511627776",
    "1099511627775-1099511627776",
    "0x10",
    "0000000000000000000012",
    "00000000000000000012",
    "18446744073709551617",
    "340282366920938463463374607431768211457",
    "0,2,4,6",
    ",".join(str(2 * i) for i in range(600)),
    "ab,cd",
    "ab,,cd",
    "AB",
    "ab,",
    "0g",
    "ab cd",
    "deadbeef",
)
HOSTILE_INTEGERS = (
    0,
    1,
    -1,
    4,
    200,
    1 << 31,
    1 << 32,
    (1 << 40),
    (1 << 40) + 1,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    (1 << 64) - 1,
)
HOSTILE_VALUES: tuple[bytes, ...] = (
    *map(value, HOSTILE_TEXTS),
    *map(value, HOSTILE_INTEGERS),
    value(True),
    value(False),
    b"",  # no value at all
    tag(4, FIXED64) + bytes(8),
    part(5, part(1, value("x"))),
    part(6, part(1, pair("k", value(1)))),
    part(7, b"\xff"),
    tag(8, VARINT) + varint(3),
    value("x") + value(3),
    value(3) + value("3"),
    value(3) + part(5, b""),
    part(5, b"") + value(3),
    value(7) + tag(8, VARINT) + b"\1",
    tag(2, VARINT) + varint(1 << 63),
    tag(3, VARINT) + varint(5, 10),
    tag(3, VARINT) + b"\xff" * 9 + b"\x7f",
    tag(1, VARINT) + b"\5",
    tag(3, FIXED64) + bytes(8),
    part(2, b"x"),
    tag(4, FIXED32) + bytes(4),
    value(3) + part(900, b"unknown"),
    value(3) + group(1, value(4)),
    value(3) + group(77, group(78, b"")),
    nested(40),
    nested(47),
    nested(48),
    part(6, part(1, part(1, b"k") + part(2, nested(20)))),
)
BROKEN: tuple[bytes, ...] = (
    b"\x00",
    b"\x02",
    b"\x07",
    b"\x0c",
    b"\x0e\x01",
    b"\x0f\x01",
    b"\x80",
    b"\x0a",
    b"\x0a\x05",
    b"\x0a" + varint(1 << 31),
    b"\x0a" + varint((1 << 31) - 1),
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x12" + varint(1 << 63),
    b"\x0a" + varint(0, 6),
    varint(10, 6) + b"\0",
    varint(1 << 32 | 10),
    b"\xf8" * 11,
    b"\x08" + b"\xff" * 10 + b"\x01",
    b"\x0d\0\0",
    b"\x09\0\0\0",
    tag(50, GROUP),
    group(50, tag(51, GROUP)),
    tag(50, GROUP) + tag(51, GROUP_END),
    tag(1, GROUP_END),
    tag(50, GROUP) * 101,
    part(1, b"\xff"),
    part(5, b"\xc0\x80"),
    part(3, b"\xed\xa0\x80"),
    part(9, part(1, b"\xf5\x80\x80\x80")),
    part(11, part(2, b"\xe9")),
    part(11, part(3, part(1, b"\x80"))),
    part(13, part(3, b"\xff")),
    part(15, part(2, b"\xfe")),
    part(9, part(2, nested(48))),
    part(9, part(2, part(1, b"\xff"))),
    part(9, part(2, part(5, part(1, part(1, b"\xff"))))),
)
HARMLESS: tuple[bytes, ...] = (
    b"",
    part(1, bytes(16)),
    part(2, b"\xff" * 8),
    part(3, "zustand=é".encode()),
    part(4, b""),
    tag(16, FIXED32) + bytes(4),
    tag(6, VARINT) + varint(-1),
    tag(8, FIXED64) + bytes(8),
    tag(10, VARINT) + varint(3),
    part(99, b"\xff\xfe"),
    part(1000, b""),
    part(11, part(2, b"event") + part(3, pair("kv.seq", value(9)))),
    part(13, part(1, bytes(16)) + part(4, pair("a", b""))),
    part(15, part(2, b"fine") + tag(3, VARINT) + b"\1"),
    group(9, pair("kv.seq", value(9))),
    group(60, group(61, part(1, b"\xff"))),
    tag(5, VARINT) + b"\1",
    tag(7, VARINT) + b"\1",
    tag(9, FIXED32) + bytes(4),
    tag((1 << 29) - 1, VARINT) + b"\0",
    tag(19000, FIXED64) + bytes(8),
    varint(0x3A, 3) + b"\0",
    group(50, b"") * 3,
    tag(50, GROUP) * 97 + tag(50, GROUP_END) * 97,
)
KEYS = (
    "kv.stream.id",
    "kv.stream.epoch",
    "kv.seq",
    "kv.request.id",
    "kv.tenant.id",
    "kv.pool.id",
    "kv.pages",
    "kv.tokens",
    "kv.pool.pages",
    "kv.page.tokens",
    "kv.page.bytes",
    "kv.role",
    "kv.context.limit",
    "kv.max_tokens",
    "kv.share.from",
    "kv.scope",
    "kv.transfer.id",
    "kv.peer.pool.id",
    "kv.peer.pages",
    "kv.digests",
    "kv.side",
    "kv.status",
    "kv.outcome",
    "http.response.status_code",
    "kv.final",
)
