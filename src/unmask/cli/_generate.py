"""`unmask sample`, `unmask complete` and `unmask infill`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unmask.cli._arguments import (
    AllowCodeFlag,
    FileOptions,
    InlineFileOptions,
    InlineLoadOptions,
    JsonFlag,
    LoadOptions,
    ModelPath,
    TextArg,
    TextArgs,
    load_distributed,
    print_json,
    warn_literal_masks,
)
from unmask.cli._generation_options import GenerationOptions
from unmask.cli._signature import Inline

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.batches import Task
    from unmask.model import LanguageModel, Samples
    from unmask.sampling import Sampler
    from unmask.types import Tokens


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
    prompts: TextArgs = (),
    length: int = 64,
    files: InlineFileOptions = FileOptions(),  # noqa: B008
    options: _InlineOptions = GenerationOptions(),  # noqa: B008
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Complete prompts, up to the end-of-text token if the model has one.

    For example:
      unmask complete runs/demo "import os" "def main(" --length 24
      unmask complete GSAI-ML/LLaDA-8B-Base "The capital of" --block-size 32 --steps 32 --cache prefix
      unmask complete runs/demo --input prompts.jsonl --output completions.jsonl --length 24

    A line of --input is {"prompt": "import os"}, with max_tokens, n, seed, temperature, regex, response_format, grammar
    or steps of its own if it has any.

    Args:
        model: A model folder, of unmask or in a published format, or a name on the hub.
        prompts: The prompts; they may differ in length, and the completions are those of each prompt alone.
        length: The largest number of tokens to generate.
    """
    if files.input is not None:
        from unmask.cli._requests import CompletionTask

        files.refuse_others(PROMPTS=prompts)
        task = partial(CompletionTask, length=length)
        _answer_file(model, files, options, weights, as_json, allow_code, task, command="complete", length=length)
        return
    files.refuse_unused()
    if not prompts:
        raise ValueError("there is nothing to complete: give prompts, or a file of requests with --input")
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
    template: TextArg = "",
    files: InlineFileOptions = FileOptions(),  # noqa: B008
    options: _InlineOptions = GenerationOptions(),  # noqa: B008
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Fill the holes of a text.

    For example:
      unmask infill runs/demo "Flat is <mask:2> nested."
      unmask infill runs/demo "for i in <mask:1..6>:" --n 3
      unmask infill runs/demo "year = <mask:4>" --regex "[12][0-9]{3}"
      unmask infill runs/demo "point = <mask:16>" --json-schema '{"properties": {"x": {"type": "integer"}}}'
      unmask infill runs/demo --input templates.jsonl --output filled.jsonl --steps 16
      unmask infill runs/demo --input - < templates.jsonl
      torchrun --nproc_per_node 2 -m unmask infill runs/demo --input templates.jsonl --output both.jsonl

    A line of --input is {"template": "x = <mask:3>"}, with n, seed, temperature, regex, response_format, grammar,
    sampler or steps of its own if it has any. Line i without a seed begins at seed + (i - 1) n. A line that is wrong is
    told, answered by an error, and does not stop the others; the exit code is 4 then.

    Args:
        model: A model folder, of unmask or in a published format, or a name on the hub.
        template: Text with <mask:12> for twelve masked tokens, <mask> for one, <mask:3..12> or <mask:*> for as many as
            the model finds probable; any number of holes.
    """
    if files.input is not None:
        from unmask.cli._requests import InfillTask

        files.refuse_others(TEMPLATE=template)
        _answer_file(model, files, options, weights, as_json, allow_code, InfillTask, command="infill")
        return
    files.refuse_unused()
    if not template:
        raise ValueError("there is nothing to fill: give a template, or a file of requests with --input")
    with load_distributed(model, allow_code, options.both_strands, weights) as (lm, is_main):
        sampler = options.build_sampler(lm)
        canvas, valid = lm.infill_canvas([template], options.n, options.seed)
        followed = bool(((canvas[0] == lm.vocab.mask_id).int().diff() < 0).any())
        if is_main and followed and not lm.uses_right_context:
            print(
                "unmask: this model reads from left to right: the text after a hole is kept, but does not influence it",
                file=sys.stderr,
            )
        dtype = compute_fastest(lm, weights)
        samples = _generate(lm, canvas, sampler, options, as_json, valid)
    if is_main:
        _print_samples(samples, sampler, dtype, options, as_json)


def _answer_file(
    model: Path,
    files: FileOptions,
    options: GenerationOptions,
    weights: LoadOptions,
    as_json: bool,
    allow_code: bool,
    make_task: Callable[[LanguageModel, GenerationOptions], Task],
    **settings: object,
) -> None:
    """Answer the requests of a file; `settings` are options that only one command has."""
    from unmask.cli._batches import FileCommand

    files.refuse_others(json=as_json, watch=options.watch)
    shared = {name: value for name, value in asdict(options).items() if name not in ("watch", "delay")}
    shared |= asdict(weights)
    FileCommand(
        model,
        files,
        {**settings, **shared},
        options.seed,
        lambda lm: make_task(lm, options),
        lambda lm, chosen: compute_fastest(lm, weights, chosen),
        weights=weights,
        allow_code=allow_code,
        both_strands=options.both_strands,
    ).run()


def compute_fastest(lm: LanguageModel, weights: LoadOptions, chosen: str | None = None, replace: bool = True) -> str:
    """Compute large networks in bfloat16 where that is faster, or was `chosen` before, unless a type is asked for.

    Returns the type. `replace` is that of `prepack`.
    """
    from unmask.pretrained import prefers_bf16

    denoiser = lm.denoiser
    may_choose = weights.dtype == "auto" and not weights.shard_weights
    if may_choose and (prefers_bf16(denoiser, lm.distributed) if chosen is None else chosen == "bfloat16"):
        denoiser.to_bf16()
        denoiser.prepack(replace)
    if weights.dtype in ("int8", "int4"):
        return weights.dtype
    return "bfloat16" if denoiser.use_bf16 else "float32"


def _generate(
    lm: LanguageModel,
    canvas: Tokens,
    sampler: Sampler,
    options: GenerationOptions,
    as_json: bool,
    valid: Tensor | None = None,
) -> Samples:
    from unmask.cli._watch import watch

    if lm.distributed.world_size > 1:  # each process generates its own rows
        if options.watch:
            raise ValueError("--watch works with one process only; leave it out under torchrun")
        return lm.generate(canvas, sampler, options.seed, valid, options.build_guidance())
    frames = lm.generate_steps(canvas, sampler, options.seed, valid, options.build_guidance())
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
            report(min(step, steps) if steps else holes - int((frame.tokens == mask_id).sum()))
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
