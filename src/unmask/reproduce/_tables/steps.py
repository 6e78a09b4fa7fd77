"""Table 11: the bound of a model that was trained in continuous time, when it is measured in T steps."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.likelihood.corpus import EvalConfig
from unmask.likelihood.step_bounds import step_bounds
from unmask.reproduce._measures import NATS, PERPLEXITY, held_out_loader
from unmask.reproduce._statistics import below, same
from unmask.reproduce._trainings import TEXT, missing_text, text_trainings
from unmask.reproduce._vocabulary import Estimate, Figures, Row, Setup, Table, TrainedModel, Training

_PAPER = {
    10: "42.18",
    20: "30.70",
    50: "25.77",
    100: "24.35",
    200: "23.66",
    500: "23.26",
    1000: "23.15",
}
_LIMIT = "infinity"


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, "mdlm")


def _measure(trained: TrainedModel) -> Figures:
    windows = trained.setup.windows
    config = EvalConfig(None if windows is None else max(40, windows // 2), replicates=4, seed=trained.seed)
    with trained.lm.inference_mode():
        bounds = step_bounds(trained.lm.denoiser, trained.lm.objective, held_out_loader(trained), tuple(_PAPER), config)
    return {
        _LIMIT if bound.steps is None else str(bound.steps): {
            PERPLEXITY.key: Estimate(bound.perplexity, bound.perplexity_error),
            NATS.key: Estimate(bound.nats_per_token, bound.standard_error),
        }
        for bound in bounds
    }


TABLE = Table(
    name="steps",
    number="Table 11",
    title="The bound in T steps of a model trained in continuous time",
    columns=(PERPLEXITY, NATS),
    rows=(
        *(Row(str(steps), f"T = {steps}", {PERPLEXITY.key: paper}) for steps, paper in _PAPER.items()),
        Row(_LIMIT, "continuous time", {PERPLEXITY.key: "23.05"}),
    ),
    trainings=_trainings,
    measure=_measure,
    claims=(
        below(
            "The bound falls with the number of steps, from 10 to 1,000.",
            *map(str, sorted(_PAPER, reverse=True)),
            column=NATS.key,
            paired=True,
        ),
        below("Continuous time has the lowest bound.", _LIMIT, "1000", column=NATS.key, paired=True),
        same(
            "A thousand steps are continuous time but for half a percent of perplexity.",
            "1000",
            (_LIMIT,),
            column=NATS.key,
            margin=0.005,
            paired=True,
        ),
    ),
    protocol=(
        "All T are measured on the same text with the same draws of times and masks.",
        "The first step begins with masks only and the last ends with none, so the bounds are exact; the published"
        " code clamps the times.",
    ),
    needs=TEXT,
    missing=missing_text,
    plot_columns=(NATS.key,),
)
