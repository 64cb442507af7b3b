"""The guard's counters as Prometheus and OpenMetrics metrics, read when scraped: the hot path pays nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from guard import __version__
from guard.counters import Histogram, ReceiverCounts
from guard.receive.forward import Forwarder
from guard.runtime import Runtime


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
        yield _counters(
            "records", "Records received, by span name.", ("record",),
            (((name,), count) for name, count in list(counters.records.items())),
        )  # fmt: skip
        yield from _received(counters.receivers)
        forwarder = self._forwarder
        yield _counter("spans_forwarded", "Spans that are no records, forwarded.", forwarder.sent if forwarder else 0)
        yield _counter("spans_not_forwarded", "Such spans, dropped instead: the queue was full or the target away.",
                       forwarder.dropped if forwarder else 0)  # fmt: skip
        yield _counters(
            "findings", "Findings, by kind and action.", ("kind", "action"), list(counters.findings.items())
        )
        yield _counter("kills", "Requests killed.", counters.kills)
        yield _counter("kills_withheld", "Requests that enforce mode would have killed.", counters.kills_withheld)
        yield _counter("stream_gaps", "Holes in sequences, sequences that ran backwards, transfers that never began.",
                       counters.stream_gaps)  # fmt: skip
        yield _counter("records_dropped", "Records of streams beyond ledger.max_streams.", counters.records_dropped)
        streams = list(runtime.streams.values())
        yield _counter("records_duplicate", "Records that came twice.", sum(s["duplicates"] for s in streams))
        yield _counter("records_late", "Records that came after they were given up.", sum(s["late"] for s in streams))
        yield _gauge("streams", "Streams heard of.", len(streams))
        yield _gauge("queue_records", "Records that wait for the ledger.", runtime.inbox.depth)
        yield _gauge("queue_capacity_records", "Records that may wait.", runtime.inbox.capacity)
        yield _histogram(
            "verdict_latency_seconds", "From when a record happened until it was judged.", counters.latency
        )
        sizes = dict(runtime.sizes)
        yield _gauge("ledger_pages", "Pages that the ledger follows.", sizes.get("pages", 0))
        requests = GaugeMetricFamily(
            "kvguard_ledger_requests", "Requests that the ledger knows, by state.", labels=("state",)
        )
        for state in ("live", "ended"):
            requests.add_metric((state,), sizes.get(f"requests_{state}", 0))
        yield requests
        yield _gauge("ledger_transfers", "Transfers in flight.", sizes.get("transfers", 0))
        yield _gauge("ledger_records_held", "Records that wait for others.", sizes.get("records_held", 0))
        board = runtime.board
        yield _gauge("board_verdicts", "Requests that have a verdict on the board.", board.verdicts)
        yield _gauge("board_saturated", "Verdicts that found no row on the board.", board.saturated)
        yield _gauge("board_streams_without_row", "Streams whose watermark has no row.", board.streams_without_row)
        recorder = runtime.recorder
        yield _counter("incident_events_written", "Changes of incidents written to disk.", recorder.written)
        yield _counter("incident_write_failures", "Attempts to write incidents that failed.", recorder.failures)
        yield _counter("incident_events_dropped", "Changes of incidents lost to a full queue.", recorder.dropped)
        yield _gauge("incident_queue", "Changes of incidents that wait for the disk.", recorder.depth)
        aborter = runtime.aborter
        yield _counters(
            "abort_calls", "Abort calls to the engine, by result.", ("result",),
            ((("ok",), aborter.ok if aborter else 0), (("failed",), aborter.failed if aborter else 0)),
        )  # fmt: skip
        yield _gauge("abort_calls_pending", "Abort calls under way.", aborter.pending if aborter else 0)


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


def _histogram(name: str, about: str, histogram: Histogram) -> Metric:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), list(histogram.counts), strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(f"kvguard_{name}", about, buckets=buckets, sum_value=histogram.sum)
