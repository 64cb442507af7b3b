from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.records import (
    KINDS,
    MAX_ID_LENGTH,
    MAX_PAGE_INDEX,
    MAX_PAGES,
    Outcome,
    PageSet,
    Pool,
    Record,
    RecordError,
    Respond,
    Role,
    Scope,
    Side,
    TransferBegin,
    TransferEnd,
    TransferStatus,
    from_attributes,
    is_record_name,
    to_attributes,
)

INDEX_LISTS = st.lists(st.integers(0, 40), unique=True, max_size=30)
IDS = st.text(min_size=1, max_size=MAX_ID_LENGTH)
INTS = st.integers(0, 2**63 - 1)
PAGES = INDEX_LISTS.map(PageSet.of)


# Page sets, against plain lists


@given(INDEX_LISTS)
def test_a_page_set_is_a_list_of_indices(indices: list[int]) -> None:
    pages = PageSet.of(indices)
    assert list(pages) == indices
    assert len(pages) == len(indices)
    assert bool(pages) == bool(indices)
    assert list(pages.sorted()) == sorted(indices)
    for index in range(42):
        assert (index in pages) == (index in indices)


@given(INDEX_LISTS)
def test_text_and_back(indices: list[int]) -> None:
    pages = PageSet.of(indices)
    again = PageSet.parse(str(pages))
    assert again == pages
    assert again.runs == pages.runs
    assert hash(again) == hash(pages)
    assert eval(repr(pages)) == pages


@given(INDEX_LISTS, INDEX_LISTS)
def test_equal_means_the_same_indices_in_the_same_order(some: list[int], others: list[int]) -> None:
    assert (PageSet.of(some) == PageSet.of(others)) == (some == others)
    assert PageSet.parse(",".join(map(str, some))) == PageSet.of(some)
    assert PageSet.of(some) != some


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=10))
def test_sorted_takes_runs_that_overlap(runs: list[tuple[int, int]]) -> None:
    pages = PageSet(runs).sorted()
    assert list(pages) == sorted({index for start, stop in runs for index in range(start, stop)})
    assert all(stop < start for (_, stop), (start, _) in zip(pages.runs, pages.runs[1:], strict=False))


def test_text_as_the_convention_writes_it() -> None:
    pages = PageSet.parse("12-15,40,7")
    assert list(pages) == [12, 13, 14, 15, 40, 7]
    assert str(pages) == "12-15,40,7"
    assert PageSet.parse("3-3,4,5-6").runs == ((3, 7),)
    assert not PageSet.parse("")


def test_a_hundred_thousand_pages_are_one_run() -> None:
    pages = PageSet.of(range(100_000))
    assert pages.runs == ((0, 100_000),)
    assert str(pages) == "0-99999"
    assert PageSet.parse("0-99999").runs == pages.runs
    assert len(PageSet((*pages.runs, (100_000, 200_000))).runs) == 1


def test_what_is_done_with_a_run_does_not_take_time_for_each_page() -> None:
    # Page by page this would take days.
    one, other = PageSet([(0, 1 << 39)]), PageSet([(0, 1 << 38), (1 << 38, 1 << 39)])
    assert one == other
    assert hash(one) == hash(other)
    assert (1 << 39) - 1 in one
    assert one.sorted() == one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "neither an index nor a run"),
        ("-3", "neither an index nor a run"),
        ("3-", "neither an index nor a run"),
        ("3-4-5", "neither an index nor a run"),
        ("3,,4", "neither an index nor a run"),
        (",", "neither an index nor a run"),
        (" 3", "neither an index nor a run"),
        ("+3", "neither an index nor a run"),
        ("0x3", "neither an index nor a run"),
        ("٣", "neither an index nor a run"),  # Arabic-Indic three, which int() takes
        ("3-²", "neither an index nor a run"),
        ("5-4", "does not rise"),
        (str(MAX_PAGE_INDEX), "largest page index"),
        (f"0-{MAX_PAGE_INDEX}", "largest page index"),
        ("9" * 5000, "largest page index"),
        ("0" * 30 + "5", "largest page index"),  # and not read as page 0
        (f"0-{MAX_PAGES}", "more than one record may name"),
        (",".join(["0-9999999"] * 2), "more than one record may name"),
    ],
)
def test_text_that_names_no_pages(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        PageSet.parse(text)
    assert len(str(error.value)) < 120


def test_negative_indices_are_refused_not_dropped() -> None:
    for indices in ([-1, 0, 1], [0, -1], [-2]):
        with pytest.raises(ValueError, match="no page index"):
            PageSet.of(indices)


# Records as attributes


def records() -> st.SearchStrategy[Record]:
    fields: dict[Any, st.SearchStrategy[Any]] = {
        int: INTS,
        int | None: st.none() | INTS,
        bool: st.booleans(),
        str: IDS,
        str | None: st.none() | IDS,
        PageSet: PAGES,
        tuple[str, ...] | None: st.none(),
        **{kind: st.sampled_from(list(kind)) for kind in (Role, Scope, Side, TransferStatus, Outcome)},
    }

    def build(cls: type[Record]) -> st.SearchStrategy[Record]:
        parts = {f.name: fields[f.type] for f in msgspec.structs.fields(cls)}
        parts |= {"pool": st.just("") | IDS, "request": IDS, "tenant": IDS, "seq": INTS}
        if cls is Pool:
            parts |= {"pages": st.integers(0, MAX_PAGE_INDEX), "request": st.none(), "tenant": st.none()}
        if cls is TransferBegin:
            parts["peer_pages"] = st.none()
        if cls is Respond:
            parts["status"] = INTS
        built = st.builds(cls, **parts)
        return built.flatmap(whole)

    return st.sampled_from(sorted(KINDS.values(), key=lambda cls: cls.NAME)).flatmap(build)


def whole(record: Record) -> st.SearchStrategy[Record]:
    """Fields that have to fit each other."""
    if not isinstance(record, TransferBegin | TransferEnd):
        return st.just(record)
    digest = st.text("0123456789abcdef", min_size=1, max_size=8)
    digests = st.lists(digest, min_size=len(record.pages), max_size=len(record.pages)).map(tuple)
    fitting: dict[str, st.SearchStrategy[Any]] = {"digests": st.none() | digests}
    if isinstance(record, TransferBegin):
        fitting["peer_pages"] = st.permutations(range(100, 100 + len(record.pages))).map(PageSet.of)
    return st.fixed_dictionaries(fitting).map(lambda more: msgspec.structs.replace(record, **more))


@given(records())
def test_every_record_comes_back_from_its_attributes(record: Record) -> None:
    attributes = to_attributes(record)
    assert from_attributes(record.NAME, record.time_ns, attributes) == record
    as_json = {k: str(v) if type(v) is int else v for k, v in attributes.items()}
    assert from_attributes(record.NAME, record.time_ns, as_json) == record
    assert all(type(value) in (str, int, bool) for value in attributes.values())


def test_the_names_that_are_records() -> None:
    assert sorted(KINDS) == [
        "kv.admit", "kv.alloc", "kv.cache", "kv.free", "kv.pool", "kv.read", "kv.refuse", "kv.request.end",
        "kv.respond", "kv.scrub", "kv.share", "kv.transfer.begin", "kv.transfer.end", "kv.write",
    ]  # fmt: skip
    assert not is_record_name("kv.transfer")
    assert not is_record_name("KV.ALLOC")


# Hostile input

HEADER: dict[str, Any] = {
    "kv.stream.id": "decode-0",
    "kv.stream.epoch": 1,
    "kv.seq": 4,
    "kv.request.id": "r1",
    "kv.tenant.id": "tenant-a",
}
BEGIN = HEADER | {
    "kv.transfer.id": "x1",
    "kv.pages": "0-1",
    "kv.peer.pool.id": "decode-0",
    "kv.peer.pages": "4-5",
    "kv.tokens": 8,
}
END = HEADER | {
    "kv.transfer.id": "x1",
    "kv.side": "recv",
    "kv.pages": "0-1",
    "kv.tokens": 8,
    "kv.status": "ok",
}
POOL = {k: v for k, v in HEADER.items() if "request" not in k and "tenant" not in k} | {
    "kv.pool.pages": 4,
    "kv.page.tokens": 4,
    "kv.page.bytes": 1,
    "kv.role": "decode",
    "kv.context.limit": 16,
}
READ = HEADER | {"kv.pages": "0", "kv.tokens": 4}
REFUSE = HEADER | {"kv.pages": "0"}
RESPOND = HEADER | {"http.response.status_code": 200}
VALID = {
    "kv.transfer.begin": BEGIN,
    "kv.transfer.end": END,
    "kv.pool": POOL,
    "kv.read": READ,
    "kv.refuse": REFUSE,
    "kv.respond": RESPOND,
}


def refusal(name: str, attributes: dict[str, Any]) -> RecordError:
    with pytest.raises(RecordError) as caught:
        from_attributes(name, 1, attributes)
    return caught.value


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, valid in VALID.items() for key in valid])
def test_a_missing_field_is_named(name: str, key: str) -> None:
    from_attributes(name, 1, VALID[name])
    attributes = {k: v for k, v in VALID[name].items() if k != key}
    assert f"{key} is missing" in str(refusal(name, attributes))


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("kv.read", "kv.seq", -1, "kv.seq is -1, not within 0 to"),
        ("kv.read", "kv.seq", 1 << 63, "kv.seq is 9223372036854775808, not within"),
        ("kv.read", "kv.seq", True, "kv.seq is True, not an integer"),
        ("kv.read", "kv.seq", 1.0, "kv.seq is 1.0, not an integer"),
        ("kv.read", "kv.seq", "-1", "kv.seq is '-1', not an integer"),
        ("kv.read", "kv.seq", "४", "kv.seq is '४', not an integer"),
        ("kv.read", "kv.seq", "1" * 5000, "kv.seq is '1111"),
        ("kv.read", "kv.stream.id", "", "kv.stream.id has 0 characters, not 1 to 256"),
        ("kv.read", "kv.stream.id", 7, "kv.stream.id is 7, not a string"),
        ("kv.read", "kv.request.id", "r" * 257, "kv.request.id has 257 characters, not 1 to 256"),
        ("kv.read", "kv.tenant.id", None, "kv.tenant.id is None, not a string"),
        ("kv.read", "kv.pool.id", b"x", "kv.pool.id is b'x', not a string"),
        ("kv.read", "kv.pages", 3, "kv.pages is 3, not a string"),
        ("kv.read", "kv.pages", "1099511627776", "kv.pages: '1099511627776' is beyond the largest page index"),
        ("kv.read", "kv.pages", "x" * 9999, "kv.pages: 'xxx"),
        ("kv.read", "kv.tokens", [], "kv.tokens is [], not an integer"),
        ("kv.pool", "kv.role", "king", "kv.role is 'king', not one of prefill, decode, unified, router"),
        ("kv.pool", "kv.role", ["decode"], "kv.role is ['decode'], not one of"),
        ("kv.pool", "kv.pool.pages", MAX_PAGE_INDEX + 1, "kv.pool.pages is 1099511627777, more than 2**40"),
        ("kv.respond", "kv.final", "true", "kv.final is 'true', not a boolean"),
        ("kv.respond", "http.response.status_code", "two hundred", "http.response.status_code is 'two hundred'"),
        ("kv.transfer.begin", "kv.peer.pages", "4", "kv.pages names 2 pages, kv.peer.pages 1"),
        ("kv.transfer.begin", "kv.digests", "aa", "kv.digests has 1 digests for 2 pages"),
        ("kv.transfer.begin", "kv.digests", "aa,BB", "kv.digests: 'BB' is not lower-case hexadecimal"),
        ("kv.transfer.begin", "kv.digests", "aa,", "kv.digests: '' is not lower-case hexadecimal"),
        ("kv.transfer.end", "kv.digests", "aa,bb,cc", "kv.digests has 3 digests for 2 pages"),
        ("kv.transfer.end", "kv.side", "left", "kv.side is 'left', not one of send, recv"),
        ("kv.transfer.end", "kv.status", "OK", "kv.status is 'OK', not one of ok, failed, aborted"),
    ],
)
def test_a_bad_field_is_named_with_what_it_holds(name: str, key: str, value: Any, message: str) -> None:
    error = refusal(name, VALID[name] | {key: value})
    assert message in str(error)
    assert str(error).startswith(name)
    assert len(str(error)) < 250
    # Its place in the stream stays known unless that is what is broken.
    assert (error.header is None) == (key in ("kv.seq", "kv.stream.id"))
    if error.header is not None:
        assert (error.header.stream, error.header.epoch, error.header.seq) == ("decode-0", 1, 4)


def test_a_scrub_needs_no_request_but_not_half_of_one() -> None:
    scrub = {k: v for k, v in HEADER.items() if k not in ("kv.request.id", "kv.tenant.id")} | {"kv.pages": "0"}
    assert from_attributes("kv.scrub", 1, scrub).request is None
    assert "kv.tenant.id is missing" in str(refusal("kv.scrub", scrub | {"kv.request.id": "r1"}))


def test_the_pool_is_the_streams_own_unless_it_is_named() -> None:
    assert from_attributes("kv.read", 1, READ).pool_id == "decode-0"
    assert from_attributes("kv.read", 1, READ | {"kv.pool.id": "other"}).pool_id == "other"
    assert "kv.pool.id" not in to_attributes(from_attributes("kv.read", 1, READ))


@given(st.sampled_from(sorted(VALID)), st.data())
def test_no_value_in_a_field_raises_anything_else(name: str, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(VALID[name])))
    value = data.draw(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers())
    )
    try:
        from_attributes(name, 1, VALID[name] | {key: value})
    except RecordError as error:
        assert key in str(error) or "kv.pages" in str(error)  # noqa: PT017
