"""A model in training: batch -> loss -> gradients -> optimizer step, resumable bit for bit.

The trainer takes any model, any loss (`LossFn`) and any batches (`BatchSource`). Nothing random is stored: batch,
noise and dropout are functions of (seed, step), so a run that was killed goes on from its last checkpoint as
an uninterrupted one would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from unmask.distributed import Distributed
from unmask.hardware.flops import count_flops
from unmask.training._batches import BatchSource, Prefetcher
from unmask.training._checkpoint import CheckpointStore
from unmask.training._compile import compile_blocks
from unmask.training._parallelism import ParallelModel
from unmask.training.config import TrainingConfig
from unmask.training.ema import EMA
from unmask.training.hooks import Hook
from unmask.training.loss import LossFn
from unmask.training.optim import LRScheduler

_STATE_DICT_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Checkpoints hold what is trained: a frozen network is what the run began with."""


@dataclass
class TrainState:
    """The numbers of a run beside its tensors."""

    step: int = 0
    """Steps done, skipped ones included."""
    tokens: int = 0
    """What the losses were summed over so far: tokens, or examples."""
    skipped_steps: int = 0
    """Steps whose loss or gradient was not finite."""
    consecutive_skips: int = 0
    """The last steps in a row that were skipped."""
    bf16: bool | None = None
    """Mixed precision, set or measured when the run began; None: not yet decided, float32 until then."""
    flops: float = 0.0
    """FLOPs of all matrix products on all ranks. They are counted in steps 1, 2, 4, 8, ... and estimated between."""
    flops_per_token: float = 0.0
    """FLOPs of forward and backward passes per token, in the last counted step."""
    flops_per_update: float = 0.0
    """FLOPs of an optimizer step (Muon multiplies matrices), in the last counted step."""
    ended_early: bool = False
    """Whether a hook has decided, on all ranks, that the run is at its end."""


class Trainer:
    """A model in training, with everything that a checkpoint holds."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batches: BatchSource,
        config: TrainingConfig,
        hooks: Sequence[Hook] = (),
        *,
        distributed: Distributed = Distributed(),  # noqa: B008
    ) -> None:
        self.loss_fn, self.batches, self.config, self.hooks = loss_fn, batches, config, tuple(hooks)
        self.distributed, self.device = distributed, distributed.device
        self.model: Any = model.to(self.device)
        if config.gradient_checkpointing:
            _backbone(self.model).gradient_checkpointing = True
        if config.compile:
            compile_blocks(self.model)
        self.parallel_model = ParallelModel(self.model, config.parallelism.wrap(self.model, distributed))
        self.ema = EMA(self.model, config.ema_decay)  # of sharded weights, if they now are
        self.optimizers: list[Optimizer] = config.optimizer.build(self.model)
        self.lr_scheduler = LRScheduler(self.optimizers, config.lr_schedule, config.warmup_steps, config.steps)
        self.microbatch_splits = distributed.microbatches(config.batch_size, config.microbatch_size)
        self.prefetcher = Prefetcher(batches, config.batch_size, self.microbatch_splits, config.steps, self.device)
        self.state = TrainState(bf16=config.bf16)
        self.stop_requested = False
        """Set it to stop after a step: all ranks learn of it in the step (`should_stop`)."""
        self.should_stop = False
        """Whether any rank was asked to stop before its last step."""

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        return self.state.step / self.config.steps

    def generator(self, *path: int) -> torch.Generator:
        """A generator seeded by the run's seed and `path`, the same on every rank."""
        return torch.Generator().manual_seed(_derive_seed(self.config.seed, *path))

    def step(self) -> dict[str, float]:
        """Take one optimizer step, or skip it if the loss or the gradient is not finite; what there is to log."""
        for hook in self.hooks:
            hook.before_step(self)
        lr_factor = self.lr_scheduler.set(self.state.step)
        # By the number of the step in the run, not in the process: a resumed run counts the same steps.
        counts_flops = self.state.step & (self.state.step + 1) == 0
        with count_flops(counts_flops) as in_gradients:
            sums, names = self._forward_backward()
        total, count, flops, norm, *sums_by_name = self._reduce_and_read(sums, in_gradients.flops)
        loss = total / max(1.0, count)
        # DDP and FSDP average gradients over ranks; with this factor they are those of the global mean.
        scale = self.distributed.world_size / max(1.0, count)
        grad_norm = scale * norm
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        with count_flops(counts_flops and is_finite) as in_update:
            if is_finite:
                self._update(scale * min(1.0, self.config.max_grad_norm / (grad_norm + 1e-6)))
        if counts_flops and is_finite:
            self.state.flops_per_token = flops / max(1.0, count)
            (self.state.flops_per_update,) = self.distributed.all_reduce_scalars(in_update.flops)
        self._record_step(count, is_finite)
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr_factor": lr_factor,
            "skipped_steps": self.state.skipped_steps,
            "tokens": self.state.tokens,
            **{name: value / max(1.0, count) for name, value in zip(names, sums_by_name, strict=True)},
        }
        for hook in self.hooks:
            hook.after_step(self, metrics)
        return metrics

    def _forward_backward(self) -> tuple[Tensor, list[str]]:
        """Leave the gradients of this rank's rows; [total, count, *metrics] of their losses, and the metrics' names."""
        step, rank = self.state.step, self.distributed.rank
        torch.manual_seed(_derive_seed(self.config.seed, step, rank, 1))  # dropout, and nothing else
        sums: Tensor | None = None
        names: list[str] = []
        last = len(self.microbatch_splits) - 1
        for number, micro in enumerate(self.prefetcher.microbatches(step)):
            with self.parallel_model.grad_sync(enabled=number == last):
                with self._autocast():
                    loss = self.loss_fn(self.parallel_model, micro.batch, self.generator(step))
                torch.autograd.backward(loss.total if micro.counts else 0 * loss.total)
            stacked, names = loss.stack(self.device), list(loss.metrics)
            stacked = stacked if micro.counts else torch.zeros_like(stacked)
            sums = stacked if sums is None else sums + stacked
        assert sums is not None
        return sums, names

    def _reduce_and_read(self, sums: Tensor, flops: float) -> list[float]:
        """[total, count, flops, gradient norm, *metrics] over all ranks: the only read of the device in a step."""
        on_host = torch.tensor([flops, float(self.stop_requested)], dtype=torch.float64).to(self.device)
        summed = self.distributed.all_reduce(torch.cat([sums, on_host]))
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # that of a sharded model
        total, count, *metrics, flops, stop, norm = torch.cat([summed, norm.to(summed).reshape(1)]).tolist()
        self.should_stop = stop > 0
        return [total, count, flops, norm, *metrics]

    def _update(self, grad_scale: float) -> None:
        torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], grad_scale)
        with self._autocast():
            for optimizer in self.optimizers:
                optimizer.step()
        self.ema.update(self.model)

    def _record_step(self, count: float, is_finite: bool) -> None:
        state = self.state
        state.step += 1
        state.tokens += int(count)
        state.skipped_steps += not is_finite
        state.consecutive_skips = 0 if is_finite else state.consecutive_skips + 1
        state.flops += state.flops_per_token * count + state.flops_per_update * is_finite
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> torch.autocast:
        """Matrix products in bfloat16, if the run has mixed precision: those of the network, and Muon's."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bool(self.state.bf16))

    def save_checkpoint(self, checkpoints: CheckpointStore) -> None:
        """Write a checkpoint and delete those that are no longer needed."""
        state = {
            **asdict(self.state),
            "ema_updates": self.ema.num_updates,
            "hooks": [hook.state_dict() for hook in self.hooks],
        }
        checkpoints.save(self.state.step, self._state_dicts(), state)
        checkpoints.delete_old(self.config.keep_checkpoints)

    def load_checkpoint(self, checkpoints: CheckpointStore, step: int) -> None:
        """Go on from the checkpoint of a step."""
        tensors = self._state_dicts()
        state = checkpoints.load(step, tensors)
        self.ema.num_updates = state.pop("ema_updates")
        for hook, hook_state in zip(self.hooks, state.pop("hooks"), strict=True):
            hook.load_state_dict(hook_state)
        self.state = TrainState(**state)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=tensors["model"],
            optim_state_dict=tensors["optimizer"],
            options=_STATE_DICT_OPTIONS,
        )

    def _state_dicts(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizers, options=_STATE_DICT_OPTIONS)
        of_hooks = {str(number): tensors for number, hook in enumerate(self.hooks) if (tensors := hook.tensors())}
        return {
            "model": model,
            "optimizer": optimizer,
            "ema": self.ema.weights,
            **({"hooks": of_hooks} if of_hooks else {}),
        }


def _backbone(model: Any) -> Any:
    if not hasattr(model, "backbone"):
        raise ValueError(f"gradient_checkpointing needs a model with a backbone; {type(model).__name__} has none")
    return model.backbone


def _derive_seed(*path: int) -> int:
    return int(np.random.SeedSequence(path).generate_state(1)[0])
