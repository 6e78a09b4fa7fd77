"""What all samplers share: checked starts, one way to choose tokens, and counting from outside."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from unmask.config import known
from unmask.diffusion.categorical import Choice, draw
from unmask.diffusion.denoise import Around, Denoise, Joinable
from unmask.diffusion.noise import uniforms
from unmask.diffusion.process import BlockMasking, LeftToRight, Masking, Process, UniformNoise
from unmask.sampling.canvas import Canvas
from unmask.types import LogX, Rows, Times, Tokens


class Sampler(Protocol):
    """Fills a canvas. Progress, tracing and counting are the business of whoever iterates."""

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas [B, L] after each step, the finished one last."""
        ...


P = TypeVar("P", bound=Process)
T = TypeVar("T")
_CALLED: dict[type, str] = {
    Masking: "masked diffusion",
    UniformNoise: "uniform noise",
    LeftToRight: "writing from left to right",
    BlockMasking: "block diffusion",
}
"""As people call what a model was trained for."""


def by_name(value: T | str, choices: Mapping[str, T], what: str) -> T:
    """An option that may be given as an object or by its name; anything else is refused at once."""
    if isinstance(value, str):
        return known(value.replace("_", "-"), choices, what)
    if isinstance(value, tuple({type(choice) for choice in choices.values()})):
        return value
    names = " or ".join(f'"{name}"' for name in choices)
    raise ValueError(f"the {what} must be {names}, or an object of such a kind; got {value!r}")


def reversed_process(denoise: Denoise, kind: type[P]) -> P:
    """The model's process, which must be of the `kind` that the sampler reverses."""
    process = denoise.process
    if not isinstance(process, kind):
        raise ValueError(
            f"this sampler is for {_CALLED[kind]}, and the model was trained for {_CALLED[type(process)]}:"
            " take the default sampler, which fits"
        )
    return process


def start(denoise: Denoise, canvas: Canvas, *, any_length: bool = False) -> Tokens:
    """A copy of the canvas to write on, once it is known to fit the model."""
    length = canvas.tokens.shape[1]
    if not any_length and denoise.max_length is not None and length > denoise.max_length:
        raise ValueError(
            f"a text of {length} tokens is longer than the {denoise.max_length} that the model reads at once:"
            " give it less text, or ask for fewer tokens"
        )
    denoise.vocab.check(canvas.tokens)
    return canvas.tokens.long().clone()


def share(counts: Tensor, steps: int, step: Tensor | int) -> Tensor:
    """How many of `counts` positions fall to the `step`, as even as can be: the first have one more."""
    return counts // steps + (counts % steps > step)


def remaining_time(denoise: Denoise, masked: Tensor, at_start: Tensor) -> Times:
    """The t at which, of `at_start` holes, `masked` are expected to be still open."""
    schedule = reversed_process(denoise, Masking).schedule
    return schedule.inverse(1 - masked.double() / at_start)


def row_uniforms(seeds: Sequence[int], active: Tensor, number: int, rows: Tensor) -> Tensor:
    """A uniform [N] for each of the `rows` [b, L] of the `active` [b] sequences, from their draw `number`."""
    own = [seeds[b] for b in active.tolist()]
    return uniforms(own, rows.shape[1], number).to(rows.device)[rows]


def choose(choice: Choice, log_x: LogX, uniform: Tensor, mask: int, jump: Tensor | None = None) -> Tensor:
    """A token for each line. With `jump` [N], the step's r, a line may also stay masked: v with
    probability r exp(log_x[v]), the mask with what is left (nothing, once r S reaches 1)."""
    weights = choice.weights(log_x)
    if jump is not None:
        weights = weights.double() * jump[:, None]
        left = (1 - weights.sum(-1)).clamp(min=0)
        weights[:, mask] = torch.where(jump < 1, left, 0)
    return draw(weights, uniform)


@dataclass(frozen=True)
class Drawn(Joinable):
    """A token for each line, from a uniform [N] each; asked of a denoiser, so that log_x need not be
    whole."""

    choice: Choice
    uniform: Tensor
    mask: int

    def __call__(self, log_x: LogX, part: slice | Tensor) -> Tensor:
        """int64 [n]."""
        return choose(self.choice, log_x, self.uniform[part], self.mask)

    @property
    def kind(self) -> Hashable:
        """Whose tokens are chosen in one way."""
        return Drawn, self.choice, self.mask

    def join(self, others: Sequence[Drawn], _lines: Sequence[int]) -> Drawn:
        """One draw for all lines."""
        return replace(self, uniform=torch.cat([self.uniform, *(other.uniform for other in others)]))


class Sureness(Protocol):
    """How sure a token is of its place; two that are equal judge alike."""

    def score(self, log_x: LogX, token: Tensor) -> Tensor:
        """[N]: the larger, the surer."""
        ...


@dataclass(frozen=True)
class Judged(Joinable):
    """A drawn token for each line and how sure it is; lines that are not `normalised` are so first."""

    drawn: Drawn
    sureness: Sureness
    normalised: bool

    def __call__(self, log_x: LogX, part: slice | Tensor) -> Tensor:
        """float64 [n, 2]."""
        if not self.normalised:
            log_x = log_x - log_x.logsumexp(-1, keepdim=True)
        token = self.drawn(log_x, part)
        return torch.stack([token.double(), self.sureness.score(log_x, token).double()], -1)

    @property
    def kind(self) -> Hashable:
        """Whose tokens are chosen and judged in one way."""
        return Judged, self.drawn.kind, self.sureness, self.normalised

    def join(self, others: Sequence[Judged], lines: Sequence[int]) -> Judged:
        """One judgement of all lines."""
        return replace(self, drawn=self.drawn.join([other.drawn for other in others], lines))


class Padded(Around):
    """A denoiser that is told which places [B, places] of a canvas are text: padding is not looked at."""

    def __init__(self, denoise: Denoise, valid: Tensor) -> None:
        super().__init__(denoise)
        self.valid = valid

    def __call__(
        self, z: Tokens, t: Times, rows: Rows, *, which: Tensor | None = None, **context: Any
    ) -> Tensor:
        valid = self.valid if which is None else self.valid[which]
        if z.shape[1] != valid.shape[1] and not context.keys() & {"order", "beside"}:
            raise ValueError(
                "prompts of different lengths begin with padding, which a sliding window would leave behind:"
                " complete them one by one, or with texts that the model takes as a whole"
            )
        return self.denoise(z, t, rows, which=which, valid=valid, **context)


class Counted(Around):
    """A denoiser that counts what it is asked: network calls, sequences in them, rows of the head."""

    def __init__(self, denoise: Denoise) -> None:
        super().__init__(denoise)
        self.calls = self.sequences = self.head_rows = 0

    def __call__(self, z: Tokens, t: Times, rows: Rows, **context: Any) -> Tensor:
        said = self.denoise(z, t, rows, **context)
        self.calls += 1
        self.sequences += len(z)
        self.head_rows += len(said)
        return said
