"""All benchmarks, in about 15 minutes: a table of ratios, figures as JSON, and a plot.

python -m benchmarks [--out FOLDER] [--only WORD ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import sampling, scoring, startup, training
from benchmarks import sampling_scaling as scaling
from benchmarks import training_memory as memory
from benchmarks.side_by_side import Result, current_peak_flops, median, unmask_uses_bf16
from unmask.hardware.flops import measure_peak_flops
from unmask.provenance import collect_provenance
from unmask.report.formatting import print_table

COMPARISONS: dict[str, Callable[[], Result]] = {
    "training words": lambda: training.measure_training(training.WORDS, 8),
    "training characters": lambda: training.measure_training(training.CHARACTERS, 16),
    "training deep": lambda: training.measure_training(training.DEEP, 4),
    "training wide": lambda: training.measure_training(training.WIDE, 8),
    "memory": memory.measure_memory,
    "memory recomputing": lambda: memory.measure_memory("recompute"),
    "sampling words": lambda: sampling.measure_sampling(training.WORDS, 4, 32, repeats=5, baseline_fraction=0.25),
    "sampling deep": lambda: sampling.measure_sampling(training.DEEP, 2, 64, baseline_fraction=0.125),
    "sampling wide": lambda: sampling.measure_sampling(training.WIDE, 6, 48, baseline_fraction=0.125),
    "sampling characters": lambda: sampling.measure_sampling(
        training.CHARACTERS, 16, 1000, baseline_fraction=0.02, ours_fraction=0.1
    ),
    "infilling": lambda: sampling.measure_infilling(repeats=2),
    "sliding": lambda: sampling.measure_semi_autoregressive(repeats=2),
    "scoring": lambda: scoring.measure_scoring(scoring.word_case()),
}
"""`deep` and `wide` are shapes that nothing was tuned on."""


def main() -> None:
    """Run the selected benchmarks, all by default."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="where JSON and plot are written")
    parser.add_argument("--only", nargs="*", help="parts of names: " + ", ".join((*COMPARISONS, *EXTRAS)))
    args = parser.parse_args()
    known = (*COMPARISONS, *EXTRAS)
    selected = [name for name in known if _is_selected(name, args.only)]
    if not selected:
        _log(f"make bench: nothing is called {' '.join(args.only)}; there are {', '.join(known)}")
        sys.exit(2)
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    peaks = _matmul_peaks()
    _log(", ".join(f"{name} matrix products {peak / 1e9:,.0f} GFLOP/s" for name, peak in peaks.items()))
    results: dict[str, Result] = {}
    extras: dict[str, Any] = {}
    for number, name in enumerate(selected, start=1):
        _log(f"{number} of {len(selected)}: {name} ({time.perf_counter() - start:.0f} s so far)")
        if name in COMPARISONS:
            results[name] = COMPARISONS[name]()
        else:
            extras[name] = EXTRAS[name]()
        figures = {
            **collect_provenance(seed=0, data={}),
            "peaks": peaks,
            "peak_at_the_end": current_peak_flops(),
            "seconds": time.perf_counter() - start,
            "results": {each: result.to_json() for each, result in results.items()},
            **extras,
        }
        # After each benchmark, so that a run that is stopped is not lost.
        (args.out / "bench.json").write_text(json.dumps(figures, indent=1) + "\n")
    _print_results(list(results.values()))
    if "startup" in extras:
        found = extras["startup"]
        print(
            f"\nstart-up of `unmask sample`: {_format_seconds(found['sample'])}, of which `import torch`"
            f" {_format_seconds(found['torch'])}; --help {_format_seconds(found['help'])}"
        )
    if "scaling" in extras:
        _plot(extras["scaling"], args.out / "scaling.png")
    _log(f"figures are in {args.out}")


EXTRAS: dict[str, Callable[[], Any]] = {
    "startup": lambda: asdict(startup.measure_startup()),
    "scaling": lambda: [asdict(point) for point in scaling.measure_scaling()],
}


def _format_seconds(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def _is_selected(name: str, only: list[str] | None) -> bool:
    return not only or any(word in name for word in only)


def _matmul_peaks() -> dict[str, float]:
    cpu = torch.device("cpu")
    return {
        "float32": measure_peak_flops(torch.float32, cpu),
        "bfloat16": measure_peak_flops(torch.bfloat16, cpu),
    }


def _print_results(results: list[Result]) -> None:
    lines = []
    for result in results:
        spread = f"{min(result.ratios):.1f} to {max(result.ratios):.1f}" if len(result.ratios) > 1 else "once"
        lines.append(
            (
                result.work,
                f"{median(result.baseline):.2f} {result.unit}",
                result.precision,
                f"{median(result.ours):.2f} {result.unit}",
                f"{result.ratio:.1f}x",
                spread,
                "-" if result.peak_fraction is None else f"{result.peak_fraction:.0%}",
            )
        )
    kind = "bf16" if unmask_uses_bf16() else "fp32"
    header = ("work", "baseline", "in", "unmask", "ratio", "spread", f"of {kind} peak")
    if lines:
        print_table(header, lines)


def _plot(points: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11, 3), layout="constrained")
    for place, axis in zip(figure.subplots(1, len(scaling.AXES)), scaling.AXES, strict=True):
        selected = [point for point in points if point["axis"] == axis]
        values = [point["value"] for point in selected]
        for name, marker in (("baseline", "s"), ("ours", "o")):
            label = "unmask" if name == "ours" else name
            place.loglog(values, [point[name] for point in selected], marker=marker, label=label)
        place.set_xlabel(axis)
        place.set_xticks(values, [str(value) for value in values])
        place.minorticks_off()
        place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        place.yaxis.set_major_formatter("{x:g}")
    figure.axes[0].set_ylabel("seconds")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
