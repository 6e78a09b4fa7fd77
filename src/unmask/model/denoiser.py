"""A backbone read through its objective."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unmask.backbones import BackboneConfig
from unmask.backbones.base import Backbone
from unmask.context import AttentionStages, Cache, Context
from unmask.diffusion.categorical import DAMAGED
from unmask.diffusion.process import Process
from unmask.objectives import Objective
from unmask.ops.chunked_head import LogProbRowFn, chunked_head, log_probs_inplace
from unmask.ops.linear import Linear, prepack
from unmask.types import NonFiniteError, Positions, RowFn, Times, Tokens, Vocab

_MAX_PREPACK_BYTES = 1 << 30
"""Bytes of matrices up to which memory is spent on a second copy."""


@dataclass(frozen=True)
class ModelConfig:
    """All that a folder must say to rebuild a denoiser.

    `condition_on_sigma`: the network is told -log alpha(t) instead of t, as published weights expect.
    """

    vocab: Vocab
    backbone: BackboneConfig
    objective: Objective
    condition_on_sigma: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.objective, Objective):
            raise ValueError(f"the objective must be an Objective, as in unmask.MDLM(); got {self.objective!r}")
        if not isinstance(self.backbone, BackboneConfig):
            raise ValueError(f"the backbone must be a BackboneConfig, as in unmask.DiTConfig(); got {self.backbone!r}")

    def build(self) -> Denoiser:
        """A denoiser with fresh weights."""
        return Denoiser(self)


class Denoiser(nn.Module):
    """log_x = objective.read(head(encode(z, t)[rows])): the library's side of the seam `Denoise`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.use_bf16 = False
        self.backbone: Backbone = config.backbone.build(config.vocab)
        if self.backbone.causal != self.process.is_left_to_right:
            raise ValueError(
                "an autoregressive objective needs a causal backbone, and masked or uniform diffusion one"
                f" that is not; got causal={self.backbone.causal} with {type(config.objective).__name__}"
            )

    @property
    def vocab(self) -> Vocab:
        """Which ids there are and which one is the mask."""
        return self.config.vocab

    @property
    def objective(self) -> Objective:
        """What the model is trained with."""
        return self.config.objective

    @property
    def process(self) -> Process:
        """How text is destroyed."""
        return self.config.objective.process

    @property
    def normalized(self) -> bool:
        """Whether every line of log_x sums to one."""
        return self.config.objective.normalized

    @property
    def time_independent(self) -> bool:
        """Whether the answer depends on z alone."""
        return not self.backbone.time_conditioned and not self.config.objective.depends_on_alpha

    @property
    def max_length(self) -> int | None:
        """The longest sequence the network takes."""
        return self.backbone.max_length

    @property
    def shift_logits(self) -> bool:
        """Whether a token is predicted where the one before it is read."""
        return self.backbone.shift_logits

    def forward(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        """log_x [N, V], or what `each` says of its lines, at the rows of z [B, L], times t [B, 1 or L]."""
        self._validate_inputs(z, t, positions, context.stages)
        with torch.autocast(z.device.type, torch.bfloat16) if self.use_bf16 else nullcontext():
            hidden = self._encode(z, self._time_input(t), positions, context)
        alpha = self._alpha(z, t, positions)
        if row_fn is None:
            said = log_probs_inplace(self.objective, self.backbone.compute_logits(hidden), alpha, self.vocab)
        else:
            head, reading = self.backbone.lm_head, LogProbRowFn(self.objective, alpha, self.vocab, row_fn)
            said = chunked_head(hidden, head.weight, head.bias, reading)
        # In training the loop looks at the loss itself, and skips the step.
        if not self.training and bool(self._damaged(said, row_fn).any()):
            raise NonFiniteError(DAMAGED)
        return said

    def new_cache(self) -> Cache:
        """An empty cache of the network's kind."""
        return self.backbone.new_cache()

    def _encode(self, z: Tokens, time_input: Tensor, positions: Positions, context: Context) -> Tensor:
        """Sequences that are all the same, as they are before anything is written, are read once."""
        alike = len(z) > 1 and not self.training and not torch.is_grad_enabled()
        alike = alike and context.is_empty and bool((z == z[:1]).all())
        if not alike or (self.backbone.time_conditioned and not bool((time_input == time_input[:1]).all())):
            return self.backbone.encode(z, time_input, positions, context)
        place = positions.nonzero()[:, 1] if isinstance(positions, Tensor) else positions[1]
        return self.backbone.encode(z[:1], time_input[:1], (torch.zeros_like(place), place))

    def _damaged(self, values: Tensor, row_fn: RowFn | None) -> Tensor:
        """Whether values are NaN, or tokens that could not be drawn (-1).

        One column is enough where log_x is a softmax, which is NaN as a whole.
        """
        if not values.is_floating_point():
            return values < 0
        return (values[:, 0] if row_fn is None and self.objective.is_softmax else values).isnan()

    def to_bf16(self) -> None:
        """From now on compute hidden states with products of bfloat16 numbers, the logits as before.

        The matrices are rounded once and for all: half the memory, and on machines with such instructions
        about half the time. Sums between layers, norms, the head and the choice of tokens stay in float32.
        """
        if any(".parametrizations." in name for name, _ in self.named_parameters()):
            raise ValueError("this network has low-rank differences that are not merged yet")
        self.use_bf16 = True
        for module in self.backbone.modules():
            if isinstance(module, nn.Linear) and module is not self.backbone.lm_head:
                module.weight.data = module.weight.data.bfloat16()

    def prepack(self) -> None:
        """From now on, keep the matrices a second time, in the order in which products read them fastest.

        Nothing else changes. A network of more than _MAX_PREPACK_BYTES bytes stays as it is, and so do devices whose
        products do not gain.
        """
        layers = [module for module in self.backbone.modules() if isinstance(module, Linear)]
        weights = {layer.weight for layer in (*layers, self.backbone.lm_head)}
        if sum(weight.nbytes for weight in weights) <= _MAX_PREPACK_BYTES:
            for weight in weights:
                prepack(weight)

    def _time_input(self, t: Times) -> Tensor:
        return self.process.sigma(t) if self.config.condition_on_sigma else t

    def _alpha(self, z: Tokens, t: Times, positions: Positions) -> Tensor:
        """alpha(t) [N, 1] at masked rows; a visible row is read as the decoder of z_0 reads it: 0."""
        alpha = self.process.alpha(t).expand(z.shape)[positions]
        return torch.where(z[positions] == self.vocab.mask_id, alpha, 0)[:, None]

    def _validate_inputs(self, z: Tokens, t: Times, positions: Positions, stages: AttentionStages | None) -> None:
        if z.ndim != 2:
            raise ValueError(f"tokens must be [B, L]; got shape {list(z.shape)}")
        if isinstance(positions, Tensor) and (positions.shape != z.shape or positions.dtype != torch.bool):
            raise ValueError(
                f"rows must be booleans of the tokens' shape {list(z.shape)};"
                f" got {positions.dtype} {list(positions.shape)}"
            )
        self.vocab.validate(z)
        # A token that is read twice, hidden and clean, is one of the text.
        length = z.shape[1] if stages is None else stages.num_positions
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's {self.max_length}")
        if t.ndim != 2 or t.shape[0] != len(z) or t.shape[1] not in (1, z.shape[1]):
            raise ValueError(f"t must be [B, 1] or [B, L] for tokens {list(z.shape)}; got shape {list(t.shape)}")
        if not bool(((t >= 0) & (t <= 1)).all()):
            worst = float(t.flatten()[((t - 0.5).abs().nan_to_num(torch.inf)).argmax()])
            raise ValueError(f"times must be in [0, 1], 0 for data and 1 for all mask; got {worst}")
