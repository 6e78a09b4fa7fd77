"""SSD-LM: semi-autoregressive simplex diffusion (arXiv 2210.17432), a baseline of the MDLM paper.

A text is written in blocks of 25 tokens from left to right. Each block is diffused in the space of logits
(`_simplex.py`) by a bidirectional network that reads all tokens before it. The loss is the cross-entropy of the
block's tokens at a random time, without any weight: it bounds nothing, and SSD-LM has no likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unmask.baselines._noise import BlockNoise, row_seeds, seeded_normal
from unmask.baselines._simplex import SimplexDiffusion, SimplexState, draw_kept, nucleus
from unmask.baselines._ssd_denoiser import SSDLMDenoiser
from unmask.context import Context
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.noise_level import validate_steps
from unmask.model.denoiser import ModelConfig
from unmask.objectives.base import LossSum, Objective
from unmask.objectives.mdlm import subs
from unmask.ops.chunked_head import WeightedNLL
from unmask.sampling.base import Sampler, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import Batch, LogX, Queries, Tokens, Vocab

_MAX_BLOCK_SIZE = 1 << 16
_PUBLISHED_TOP_P = 0.2
_PROJECTIONS = ("multi-hot", "sampling")


@dataclass(frozen=True)
class SSDLM(Objective):
    """Cross-entropy of a block of tokens whose logits are noisy, given the clean tokens before it."""

    block_size: int = 25
    """Tokens that are diffused together."""
    scale: float = 5.0
    """K: a token is the vector of logits with +K at its place and -K elsewhere."""
    steps: int = 5000
    """T: training times are 1/T, 2/T, ..., 1."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)
        if not 1 <= self.block_size <= _MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be from 1 to {_MAX_BLOCK_SIZE:,}; got {self.block_size}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale, the logit K of a token, must be above 0 and finite; got {self.scale}")

    @property
    def process(self) -> SimplexDiffusion:
        return SimplexDiffusion(self.block_size, self.scale)

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    @property
    def why_no_likelihood(self) -> str:
        return (
            "SSD-LM has no likelihood: its loss is a cross-entropy at random noise levels, which bounds nothing;"
            " compare its samples instead (`unmask eval-samples`)"
        )

    def build_denoiser(self, config: ModelConfig) -> SSDLMDenoiser:
        return SSDLMDenoiser(config)

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        raise ValueError(self.why_no_likelihood)

    def training_loss(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> LossSum:
        """One random context length for the whole batch, one time for each row.

        Contexts of the published code have at least one token; here they may be empty (a single mask stands for
        the beginning of a text), so that texts can be written from nothing.
        """
        batch, length = batch.checked(denoiser.vocab), batch.tokens.shape[1]
        if length < 2:
            raise ValueError(f"SSD-LM needs rows of at least 2 tokens; got {length}")
        size = min(self.block_size, length - 1)
        start = int(torch.randint(length - size + 1, (), generator=generator))
        seeds = row_seeds(batch, generator)
        t = ((seeded_uniform(seeds, 1) * self.steps).floor() + 1) / self.steps
        noise = seeded_normal(seeds, size * denoiser.vocab.size, draw=1).view(len(batch), size, -1)
        return self.block_loss(denoiser, batch, start, t.to(batch.tokens.device), noise.to(batch.tokens.device))

    def block_loss(
        self,
        denoiser: DenoiserLike,
        batch: Batch,
        start: int,
        t: Float[Tensor, "B 1"],
        noise: Float[Tensor, "B n V"],
    ) -> LossSum:
        """-log x_theta(w | a_t, tokens before), summed over the block that begins at position `start`."""
        stop = start + noise.shape[1]
        x = batch.tokens[:, start:stop]
        clean = self.process.one_hot(nn.functional.one_hot(x, denoiser.vocab.size).bool())
        state = SimplexState(
            _context_tokens(batch.tokens, start, denoiser.vocab),
            self.process.add_noise(clean.to(noise), t, noise, denoiser.vocab),
        )
        counted = state.in_block()
        counted[:, -noise.shape[1] :] &= batch.loss_mask[:, start:stop]
        positions = Queries.from_mask(counted)
        tokens = torch.cat([state.tokens, x], 1)
        row_fn = WeightedNLL.unweighted(positions.gather(tokens))
        context = _cut_context(batch.context, start, stop)
        nll = _call(denoiser)(state, t, positions, context, row_fn=row_fn)
        return LossSum(nll.sum(), counted.sum())


@dataclass(frozen=True)
class SimplexBlocks(Sampler):
    """Blocks from left to right: T steps a_t -> projection of the prediction -> a_{t - 1/T}, from pure noise.

    The tokens of a block are the argmax of the network's last answer, and context of the next block. Text after a
    hole is kept, but not read. A context that is too long for the network loses its beginning.
    """

    processes = (SimplexDiffusion,)

    steps: int = 1000
    """T, the number of steps of each block."""
    params: SamplingParams = SamplingParams()
    """top_p is the mass of the nucleus that a step projects to (None: 0.2, as published); at temperature 0 it is the
    most probable token alone. Other temperatures divide the predicted logits. There is no top_k."""
    projection: str = "multi-hot"
    """multi-hot: +K at all tokens of the nucleus; sampling: +K at one that is drawn from it."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)
        if self.params.top_k is not None:
            raise ValueError("SSD-LM projects to a nucleus of tokens, which top_p sets: leave out top_k")
        if self.projection not in _PROJECTIONS:
            raise ValueError(f"projection must be {' or '.join(_PROJECTIONS)}; got {self.projection!r}")

    @property
    def may_remask(self) -> bool:
        return True

    @property
    def any_length(self) -> bool:
        return True

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        process = require_process(denoiser, SimplexDiffusion)
        z = init_tokens(denoiser, canvas, any_length=True)
        for rows, (start, stop) in _blocks(z == denoiser.vocab.mask_id, _block_size(denoiser, process)):
            size, ids = stop - start, torch.tensor(rows, device=z.device)
            noise = BlockNoise([canvas.seeds[row] for row in rows], start, size, denoiser.vocab.size)
            longest = None if denoiser.max_length is None else denoiser.max_length - size
            context = _context_tokens(z[rows], start, denoiser.vocab, longest)
            for log_x in self.block_steps(denoiser, context, noise, ids):
                z = z.clone()
                z[rows, start:stop] = log_x.argmax(-1)
                yield z

    def block_steps(
        self,
        denoiser: DenoiserLike,
        context: Tokens,
        noise: BlockNoise,
        sequence_ids: Tensor | None = None,
    ) -> Iterator[Float[Tensor, "B n V"]]:
        """The network's answers log_x [B, n, V] at t = 1, 1 - 1/T, ..., 1/T for a block after the context [B, c].

        `noise.normal(0)` starts the block; `noise.normal(i)` is added after step i.
        """
        process = require_process(denoiser, SimplexDiffusion)
        device = context.device
        start = noise.normal(0).to(device)
        t = torch.ones(len(context), 1, dtype=torch.float64, device=device)
        block = process.add_noise(torch.zeros_like(start), t, start, denoiser.vocab)
        for step in range(1, self.steps + 1):
            state = SimplexState(context, block)
            t = torch.full_like(t, (self.steps - step + 1) / self.steps)
            flat = _call(denoiser)(state, t, state.in_block(), sequence_ids=sequence_ids)
            log_x = flat.view(start.shape)
            yield log_x
            if step < self.steps:
                projected = self._project(process, log_x, noise, step)
                t = torch.full_like(t, (self.steps - step) / self.steps)
                block = process.add_noise(projected.to(start), t, noise.normal(step).to(device), denoiser.vocab)

    def _project(
        self, process: SimplexDiffusion, log_x: Float[Tensor, "B n V"], noise: BlockNoise, step: int
    ) -> Float[Tensor, "B n V"]:
        temperature, top_p = self.params.temperature, self.params.top_p
        if temperature == 0:
            return process.one_hot(nucleus(log_x, 0))
        log_x = log_x / temperature
        kept = nucleus(log_x, _PUBLISHED_TOP_P if top_p is None else top_p)
        if self.projection == "sampling":
            uniform = noise.uniform(step).to(log_x.device).flatten()
            kept = draw_kept(log_x.flatten(0, 1), kept.flatten(0, 1), uniform).view(kept.shape)
        return process.one_hot(kept)


def _call(denoiser: DenoiserLike) -> Callable[..., Tensor]:
    """The denoiser as a function of `SimplexState`."""
    return cast("Callable[..., Tensor]", denoiser)


def _block_size(denoiser: DenoiserLike, process: SimplexDiffusion) -> int:
    """Tokens of a block: those of the process, but at least one token of context must fit, too."""
    longest = denoiser.max_length
    if longest is not None and longest < 2:
        raise ValueError("SSD-LM needs a network of at least 2 tokens: one of context and one to write")
    return process.tokens_per_block if longest is None else min(process.tokens_per_block, longest - 1)


def _context_tokens(
    tokens: Int[Tensor, "B L"], start: int, vocab: Vocab, longest: int | None = None
) -> Int[Tensor, "B c"]:
    """The last `longest` tokens before position `start`; a single mask stands for the beginning of a text."""
    if start == 0:
        return torch.full_like(tokens[:, :1], vocab.mask_id)
    return tokens[:, max(0, start - longest) if longest is not None else 0 : start]


def _cut_context(context: Context, start: int, stop: int) -> Context:
    """Padding and documents of positions 0 to stop - 1, and of the mask in front if nothing is before the block."""

    def cut(flags: Tensor | None) -> Tensor | None:
        if flags is None:
            return None
        return flags[:, :stop] if start else torch.cat([flags[:, :1], flags[:, :stop]], 1)

    return Context(valid=cut(context.valid), document_ids=cut(context.document_ids))


def _blocks(masked: Tensor, size: int) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Rows with the same holes, and the blocks of at most `size` positions that fill these, from left to right."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for row, holes in enumerate(masked.tolist()):
        groups.setdefault(tuple(holes), []).append(row)
    for holes, rows in groups.items():
        position = 0
        for is_hole, run in groupby(holes):
            length = len(list(run))
            if is_hole:
                for first in range(position, position + length, size):
                    yield rows, (first, min(first + size, position + length))
            position += length
