from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_worker import random_model
from worker_rig import DECODE_PAGES, PATIENCE_S, PROCESS, Rig, findings

from engine.config import PoolConfig
from engine.digest import PageDigester
from engine.faults import Fault
from engine.mailbox import Mailbox
from engine.messages import Abort, Handoff, Hello, Reserve, StopTransfer, TransferStopped
from engine.model.plain import generate
from engine.segment import Segment
from engine.transport.link import Batch, Fate, connect
from guard.act.board import Verdict
from guard.findings import Kind
from guard.native._core import BoardWriter
from guard.records import (
    Alloc,
    Cache,
    Free,
    Outcome,
    PageSet,
    Read,
    Refuse,
    RequestEnd,
    Respond,
    Role,
    Scrub,
    Share,
    TransferBegin,
    TransferEnd,
    TransferStatus,
    Write,
)

pytestmark = pytest.mark.engine
MODEL = random_model()
ENDLESS = 1200
"""More tokens than a test waits for."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(256), k=length)


@pytest.fixture
def start() -> Iterator[Callable[..., Rig]]:
    with ExitStack() as stack:
        yield lambda **fields: stack.enter_context(closing(Rig(**fields)))


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    """Workers for the tests that leave them as they were; in the end their whole run must have no finding."""
    with closing(Rig(prefill=PoolConfig(pages=24, chunk_tokens=24, max_batch=4))) as rig:
        yield rig
        rig.until_idle()
        assert findings(rig.stop()) == []
        assert rig.segments() == []


# Answers


VARIANTS: dict[str, dict[str, Any]] = {
    "shm": {},
    "tcp": {"transport": "tcp"},
    "shm-pieces": {"piece_pages": 2},
    "tcp-pieces": {"transport": "tcp", "piece_pages": 1},
    "bare": {"digests": False, "prefix_cache": False, "zero_on_free": True},
    "preemption": {"decode": PoolConfig(pages=14, max_batch=4)},
    "two-prefills": {"workers": ("prefill-0", "prefill-1", "decode-0"), "prefill": PoolConfig(workers=2, pages=16)},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
def test_answers_are_the_plain_loops_and_the_guard_finds_nothing(
    start: Callable[..., Rig], fields: dict[str, Any]
) -> None:
    rig = start(**fields)
    prompts = {f"r{n}": prompt(length) for n, length in enumerate((1, 7, 8, 9, 24, 25, 60, 33, 48, 61))}
    for number, (request, tokens) in enumerate(prompts.items()):
        worker = "prefill-1" if number % 2 and "prefill-1" in rig.hellos else "prefill-0"
        rig.submit(request, tokens, 24, tenant=f"tenant-{number % 3}", prefill=worker)
    for request, tokens in prompts.items():
        assert rig.answer(request) == generate(MODEL, tokens, 24), request
        assert rig.finish[request] == "length"
    rig.until_idle()
    preemptions = rig.measure("decode-0").counters.get("preemptions", 0)
    assert bool(preemptions) == ("decode" in fields)
    records = rig.stop()
    assert findings(records) == []
    assert rig.segments() == []
    if fields.get("zero_on_free"):
        freed = {(r.stream, page) for r in records if isinstance(r, Free) for page in r.pages}
        assert freed == {(r.stream, page) for r in records if isinstance(r, Scrub) for page in r.pages}


def test_first_and_last_bytes_are_recorded_before_they_leave(shared: Rig) -> None:
    tokens = prompt(30)
    shared.submit("respond", tokens, 5)
    shared.answer("respond")
    shared.until(lambda: len(shared.seen(RequestEnd, "respond")) == 2)
    responses = shared.seen(Respond, "respond")
    assert [(r.status, r.tokens, r.final) for r in responses if isinstance(r, Respond)] == [
        (200, 1, False),
        (200, 5, True),
    ]
    shared.submit("one", tokens, 1)
    shared.answer("one")
    shared.until(lambda: bool(shared.seen(Respond, "one")))
    assert [(r.tokens, r.final) for r in shared.seen(Respond, "one") if isinstance(r, Respond)] == [(1, True)]


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(shared: Rig) -> None:
    how: dict[str, Any] = {"max_tokens": 20, "temperature": 1.5, "top_p": 0.95, "seed": 7}
    tokens = prompt(20)
    shared.submit("seed-alone", tokens, **how)
    alone = shared.answer("seed-alone")
    for n in range(4):
        shared.submit(f"seed-other-{n}", prompt(20 + n), 30, temperature=1.0)
    shared.submit("seed-again", tokens, **how)
    assert shared.answer("seed-again") == alone
    for n in range(4):
        shared.answer(f"seed-other-{n}")
    shared.submit("seed-unseeded", tokens, 20, temperature=1.5)
    assert shared.answer("seed-unseeded") != alone


def test_an_end_token_ends_the_answer_and_is_not_part_of_it(shared: Rig) -> None:
    # So hot that every token is about as likely as any other: one of the 259 that end it comes.
    shared.submit("end", prompt(20), ENDLESS, temperature=100.0, seed=1)
    tokens = shared.answer("end")
    assert shared.finish["end"] == "stop"
    assert len(tokens) < ENDLESS
    assert not MODEL.eos_ids.intersection(tokens)


def test_a_prefix_is_shared_within_a_tenant_only(shared: Rig) -> None:
    tokens = prompt(40, 9)
    expected = generate(MODEL, [*tokens, 1], 6)
    shared.submit("prefix-1", tokens, 2, tenant="p")
    shared.answer("prefix-1")
    shared.until_seen(Cache, "prefix-1")
    for request, tenant in (("prefix-2", "p"), ("prefix-3", "q")):
        shared.submit(request, [*tokens, 1], 6, tenant=tenant)
        assert shared.answer(request) == expected
        shared.until(lambda request=request: len(shared.seen(RequestEnd, request)) == 2)  # type: ignore[misc]
    [share] = shared.seen(Share, "prefix-2")
    assert isinstance(share, Share)
    assert (len(share.pages), share.share_from) == (5, "prefix-1")
    assert shared.seen(Share, "prefix-3") == []


def test_cached_pages_make_room(shared: Rig) -> None:
    for n in range(8):
        shared.submit(f"evict-{n}", prompt(64, n), 1, tenant="evict")
        shared.answer(f"evict-{n}")
    shared.until_idle()
    cached = shared.measure("prefill-0").gauges["pages_cached"]
    assert 0 < cached <= 24


def test_the_longest_answer_that_the_pool_holds(start: Callable[..., Rig]) -> None:
    rig = start(decode=PoolConfig(pages=6))
    tokens = prompt(30)
    rig.submit("r", tokens, 100)
    assert rig.answer("r") == generate(MODEL, tokens, 6 * 8 - len(tokens))
    assert rig.finish["r"] == "length"


# Refusals and ends


def test_a_prompt_that_prefill_cannot_hold_is_rejected_by_both(start: Callable[..., Rig]) -> None:
    rig = start(prefill=PoolConfig(pages=4), context=32)
    rig.submit("long", prompt(33))
    failure = rig.failure("long")
    assert (failure.status, failure.code) == (400, "context_length_exceeded")
    assert "33" in failure.reason
    assert "32" in failure.reason
    rig.submit("fits", prompt(30), 2)
    assert rig.answer("fits") == generate(MODEL, prompt(30), 2)
    rig.until_idle()
    assert findings(rig.stop()) == []
    outcomes = {(r.stream, r.outcome) for r in rig.seen(RequestEnd, "long") if isinstance(r, RequestEnd)}
    assert outcomes == {("prefill-0", Outcome.REJECTED), ("decode-0", Outcome.ABORTED)}


def test_a_prompt_that_decode_cannot_hold_is_rejected(start: Callable[..., Rig]) -> None:
    rig = start(decode=PoolConfig(pages=4), context=32)
    rig.submit("long", prompt(32))
    assert rig.failure("long").code == "context_length_exceeded"
    rig.abort("long")  # as the router does
    rig.until_idle()
    assert findings(rig.stop()) == []


def test_abort_while_running(shared: Rig) -> None:
    shared.submit("abort-run", prompt(30), ENDLESS)
    shared.until(lambda: len(shared.tokens["abort-run"]) > 3)
    shared.abort("abort-run")
    shared.until_idle()
    assert "abort-run" not in shared.finish


def test_a_stop_string_ends_the_answer_as_finished(shared: Rig) -> None:
    shared.submit("stop-string", prompt(30), ENDLESS)
    shared.until(lambda: len(shared.tokens["stop-string"]) > 3)
    shared.abort("stop-string", Outcome.FINISHED)
    shared.until(lambda: len(shared.seen(RequestEnd, "stop-string")) == 2)
    assert {r.outcome for r in shared.seen(RequestEnd, "stop-string") if isinstance(r, RequestEnd)} == {
        Outcome.FINISHED
    }
    [first, last] = [r for r in shared.seen(Respond, "stop-string") if isinstance(r, Respond)]
    assert not first.final
    assert last.final


def test_abort_while_decode_waits_for_prefill(shared: Rig) -> None:
    shared.submit("abort-reserved", prompt(30), to=(Role.DECODE,))
    shared.until_seen(Alloc, "abort-reserved")
    shared.abort("abort-reserved")
    shared.until(lambda: bool(shared.seen(Free, "abort-reserved")))
    shared.submit("abort-reserved", prompt(30), to=(Role.PREFILL,))  # the router's word comes late
    shared.until(lambda: len(shared.seen(RequestEnd, "abort-reserved")) == 2)
    shared.until_idle()
    assert shared.seen(TransferBegin, "abort-reserved") == []


def test_abort_while_prefill_waits_for_decode(shared: Rig) -> None:
    shared.submit("abort-computed", prompt(30), to=(Role.PREFILL,))
    shared.until_seen(Write, "abort-computed")
    shared.abort("abort-computed")
    shared.submit("abort-computed", prompt(30), to=(Role.DECODE,))
    shared.until(lambda: len(shared.seen(RequestEnd, "abort-computed")) == 2)
    shared.until_idle()


def test_whichever_worker_hears_first(shared: Rig) -> None:
    shared.submit("decode-first", prompt(30), to=(Role.DECODE,))
    shared.until_seen(Alloc, "decode-first")
    shared.submit("decode-first", prompt(30), to=(Role.PREFILL,))
    shared.submit("prefill-first", prompt(31), to=(Role.PREFILL,))
    shared.until_seen(Write, "prefill-first")
    shared.submit("prefill-first", prompt(31), to=(Role.DECODE,))
    assert shared.answer("decode-first") == generate(MODEL, prompt(30), 8)
    assert shared.answer("prefill-first") == generate(MODEL, prompt(31), 8)


@pytest.mark.parametrize("fields", [{}, {"transport": "tcp", "piece_pages": 1}], ids=["shm", "tcp-pieces"])
def test_aborts_at_any_moment_leave_nothing_behind(start: Callable[..., Rig], fields: dict[str, Any]) -> None:
    rig = start(**fields, decode=PoolConfig(pages=40, max_batch=4))
    rng = random.Random(3)
    kept = []
    for n in range(40):
        request, tokens = f"r{n}", prompt(rng.randrange(1, 90), n)
        rig.submit(request, tokens, 12, tenant=f"t{n % 4}")
        if rng.random() < 0.6:
            rig.until(lambda: rng.random() < 0.3)  # any moment
            rig.abort(request)
        else:
            kept.append((request, tokens))
    for request, tokens in kept:
        assert rig.answer(request) == generate(MODEL, tokens, 12)
    rig.until_idle()
    assert findings(rig.stop()) == []


def test_a_lease_runs_out(start: Callable[..., Rig]) -> None:
    rig = start(lease_s=0.2)
    rig.submit("r", prompt(30), to=(Role.PREFILL,))
    failure = rig.failure("r")
    assert (failure.status, failure.code) == (503, "no_capacity")
    rig.submit("r", prompt(30), to=(Role.DECODE,))
    rig.until_idle()
    assert findings(rig.stop()) == []


# Deaths


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prefill_dies(start: Callable[..., Rig], transport: str) -> None:
    rig = start(transport=transport)
    rig.submit("running", prompt(30), 200)
    rig.until(lambda: bool(rig.tokens["running"]))
    rig.submit("waiting", prompt(30), to=(Role.DECODE,))
    rig.until_seen(Alloc, "waiting")
    old = rig.hellos["prefill-0"]
    rig.kill("prefill-0")
    assert rig.failure("waiting").code == "worker_failed"
    rig.start("prefill-0")
    rig.until(lambda: "prefill-0" in rig.hellos)
    assert rig.hellos["prefill-0"].epoch > old.epoch
    assert rig.answer("running") == generate(MODEL, prompt(30), 200)
    rig.submit("after", prompt(31))
    assert rig.answer("after") == generate(MODEL, prompt(31), 8)
    rig.send("prefill-0", Abort(request="x", epoch=old.epoch))
    rig.until_idle()
    assert rig.measure("prefill-0").counters["stale_messages"] == 1
    assert len(rig.segments()) == 2, "the dead one's pool is gone"
    assert findings(rig.stop()) == []


def test_decode_dies(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.submit("running", prompt(30), ENDLESS)
    rig.until(lambda: bool(rig.tokens["running"]))
    rig.submit("computed", prompt(30), to=(Role.PREFILL,))
    rig.until_seen(Write, "computed")
    rig.kill("decode-0")
    rig.until(lambda: bool(rig.seen(RequestEnd, "computed")))
    rig.start("decode-0")
    rig.until(lambda: "decode-0" in rig.hellos)
    rig.submit("after", prompt(31))
    assert rig.answer("after") == generate(MODEL, prompt(31), 8)
    rig.until_idle()
    assert findings(rig.stop()) == []


def test_a_worker_ends_with_whoever_started_it() -> None:
    with closing(Rig()) as rig:
        command = [sys.executable, str(PROCESS), "--name", "prefill-7", "--role", "prefill"]
        command += ["--config", str(rig.directory / "engine.yaml")]
        script = f"import subprocess, time; print(subprocess.Popen({command!r}).pid, flush=True); time.sleep(600)"
        parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=PROCESS.parent.parent)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        rig.until(lambda: "prefill-7" in rig.hellos)
        ended = os.pidfd_open(child)
        parent.kill()
        parent.wait()
        assert select.select([ended], [], [], PATIENCE_S)[0], "it lives on"
        os.close(ended)


def test_a_configuration_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    for text, reason in (
        ("digest_key: ''\nmodel: tiny\n", "digest_key"),
        ("pages: 3", "pages"),
        ("- 1", "engine.yaml"),
    ):
        file.write_text(text)
        command = [sys.executable, str(PROCESS), "--name", "prefill-0", "--role", "prefill", "--config", str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=PROCESS.parent.parent, check=False)
        assert ran.returncode == 2
        assert reason in ran.stderr
        assert len(ran.stderr.splitlines()) == 1


# Prevention


class FakePrefill:
    """The test as decode's prefill worker: it sends whatever it likes."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.mailbox = Mailbox(rig.directory, "prefill-0")
        rig.hellos["prefill-0"] = Hello(
            worker="prefill-0", epoch=1, role=Role.PREFILL, pages=8, page_tokens=8, page_bytes=8, address=""
        )
        self.digester = PageDigester(bytes.fromhex(rig.config.digest_key))

    def reserved(self, request: str) -> Reserve:
        self.rig.submit(request, prompt(20), to=(Role.DECODE,))
        return next(m for m in self.messages() if isinstance(m, Reserve) and m.request == request)

    def messages(self) -> Iterator[Any]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            yield from self.mailbox.receive(100)

    def hand_off(self, reserve: Reserve, **fields: Any) -> None:
        message: dict[str, Any] = {
            "request": reserve.request,
            "epoch": reserve.decode_epoch,
            "transfer": reserve.transfer,
            "status": TransferStatus.OK,
            "pages": reserve.pages,
            "tokens": 20,
            "first_token": 5,
            **fields,
        }
        self.rig.send("decode-0", Handoff(**message))


@pytest.fixture
def fake(start: Callable[..., Rig]) -> Iterator[FakePrefill]:
    fake = FakePrefill(start(workers=("decode-0",)))
    yield fake
    fake.mailbox.close()


@pytest.mark.parametrize(
    "fields",
    [{"digests": ["00" * 16] * 3}, {"tokens": 19}, {"tokens": 8, "drop": 2}, {"first_token": None}],
    ids=["digests", "tokens", "pages", "first-token"],
)
def test_decode_does_not_begin_on_what_is_not_what_was_sent(fake: FakePrefill, fields: dict[str, Any]) -> None:
    reserve = fake.reserved("r")
    if fields.pop("drop", 0):
        fields["pages"] = reserve.pages[:1]
    fake.hand_off(reserve, **fields)
    failure = fake.rig.failure("r")
    assert (failure.status, failure.code) == (500, "transfer_failed")
    gauges = fake.rig.measure("decode-0").gauges
    assert gauges["pages_free"] == DECODE_PAGES
    fake.rig.until(lambda: bool(fake.rig.seen(Free, "r")))
    assert fake.rig.seen(Read, "r") == []


@pytest.mark.parametrize(
    ("changed", "arrives"),
    [({}, True), ({"generations": [9, 9, 9]}, False), ({"nonce": bytes(16)}, False), ({"stale": 1}, False)],
    ids=["right", "generation", "nonce", "stale"],
)
def test_decode_seals_digests_as_it_asked_prefill_to(fake: FakePrefill, changed: dict[str, Any], arrives: bool) -> None:
    reserve = fake.reserved("r")
    assert len(reserve.nonce) == 16
    decode = fake.rig.hellos["decode-0"]
    segment = Segment.open(Path(decode.address.removeprefix("shm:")), decode.page_bytes)
    sent = torch.arange(3, dtype=torch.uint8)[:, None].repeat(1, decode.page_bytes) + 1
    arrived = sent.clone()
    if "stale" in changed:
        arrived[changed["stale"]] = 0  # what stood there before
    for page, data in zip(reserve.pages, arrived, strict=True):
        segment.put(page, data, np.array([1, 2, 3]))
    how = {"generations": reserve.generations, "nonce": reserve.nonce, **changed}
    how.pop("stale", None)
    fake.hand_off(reserve, digests=fake.digester.pages(sent, "a", "r", [0, 1, 2], **how))
    # Past the digests it comes to the tags, which are none of the request's.
    assert fake.rig.failure("r").code == ("kv_page_mismatch" if arrives else "transfer_failed")


@pytest.mark.parametrize("nonce", [b"", bytes(15), bytes(17)], ids=len)
def test_prefill_takes_no_reservation_without_a_proper_nonce(start: Callable[..., Rig], nonce: bytes) -> None:
    rig = start(workers=("prefill-0",))
    rig.hellos["decode-0"] = Hello(
        worker="decode-0", epoch=1, role=Role.DECODE, pages=8, page_tokens=8, page_bytes=8, address=""
    )
    with closing(Mailbox(rig.directory, "decode-0")):
        rig.submit("r", prompt(8), to=(Role.PREFILL,))
        reserve = Reserve(
            request="r", epoch=rig.hellos["prefill-0"].epoch, decode="decode-0", decode_epoch=1, transfer="r.0",
            pages=[0], generations=[1], nonce=nonce, address="shm:/dev/shm/kvguard-test-nowhere",
        )  # fmt: skip
        rig.send("prefill-0", reserve)
        rig.until(lambda: rig.measure("prefill-0").counters.get("strange_messages") == 1)
        assert rig.measure("prefill-0").gauges["transfers"] == 0


def test_decode_does_not_read_pages_that_bear_no_tag_of_the_request(fake: FakePrefill) -> None:
    reserve = fake.reserved("r")
    fake.hand_off(reserve)  # nothing was ever written
    assert fake.rig.failure("r").code == "kv_page_mismatch"
    assert fake.rig.tokens["r"] == [], "not even the first token"
    assert fake.rig.measure("decode-0").counters["page_refusals"] == 1
    refused = fake.rig.until_seen(Refuse, "r")
    assert isinstance(refused, Refuse)
    assert refused.pages == PageSet.of(reserve.pages)
    assert not fake.rig.seen(Read, "r"), "what is not read is not said to be"


def test_a_page_that_changes_hands_in_the_middle_of_an_answer_is_refused(start: Callable[..., Rig]) -> None:
    rig = start()
    other = prompt(40)
    rig.submit("victim", prompt(30), ENDLESS)
    rig.submit("other", other, 40)
    rig.until(lambda: len(rig.tokens["victim"]) > 3)
    decode = rig.hellos["decode-0"]
    segment = Segment.open(Path(decode.address.removeprefix("shm:")), decode.page_bytes)
    rig.until(lambda: any(r.stream == "decode-0" for r in rig.seen(Alloc, "victim")))
    alloc = next(r for r in rig.seen(Alloc, "victim") if r.stream == "decode-0")
    assert isinstance(alloc, Alloc)
    # A late writer of somebody else's pages.
    segment.put(next(iter(alloc.pages)), torch.zeros(decode.page_bytes, dtype=torch.uint8), np.array([1, 2, 3]))
    assert rig.failure("victim").code == "kv_page_mismatch"
    assert rig.answer("other") == generate(MODEL, other, 40)
    rig.until_seen(Refuse, "victim")
    assert findings(rig.stop()) == [f"hook-divergence victim decode-0 {next(iter(alloc.pages))}"]


def test_pages_stay_until_prefill_says_that_it_is_over(fake: FakePrefill) -> None:
    reserve = fake.reserved("r")
    fake.rig.abort("r")
    stop = next(m for m in fake.messages() if isinstance(m, StopTransfer))
    assert (stop.transfer, stop.decode) == (reserve.transfer, "decode-0")
    gauges = fake.rig.measure("decode-0").gauges
    assert gauges["pages_deferred"] == len(reserve.pages) == 3
    assert gauges["pages_free"] == DECODE_PAGES - 3
    other = fake.reserved("s")
    assert not set(other.pages) & set(reserve.pages)
    stopped = TransferStopped(
        request="r",
        epoch=stop.decode_epoch,
        transfer=stop.transfer,
        status=TransferStatus.ABORTED,
        pages=reserve.pages,
    )
    fake.rig.send("decode-0", stopped)
    fake.rig.until(lambda: fake.rig.measure("decode-0").gauges["pages_deferred"] == 0)
    fake.rig.until_seen(TransferEnd, "r")


def test_a_revoked_transfer_writes_nothing_over_tcp(start: Callable[..., Rig]) -> None:
    rig = start(workers=("decode-0",), transport="tcp")
    fake = FakePrefill(rig)
    with closing(fake.mailbox):
        reserve = fake.reserved("r")
        fake.hand_off(reserve, status=TransferStatus.ABORTED, pages=[], first_token=None)
        rig.until(lambda: bool(rig.seen(RequestEnd, "r")))
        rig.until(lambda: rig.measure("decode-0").gauges["pages_free"] == DECODE_PAGES)
        source = Segment.create(Path(f"/dev/shm/{rig.directory.name}"), 1, rig.hellos["decode-0"].page_bytes)
        source.unlink()
        link = connect("tcp", reserve.address, source, fake.digester)
        link.post(Batch(reserve.transfer, [0], reserve.pages[:1], np.array([[1, 1, 1]])))
        rig.until(lambda: link.poll(0.01) is not Fate.MOVING)
        assert link.poll(0.0) is Fate.FAILED
        assert "took 0 of 1" in link.error


# The gate


def test_no_token_leaves_before_the_verdict_and_a_kill_ends_the_request(
    start: Callable[..., Rig], tmp_path: Path
) -> None:
    board = BoardWriter.create(tmp_path / "board", requests=64, streams=8)
    rig = start(guard={"board": str(tmp_path / "board"), "gate": "sync", "wait_ms": 60_000, "on_timeout": "closed"})
    board.heartbeat()
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(0.1):
            board.heartbeat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        rig.submit("good", prompt(30), 40)
        rig.submit("bad", prompt(50), ENDLESS)
        rig.until(lambda: rig.measure("decode-0").counters["gate_waits"] == 2)
        assert not rig.tokens["good"]
        assert not rig.tokens["bad"]
        board.set_verdict("bad", Verdict.KILL, "incident-7")
        failure = rig.failure("bad")
        assert (failure.status, failure.code, failure.incident) == (503, "kv_guard_killed", "incident-7")
        rig.until_seen(Scrub, "bad")
        assert not rig.tokens["good"]
        epoch = rig.hellos["decode-0"].epoch

        def judged() -> bool:
            board.advance("decode-0", epoch, max(r.seq for r in rig.guard.records if r.stream == "decode-0"))
            return "good" in rig.finish

        rig.until(judged)
        assert rig.tokens["good"] == generate(MODEL, prompt(30), 40)
        assert rig.tokens["bad"] == []
        assert rig.seen(Respond, "bad") == []
        [end] = [r for r in rig.seen(RequestEnd, "bad") if r.stream == "decode-0"]
        assert isinstance(end, RequestEnd)
        assert end.outcome is Outcome.ABORTED
    finally:
        beating.set()
        thread.join()
        board.close()


def test_a_guard_that_is_gone_ends_requests_where_that_is_asked_for(start: Callable[..., Rig], tmp_path: Path) -> None:
    rig = start(guard={"board": str(tmp_path / "board"), "gate": "sync", "on_timeout": "closed"})
    rig.submit("r", prompt(20))
    failure = rig.failure("r")
    assert (failure.status, failure.code) == (503, "kv_guard_unavailable")
    rig.until_idle()
    assert rig.tokens["r"] == []


# Faults: what the guard must find in each, and nothing but its prevention is off


def two_tenants(rig: Rig, length: int = 60) -> None:
    """One after the other."""
    for request, tenant, seed in (("victim", "alice", 1), ("attacker", "bob", 2)):
        rig.submit(request, prompt(length, seed), 8, tenant=tenant)
        rig.answer(request)


def swallowed_reject(rig: Rig) -> None:
    rig.submit("victim", prompt(60), 8, tenant="alice")
    rig.answer("victim")
    rig.submit("attacker", prompt(120), 8, tenant="bob")
    rig.answer("attacker")


def early_free(rig: Rig) -> None:
    rig.submit("victim", prompt(60), 8, tenant="alice")
    rig.until_seen(TransferBegin, "victim")
    rig.abort("victim")
    rig.until_seen(Free, "victim")
    rig.submit("attacker", prompt(60), ENDLESS, tenant="bob")
    rig.until(lambda: bool(rig.tokens["attacker"]))
    rig.until_seen(TransferEnd, "victim")
    rig.abort("attacker")
    rig.until(lambda: len(rig.seen(RequestEnd, "attacker")) == 2)


def lease_expiry(rig: Rig) -> None:
    rig.submit("attacker", prompt(60, 1), 8, tenant="bob")
    rig.until_seen(Free, "attacker")
    rig.submit("victim", prompt(60, 2), 8, tenant="alice")
    rig.answer("victim")
    assert rig.answer("attacker") != generate(MODEL, prompt(60, 1), 8)


def arrive_before_visible(rig: Rig) -> None:
    rig.submit("victim", prompt(60, 1), 8, tenant="alice")
    rig.answer("victim")
    decode = rig.hellos["decode-0"]
    segment = Segment.open(Path(decode.address.removeprefix("shm:")), decode.page_bytes)
    rig.until(lambda: bool(segment.tags[:7].all()))  # the victim's bytes come in the end
    rig.submit("attacker", prompt(60, 2), 8, tenant="bob")
    assert rig.answer("attacker") != generate(MODEL, prompt(60, 2), 8)


def leak_on_disconnect(rig: Rig) -> None:
    rig.submit("victim", prompt(30), ENDLESS)
    rig.until(lambda: bool(rig.tokens["victim"]))
    rig.abort("victim")
    rig.until(lambda: len(rig.seen(RequestEnd, "victim")) == 2)
    assert rig.measure("decode-0").gauges["pages_owned"] > 0


def double_free(rig: Rig) -> None:
    rig.submit("first", prompt(60), 8)
    rig.answer("first")
    rig.submit("victim", prompt(60), ENDLESS, tenant="alice")
    rig.until(lambda: bool(rig.tokens["victim"]))
    rig.submit("attacker", prompt(60, 2), 8, tenant="bob")
    rig.answer("attacker")
    rig.abort("victim")
    rig.until(lambda: len(rig.seen(RequestEnd, "victim")) == 2)


def shared_prefix(rig: Rig) -> None:
    for request, tenant in (("victim", "alice"), ("attacker", "bob")):
        rig.submit(request, prompt(60), 8, tenant=tenant)
        rig.answer(request)
        rig.until(lambda request=request: len(rig.seen(RequestEnd, request)) == 2)  # type: ignore[misc]


def stale_block_table(rig: Rig) -> None:
    rig.submit("victim", prompt(60), ENDLESS, tenant="alice")
    rig.until(lambda: bool(rig.tokens["victim"]))
    rig.submit("attacker", prompt(60, 2), 3, tenant="bob")
    rig.until(lambda: len(rig.seen(TransferEnd, "attacker")) == 2)  # it has pages of its own, and no slot yet
    rig.abort("victim")
    assert rig.answer("attacker") != generate(MODEL, prompt(60, 2), 3)


def lost_telemetry(rig: Rig) -> None:
    for n in range(6):
        rig.submit(f"r{n}", prompt(40, n), 30)
    for n in range(6):
        rig.answer(f"r{n}")


FAULTS: dict[Fault, tuple[Callable[[Rig], None], dict[str, Any], set[Kind]]] = {
    Fault.SWALLOWED_REJECT: (
        swallowed_reject,
        {"context": 256, "prefill": PoolConfig(pages=8)},
        {Kind.STALE_READ, Kind.FOREIGN_READ, Kind.ZOMBIE_REQUEST, Kind.WRONG_STATUS, Kind.TAINTED_RESPONSE},
    ),
    Fault.EARLY_FREE: (early_free, {}, {Kind.FREE_IN_FLIGHT, Kind.FOREIGN_WRITE}),
    Fault.LEASE_EXPIRY: (lease_expiry, {}, {Kind.FREE_IN_FLIGHT, Kind.FOREIGN_READ, Kind.TAINTED_RESPONSE}),
    Fault.ARRIVE_BEFORE_VISIBLE: (arrive_before_visible, {}, {Kind.DIGEST_MISMATCH, Kind.FOREIGN_READ}),
    Fault.PARTIAL_TRANSFER: (two_tenants, {}, {Kind.SHORT_TRANSFER, Kind.STALE_READ}),
    Fault.LEAK_ON_DISCONNECT: (leak_on_disconnect, {}, set()),
    Fault.DOUBLE_FREE: (double_free, {}, {Kind.DOUBLE_FREE, Kind.DOUBLE_OWNER}),
    Fault.SHARED_PREFIX: (shared_prefix, {}, {Kind.FOREIGN_SHARE, Kind.FOREIGN_READ, Kind.TAINTED_RESPONSE}),
    Fault.LOST_TELEMETRY: (lost_telemetry, {}, {Kind.STREAM_GAP}),
    Fault.STALE_BLOCK_TABLE: (
        stale_block_table,
        {"decode": PoolConfig(pages=DECODE_PAGES, max_batch=1)},
        {Kind.STALE_READ, Kind.FOREIGN_READ, Kind.FOREIGN_WRITE},
    ),
}


@pytest.mark.parametrize("fault", Fault)
def test_each_fault_does_its_harm_and_the_records_tell(start: Callable[..., Rig], fault: Fault) -> None:
    run, fields, expected = FAULTS[fault]
    rig = start(faults=(fault,), **fields)
    run(rig)
    found = {line.split()[0] for line in findings(rig.stop())}
    assert expected <= found, found


def test_every_fault_is_tried() -> None:
    assert FAULTS.keys() == set(Fault)
