"""Metrics of the server, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

_LATENCY_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class EngineMetrics:
    """The metrics of one model's engine; each has a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.queued = Gauge("unmask_queued_sequences", "Sequences that wait to be started.", registry=registry)
        self.running = Gauge("unmask_running_sequences", "Sequences in progress.", registry=registry)
        self.batch_size = Histogram(
            "unmask_batch_size",
            "Sequences per forward pass.",
            buckets=_BATCH_SIZE_BUCKETS,
            registry=registry,
        )
        self.forward_passes = Counter("unmask_forward_passes", "Forward passes of the network.", registry=registry)
        self.forward_seconds = Counter("unmask_forward_seconds", "Seconds in forward passes.", registry=registry)
        self.iteration_seconds = Gauge(
            "unmask_iteration_seconds",
            "Duration of the engine's current iteration so far.",
            registry=registry,
        )
        self.stuck_iterations = Counter(
            "unmask_stuck_iterations", "Iterations of the engine that took too long.", registry=registry
        )
        self.generated_tokens = Counter("unmask_generated_tokens", "Generated tokens.", registry=registry)
        self.prefix_lookups = Counter(
            "unmask_prefix_lookups", "Prompts that were looked up among stored prefixes.", registry=registry
        )
        self.prefix_hits = Counter(
            "unmask_prefix_hits", "Prompts whose beginning was stored and not read again.", registry=registry
        )
        self.prefix_tokens = Counter(
            "unmask_prefix_tokens", "Tokens of prompts: stored, or read.", ["source"], registry=registry
        )
        self.prefix_bytes = Gauge("unmask_prefix_bytes", "Bytes of stored prefixes.", registry=registry)

    def observe_forward(self, batch_size: int, seconds: float) -> None:
        """Count a forward pass."""
        self.forward_passes.inc()
        self.forward_seconds.inc(seconds)
        self.batch_size.observe(batch_size)

    def observe_prefix(self, num_stored: int, num_tokens: int) -> None:
        """Count a prompt of `num_tokens`, of which the first `num_stored` are not read again."""
        self.prefix_lookups.inc()
        self.prefix_hits.inc(num_stored > 0)
        self.prefix_tokens.labels("stored").inc(num_stored)
        self.prefix_tokens.labels("read").inc(num_tokens - num_stored)

    def render(self) -> bytes:
        """The metrics as text."""
        return generate_latest(self.registry)


class RequestMetrics:
    """What a server counts of its requests, whatever model they ask for."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("unmask_requests", "Requests answered.", ["route", "status"], registry=registry)
        self.latency = Histogram(
            "unmask_request_seconds",
            "Seconds from the arrival of a request to the end of its response.",
            ["route"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def render_metrics(parts: Iterable[tuple[Mapping[str, str], Iterable[Metric]]]) -> bytes:
    """The metrics of several registries or processes as one text; the samples of each part get its labels."""
    merged: dict[str, Metric] = {}
    for labels, families in parts:
        for family in families:
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={**sample.labels, **labels}))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(merged.values()))
    return generate_latest(registry)
