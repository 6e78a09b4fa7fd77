"""Samplers by name, with the options of commands and requests."""

from __future__ import annotations

from typing import Any

from unmask.config import lookup
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.sampling import PROCESS_SAMPLERS, SAMPLERS
from unmask.sampling.ancestral import Ancestral
from unmask.sampling.base import Sampler
from unmask.sampling.blockwise import CACHE_POLICIES, Blockwise

_DEFAULT_PARAMS = SamplingParams()


def default_sampler(denoiser: DenoiserLike, steps: int = 128, params: SamplingParams = _DEFAULT_PARAMS) -> Sampler:
    """The sampler that reverses the model's process as it is defined; `steps` are per block where there are blocks."""
    process = denoiser.process
    if process.block_size is not None:
        return Blockwise(sampler=Ancestral(steps, params), end_ids=denoiser.vocab.end_ids)
    name = process.default_sampler
    kind = SAMPLERS.find(name) if ":" in name else lookup(name, {**SAMPLERS, **PROCESS_SAMPLERS}, "sampler")
    return _build(kind, steps, params)


def make_sampler(
    denoiser: DenoiserLike,
    name: str = "default",
    steps: int = 128,
    params: SamplingParams = _DEFAULT_PARAMS,
    *,
    block_size: int | None = None,
    sub_block_size: int | None = None,
    cache: str = "none",
    **options: Any,
) -> Sampler:
    """The sampler of this name in `SAMPLERS`, or the model's default; samplers without steps ignore `steps`.

    With a `block_size`, text is generated from left to right in blocks, `steps` counts the steps per block (or per
    sub-block), and `cache` names what is cached meanwhile: none, prefix or dual. `options` are fields of the sampler.
    """
    exact = denoiser.process.block_size is not None
    policy = lookup(cache, CACHE_POLICIES, "cache")
    if cache != "none" and (exact or block_size is None):
        why = "this model has an exact one" if exact else "say how long a block is"
        raise ValueError(f"a {cache} cache is for masked diffusion that is written in blocks: {why}")
    if sub_block_size is not None and block_size is None and not exact:
        raise ValueError("sub_block_size is for text that is written in blocks: say how long a block is")
    if name == "default" and block_size is None and sub_block_size is None:
        for option in options:
            raise ValueError(f"{option} is for {_samplers_with_option(option)}: name that sampler, too")
        return default_sampler(denoiser, steps, params)
    kind = lookup("confidence" if name == "default" else name, SAMPLERS, "sampler")
    sampler = _build(kind, steps, params, **options)
    if block_size is None and not exact:
        return sampler
    return Blockwise(block_size, sampler, policy, denoiser.vocab.end_ids, sub_block_size)


def resolve_sampler(denoiser: DenoiserLike, sampler: Sampler | str | None) -> Sampler:
    """A sampler that is given as an object, by its name, or not at all: then the model's default."""
    if sampler is None or isinstance(sampler, str):
        return make_sampler(denoiser, sampler or "default")
    if not isinstance(sampler, Sampler):
        raise ValueError(f"sampler must be a Sampler, as in unmask.Ancestral(steps=64), or one's name; got {sampler!r}")
    return sampler


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
