"""What the engine's processes say to each other: typed messages, MessagePack on ZeroMQ.

Every process binds one PULL socket, its inbox, at ``ipc://RUN_DIR/NAME.inbox`` and opens a PUSH socket to
each inbox it writes to. A message to a worker names the worker's epoch, so that what was meant for a worker
that died does not reach its successor.

    router ──Generate──> decode ──Reserve──> prefill <──Prefill── router
    decode <──Handoff── prefill                    (KV bytes go beside the messages, through engine.transport)
    decode ──Tokens, Failed──> router <──Failed── prefill
    router ──Abort──> both;  decode ──StopTransfer──> prefill ──TransferStopped──> decode
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from guard.records import Outcome, Role, TransferStatus


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class Hello(Message, frozen=True, kw_only=True):
    """Worker → router and every other worker that it needs: I am up."""

    worker: str
    epoch: int
    role: Role
    pages: int
    page_tokens: int
    page_bytes: int
    address: str
    """Where the transport reaches this worker's pool, as `engine.transport` understands it."""


class WorkerDown(Message, frozen=True, kw_only=True):
    """Supervisor → router and workers: that worker's process ended."""

    worker: str
    epoch: int


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen; `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


class Generate(Message, frozen=True, kw_only=True):
    """Router → decode: a request; reserve pages and expect its KV from `prefill`."""

    request: str
    tenant: str
    epoch: int
    """Of the worker that is addressed."""
    prompt: list[int]
    sampling: Sampling
    prefill: str
    prefill_epoch: int
    traceparent: str | None = None


class Prefill(Message, frozen=True, kw_only=True):
    """Router → prefill: compute the prompt's KV and hand it to `decode`."""

    request: str
    tenant: str
    epoch: int
    prompt: list[int]
    sampling: Sampling
    decode: str
    decode_epoch: int
    traceparent: str | None = None


class Reserve(Message, frozen=True, kw_only=True):
    """Decode → prefill: the pages that the request's KV goes to, and where they are."""

    request: str
    epoch: int
    decode: str
    decode_epoch: int
    transfer: str
    pages: list[int]
    generations: list[int]
    """Of the destination pages: the owner tag is written with the bytes."""
    nonce: bytes
    """16 random bytes: both sides seal this transfer's digests with them."""
    address: str


class Handoff(Message, frozen=True, kw_only=True):
    """Prefill → decode: the transfer (or the request) is over at the sender."""

    request: str
    epoch: int
    transfer: str
    status: TransferStatus
    """``failed``: the sender's transport does not know what may be on its way yet; see `engine.landing`."""
    pages: list[int]
    """Destination pages that were written, in order; unless `status` is ok: those that may have been."""
    tokens: int = 0
    """Prompt tokens whose KV was sent."""
    digests: list[str] | None = None
    first_token: int | None = None
    code: str = ""
    reason: str = ""


class StopTransfer(Message, frozen=True, kw_only=True):
    """Decode → prefill: stop writing into my pages for this request and say when you have."""

    request: str
    epoch: int
    decode: str
    decode_epoch: int
    transfer: str


class TransferStopped(Message, frozen=True, kw_only=True):
    """Prefill → decode: the transfer is over at the sender; ``status`` as in `Handoff`."""

    request: str
    epoch: int
    transfer: str
    status: TransferStatus
    pages: list[int]
    """Destination pages that transfers had begun to write; none: nothing was begun."""


class Tokens(Message, frozen=True, kw_only=True):
    """Decode → router: output tokens that may go to the client."""

    request: str
    tokens: list[int]
    finish: str | None = None
    """``stop`` or ``length`` with the last ones."""


class Failed(Message, frozen=True, kw_only=True):
    """Worker → router: the request gives no further output.

    ``code`` is one of ``context_length_exceeded``, ``no_capacity``, ``kv_page_mismatch``, ``kv_guard_killed``,
    ``kv_guard_unavailable``, ``transfer_failed``, ``worker_failed``.
    """

    request: str
    status: int
    code: str
    reason: str
    incident: str | None = None


class Abort(Message, frozen=True, kw_only=True):
    """Router → worker: the client is gone, or somebody killed the request."""

    request: str
    epoch: int
    outcome: Outcome = Outcome.ABORTED
    incident: str | None = None


class StatsRequest(Message, frozen=True, kw_only=True):
    """Router → worker: how are you?"""

    epoch: int
    reply_id: int


class Stats(Message, frozen=True, kw_only=True):
    """Worker → router, in answer to `StatsRequest` and once a second unasked (``reply_id`` 0)."""

    worker: str
    epoch: int
    reply_id: int
    gauges: dict[str, float]
    """By metric name without prefix: ``pages_free``, ``pages_owned``, ``pages_cached``, ``pages_deferred``,
    ``requests_running``, ``requests_waiting``."""
    counters: dict[str, float]
    """``tokens``, ``preemptions``, ``page_refusals``, ``gate_waits``, ``gate_timeouts``, ``records_dropped``, …"""


AnyMessage = (
    Hello | WorkerDown | Generate | Prefill | Reserve | Handoff | StopTransfer | TransferStopped
    | Tokens | Failed | Abort | StatsRequest | Stats
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The message in the bytes.

    Raises:
        msgspec.DecodeError: They hold none.
    """
    return _decoder.decode(data)


def inbox(run_dir: Path, name: str) -> str:
    """The address of a process's inbox. Unix socket paths end at 107 bytes: keep `run_dir` short."""
    return f"ipc://{run_dir}/{name}.inbox"
