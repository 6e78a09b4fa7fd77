"""The network of Plaid around a backbone, and what training does with it between steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from unmask.baselines._denoiser import ContinuousDenoiser, freeze_embedding
from unmask.baselines._gaussian import GaussianState, NoiseSchedule, UnitEmbedding, matmul_detached
from unmask.context import Context
from unmask.model.denoiser import ModelConfig
from unmask.training.hooks import Hook
from unmask.types import Positions, Queries, RowFn, Times

EVAL_SHARE = 1 / 8
"""The share of rows that pay the reconstruction in evaluation, and in the first step of training."""
_MOMENT_DECAY = 0.997
"""Decay of the running moments by which training divides its batches."""
_NUM_WAVES = 32
"""Frequencies of the features of gamma."""


class PlaidDenoiser(ContinuousDenoiser):
    """log_x of noisy embeddings z, with an earlier estimate x' of the clean ones:

        h      = A z/sqrt(alpha^2/e + sigma^2) + B sqrt(e) x' + C [sin, cos](gamma f)
        logits = head(backbone(h)) + c (alpha/sigma^2) <z, E_v>

    The second part of the logits, the output prior, is the exact posterior of a token on its own.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.plaid = plaid = cast("Any", config.objective)
        width = self.embedding_width
        self.embedding_dim: int = plaid.embedding_dim
        freeze_embedding(self.backbone)
        self.embedding = UnitEmbedding(config.vocab.size, plaid.embedding_dim)
        self.schedule = NoiseSchedule(plaid.schedule_width, plaid.gamma_0, plaid.gamma_1)
        self.input_layer = nn.Linear(plaid.embedding_dim, width, bias=False)
        self.estimate_layer = nn.Linear(plaid.embedding_dim, width, bias=False)
        self.noise_layer = nn.Linear(2 * _NUM_WAVES, width, bias=False)
        nn.init.normal_(self.input_layer.weight, std=plaid.embedding_dim**-0.5)
        nn.init.zeros_(self.estimate_layer.weight)
        nn.init.zeros_(self.noise_layer.weight)
        self.prior_scale = 1.0
        """c; training raises it from 0."""
        self.reconstruction_share = EVAL_SHARE
        """The share of training rows that pay the reconstruction."""

    def forward(
        self,
        z: Any,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        """log_x [N, V] at the queried positions of a `GaussianState`, or `row_fn` of its rows."""
        if self.max_length is not None and z.shape[1] > self.max_length:
            raise ValueError(f"a sequence of {z.shape[1]} tokens is longer than the model's {self.max_length}")
        self.backbone.require(context)
        queries, order = Queries.resolve(positions, z.shape)
        with torch.autocast(t.device.type, torch.bfloat16) if self.use_bf16 else nullcontext():
            hidden = self.backbone.encode(self._embed(z), t, queries, context)
        with torch.autocast(t.device.type, enabled=False):
            logits = self._logits(hidden, z, queries)
            if order is not None:
                logits = logits[order]
            log_x = self.objective.log_probs(logits, torch.zeros_like(logits[:, :1]), self.vocab)
        rows = log_x if row_fn is None else row_fn(log_x, slice(0, len(log_x)))
        if not self.training:
            self._check_finite(self._damaged(rows, row_fn))
        return rows

    def _embed(self, state: GaussianState) -> Float[Tensor, "B L width"]:
        weight, noise, dim = self.input_layer.weight, state.noise, self.embedding_dim
        scale = (noise.alpha.square() / dim + noise.sigma.square()).rsqrt()[..., None]
        waves = noise.gamma * torch.linspace(-5, 5, _NUM_WAVES, dtype=torch.float64, device=weight.device).exp()
        features = torch.cat([waves.sin(), waves.cos()], -1)
        h: Tensor = self.input_layer((state.z * scale).to(weight))
        h = h + self.estimate_layer((math.sqrt(dim) * state.estimate).to(weight))
        h = h + self.noise_layer(features.to(weight))[:, None]
        return h

    def _logits(self, hidden: Float[Tensor, "N width"], state: GaussianState, queries: Queries) -> Float[Tensor, "N V"]:
        weight = self.backbone.lm_head.weight
        logits = self.backbone.compute_logits(hidden.to(weight) * (self.plaid.readout_width / hidden.shape[-1]))
        noise = state.noise
        evidence = (self.prior_scale * noise.alpha / noise.sigma.square())[..., None] * state.z
        embeddings = self.embedding().to(weight)
        rows = None if state.detached is None else state.detached[queries[0]]
        return logits + matmul_detached(evidence[tuple(queries)].to(weight), embeddings.T, rows)

    def estimate(self, log_x: Float[Tensor, "N V"], state: GaussianState) -> Float64[Tensor, "B L e"]:
        """x_hat = sum over v of x_theta(v) E_v at all positions, from log_x [B L, V]."""
        with torch.autocast(log_x.device.type, enabled=False):
            p = log_x.exp()
            rows = None if state.detached is None else state.detached[:, None].expand(state.shape).flatten()
            return matmul_detached(p, self.embedding().to(p), rows).view(*state.shape, -1).double()

    def lr_scales(self) -> dict[str, float]:
        names = (name for name, _ in self.named_parameters() if name.startswith(("embedding.", "schedule.")))
        return dict.fromkeys(names, self.plaid.noise_lr_scale)

    def training_hooks(self) -> list[Hook]:
        return [_PlaidHook(self, self.plaid.prior_warmup)]

    def require_whole(self) -> None:
        """Refuse sharded weights."""
        if hasattr(self.embedding.matrix, "full_tensor"):
            raise ValueError(
                "Plaid's embeddings and schedule are read outside of its network, which shards do not allow:"
                " set training.parallelism=DDP"
            )


class _PlaidHook(Hook):
    """Fades the output prior in, and divides the next batch by the running deviations of the bound's two terms."""

    def __init__(self, model: PlaidDenoiser, warmup: float) -> None:
        self.model, self.warmup = model, warmup
        self.moments: dict[str, float] = {}

    def before_step(self, trainer: Any) -> None:
        self.model.prior_scale = 1.0 if self.warmup == 0 else min(1.0, trainer.progress / self.warmup)
        self.model.reconstruction_share = self._share()

    def after_step(self, trainer: Any, metrics: dict[str, float]) -> None:
        for name in ("reconstruction", "diffusion"):
            for key in (name, f"{name}_squared"):
                value = metrics[key]
                if math.isfinite(value):
                    self.moments[key] = _MOMENT_DECAY * self.moments.get(key, value) + (1 - _MOMENT_DECAY) * value
            del metrics[f"{name}_squared"]

    def _share(self) -> float:
        if not self.moments:
            return EVAL_SHARE
        deviations = [
            max(0.0, self.moments[f"{name}_squared"] - self.moments[name] ** 2) ** 0.5
            for name in ("reconstruction", "diffusion")
        ]
        return deviations[0] / sum(deviations) if sum(deviations) > 0 else EVAL_SHARE

    def state_dict(self) -> dict[str, Any]:
        return dict(self.moments)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moments = dict(state)
