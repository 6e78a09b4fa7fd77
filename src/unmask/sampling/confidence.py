"""Orders that depend on the text: the network predicts every masked position, and the most confident tokens stay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unmask.config import is_number
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.noise_level import validate_steps
from unmask.diffusion.process import Masking
from unmask.sampling._row_fns import DrawTokens, DrawWithConfidence
from unmask.sampling._unmasking import (
    IntArray,
    ranks,
    round_and_break_ties,
    time_from_mask_ratio,
    to_device,
    tokens_per_step,
)
from unmask.sampling.base import Sampler, init_tokens, require_process, resolve_option
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, Queries, Tokens


@dataclass(frozen=True)
class Probability:
    """The probability of the drawn token (LLaDA's low-confidence remasking)."""

    reads_tokens: ClassVar[bool] = True

    def score(self, log_x: LogX, tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        return log_x.gather(-1, tokens[:, None])[:, 0].exp()


@dataclass(frozen=True)
class BestProbability:
    """The probability of the most probable token, whichever is drawn."""

    reads_tokens: ClassVar[bool] = False

    def score(self, log_x: LogX, tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        return log_x.amax(-1).exp()


@dataclass(frozen=True)
class Margin:
    """The probability of the best token minus that of the second best."""

    reads_tokens: ClassVar[bool] = False

    def score(self, log_x: LogX, tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        best = log_x.topk(2).values.exp()
        return best[:, 0] - best[:, 1]


@dataclass(frozen=True)
class Entropy:
    """The negative entropy of the distribution."""

    reads_tokens: ClassVar[bool] = False

    def score(self, log_x: LogX, tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
        return -_entropy(log_x)


_DELAYED_SCORE = -1e30
"""Below the score of any token that is not delayed."""

_AnyProbability: TypeAlias = Probability | BestProbability
_AnyConfidenceMeasure: TypeAlias = _AnyProbability | Margin | Entropy
_PROBABILITIES: dict[str, _AnyProbability] = {"probability": Probability(), "best-probability": BestProbability()}
CONFIDENCE_MEASURES: dict[str, _AnyConfidenceMeasure] = {
    **_PROBABILITIES,
    "margin": Margin(),
    "entropy": Entropy(),
}


def _entropy(log_x: LogX) -> Float[Tensor, " N"]:
    """Nats [N]."""
    return -(log_x.exp() * log_x.clamp(min=torch.finfo(log_x.dtype).min)).sum(-1)


class _Predictions:
    """What was drawn last for each position of a canvas, and for how many steps that has not changed."""

    def __init__(self, z: Tokens) -> None:
        self.tokens, self.stable = torch.full_like(z, -1), z.new_zeros(len(z))

    def update(
        self, ids: Int[Tensor, " B"], indices: Queries, tokens: Int[Tensor, " N"], entropy: Float[Tensor, " N"]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """For sequences `ids`, in which `tokens` were drawn: how long nothing has changed, and the mean entropy."""
        sequence, position = indices
        changed = (self.tokens[ids[sequence], position] != tokens).to(entropy)
        self.tokens[ids[sequence], position] = tokens
        totals = entropy.new_zeros(len(ids), 3)
        totals.index_add_(0, sequence, torch.stack([changed, entropy, torch.ones_like(entropy)], -1))
        self.stable[ids] = torch.where(totals[:, 0] == 0, self.stable[ids] + 1, 0)
        return self.stable[ids], totals[:, 1] / totals[:, 2]


class _ConfidenceSampler(Sampler):
    """Draw a token for every masked position, keep those that `select` returns, at least one per sequence, and repeat.

    `delayed_tokens`, such as the end of a text, are kept only where nothing else is left to write: a short text
    would otherwise often be the most confident one. With a `stop_entropy`, all tokens of a sequence are kept once they
    have been the same for `stable_steps` steps, and the mean entropy of their distributions is below it.
    """

    measure: _AnyConfidenceMeasure | str = Probability()
    stop_entropy: float | None = None
    stable_steps: int = 1
    params: SamplingParams
    delayed_tokens: tuple[int, ...]

    @property
    def order_follows(self) -> Literal["predictions", "tokens"]:
        measure = resolve_option(self.measure, CONFIDENCE_MEASURES, "measure")
        reads_tokens = measure.reads_tokens or self.delayed_tokens or self.stop_entropy is not None
        return "tokens" if reads_tokens else "predictions"

    @abstractmethod
    def select(
        self, score: Float[Tensor, "B L"], rank: Int[Tensor, "B L"], num_initial: Int[Tensor, " B"], step: int
    ) -> Bool[Tensor, "B L"]:
        """Which masked positions to fill, bool [b, L].

        `score` [b, L] is -inf where nothing is masked; `rank` [b, L] is 0 at the highest score; `num_initial` [b] is
        the number of masked positions of the canvas.
        """

    def num_selected(self, num_masked: IntArray, num_initial: IntArray, step: int) -> IntArray | None:
        """How many positions [b] `select` chooses, if that is known without the scores; None if not."""
        return None

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        require_process(denoiser, Masking)
        z, mask = init_tokens(denoiser, canvas), denoiser.vocab.mask_id
        measures = (
            resolve_option(self.measure, CONFIDENCE_MEASURES, "measure"),
            *(() if self.stop_entropy is None else (Entropy(),)),
        )
        num_initial = canvas.host_mask(mask).sum(1)
        num_masked, step, predictions = num_initial.copy(), 0, _Predictions(z)
        while len(active := np.flatnonzero(num_masked)):
            ids, initial = to_device(active, z.device), num_initial[active]
            now = z[ids]
            indices = Queries.from_mask(now == mask, known_counts=num_masked[active].tolist())
            uniform, tie_break = (
                seeded_uniform([canvas.seeds[b] for b in active], z.shape[1], 2 * step + draw).to(z.device)[indices]
                for draw in (0, 1)
            )
            row_fn = DrawWithConfidence(DrawTokens(self.params, uniform, mask), measures, denoiser.normalized)
            t = time_from_mask_ratio(
                denoiser, torch.from_numpy(num_masked[active, None]), torch.from_numpy(initial[:, None])
            )
            values = denoiser(now, t.to(z.device), indices, row_fn=row_fn, sequence_ids=ids)
            token, score = values[:, 0].long(), self._delay(values[:, 0].long(), values[:, 1])
            dense = score.new_full(now.shape, -torch.inf).index_put(indices, score)
            key = torch.full_like(dense, torch.inf).index_put(indices, -round_and_break_ties(score, tie_break))
            keep = self.select(dense, ranks(key), to_device(initial, z.device), step) & (now == mask)
            if self.stop_entropy is not None:
                stable, nats = predictions.update(ids, indices, token, -values[:, 2])
                keep = keep | ((stable >= self.stable_steps) & (nats < self.stop_entropy))[:, None] & (now == mask)
            z = z.index_copy(0, ids, torch.where(keep, now.index_put(indices, token), now))
            counts = self.num_selected(num_masked[active], initial, step)
            num_masked[active] -= keep.sum(1).tolist() if counts is None else counts
            step += 1
            yield z

    def _delay(self, tokens: Int[Tensor, " N"], score: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The scores, those of delayed tokens being below all others."""
        if not self.delayed_tokens:
            return score
        return score.masked_fill(
            torch.isin(tokens, torch.tensor(self.delayed_tokens, device=tokens.device)), _DELAYED_SCORE
        )


@dataclass(frozen=True)
class Confidence(_ConfidenceSampler):
    """The most confident positions first, an equal share of a sequence's masked positions at each step."""

    steps: int = 128
    """The number of steps; more are better and slower."""
    measure: _AnyConfidenceMeasure | str = Probability()
    """What confidence is: "probability" (of the drawn token), "best-probability", "margin" or "entropy"."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""
    delayed_tokens: tuple[int, ...] = ()
    """Ids of tokens that are written last."""
    stop_entropy: float | None = None
    """Mean nats below which tokens that are drawn again and again are all written at once (0.005 is usual); None:
    never."""
    stable_steps: int = 1
    """For how many steps they must have been drawn again."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)
        if self.stop_entropy is not None and not (is_number(self.stop_entropy) and self.stop_entropy > 0):
            raise ValueError(f"stop_entropy must be above 0, or None; got {self.stop_entropy!r}")
        if not isinstance(self.stable_steps, int) or self.stable_steps < 1:
            raise ValueError(f"stable_steps must be at least 1; got {self.stable_steps!r}")
        object.__setattr__(self, "measure", resolve_option(self.measure, CONFIDENCE_MEASURES, "measure"))

    def select(
        self, score: Float[Tensor, "B L"], rank: Int[Tensor, "B L"], num_initial: Int[Tensor, " B"], step: int
    ) -> Bool[Tensor, "B L"]:
        return rank < tokens_per_step(num_initial, self.steps, step)[:, None]

    def num_selected(self, num_masked: IntArray, num_initial: IntArray, step: int) -> IntArray | None:
        if self.stop_entropy is not None:
            return None
        return np.minimum(tokens_per_step(num_initial, self.steps, step), num_masked)


@dataclass(frozen=True)
class Threshold(_ConfidenceSampler):
    """Parallel decoding: all tokens whose probability is above a threshold, and always the most probable ones.

    A threshold of 1 writes `min_tokens` at every step.
    """

    threshold: float = 0.9
    """The probability above which a token is written together with others."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""
    delayed_tokens: tuple[int, ...] = ()
    """Ids of tokens that are written last."""
    min_tokens: int = 1
    """How many of the most probable tokens are written in any case."""
    measure: _AnyProbability | str = Probability()
    """Whose probability: "probability", that of the drawn token, or "best-probability"."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "measure", resolve_option(self.measure, _PROBABILITIES, "measure"))
        if not is_number(self.threshold) or not 0 <= self.threshold <= 1:
            raise ValueError(f"the threshold is a probability in [0, 1]; got {self.threshold!r}")
        if not isinstance(self.min_tokens, int) or self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1; got {self.min_tokens!r}")

    def select(
        self, score: Float[Tensor, "B L"], rank: Int[Tensor, "B L"], num_initial: Int[Tensor, " B"], step: int
    ) -> Bool[Tensor, "B L"]:
        return (score > self.threshold) | (rank < self.min_tokens)


@dataclass(frozen=True)
class Factor(_ConfidenceSampler):
    """Parallel decoding: the n most probable tokens, as long as the n-th has a probability >= 1 - factor/(n + 1).

    For a factor of at most 1, the tokens that are most probable one by one are then most probable together.
    """

    factor: float = 1.0
    """The larger, the more tokens are written at once."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""
    delayed_tokens: tuple[int, ...] = ()
    """Ids of tokens that are written last."""
    measure: _AnyProbability | str = Probability()
    """Whose probability: "probability", that of the drawn token, or "best-probability"."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "measure", resolve_option(self.measure, _PROBABILITIES, "measure"))
        if not is_number(self.factor) or not self.factor >= 0:
            raise ValueError(f"the factor must be 0 or above; got {self.factor!r}")

    def select(
        self, score: Float[Tensor, "B L"], rank: Int[Tensor, "B L"], num_initial: Int[Tensor, " B"], step: int
    ) -> Bool[Tensor, "B L"]:
        order = rank.argsort(1)
        n = torch.arange(1, score.shape[1] + 1, device=score.device)
        enough = score.gather(1, order) >= 1 - self.factor / (n + 1)
        enough[:, 0] = True
        return torch.zeros_like(enough).scatter(1, order, enough.cumprod(1).bool())


@dataclass(frozen=True)
class EntropyBounded(_ConfidenceSampler):
    """As many positions of lowest entropy as keep sum(entropies) - max(entropy) within a bound.

    That difference bounds the mutual information that is lost by drawing them independently.
    """

    entropy_bound: float = 0.1
    """The bound, in nats."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""
    delayed_tokens: tuple[int, ...] = ()
    """Ids of tokens that are written last."""

    measure = Entropy()

    def __post_init__(self) -> None:
        if not is_number(self.entropy_bound) or not self.entropy_bound >= 0:
            raise ValueError(f"the bound on the entropy must be 0 or above; got {self.entropy_bound!r}")

    def select(
        self, score: Float[Tensor, "B L"], rank: Int[Tensor, "B L"], num_initial: Int[Tensor, " B"], step: int
    ) -> Bool[Tensor, "B L"]:
        order = rank.argsort(1)
        nats = (-score).gather(1, order)
        within = (nats.cumsum(1) - nats.cummax(1).values <= self.entropy_bound) & (nats < -_DELAYED_SCORE)
        within[:, 0] = True
        return torch.zeros_like(within).scatter(1, order, within)
