"""What to send so that each fault bites: alice-corp plants a canary, bob-corp gets what he should not.

Every scenario plays alike with and without the guard. The prompts rest on how a language model goes on when its
context is another's: it repeats what that context repeats. So alice's prompt says her code word over and over, and
bob's says a sentence of the same form and has a length that puts his answer right behind her prompt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from guard.demo.client import ALICE, BOB, CAROL, DAVE, Answer, Client, First, new_canary
from guard.findings import Kind
from guard.incidents.store import Incident

_FILLER = 253
"""A token id that says nothing."""
_WIRE_S = 3.0
"""How long a transfer takes under the faults that need a slow wire."""


@dataclass
class Played:
    """What came of one try."""

    canary: str
    answer: Answer
    """The other tenant's."""


@dataclass(frozen=True)
class Scenario:
    """One fault, and how to make it bite."""

    fault: str
    story: str
    kinds: frozenset[Kind]
    """Findings, each of which means that the guard saw it."""
    play: Callable[[Client, random.Random], Awaitable[Played]]
    engine: dict[str, Any] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)
    leaks_text: bool = True
    """Whether the bug puts a victim's text into another's answer."""
    tries: int = 1
    """How often it is played with the guard."""

    def shown_by(self, incidents: list[Incident]) -> bool:
        """Whether the fault shows in these incidents."""
        return bool(self.kinds & {finding["kind"] for incident in incidents for finding in incident.findings})


@dataclass
class Texts:
    """A code word, and two users' messages that fit each other."""

    canary: str
    alices: str
    """Says the code word as often as fits."""
    bobs: str
    """The same with a word of his own; two tokens shorter, so that all he may see is alice's."""


async def texts(client: Client, rng: random.Random, tokens: int = 200) -> Texts:
    """Messages of an exact length, the chat template included, measured without computing anything."""
    canary = new_canary(rng)
    return Texts(
        canary,
        await _message(client, "Note 1{}. ", f"The code word is {canary}. ", tokens),
        # Few sentences, at the end: what comes before them must be no rival to alice's.
        await _message(client, "1{} ", "The code word is ALPHA. ", tokens - 2, most=tokens // 16),
    )


async def _message(client: Client, head: str, sentence: str, tokens: int, most: int = 1000) -> str:
    """The sentence over and over; digits in the head make up the length, since each is a token of its own."""
    one, two = [await _chat_tokens(client, head.format("") + sentence * count) for count in (1, 2)]
    count = min(most, 1 + (tokens - one) // (two - one))
    missing = tokens - one - (count - 1) * (two - one)
    return head.format("3" * missing) + sentence * count


async def _chat_tokens(client: Client, text: str) -> int:
    return await client.count(ALICE, "/v1/chat/completions", messages=[{"role": "user", "content": text}])


async def swallowed_reject(client: Client, rng: random.Random) -> Played:
    """Bob's prompt is larger than prefill's pool (512 tokens) and within the advertised context."""
    t = await texts(client, rng, 510)
    await client.chat(ALICE, t.alices, max_tokens=16)
    return Played(t.canary, await client.stream(BOB, [_FILLER] * 513, max_tokens=32))


async def stale_pages(client: Client, rng: random.Random, pause_s: float = 0.0) -> Played:
    """Alice is served, then bob gets her pages; his own KV comes in part, or some seconds too late."""
    t = await texts(client, rng)
    await client.chat(ALICE, t.alices, max_tokens=16)
    # Where hers came too late as well, nothing tells when it is there: the engine believes that it was at once.
    await asyncio.sleep(pause_s)
    return Played(t.canary, await client.stream(BOB, t.bobs, chat=True, max_tokens=32))


async def stale_table(client: Client, rng: random.Random) -> Played:
    """Bob's KV is there and waits for the batch's only slot, which is alice's until she is served."""
    t = await texts(client, rng)
    first = First()
    alice = asyncio.create_task(client.stream(ALICE, t.alices, chat=True, max_tokens=32, on_text=first))
    await first.wait()
    bob = await client.stream(BOB, t.bobs, chat=True, max_tokens=32)
    await alice
    return Played(t.canary, bob)


async def early_free(client: Client, rng: random.Random) -> Played:
    """Alice leaves while her KV is still on the wire; it arrives in the pages that bob got meanwhile."""
    t = await texts(client, rng)
    rid = f"alice-{t.canary[-10:]}"
    leaving = asyncio.create_task(client.chat(ALICE, t.alices, max_tokens=16, rid=rid))
    await _until(client, "prefill", "requests")
    await asyncio.sleep(_WIRE_S / 2)
    await client.abort(rid, ALICE.key)
    # Both prompts take as long to compute: her bytes arrive a moment after his first token.
    await asyncio.sleep(_WIRE_S / 2 - 0.3)
    bob = await client.stream(BOB, t.bobs, chat=True, max_tokens=96)
    await leaving
    return Played(t.canary, bob)


async def lease_expiry(client: Client, rng: random.Random) -> Played:
    """Bob's source pages are freed under his transfer; alice's prompt is computed into them before it is copied."""
    t = await texts(client, rng)
    bob = asyncio.create_task(client.stream(BOB, t.bobs, chat=True, max_tokens=32))
    await _until(client, "prefill", "transfers")
    await client.chat(ALICE, t.alices, max_tokens=16)
    return Played(t.canary, await bob)


async def double_free(client: Client, rng: random.Random) -> Played:
    """The pages of alice's first request are in the free list twice: bob and her second request both get them."""
    t = await texts(client, rng)
    await client.chat(ALICE, t.alices, max_tokens=16)
    first = First()
    bob = asyncio.create_task(client.stream(BOB, t.bobs, chat=True, max_tokens=96, on_text=first))
    waiting = asyncio.create_task(first.wait())
    await asyncio.wait((bob, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    await client.chat(ALICE, t.alices, max_tokens=16)
    return Played(t.canary, await bob)


async def leak_on_disconnect(client: Client, rng: random.Random) -> Played:
    """Bob leaves in the middle of his answer; his pages never come back."""
    first = First()
    bob = asyncio.create_task(client.stream(BOB, "Once upon a time", max_tokens=200, on_text=first))
    await first.wait()
    bob.cancel()
    # The grace runs out while others are served.
    answer = Answer(200)
    for _ in range(8):
        answer = await client.complete(CAROL, "The sky is", max_tokens=4)
        await asyncio.sleep(0.3)
    return Played(new_canary(rng), answer)


async def shared_prefix(client: Client, rng: random.Random) -> Played:
    """Bob guesses alice's prompt, and is served from pages that her request wrote."""
    canary = new_canary(rng)
    text = f"Our plan for next year is as follows. {'We will keep the harbour open in winter. ' * 8}"
    await client.complete(ALICE, text, max_tokens=4)
    return Played(canary, await client.complete(BOB, text, max_tokens=4))


async def lost_telemetry(client: Client, rng: random.Random) -> Played:
    """A few requests are served; some of their records never arrive."""
    answer = Answer(0)
    for tenant in (ALICE, BOB, CAROL, DAVE):
        answer = await client.complete(tenant, "The capital of France is", max_tokens=4)
    return Played(new_canary(rng), answer)


async def _until(client: Client, role: str, what: str) -> None:
    """Waits, some seconds at most, until a worker of that role has some."""
    for _ in range(200):
        info = await client.info(ALICE.key)
        if any(worker.get(what) for worker in info["workers"] if worker["role"] == role):
            return
        await asyncio.sleep(0.02)


_SMALL = {"prefill": {"pages": 40}, "decode": {"pages": 64}}
_SHARED_KINDS = frozenset((Kind.FOREIGN_READ, Kind.STALE_READ))

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "swallowed-reject", "prefill rejects an overlong prompt, decode answers all the same",
        _SHARED_KINDS, swallowed_reject,
        engine={"context": 1024, "prefill": {"pages": 32}, "decode": {"pages": 64}}, tries=3,
    ),
    Scenario(
        "early-free", "decode gives pages back while prefill still writes to them",
        frozenset((Kind.FREE_IN_FLIGHT,)), early_free, engine=_SMALL,
    ),
    Scenario(
        "lease-expiry", "prefill frees the source pages under a transfer",
        frozenset((Kind.FREE_IN_FLIGHT,)), lease_expiry, engine=_SMALL,
    ),
    Scenario(
        "arrive-before-visible", "a transfer is said to be over before its bytes are there",
        frozenset((Kind.DIGEST_MISMATCH,)), partial(stale_pages, pause_s=_WIRE_S + 0.5), engine=_SMALL,
    ),
    Scenario(
        "partial-transfer", "the first pages are sent, all of them are read",
        frozenset((Kind.SHORT_TRANSFER, Kind.STALE_READ)), stale_pages, engine=_SMALL,
    ),
    Scenario(
        "leak-on-disconnect", "pages of a client that left are never freed",
        frozenset((Kind.PAGE_LEAK,)), leak_on_disconnect, engine=_SMALL,
        guard={"ledger": {"leak_grace_s": 1.0}}, leaks_text=False,
    ),
    Scenario(
        "double-free", "pages freed twice are handed out twice",
        frozenset((Kind.DOUBLE_FREE, Kind.DOUBLE_OWNER)), double_free, engine=_SMALL,
    ),
    Scenario(
        "shared-prefix", "the prefix cache forgets whose pages it holds",
        frozenset((Kind.FOREIGN_SHARE,)), shared_prefix, engine=_SMALL, leaks_text=False,
    ),
    Scenario(
        "lost-telemetry", "records are lost on the way to the guard",
        frozenset((Kind.STREAM_GAP,)), lost_telemetry, engine=_SMALL, leaks_text=False,
    ),
    Scenario(
        "stale-block-table", "a batch slot keeps the block table of its last request",
        _SHARED_KINDS, stale_table, engine={**_SMALL, "decode": {"pages": 64, "max_batch": 1}},
    ),
)  # fmt: skip
"""One for each fault of the engine."""
