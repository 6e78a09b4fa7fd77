"""What an operator watches, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCY_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """A registry of its own, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.queued = Gauge("unmask_queued_sequences", "Rows that wait to begin.", registry=registry)
        self.running = Gauge("unmask_running_sequences", "Rows that are being worked on.", registry=registry)
        self.batch_size = Histogram(
            "unmask_batch_size",
            "Rows that shared a network call.",
            buckets=_BATCH_SIZE_BUCKETS,
            registry=registry,
        )
        self.forward_passes = Counter("unmask_forward_passes", "Calls of the network (steps).", registry=registry)
        self.forward_seconds = Counter(
            "unmask_forward_seconds", "Seconds inside calls of the network.", registry=registry
        )
        self.iteration_seconds = Gauge(
            "unmask_iteration_seconds",
            "How long the engine's present turn has taken so far.",
            registry=registry,
        )
        self.stuck_iterations = Counter(
            "unmask_stuck_iterations", "Turns of the engine that took too long.", registry=registry
        )
        self.generated_tokens = Counter("unmask_generated_tokens", "Tokens written.", registry=registry)
        self.requests = Counter("unmask_requests", "Requests answered.", ["route", "status"], registry=registry)
        self.latency = Histogram(
            "unmask_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["route"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )

    def observe_forward(self, batch_size: int, seconds: float) -> None:
        """A call of the network has ended."""
        self.forward_passes.inc()
        self.forward_seconds.inc(seconds)
        self.batch_size.observe(batch_size)

    def render(self) -> bytes:
        """All of it."""
        return generate_latest(self.registry)
