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
from unmask.diffusion.time_sampling import ClippedTimes
from unmask.distributed import Distributed
from unmask.hardware.flops import (
    OutOfMemoryError,
    ThroughputMeter,
    bf16_is_faster,
    compile_blocks,
    count_flops,
    is_out_of_memory,
    oom_advice,
    retain_freed_memory,
)
from unmask.objectives.base import Objective
from unmask.training import checkpoint
from unmask.training.curriculum import TIME_BINS, AnyCurriculum, VarianceClipping, loss_moments
from unmask.training.logger import TrainingLogger
from unmask.training.optim import (
    EMA,
    AdamW,
    AnyLRSchedule,
    AnyOptimizer,
    ConstantLR,
    lr_factor,
    scale_and_clip_grads,
    set_lr,
)
from unmask.training.parallelism import DDP, ParallelDenoiser, Parallelism
from unmask.training.trackers import AnyTracker
from unmask.types import Batch

_STATE_DICT_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Checkpoints hold what is trained: a frozen network is what the run began with."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how to train; the defaults are the paper's, but for the number of steps.

    `microbatch`: rows that a rank takes at once, all of its own if None. `random_length_prob`: the share of steps
    whose rows are cut to a random length. `bf16`: mixed precision; None where the machine is good at it.
    `compile`: turn the network's blocks into machine code first, which takes a minute or two. `recompute`: a
    third more work for a fraction of the memory that rows take, with the same gradients. `opening`: the share
    of the run in which a network that was born causal is opened, step by step; None leaves it as it is.
    `patience`: bad steps in a row (loss or gradient not finite) after which the run stops. `trackers`: who is
    told the figures beside `metrics.jsonl`.
    """

    steps: int = 10_000
    batch_size: int = 512
    microbatch_size: int | None = None
    optimizer: AnyOptimizer = AdamW()
    warmup_steps: int = 2500
    lr_schedule: AnyLRSchedule = ConstantLR()
    max_grad_norm: float = 1.0
    ema_decay: float = 0.9999
    random_length_prob: float = 0.0
    curriculum: AnyCurriculum | None = None
    attention_annealing: float | None = None
    seed: int = 0
    bf16: bool | None = None
    compile: bool = False
    gradient_checkpointing: bool = False
    parallelism: Parallelism = DDP()
    max_nonfinite_steps: int = 10
    log_every: int = 10
    save_every: int = 1000
    eval_every: int = 1000
    keep_checkpoints: int = 2
    trackers: tuple[AnyTracker, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "max_nonfinite_steps",
            "log_every",
            "save_every",
            "eval_every",
            "keep_checkpoints",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"microbatch_size must be at least 1; got {self.microbatch_size}")
        if not 0 <= self.random_length_prob <= 1:
            raise ValueError(f"random_length_prob is a share of the steps, in [0, 1]; got {self.random_length_prob}")
        if self.seed < 0 or self.warmup_steps < 0:
            raise ValueError(f"seed and warmup_steps must be 0 or above; got {self.seed} and {self.warmup_steps}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay, the decay of the moving average, must be in [0, 1); got {self.ema_decay}")
        if self.attention_annealing is not None and not 0 < self.attention_annealing <= 1:
            raise ValueError(
                f"attention_annealing is a share of the run, above 0 and at most 1; got {self.attention_annealing}"
            )
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0; got {self.max_grad_norm}")


@dataclass
class TrainState:
    """The numbers of a run beside its tensors.

    `bf16` is what was measured or asked for when the run began: it must not change with the clock. `low` and
    `high` clip the times, if they are chosen by measurement. `flops`
    are those of all matrix products, on all ranks; between the steps that are counted, a token's gradients
    and an update (Muon multiplies matrices, too) cost what they did in the last of these.
    """

    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0
    bf16: bool = False
    time_low: float = 0.0
    time_high: float = 1.0
    flops: float = 0.0
    flops_per_token: float = 0.0
    flops_per_update: float = 0.0


class DivergedError(RuntimeError):
    """The loss was not finite for too long."""


class Trainer:
    """A model in training, with everything that a checkpoint holds."""

    def __init__(
        self,
        denoiser: Any,
        objective: Objective,
        loader: Loader,
        config: TrainingConfig,
        distributed: Distributed,
    ) -> None:
        self.objective, self.loader, self.config, self.distributed = objective, loader, config, distributed
        self.denoiser = denoiser.to(distributed.device)
        if distributed.device.type == "cpu":
            retain_freed_memory()
        if config.attention_annealing is not None and self.denoiser.backbone.future_visibility is None:
            raise ValueError(
                "attention_annealing is for networks that were born causal, and this one looks to both sides"
            )
        if config.gradient_checkpointing:
            self.denoiser.backbone.gradient_checkpointing = True
        if config.compile:
            compile_blocks(self.denoiser)
        self.model = ParallelDenoiser(self.denoiser, config.parallelism.wrap(self.denoiser, distributed))
        self.ema = EMA(self.denoiser, config.ema_decay)  # of sharded weights, if they now are
        self.optimizers: list[Optimizer] = config.optimizer.build(self.denoiser)
        self.state = TrainState()
        self.verified_checkpoints: set[Path] = set()  # checkpoints that were verified
        if config.bf16 is None:  # the first rank measures for all
            self.state.bf16 = distributed.any_rank(distributed.is_main and bf16_is_faster(distributed.device))
        else:
            self.state.bf16 = config.bf16

    def train_step(self) -> dict[str, float]:
        """One step of the optimizer, or none if anything is not finite; what there is to log."""
        settings, state = self.config, self.state
        factor = lr_factor(state.step, settings.steps, settings.warmup_steps, settings.lr_schedule)
        set_lr(self.optimizers, factor)
        if settings.curriculum is not None and settings.curriculum.needs_measurement(state.step):
            state.time_low, state.time_high = self._lowest_variance_times(settings.curriculum)
        # Steps 1, 2, 4, 8, ... in the life of the run, not of the process: they are the same after a resume.
        to_count = state.step & (state.step + 1) == 0
        with count_flops(to_count) as in_gradients:
            mine = self._forward_backward()
        nats, counted, flops = self.distributed.all_reduce_scalars(*mine, in_gradients.flops)
        # DDP and FSDP average over ranks; this makes it the global mean.
        norm = scale_and_clip_grads(
            self.denoiser.parameters(),
            self.distributed.world_size / max(1.0, counted),
            settings.max_grad_norm,
        )
        loss = nats / max(1.0, counted)
        good = math.isfinite(loss) and math.isfinite(norm)
        if good:
            with count_flops(to_count) as in_update, self._autocast():
                for optimizer in self.optimizers:
                    optimizer.step()
            if to_count:
                state.flops_per_token = flops / max(1.0, counted)
                (state.flops_per_update,) = self.distributed.all_reduce_scalars(in_update.flops)
            self.ema.update(self.denoiser)
        state.consecutive_skips = 0 if good else state.consecutive_skips + 1
        state.skipped_steps += not good
        state.step += 1
        state.tokens += int(counted)
        state.flops += state.flops_per_token * counted + state.flops_per_update * good
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return {
            "loss": loss,
            "grad_norm": norm,
            "lr_factor": factor,
            "skipped_steps": state.skipped_steps,
            "tokens": state.tokens,
        }

    def _forward_backward(self) -> tuple[float, float]:
        """Sum the nats of this rank's rows, leaving their gradients; the sum and the tokens counted."""
        step, settings = self.state.step, self.config
        torch.manual_seed(_derive_seed(settings.seed, step, self.distributed.rank, 1))  # dropout, and nothing else
        objective, curriculum = self.objective, settings.curriculum
        if curriculum is not None:
            measured = ClippedTimes(self.state.time_low, self.state.time_high)
            objective = curriculum.objective_at(objective, step / settings.steps, measured)
        if settings.attention_annealing is not None:
            self.denoiser.backbone.future_visibility = min(1.0, step / settings.steps / settings.attention_annealing)
        nats = counted = 0.0
        pieces = self.distributed.microbatches(settings.batch_size, settings.microbatch_size)
        for number, (first, count) in enumerate(pieces):
            # A rank without rows of its own lends its hands: collectives need every rank in every pass.
            batch = self.loader.batch(step, min(first, settings.batch_size - 1), max(1, count))
            batch = self._randomly_truncated(batch, step).to(self.distributed.device)
            generator = torch.Generator().manual_seed(_derive_seed(settings.seed, step))
            with self.model.grad_sync(last_microbatch=number == len(pieces) - 1):
                with self._autocast():
                    total = objective.token_nll(self.model, batch, generator).sum()
                torch.autograd.backward(total if count else 0 * total)
            if count:
                nats += float(total.detach())
                counted += float(batch.loss_mask.sum())
        return nats, counted

    def _autocast(self) -> torch.autocast:
        """Products of bfloat16 numbers, if the run has them: those of the network, and Muon's."""
        return torch.autocast(self.distributed.device.type, torch.bfloat16, enabled=self.state.bf16)

    @torch.no_grad()
    def _lowest_variance_times(self, curriculum: AnyCurriculum) -> tuple[float, float]:
        """The part of the times at which the losses of all ranks vary least, on batches yet to come."""
        assert isinstance(curriculum, VarianceClipping)
        moments = torch.zeros(3, TIME_BINS, dtype=torch.float64)
        step, settings = self.state.step, self.config
        self.denoiser.eval()
        for later in range(step, step + curriculum.batches):
            for first, count in self.distributed.microbatches(settings.batch_size, settings.microbatch_size):
                batch = self.loader.batch(later, min(first, settings.batch_size - 1), max(1, count))
                generator = torch.Generator().manual_seed(_derive_seed(settings.seed, later, 2))
                found = loss_moments(self.objective, self.model, batch.to(self.distributed.device), generator)
                moments += found.cpu() if count else 0
        self.denoiser.train()
        times = curriculum.choose_times(self.distributed.all_reduce(moments))
        return times.low, times.high

    def _randomly_truncated(self, batch: Batch, step: int) -> Batch:
        random = np.random.default_rng([self.config.seed, step])
        if random.random() >= self.config.random_length_prob:
            return batch
        return batch.truncated(int(random.integers(1, batch.tokens.shape[1] + 1)))

    def save_checkpoint(self, folder: Path) -> None:
        """Write a checkpoint and delete what is no longer needed."""
        state = {**vars(self.state), "ema_updates": self.ema.num_updates}
        checkpoint.save(folder, self.state.step, self._state_dicts(), state, self.distributed)
        if self.distributed.is_main:
            checkpoint.delete_old(folder, self.config.keep_checkpoints, self.verified_checkpoints)

    def load_checkpoint(self, path: Path) -> None:
        """Go on from a checkpoint."""
        tensors = self._state_dicts()
        state = checkpoint.load(path, tensors, self.distributed)
        self.ema.num_updates = state.pop("ema_updates")
        self.state = TrainState(**state)
        set_state_dict(
            self.denoiser,
            self.optimizers,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=_STATE_DICT_OPTIONS,
        )

    def _state_dicts(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.denoiser, self.optimizers, options=_STATE_DICT_OPTIONS)
        return {"model": model, "optimizer": optimizer, "ema": self.ema.weights}


def train(
    trainer: Trainer,
    folder: Path,
    logger: TrainingLogger,
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> bool:
    """Train to the end, or until a signal asks to stop (then False), saving on the way.

    `evaluate` is called with the averaged weights in place.
    """
    settings, world, state = trainer.config, trainer.distributed, trainer.state
    pace = ThroughputMeter(world, trainer.state.bf16, state.tokens, state.flops)
    logger.info(f"matrix products run at {pace.peak_flops / 1e9:,.0f} GFLOP/s here")
    trainer.denoiser.train()
    with _catch_stop_signals(world) as asked, _explain_out_of_memory(trainer, folder):
        while state.step < settings.steps:
            with pace.time_step():
                figures = trainer.train_step()
            if state.consecutive_skips:
                logger.log_skipped_step(state.step, figures["loss"], figures["grad_norm"])
            if state.consecutive_skips >= settings.max_nonfinite_steps:
                raise DivergedError(
                    f"loss or gradient was not finite for {settings.max_nonfinite_steps} steps in a row, up to step"
                    f" {state.step}; lower the learning rate or look at the data of these steps"
                )
            last = state.step == settings.steps
            if last or state.step % settings.log_every == 0:
                logger.log_step(state.step, {**figures, **pace.metrics(state.tokens, state.flops)})
            if evaluate is not None and (last or state.step % settings.eval_every == 0):
                with trainer.ema.swapped_in(trainer.denoiser):
                    trainer.denoiser.eval()
                    logger.log_evaluation(state.step, evaluate())
                    trainer.denoiser.train()
            stop = world.any_rank(bool(asked))
            if last or stop or state.step % settings.save_every == 0:
                trainer.save_checkpoint(folder)
            if stop and not last:
                logger.info(f"saved at step {state.step}, stopping (give the same command again to go on)")
                return False
    return True


@contextmanager
def _catch_stop_signals(distributed: Distributed) -> Iterator[list[int]]:
    """SIGTERM and SIGINT are noted, so that the step can be finished and saved; a second one is obeyed.

    But not by one of many ranks: where every process is signalled, torchrun hands on to a rank what it has
    had already, and it kills the ranks that do not leave in time.
    """
    asked: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, _frame: Any) -> None:
        asked.append(number)
        if distributed.world_size == 1:
            signal.signal(number, previous[number])

    try:
        for wanted in (signal.SIGTERM, signal.SIGINT):
            previous[wanted] = signal.signal(wanted, note)
    except ValueError:  # not in the main thread, where signals do not arrive
        pass
    try:
        yield asked
    finally:
        if distributed.world_size == 1 or not asked:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextmanager
def _explain_out_of_memory(trainer: Trainer, folder: Path) -> Iterator[None]:
    """Memory that runs out gives one sentence: what to change, and where the run will go on."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        newest, _ = checkpoint.latest(folder)
        pieces = trainer.distributed.microbatches(trainer.config.batch_size, trainer.config.microbatch_size)
        raise OutOfMemoryError(
            f"memory ran out after step {trainer.state.step}: {oom_advice(max(rows for _, rows in pieces))};"
            f" {'there is no checkpoint yet' if newest is None else f'the checkpoint {newest} is whole'}"
        ) from error


def _derive_seed(*path: int) -> int:
    return int(np.random.SeedSequence(path).generate_state(1)[0])
