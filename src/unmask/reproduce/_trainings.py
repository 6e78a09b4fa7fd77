"""How methods are trained on text, at both scales.

At the scale tiny all methods share text, tokenizer, network, optimizer and number of rows. In each, the learning rate
is the multiple of the recipe's at which both half and twice as much are worse, by the held-out bound of pilots with a
third of the steps and a seed that no cell has: the same effort for every method. At the paper's scale the settings are
the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unmask.backbones.dit import DiTConfig, LocalInit, TimeConditioning
from unmask.baselines import SSDLM
from unmask.data.loader import Wrapped
from unmask.experiment import Experiment
from unmask.objectives import D3PM, MDLM, SEDD, NextToken, Objective
from unmask.recipes import lm1b, owt_small
from unmask.reproduce._vocabulary import Needs, Setup, Training
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW, AnyOptimizer, LinearDecay, Muon

RATE_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Multiples of the learning rate, of which pilots try those from 1 down to the lowest bound."""
PILOT_SHARE, PILOT_SEED, USUAL_PILOTS = 1 / 3, 0, 3
"""Steps of a pilot as a share of those of a cell; its seed, which no cell has; and how many most trainings need."""

_LM1B, _OWT = "lm1b", "owt"
_TEXT_FILES = ("wikitext2/train.tokens", "samples/c4.utf8", "samples/wiki.utf8")
"""The text of a data folder, as far as it is there."""
TEXT = Needs(
    f"text: {', '.join(f'DATA/{name}' for name in _TEXT_FILES)}, as far as they are there; without DATA, the standard"
    " library",
    "LM1B and OpenWebText from the hub",
)
"""What trainings on text need."""


@dataclass(frozen=True)
class _Method:
    objective: Objective
    share: float = 1.0
    relative_cost: float = 1.0
    time_conditioning: bool = False


_DISCRETE_STEPS = 1000
_METHODS = {
    # The paper trains AR with half the steps: as many tokens are predicted then, as MDLM masks half of them.
    "ar": _Method(NextToken(), share=0.5),
    "mdlm": _Method(MDLM()),
    "sedd": _Method(SEDD()),
    "d3pm": _Method(D3PM(steps=_DISCRETE_STEPS), relative_cost=1.7),
    "mdlm-discrete": _Method(MDLM(steps=_DISCRETE_STEPS)),
    "mdlm-no-carry-over": _Method(MDLM(steps=_DISCRETE_STEPS, carry_over=False), relative_cost=1.7),
    "ssd-lm": _Method(SSDLM()),
    "mdlm-time": _Method(MDLM(), time_conditioning=True),
}


def text_trainings(setup: Setup, *methods: str, dataset: str = _OWT) -> list[Training]:
    """Trainings on text: that of the paper's `dataset` (owt or lm1b), or at the scale tiny that which there is."""
    prefix = "text" if setup.is_tiny else dataset
    return [_text_training(setup, name, prefix) for name in methods]


def _text_training(setup: Setup, name: str, prefix: str) -> Training:
    method = _METHODS[name]
    base = _tiny_text(setup) if setup.is_tiny else lm1b() if prefix == _LM1B else owt_small()
    if method.time_conditioning:
        assert isinstance(base.backbone, DiTConfig)
        base = replace(base, backbone=replace(base.backbone, time_conditioning=TimeConditioning()))
    experiment = base.with_objective(method.objective)
    if not setup.is_tiny:
        training = replace(base.training, steps=round(method.share * base.training.steps))
        experiment = replace(experiment, training=training)
    pace = base.with_objective(MDLM())
    return Training(f"{prefix}-{name}", name, experiment, prefix, method.share, method.relative_cost, pace)


def text_sources(setup: Setup) -> tuple[str, ...]:
    """What small models are trained on."""
    if setup.data is None:
        return ("stdlib",)
    found = [setup.data / name for name in _TEXT_FILES if (setup.data / name).is_file()]
    if not found:
        raise ValueError(f"{setup.data} has no text to train on: none of {', '.join(_TEXT_FILES)}")
    return tuple(str(Path(file).resolve()) for file in found)


def missing_text(setup: Setup) -> str | None:
    """Why there is no text to train on, if there is none."""
    try:
        text_sources(setup)
    except ValueError as error:
        return str(error)
    return None


_TINY = Experiment(
    tokenizer="bpe:4096",
    backbone=DiTConfig(
        width=192,
        depth=4,
        heads=4,
        max_length=128,
        dropout=0.0,
        activation="relu2",
        rope_theta=100.0,
        local_init=LocalInit(),
    ),
    layout=Wrapped(128),
    training=TrainingConfig(
        batch_size=16,
        optimizer=Muon(lr=4e-3, momentum=0.9, adamw=AdamW(lr=2e-3)),
        lr_schedule=LinearDecay(),
        ema_decay=0.97,
    ),
)
"""A 4 x 192 network on rows of 128 tokens, with the optimizer and the local start of the recipe stdlib-tiny.

What only some objectives can have is left out: exact mask counts, a curriculum of times, a start from unigrams.
"""


def _tiny_text(setup: Setup) -> Experiment:
    return replace(_TINY, sources=text_sources(setup))


def with_steps(training: Training, steps: int, rate_factor: float, seed: int, bf16: bool) -> Experiment:
    """The experiment of a cell: as many steps, warm-up in proportion, and checkpoints for resuming."""
    config = training.experiment.training
    return replace(
        training.experiment,
        training=replace(
            config,
            steps=steps,
            warmup_steps=steps // 20,
            optimizer=_scale_rate(config.optimizer, rate_factor),
            seed=seed,
            bf16=bf16,
            log_every=max(1, steps // 100),
            save_every=max(1, steps // 4),
            eval_every=steps,
        ),
    )


def descend(factors: Sequence[float], bound: Callable[[float], float]) -> float:
    """The first factor, going up or down from 1, whose neighbours both have no lower bound."""
    place = factors.index(1.0)
    for step in (1, -1):
        while 0 <= place + step < len(factors) and bound(factors[place + step]) < bound(factors[place]):
            place += step
    return factors[place]


def _scale_rate(optimizer: AnyOptimizer, factor: float) -> AnyOptimizer:
    if isinstance(optimizer, Muon):
        adamw = replace(optimizer.adamw, lr=factor * optimizer.adamw.lr)
        return replace(optimizer, lr=factor * optimizer.lr, adamw=adamw)
    return replace(optimizer, lr=factor * optimizer.lr)
