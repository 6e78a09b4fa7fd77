"""The training loop: batch -> nats -> gradients -> step, resumable bit for bit.

Nothing random is stored: batch, noise and dropout are functions of (seed, step), so a run that was
killed goes on from its last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from unmask.data.loader import Loader
from unmask.diffusion.times import PartTimes
from unmask.objectives.base import Objective
from unmask.training import checkpoint
from unmask.training.curriculum import CELLS, AnyCurriculum, Clipping, loss_moments
from unmask.training.log import Log
from unmask.training.machine import (
    OutOfMemoryError,
    Pace,
    compile_blocks,
    counting,
    good_at_bf16,
    is_out_of_memory,
    keep_freed_memory,
    less_memory,
)
from unmask.training.optim import (
    AdamW,
    AnyDecay,
    AnyOptimizer,
    Constant,
    Ema,
    learning_rate_factor,
    scale_and_clip,
    set_learning_rate,
)
from unmask.training.parallel import Parallelism, Replicated, Through
from unmask.training.trackers import AnyTracker
from unmask.types import Batch
from unmask.world import World

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Checkpoints hold what is trained: a frozen network is what the run began with."""


@dataclass(frozen=True)
class Training:
    """How long and how to train; the defaults are the paper's, but for the number of steps.

    `microbatch`: rows that a rank takes at once, all of its own if None. `random_length`: the share of steps
    whose rows are cut to a random length. `bf16`: mixed precision; None where the machine is good at it.
    `compile`: turn the network's blocks into machine code first, which takes a minute or two. `recompute`: a
    third more work for a fraction of the memory that rows take, with the same gradients. `opening`: the share
    of the run in which a network that was born causal is opened, step by step; None leaves it as it is.
    `patience`: bad steps in a row (loss or gradient not finite) after which the run stops. `trackers`: who is
    told the figures beside `metrics.jsonl`.
    """

    steps: int = 10_000
    batch_size: int = 512
    microbatch: int | None = None
    optimizer: AnyOptimizer = AdamW()
    warmup: int = 2500
    decay: AnyDecay = Constant()
    clip: float = 1.0
    ema: float = 0.9999
    random_length: float = 0.0
    curriculum: AnyCurriculum | None = None
    opening: float | None = None
    seed: int = 0
    bf16: bool | None = None
    compile: bool = False
    recompute: bool = False
    parallelism: Parallelism = Replicated()
    patience: int = 10
    log_every: int = 10
    save_every: int = 1000
    evaluate_every: int = 1000
    keep: int = 2
    trackers: tuple[AnyTracker, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "patience", "log_every", "save_every", "evaluate_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.microbatch is not None and self.microbatch < 1:
            raise ValueError(f"microbatch must be at least 1; got {self.microbatch}")
        if not 0 <= self.random_length <= 1:
            raise ValueError(f"random_length is a share of the steps, in [0, 1]; got {self.random_length}")
        if self.seed < 0 or self.warmup < 0:
            raise ValueError(f"seed and warmup must be 0 or above; got {self.seed} and {self.warmup}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema, the decay of the moving average, must be in [0, 1); got {self.ema}")
        if self.opening is not None and not 0 < self.opening <= 1:
            raise ValueError(f"opening is a share of the run, above 0 and at most 1; got {self.opening}")
        if not self.clip > 0:
            raise ValueError(f"clip must be above 0; got {self.clip}")


@dataclass
class State:
    """The numbers of a run beside its tensors.

    `bf16` is what was measured or asked for when the run began: it must not change with the clock. `low` and
    `high` clip the times, if they are chosen by measurement. `flops`
    are those of all matrix products, on all ranks; between the steps that are counted, a token's gradients
    and an update (Muon multiplies matrices, too) cost what they did in the last of these.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    bad_in_a_row: int = 0
    bf16: bool = False
    low: float = 0.0
    high: float = 1.0
    flops: float = 0.0
    flops_per_token: float = 0.0
    flops_per_update: float = 0.0


class DivergedError(RuntimeError):
    """The loss was not finite for too long."""


class Run:
    """A model in training, with everything that a checkpoint holds."""

    def __init__(
        self, denoise: Any, objective: Objective, loader: Loader, settings: Training, world: World
    ) -> None:
        self.objective, self.loader, self.settings, self.world = objective, loader, settings, world
        self.denoise = denoise.to(world.device)
        if world.device.type == "cpu":
            keep_freed_memory()
        if settings.opening is not None and self.denoise.backbone.opened is None:
            raise ValueError(
                "opening is for networks that were born causal, and this one looks to both sides"
            )
        if settings.recompute:
            self.denoise.backbone.recompute = True
        if settings.compile:
            compile_blocks(self.denoise)
        self.through = Through(self.denoise, settings.parallelism.wrap(self.denoise, world))
        self.ema = Ema(self.denoise, settings.ema)  # of sharded weights, if they now are
        self.optimizers: list[Optimizer] = settings.optimizer.build(self.denoise)
        self.state = State()
        self.whole: set[Path] = set()  # checkpoints that were verified
        if settings.bf16 is None:  # the first rank measures for all
            self.state.bf16 = world.any(world.first and good_at_bf16(world.device))
        else:
            self.state.bf16 = settings.bf16

    def step(self) -> dict[str, float]:
        """One step of the optimizer, or none if anything is not finite; what there is to log."""
        settings, state = self.settings, self.state
        factor = learning_rate_factor(state.step, settings.steps, settings.warmup, settings.decay)
        set_learning_rate(self.optimizers, factor)
        if settings.curriculum is not None and settings.curriculum.due(state.step):
            state.low, state.high = self._steadiest_times(settings.curriculum)
        # Steps 1, 2, 4, 8, ... in the life of the run, not of the process: they are the same after a resume.
        to_count = state.step & (state.step + 1) == 0
        with counting(to_count) as in_gradients:
            mine = self._gradients()
        nats, counted, flops = self.world.total(*mine, in_gradients.flops)
        # DDP and FSDP average over ranks; this makes it the global mean.
        norm = scale_and_clip(self.denoise.parameters(), self.world.size / max(1.0, counted), settings.clip)
        loss = nats / max(1.0, counted)
        good = math.isfinite(loss) and math.isfinite(norm)
        if good:
            with counting(to_count) as in_update, self._mixed_precision():
                for optimizer in self.optimizers:
                    optimizer.step()
            if to_count:
                state.flops_per_token = flops / max(1.0, counted)
                (state.flops_per_update,) = self.world.total(in_update.flops)
            self.ema.update(self.denoise)
        state.bad_in_a_row = 0 if good else state.bad_in_a_row + 1
        state.skipped += not good
        state.step += 1
        state.tokens += int(counted)
        state.flops += state.flops_per_token * counted + state.flops_per_update * good
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return {
            "loss": loss,
            "gradient": norm,
            "lr": factor,
            "skipped": state.skipped,
            "tokens": state.tokens,
        }

    def _gradients(self) -> tuple[float, float]:
        """Sum the nats of this rank's rows, leaving their gradients; the sum and the tokens counted."""
        step, settings = self.state.step, self.settings
        torch.manual_seed(_seed(settings.seed, step, self.world.rank, 1))  # dropout, and nothing else
        objective, curriculum = self.objective, settings.curriculum
        if curriculum is not None:
            measured = PartTimes(self.state.low, self.state.high)
            objective = curriculum.applied(objective, step / settings.steps, measured)
        if settings.opening is not None:
            self.denoise.backbone.opened = min(1.0, step / settings.steps / settings.opening)
        nats = counted = 0.0
        pieces = self.world.pieces(settings.batch_size, settings.microbatch)
        for number, (first, count) in enumerate(pieces):
            # A rank without rows of its own lends its hands: collectives need every rank in every pass.
            batch = self.loader.batch(step, min(first, settings.batch_size - 1), max(1, count))
            batch = self._cropped(batch, step).to(self.world.device)
            generator = torch.Generator().manual_seed(_seed(settings.seed, step))
            with self.through.gathering(last=number == len(pieces) - 1):
                with self._mixed_precision():
                    total = objective.token_nll(self.through, batch, generator).sum()
                torch.autograd.backward(total if count else 0 * total)
            if count:
                nats += float(total.detach())
                counted += float(batch.counted.sum())
        return nats, counted

    def _mixed_precision(self) -> torch.autocast:
        """Products of bfloat16 numbers, if the run has them: those of the network, and Muon's."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.state.bf16)

    @torch.no_grad()
    def _steadiest_times(self, curriculum: AnyCurriculum) -> tuple[float, float]:
        """The part of the times at which the losses of all ranks vary least, on batches yet to come."""
        assert isinstance(curriculum, Clipping)
        moments = torch.zeros(3, CELLS, dtype=torch.float64)
        step, settings = self.state.step, self.settings
        self.denoise.eval()
        for later in range(step, step + curriculum.batches):
            for first, count in self.world.pieces(settings.batch_size, settings.microbatch):
                batch = self.loader.batch(later, min(first, settings.batch_size - 1), max(1, count))
                generator = torch.Generator().manual_seed(_seed(settings.seed, later, 2))
                found = loss_moments(self.objective, self.through, batch.to(self.world.device), generator)
                moments += found.cpu() if count else 0
        self.denoise.train()
        times = curriculum.chosen(self.world.summed(moments))
        return times.low, times.high

    def _cropped(self, batch: Batch, step: int) -> Batch:
        random = np.random.default_rng([self.settings.seed, step])
        if random.random() >= self.settings.random_length:
            return batch
        return batch.cropped(int(random.integers(1, batch.tokens.shape[1] + 1)))

    def save(self, folder: Path) -> None:
        """Write a checkpoint and delete what is no longer needed."""
        state = {**vars(self.state), "ema_updates": self.ema.updates}
        checkpoint.save(folder, self.state.step, self._tensors(), state, self.world)
        if self.world.first:
            checkpoint.rotate(folder, self.settings.keep, self.whole)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint."""
        tensors = self._tensors()
        state = checkpoint.load(path, tensors, self.world)
        self.ema.updates = state.pop("ema_updates")
        self.state = State(**state)
        set_state_dict(
            self.denoise,
            self.optimizers,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=TRAINED,
        )

    def _tensors(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.denoise, self.optimizers, options=TRAINED)
        return {"model": model, "optimizer": optimizer, "ema": self.ema.weights}


def train(run: Run, folder: Path, log: Log, evaluate: Callable[[], dict[str, float]] | None = None) -> bool:
    """Train to the end, or until a signal asks to stop (then False), saving on the way.

    `evaluate` is called with the averaged weights in place.
    """
    settings, world, state = run.settings, run.world, run.state
    pace = Pace(world, run.state.bf16, state.tokens, state.flops)
    log.say(f"matrix products run at {pace.peak / 1e9:,.0f} GFLOP/s here")
    run.denoise.train()
    with _signals(world) as asked, _enough_memory(run, folder):
        while state.step < settings.steps:
            with pace.timed():
                figures = run.step()
            if state.bad_in_a_row:
                log.bad_step(state.step, figures["loss"], figures["gradient"])
            if state.bad_in_a_row >= settings.patience:
                raise DivergedError(
                    f"loss or gradient was not finite for {settings.patience} steps in a row, up to step"
                    f" {state.step}; lower the learning rate or look at the data of these steps"
                )
            last = state.step == settings.steps
            if last or state.step % settings.log_every == 0:
                log.step(state.step, {**figures, **pace.figures(state.tokens, state.flops)})
            if evaluate is not None and (last or state.step % settings.evaluate_every == 0):
                with run.ema.applied(run.denoise):
                    run.denoise.eval()
                    log.evaluation(state.step, evaluate())
                    run.denoise.train()
            stop = world.any(bool(asked))
            if last or stop or state.step % settings.save_every == 0:
                run.save(folder)
            if stop and not last:
                log.say(f"saved at step {state.step}, stopping (give the same command again to go on)")
                return False
    return True


@contextmanager
def _signals(world: World) -> Iterator[list[int]]:
    """SIGTERM and SIGINT are noted, so that the step can be finished and saved; a second one is obeyed.

    But not by one of many ranks: where every process is signalled, torchrun hands on to a rank what it has
    had already, and it kills the ranks that do not leave in time.
    """
    asked: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, _frame: Any) -> None:
        asked.append(number)
        if world.size == 1:
            signal.signal(number, previous[number])

    try:
        for wanted in (signal.SIGTERM, signal.SIGINT):
            previous[wanted] = signal.signal(wanted, note)
    except ValueError:  # not in the main thread, where signals do not arrive
        pass
    try:
        yield asked
    finally:
        if world.size == 1 or not asked:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextmanager
def _enough_memory(run: Run, folder: Path) -> Iterator[None]:
    """Memory that runs out gives one sentence: what to change, and where the run will go on."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        newest, _ = checkpoint.newest(folder)
        pieces = run.world.pieces(run.settings.batch_size, run.settings.microbatch)
        raise OutOfMemoryError(
            f"memory ran out after step {run.state.step}: {less_memory(max(rows for _, rows in pieces))};"
            f" {'there is no checkpoint yet' if newest is None else f'the checkpoint {newest} is whole'}"
        ) from error


def _seed(*path: int) -> int:
    return int(np.random.SeedSequence(path).generate_state(1)[0])
