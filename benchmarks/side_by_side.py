"""Ratios of times measured in turns in one run, so that both sides share the noise of the machine."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import unmask
from examples.mdlm_reference import ModelSize, ReferenceMDLM
from unmask.hardware.flops import count_flops, measure_peak_flops
from unmask.hardware.precision import bf16_is_faster

WorkFn = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """Times of the reference and of `unmask` for the same work, and their ratio for each repeat.

    `precision` is the one in which the reference is faster on this machine. `peak_fraction` is the fraction of the
    machine's matmul peak that `unmask` reaches.
    """

    work: str
    precision: str
    baseline: tuple[float, ...]
    ours: tuple[float, ...]
    peak_fraction: float | None = None
    unit: str = "s"
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """Of pairs that were measured one after the other."""
        return [baseline / ours for baseline, ours in zip(self.baseline, self.ours, strict=True)]

    @property
    def ratio(self) -> float:
        """The middle one."""
        return statistics.median(self.ratios)

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {**vars(self), "ratio": self.ratio, "ratios": self.ratios}


class IsolatedProcess:
    """Work in a separate process, so that the state of the allocator is not shared with other work."""

    def __init__(self, make: Callable[..., WorkFn], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=_serve_calls, args=(child, make, *arguments), daemon=True)
        self.process.start()

    def __call__(self) -> None:
        self._request(False)

    def flops(self) -> int:
        """FLOPs of the work, from one more run."""
        return self._request(True)

    def _request(self, with_flops: bool) -> int:
        self.pipe.send(with_flops)
        return int(self.pipe.recv())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()


def _serve_calls(pipe: Connection, make: Callable[..., WorkFn], *arguments: object) -> None:
    work = make(*arguments)
    while True:
        counted = pipe.recv()
        pipe.send(measure_flops(work) if counted else (work(), 0)[1])


def measure_flops(work: WorkFn) -> int:
    """FLOPs of the matrix products of `work`, which is run once."""
    with count_flops(True) as count:
        work()
    return count.flops


def time_alternating(
    baseline: WorkFn, ours: WorkFn, repeats: int, warmup: bool = True
) -> tuple[list[float], list[float]]:
    """Seconds of both, in turns, after one run of each that is not counted if `warm`."""
    if warmup:
        baseline(), ours()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for work, seconds in zip((baseline, ours), times, strict=True):
            seconds.append(time_once(work))
    return times


def time_once(work: WorkFn) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(
    work: str,
    precision: str,
    baseline: WorkFn,
    ours: WorkFn,
    repeats: int = 3,
    note: str = "",
    warmup: bool = True,
    baseline_fraction: float = 1.0,
    ours_fraction: float = 1.0,
    with_flops: bool = True,
) -> Result:
    """Time the same work in the reference and in `unmask`, and the fraction of the peak that `unmask` reaches.

    Where all of the work would take too long, the baseline does `baseline_fraction` of it and ours `ours_fraction`;
    times are extrapolated to all of it. With `with_flops`, ours runs once more to count its FLOPs.
    """
    baseline_seconds, ours_seconds = time_alternating(baseline, ours, repeats, warmup)
    reached = None
    if with_flops:
        peak = current_peak_flops()
        flops = ours.flops() if isinstance(ours, IsolatedProcess) else measure_flops(ours)
        reached = flops / statistics.median(ours_seconds) / peak
    baseline_total = tuple(seconds / baseline_fraction for seconds in baseline_seconds)
    ours_total = tuple(seconds / ours_fraction for seconds in ours_seconds)
    return Result(work, precision, baseline_total, ours_total, reached, note=note)


@cache
def unmask_uses_bf16() -> bool:
    """Whether `unmask` computes in bfloat16: if it is faster on this machine."""
    return bf16_is_faster(torch.device("cpu"))


def current_peak_flops() -> float:
    """FLOP/s of large matrix products right now, in the precision that `unmask` uses."""
    return measure_peak_flops(torch.bfloat16 if unmask_uses_bf16() else torch.float32, torch.device("cpu"))


PRECISIONS = {"float32": False, "bfloat16": True}
"""Precisions of the reference, and the value of its `bf16`."""


def fastest(works: Mapping[str, WorkFn]) -> str:
    """The name of the fastest work, from three turns of which the first is not counted."""
    rounds = [{name: time_once(work) for name, work in works.items()} for _ in range(3)][1:]
    return min(works, key=lambda name: min(seconds[name] for seconds in rounds))


def fastest_pair(
    size: ModelSize, work: Callable[[ReferenceMDLM], object]
) -> tuple[ReferenceMDLM, str, unmask.LanguageModel]:
    """`matched_pair` at full speed: the reference in the precision (also returned) in which it does the `work`
    faster, ours in bfloat16 where that is faster, and with prepacked weights."""
    reference, model = matched_pair(size)

    def in_precision(bf16: bool) -> None:
        reference.bf16 = bf16
        work(reference)

    precision = fastest({name: partial(in_precision, bf16) for name, bf16 in PRECISIONS.items()})
    reference.bf16 = PRECISIONS[precision]
    if unmask_uses_bf16():
        model.denoiser.to_bf16()
    model.denoiser.prepack()
    return reference, precision, model


def matched_pair(size: ModelSize, seed: int = 0, bf16: bool = False) -> tuple[ReferenceMDLM, unmask.LanguageModel]:
    """A reference network with random weights, and a model of `unmask` with the same weights."""
    torch.manual_seed(seed)
    reference = ReferenceMDLM(size, bf16=bf16)
    with torch.no_grad():  # weights that are initialized to zero would hide errors
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return reference, to_unmask(reference)


def to_unmask(baseline: ReferenceMDLM) -> unmask.LanguageModel:
    """The same network as `unmask` reads it from a folder in the published layout."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(baseline.size.to_json()))
        weights = {f"backbone.{name}": tensor for name, tensor in baseline.state_dict().items()}
        save_file(weights, Path(folder) / "model.safetensors")
        return unmask.load(folder)


@dataclass(frozen=True)
class RandomTokens:
    """A stream of random tokens, as the loader reads it."""

    ids: NDArray[np.int64]

    @classmethod
    def generate(cls, num_tokens: int, vocab: int, seed: int = 0) -> RandomTokens:
        """`tokens` ids below the mask, the last of `vocab`."""
        return cls(np.random.default_rng(seed).integers(0, vocab - 1, num_tokens))

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        return len(self.ids)

    @property
    def document_ends(self) -> NDArray[np.int64]:
        """One document."""
        return np.array([len(self.ids)])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """The ids at start, ..., stop - 1."""
        return self.ids[start:stop]


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)
