"""Sampling of FlexMDM: masks are inserted into the holes of a text, and unmasked, step by step.

In a step from t to s, with r = (alpha_s - alpha_t)/(1 - alpha_t) and p = 1 - alpha_t,

    each mask is unmasked with probability r,   and   Poisson(r p exp(l)) masks are inserted into each gap of a hole,

all from the text as it was. With more steps the law goes to that of the model, whose jumps have the rates 1/p and
exp(l) per unit of p. In the last step r = 1: what it inserts is unmasked at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.categorical import DAMAGED, SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform_array
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import Insertion as InsertionProcess
from unmask.diffusion.process import Masking
from unmask.sampling._row_fns import DrawTokens
from unmask.sampling._unmasking import to_device
from unmask.sampling.base import Sampler, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, NonFiniteError, Queries, Tokens


@dataclass(frozen=True)
class Insertion(Sampler):
    """Every run of masks on a canvas is a hole of at most so many tokens; masks that are left over are no text."""

    processes = (InsertionProcess,)

    steps: int = 128
    """T, the number of steps; more are better and slower."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn; how many there are is always drawn from the model's own distribution."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)

    @property
    def any_length(self) -> bool:
        """A canvas may be longer than the text that is made of it, which then has at most as many tokens as fit."""
        return True

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        schedule = require_process(denoiser, InsertionProcess).schedule
        z, mask = init_tokens(denoiser, canvas, any_length=True), denoiser.vocab.mask_id
        rows = [
            _Text.of_canvas(ids, masked, denoiser.max_length)
            for ids, masked in zip(z.tolist(), canvas.host_mask(mask).tolist(), strict=True)
        ]
        alphas = alpha_grid(schedule, self.steps)
        for number in range(self.steps + 1):
            i = max(1, self.steps - number)  # the step after the last one only unmasks
            active = [b for b, row in enumerate(rows) if row.is_unfinished(inserts=number < self.steps)]
            if not active:
                return
            r = float(Masking.unmask_prob(alphas[i - 1], alphas[i])) if number < self.steps else 1.0
            rate = r * float(1 - alphas[i]) if number < self.steps else 0.0
            noise = seeded_uniform_array([canvas.seeds[b] for b in active], 3 * (z.shape[1] + 1), number)
            step = _Step([rows[b] for b in active], noise.reshape(len(active), -1, 3), r, rate, mask)
            step.take(denoiser, i / self.steps, self.params, z.device, torch.tensor(active, device=z.device))
            z = z.clone()
            for b in active:
                z[b] = torch.tensor(rows[b].on_canvas(mask), device=z.device)
            yield z


@dataclass
class _Text:
    """A text as given tokens and holes in turn, the first and last of which are given tokens (perhaps none)."""

    parts: list[list[int]]
    """Given ids, ids of a hole, given ids, ...; -1 for a mask."""
    room: list[int]
    """How many tokens each hole may have."""
    longest: int | None
    """The most tokens of the text."""

    @classmethod
    def of_canvas(cls, ids: Sequence[int], masked: Sequence[bool], longest: int | None) -> _Text:
        """With all holes empty."""
        text = cls([[]], [], longest)
        for is_hole, run in itertools.groupby(zip(ids, masked, strict=True), lambda each: each[1]):
            tokens = [id_ for id_, _ in run]
            if is_hole:
                text.parts += [[], []]
                text.room.append(len(tokens))
            else:
                text.parts[-1] += tokens
        if longest is not None and text.size > longest:
            raise ValueError(
                f"{text.size} tokens are given, and a text of this model has at most {longest}: give it less text"
            )
        return text

    @property
    def size(self) -> int:
        """Its tokens, masks too."""
        return sum(map(len, self.parts))

    @property
    def holes(self) -> list[list[int]]:
        return self.parts[1::2]

    def is_unfinished(self, inserts: bool) -> bool:
        """Whether a token may still be inserted, or is to be unmasked."""
        has_room = inserts and any(self.free(hole) for hole in range(len(self.room)))
        return has_room or any(-1 in hole for hole in self.holes)

    def free(self, hole: int) -> int:
        """How many tokens may still be inserted into a hole."""
        free = self.room[hole] - len(self.holes[hole])
        return free if self.longest is None else min(free, self.longest - self.size)

    def insert(self, hole: int, counts: Sequence[int]) -> None:
        """So many masks in the gaps before its tokens, and after the last; as many of them as fit."""
        old, new, free = self.holes[hole], list[int](), self.free(hole)
        for place, count in enumerate(counts):
            fitting = min(count, free)
            free -= fitting
            new += [-1] * fitting + old[place : place + 1]
        self.parts[2 * hole + 1] = new

    def on_canvas(self, mask_id: int) -> list[int]:
        """The ids of the canvas: holes are filled from the left."""
        ids = list(self.parts[0])
        for hole, given, room in zip(self.holes, self.parts[2::2], self.room, strict=True):
            ids += [mask_id if id_ < 0 else id_ for id_ in hole] + [mask_id] * (room - len(hole)) + given
        return ids


@dataclass
class _Step:
    """A step of some texts: which places are asked, and what becomes of them."""

    texts: list[_Text]
    uniform: NDArray[np.float64]
    """[B, places, 3]: whether a mask is unmasked, which token it becomes, how many masks are inserted before it."""
    unmask_prob: float
    rate: float
    """The number of masks inserted is Poisson of rate exp(l)."""
    mask_id: int

    def take(self, denoiser: DenoiserLike, t: float, params: SamplingParams, device: torch.device, ids: Tensor) -> None:
        """Ask the network, and write its answers into the texts."""
        longest = max(text.size for text in self.texts) + 1
        z = np.full((len(self.texts), longest), self.mask_id)
        valid, opened, unmask = (np.zeros(z.shape, dtype=np.bool_) for _ in range(3))
        for row, text in enumerate(self.texts):
            valid[row, : text.size + 1] = True
            z[row, : text.size] = list(itertools.chain(*text.parts))
            for first, hole in self._holes(text):
                opened[row, first : first + len(hole) + 1] = True
        masks = z == -1
        z[masks] = self.mask_id
        unmask = masks & (self.uniform[:, :longest, 0] < self.unmask_prob)
        asked = unmask | (opened if self.rate > 0 else False)
        if not asked.any():
            return
        queries = Queries.from_host(asked, device)
        uniform = to_device(self.uniform[:, :longest, 1:][asked], device)
        most = max(text.free(hole) for text in self.texts for hole in range(len(text.room)))
        draw = _DrawTokensAndCounts(DrawTokens(params, uniform[:, 0], self.mask_id), uniform[:, 1], self.rate, most)
        context = Context() if valid.all() else Context(to_device(valid, device), valid_on_host=valid)
        times = to_device(np.where(opened, t, 0.0), device)
        answers = denoiser(to_device(z, device), times, queries, context, row_fn=draw, sequence_ids=ids)
        values = np.zeros((*z.shape, 2), dtype=np.int64)
        values[asked] = answers.cpu().numpy()
        if (values < 0).any():
            raise NonFiniteError(DAMAGED)
        self._write(values, unmask)

    def _holes(self, text: _Text) -> Iterator[tuple[int, list[int]]]:
        """The first place of each hole, and its tokens."""
        starts = [0, *itertools.accumulate(map(len, text.parts))]
        return zip(starts[1::2], text.holes, strict=False)

    def _write(self, values: NDArray[np.int64], unmask: NDArray[np.bool_]) -> None:
        """Tokens and counts [B, M, 2] of all places."""
        for row, text in enumerate(self.texts):
            for number, (first, hole) in enumerate(list(self._holes(text))):
                for place in np.flatnonzero(unmask[row, first : first + len(hole)]).tolist():
                    hole[place] = int(values[row, first + place, 0])
                if self.rate > 0:
                    text.insert(number, values[row, first : first + len(hole) + 1, 1].tolist())


@dataclass(frozen=True)
class _DrawTokensAndCounts:
    """The row function of a step: a token, and how many masks are inserted before the place."""

    draw_tokens: DrawTokens
    uniform: Float64[Tensor, " N"]
    rate: float
    most: int

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor:
        """int64 [n, 2]; -1 where log_x is damaged."""
        mask = self.draw_tokens.mask_id
        column = torch.arange(log_x.shape[-1], device=log_x.device) == mask
        token = self.draw_tokens(log_x.masked_fill(column, -torch.inf), indices)
        mean = self.rate * log_x[:, mask].double().exp()
        count = _poisson(mean, self.uniform[indices], self.most)
        return torch.stack([token, torch.where(mean.isnan(), -1, count)], -1)


def _poisson(mean: Float64[Tensor, " N"], uniform: Float64[Tensor, " N"], most: int) -> Tensor:
    """The Poisson quantile of uniform numbers [N], or `most` if that is less."""
    order = torch.arange(1, most + 1, dtype=torch.float64, device=mean.device)
    at_most = torch.special.gammaincc(order, mean[:, None])  # P(count <= order - 1)
    count: Tensor = (at_most <= uniform[:, None]).sum(-1)
    return count
