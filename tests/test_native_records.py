from __future__ import annotations

import contextlib
import struct
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.native import _core
from guard.records import (
    KINDS,
    MAX_ID_LENGTH,
    MAX_PAGE_INDEX,
    MAX_PAGES,
    Admit,
    Alloc,
    Outcome,
    PageSet,
    Pool,
    Read,
    Record,
    Refuse,
    RequestEnd,
    Respond,
    Role,
    Scope,
    Scrub,
    Share,
    Side,
    TransferBegin,
    TransferEnd,
    TransferStatus,
    Write,
)

INTS = st.integers(0, 2**63 - 1)
IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=MAX_ID_LENGTH)
SHORT_IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
PAGES = st.lists(st.integers(0, 60) | st.integers(0, MAX_PAGE_INDEX - 1), unique=True, max_size=12).map(PageSet.of)
ENUMS = (Role, Scope, Side, TransferStatus, Outcome)
HEX = st.text("0123456789abcdef", min_size=1, max_size=16)


@st.composite
def records(draw: st.DrawFn) -> Record:
    cls = draw(st.sampled_from([Record, *KINDS.values()]))
    ids = draw(st.sampled_from([IDS, SHORT_IDS]))
    values: dict[str, Any] = {
        "stream": draw(ids),
        "epoch": draw(INTS),
        "seq": draw(INTS),
        "time_ns": draw(INTS),
        "pool": draw(st.just("") | ids),
    }
    if cls not in (Record, Pool) and (cls is not Scrub or draw(st.booleans())):
        values |= {"request": draw(ids), "tenant": draw(ids)}
    for field in msgspec.structs.fields(cls):
        if field.name in values or field.name in Record.__struct_fields__:
            continue
        kind: Any = field.type
        if cls is Pool and field.name == "pages":
            values["pages"] = draw(st.integers(0, MAX_PAGE_INDEX))
        elif kind is PageSet and field.name == "pages":
            values["pages"] = draw(PAGES)
        elif field.name == "peer_pages":
            values["peer_pages"] = PageSet.of(draw(st.permutations(list(values["pages"]))))
        elif kind in ENUMS:
            values[field.name] = draw(st.sampled_from(kind))
        elif kind is bool:
            values[field.name] = draw(st.booleans())
        elif field.name == "digests":
            n = len(values["pages"])
            values["digests"] = draw(st.none() | st.tuples(*[HEX] * n))
        elif kind == str | None:
            values[field.name] = draw(st.none() | ids)
        elif kind == int | None:
            values[field.name] = draw(st.none() | INTS)
        else:
            values[field.name] = draw(ids if kind is str else INTS)
    return cls(**values)


def header(cls: type[Record] = Read, **values: Any) -> Any:
    """A record of a kind, with what every record needs."""
    needed: dict[str, Any] = {"stream": "s", "epoch": 1, "seq": 2, "time_ns": 3}
    if cls not in (Record, Pool):
        needed |= {"request": "r", "tenant": "t"}
    return cls(**needed | values)


@given(records())
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    data = _core.encode(record)
    again = _core.decode(data)
    assert again == record
    assert type(again) is type(record)
    assert _core.encode(again) == data
    for field in msgspec.structs.fields(type(record)):
        assert type(getattr(again, field.name)) is type(getattr(record, field.name))


@given(st.lists(records(), max_size=6))
def test_rows_keep_records_in_order(some: list[Record]) -> None:
    rows = _core.Rows()
    for record in some:
        rows.append(record)
    assert len(rows) == len(some)
    assert list(rows) == some
    again = _core.Rows.frombytes(rows.tobytes())
    assert list(again) == some
    assert again.tobytes() == rows.tobytes()


@given(records(), st.data())
def test_corrupt_bytes_are_an_error_or_another_record(record: Record, data: st.DataObject) -> None:
    some = bytearray(_core.encode(record))
    for _ in range(data.draw(st.integers(1, 4))):
        some[data.draw(st.integers(0, min(len(some), 96) - 1))] = data.draw(st.integers(0, 255))
    for piece in (bytes(some), bytes(some[: data.draw(st.integers(0, len(some)))])):
        for read in (_core.decode, lambda b: list(_core.Rows.frombytes(b))):
            with contextlib.suppress(ValueError):
                read(piece)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record(data: bytes) -> None:
    with pytest.raises(ValueError):
        _core.decode(data)


def test_the_layout_that_the_header_documents() -> None:
    record = header(
        TransferBegin,
        transfer="x1",
        pages=PageSet.parse("5,7-9"),
        peer_pool="decode-0",
        peer_pages=PageSet.parse("100-103"),
        tokens=50,
        digests=("a", "b", "c", "d0"),
    )
    ids = b"s" + b"r" + b"t" + b"x1" + b"decode-0"
    tail = ids + b"\0" * (-len(ids) % 8) + struct.pack("=4I", 2, 1, 8, 4)
    tail += struct.pack("=3Q", 5 << 24, 7 << 24 | 2, 100 << 24 | 3) + b"a,b,c,d0"
    head = struct.pack(
        "=IBBH5Q7HBB", 64 + len(tail), 1, 6, 4, 3, 1, 2, 50, 0, 1, 1, 1, 0, 2, 8, 0, 0, 0
    )  # fmt: skip
    assert len(head) == 64
    assert _core.encode(record) == head + tail


def test_codes_are_those_of_the_header() -> None:
    def codes(record: Record) -> tuple[int, int, int, int]:
        data = _core.encode(record)
        return data[5], data[62], data[63], struct.unpack_from("=H", data, 6)[0]

    sizes: dict[str, Any] = {"pages": 1, "page_tokens": 2, "page_bytes": 3, "context_limit": 4}
    pages = PageSet.of([1])
    for i, role in enumerate((Role.PREFILL, Role.DECODE, Role.UNIFIED, Role.ROUTER)):
        assert codes(header(Pool, role=role, **sizes)) == (1, i, 0, 0)
    for i, scope in enumerate((Scope.TENANT, Scope.PUBLIC)):
        assert codes(header(Write, pages=pages, tokens=1, scope=scope)) == (5, i, 0, 0)
    for i, side in enumerate((Side.SEND, Side.RECV)):
        for j, status in enumerate((TransferStatus.OK, TransferStatus.FAILED, TransferStatus.ABORTED)):
            end = header(TransferEnd, transfer="x", side=side, pages=pages, tokens=1, status=status)
            assert codes(end) == (7, i, j, 0)
    for i, outcome in enumerate((Outcome.FINISHED, Outcome.REJECTED, Outcome.ABORTED, Outcome.FAILED)):
        assert codes(header(RequestEnd, outcome=outcome)) == (12, i, 0, 0)
    assert codes(header(Respond, status=200, final=True)) == (13, 0, 0, 8)
    assert codes(header(Refuse, pages=pages)) == (14, 0, 0, 0)
    assert codes(header(Admit, tokens=1, max_tokens=0)) == (2, 0, 0, 2)
    assert codes(header(Share, pages=pages, tokens=0)) == (4, 0, 0, 1)
    assert codes(header(Record)) == (0, 0, 0, 0)


def test_a_word_in_place_of_its_member_is_taken() -> None:
    assert _core.decode(_core.encode(header(RequestEnd, outcome="aborted"))).outcome is Outcome.ABORTED


PAGE = PageSet.of([1])


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (header(stream="", pages=PAGE, tokens=1), "stream is empty"),
        (header(stream="\ud800", pages=PAGE, tokens=1), "stream is not Unicode text"),
        (header(request="é\udfff", pages=PAGE, tokens=1), "request is not Unicode text"),
        (header(tenant="t" * 257, pages=PAGE, tokens=1), "tenant has more than 256"),
        (header(tenant=b"t", pages=PAGE, tokens=1), "tenant is not a string"),
        (header(request=None, pages=PAGE, tokens=1), "request is missing"),
        (header(tenant=None, pages=PAGE, tokens=1), "tenant is missing"),
        (header(Scrub, request=None, pages=PAGE), "tenant has no place"),
        (header(Record, request="r", tenant="t"), "request has no place"),
        (header(epoch=-1, pages=PAGE, tokens=1), "epoch is not within"),
        (header(seq=-1, pages=PAGE, tokens=1), "seq is not within"),
        (header(time_ns=2**63, pages=PAGE, tokens=1), "time_ns is not within"),
        (header(pages=PAGE, tokens=2**200), "tokens is not within"),
        (header(pages=PAGE, tokens=1.5), "tokens is not an integer"),
        (header(pages=PAGE, tokens=True), "tokens is not an integer"),
        (header(pages=PAGE, tokens=None), "tokens is not an integer"),
        (header(pages=[1], tokens=1), "pages is no PageSet"),
        (header(pages=PageSet([(-1, 2)]), tokens=1), "pages is not within"),
        (header(pages=PageSet([(0, MAX_PAGE_INDEX + 1)]), tokens=1), "pages goes beyond"),
        (header(pages=PageSet([(0, MAX_PAGES), (MAX_PAGES + 1, MAX_PAGES + 2)]), tokens=1), "pages names more"),
        (header(Share, pages=PAGE, share_from=""), "share_from is empty"),
        (header(Respond, status=200, final=1), "final is not a boolean"),
        (header(RequestEnd, outcome="lost"), "outcome is none"),
        (
            header(TransferBegin, transfer="x", pages=PAGE, peer_pool="p", peer_pages=PageSet(), tokens=1),
            "peer_pages names not as many",
        ),
        (
            header(TransferEnd, transfer="x", side=Side.SEND, pages=PAGE, tokens=1, status="ok", digests=()),
            "digests is not one a page",
        ),
        (
            header(TransferEnd, transfer="x", side=Side.SEND, pages=PAGE, tokens=1, status="ok", digests=("A",)),
            "digests has one that is not",
        ),
        (object(), "object is no record"),
        (None, "NoneType is no record"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_row_names_the_field(record: Any, says: str) -> None:
    rows = _core.Rows()
    for call in (_core.encode, rows.append):
        with pytest.raises(ValueError, match=says):
            call(record)
    assert len(rows) == 0
    assert rows.tobytes() == b""


def test_the_most_pages_that_one_record_may_name() -> None:
    record = header(pages=PageSet([(MAX_PAGE_INDEX - MAX_PAGES, MAX_PAGE_INDEX)]), tokens=1)
    assert len(_core.encode(record)) == 64 + 8 + 16 + 8
    assert _core.decode(_core.encode(record)) == record


def test_more_than_a_record_holds() -> None:
    digest = "a" * 2**20
    end: dict[str, Any] = {"transfer": "x", "side": Side.SEND, "tokens": 1, "status": TransferStatus.OK}
    with pytest.raises(ValueError, match="64 MiB"):
        _core.encode(header(TransferEnd, pages=PageSet([(0, 64)]), digests=(digest,) * 64, **end))
    long = header(TransferEnd, pages=PageSet([(0, 60)]), digests=(digest,) * 60, **end)
    assert _core.decode(_core.encode(long)) == long


def test_places() -> None:
    rows = _core.Rows()
    rows.place("s", 1, 2, 3)
    assert list(rows) == [Record(stream="s", epoch=1, seq=2, time_ns=3)]
    for stream in ("", "\ud800", "s" * 257):
        with pytest.raises(ValueError, match="stream"):
            rows.place(stream, 1, 2, 3)
    with pytest.raises(ValueError):
        rows.place("s", 1, 2**63, 3)


def test_bytes_behind_a_record_are_refused() -> None:
    data = _core.encode(header(Alloc, pages=PAGE))
    with pytest.raises(ValueError, match="behind"):
        _core.decode(data + b"\0" * 8)
    with pytest.raises(ValueError, match="record 1"):
        _core.Rows.frombytes(data + b"\0" * 8)
    assert _core.decode(memoryview(bytearray(data))) == header(Alloc, pages=PAGE)


def test_records_are_given_back_whole() -> None:
    """No reference is lost or kept."""
    record = header(pages=PageSet.parse("1,3,5"), tokens=70_000, request="request-é")
    counts = [sys.getrefcount(x) for x in (record, record.request, record.pages, record.pages.runs, None)]
    for _ in range(1000):
        _core.decode(_core.encode(record))
    after = [sys.getrefcount(x) for x in (record, record.request, record.pages, record.pages.runs, None)]
    assert all(abs(a - b) < 100 for a, b in zip(counts, after, strict=True))
