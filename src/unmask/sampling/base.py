"""What all samplers share: checked starts, one way to choose tokens, and counting from outside."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from unmask.config import lookup
from unmask.context import Context
from unmask.diffusion.categorical import SamplingParams, sample_inverse_cdf
from unmask.diffusion.denoiser import BatchableRowFn, DenoiserLike, DenoiserWrapper
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.process import BlockMasking, LeftToRight, Masking, Process, UniformNoise
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, Positions, RowFn, Times, Tokens


@runtime_checkable
class Sampler(Protocol):
    """Fills a canvas. Progress, traces and counts are made by the caller, who iterates over the steps."""

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas [B, L] after each step, the finished one last."""
        ...


_ProcessT = TypeVar("_ProcessT", bound=Process)
_T = TypeVar("_T")
_PROCESS_NAMES: dict[type, str] = {
    Masking: "masked diffusion",
    UniformNoise: "uniform noise",
    LeftToRight: "writing from left to right",
    BlockMasking: "block diffusion",
}
"""As people call what a model was trained for."""


def resolve_option(value: _T | str, choices: Mapping[str, _T], what: str) -> _T:
    """An option that may be given as an object or by its name; anything else is refused at once."""
    if isinstance(value, str):
        return lookup(value.replace("_", "-"), choices, what)
    if isinstance(value, tuple({type(choice) for choice in choices.values()})):
        return value
    names = " or ".join(f'"{name}"' for name in choices)
    raise ValueError(f"the {what} must be {names}, or an object of such a kind; got {value!r}")


def require_process(denoiser: DenoiserLike, process_type: type[_ProcessT]) -> _ProcessT:
    """The model's process, which must be of the `kind` that the sampler reverses."""
    process = denoiser.process
    if not isinstance(process, process_type):
        raise ValueError(
            f"this sampler is for {_PROCESS_NAMES[process_type]}, and the model was trained for"
            f" {_PROCESS_NAMES[type(process)]}:"
            " take the default sampler, which fits"
        )
    return process


def init_tokens(denoiser: DenoiserLike, canvas: Canvas, *, any_length: bool = False) -> Tokens:
    """A copy of the canvas to write on, once it is known to fit the model."""
    length = canvas.tokens.shape[1]
    if not any_length and denoiser.max_length is not None and length > denoiser.max_length:
        raise ValueError(
            f"a text of {length} tokens is longer than the {denoiser.max_length} that the model reads at once:"
            " give it less text, or ask for fewer tokens"
        )
    denoiser.vocab.validate(canvas.tokens)
    return canvas.tokens.long().clone()


def tokens_per_step(num_masked: Tensor, steps: int, step: Tensor | int) -> Tensor:
    """How many of `counts` positions fall to the `step`, as even as can be: the first have one more."""
    return num_masked // steps + (num_masked % steps > step)


def time_from_mask_ratio(denoiser: DenoiserLike, num_masked: Tensor, num_initial: Tensor) -> Times:
    """The t at which, of `at_start` holes, `masked` are expected to be still open."""
    schedule = require_process(denoiser, Masking).schedule
    return schedule.inverse(1 - num_masked.double() / num_initial)


def query_uniform(seeds: Sequence[int], active: Tensor, draw_index: int, positions: Tensor) -> Tensor:
    """A uniform [N] for each of the `rows` [b, L] of the `active` [b] sequences, from their draw `number`."""
    own = [seeds[b] for b in active.tolist()]
    return seeded_uniform(own, positions.shape[1], draw_index).to(positions.device)[positions]


def sample_tokens(
    params: SamplingParams, log_x: LogX, uniform: Tensor, mask_id: int, unmask_prob: Tensor | None = None
) -> Tensor:
    """A token for each line. With `jump` [N], the step's r, a line may also stay masked: v with
    probability r exp(log_x[v]), the mask with what is left (nothing, once r S reaches 1)."""
    weights = params.probabilities(log_x)
    if unmask_prob is not None:
        weights = weights.double() * unmask_prob[:, None]
        left = (1 - weights.sum(-1)).clamp(min=0)
        weights[:, mask_id] = torch.where(unmask_prob < 1, left, 0)
    return sample_inverse_cdf(weights, uniform)


@dataclass(frozen=True)
class DrawTokens(BatchableRowFn):
    """A token for each line, from a uniform [N] each; asked of a denoiser, so that log_x need not be
    whole."""

    params: SamplingParams
    uniform: Tensor
    mask_id: int

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor:
        """int64 [n]."""
        return sample_tokens(self.params, log_x, self.uniform[indices], self.mask_id)

    @property
    def batch_key(self) -> Hashable:
        """Whose tokens are chosen in one way."""
        return DrawTokens, self.params, self.mask_id

    def merge(self, others: Sequence[DrawTokens], _num_queries: Sequence[int]) -> DrawTokens:
        """One draw for all lines."""
        return replace(self, uniform=torch.cat([self.uniform, *(other.uniform for other in others)]))


class ConfidenceMeasure(Protocol):
    """How sure a token is of its place; two that are equal judge alike."""

    def score(self, log_x: LogX, tokens: Tensor) -> Tensor:
        """[N]: the larger, the surer."""
        ...


@dataclass(frozen=True)
class DrawWithConfidence(BatchableRowFn):
    """A drawn token for each line and how sure it is; lines that are not `normalized` are so first."""

    draw_tokens: DrawTokens
    measure: ConfidenceMeasure
    normalized: bool

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor:
        """float64 [n, 2]."""
        if not self.normalized:
            log_x = log_x - log_x.logsumexp(-1, keepdim=True)
        token = self.draw_tokens(log_x, indices)
        return torch.stack([token.double(), self.measure.score(log_x, token).double()], -1)

    @property
    def batch_key(self) -> Hashable:
        """Whose tokens are chosen and judged in one way."""
        return DrawWithConfidence, self.draw_tokens.batch_key, self.measure, self.normalized

    def merge(self, others: Sequence[DrawWithConfidence], num_queries: Sequence[int]) -> DrawWithConfidence:
        """One judgement of all lines."""
        return replace(self, draw_tokens=self.draw_tokens.merge([other.draw_tokens for other in others], num_queries))


class PaddedDenoiser(DenoiserWrapper):
    """A denoiser that is told which places [B, places] of a canvas are text: padding is not looked at."""

    def __init__(self, denoiser: DenoiserLike, valid: Tensor) -> None:
        super().__init__(denoiser)
        self.valid = valid

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        valid = self.valid if sequence_ids is None else self.valid[sequence_ids]
        if z.shape[1] != valid.shape[1] and context.stages is None and context.cache is None:
            raise ValueError(
                "prompts of different lengths begin with padding, which a sliding window would leave behind:"
                " complete them one by one, or with texts that the model takes as a whole"
            )
        context = replace(context, valid=valid)
        return self.denoiser(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)


class CountingDenoiser(DenoiserWrapper):
    """A denoiser that counts what it is asked: network calls, sequences in them, rows of the head."""

    def __init__(self, denoiser: DenoiserLike) -> None:
        super().__init__(denoiser)
        self.nfe = self.num_sequences = self.num_queries = 0

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        said = self.denoiser(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)
        self.nfe += 1
        self.num_sequences += len(z)
        self.num_queries += len(said)
        return said
