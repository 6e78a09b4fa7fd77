"""A backbone read through its objective."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from unmask.backbones import AnyBackbone
from unmask.backbones.base import Backbone
from unmask.backbones.head import in_parts
from unmask.backbones.masks import Order
from unmask.backbones.products import pack
from unmask.diffusion.process import LeftToRight, Process
from unmask.objectives import AnyObjective
from unmask.objectives.reading import Reading, log_x
from unmask.types import DamagedError, Each, Rows, Times, Tokens, Vocab

PACKED = 1 << 30
"""Bytes of matrices up to which memory is spent on a second copy."""


@dataclass(frozen=True)
class ModelConfig:
    """All that a folder must say to rebuild a denoiser.

    `tells_sigma`: the network is told -log alpha(t) instead of t, as published weights expect.
    """

    vocab: Vocab
    backbone: AnyBackbone
    objective: AnyObjective
    tells_sigma: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.objective, get_args(AnyObjective)):
            raise ValueError(
                f"the objective must be one of unmask's, as in unmask.MDLM(); got {self.objective!r}"
            )

    def build(self) -> Denoiser:
        """A denoiser with fresh weights."""
        return Denoiser(self)


class Denoiser(nn.Module):
    """log_x = objective.read(head(encode(z, t)[rows])): the library's side of the seam `Denoise`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.in_bf16 = False
        self.backbone: Backbone = config.backbone.build(config.vocab)
        if self.backbone.causal != isinstance(self.process, LeftToRight):
            raise ValueError(
                "an autoregressive objective needs a causal backbone, and masked or uniform diffusion one"
                f" that is not; got causal={self.backbone.causal} with {type(config.objective).__name__}"
            )

    @property
    def vocab(self) -> Vocab:
        """Which ids there are and which one is the mask."""
        return self.config.vocab

    @property
    def objective(self) -> AnyObjective:
        """What the model is trained with."""
        return self.config.objective

    @property
    def process(self) -> Process:
        """How text is destroyed."""
        return self.config.objective.process

    @property
    def normalised(self) -> bool:
        """Whether every line of log_x sums to one."""
        return self.config.objective.normalised

    @property
    def timeless(self) -> bool:
        """Whether the answer depends on z alone."""
        return not self.backbone.timed and not self.config.objective.reads_alpha

    @property
    def max_length(self) -> int | None:
        """The longest sequence the network takes."""
        return self.backbone.max_length

    @property
    def shifted(self) -> bool:
        """Whether a token is predicted where the one before it is read."""
        return self.backbone.shifted

    def forward(
        self,
        z: Tokens,
        t: Times,
        rows: Rows,
        *,
        each: Each | None = None,
        which: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        """log_x [N, V], or what `each` says of its lines, at the rows of z [B, L], times t [B, 1 or L]."""
        self._check(z, t, rows, context.get("order"))
        with torch.autocast(z.device.type, torch.bfloat16) if self.in_bf16 else nullcontext():
            hidden = self._encoded(z, self._told(t), rows, **context)
        alpha = self._visible_share(z, t, rows)
        if each is None:
            said = log_x(self.objective, self.backbone.head(hidden), alpha, self.vocab)
        else:
            head, reading = self.backbone.output, Reading(self.objective, alpha, self.vocab, each)
            said = in_parts(hidden, head.weight, head.bias, reading)
        # In training the loop looks at the loss itself, and skips the step.
        if not self.training and bool(self._probe(said, each).isnan().any()):
            raise DamagedError("the network's log-probabilities are NaN; its weights are damaged")
        return said

    def _encoded(self, z: Tokens, told: Tensor, rows: Rows, **context: Any) -> Tensor:
        """Sequences that are all the same, as they are before anything is written, are read once."""
        alike = len(z) > 1 and not self.training and not torch.is_grad_enabled()
        alike = alike and all(each is None for each in context.values()) and bool((z == z[:1]).all())
        if not alike or (self.backbone.timed and not bool((told == told[:1]).all())):
            return self.backbone.encode(z, told, rows, **context)
        place = rows.nonzero()[:, 1] if isinstance(rows, Tensor) else rows[1]
        return self.backbone.encode(z[:1], told[:1], (torch.zeros_like(place), place))

    def _probe(self, said: Tensor, each: Each | None) -> Tensor:
        """Numbers that are NaN if any is; one of a line is enough where lines are normalised all at once."""
        return said[:, 0] if each is None and self.objective.softmax else said

    def to_bf16(self) -> None:
        """From now on compute hidden states with products of bfloat16 numbers, the logits as before.

        The matrices are rounded once and for all: half the memory, and on machines with such instructions
        about half the time. Sums between layers, norms, the head and the choice of tokens stay in float32.
        """
        if any(".parametrizations." in name for name, _ in self.named_parameters()):
            raise ValueError("this network has low-rank differences that are not merged yet")
        self.in_bf16 = True
        for module in self.backbone.modules():
            if isinstance(module, nn.Linear) and module is not self.backbone.output:
                module.weight.data = module.weight.data.bfloat16()

    def pack(self) -> None:
        """From now on, keep the matrices a second time, in the order in which products read them fastest.

        Nothing else changes. A network of more than PACKED bytes stays as it is, and so do devices whose
        products do not gain.
        """
        weights = list(self.backbone.matrices())
        if sum(weight.nbytes for weight in weights) <= PACKED:
            for weight in weights:
                pack(weight)

    def _told(self, t: Times) -> Tensor:
        process = self.process
        if self.config.tells_sigma and not isinstance(process, LeftToRight):
            return process.schedule.sigma(t)
        return t

    def _visible_share(self, z: Tokens, t: Times, rows: Rows) -> Tensor:
        """alpha(t) [N, 1] at masked rows; a visible row is read as the decoder of z_0 reads it: 0."""
        process = self.process
        if isinstance(process, LeftToRight):
            return torch.zeros_like(z[rows], dtype=torch.float32)[:, None]
        alpha = process.schedule.alpha(t).expand(z.shape)[rows]
        return torch.where(z[rows] == self.vocab.mask, alpha, 0)[:, None]

    def _check(self, z: Tokens, t: Times, rows: Rows, order: Order | None) -> None:
        if z.ndim != 2:
            raise ValueError(f"tokens must be [B, L]; got shape {list(z.shape)}")
        if isinstance(rows, Tensor) and (rows.shape != z.shape or rows.dtype != torch.bool):
            raise ValueError(
                f"rows must be booleans of the tokens' shape {list(z.shape)};"
                f" got {rows.dtype} {list(rows.shape)}"
            )
        self.vocab.check(z)
        # A token that is read twice, hidden and clean, is one of the text.
        length = z.shape[1] if order is None else order.places
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's {self.max_length}")
        if t.ndim != 2 or t.shape[0] != len(z) or t.shape[1] not in (1, z.shape[1]):
            raise ValueError(
                f"t must be [B, 1] or [B, L] for tokens {list(z.shape)}; got shape {list(t.shape)}"
            )
        if not bool(((t >= 0) & (t <= 1)).all()):
            worst = float(t.flatten()[((t - 0.5).abs().nan_to_num(torch.inf)).argmax()])
            raise ValueError(f"times must be in [0, 1], 0 for data and 1 for all mask; got {worst}")
