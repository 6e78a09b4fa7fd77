"""The seam: what a sampler is, and the checks that all samplers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar, cast

from unmask.config import lookup
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Masking, Process
from unmask.sampling import SAMPLERS
from unmask.sampling.canvas import Canvas
from unmask.types import Tokens

_T = TypeVar("_T")
_ProcessT = TypeVar("_ProcessT", bound=Process)
_OtherT = TypeVar("_OtherT", bound=Process)


class Sampler(ABC):
    """Fills the masked positions of a canvas by calls of a denoiser.

    Subclass it (a frozen dataclass, if it should be saved or compared) and implement `run`; an object of the
    subclass then works wherever a sampler is taken. The contract: every masked position is filled, nothing else
    changes, the mask is never written, and a sequence gets the same tokens alone and in any batch (so its noise
    comes from `seeded_uniform` with its own seed). Progress, traces and counts are made by the caller, who
    iterates over the steps.
    """

    processes: ClassVar[tuple[type[Process], ...]] = (Masking,)
    """The processes that it reverses."""

    @abstractmethod
    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas [B, L] after each step, the finished one last."""

    @property
    def steps(self) -> int | None:
        """The number of steps (per block or window, where it fills these); None if it depends on the text."""
        return None

    @property
    def may_remask(self) -> bool:
        """Whether a token that has been written may still change."""
        return False

    @property
    def order_follows(self) -> Literal["predictions", "noise", "tokens"]:
        """What decides which positions a step writes: what the network predicts for them; noise; or the tokens that are
        drawn (or written again). In the first two cases the sampler's law is known (sampling/law.py)."""
        return "tokens"

    @property
    def inner(self) -> Sampler | None:
        """The sampler that fills each block or window; None if this one fills a canvas as a whole."""
        return None

    @property
    def any_length(self) -> bool:
        """Whether it fills canvases that are longer than the model's max_length, in windows of its own."""
        return False

    end_ids: tuple[int, ...] = ()
    """Tokens after which a text has ended and is filled up with the same token; empty if it goes on."""

    def with_params(self, params: SamplingParams, name: str) -> Sampler:
        """The sampler with these `params`, or with a sampler of its blocks or windows that has them.

        ValueError if it (called `name`) has no field `params`, and these are not the default ones.
        """
        sampler, fields = cast("Any", self), getattr(self, "__dataclass_fields__", {})
        if self.inner is not None and "sampler" in fields:
            return cast("Sampler", replace(sampler, sampler=self.inner.with_params(params, name)))
        if "params" in fields:
            return cast("Sampler", replace(sampler, params=params))
        if params != SamplingParams():
            raise ValueError(f"the sampler {name} has no temperature, top_k or top_p: leave them out")
        return self


def require_process(
    denoiser: DenoiserLike, process_type: type[_ProcessT], *others: type[_OtherT]
) -> _ProcessT | _OtherT:
    """The model's process; ValueError unless it is of one of these types."""
    process = denoiser.process
    if not isinstance(process, (process_type, *others)):
        raise ValueError(
            f"this sampler is for {process_type.title}, and the model was trained for {process.title}:"
            " use the default sampler"
        )
    return cast("_ProcessT | _OtherT", process)


def init_tokens(denoiser: DenoiserLike, canvas: Canvas, *, any_length: bool = False) -> Tokens:
    """A copy of the canvas to write on; ValueError if the model cannot read it."""
    length = canvas.tokens.shape[1]
    if not any_length and denoiser.max_length is not None and length > denoiser.max_length:
        raise ValueError(
            f"a text of {length} tokens is longer than the {denoiser.max_length} that the model reads at once:"
            " give it less text, or ask for fewer tokens"
        )
    if canvas.masked is None:
        denoiser.vocab.validate(canvas.tokens)
    return canvas.tokens.long().clone()


def resolve_option(value: _T | str, choices: Mapping[str, _T], what: str) -> _T:
    """An option that is given as an object or by its name; ValueError for anything else."""
    if isinstance(value, str):
        return lookup(value.replace("_", "-"), choices, what)
    if isinstance(value, tuple({type(choice) for choice in choices.values()})):
        return value
    names = " or ".join(f'"{name}"' for name in choices)
    raise ValueError(f"the {what} must be {names}, or an object of such a kind; got {value!r}")


def resolve_inner_sampler(sampler: Sampler | str) -> Sampler:
    """The sampler of a block or window, as an object or by its name; ValueError unless it fills a canvas as a whole."""
    if isinstance(sampler, str):
        named: Sampler = lookup(sampler, SAMPLERS, "sampler")()
        return named
    if not isinstance(sampler, Sampler) or sampler.inner is not None:
        raise ValueError(
            f"the sampler of a block or window must be one of {', '.join(SAMPLERS)}, or a Sampler of your own that"
            f" fills a canvas as a whole; got {sampler!r}"
        )
    return sampler
