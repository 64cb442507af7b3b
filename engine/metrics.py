"""What the router counts, and what its workers say about themselves, for Prometheus.

Labels are bounded: routes, statuses, error codes and worker names; never a request, a tenant or a trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.router import Router
from hooks.emit import Emitter

PREFIX = "kvguard_engine"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SECONDS_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Metrics:
    """The engine's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", help, labels, registry=registry)

        self.requests = counter("requests", "HTTP responses.", "route", "status")
        self.errors = counter("errors", "Generating requests that failed, by error code.", "code")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that were dispatched.")
        self.output_tokens = counter("output_tokens", "Output tokens that went into answers.")
        self.aborts = counter("aborts", "Requests that ended early.", "reason")
        self.kills = counter("kills", "Requests that the guard stopped.", "when")
        for when in ("before_first_byte", "mid_stream"):
            self.kills.labels(when)
        for reason in ("disconnect", "request"):
            self.aborts.labels(reason)
        self.ttft = Histogram(
            f"{PREFIX}_ttft_seconds",
            "From the request's last byte to the first output token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.tpot = Histogram(
            f"{PREFIX}_tpot_seconds",
            "Mean time between output tokens of one request, after the first.",
            buckets=_SECONDS_A_TOKEN,
            registry=registry,
        )

    def watch(self, router: Router, emitter: Emitter) -> None:
        """Adds what is read from the router when somebody asks."""
        self.registry.register(_FleetCollector(router, emitter))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    def __init__(self, router: Router, emitter: Emitter) -> None:
        self._router = router
        self._emitter = emitter

    def describe(self) -> Iterator[Metric]:
        # Workers name their own metrics; a registry that asked at registration would find none yet.
        return iter(())

    def collect(self) -> Iterator[Metric]:
        router = self._router
        yield _gauge("requests_in_flight", "Requests that are not over.", router.in_flight)
        yield _gauge("requests_without_output", "Requests that have given no output yet.", router.waiting)
        for name, count in self._emitter.counts.items():
            family = CounterMetricFamily(f"{PREFIX}_router_{name}", "Of the router's own stream.")
            family.add_metric([], count)
            yield family
        up = GaugeMetricFamily(f"{PREFIX}_worker_up", "Whether the worker lives.", labels=["worker"])
        deaths = CounterMetricFamily(f"{PREFIX}_worker_deaths", "Times that the worker died.", labels=["worker"])
        missing = set(router.fleet.missing)
        for name in router.fleet.expected:
            up.add_metric([name], name not in missing)
            deaths.add_metric([name], router.fleet.deaths[name])
        yield up
        yield deaths
        families: dict[str, Metric] = {}
        for worker in router.fleet:
            for name, value in worker.gauges.items():
                if _NAME.fullmatch(name):
                    _family(families, GaugeMetricFamily, f"{PREFIX}_{name}").add_metric([worker.name], value)
            for name, value in worker.counters.items():
                if _NAME.fullmatch(name):
                    _family(families, CounterMetricFamily, f"{PREFIX}_worker_{name}").add_metric([worker.name], value)
        yield from families.values()


def _family(
    families: dict[str, Metric], kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str
) -> GaugeMetricFamily | CounterMetricFamily:
    family = families.get(name)
    if not isinstance(family, kind):
        family = families[name] = kind(name, "As the worker counts it.", labels=["worker"])
    return family


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", help)
    family.add_metric([], value)
    return family
