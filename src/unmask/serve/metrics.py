"""What an operator watches, in the text format of Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """A registry of its own, so that two servers in one process do not mix."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.queue = Gauge("unmask_queue_rows", "Rows that wait to begin.", registry=registry)
        self.running = Gauge("unmask_running_rows", "Rows that are being worked on.", registry=registry)
        self.batch = Histogram(
            "unmask_batch_rows", "Rows that shared a network call.", buckets=ROWS, registry=registry
        )
        self.calls = Counter("unmask_network_calls", "Calls of the network (steps).", registry=registry)
        self.call_seconds = Counter(
            "unmask_network_seconds", "Seconds inside calls of the network.", registry=registry
        )
        self.turn = Gauge(
            "unmask_turn_seconds", "How long the engine's present turn has taken so far.", registry=registry
        )
        self.stuck = Counter(
            "unmask_stuck_turns", "Turns of the engine that took too long.", registry=registry
        )
        self.tokens = Counter("unmask_tokens", "Tokens written.", registry=registry)
        self.requests = Counter(
            "unmask_requests", "Requests answered.", ["route", "status"], registry=registry
        )
        self.latency = Histogram(
            "unmask_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )

    def call(self, rows: int, seconds: float) -> None:
        """A call of the network has ended."""
        self.calls.inc()
        self.call_seconds.inc(seconds)
        self.batch.observe(rows)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self.registry)
