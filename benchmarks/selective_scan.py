"""The selective scan beside two sequential ones, in turns in one run; its memory; and its time against the length.

python -m benchmarks.selective_scan [--repeats 5] [--threads 2] [--longest 131072] [--out runs/scan]

*Published* is the reference of the published code: exp(dt A) of all steps, stored as [B, D, L, N], then a loop over
L. Its steps are taken apart by `unbind`, because the gradient of indexing each would be a tensor of all steps.
*Time first* is the same loop with each step's numbers side by side in memory, which is the best plain torch can do
step by step. Memory is what a forward and a backward pass add to their inputs, outputs and gradients, beside the
bytes of all states.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.side_by_side import median
from unmask.ops.selective_scan import selective_scan
from unmask.report.formatting import print_table

BATCH, LENGTH, WIDTH, STATES = 8, 1024, 236, 16
ScanFn = Callable[..., Tensor]


def random_inputs(batch: int, length: int, width: int = WIDTH, states: int = STATES) -> list[Tensor]:
    """u, dt, a, b, c as a new Mamba has them: dt about softplus(-3), a = -1 ... -N."""
    random = torch.Generator().manual_seed(0)
    u = torch.randn(batch, length, width, generator=random)
    dt = F.softplus(torch.randn(batch, length, width, generator=random) - 3)
    a = -torch.arange(1.0, states + 1).repeat(width, 1)
    b, c = (torch.randn(batch, length, states, generator=random) for _ in range(2))
    return [u, dt, a, b, c]


def published_scan(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """[B, D, L] outputs of u, dt [B, D, L], a [D, N] and b, c [B, N, L]."""
    decay = torch.exp(torch.einsum("bdl,dn->bdln", dt, a)).contiguous()
    inputs = torch.einsum("bdl,bnl->bdln", dt * u, b).contiguous()
    state, outputs = u.new_zeros(len(u), *a.shape), []
    for decay_l, input_l, c_l in zip(decay.unbind(2), inputs.unbind(2), c.unbind(2), strict=True):
        state = decay_l * state + input_l
        outputs.append(torch.einsum("bdn,bn->bd", state, c_l))
    return torch.stack(outputs, 2)


def time_first_scan(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """[L, B, D] outputs of u, dt [L, B, D], a [N, D] and b, c [L, B, N]."""
    decay = torch.exp(dt[:, :, None] * a)
    inputs = (dt * u)[:, :, None] * b[..., None]
    state, states = torch.zeros_like(inputs[0]), []
    for decay_l, input_l in zip(decay.unbind(), inputs.unbind(), strict=True):
        state = torch.addcmul(input_l, decay_l, state)
        states.append(state)
    return torch.matmul(c[:, :, None], torch.stack(states))[:, :, 0]


def our_scan(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """[B, L, D] outputs."""
    return selective_scan(u, dt, a, b, c)[0]


def arranged(name: str, inputs: Sequence[Tensor]) -> tuple[ScanFn, list[Tensor]]:
    """A way to scan, and the inputs in its own order."""
    u, dt, a, b, c = inputs
    if name == "unmask":
        return our_scan, [u, dt, a, b, c]
    if name == "published":
        return published_scan, [u.mT.contiguous(), dt.mT.contiguous(), a, b.mT.contiguous(), c.mT.contiguous()]
    return time_first_scan, [*(x.transpose(0, 1).contiguous() for x in (u, dt)), a.mT.contiguous()] + [
        x.transpose(0, 1).contiguous() for x in (b, c)
    ]


WAYS = ("published", "time first", "unmask")


def run(name: str, inputs: Sequence[Tensor], backward: bool) -> float:
    """Seconds of one forward pass, or of a forward and a backward pass."""
    scan, tensors = arranged(name, inputs)
    tensors = [tensor.detach().requires_grad_(backward) for tensor in tensors]
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        y = scan(*tensors)
    if backward:
        torch.autograd.backward(y, torch.ones_like(y))
    return time.perf_counter() - started


def check(inputs: Sequence[Tensor]) -> None:
    """All ways give the same."""
    results = [scan(*tensors) for scan, tensors in map(partial(arranged, inputs=inputs), WAYS)]
    for y, order in ((results[0], (0, 2, 1)), (results[1], (1, 0, 2))):
        torch.testing.assert_close(y.permute(order), results[2], rtol=1e-3, atol=1e-4)


def measure_peak(inputs: Sequence[Tensor]) -> float:
    """MB that a forward and a backward pass allocate at most, beside inputs, output and their gradients."""
    from torch.profiler import ProfilerActivity, profile

    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    slope = torch.ones_like(leaves[0])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        y = our_scan(*leaves)
        torch.autograd.backward(y, slope)
    total, peak = 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    results = y.nbytes + sum(tensor.nbytes for tensor in leaves)
    return (peak - results) / 1e6


def measure_lengths(longest: int, out: Path) -> list[tuple[int, float, float]]:
    """Seconds of a forward, and of a forward and backward pass of one row, for each length; and a picture."""
    points, length = list[tuple[int, float, float]](), 1024
    while length <= longest:
        inputs = random_inputs(1, length)
        forward, both = (min(run("unmask", inputs, backward) for _ in range(2)) for backward in (False, True))
        points.append((length, forward, both))
        length *= 2
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    lengths = [point[0] for point in points]
    for column, label in ((1, "forward"), (2, "forward and backward")):
        seconds = [point[column] for point in points]
        axes.loglog(lengths, seconds, marker="o", label=label)
        axes.loglog(lengths, [seconds[-1] * n / lengths[-1] for n in lengths], linestyle=":", color="grey")
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds (dotted: proportional to the length)")
    axes.legend()
    figure.savefig(out / "scan.png", dpi=120)
    return points


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row in the comparison")
    parser.add_argument("--longest", type=int, default=131_072, help="tokens of the longest row that is timed")
    parser.add_argument("--out", type=Path, default=Path("runs/scan"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    inputs = random_inputs(BATCH, args.length)
    check(random_inputs(2, 100))
    seconds = {(name, backward): [0.0] * args.repeats for backward in (False, True) for name in WAYS}
    for backward in (False, True):
        run("unmask", inputs, backward)
        for repeat in range(args.repeats):
            for name in WAYS:
                seconds[name, backward][repeat] = run(name, inputs, backward)
    lines = []
    for (name, backward), values in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(values, seconds["unmask", backward], strict=True)]
        work = "forward and backward" if backward else "forward"
        lines.append(
            (work, name, f"{median(values):.3f} s", f"{median(ratios):.1f}x", f"{min(ratios):.1f} to {max(ratios):.1f}")
        )
    print_table(("work", "scan", "time", "ratio", "spread"), lines)
    peak, states = measure_peak(inputs), 4e-6 * BATCH * args.length * WIDTH * STATES
    print(
        f"\nmemory of a forward and backward pass: {peak:.1f} MB, 1/{states / peak:.0f} of all states ({states:.0f} MB)"
    )
    points = measure_lengths(args.longest, args.out)
    print()
    print_table(
        ("tokens", "forward", "ns/token", "forward and backward", "ns/token"),
        [(f"{n:,}", f"{f:.3f} s", f"{f / n * 1e9:,.0f}", f"{fb:.3f} s", f"{fb / n * 1e9:,.0f}") for n, f, fb in points],
    )
    figures = {
        "threads": args.threads,
        "seconds": [
            {"scan": name, "backward": backward, "seconds": values} for (name, backward), values in seconds.items()
        ],
        "peak_mb": peak,
        "states_mb": states,
        "lengths": points,
    }
    (args.out / "scan.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
