"""`unmask eval` and `unmask eval-samples`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from unmask.cli._arguments import (
    AllowCodeFlag,
    BothStrandsFlag,
    Count,
    InlineLoadOptions,
    JsonFlag,
    LoadOptions,
    ModelPath,
    ResultsPath,
    TextArgs,
    allow_imports,
    load_distributed,
    model_fingerprint,
    validate_output,
    warn_if_imprecise,
    write_results,
)
from unmask.cli._generation_options import SAMPLER_OPTION, make_sampler
from unmask.cli._orders import EvaluatedOrders, OrderOptions, evaluate_orders, report_orders
from unmask.cli._signature import Inline
from unmask.cli._tasks import TaskOptions, evaluate_tasks
from unmask.report.formatting import format_estimate, print_table

if TYPE_CHECKING:
    from unmask.data.corpus import Corpus
    from unmask.evaluation.datasets import ResolvedDataset
    from unmask.evaluation.sample_metrics import SampleMetrics
    from unmask.likelihood.corpus import EvalConfig
    from unmask.likelihood.score import Score
    from unmask.model import LanguageModel

_MDLM_ZERO_SHOT = "mdlm-zero-shot"
"""Stands for the seven text sets of the MDLM paper's zero-shot table."""


def evaluate(
    model: ModelPath,
    sources: TextArgs = (),
    folder: Path | None = None,
    windows: int | None = None,
    replicates: int = 8,
    precision: float | None = None,
    per_document: bool = False,
    lines: bool = False,
    field: str = "text",
    column: str = "text",
    order_options: Annotated[OrderOptions, Inline()] = OrderOptions(),  # noqa: B008
    task_options: Annotated[TaskOptions, Inline()] = TaskOptions(),  # noqa: B008
    seed: int = 0,
    both_strands: BothStrandsFlag = False,
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    out: ResultsPath = None,
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Evaluate a model on texts or tasks: perplexity and bits per byte, or accuracy, with standard errors.

    For example:
      unmask eval runs/demo/model my_test.txt
      unmask eval runs/demo/model runs/demo/corpus
      unmask eval runs/demo/model lambada ptb wikitext --folder text_sets/ --precision 0.005
      unmask eval runs/demo/model mdlm-zero-shot
      unmask eval runs/demo/model my_test.txt --windows 8 --order left-to-right confidence random
      unmask eval runs/demo/model --tasks sums --include-path my_tasks/ --limit 8
      torchrun --nproc_per_node 2 -m unmask eval runs/demo/model my_test.txt

    Under `torchrun` the processes share the work; the results are the same.

    Args:
        model: A model folder with a tokenizer.
        sources: Files or folders, as `unmask prepare` takes them; names of text sets (ptb, wikitext, lm1b,
            lambada, ag_news, arxiv, pubmed; also ptb:validation or ptb:raw); mdlm-zero-shot, for all seven; or the
            folder of a prepared corpus, such as RUN/corpus, for its held-out part. Leave them out with --tasks.
        folder: The folder with the files of named text sets; by default they come from the hub.
        windows: Evaluate only this many windows, spread evenly over each text; all by default.
        replicates: Passes over the text, each with new times and masks; more passes give a smaller error.
        precision: Repeat until the standard error is this fraction of the nats, 0.01 for 1 %.
        per_document: One document per row, instead of windows of the concatenated text.
        lines: Every line of a text file is a document.
        field: The field of JSON lines that holds the text.
        column: The column of tables that holds the text.
        seed: The seed of times and masks.
    """
    validate_output(out)
    if task_options.tasks:
        if sources:
            raise ValueError(f"evaluate on texts or on tasks, one after the other: {sources[0]} is a text")
        evaluate_tasks(model, task_options, seed, both_strands, weights, out, as_json, allow_code)
        return
    from unmask.data.readers import SourceConfig
    from unmask.evaluation.evaluate import eval_layout, tokenize_dataset
    from unmask.likelihood.corpus import EvalConfig

    config = EvalConfig(windows, replicates, precision, seed)
    evaluated: list[_EvaluatedText] = []
    orders: list[EvaluatedOrders] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        texts, missing = _resolve_datasets(sources, scratch, folder, SourceConfig(lines, field, column), allow_code)
        lm, is_main = stack.enter_context(
            load_distributed(model, allow_code, both_strands, weights, require_tokenizer=True)
        )
        corpora = [tokenize_dataset(lm, text, scratch / str(number)) for number, text in enumerate(texts)]
        for text, corpus in zip(texts, corpora, strict=True):
            quiet = as_json or not is_main
            if order_options.order:
                layout = eval_layout(lm, corpus, per_document)
                orders.append(evaluate_orders(lm, text, corpus, layout, order_options, windows, seed, quiet))
            else:
                evaluated.append(_evaluate_text(lm, text, corpus, per_document, config, quiet))
        digest = model_fingerprint(model)
    if is_main and orders:
        report_orders(orders, missing, seed, digest, out, as_json)
    elif is_main:
        _report_scores(evaluated, missing, config, digest, out, as_json)
    for sentence in missing.values():
        print(f"unmask: {sentence}", file=sys.stderr)
    if missing:
        sys.exit(1)


@dataclass(frozen=True)
class _EvaluatedText:
    """A text with its score, and how it was computed."""

    text: ResolvedDataset
    corpus: Corpus
    score: Score
    recipe: str


def _evaluate_text(
    lm: LanguageModel, text: ResolvedDataset, corpus: Corpus, per_document: bool, config: EvalConfig, quiet: bool
) -> _EvaluatedText:
    from unmask.cli._progress import progress
    from unmask.evaluation.evaluate import eval_layout, evaluate_dataset, num_windows

    layout = eval_layout(lm, corpus, per_document)
    total = num_windows(corpus, layout, config) if config.precision is None else None
    with progress(text.name, total, "windows", quiet) as report:
        score = evaluate_dataset(lm, text, corpus, per_document, config, report)
    return _EvaluatedText(text, corpus, score, text.describe_recipe(lm, corpus, layout, config))


def _report_scores(
    evaluated: list[_EvaluatedText],
    missing: dict[str, str],
    config: EvalConfig,
    model: Mapping[str, str],
    out: Path | None,
    as_json: bool,
) -> None:
    fingerprints = {each.text.name: each.text.fingerprint for each in evaluated}
    metrics = [
        {
            "name": each.text.name,
            "origin": each.text.origin,
            "per_word": each.text.per_word,
            "data": each.corpus.digest,
            "recipe": each.recipe,
            **each.score.to_dict(),
        }
        for each in evaluated
    ]
    for each in evaluated:
        warn_if_imprecise(each.text.name, each.score.standard_error / each.score.nats_per_token, config.precision)
    if not write_results({"texts": metrics, "missing": missing}, config.seed, fingerprints, model, out, as_json):
        _print_scores(evaluated)
        for each in evaluated:
            if each.text.recipe is not None:  # a named set, whose figures others have published
                print(f"{each.text.name}: {each.recipe}")


def eval_samples(
    model: ModelPath,
    reference_model: str | None = None,
    samplers: Annotated[tuple[str, ...], SAMPLER_OPTION] = ("default",),
    steps: tuple[int, ...] = (8, 32, 128),
    n: Count = 16,
    length: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    own_law: bool = False,
    seed: int = 0,
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    out: ResultsPath = None,
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Evaluate samples: generative perplexity, entropy, repetition and time, by sampler and number of steps.

    For example:
      unmask eval-samples runs/demo/model --reference-model my_causal_model/ --samplers ancestral confidence
      unmask eval-samples runs/demo/model --steps 4 16 64 --n 32 --out runs/demo/sample_evals.json

    Generative perplexity is low for good text, and also for text that repeats itself: compare it together with
    the entropy.

    Args:
        model: A model folder with a tokenizer.
        reference_model: The causal language model that scores the samples: a folder, a .gguf file or a name on
            the hub; without one, generative perplexity is left out.
        samplers: The samplers to compare.
        steps: The numbers of steps to compare.
        n: Number of samples for each setting.
        length: Tokens of a sample; by default the model's maximum.
        temperature: See `unmask sample`.
        top_k: See `unmask sample`.
        top_p: See `unmask sample`.
        own_law: Also say what the samples cost in nats per token under the law of the sampler that wrote them, where it
            is known: its entropy, which falls where tokens are written together. It takes once or twice the time.
        seed: Sample i uses seed + i.
    """
    from unmask.cli._progress import progress
    from unmask.diffusion.categorical import SamplingParams
    from unmask.evaluation.evaluate import SamplerSpec, evaluate_samples
    from unmask.evaluation.reference_model import CausalReferenceModel

    if not samplers or not steps:
        raise ValueError("--samplers and --steps need at least one value each")
    validate_output(out)
    metrics: list[SampleMetrics] = []
    with load_distributed(model, allow_code, options=weights, require_tokenizer=True) as (lm, is_main):
        specs: dict[str, SamplerSpec] = {}
        for name, count in product(samplers, steps):
            sampler = make_sampler(lm, name, count, SamplingParams.if_given(temperature, top_k, top_p))
            specs.setdefault(repr(sampler), SamplerSpec(name, sampler.steps, sampler))
        reference = None if reference_model is None else CausalReferenceModel.load(reference_model)
        with progress("evaluating", len(specs), "samplers", quiet=as_json or not is_main) as report:
            for number, spec in enumerate(specs.values(), start=1):
                metrics.append(evaluate_samples(lm, spec, n, length, seed, reference, own_law))
                report(number)
        digest = model_fingerprint(model)
    data = {} if reference is None else {"reference_model": f"sha256:{reference.digest()}"}
    results = {"sample_evals": [asdict(each) for each in metrics]}
    if is_main and not write_results(results, seed, data, digest, out, as_json):
        _print_sample_metrics(metrics, own_law)


def _resolve_datasets(
    sources: tuple[str, ...], scratch: Path, folder: Path | None, options: object, allow_code: bool
) -> tuple[list[ResolvedDataset], dict[str, str]]:
    """All texts, and of the paper's seven, why some are missing."""
    from unmask.data.readers import SourceConfig
    from unmask.evaluation.datasets import MDLM_ZERO_SHOT, resolve_dataset

    assert isinstance(options, SourceConfig)
    allow_imports(allow_code)
    texts, missing = [], {}
    for number, name in enumerate(sources):
        for each in MDLM_ZERO_SHOT if name == _MDLM_ZERO_SHOT else (name,):
            try:
                texts.append(resolve_dataset(each, scratch / f"set-{number}", folder, options, allow_code=allow_code))
            except ValueError as error:
                if name != _MDLM_ZERO_SHOT:
                    raise
                missing[each] = f"{each} is missing: {error}"
    if not texts:
        first = next(iter(missing.values()), "name files or text sets")
        more = f" (and so are {len(missing) - 1} more: {', '.join(list(missing)[1:])})" if missing else ""
        raise ValueError(f"there is no text to evaluate: {first}{more}")
    return texts, missing


def _print_scores(evaluated: Sequence[_EvaluatedText]) -> None:
    header = ("text", "nats/token", "perplexity", "bits/byte", "bits/character", "perplexity/word", "tokens")
    lines = []
    for each in evaluated:
        f = {name: value for name, value in each.score.to_dict().items() if isinstance(value, int | float)}
        lines.append(
            (
                each.text.name,
                format_estimate(f["nats_per_token"], f["standard_error"]),
                format_estimate(f["perplexity"], f["perplexity_error"]),
                format_estimate(f["bits_per_byte"], f["bits_per_byte_error"]),
                format_estimate(f["bits_per_character"], f["bits_per_character_error"]),
                format_estimate(f["word_perplexity"], f["word_perplexity_error"]),
                f"{each.score.tokens:,}",
            )
        )
    print_table(header, lines)


def _print_sample_metrics(metrics: Sequence[SampleMetrics], own_law: bool) -> None:
    header = ["sampler", "steps", "perplexity", "entropy", "distinct-2", "repetition", "nfe", "seconds"]
    header += ["own nats/token"] if own_law else []
    lines = [
        (
            each.sampler,
            "" if each.steps is None else str(each.steps),
            format_estimate(each.perplexity, each.perplexity_error),
            format_estimate(each.entropy, each.entropy_error),
            format_estimate(each.distinct_2, None),
            format_estimate(each.repetition, None),
            str(each.nfe),
            f"{each.seconds:.1f}",
            *([_format_own_nats(each)] if own_law else []),
        )
        for each in metrics
    ]
    print_table(header, lines)
    if any(each.steps not in (None, each.nfe) for each in metrics):
        print("nfe is below steps where a step has no token to unmask", file=sys.stderr)
    unknown = {each.sampler for each in metrics if each.own_nats_at_most is None} if own_law else ()
    for name in sorted(unknown):
        print(f"own nats are not known for {name}: what it draws decides where it writes", file=sys.stderr)
    if metrics[0].reference_model is not None:
        print(f"reference model: {metrics[0].reference_model}")


def _format_own_nats(metrics: SampleMetrics) -> str:
    """Exact, or from both sides."""
    at_most = format_estimate(metrics.own_nats_at_most, metrics.own_nats_error)
    if metrics.own_nats_at_least in (None, metrics.own_nats_at_most):
        return at_most
    return f"{format_estimate(metrics.own_nats_at_least, metrics.own_nats_error)} to {at_most}"
