"""Samplers by name, with the options of commands and requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

from unmask.config import lookup
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.sampling import PROCESS_SAMPLERS, SAMPLERS
from unmask.sampling.ancestral import Ancestral
from unmask.sampling.base import Sampler
from unmask.sampling.blockwise import CACHE_POLICIES, Blockwise

_DEFAULT_STEPS = 128


class _ModelDenoiser(DenoiserLike, Protocol):
    """The denoiser of a model, which may come with a sampler of its own."""

    @property
    def own_sampler(self) -> Sampler | None:
        """The sampler that the model comes with, if it has one."""
        ...


def default_sampler(
    denoiser: _ModelDenoiser, steps: int | None = None, params: SamplingParams | None = None
) -> Sampler:
    """The sampler that the model comes with or, if it has none, the one that reverses its process as it is defined.

    `steps`, per block where there are blocks, and `params` are the sampler's own where they are not given; a sampler
    that chooses its steps itself ignores them.
    """
    own = _fitting_own_sampler(denoiser)
    if own is not None:
        return _override(own, denoiser, steps, params)
    process, params = denoiser.process, params or SamplingParams()
    steps = _DEFAULT_STEPS if steps is None else steps
    if process.block_size is not None:
        return Blockwise(sampler=Ancestral(steps, params), end_ids=denoiser.vocab.end_ids)
    name = process.default_sampler
    kind = SAMPLERS.find(name) if ":" in name else lookup(name, {**SAMPLERS, **PROCESS_SAMPLERS}, "sampler")
    return _build(kind, steps, params)


def make_sampler(
    denoiser: _ModelDenoiser,
    name: str = "default",
    steps: int | None = None,
    params: SamplingParams | None = None,
    *,
    block_size: int | None = None,
    sub_block_size: int | None = None,
    cache: str = "none",
    **options: Any,
) -> Sampler:
    """The sampler of this name in `SAMPLERS`, or the model's default; samplers without steps ignore `steps`.

    With a `block_size`, text is generated from left to right in blocks, `steps` counts the steps per block (or per
    sub-block), and `cache` names what is cached meanwhile: none, prefix or dual. `options` are fields of the sampler.
    What is not given is that of the model's own sampler, if that is the one that is asked for.
    """
    own = _fitting_own_sampler(denoiser) if name == "default" else None
    exact = denoiser.process.block_size is not None
    in_blocks = exact or block_size is not None or isinstance(own, Blockwise)
    if cache != "none" and (exact or not in_blocks):
        why = "this model has an exact one" if exact else "say how long a block is"
        raise ValueError(f"a {cache} cache is for masked diffusion that is written in blocks: {why}")
    if sub_block_size is not None and not in_blocks:
        raise ValueError("sub_block_size is for text that is written in blocks: say how long a block is")
    policy = None if cache == "none" else lookup(cache, CACHE_POLICIES, "cache")
    wanted = {"block_size": block_size, "sub_block_size": sub_block_size, "cache": policy}
    blocks: dict[str, Any] = {field: value for field, value in wanted.items() if value is not None}
    if own is not None:
        return _override(own, denoiser, steps, params, blocks, **options)
    if name == "default" and not blocks:
        for option in options:
            raise ValueError(f"{option} is for {_samplers_with_option(option)}: name that sampler, too")
        return default_sampler(denoiser, steps, params)
    kind = lookup("confidence" if name == "default" else name, SAMPLERS, "sampler")
    sampler = _build(kind, _DEFAULT_STEPS if steps is None else steps, params or SamplingParams(), **options)
    return Blockwise(sampler=sampler, end_ids=denoiser.vocab.end_ids, **blocks) if in_blocks else sampler


def resolve_sampler(denoiser: _ModelDenoiser, sampler: Sampler | str | None) -> Sampler:
    """A sampler that is given as an object, by its name, or not at all: then the model's default."""
    if sampler is None or isinstance(sampler, str):
        return make_sampler(denoiser, sampler or "default")
    if not isinstance(sampler, Sampler):
        raise ValueError(f"sampler must be a Sampler, as in unmask.Ancestral(steps=64), or one's name; got {sampler!r}")
    return sampler


def _fitting_own_sampler(denoiser: _ModelDenoiser) -> Sampler | None:
    """The sampler that the model comes with, unless it was trained for another process since."""
    own = denoiser.own_sampler
    return own if own is not None and isinstance(denoiser.process, own.processes) else None


def _override(
    own: Sampler,
    denoiser: _ModelDenoiser,
    steps: int | None,
    params: SamplingParams | None,
    blocks: Mapping[str, Any] = {},
    **options: Any,
) -> Sampler:
    """A model's own sampler with what is given: fields of the sampler that fills its blocks, and of the blocks."""
    filler: Any = own.inner or own
    for option in options:
        if option not in _fields(type(filler)):
            raise ValueError(f"{option} is for {_samplers_with_option(option)}: name that sampler, too")
    if steps is not None and "steps" in _fields(type(filler)):
        options["steps"] = steps
    filler = replace(filler, **options) if options else filler
    if params is not None:
        filler = filler.with_params(params, _name(type(filler)))
    if not isinstance(own, Blockwise) and not blocks:
        return cast("Sampler", filler)
    around = own if isinstance(own, Blockwise) else Blockwise()
    if denoiser.process.block_size is not None:  # the model may have learned other blocks than its family's
        around = replace(around, block_size=None)
    return replace(around, sampler=filler, end_ids=around.end_ids or denoiser.vocab.end_ids, **blocks)


def _build(kind: type[Sampler], steps: int, params: SamplingParams, **options: Any) -> Sampler:
    for option in options:
        if option not in _fields(kind):
            raise ValueError(
                f"the sampler {_name(kind)!r} has no {option}, which is for {_samplers_with_option(option)}"
            )
    if "steps" in _fields(kind):
        options["steps"] = steps
    return kind(**options).with_params(params, _name(kind))


def _name(kind: type[Sampler]) -> str:
    return next((name for name, member in SAMPLERS.items() if member is kind), kind.__name__)


def _fields(kind: type[Sampler]) -> Any:
    return getattr(kind, "__dataclass_fields__", {})


def _samplers_with_option(option: str) -> str:
    return " or ".join(name for name, kind in SAMPLERS.items() if option in _fields(kind)) or "none"
