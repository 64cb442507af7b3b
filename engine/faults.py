"""Historic bugs of PD-disaggregated engines, to be switched on by name (``--fault NAME``), never by accident."""

from __future__ import annotations

from enum import StrEnum


class Fault(StrEnum):
    """One bug each; `SEEN_IN` says where it was seen in the wild."""

    SWALLOWED_REJECT = "swallowed-reject"
    EARLY_FREE = "early-free"
    LEASE_EXPIRY = "lease-expiry"
    ARRIVE_BEFORE_VISIBLE = "arrive-before-visible"
    PARTIAL_TRANSFER = "partial-transfer"
    LEAK_ON_DISCONNECT = "leak-on-disconnect"
    DOUBLE_FREE = "double-free"
    SHARED_PREFIX = "shared-prefix"
    LOST_TELEMETRY = "lost-telemetry"
    STALE_BLOCK_TABLE = "stale-block-table"


SEEN_IN: dict[Fault, str] = {
    Fault.SWALLOWED_REJECT: "SGLang up to 0.5.19: issue 30233, pull requests 36988 and 38935",
    Fault.EARLY_FREE: "SGLang issues 24527 and 35049: decode gives pages back while prefill still writes",
    Fault.LEASE_EXPIRY: "vLLM issue 52234: an expired transfer lease frees source pages under the reader",
    Fault.ARRIVE_BEFORE_VISIBLE: "RDMA completion before the bytes are visible: vLLM issues 44238 and 42395",
    Fault.PARTIAL_TRANSFER: "vLLM issue 50297, SGLang issue 35421: a hand-off of what was not computed or sent",
    Fault.LEAK_ON_DISCONNECT: "SGLang issue 18701, vLLM issue 41269: pages of a client that left are never freed",
    Fault.DOUBLE_FREE: "vLLM issue 42571, LMCache issue 993: freed twice, so handed out twice",
    Fault.SHARED_PREFIX: "vLLM issue 17045, SGLang issue 37160: the tenant is missing in the prefix key",
    Fault.LOST_TELEMETRY: "OpenTelemetry's stock batch processor drops the oldest spans when its queue is full",
    Fault.STALE_BLOCK_TABLE: "vLLM issue 37076: a batch slot reused with its last request's block table",
}

UNTAGGED = frozenset(
    {
        Fault.SWALLOWED_REJECT,
        Fault.EARLY_FREE,
        Fault.LEASE_EXPIRY,
        Fault.ARRIVE_BEFORE_VISIBLE,
        Fault.PARTIAL_TRANSFER,
        Fault.DOUBLE_FREE,
        Fault.STALE_BLOCK_TABLE,
    }
)
"""Faults from engines whose pages bore no owner tag: with these, tags are not looked at."""
