"""Table 10: seconds for a batch of samples with and without caching.

Caching is the paper's: the network is not called again while no token has changed, which a network without time
conditioning allows. It is switched off by hiding that the network ignores the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.reproduce._statistics import below
from unmask.reproduce._trainings import TEXT, missing_text, text_trainings
from unmask.reproduce._vocabulary import Column, Estimate, Figures, Row, Setup, Table, TrainedModel, Training
from unmask.sampling.ancestral import Ancestral
from unmask.sampling.canvas import Canvas
from unmask.sampling.denoisers import CountingDenoiser
from unmask.types import Positions, RowFn, Times, Tokens

_FACTORS = (5, 10)
"""Steps as multiples of the length: 5,000 and 10,000 for the paper's 1,024 tokens."""
_Way = Callable[[Ancestral, DenoiserLike, Canvas], Iterator[Tokens]]


class _TimeDependent(DenoiserWrapper):
    """A denoiser that is said to depend on the time: nothing of it is kept from step to step."""

    @property
    def time_independent(self) -> bool:
        return False

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        return self.denoiser(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)


def _without_cache(sampler: Ancestral, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
    return sampler.algorithm_1(_TimeDependent(denoiser), canvas)


def _with_cache(sampler: Ancestral, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
    return sampler.algorithm_1(denoiser, canvas)


def _drawn_in_advance(sampler: Ancestral, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
    return sampler.run(denoiser, canvas)


_WAYS: dict[str, dict[str, _Way]] = {
    "sedd": {"sedd": _without_cache},
    "mdlm": {"mdlm": _without_cache, "mdlm-cached": _with_cache, "mdlm-advance": _drawn_in_advance},
}


def _seconds(steps: int) -> Column:
    return Column(f"seconds_{steps}", f"seconds, T = {steps} L")


def _calls(steps: int) -> Column:
    return Column(f"calls_{steps}", f"calls, T = {steps} L")


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, "mdlm", "sedd")


def _measure(trained: TrainedModel) -> Figures:
    lm, texts = trained.lm, 4 if trained.setup.is_tiny else 64
    canvas = Canvas(lm.blank_canvas(texts).to(lm.device), tuple(range(trained.seed, trained.seed + texts)))
    lm.denoiser.prepack()
    figures: dict[str, dict[str, Estimate]] = {}
    for name, way in _WAYS[trained.method].items():
        figures[name] = {}
        for factor in _FACTORS:
            denoiser = CountingDenoiser(lm.denoiser)
            with lm.inference_mode():
                started = time.perf_counter()
                deque(way(Ancestral(factor * canvas.tokens.shape[1]), denoiser, canvas), maxlen=0)
                seconds = time.perf_counter() - started
            figures[name][_seconds(factor).key] = Estimate(seconds)
            figures[name][_calls(factor).key] = Estimate(denoiser.nfe)
    return figures


def _paper(minutes: Sequence[str]) -> dict[str, str]:
    return {_seconds(factor).key: f"{each} min" for factor, each in zip(_FACTORS, minutes, strict=True)}


TABLE = Table(
    name="caching",
    number="Table 10",
    title="Time for a batch of samples, with and without caching",
    columns=tuple(column(factor) for factor in _FACTORS for column in (_seconds, _calls)),
    rows=(
        Row("sedd", "SEDD", _paper(("85.3", "155.2"))),
        Row("mdlm", "MDLM without caching", _paper(("70.3", "127.9"))),
        Row("mdlm-cached", "MDLM with caching", _paper(("40.1", "60.4"))),
        Row("mdlm-advance", "MDLM, steps drawn in advance"),
    ),
    trainings=_trainings,
    measure=_measure,
    claims=(
        *(
            below(
                f"Caching makes sampling faster ({factor} L steps).",
                "mdlm-cached",
                "mdlm",
                column=_seconds(factor).key,
                paired=True,
            )
            for factor in _FACTORS
        ),
        below(
            "With 10 L steps, caching halves the time.",
            "mdlm-cached",
            "mdlm",
            column=_seconds(10).key,
            paired=True,
            factor=0.5,
        ),
        below("MDLM samples faster than SEDD, also without caching.", "mdlm", "sedd", column=_seconds(10).key),
    ),
    protocol=(
        "Seconds for 4 texts at once (64 at the paper's scale), on a machine whose load is told with every cell.",
        "A text's call is saved when none of its tokens has changed; calls of a batch of few texts are saved more"
        " often than those of many.",
        "The last row is unmask's own sampler: the same distribution, with the step of every token drawn in advance.",
    ),
    needs=TEXT,
    missing=missing_text,
)
