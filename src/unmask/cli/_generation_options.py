"""The options of commands that generate text, and the samplers and guidance that they choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from unmask.cli._arguments import Count, import_typed
from unmask.cli._signature import Option
from unmask.config import lookup, override

if TYPE_CHECKING:
    from unmask.diffusion.categorical import SamplingParams
    from unmask.guidance import Guidance
    from unmask.model import LanguageModel
    from unmask.sampling import Sampler

SAMPLER_OPTION = Option(family="unmask.sampling:SAMPLERS", extra_choices=("default",))

_CacheName = Literal["none", "prefix", "dual"]
_MeasureName = Literal["probability", "best-probability", "margin", "entropy"]
_RemaskingName = Literal["cap", "rescale", "conf"]
_LoopArg = Annotated[tuple[float, float, float] | None, Option(metavar="T_ON T_OFF ALPHA_ON")]


@dataclass(frozen=True)
class GenerationOptions:
    """The options that the three commands share."""

    n: Count = 1
    """Number of texts."""
    steps: int | None = None
    """Denoising steps, by default those that the model comes with, or 128; more are slower and usually better."""
    temperature: float | None = None
    """0 takes the most probable token, 1 samples from the model's distribution; by default what the model comes with,
    or 1."""
    top_k: int | None = None
    """Sample from the k most probable tokens only."""
    top_p: float | None = None
    """Sample from the most probable tokens that together reach p only."""
    seed: int = 0
    """Text i uses seed + i."""
    sampler: Annotated[str, SAMPLER_OPTION] = "default"
    """The order in which masked tokens are unmasked; the default is the sampler that the model comes with, or the one
    that reverses its process."""
    measure: _MeasureName | None = None
    """For confidence, threshold and factor: the measure of confidence, by default the probability of the drawn token;
    threshold and factor take that, or best-probability."""
    threshold: float | None = None
    """For threshold and joint-threshold: tokens above this probability are unmasked together; 0.9 by default."""
    min_tokens: int | None = None
    """For --sampler threshold: how many of the most probable tokens are unmasked in any case; 1 by default."""
    edit_threshold: float | None = None
    """For --sampler joint-threshold: a written token is replaced by another above this probability; 0.9 by default."""
    max_post_steps: int | None = None
    """For --sampler joint-threshold: steps that only replace tokens, once all are written; 16 by default."""
    stop_entropy: float | None = None
    """For --sampler confidence: nats per token below which predictions that do not change are all written at once."""
    stable_steps: int | None = None
    """For --sampler confidence: for so many steps predictions must not have changed (--stop-entropy); 1 by default."""
    factor: float | None = None
    """For --sampler factor: the larger, the more tokens are unmasked at once; 1 by default."""
    entropy_bound: float | None = None
    """For --sampler entropy-bounded: nats that may be lost by unmasking tokens together; 0.1 by default."""
    delayed_tokens: tuple[int, ...] = ()
    """For confidence, threshold, factor and entropy-bounded: ids of tokens that are unmasked last."""
    remasking: _RemaskingName | None = None
    """For --sampler remdm: the remasking schedule, rescale by default."""
    eta: float | None = None
    """For --sampler remdm: the strength of remasking, from 0 to 1; each --remasking has its own default."""
    loop: _LoopArg = None
    """For --sampler remdm: unmask a fraction ALPHA_ON by t = T_ON, then remask until T_OFF; as in 0.55 0.05 0.9."""
    sampler_option: tuple[str, ...] = ()
    """Any other field of the sampler, as FIELD=VALUE."""
    block_size: int | None = None
    """Generate from left to right in blocks of this many tokens, with --steps steps each."""
    sub_block_size: int | None = None
    """Fill a block in parts of this many tokens, from left to right, --steps steps each."""
    cache: _CacheName = "none"
    """KV cache within a block: of the tokens before it (prefix), or of all tokens around it (dual)."""
    stride: int | None = None
    """Tokens by which the window moves along a text that is longer than the window; half of it by default."""
    window: int | None = None
    """Tokens of the window, with --stride; the model's maximum by default."""
    cfg_scale: float = 0.0
    """Scale of classifier-free guidance by the visible text; 0 is none, others double the cost of a step."""
    regex: tuple[str, ...] = ()
    """A regular expression that the text of each hole must match; or one for each hole."""
    json_schema: Annotated[str | None, Option(metavar="FILE_OR_JSON")] = None
    """A JSON schema: the text of each hole is JSON that it describes."""
    grammar: Annotated[str | None, Option(metavar="FILE")] = None
    """A file with a grammar in GBNF, the format of llama.cpp, that the text of each hole must match."""
    both_strands: bool = False
    """For DNA: average predictions over both strands, at twice the cost."""
    watch: bool = False
    """Show the text on stderr after each step."""
    delay: float = 0.05
    """Seconds between the steps that --watch shows on a terminal."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay <= 60:
            raise ValueError(f"delay must be from 0 to 60 seconds; got {self.delay}")

    def build_guidance(self) -> Guidance | None:
        """Classifier-free guidance, and what the text of holes must match, if they are given."""
        from unmask.guidance import Guidance

        if not (self.cfg_scale or self.regex or self.json_schema or self.grammar):
            return None
        patterns = self.regex[0] if len(self.regex) == 1 else self.regex or None
        schema = None if self.json_schema is None else _read_source(self.json_schema, _is_schema, "a JSON schema")
        grammar = None if self.grammar is None else _read_source(self.grammar, is_grammar, "a grammar")
        return Guidance(self.cfg_scale, patterns, schema=schema, grammar=grammar)

    def build_sampler(self, lm: LanguageModel) -> Sampler:
        """The sampler of that name with its options; options of other samplers are errors."""
        from unmask.diffusion.categorical import SamplingParams
        from unmask.sampling.semi_autoregressive import SemiAutoregressive

        choice = SamplingParams.if_given(self.temperature, self.top_k, self.top_p)
        options = self._sampler_options()
        blocks = {"block_size": self.block_size, "sub_block_size": self.sub_block_size, "cache": self.cache}
        chosen = make_sampler(lm, self.sampler, self.steps, choice, blocks, **options)
        if self.sampler_option:
            chosen = _change_sampler(chosen, self.sampler_option)
        if self.steps is not None and chosen.steps is None:
            who = "this model's sampler" if self.sampler == "default" else f"the sampler {self.sampler}"
            raise ValueError(f"{who} chooses the number of steps itself; drop --steps")
        if self.stride is None:
            if self.window is not None:
                raise ValueError("--window needs --stride, the tokens by which the window moves")
            return chosen
        if not lm.denoiser.process.has_masks or chosen.inner is not None:
            raise ValueError("--stride is for masked diffusion without blocks; drop it")
        return SemiAutoregressive(self.stride, self.window, chosen)

    def _sampler_options(self) -> dict[str, object]:
        """The given options that belong to particular samplers."""
        from unmask.sampling.remdm import REMASKING_SCHEDULES, Loop

        remasking: object = self.remasking
        if self.eta is not None:
            remasking = replace(lookup(self.remasking or "rescale", REMASKING_SCHEDULES, "remasking"), eta=self.eta)
        named = {
            "measure": self.measure,
            "threshold": self.threshold,
            "factor": self.factor,
            "entropy_bound": self.entropy_bound,
            "min_tokens": self.min_tokens,
            "edit_threshold": self.edit_threshold,
            "max_post_steps": self.max_post_steps,
            "stable_steps": self.stable_steps,
            "stop_entropy": self.stop_entropy,
            "delayed_tokens": self.delayed_tokens or None,
            "remasking": remasking,
            "loop": None if self.loop is None else Loop(*self.loop),
        }
        return {name: value for name, value in named.items() if value is not None}


def _is_schema(text: str) -> bool:
    """Whether a text is meant as a JSON schema, not as the name of a file."""
    return text.lstrip().startswith("{") or text.strip() in ("true", "false")


def is_grammar(text: str) -> bool:
    """Whether a text is meant as a grammar, not as the name of a file."""
    return "::=" in text


def _read_source(given: str, is_source: Callable[[str], bool], what: str) -> str:
    """A schema or grammar: the text itself, or that of the file of this name."""
    if is_source(given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"the file {given[:80]!r} with {what} cannot be read: {reason}") from None


def make_sampler(
    lm: LanguageModel,
    name: str,
    steps: int | None,
    params: SamplingParams | None,
    blocks: Mapping[str, Any] = {},
    **options: Any,
) -> Sampler:
    """The sampler of a name in the table, or the one that the user typed as package.module:name.

    `blocks` are options of `Blockwise`.
    """
    from unmask.sampling import SAMPLERS, Blockwise, factory

    if ":" not in name:
        return factory.make_sampler(lm.denoiser, name, steps, params, **blocks, **options)
    found = import_typed(name, SAMPLERS.base)
    if isinstance(found, type):
        known = {field.name for field in fields(found)} if is_dataclass(found) else set()
        for option in options.keys() - known:
            raise ValueError(f"the sampler {name} has no field {option!r}")
        given = {"steps": 128 if steps is None else steps, **options}
        found = found(**{field: value for field, value in given.items() if field in known})
    elif not isinstance(found, SAMPLERS.base):
        found = found()
    sampler: Sampler = found
    if params is not None:  # else, an object of the user's keeps its own
        sampler = sampler.with_params(params, name)
    return sampler if blocks["block_size"] is None else Blockwise(sampler=sampler, end_ids=lm.end_ids, **blocks)


def _change_sampler(sampler: Sampler, changes: tuple[str, ...]) -> Sampler:
    """Change fields of a sampler, or of the one that fills the blocks."""
    inner = getattr(sampler, "sampler", None)
    if inner is None:
        return override(sampler, *changes, allow_code=True)
    changed: Sampler = replace(cast("Any", sampler), sampler=override(inner, *changes, allow_code=True))
    return changed
