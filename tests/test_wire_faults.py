"""Real workers over wires that do harm, each kind of transport: requests end, pages come back, the guard tells."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from random_worker import random_model
from test_ledger_properties import interleaved
from transports import KINDS, need
from worker_rig import DECODE_PAGES, Rig, judge

from engine.model.plain import generate
from engine.transport.link import Kind
from guard.findings import Kind as Found
from guard.records import Free, Read, RequestEnd, Side, TransferBegin, TransferEnd, TransferStatus

pytestmark = pytest.mark.engine
MODEL = random_model()
HARMLESS = ("delay", "duplicate", "reorder")
SEEN = ("flip", "drop", "swap")
"""All is said to have arrived, and the digests tell that it has not."""
ENDS = {
    **dict.fromkeys(HARMLESS, (TransferStatus.OK, TransferStatus.OK)),
    **dict.fromkeys(SEEN, (TransferStatus.OK, TransferStatus.FAILED)),
    "cut": (TransferStatus.FAILED, TransferStatus.FAILED),
    "kill": (None, TransferStatus.ABORTED),
}
"""How each transfer ends by the sender's records, and by the receiver's."""
PROCESS = Path(__file__).with_name("faulty_worker.py")


def prompt(seed: object, length: int = 60) -> list[int]:
    return random.Random(f"{seed}").choices(range(256), k=length)


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Workers whose pools hold what an earlier tenant left, so that a page that did not arrive would be a leak."""
    kind: Kind = request.param
    need(kind)
    with closing(Rig(process=PROCESS, transport=kind)) as rig:
        for number in range(3):
            serve(rig, f"before-{number}", "alice")
        rig.until_idle()
        yield rig
        rig.until_idle()
        assert rig.measure("decode-0").gauges["pages_free"] == DECODE_PAGES
        tell(rig)


def serve(rig: Rig, request: str, tenant: str = "bob") -> None:
    """The request is answered as if nothing was wrong."""
    rig.submit(request, prompt(request), 4, tenant=tenant)
    assert rig.answer(request) == generate(MODEL, prompt(request), 4), request


def tell(rig: Rig) -> None:
    """When all is over: what the records of all that was done say of each transfer, and what the guard concludes.

    The same in every order in which the streams' records can arrive. Of a sender that is killed, or cut off, the guard
    finds nothing: the receiver ended its transfer as one that did not arrive, kept its pages until the transport had
    confirmed that, and read none of them. That is how it should be done, whatever the wire did.
    """
    records = rig.stop()
    assert rig.segments() == []
    begins = {r.transfer: r for r in records if isinstance(r, TransferBegin)}
    ends = {(r.transfer, r.side): r.status for r in records if isinstance(r, TransferEnd)}
    asked = {record.request for record in records}
    expected = set()
    for fault, (sent, received) in ENDS.items():
        transfer = f"{fault}-r.0"
        if f"{fault}-r" not in asked:
            continue
        assert ends.get((transfer, Side.SEND)) is sent, fault
        assert ends[transfer, Side.RECV] is received, fault
        if fault in SEEN:
            there = list(begins[transfer].peer_pages)
            pages = {"flip": there[:1], "drop": there[-1:], "swap": there[:2]}[fault]
            expected.add((Found.DIGEST_MISMATCH, f"{fault}-r", transfer, "decode-0", frozenset(pages)))
    # The last ones of the process that was killed may have been lost with it, the transfer's begin among them.
    last = [r for r in records if r.request == "kill-r" and r.stream == "prefill-0"]
    for lost in range(len(last) + 1):
        arrived = [r for r in records if r not in last[len(last) - lost :]]
        for order in [arrived, *(interleaved(arrived, seed) for seed in range(5))]:
            found = judge(order)
            assert {(f.kind, f.request, f.transfer, f.pool, frozenset(f.pages)) for f in found} == expected


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_does_no_harm_is_no_error(rig: Rig, fault: str) -> None:
    serve(rig, f"{fault}-r")


@pytest.mark.parametrize("fault", [*SEEN, "cut"])
def test_what_did_not_arrive_is_not_read(rig: Rig, fault: str) -> None:
    request = f"{fault}-r"
    rig.submit(request, prompt(request), 4, tenant="bob")
    failure = rig.failure(request)
    assert (failure.status, failure.code) == (500, "transfer_failed")
    assert rig.tokens[request] == []
    rig.until(lambda: len(rig.seen(RequestEnd, request)) == 2)
    # The transfer is over on both sides, and on both before its pages are anybody else's.
    rig.until(lambda: len(rig.seen(TransferEnd, request)) == 2)
    ends = {r.side: r.status for r in rig.seen(TransferEnd, request) if isinstance(r, TransferEnd)}
    assert ends[Side.RECV] is TransferStatus.FAILED
    assert [r for r in rig.seen(Read, request) if r.stream == "decode-0"] == []
    rig.until_idle()
    serve(rig, f"after-{fault}")


def test_a_sender_that_dies_in_the_middle(rig: Rig) -> None:
    rig.submit("kill-r", prompt("kill"), 4, tenant="bob")
    rig.processes["prefill-0"].wait()
    rig.kill("prefill-0")  # it is dead already; the others are told
    assert rig.failure("kill-r").code == "worker_failed"
    rig.until_idle()
    assert rig.measure("decode-0").gauges["pages_free"] == DECODE_PAGES
    end = rig.until_seen(TransferEnd, "kill-r")
    assert isinstance(end, TransferEnd)
    assert (end.side, end.status) == (Side.RECV, TransferStatus.ABORTED)
    rig.start("prefill-0")
    rig.until(lambda: "prefill-0" in rig.hellos)
    serve(rig, "after-kill")


def test_a_transfer_that_takes_too_long_fails_its_request_and_keeps_its_pages() -> None:
    with closing(Rig(process=PROCESS, transfer_s=0.2)) as rig:
        rig.submit("hang-r", prompt("hang"), 4)
        failure = rig.failure("hang-r")
        assert (failure.status, failure.code) == (500, "transfer_failed")
        assert "0.2 s" in failure.reason
        rig.abort("hang-r")  # as the router does
        rig.until(lambda: len(rig.seen(RequestEnd, "hang-r")) == 2)
        # Nobody knows whether the wire is still at it: on both sides the pages stay, whatever time goes by.
        for worker in ("prefill-0", "decode-0"):
            stats = rig.measure(worker)
            assert stats.gauges["pages_deferred"] == 8
            assert stats.gauges["transfers"] == 1
        assert rig.measure("prefill-0").gauges["transfers_unconfirmed"] == 1
        assert rig.measure("prefill-0").counters["transfers_overdue"] == 1
        assert rig.seen(TransferEnd, "hang-r") == []
        assert rig.seen(Free, "hang-r") == []
        serve(rig, "meanwhile")
        (rig.directory / "let-go").touch()
        rig.until_idle()
        assert {r.side for r in rig.seen(TransferEnd, "hang-r") if isinstance(r, TransferEnd)} == {*Side}
        assert judge(rig.stop()) == []


def test_a_bug_in_the_middle_fails_its_request_and_keeps_its_pages() -> None:
    with closing(Rig(process=PROCESS)) as rig:
        rig.submit("bug-r", prompt("bug"), 4)
        failure = rig.failure("bug-r")
        assert (failure.status, failure.code) == (500, "transfer_failed")
        assert "unexpected KeyError, see the log" in failure.reason
        rig.abort("bug-r")  # as the router does
        rig.until(lambda: len(rig.seen(RequestEnd, "bug-r")) == 2)
        for number in range(8):  # as many as there are threads, and again
            serve(rig, f"meanwhile-{number}")
        stats = {worker: rig.measure(worker) for worker in ("prefill-0", "decode-0")}
        assert {worker: s.gauges["pages_deferred"] for worker, s in stats.items()} == {"prefill-0": 8, "decode-0": 8}
        assert stats["prefill-0"].gauges["transfers_unconfirmed"] == 1
        assert stats["prefill-0"].counters["transfer_crashes"] == 1
        assert rig.seen(TransferEnd, "bug-r") == []
        assert judge(rig.stop()) == []
