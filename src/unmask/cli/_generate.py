"""`unmask sample`, `unmask complete` and `unmask infill`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from unmask.cli._arguments import (
    AllowCodeFlag,
    Count,
    InlineLoadOptions,
    JsonFlag,
    LoadOptions,
    ModelPath,
    TextArg,
    TextArgs,
    import_typed,
    load_distributed,
    print_json,
    warn_literal_masks,
)
from unmask.cli._signature import Inline, Option
from unmask.config import lookup, override

if TYPE_CHECKING:
    from unmask.diffusion.categorical import SamplingParams
    from unmask.guidance import Guidance
    from unmask.model import LanguageModel, Samples
    from unmask.sampling import Sampler
    from unmask.types import Tokens

SAMPLER_OPTION = Option(family="unmask.sampling:SAMPLERS", extra_choices=("default",))

_CacheName = Literal["none", "prefix", "dual"]
_MeasureName = Literal["probability", "margin", "entropy"]
_RemaskingName = Literal["cap", "rescale", "conf"]
_LoopArg = Annotated[tuple[float, float, float] | None, Option(metavar="T_ON T_OFF ALPHA_ON")]


@dataclass(frozen=True)
class GenerationOptions:
    """The options that the three commands share."""

    n: Count = 1
    """Number of texts."""
    steps: int | None = None
    """Denoising steps, 128 by default; more are slower and usually better."""
    temperature: float = 1.0
    """0 takes the most probable token, 1 samples from the model's distribution."""
    top_k: int | None = None
    """Sample from the k most probable tokens only."""
    top_p: float | None = None
    """Sample from the most probable tokens that together reach p only."""
    seed: int = 0
    """Text i uses seed + i."""
    sampler: Annotated[str, SAMPLER_OPTION] = "default"
    """The order in which masked tokens are unmasked; the default reverses the model's own process."""
    measure: _MeasureName | None = None
    """For --sampler confidence: the confidence measure, probability by default."""
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
        """Classifier-free guidance and regular expressions, if they are given."""
        from unmask.guidance import Guidance

        if not self.cfg_scale and not self.regex:
            return None
        patterns = self.regex[0] if len(self.regex) == 1 else self.regex or None
        return Guidance(self.cfg_scale, patterns)

    def build_sampler(self, lm: LanguageModel) -> Sampler:
        """The sampler of that name with its options; options of other samplers are errors."""
        from unmask.diffusion.categorical import SamplingParams
        from unmask.sampling.semi_autoregressive import SemiAutoregressive

        choice = SamplingParams(self.temperature, self.top_k, self.top_p)
        steps = 128 if self.steps is None else self.steps
        options = self._sampler_options()
        blocks = {"block_size": self.block_size, "sub_block_size": self.sub_block_size, "cache": self.cache}
        chosen = make_sampler(lm, self.sampler, steps, choice, blocks, **options)
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


def make_sampler(
    lm: LanguageModel,
    name: str,
    steps: int,
    params: SamplingParams,
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
        given = {"steps": steps, **options}
        found = found(**{field: value for field, value in given.items() if field in known})
    elif not isinstance(found, SAMPLERS.base):
        found = found()
    sampler: Sampler = found
    if params != type(params)():  # else, an object of the user's keeps its own
        sampler = sampler.with_params(params, name)
    return sampler if blocks["block_size"] is None else Blockwise(sampler=sampler, end_ids=lm.vocab.end_ids, **blocks)


def _change_sampler(sampler: Sampler, changes: tuple[str, ...]) -> Sampler:
    """Change fields of a sampler, or of the one that fills the blocks."""
    inner = getattr(sampler, "sampler", None)
    if inner is None:
        return override(sampler, *changes, allow_code=True)
    changed: Sampler = replace(cast("Any", sampler), sampler=override(inner, *changes, allow_code=True))
    return changed


_InlineOptions = Annotated[GenerationOptions, Inline()]


def sample(
    model: ModelPath,
    length: int | None = None,
    prompt: str = "",
    options: _InlineOptions = GenerationOptions(),  # noqa: B008
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Generate texts, from scratch or from a prompt.

    For example:
      unmask sample runs/demo --n 4 --length 16 --steps 16
      unmask sample runs/demo --watch
      torchrun --nproc_per_node 2 -m unmask sample runs/demo --count 64

    Args:
        model: A model folder, of unmask or in a published format, or a name on the hub.
        length: Tokens of a text; by default the model's maximum.
        prompt: The beginning of each text.
    """
    warn_literal_masks("a prompt", [prompt])
    with load_distributed(model, allow_code, options.both_strands, weights) as (lm, is_main):
        sampler = options.build_sampler(lm)
        canvas = lm.blank_canvas(options.n, length, prompt or ())
        dtype = compute_fastest(lm, weights)
        samples = _generate(lm, canvas, sampler, options, as_json)
    if is_main:
        _print_samples(samples, sampler, dtype, options, as_json)


def complete(
    model: ModelPath,
    prompts: TextArgs,
    length: int = 64,
    options: _InlineOptions = GenerationOptions(),  # noqa: B008
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Complete prompts, up to the end-of-text token if the model has one.

    For example:
      unmask complete runs/demo "import os" "def main(" --length 24
      unmask complete GSAI-ML/LLaDA-8B-Base "The capital of" --block-size 32 --steps 32 --cache prefix

    Args:
        model: A model folder, of unmask or in a published format, or a name on the hub.
        prompts: The prompts; they may differ in length, and the completions are those of each prompt alone.
        length: The largest number of tokens to generate.
    """
    with load_distributed(model, allow_code, options.both_strands, weights) as (lm, is_main):
        sampler = options.build_sampler(lm)
        lm.check_memory(options.n * len(prompts), length)
        dtype = compute_fastest(lm, weights)
        repeated = [prompt for prompt in prompts for _ in range(options.n)]
        samples = lm.complete(repeated, length, sampler=sampler, seed=options.seed, guidance=options.build_guidance())
    if is_main:
        _print_samples(samples, sampler, dtype, options, as_json, repeated)


def infill(
    model: ModelPath,
    template: TextArg,
    options: _InlineOptions = GenerationOptions(),  # noqa: B008
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Fill the holes of a text.

    For example:
      unmask infill runs/demo "Flat is <mask:2> nested."
      unmask infill runs/demo "year = <mask:4>" --regex "[12][0-9]{3}"

    Args:
        model: A model folder, of unmask or in a published format, or a name on the hub.
        template: Text with <mask:12> for twelve masked tokens, <mask> for one; any number of holes.
    """
    with load_distributed(model, allow_code, options.both_strands, weights) as (lm, is_main):
        sampler = options.build_sampler(lm)
        canvas = lm.encode_template(template, options.n)
        followed = bool(((canvas[0] == lm.vocab.mask_id).int().diff() < 0).any())
        if is_main and followed and not lm.uses_right_context:
            print(
                "unmask: this model reads from left to right: the text after a hole is kept, but does not influence it",
                file=sys.stderr,
            )
        dtype = compute_fastest(lm, weights)
        samples = _generate(lm, canvas, sampler, options, as_json)
    if is_main:
        _print_samples(samples, sampler, dtype, options, as_json)


def compute_fastest(lm: LanguageModel, weights: LoadOptions) -> str:
    """Compute large networks in bfloat16 where that is faster, unless a type is asked for; returns the type."""
    from unmask.pretrained import prefers_bf16

    denoiser = lm.denoiser
    if weights.dtype == "auto" and not weights.shard_weights and prefers_bf16(denoiser, lm.distributed):
        denoiser.to_bf16()
        denoiser.prepack()
    if weights.dtype in ("int8", "int4"):
        return weights.dtype
    return "bfloat16" if denoiser.use_bf16 else "float32"


def _generate(
    lm: LanguageModel, canvas: Tokens, sampler: Sampler, options: GenerationOptions, as_json: bool
) -> Samples:
    from unmask.cli._watch import watch

    if lm.distributed.world_size > 1:  # each process generates its own rows
        if options.watch:
            raise ValueError("--watch works with one process only; leave it out under torchrun")
        return lm.generate(canvas, sampler, options.seed, guidance=options.build_guidance())
    frames = lm.generate_steps(canvas, sampler, options.seed, guidance=options.build_guidance())
    if options.watch:
        return watch(frames, lm.vocab.mask_id, options.delay)
    return _last_frame_with_progress(frames, lm.vocab.mask_id, sampler, quiet=as_json)


def _last_frame_with_progress(frames: Iterator[Samples], mask_id: int, sampler: Sampler, quiet: bool) -> Samples:
    """The last frame. Progress is measured in unmasked tokens; in steps for uniform diffusion, which has no masks."""
    from unmask.cli._progress import progress
    from unmask.diffusion.process import Masking

    frame = next(frames)
    holes = int((frame.tokens == mask_id).sum())
    steps = None if Masking in sampler.processes else sampler.steps
    total, unit = (holes, "tokens") if steps is None else (steps, "steps")
    with progress("writing", total, unit, quiet) as report:
        for step, frame in enumerate(frames, start=1):
            report(step if steps else holes - int((frame.tokens == mask_id).sum()))
    return frame


def _print_samples(
    samples: Samples,
    sampler: Sampler,
    dtype: str,
    options: GenerationOptions,
    as_json: bool,
    prompts: Sequence[str] = (),
) -> None:
    """Print the texts; with separators if several texts have several lines or prompts."""
    texts = None if samples.tokenizer is None else samples.texts
    steps, calls = sampler.steps, samples.nfe
    if as_json:
        result = {"texts": texts, "tokens": samples.ids, "steps": steps, "nfe": calls, "dtype": dtype}
        print_json({**result, "prompts": list(prompts)} if prompts else result)
        return
    rows = texts or [" ".join(map(str, ids)) for ids in samples.ids]
    several = len(set(prompts)) > 1
    apart = len(rows) > 1 and (several or any("\n" in row for row in rows))
    for number, row in enumerate(rows, start=1):
        after = f"after {_abbreviate_prompt(prompts[number - 1])} " if several else ""
        print(f"{f'─── {number} of {len(rows)} {after}':─<60}\n{row}" if apart else row)
    if options.steps not in (None, calls) and sys.stderr.isatty():
        print(f"{steps} steps, {calls} network evaluations (NFE)", file=sys.stderr)


def _abbreviate_prompt(prompt: str) -> str:
    """A prompt, or its end if it is long."""
    shown = repr(prompt)
    return shown if len(shown) <= 40 else f"...{shown[-37:]}"
