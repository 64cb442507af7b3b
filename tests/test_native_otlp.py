"""The native OTLP decoder against `parse_protobuf`, which is its specification: upb and the convention in Python."""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path

import otlp_wire as wire
import pytest
from google.protobuf import json_format
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_random import mutated, random_request, random_span, typical

from guard.native import _core
from guard.receive.otlp import MAX_MESSAGE_BYTES, OtlpError, parse_protobuf
from guard.records import KINDS, Record, RecordError

CASES = sorted((Path(__file__).parent / "data" / "cases").glob("*.jsonl"))
STREAM, EPOCH, SEQ = (
    wire.pair(k, wire.value(v)) for k, v in (("kv.stream.id", "s"), ("kv.stream.epoch", 1), ("kv.seq", 7))
)
FREE = (STREAM, EPOCH, SEQ, wire.pair("kv.request.id", wire.value("r")), wire.pair("kv.tenant.id", wire.value("t")))


# Kind, stream, seq and what is wrong there. Which of several attributes given twice is named is left open.
NAMED = re.compile(
    r"(kv\.[a-z.]+)(?: \(stream (.*), seq (\d+)\))?: (the span's start|the attribute|kv\.[a-z_.]+|http\.[a-z_.]+)", re.S
)


def named(error: str) -> tuple[str | None, ...]:
    found = NAMED.match(error)
    assert found is not None, error
    return found.groups()


def same(data: bytes) -> bool:
    """Checks that both decoders make the same of `data`; whether it was a message at all."""
    try:
        expected = parse_protobuf(data)
    except OtlpError:
        with pytest.raises(ValueError, match=r"bytes are not an OTLP ExportTraceServiceRequest: "):
            _core.decode_otlp(data)
        return False
    decoded = _core.decode_otlp(data)
    assert (decoded.read, decoded.ignored, decoded.invalid) == (expected.read, expected.ignored, expected.invalid)
    rows = [item.header if isinstance(item, RecordError) else item for item in expected.items]
    assert list(decoded.rows) == [row for row in rows if row is not None]
    again = _core.Rows()
    for row in rows:
        if type(row) is Record:
            again.place(row.stream, row.epoch, row.seq, row.time_ns)
        elif row is not None:
            again.append(row)
    assert decoded.rows.tobytes() == again.tobytes(), "rows are canonical"
    errors = [str(item) for item in expected.items if isinstance(item, RecordError)][:3]
    assert list(map(named, decoded.errors)) == list(map(named, errors))
    return True


SEEDS = st.integers(min_value=0, max_value=1 << 64)


@settings(max_examples=3000, deadline=None)
@given(SEEDS)
def test_messages_made_with_care(seed: int) -> None:
    same(random_request(random.Random(seed)))


@settings(max_examples=3000, deadline=None)
@given(SEEDS)
def test_messages_with_some_bytes_changed(seed: int) -> None:
    rng = random.Random(seed)
    same(mutated(random_request(rng), rng))


def test_most_of_those_messages_are_read() -> None:
    rng = random.Random(1)
    assert sum(same(random_request(rng)) for _ in range(200)) > 120


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=64))
@example(b"")
def test_any_bytes(data: bytes) -> None:
    same(data)
    same(wire.request(data))
    same(wire.request(wire.span("kv.free", 1, *FREE, data)))


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_recorded_traces_as_one_message(path: Path) -> None:
    whole = ExportTraceServiceRequest()
    for line in path.read_text().splitlines():
        whole.MergeFrom(json_format.Parse(line, ExportTraceServiceRequest(), ignore_unknown_fields=True))
    data = whole.SerializeToString()
    assert same(data)
    decoded = _core.decode_otlp(data)
    assert len(decoded.rows) == decoded.read - decoded.ignored > 0


def test_a_message_cut_off_at_every_byte() -> None:
    rng = random.Random(11)
    data = wire.request(*(random_span(rng) for _ in range(3)), wire.span("kv.free", 5, *FREE, more=wire.HARMLESS[-2]))
    assert same(data)
    for end in range(len(data)):
        same(data[:end])


@pytest.mark.parametrize("bad", wire.BROKEN, ids=lambda b: b[:8].hex())
def test_a_broken_part_breaks_the_message_wherever_it_stands(bad: bytes) -> None:
    good = wire.span("kv.scrub", 5, STREAM, EPOCH, SEQ, wire.pair("kv.pages", wire.value("1")))
    for data in (
        bad,
        wire.part(1, bad),
        wire.part(1, wire.part(2, bad)),
        wire.request(bad),
        wire.request(good, bad),
        wire.request(good + wire.part(9, bad)),
        wire.request(good + wire.part(9, wire.part(2, bad))),
    ):
        same(data)


@pytest.mark.parametrize("key", wire.KEYS)
@pytest.mark.parametrize("name", KINDS)
def test_every_attribute_of_every_kind_with_every_hostile_value(name: str, key: str) -> None:
    rng = random.Random(name + key)
    others = [
        wire.pair(k, wire.value("0-3" if k.endswith("r.pages") or k == "kv.pages" else typical(k, rng)))
        for k in wire.KEYS
        if k not in (key, "kv.digests")
    ]
    spans = [wire.span(name, 5, *others, wire.pair(key, hostile)) for hostile in wire.HOSTILE_VALUES]
    for one in spans:
        same(wire.request(one))
    same(wire.request(*spans[:3], wire.span(name, 5, *others)))


def test_as_deep_as_upb_goes_and_one_deeper() -> None:
    for levels in range(44, 52):
        for deep in (
            wire.part(9, wire.part(2, wire.nested(levels))),
            wire.part(11, wire.part(3, wire.part(2, wire.nested(levels)))),
            wire.part(9, wire.part(2, wire.part(6, wire.part(1, wire.part(2, wire.nested(levels)))))),
        ):
            same(wire.request(deep))
        same(wire.part(1, wire.part(1, wire.part(1, wire.part(2, wire.nested(levels))))))
    for levels in range(90, 103):
        groups = wire.tag(200, wire.GROUP) * levels + wire.tag(200, wire.GROUP_END) * levels
        for data in (
            groups,
            wire.part(1, groups),
            wire.request(groups),
            wire.request(wire.part(9, groups)),
            wire.request(wire.part(9, wire.part(2, groups))),
            wire.request(wire.part(11, groups)),
        ):
            same(data)
    assert not same(wire.request(wire.part(9, wire.part(2, wire.nested(5_000)))))
    assert not same(wire.tag(200, wire.GROUP) * 1_000_000)


def test_attributes_given_twice() -> None:
    for pairs in (
        [*FREE, STREAM],
        [*FREE, SEQ, wire.pair("a", b""), wire.pair("a", b"")],
        [SEQ, *FREE, wire.pair("kv.pages", b"")],
        [*FREE, wire.pair("", b""), b""],
        [*FREE, *(wire.pair(f"k{i}", b"") for i in range(100))],
        [*FREE, *(wire.pair(f"k{i % 99}", b"") for i in range(100))],
    ):
        same(wire.request(wire.span("kv.free", 5, *pairs, wire.pair("kv.pages", wire.value("1")))))
        same(wire.request(wire.span("kv.free", 0, *pairs, wire.pair("kv.pages", wire.value("1")))))


def test_a_span_of_a_million_attributes() -> None:
    many = b"".join(wire.part(9, wire.pair(f"{i:x}", b"")) for i in range(300_000))
    assert same(wire.request(wire.span("kv.free", 5, *FREE, wire.pair("kv.pages", wire.value("")), more=many)))
    same_name = wire.part(9, b"") * 1_000_000
    assert same(wire.request(wire.span("kv.free", 5, *FREE, wire.pair("kv.pages", wire.value("")), more=same_name)))


def test_a_page_set_that_no_row_can_hold_is_invalid() -> None:
    """Python's own record has no such limit: the one thing that only a row cannot say."""
    pages = "0,2,4,6,8,0,2,4,6,9," * 850_000 + "0"
    span = wire.span("kv.free", 5, *FREE, wire.pair("kv.pages", wire.value(pages)))
    decoded = _core.decode_otlp(wire.request(span))
    assert (decoded.read, decoded.invalid) == (1, 1)
    assert "kv.pages: more runs than one record may hold" in decoded.errors[0]
    assert [(row.stream, row.epoch, row.seq) for row in decoded.rows] == [("s", 1, 7)]


def test_errors_name_record_and_field_and_are_few() -> None:
    bad = wire.span("kv.free", 5, *FREE, wire.pair("kv.pages", wire.value("3-1\x1bé")))
    decoded = _core.decode_otlp(wire.request(*[bad] * 10))
    assert decoded.invalid == 10
    assert len(decoded.errors) == 3
    assert (
        decoded.errors[0]
        == "kv.free (stream s, seq 7): kv.pages: '3-1\\x1b\\xc3\\xa9' is neither an index nor a run a-b"
    )
    unplaced = _core.decode_otlp(wire.request(wire.span("kv.free", 5, STREAM, SEQ)))
    assert unplaced.errors == ["kv.free: kv.stream.epoch is missing"]
    assert len(unplaced.rows) == 0


def test_what_it_takes_and_what_it_refuses() -> None:
    data = wire.request(wire.span("kv.free", 5, *FREE, wire.pair("kv.pages", wire.value("1"))))
    for given_as in (data, bytearray(data), memoryview(data), memoryview(b"xx" + data)[2:]):
        assert len(_core.decode_otlp(given_as).rows) == 1
    with pytest.raises(TypeError):
        _core.decode_otlp(data.decode("latin-1"))  # type: ignore[arg-type]
    with pytest.raises((BufferError, ValueError)):
        _core.decode_otlp(memoryview(data)[::2])
    with pytest.raises(
        ValueError, match=f"a message of {MAX_MESSAGE_BYTES + 1} bytes is more than {MAX_MESSAGE_BYTES}"
    ):
        _core.decode_otlp(bytes(MAX_MESSAGE_BYTES + 1))


def test_python_goes_on_meanwhile() -> None:
    """The walk holds no GIL: two threads decode while this one counts."""
    data = wire.request(*(random_span(random.Random(3)) for _ in range(2000)))
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(_core.decode_otlp(data).read)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [2000] * 4
    assert json.dumps(counts)
