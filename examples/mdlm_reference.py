"""MDLM in one file of plain torch: network, loss, training step and ancestral sampler, as published.

    python examples/mdlm_reference.py

trains a tiny model on a nursery rhyme in a few seconds and prints samples. It follows arXiv 2406.07524 and its code,
and computes everything everywhere: logits of all positions over the whole vocabulary, a network modulated by a
time embedding that is constant, Gumbel noise for every token of every position at every step.

It is the reference for the library: `unmask.MDLM` has the same loss on the same noise
(tests/examples/test_mdlm_reference.py), and benchmarks/ measures how much faster the library is. Parameters have the
published names, so weights can be exchanged through the published format.
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
"""Width of the time embedding."""
EPS = 1e-3
"""The log-linear schedule: alpha(t) = 1 - (1 - EPS) t is the probability that a token is visible at time t."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a network; the mask is the last of `vocab` ids."""

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


# The network: a diffusion transformer (DiT).


class TimestepEmbedder(nn.Module):
    """128 cosines and sines of sigma, and a two-layer network."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, COND_DIM), nn.SiLU(), nn.Linear(COND_DIM, COND_DIM))

    def forward(self, sigma: Tensor) -> Tensor:
        """[B, COND_DIM] of sigma [B]."""
        frequency = torch.exp(-math.log(10_000) * torch.arange(128) / 128)
        angle = sigma[:, None] * frequency
        out: Tensor = self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1))
        return out


class LayerNorm(nn.Module):
    """Layer norm in float32, without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., width]."""
        return F.layer_norm(x.float(), self.weight.shape) * self.weight


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer of zeros: blocks start as the identity and predictions as uniform."""
    linear = nn.Linear(inputs, outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def rotate_half(x: Tensor) -> Tensor:
    """(a, b) becomes (-b, a), for rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class DDiTBlock(nn.Module):
    """Attention and an MLP, each with an adaLN shift, scale and gate."""

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
        """[B, L, width] of x [B, L, width]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition)[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.attn_qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.dropout(self.attn_out(attended))
        out: Tensor = x + gate2 * self.dropout(self.mlp(self.norm2(x) * (1 + scale2) + shift2))
        return out


class DDiTFinalLayer(nn.Module):
    """A norm with adaLN, and the output head."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.norm_final = LayerNorm(size.width)
        self.linear = zero_linear(size.width, size.vocab)
        self.adaLN_modulation = zero_linear(COND_DIM, 2 * size.width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Logits [B, L, V]."""
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, -1)
        out: Tensor = self.linear(self.norm_final(x) * (1 + scale) + shift)
        return out


class EmbeddingLayer(nn.Module):
    """Token embeddings."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(size.vocab, size.width))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, z: Tensor) -> Tensor:
        """[B, L, width] of tokens [B, L]."""
        return self.embedding[z]


class ReferenceMDLM(nn.Module):
    """log x_theta(. | z) [B, L, V] of noisy tokens z [B, L].

    With `bf16`, blocks and head run under bfloat16 autocast, as the published code does on a GPU.
    """

    def __init__(self, size: ModelSize, dropout: float = 0.0, bf16: bool = False) -> None:
        super().__init__()
        self.size, self.mask_id, self.bf16 = size, size.vocab - 1, bf16
        self.vocab_embed = EmbeddingLayer(size)
        self.sigma_map = TimestepEmbedder()
        self.blocks = nn.ModuleList(DDiTBlock(size, dropout) for _ in range(size.depth))
        self.output_layer = DDiTFinalLayer(size)

    def forward(self, z: Tensor) -> Tensor:
        """Log-probabilities of the clean token at every position."""
        sigma = torch.zeros(len(z))  # without time conditioning, sigma is 0 in every row
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
        """The SUBS parameterization: no probability on the mask, and visible tokens are copied."""
        logits[:, :, self.mask_id] = -1e6
        log_x = logits - logits.logsumexp(-1, keepdim=True)
        visible = z != self.mask_id
        log_x[visible] = -1e6
        log_x[visible, z[visible]] = 0
        return log_x

    def loss(self, x: Tensor, t: Tensor, uniform: Tensor) -> Tensor:
        """The NELBO in nats per token, from one draw: times t [B] and uniform numbers [B, L].

        E_t E_q(z_t | x) [ -alpha'_t / (1 - alpha_t) * sum over masked positions of -log x_theta(x | z_t) ]. With
        alpha = exp(-sigma), the weight is sigma'_t / (exp(sigma_t) - 1).
        """
        sigma = -torch.log1p(-(1 - EPS) * t)
        dsigma = (1 - EPS) / (1 - (1 - EPS) * t)
        z = torch.where(uniform < (1 - torch.exp(-sigma))[:, None], self.mask_id, x)
        log_p: Tensor = self(z).gather(-1, x[:, :, None])[:, :, 0]  # 0 where z is visible
        return (-log_p * (dsigma / torch.expm1(sigma))[:, None]).mean()


# Training: AdamW, gradient clipping, and an exponential moving average of the weights.


def stratified_times(n: int) -> Tensor:
    """Times [n] that cover [0.001, 1] evenly: the published low-discrepancy sampler."""
    u = (torch.rand(()) + torch.arange(n) / n) % 1
    return 1e-3 + (1 - 1e-3) * u


class ReferenceTrainer:
    """The published training step."""

    def __init__(self, model: ReferenceMDLM, lr: float = 3e-4, ema_decay: float = 0.9999) -> None:
        self.model, self.ema_decay = model, ema_decay
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0)
        self.ema_weights = [p.detach().clone() for p in model.parameters()]
        self.num_updates = 0

    def step(self, x: Tensor) -> float:
        """One update on tokens x [B, L]; returns the loss before it."""
        self.optimizer.zero_grad()
        loss = self.model.loss(x, stratified_times(len(x)), torch.rand(x.shape))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.num_updates += 1
        decay = min(self.ema_decay, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            for average, parameter in zip(self.ema_weights, self.model.parameters(), strict=True):
                average.sub_((1 - decay) * (average - parameter))
        return float(loss.detach())


# Sampling.


def sample_categorical(probs: Tensor) -> Tensor:
    """An index with probability proportional to probs [..., V], by the Gumbel trick."""
    noise = 1e-10 - (torch.rand_like(probs) + 1e-10).log()
    return (probs / noise).argmax(-1)


@torch.no_grad()
def ancestral_sample(model: ReferenceMDLM, z: Tensor, steps: int, max_steps: int | None = None) -> Tensor:
    """Unmask all masks of z [B, L] in T steps from t = 1 to 0: z_s ~ q(z_s | z_t, x_theta).

    A masked token becomes v with probability (t - s)/t x_theta(v) and stays masked with probability s/t. The
    network's output is cached: it is computed again only if a token changed in the step before.

    With `max_steps`, only the first of the steps are taken, to be timed. Probabilities are float32, as under
    autocast on a GPU: in bfloat16 this draw would unmask almost nothing.
    """
    times = torch.linspace(1, 1e-5, steps + 1)
    probs: Tensor | None = None
    for t, s in islice(pairwise(times), max_steps):
        if probs is None:
            probs = model(z).float().exp()
        step_probs = probs * (t - s)
        step_probs[:, :, model.mask_id] = s
        z_next = torch.where(z == model.mask_id, sample_categorical(step_probs), z)
        if not torch.equal(z_next, z):
            probs = None
        z = z_next
    return z if max_steps is not None else torch.where(z == model.mask_id, model(z).argmax(-1), z)


TEXT = """the cat sat on the mat and the dog lay by the door. the sun went down and the moon came up.
the cat ran to the door and the dog sat on the mat. the moon went down and the sun came up. """
STEPS = 200
"""Training steps of the demonstration."""


def main() -> None:
    """Train on a small text, character by character, and print samples."""
    torch.manual_seed(0)
    characters = sorted(set(TEXT))
    tokens = torch.tensor([characters.index(character) for character in TEXT * 2])
    size = ModelSize(vocab=len(characters) + 1, depth=2, width=64, length=32, heads=4)
    model = ReferenceMDLM(size)
    trainer = ReferenceTrainer(model, lr=3e-3)
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(tokens) - size.length, (16,)).tolist()
        loss = trainer.step(torch.stack([tokens[start : start + size.length] for start in starts]))
        if step % 50 == 0 or step == STEPS:
            print(f"step {step}: {loss:.2f} nats per token")
    masks = torch.full((3, size.length), model.mask_id)
    for row in ancestral_sample(model, masks, steps=50).tolist():
        print(repr("".join(characters[token] for token in row)))


if __name__ == "__main__":
    main()
