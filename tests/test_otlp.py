from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from guard.receive.otlp import (
    MAX_MESSAGE_BYTES,
    Batch,
    OtlpError,
    parse_json_line,
    parse_protobuf,
    read_delimited,
)
from guard.records import Free, PageSet, Record, RecordError

CASES = sorted((Path(__file__).parent / "data" / "cases").glob("*.jsonl"))

FREE = {
    "kv.stream.id": {"stringValue": "decode-0"},
    "kv.stream.epoch": {"intValue": "1"},
    "kv.seq": {"intValue": "4"},
    "kv.request.id": {"stringValue": "r1"},
    "kv.tenant.id": {"stringValue": "tenant-a"},
    "kv.pages": {"stringValue": "0-3"},
}


def span(name: str = "kv.free", attributes: Any = None, **fields: Any) -> dict[str, Any]:
    pairs = [{"key": k, "value": v} for k, v in FREE.items()] if attributes is None else attributes
    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": "eee19b7ec3c1b174",
        "name": name,
        "startTimeUnixNano": "1790000000000000000",
        "attributes": pairs,
        **fields,
    }


def line(*spans: Any) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}).encode()


def with_value(key: str, value: Any) -> dict[str, Any]:
    return span(attributes=[{"key": k, "value": v} for k, v in {**FREE, key: value}.items()])


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def to_protobuf(text: bytes) -> bytes:
    request = json_format.Parse(text, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    return bytes(request.SerializeToString())


def only_error(batch: Batch) -> RecordError:
    assert (batch.read, batch.kv, batch.invalid) == (1, 0, 1)
    (item,) = batch.items
    assert isinstance(item, RecordError)
    return item


def test_a_record_from_json_and_from_protobuf() -> None:
    expected = Free(
        stream="decode-0", epoch=1, seq=4, time_ns=1790000000000000000, request="r1", tenant="tenant-a",
        pages=PageSet.parse("0-3"),
    )  # fmt: skip
    text = line(span())
    assert parse_json_line(text).items == [expected]
    assert parse_json_line(text.decode()).items == [expected]
    assert parse_protobuf(to_protobuf(text)).items == [expected]


def test_integers_may_be_numbers_in_json() -> None:
    batch = parse_json_line(line(with_value("kv.seq", {"intValue": 4}) | {"startTimeUnixNano": 17}))
    (record,) = batch.items
    assert isinstance(record, Free)
    assert (record.seq, record.time_ns) == (4, 17)


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_json_and_protobuf_give_the_same_records(path: Path) -> None:
    delimited = bytearray()
    from_json: list[Record | RecordError] = []
    for text in path.read_bytes().splitlines():
        from_json += parse_json_line(text).items
        message = to_protobuf(text)
        delimited += varint(len(message)) + message
    from_protobuf = [item for m in read_delimited(io.BytesIO(delimited)) for item in parse_protobuf(m).items]
    assert from_protobuf == from_json
    assert from_json


def test_other_spans_are_ignored_whatever_they_hold() -> None:
    text = line(span("kv.transfer", attributes=5), span("chat smollm2", attributes=[{"bad": 1}]), span())
    batch = parse_json_line(text)
    assert (batch.read, batch.kv, batch.ignored, batch.invalid) == (3, 1, 2, 0)


def test_an_invalid_record_stands_where_it_stood_with_its_place() -> None:
    batch = parse_json_line(line(span(), with_value("kv.pages", {"stringValue": "3-1"}), span()))
    assert (batch.read, batch.kv, batch.invalid) == (3, 2, 1)
    error = batch.items[1]
    assert isinstance(error, RecordError)
    assert "kv.pages" in str(error)
    assert error.header is not None
    assert (error.header.stream, error.header.epoch, error.header.seq) == ("decode-0", 1, 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (with_value("kv.pages", {"intValue": "3"}), "kv.pages is 3, not a string"),
        (with_value("kv.seq", {"doubleValue": 4.0}), "kv.seq is {'doubleValue': 4.0}, not an integer"),
        (with_value("kv.seq", {"intValue": "four"}), "kv.seq is {'intValue': 'four'}, not an integer"),
        (with_value("kv.seq", {"intValue": "-4"}), "kv.seq is -4"),
        (with_value("kv.seq", {"intValue": str(1 << 63)}), "kv.seq is 9223372036854775808"),
        (with_value("kv.seq", {"intValue": "9" * 5000}), "not an integer"),
        (with_value("kv.seq", {"boolValue": True}), "kv.seq is True, not an integer"),
        (with_value("kv.stream.id", {"arrayValue": {"values": []}}), "kv.stream.id is {'arrayValue'"),
        (with_value("kv.stream.id", {"stringValue": 5}), "kv.stream.id is {'stringValue': 5}, not a string"),
        (with_value("kv.stream.id", None), "kv.stream.id is None"),
        (with_value("kv.stream.id", {}), "kv.stream.id is {}"),
        (with_value("kv.stream.id", {"stringValue": "x" * 257}), "has 257 characters"),
        (with_value("kv.pages", {"stringValue": "0-99999999999999999999999"}), "largest page index"),
        (span(attributes=None) | {"attributes": None}, "kv.stream.id is missing"),
        (span(attributes=7), "attributes is 7, not a list"),
        (span(attributes=[7]), "the attribute 7 has no key"),
        (span(attributes=[{"key": 7, "value": {}}]), "has no key"),
        (span(startTimeUnixNano=None), "start is None"),
        (span(startTimeUnixNano="0"), "start is 0"),
        (span(startTimeUnixNano="soon"), "start is 'soon'"),
        (span(startTimeUnixNano=1.5), "start is 1.5"),
        (span(startTimeUnixNano=True), "start is True"),
        (span(startTimeUnixNano=1 << 63), "start is 9223372036854775808"),
    ],
)
def test_a_bad_record_says_what_is_bad(bad: dict[str, Any], message: str) -> None:
    error = only_error(parse_json_line(line(bad)))
    assert message in str(error)
    assert str(error).startswith("kv.free")


def test_an_attribute_given_twice_is_refused_in_both_encodings() -> None:
    pairs = span()["attributes"]
    for key, has_header in (("kv.pages", True), ("kv.seq", False)):
        text = line(span(attributes=[*pairs, {"key": key, "value": FREE[key]}]))
        for batch in (parse_json_line(text), parse_protobuf(to_protobuf(text))):
            error = only_error(batch)
            assert f"the attribute '{key}' is given twice" in str(error)
            assert (error.header is not None) is has_header


def test_protobuf_values_of_other_types_are_refused() -> None:
    request = ExportTraceServiceRequest()
    added = request.resource_spans.add().scope_spans.add().spans.add(name="kv.free", start_time_unix_nano=1)
    for key in FREE:
        added.attributes.add(key=key).value.array_value.values.add(string_value="x")
    assert "not a string" in str(only_error(parse_protobuf(request.SerializeToString())))
    added.attributes[0].value.Clear()
    assert "kv.stream.id is None" in str(only_error(parse_protobuf(request.SerializeToString())))
    added.attributes[0].value.bytes_value = b"\xff"
    assert "not a string" in str(only_error(parse_protobuf(request.SerializeToString())))
    added.attributes[0].value.double_value = float("nan")
    assert "nan, not a string" in str(only_error(parse_protobuf(request.SerializeToString())))
    added.start_time_unix_nano = 1 << 63
    assert parse_protobuf(request.SerializeToString()).invalid == 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"x"',
        b"{",
        b"\xff\xfe{}",
        b'{"resourceSpans":{}}',
        b'{"resourceSpans":[7]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":7}]}]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[7]}]}]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":7}]}]}]}',
        b'{"resourceSpans":NaN}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"kv.free","startTimeUnixNano":1e999}]}]}]}',
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"kv.free","attributes":"\\ud800"}]}]}]}',
        b'{"x":' * 200_000,
        b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"kv.free","attributes":' + b"[" * 200_000,
        b"[" * 1_000_000,
        json.dumps({"resourceSpans": []}).encode() + b" trailing",
    ],
    ids=lambda text: text[:60].decode("latin-1"),
)
def test_what_is_no_otlp_json_is_refused(text: bytes) -> None:
    with pytest.raises(OtlpError, match="not an OTLP/JSON trace message"):
        parse_json_line(text)


@pytest.mark.parametrize(
    "text", [b"{}", b'{"resourceSpans":null}', b'{"resourceSpans":[{"scopeSpans":null}]}', b'{"x":{"y":[1]}}']
)
def test_empty_messages_are_empty(text: bytes) -> None:
    assert parse_json_line(text).read == 0


def test_what_is_no_protobuf_is_refused() -> None:
    good = to_protobuf(line(span()))
    for data in (good[:-1], b"\xff" * 40, b"\x0a" * 10_000, b"\n\x02\xff\xff", b"{}"):
        with pytest.raises(OtlpError, match="not an OTLP ExportTraceServiceRequest"):
            parse_protobuf(data)
    assert parse_protobuf(b"").read == 0
    deep = b""
    for _ in range(5000):  # AnyValue.array_value.values.array_value…
        deep = b"\x0a" + varint(len(deep)) + deep
        deep = b"\x2a" + varint(len(deep)) + deep
    pair = b"\x0a\x01k\x12" + varint(len(deep)) + deep
    spans = b"\x2a\x07kv.free" + b"\x4a" + varint(len(pair)) + pair
    for _ in range(3):
        spans = b"\x12" + varint(len(spans)) + spans
    with pytest.raises(OtlpError):
        parse_protobuf(b"\x0a" + spans[1:])


def test_a_message_that_is_too_long_is_not_parsed() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return MAX_MESSAGE_BYTES + 1

    for parse in (parse_protobuf, parse_json_line):
        with pytest.raises(OtlpError, match="67108865 bytes is more than"):
            parse(Long())


def test_delimited_files_that_break_off_say_where() -> None:
    message = to_protobuf(line(span()))
    whole = varint(len(message)) + message
    assert list(read_delimited(io.BytesIO(b""))) == []
    assert list(read_delimited(io.BytesIO(whole + b"\0" + whole))) == [message, b"", message]
    for data, text in (
        (whole + whole[:-5], f"byte {len(whole)}: .* cut off after"),
        (whole + b"\x80", f"byte {len(whole)}: the file ends within a message's length"),
        (b"\xff" * 12, "byte 0: not a message's length"),
        (varint(MAX_MESSAGE_BYTES + 1), "byte 0: a message of 67108865 bytes"),
        (line(span()), "not an OTLP"),
    ):
        with pytest.raises(OtlpError, match=text):
            list(map(parse_protobuf, read_delimited(io.BytesIO(data))))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["key", "value", "stringValue", "intValue", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(json_values, max_size=4), json_values, st.sampled_from(sorted(FREE)))
def test_no_json_value_in_a_record_crashes_the_reader(attributes: Any, value: Any, key: str) -> None:
    for bad in (span(attributes=attributes), with_value(key, value), span(startTimeUnixNano=value)):
        try:
            batch = parse_json_line(line(bad))
        except OtlpError:
            continue
        assert batch.read == batch.kv + batch.invalid == len(batch.items)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_flipped_byte_in_protobuf_crashes_the_reader(data: st.DataObject) -> None:
    message = bytearray(to_protobuf(line(span())))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch = parse_protobuf(bytes(message))
    except OtlpError:
        return
    assert batch.read == batch.kv + batch.invalid + batch.ignored
