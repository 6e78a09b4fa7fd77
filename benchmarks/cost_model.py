"""A cost model of training: FLOPs, memory and communication of a step, and its time on a given cluster.

    python -m benchmarks.cost_model        # the tables of docs/scaling.md

`benchmarks.weak_scaling` compares it with measurements of a few processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from unmask.report.formatting import print_table
from unmask.reproduce import H100, Cluster, ModelShape

GRADIENT_BYTES, STATE_BYTES = 4, 20
"""Bytes per parameter: of the gradient on the wire; of weights, gradients, AdamW's moments and the moving average."""


MODELS = (
    ModelShape("110M", 12, 768),
    ModelShape("350M", 24, 1024),
    ModelShape("1.3B", 24, 2048),
    ModelShape("8B", 36, 4096),
)


def communication_bytes(model: ModelShape, ranks: int, sharded: bool) -> float:
    """Bytes that a rank sends in a step: an all-reduce of gradients (2), or two all-gathers of weights and a
    reduce-scatter of gradients (3), each (n - 1)/n of them."""
    return (3 if sharded else 2) * (ranks - 1) / ranks * GRADIENT_BYTES * model.parameters


def memory_bytes(model: ModelShape, ranks: int, batch_size: int, sharded: bool) -> float:
    """Memory of a rank: weights and optimizer state, the largest unsharded layer, activations, a chunk of logits."""
    state: float = STATE_BYTES * model.parameters
    if sharded:
        state = state / ranks + 8 * max(model.vocab * model.width, 12 * model.width**2)
    return state + batch_size * model.length * model.activation_bytes_per_token + 4 * (1 << 26)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of `tokens`: computation, and communication without overlap."""

    tokens: int
    compute_seconds: float
    communication_seconds: float

    @property
    def overlapped_throughput(self) -> float:
        """Tokens per second if communication overlaps with computation."""
        return self.tokens / max(self.compute_seconds, self.communication_seconds)

    @property
    def serial_throughput(self) -> float:
        """Tokens per second without overlap."""
        return self.tokens / (self.compute_seconds + self.communication_seconds)


def step_time(model: ModelShape, machine: Cluster, ranks: int, batch_size: int, sharded: bool) -> StepTime:
    """The time of a step with `rows` windows per rank."""
    tokens = batch_size * model.length
    talk = communication_bytes(model, ranks, sharded) / machine.bandwidth(ranks)
    return StepTime(ranks * tokens, tokens * model.flops_per_token / machine.flops, talk)


def max_batch_size(model: ModelShape, machine: Cluster, ranks: int, sharded: bool, global_batch_size: int) -> int:
    """Rows per rank of a global batch: the largest power of two that fits in memory; 0 if not even one does."""
    rows = 1
    if memory_bytes(model, ranks, rows, sharded) > machine.memory_bytes:
        return 0
    while (
        2 * rows * ranks <= global_batch_size and memory_bytes(model, ranks, 2 * rows, sharded) <= machine.memory_bytes
    ):
        rows *= 2
    return rows


def main() -> None:
    """Tables for a global batch of 512 or, on more GPUs than that, one row each."""
    print_table(
        ("model", "parameters", "GFLOP/token", "state, 1 rank", "DDP traffic", "FSDP2 traffic"),
        [
            (
                model.name,
                f"{model.parameters / 1e6:,.0f}M",
                f"{model.flops_per_token / 1e9:.2f}",
                f"{STATE_BYTES * model.parameters / 1e9:.1f} GB",
                f"{communication_bytes(model, 8, False) / 1e9:.1f} GB",
                f"{communication_bytes(model, 8, True) / 1e9:.1f} GB",
            )
            for model in MODELS
        ],
    )
    lines = []
    for model in MODELS:
        for ranks in (8, 64, 256, 1024):
            sharded = memory_bytes(model, ranks, 1, False) > H100.memory_bytes
            batch = max(512, ranks)
            rows = max_batch_size(model, H100, ranks, sharded, batch)
            if rows == 0:
                lines.append((model.name, str(ranks), "FSDP2", *["does not fit"] * 6))
                continue
            # Rows that do not fit at once are microbatches: DDP communicates after the last of them,
            # FSDP2 gathers and scatters in each.
            often = max(1, batch // (rows * ranks))
            one = step_time(model, H100, ranks, rows, sharded)
            talk = one.communication_seconds * often if sharded else one.communication_seconds
            whole = StepTime(one.tokens * often, one.compute_seconds * often, talk)
            days = [f"{tokens / whole.serial_throughput / 86400:,.1f}" for tokens in (10e9, 100e9, 1e12)]
            lines.append(
                (
                    model.name,
                    str(ranks),
                    "FSDP2" if sharded else "DDP",
                    f"{memory_bytes(model, ranks, rows, sharded) / 1e9:.0f} GB",
                    f"{whole.serial_throughput / 1e6:.2f} to {whole.overlapped_throughput / 1e6:.2f}",
                    f"{whole.communication_seconds / whole.compute_seconds:.2f}",
                    *days,
                )
            )
    print()
    header = ("model", "GPUs", "way", "memory", "M tokens/s", "comm/compute", "days 10B", "100B", "1T")
    print_table(header, lines)


if __name__ == "__main__":
    main()
