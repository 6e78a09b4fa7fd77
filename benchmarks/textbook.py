"""The yardstick: masked diffusion as the paper's own code does it.

The published code runs its blocks and its head under bfloat16 autocast, and goes on in whatever comes out of
that; `bf16` does the same here. Without it everything is float32, which is faster on machines without such
instructions; benchmarks take the faster of the two (`measure.fast_pair`).

Everything is computed everywhere: a network modulated by a time embedding that is a constant, logits of all
positions over the whole vocabulary, SUBS by writing into them, Gumbel noise for every token of every position
at every step, and a cache that helps only if no row of the batch changed. The losses are those of `unmask`
(tests/benchmarks/test_mdlm_reference.py), so that nothing but speed differs.

Parameters have the published names: weights go to `unmask` and back through the published layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COND_DIM = 128
EPS = 1e-3
"""The log-linear schedule's: alpha(t) = 1 - (1 - EPS) t."""


@dataclass(frozen=True)
class ModelSize:
    """A network and its vocabulary; the mask is the last of `vocab` ids."""

    vocab: int
    depth: int
    width: int
    length: int
    heads: int = 8

    def to_json(self) -> dict[str, Any]:
        """The published config.json."""
        return {
            "model_type": "mdlm",
            "vocab_size": self.vocab,
            "model_length": self.length,
            "hidden_dim": self.width,
            "cond_dim": COND_DIM,
            "n_blocks": self.depth,
            "n_heads": self.heads,
            "dropout": 0.0,
            "time_conditioning": False,
        }


class TimestepEmbedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, COND_DIM), nn.SiLU(), nn.Linear(COND_DIM, COND_DIM))

    def forward(self, sigma: Tensor) -> Tensor:
        frequency = torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        angle = sigma[:, None] * frequency
        out: Tensor = self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1))
        return out


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape) * self.weight


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """Blocks start as the identity and predictions as uniform: gates and head are zero."""
    linear = nn.Linear(inputs, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class DDiTBlock(nn.Module):
    def __init__(self, size: ModelSize, dropout: float) -> None:
        super().__init__()
        width = size.width
        self.heads, self.dropout = size.heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.adaLN_modulation = zero_linear(COND_DIM, 6 * width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition)[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.attn_qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.dropout(self.attn_out(mixed))
        out: Tensor = x + gate2 * self.dropout(self.mlp(self.norm2(x) * (1 + scale2) + shift2))
        return out


class DDiTFinalLayer(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.norm_final = LayerNorm(size.width)
        self.linear = zero_linear(size.width, size.vocab)
        self.adaLN_modulation = zero_linear(COND_DIM, 2 * size.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, -1)
        out: Tensor = self.linear(self.norm_final(x) * (1 + scale) + shift)
        return out


class EmbeddingLayer(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(size.vocab, size.width))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, z: Tensor) -> Tensor:
        return self.embedding[z]


class ReferenceMDLM(nn.Module):
    """log_x [B, L, V] of everything."""

    def __init__(self, size: ModelSize, dropout: float = 0.0, bf16: bool = False) -> None:
        super().__init__()
        self.size, self.mask_id, self.bf16 = size, size.vocab - 1, bf16
        self.vocab_embed = EmbeddingLayer(size)
        self.sigma_map = TimestepEmbedder()
        self.blocks = nn.ModuleList(DDiTBlock(size, dropout) for _ in range(size.depth))
        self.output_layer = DDiTFinalLayer(size)

    def forward(self, z: Tensor) -> Tensor:
        sigma = torch.zeros(len(z))  # without time conditioning the network is told nothing, in every row
        condition = F.silu(self.sigma_map(sigma))
        head_width = self.size.width // self.size.heads
        frequency = 10_000 ** -(torch.arange(0, head_width, 2) / head_width)
        angle = (torch.arange(z.shape[1])[:, None] * frequency).repeat(1, 2)
        x = self.vocab_embed(z)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            for block in self.blocks:
                x = block(x, angle.cos(), angle.sin(), condition)
            logits = self.output_layer(x, condition)
        return self.subs(logits, z)

    def subs(self, logits: Tensor, z: Tensor) -> Tensor:
        """No mass on the mask, and visible tokens are copied."""
        logits[:, :, self.mask_id] = -1e6
        logits = logits - logits.logsumexp(-1, keepdim=True)
        visible = z != self.mask_id
        logits[visible] = -1e6
        logits[visible, z[visible]] = 0
        return logits

    def loss(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """The bound in nats per token from one draw: times t [B], a uniform number for each token."""
        sigma = -torch.log1p(-(1 - EPS) * t)
        rate = (1 - EPS) / (1 - (1 - EPS) * t)
        z = torch.where(noise < (1 - torch.exp(-sigma))[:, None], self.mask_id, x)
        log_p: Tensor = self(z).gather(-1, x[:, :, None])[:, :, 0]
        return (-log_p * (rate / torch.expm1(sigma))[:, None]).mean()


class ReferenceTrainer:
    """AdamW, clipping, and a moving average of the weights: the published step."""

    def __init__(self, model: ReferenceMDLM, lr: float = 3e-4, ema_decay: float = 0.9999) -> None:
        self.model, self.ema_decay = model, ema_decay
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
        self.ema_weights = [p.detach().clone() for p in model.parameters()]
        self.num_updates = 0

    def step(self, x: Tensor) -> float:
        """One update; the loss before it."""
        u = (torch.rand(()) + torch.arange(len(x)) / len(x)) % 1
        self.optimizer.zero_grad()
        loss = self.model.loss(x, 1e-3 + (1 - 1e-3) * u, torch.rand(x.shape))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.num_updates += 1
        decay = min(self.ema_decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            for average, parameter in zip(self.ema_weights, self.model.parameters(), strict=True):
                average.sub_((1 - decay) * (average - parameter))
        return float(loss.detach())


def sample_categorical(probs: Tensor) -> Tensor:
    """An index with probability in proportion to its weight, of every line."""
    noise = 1e-10 - (torch.rand_like(probs) + 1e-10).log()
    return (probs / noise).argmax(-1)


@torch.no_grad()
def ancestral_sample(model: ReferenceMDLM, z: Tensor, steps: int, max_steps: int | None = None) -> Tensor:
    """Ancestral sampling of all masks in z [B, L]; a call is saved if no row changed in the step before.

    `only` as many of the steps, to be timed: what is still hidden then stays so. Probabilities are float32,
    as autocast makes them on a GPU: in bfloat16 this draw would reveal next to nothing.
    """
    times = torch.linspace(1, 1e-5, steps + 1)
    weights: Tensor | None = None
    for t, s in islice(pairwise(times), max_steps):
        if weights is None:
            weights = model(z).float().exp()
        reveal = weights * (t - s)
        reveal[:, :, model.mask_id] = s
        drawn = sample_categorical(reveal)
        after = torch.where(z == model.mask_id, drawn, z)
        if not torch.equal(after, z):
            weights = None
        z = after
    return z if max_steps is not None else torch.where(z == model.mask_id, model(z).argmax(-1), z)


@torch.no_grad()
def semi_autoregressive_sample(
    model: ReferenceMDLM, batch_size: int, length: int, stride: int, steps: int, max_steps: int | None = None
) -> Tensor:
    """Semi-autoregressive text: fill a window, keep its end as the context of the next."""
    window = model.size.length
    z = torch.full((batch_size, length), model.mask_id)
    for first in range(0, length - window + 1, stride):
        z[:, first : first + window] = ancestral_sample(model, z[:, first : first + window].clone(), steps, max_steps)
    return z


@torch.no_grad()
def nll_estimates(model: ReferenceMDLM, windows: Tensor, draws: int, batch: int) -> Tensor:
    """Estimates [draws] of the nats per token of the windows [N, L], each with times of its own."""
    estimates = []
    for _ in range(draws):
        total = 0.0
        for rows in torch.split(windows, batch):
            u = (torch.rand(()) + torch.arange(len(rows)) / len(rows)) % 1
            t = 1e-3 + (1 - 1e-3) * u
            total += float(model.loss(rows, t, torch.rand(rows.shape))) * rows.numel()
        estimates.append(total / windows.numel())
    return torch.tensor(estimates)
