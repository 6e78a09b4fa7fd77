"""Orders that depend on the text: the network answers at every hole, and its surest answers stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from unmask.config import is_number
from unmask.diffusion.categorical import Choice
from unmask.diffusion.denoise import Denoise
from unmask.diffusion.process import Masking
from unmask.diffusion.times import check_steps
from unmask.sampling.ancestral import rank, write
from unmask.sampling.base import (
    Drawn,
    Judged,
    by_name,
    remaining_time,
    reversed_process,
    row_uniforms,
    share,
    start,
)
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, Tokens


@dataclass(frozen=True)
class Probability:
    """How probable the drawn token is (LLaDA's low-confidence remasking)."""

    def score(self, log_x: LogX, token: Tensor) -> Tensor:
        """[N]: the larger, the surer."""
        return log_x.gather(-1, token[:, None])[:, 0].exp()


@dataclass(frozen=True)
class Margin:
    """How far the best token is ahead of the second."""

    def score(self, log_x: LogX, token: Tensor) -> Tensor:
        """[N]: the larger, the surer."""
        best = log_x.topk(2).values.exp()
        return best[:, 0] - best[:, 1]


@dataclass(frozen=True)
class Entropy:
    """How little is left open: minus the distribution's entropy."""

    def score(self, log_x: LogX, token: Tensor) -> Tensor:
        """[N]: the larger, the surer."""
        return -entropy(log_x)


LEAST = -1e30
"""Less sure than anything that a network says."""

AnyOrder: TypeAlias = Probability | Margin | Entropy
ORDERS: dict[str, AnyOrder] = {"probability": Probability(), "margin": Margin(), "entropy": Entropy()}


def entropy(log_x: LogX) -> Tensor:
    """Nats [N]."""
    return -(log_x.exp() * log_x.clamp(min=torch.finfo(log_x.dtype).min)).sum(-1)


def order_of_sureness(score: Tensor, rows: Tensor, noise: Tensor) -> Tensor:
    """[b, L]: each position's place, the surest first.

    Scores are equal where nothing is visible yet, but for rounding, which depends on the batch. So they
    are compared to 14 bits, and the row's own noise [N] decides between equals.
    """
    mantissa, exponent = torch.frexp(score[rows].double())
    coarse = torch.ldexp((mantissa * 2**14).round(), exponent - 14)
    key = torch.full(score.shape, torch.inf, dtype=torch.float64, device=score.device)
    key[rows] = -coarse * (1 + 1e-5 * noise)
    return rank(key)


class ByConfidence(ABC):
    """Draw a token for every hole, keep those that `kept` names, at least one a row, and repeat.

    Tokens that are to come `late`, as the end of a text is, stay only where nothing else is left to write:
    a short text would otherwise be the surest.
    """

    choice: Choice
    late: tuple[int, ...]

    @property
    @abstractmethod
    def sureness(self) -> AnyOrder:
        """By what the surest are found."""

    @abstractmethod
    def kept(self, score: Tensor, place: Tensor, holes: Tensor, step: int) -> Tensor:
        """Which holes to fill [b, L]: from scores (-inf where no hole is), each position's place in the
        order of sureness (0 is the surest), and the holes at first [b]."""

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step."""
        reversed_process(denoise, Masking)
        z = start(denoise, canvas)
        mask = denoise.vocab.mask
        holes = (z == mask).sum(1)
        step = 0
        while len(active := (z == mask).any(1).nonzero()[:, 0]):
            rows = z[active] == mask
            t = remaining_time(denoise, rows.sum(1, keepdim=True), holes[active, None])
            drawn = Drawn(self.choice, row_uniforms(canvas.seeds, active, 2 * step, rows), mask)
            judged = Judged(drawn, self.sureness, denoise.normalised)
            token, sure = denoise(z[active], t, rows, each=judged, which=active).unbind(-1)
            token = token.long()
            if self.late:
                late = torch.tensor(self.late, device=token.device)
                sure = sure.masked_fill(torch.isin(token, late), LEAST)
            score = sure.new_full(rows.shape, -torch.inf).masked_scatter(rows, sure)
            place = order_of_sureness(score, rows, row_uniforms(canvas.seeds, active, 2 * step + 1, rows))
            keep = self.kept(score, place, holes[active], step) & rows
            z = write(z, active, keep, token[keep[rows]])
            step += 1
            yield z


@dataclass(frozen=True)
class Confidence(ByConfidence):
    """The surest positions first, an equal share of a row's holes at each step.

    `order` says by what: "probability", "margin" or "entropy".
    """

    steps: int = 128
    order: AnyOrder | str = Probability()
    choice: Choice = Choice()
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_steps(self.steps)
        object.__setattr__(self, "order", by_name(self.order, ORDERS, "order"))

    @property
    def sureness(self) -> AnyOrder:
        assert not isinstance(self.order, str)
        return self.order

    def kept(self, score: Tensor, place: Tensor, holes: Tensor, step: int) -> Tensor:
        return place < share(holes, self.steps, step)[:, None]


@dataclass(frozen=True)
class Threshold(ByConfidence):
    """Parallel decoding: everything that is surer than a threshold, and always the surest."""

    threshold: float = 0.9
    choice: Choice = Choice()
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ValueError(f"the threshold is a probability in [0, 1]; got {self.threshold!r}")

    @property
    def sureness(self) -> Probability:
        return Probability()

    def kept(self, score: Tensor, place: Tensor, holes: Tensor, step: int) -> Tensor:
        return (score >= self.threshold) | (place == 0)


@dataclass(frozen=True)
class Factor(ByConfidence):
    """Parallel decoding: the n surest, as long as the n-th has a probability of at least 1 - factor/(n + 1).

    Then what is most probable place by place is most probable together, for a factor of at most 1.
    """

    factor: float = 1.0
    choice: Choice = Choice()
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.factor) or not self.factor >= 0:
            raise ValueError(f"the factor must be 0 or above; got {self.factor!r}")

    @property
    def sureness(self) -> Probability:
        return Probability()

    def kept(self, score: Tensor, place: Tensor, holes: Tensor, step: int) -> Tensor:
        where = place.argsort(1)
        sure = score.gather(1, where)
        number = torch.arange(1, score.shape[1] + 1, device=score.device)
        enough = sure >= 1 - self.factor / (number + 1)
        enough[:, 0] = True
        return torch.zeros_like(enough).scatter(1, where, enough.cumprod(1).bool())


@dataclass(frozen=True)
class EntropyBounded(ByConfidence):
    """As many of the least open positions as keep sum(entropies) - max(entropy) within `bound` nats.

    That difference bounds the mutual information that is lost by drawing them independently.
    """

    bound: float = 0.1
    choice: Choice = Choice()
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.bound) or not self.bound >= 0:
            raise ValueError(f"the bound on the entropy must be 0 or above; got {self.bound!r}")

    @property
    def sureness(self) -> Entropy:
        return Entropy()

    def kept(self, score: Tensor, place: Tensor, holes: Tensor, step: int) -> Tensor:
        where = place.argsort(1)
        nats = (-score).gather(1, where)
        within = (nats.cumsum(1) - nats.cummax(1).values <= self.bound) & (nats < -LEAST)
        within[:, 0] = True
        return torch.zeros_like(within).scatter(1, where, within)
