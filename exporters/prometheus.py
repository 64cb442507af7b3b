"""The guard's counters as Prometheus and OpenMetrics metrics, read when scraped: the hot path pays nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from guard import __version__
from guard.counters import ReceiverCounts
from guard.native._core import LATENCY_BOUNDS, CoreStats
from guard.runtime import Runtime

if TYPE_CHECKING:
    from guard.receive.forward import Forwarder


class GuardCollector(Collector):
    """Reads a running guard. No request, trace or tenant id is ever a label."""

    def __init__(self, runtime: Runtime, forwarder: Forwarder | None) -> None:
        self._runtime = runtime
        self._forwarder = forwarder
        self._started = time.time()

    def collect(self) -> Iterator[Metric]:
        """Yields every metric of the guard."""
        runtime = self._runtime
        counters = runtime.counters
        yield _gauge("build_info", "The guard's version and mode.", 1, version=__version__, mode=runtime.config.mode)
        yield _gauge("start_time_seconds", "When the guard started, since the Unix epoch.", self._started)
        stats = runtime.stats()
        yield from _received(counters.receivers)
        forwarder = self._forwarder
        yield _counter("spans_forwarded", "Spans that are no records, forwarded.", forwarder.sent if forwarder else 0)
        yield _counter("spans_not_forwarded", "Such spans, dropped instead: the queue was full or the target away.",
                       forwarder.dropped if forwarder else 0)  # fmt: skip
        yield from _ring(stats)
        inbox = runtime.inbox
        yield _gauge("queue_records", "Records that wait for the ledger.", inbox.depth)
        yield _gauge("queue_capacity_records", "Records that may wait.", inbox.limit_records)
        yield _gauge("queue_bytes", "Bytes of the records that wait.", inbox.bytes)
        yield _gauge("queue_capacity_bytes", "Bytes of records that may wait.", inbox.limit_bytes)
        yield _counter("queue_messages_broken", "Messages in the queue with bytes that were no record.", stats.broken)
        yield _counters(
            "findings", "Findings, by kind and action.", ("kind", "action"), list(counters.findings.items())
        )
        yield _gauge("findings_waiting", "Findings, new or grown, that wait to be written up.", stats.waiting)
        yield _counter("kills", "Requests killed.", stats.kills)
        yield _counter("kills_withheld", "Requests that enforce mode would have killed.", stats.kills_withheld)
        yield from _judged(stats)
        board = runtime.board
        yield _gauge("board_verdicts", "Requests that have a verdict on the board.", board.verdicts)
        yield _gauge("board_saturated", "Verdicts that found no row on the board.", board.saturated)
        yield _gauge("board_streams_without_row", "Streams whose watermark has no row.", board.streams_without_row)
        recorder = runtime.recorder
        yield _counter("incident_events_written", "Changes of incidents written to disk.", recorder.written)
        yield _counter("incident_write_failures", "Attempts to write incidents that failed.", recorder.failures)
        yield _counter("incident_events_dropped", "Changes of incidents lost to a full queue.", recorder.dropped)
        yield _gauge("incident_queue", "Changes of incidents that wait for the disk.", recorder.depth)
        yield _gauge("journal_bytes", "Length of the journal.", stats.journal_bytes)
        yield _counter("journal_write_failures", "Attempts to write the journal that failed.", stats.journal_failures)
        aborter = runtime.aborter
        yield _counters(
            "abort_calls", "Abort calls to the engine, by result.", ("result",),
            ((("ok",), aborter.ok if aborter else 0), (("failed",), aborter.failed if aborter else 0)),
        )  # fmt: skip
        yield _gauge("abort_calls_pending", "Abort calls under way.", aborter.pending if aborter else 0)


def _judged(stats: CoreStats) -> Iterator[Metric]:
    """What the ledger made of it."""
    yield _counters(
        "records", "Records received, by span name.", ("record",),
        (((name,), count) for name, count in stats.records.items()),
    )  # fmt: skip
    yield _counter("stream_gaps", "Holes in sequences, sequences that ran backwards, transfers that never began.",
                   stats.gaps)  # fmt: skip
    yield _counters(
        "records_dropped", "Records beyond a limit of the ledger's, by limit.", ("limit",),
        (((limit,), count) for limit, count in stats.dropped.items()),
    )  # fmt: skip
    yield _counter("records_duplicate", "Records that came twice.", stats.duplicates)
    yield _counter("records_late", "Records that came after they were given up.", stats.late)
    yield _gauge("streams", "Streams heard of.", stats.streams)
    yield _latency(stats)
    yield _gauge("ledger_pages", "Pages that the ledger follows.", stats.pages)
    requests = GaugeMetricFamily("kvguard_ledger_requests", "Requests that the ledger knows, by state.",
                                 labels=("state",))  # fmt: skip
    requests.add_metric(("live",), stats.requests_live)
    requests.add_metric(("ended",), stats.requests_ended)
    yield requests
    yield _gauge("ledger_transfers", "Transfers in flight.", stats.transfers)
    yield _gauge("ledger_records_held", "Records that wait for others.", stats.records_held)
    yield _gauge("ledger_bytes", "Memory of the ledger's tables, roughly.", stats.ledger_bytes)


def _ring(stats: CoreStats) -> Iterator[Metric]:
    """What came in through the ring, by lane: of those that ever had a writer."""
    lanes = [lane for lane in stats.lanes if lane.written or lane.dropped or lane.pid]
    for name, about, field in (
        ("ring_records", "Records written to the ring.", "written"),
        ("ring_records_dropped", "Records that found their lane of the ring full.", "dropped"),
        ("ring_broken_bytes", "Bytes in the ring that were no record.", "broken"),
    ):
        yield _counters(name, about, ("lane",), (((str(lane.index),), getattr(lane, field)) for lane in lanes))
    yield _gauge("ring_lanes", "Lanes of the ring.", len(stats.lanes))
    yield _gauge("ring_lanes_taken", "Lanes of the ring that have a writer now.", sum(bool(n.pid) for n in lanes))
    yield _gauge("ring_rows_waiting", "Rows of the ring that were not taken yet.", sum(n.waiting for n in lanes))


def _received(receivers: dict[str, ReceiverCounts]) -> Iterator[Metric]:
    """What came in over OTLP, by protocol."""
    for name, about, field in (
        ("export_calls", "OTLP messages taken.", "calls"),
        ("export_bytes", "Bytes of OTLP messages taken.", "bytes"),
        ("spans", "Spans received.", "read"),
        ("spans_ignored", "Spans that are no records.", "ignored"),
        ("spans_invalid", "Spans named like a record that break the convention.", "invalid"),
    ):
        yield _counters(name, about, ("protocol",), (((p,), getattr(r, field)) for p, r in receivers.items()))
    yield _counters(
        "export_calls_refused", "OTLP calls and connections refused, by reason.", ("protocol", "reason"),
        (((protocol, reason), count) for protocol, r in receivers.items() for reason, count in r.refused.items()),
    )  # fmt: skip


class Exposition:
    """``/metrics``, in the format that the scraper asks for."""

    def __init__(self, runtime: Runtime, forwarder: Forwarder | None = None) -> None:
        """Args:
        runtime: The guard.
        forwarder: What forwards spans that are no records; None if they are ignored.
        """
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(GuardCollector(runtime, forwarder))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics now.

        Args:
            accept: The scraper's ``Accept`` header.

        Returns:
            The body and its content type.
        """
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


def _gauge(name: str, about: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(f"kvguard_{name}", about, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvguard_{name}", about, value=value)


def _counters(
    name: str, about: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = CounterMetricFamily(f"kvguard_{name}", about, labels=labels)
    for key, value in values:
        family.add_metric(tuple(str(part) for part in key), value)
    return family


def _latency(stats: CoreStats) -> Metric:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, LATENCY_BOUNDS), "+Inf"), stats.latency, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(
        "kvguard_verdict_latency_seconds",
        "From when a record happened until it was judged.",
        buckets=buckets,
        sum_value=stats.latency_sum,
    )
