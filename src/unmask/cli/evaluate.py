"""Commands that measure: eval, eval-samples, report."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from unmask.cli.arguments import (
    Count,
    JsonFlag,
    ModelPath,
    ResultsPath,
    TextArgs,
    load_distributed,
    model_fingerprint,
    validate_output,
    warn_if_imprecise,
    write_results,
)
from unmask.cli.generate import SAMPLER_OPTION, sampler_steps
from unmask.cli.table import estimate_cell, print_table

if TYPE_CHECKING:
    from unmask.data.corpus import Corpus
    from unmask.evaluation.datasets import ResolvedDataset
    from unmask.evaluation.sample_metrics import SampleMetrics
    from unmask.likelihood.score import Score

_MDLM_ZERO_SHOT = "mdlm-zero-shot"
"""Stands for the seven text sets of the MDLM paper's zero-shot table."""


def evaluate(
    model: ModelPath,
    sources: TextArgs,
    folder: Path | None = None,
    windows: int | None = None,
    replicates: int = 8,
    precision: float | None = None,
    per_document: bool = False,
    lines: bool = False,
    field: str = "text",
    column: str = "text",
    seed: int = 0,
    out: ResultsPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a model on texts: one line each, every figure with its standard error.

    For example:
      unmask eval runs/demo/model my_test.txt
      unmask eval runs/demo/model runs/demo/corpus
      unmask eval runs/demo/model lambada ptb wikitext --folder text_sets/ --precision 0.005
      unmask eval runs/demo/model mdlm-zero-shot
      torchrun --nproc_per_node 2 -m unmask eval runs/demo/model my_test.txt

    Under `torchrun` the processes share the work, and the figures stay the same.

    Args:
        model: A model folder with a tokenizer.
        sources: Files or folders, as `unmask prepare` takes them; names of text sets (ptb, wikitext, lm1b,
            lambada, ag_news, arxiv, pubmed; also ptb:validation or ptb:raw); mdlm-zero-shot, for all seven; or the
            folder of a prepared corpus, such as RUN/corpus, for its held-out part.
        folder: Where the files of named text sets are; without it they come from the hub.
        windows: Only so many windows, spread evenly over each text; all, if not given.
        replicates: Passes over the text, each with fresh times and masks; more make the error smaller.
        precision: Pass as often as it takes for a standard error of this share of the nats, 0.01 for 1 %.
        per_document: One document a row, instead of windows of running text.
        lines: Every line of a text file is a document.
        field: The field of JSON lines that holds the text.
        column: The column of tables that holds the text.
        seed: Of the times and masks.
    """
    from unmask.cli.progress import progress
    from unmask.data.readers import SourceConfig
    from unmask.evaluation.evaluate import (
        eval_layout,
        evaluate_dataset,
        num_windows,
        tokenize_dataset,
    )
    from unmask.likelihood.corpus import EvalConfig

    validate_output(out)
    effort = EvalConfig(windows, replicates, precision, seed)
    measured: list[tuple[ResolvedDataset, Corpus, Score]] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        texts, missing = _resolve_datasets(sources, scratch, folder, SourceConfig(lines, field, column))
        lm, speaks = stack.enter_context(load_distributed(model))
        lm.denoiser.prepack()
        corpora = [tokenize_dataset(lm, text, scratch / str(number)) for number, text in enumerate(texts)]
        for text, corpus in zip(texts, corpora, strict=True):
            total = num_windows(corpus, eval_layout(lm, corpus, per_document), effort) if precision is None else None
            with progress(text.name, total, "windows", quiet=as_json or not speaks) as report:
                result = evaluate_dataset(lm, text, corpus, per_document, effort, report)
            measured.append((text, corpus, result))
        digest = model_fingerprint(model)
    if speaks:
        identities = {text.name: text.fingerprint for text, _, _ in measured}
        figures = [
            {"name": t.name, "origin": t.origin, "per_word": t.per_word, "data": c.digest, **s.to_dict()}
            for t, c, s in measured
        ]
        for text, _, s in measured:
            warn_if_imprecise(text.name, s.standard_error / s.nats_per_token, precision)
        if not write_results({"texts": figures, "missing": missing}, seed, identities, digest, out, as_json):
            _print_scores(measured)
    for sentence in missing.values():
        print(f"unmask: {sentence}", file=sys.stderr)
    if missing:
        sys.exit(1)


def eval_samples(
    model: ModelPath,
    reference_model: str | None = None,  # the option's name is the command's
    samplers: Annotated[tuple[str, ...], SAMPLER_OPTION] = ("default",),
    steps: tuple[int, ...] = (8, 32, 128),
    n: Count = 16,
    length: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    out: ResultsPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what a model writes: a judge's perplexity, entropy, repetition and time, by steps and sampler.

    For example:
      unmask eval-samples runs/demo/model --reference-model my_causal_model/ --samplers ancestral confidence
      unmask eval-samples runs/demo/model --steps 4 16 64 --n 32 --out runs/demo/sample_evals.json

    A judge that knows the language gives low perplexity to good text, and also to text that repeats itself:
    read it beside the entropy.

    Args:
        model: A model folder with a tokenizer.
        reference_model: A causal language model: a folder, a .gguf file or a name on the hub; without one, only what
            needs no judge is measured.
        samplers: The samplers to compare.
        steps: The numbers of steps to compare.
        n: How many texts each.
        length: How many tokens each; the model's longest if not given.
        temperature: As of `unmask sample`.
        top_k: As of `unmask sample`.
        top_p: As of `unmask sample`.
        seed: Text i is drawn with seed + i.
    """
    from unmask.cli.progress import progress
    from unmask.diffusion.categorical import SamplingParams
    from unmask.evaluation.evaluate import SamplerSpec, evaluate_samples, metrics_to_json
    from unmask.evaluation.reference_model import CausalReferenceModel

    if not samplers or not steps:
        raise ValueError("--samplers and --steps need at least one value each")
    validate_output(out)
    measured: list[SampleMetrics] = []
    with load_distributed(model) as (lm, speaks):
        lm.denoiser.prepack()
        contestants: dict[str, SamplerSpec] = {}
        for name in samplers:
            for count in steps:
                built = lm.make_sampler(name, count, SamplingParams(temperature, top_k, top_p))
                contestants.setdefault(repr(built), SamplerSpec(name, sampler_steps(built), built))
        judging = None if reference_model is None else CausalReferenceModel.load(reference_model)
        with progress("judging", len(contestants), "samplers", quiet=as_json or not speaks) as report:
            for number, contestant in enumerate(contestants.values(), start=1):
                measured.append(evaluate_samples(lm, contestant, n, length, seed, judging))
                report(number)
        digest = model_fingerprint(model)
    data = {} if judging is None else {"reference_model": f"sha256:{judging.digest()}"}
    if speaks and not write_results({"sample_evals": metrics_to_json(measured)}, seed, data, digest, out, as_json):
        _print_sample_metrics(measured)


def report(
    run: ModelPath,
    out: Path | None = None,
    windows: int = 80,
    samples: int = 4,
    steps: int = 64,
    seed: int = 0,
) -> None:
    """Write a run's report: one HTML page with curves, the bound per time, samples and settings.

    For example:
      unmask report runs/demo

    Args:
        run: The folder of a run, finished or not.
        out: Where the report goes; RUN/report if not given.
        windows: How many held-out windows are measured.
        samples: How many texts are written, with the order in which their tokens were revealed.
        steps: In how many steps.
        seed: Of the measurement and the samples.
    """
    from unmask.cli.progress import progress
    from unmask.report import ReportConfig, write_report

    settings = ReportConfig(windows=windows, samples=samples, steps=steps, seed=seed)
    print(write_report(run, out, settings, progress))


def _resolve_datasets(
    sources: tuple[str, ...], scratch: Path, folder: Path | None, options: object
) -> tuple[list[ResolvedDataset], dict[str, str]]:
    """All texts, before any is measured; of the paper's seven, those that are not to be had are named."""
    from unmask.data.readers import SourceConfig
    from unmask.evaluation.datasets import MDLM_ZERO_SHOT, resolve_dataset

    assert isinstance(options, SourceConfig)
    texts, missing = [], {}
    for number, name in enumerate(sources):
        for each in MDLM_ZERO_SHOT if name == _MDLM_ZERO_SHOT else (name,):
            try:
                texts.append(resolve_dataset(each, scratch / f"set-{number}", folder, options))
            except ValueError as error:
                if name != _MDLM_ZERO_SHOT:
                    raise
                missing[each] = f"{each} is missing: {error}"
    if not texts:
        first = next(iter(missing.values()), "name files or text sets")
        more = f" (and so are {len(missing) - 1} more: {', '.join(list(missing)[1:])})" if missing else ""
        raise ValueError(f"there is no text to measure: {first}{more}")
    return texts, missing


def _print_scores(measured: list[tuple[ResolvedDataset, Corpus, Score]]) -> None:
    header = ("text", "nats/token", "perplexity", "bits/byte", "bits/character", "perplexity/word", "tokens")
    lines = []
    for text, _, score in measured:
        f = {name: value for name, value in score.to_dict().items() if isinstance(value, int | float)}
        lines.append(
            (
                text.name,
                estimate_cell(f["nats_per_token"], f["standard_error"]),
                estimate_cell(f["perplexity"], f["perplexity_error"]),
                estimate_cell(f["bits_per_byte"], f["bits_per_byte_error"]),
                estimate_cell(f["bits_per_character"], f["bits_per_character_error"]),
                estimate_cell(f["word_perplexity"], f["word_perplexity_error"]),
                f"{score.tokens:,}",
            )
        )
    print_table(header, lines)


def _print_sample_metrics(measured: list[SampleMetrics]) -> None:
    header = ("sampler", "steps", "perplexity", "entropy", "distinct-2", "repetition", "nfe", "seconds")
    lines = [
        (
            each.sampler,
            "" if each.steps is None else str(each.steps),
            estimate_cell(each.perplexity, each.perplexity_error),
            estimate_cell(each.entropy, each.entropy_error),
            estimate_cell(each.distinct_2, None),
            estimate_cell(each.repetition, None),
            str(each.nfe),
            f"{each.seconds:.1f}",
        )
        for each in measured
    ]
    print_table(header, lines)
    if any(each.steps not in (None, each.nfe) for each in measured):
        print("steps were asked for, calls made: a step with nothing to write needs none", file=sys.stderr)
    if measured[0].reference_model is not None:
        print(f"reference model: {measured[0].reference_model}")
