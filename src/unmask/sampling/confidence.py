"""Orders that depend on the text: the network answers at every hole, and its surest answers stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from unmask.config import is_number
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import validate_steps
from unmask.diffusion.process import Masking
from unmask.sampling.ancestral import ranks, scatter_tokens
from unmask.sampling.base import (
    DrawTokens,
    DrawWithConfidence,
    init_tokens,
    query_uniform,
    require_process,
    resolve_option,
    time_from_mask_ratio,
    tokens_per_step,
)
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, Tokens


@dataclass(frozen=True)
class Probability:
    """How probable the drawn token is (LLaDA's low-confidence remasking)."""

    def score(self, log_x: LogX, tokens: Tensor) -> Tensor:
        """[N]: the larger, the surer."""
        return log_x.gather(-1, tokens[:, None])[:, 0].exp()


@dataclass(frozen=True)
class Margin:
    """How far the best token is ahead of the second."""

    def score(self, log_x: LogX, tokens: Tensor) -> Tensor:
        """[N]: the larger, the surer."""
        best = log_x.topk(2).values.exp()
        return best[:, 0] - best[:, 1]


@dataclass(frozen=True)
class Entropy:
    """How little is left open: minus the distribution's entropy."""

    def score(self, log_x: LogX, tokens: Tensor) -> Tensor:
        """[N]: the larger, the surer."""
        return -_entropy(log_x)


_DELAYED_SCORE = -1e30
"""Less sure than anything that a network says."""

_AnyConfidenceMeasure: TypeAlias = Probability | Margin | Entropy
CONFIDENCE_MEASURES: dict[str, _AnyConfidenceMeasure] = {
    "probability": Probability(),
    "margin": Margin(),
    "entropy": Entropy(),
}


def _entropy(log_x: LogX) -> Tensor:
    """Nats [N]."""
    return -(log_x.exp() * log_x.clamp(min=torch.finfo(log_x.dtype).min)).sum(-1)


def _rank_by_confidence(score: Tensor, positions: Tensor, tie_break: Tensor) -> Tensor:
    """[b, L]: each position's place, the surest first.

    Scores are equal where nothing is visible yet, but for rounding, which depends on the batch. So they
    are compared to 14 bits, and the row's own noise [N] decides between equals.
    """
    mantissa, exponent = torch.frexp(score[positions].double())
    coarse = torch.ldexp((mantissa * 2**14).round(), exponent - 14)
    key = torch.full(score.shape, torch.inf, dtype=torch.float64, device=score.device)
    key[positions] = -coarse * (1 + 1e-5 * tie_break)
    return ranks(key)


class ConfidenceSampler(ABC):
    """Draw a token for every hole, keep those that `kept` names, at least one a row, and repeat.

    Tokens that are to come `delayed_tokens`, as the end of a text is, stay only where nothing else is left to write:
    a short text would otherwise be the surest.
    """

    params: SamplingParams
    delayed_tokens: tuple[int, ...]

    @property
    @abstractmethod
    def confidence_measure(self) -> _AnyConfidenceMeasure:
        """By what the surest are found."""

    @abstractmethod
    def select(self, score: Tensor, rank: Tensor, num_initial: Tensor, step: int) -> Tensor:
        """Which holes to fill [b, L]: from scores (-inf where no hole is), each position's place in the
        order of sureness (0 is the surest), and the holes at first [b]."""

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step."""
        require_process(denoiser, Masking)
        z = init_tokens(denoiser, canvas)
        mask = denoiser.vocab.mask_id
        holes = (z == mask).sum(1)
        step = 0
        while len(active := (z == mask).any(1).nonzero()[:, 0]):
            rows = z[active] == mask
            t = time_from_mask_ratio(denoiser, rows.sum(1, keepdim=True), holes[active, None])
            drawn = DrawTokens(self.params, query_uniform(canvas.seeds, active, 2 * step, rows), mask)
            judged = DrawWithConfidence(drawn, self.confidence_measure, denoiser.normalized)
            token, sure = denoiser(z[active], t, rows, row_fn=judged, sequence_ids=active).unbind(-1)
            token = token.long()
            if self.delayed_tokens:
                late = torch.tensor(self.delayed_tokens, device=token.device)
                sure = sure.masked_fill(torch.isin(token, late), _DELAYED_SCORE)
            score = sure.new_full(rows.shape, -torch.inf).masked_scatter(rows, sure)
            place = _rank_by_confidence(score, rows, query_uniform(canvas.seeds, active, 2 * step + 1, rows))
            keep = self.select(score, place, holes[active], step) & rows
            z = scatter_tokens(z, active, keep, token[keep[rows]])
            step += 1
            yield z


@dataclass(frozen=True)
class Confidence(ConfidenceSampler):
    """The surest positions first, an equal share of a row's holes at each step.

    `measure` says by what: "probability", "margin" or "entropy".
    """

    steps: int = 128
    measure: _AnyConfidenceMeasure | str = Probability()
    params: SamplingParams = SamplingParams()
    delayed_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        validate_steps(self.steps)
        object.__setattr__(self, "measure", resolve_option(self.measure, CONFIDENCE_MEASURES, "measure"))

    @property
    def confidence_measure(self) -> _AnyConfidenceMeasure:
        assert not isinstance(self.measure, str)
        return self.measure

    def select(self, score: Tensor, rank: Tensor, num_initial: Tensor, step: int) -> Tensor:
        return rank < tokens_per_step(num_initial, self.steps, step)[:, None]


@dataclass(frozen=True)
class Threshold(ConfidenceSampler):
    """Parallel decoding: everything that is surer than a threshold, and always the surest."""

    threshold: float = 0.9
    params: SamplingParams = SamplingParams()
    delayed_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ValueError(f"the threshold is a probability in [0, 1]; got {self.threshold!r}")

    @property
    def confidence_measure(self) -> Probability:
        return Probability()

    def select(self, score: Tensor, rank: Tensor, num_initial: Tensor, step: int) -> Tensor:
        return (score >= self.threshold) | (rank == 0)


@dataclass(frozen=True)
class Factor(ConfidenceSampler):
    """Parallel decoding: the n surest, as long as the n-th has a probability of at least 1 - factor/(n + 1).

    Then what is most probable place by place is most probable together, for a factor of at most 1.
    """

    factor: float = 1.0
    params: SamplingParams = SamplingParams()
    delayed_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.factor) or not self.factor >= 0:
            raise ValueError(f"the factor must be 0 or above; got {self.factor!r}")

    @property
    def confidence_measure(self) -> Probability:
        return Probability()

    def select(self, score: Tensor, rank: Tensor, num_initial: Tensor, step: int) -> Tensor:
        where = rank.argsort(1)
        sure = score.gather(1, where)
        number = torch.arange(1, score.shape[1] + 1, device=score.device)
        enough = sure >= 1 - self.factor / (number + 1)
        enough[:, 0] = True
        return torch.zeros_like(enough).scatter(1, where, enough.cumprod(1).bool())


@dataclass(frozen=True)
class EntropyBounded(ConfidenceSampler):
    """As many of the least open positions as keep sum(entropies) - max(entropy) within `bound` nats.

    That difference bounds the mutual information that is lost by drawing them independently.
    """

    entropy_bound: float = 0.1
    params: SamplingParams = SamplingParams()
    delayed_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.entropy_bound) or not self.entropy_bound >= 0:
            raise ValueError(f"the bound on the entropy must be 0 or above; got {self.entropy_bound!r}")

    @property
    def confidence_measure(self) -> Entropy:
        return Entropy()

    def select(self, score: Tensor, rank: Tensor, num_initial: Tensor, step: int) -> Tensor:
        where = rank.argsort(1)
        nats = (-score).gather(1, where)
        within = (nats.cumsum(1) - nats.cummax(1).values <= self.entropy_bound) & (nats < -_DELAYED_SCORE)
        within[:, 0] = True
        return torch.zeros_like(within).scatter(1, where, within)
