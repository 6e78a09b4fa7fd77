"""How a model is trained: every setting of a run but its data, network and loss."""

from __future__ import annotations

from dataclasses import dataclass

from unmask.training._parallelism import DDP, Parallelism
from unmask.training._trackers import AnyTracker
from unmask.training.curriculum import AnyCurriculum
from unmask.training.optim import AdamW, AnyLRSchedule, AnyOptimizer, ConstantLR

_AT_LEAST_ONE = (
    "steps",
    "batch_size",
    "max_nonfinite_steps",
    "log_every",
    "save_every",
    "eval_every",
    "keep_checkpoints",
)


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how to train. The defaults are those of the MDLM paper, except for the number of steps."""

    steps: int = 10_000
    """Optimizer steps. A run that has finished goes on when this is raised."""
    batch_size: int = 512
    """Rows of the global batch, over all ranks and micro-batches."""
    microbatch_size: int | None = None
    """The most rows that a rank processes at once; None: all of its rows. It saves memory and changes no result."""
    optimizer: AnyOptimizer = AdamW()
    """AdamW or Muon, with its learning rate."""
    warmup_steps: int = 2500
    """Steps in which the learning rate rises linearly to its peak."""
    lr_schedule: AnyLRSchedule = ConstantLR()
    """What the learning rate does after the warmup."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""
    ema_decay: float = 0.9999
    """Decay of the exponential moving average of the weights, which is what is evaluated and exported."""
    random_length_prob: float = 0.0
    """The share of steps whose rows are truncated to a random length."""
    curriculum: AnyCurriculum | None = None
    """Which diffusion times are trained when; None: those of the objective, from the first step to the last."""
    attention_annealing: float | None = None
    """The share of the run over which a causal pretrained backbone becomes bidirectional; None: it stays as it is."""
    seed: int = 0
    """Decides the initial weights, the order of the data, noise and dropout."""
    bf16: bool | None = None
    """Mixed precision in bfloat16; None: measured when training starts, and used where it is faster."""
    compile: bool = False
    """Compile the blocks of the network, which takes a minute or two at the start."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of blocks for the backward pass: a third more work, much less memory, the same gradients."""
    parallelism: Parallelism = DDP()
    """How several ranks share the model: DDP (replicas) or FSDP (shards)."""
    max_nonfinite_steps: int = 10
    """Steps in a row with a loss or gradient that is not finite after which the run stops."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    save_every: int = 1000
    """Steps between two checkpoints."""
    eval_every: int = 1000
    """Steps between two evaluations on the held-out text."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept, at least two."""
    trackers: tuple[AnyTracker, ...] = ()
    """Trackers that get the metrics beside `metrics.jsonl`: TensorBoard, WandB."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
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
