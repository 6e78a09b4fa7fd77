"""Commands that measure: eval, score, judge, report."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from unmask.cli.arguments import (
    Json,
    Model,
    Number,
    Out,
    Texts,
    check_out,
    check_precision,
    model_digest,
    publish,
    shared_model,
)
from unmask.cli.table import plus_minus, print_table
from unmask.cli.writing import SamplerName, asked_steps

if TYPE_CHECKING:
    from unmask.data.corpus import Corpus
    from unmask.evaluation.generative import Generated
    from unmask.evaluation.score import Score
    from unmask.evaluation.textsets import FetchedSet

PAPER = "paper"
"""Stands for the seven text sets of the MDLM paper's zero-shot table."""


def score(
    model: Model,
    texts: Texts,
    draws: int = 64,
    precision: float | None = None,
    seed: int = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Say how many nats a model needs for texts, with the standard error.

    For example:
      unmask score runs/demo/model "def main():" "main def:()" --draws 256
      unmask score runs/demo/model "for i in range(10):" --precision 0.02
      unmask score runs/demo/model - < my_text.txt

    Args:
        model: A model folder, of ours or in a published layout, or a name on the hub.
        texts: One or more texts; - reads one from standard input. What is longer than the model reads at
            once is scored in windows.
        draws: Random maskings of each text; more make the error smaller.
        precision: Draw as often as it takes for a standard error of this share of the nats, 0.01 for 1 %.
        seed: Of the maskings.
    """
    from unmask.cli.arguments import hint_at_holes, stdin_text

    check_out(out)
    read = [stdin_text() if text == "-" else text for text in texts]
    hint_at_holes("a text that is scored", read)
    with shared_model(model) as (lm, speaks):
        lm.denoise.pack()
        result = lm.score(read, draws=draws, precision=precision, seed=seed)
        longest = lm.denoise.max_length
        digest = model_digest(model)
    if not speaks:
        return
    windows = [1 if longest is None else -(-each.tokens // longest) for each in result.each]
    lines = list(zip(texts, result.each, windows, strict=True))
    figures = [{"text": text, "windows": count, **each.figures()} for text, each, count in lines]
    for text, each, _ in lines:
        check_precision(_named(text), each.standard_error / each.nats_per_token, precision)
    if publish({"scores": figures}, seed, {}, digest, out, as_json):
        return
    for text, each, count in lines:
        print(
            f"{each.nats_per_token:.3f} ± {each.standard_error:.3f} nats/token"
            f"  perplexity {each.perplexity:.2f}  {_bits(each)}{_named(text)}"
            + (f"  (in {count} windows of {longest} tokens)" if count > 1 else "")
        )


def _named(text: str) -> str:
    """A text, or enough of it to know it by."""
    shown = repr(text)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."


def evaluate(
    model: Model,
    sources: Texts,
    folder: Path | None = None,
    rows: int | None = None,
    replicates: int = 8,
    precision: float | None = None,
    per_document: bool = False,
    lines: bool = False,
    field: str = "text",
    column: str = "text",
    seed: int = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure a model on texts: one line each, every figure with its standard error.

    For example:
      unmask eval runs/demo/model my_test.txt
      unmask eval runs/demo/model runs/demo/corpus
      unmask eval runs/demo/model lambada ptb wikitext --folder text_sets/ --precision 0.005
      unmask eval runs/demo/model paper
      torchrun --nproc_per_node 2 -m unmask eval runs/demo/model my_test.txt

    Under `torchrun` the processes share the work, and the figures stay the same.

    Args:
        model: A model folder with a tokenizer.
        sources: Files or folders, as `unmask prepare` takes them; names of text sets (ptb, wikitext, lm1b,
            lambada, ag_news, arxiv, pubmed; also ptb:validation or ptb:raw); paper, for all seven; or the
            folder of a prepared corpus, such as RUN/corpus, for its held-out part.
        folder: Where the files of named text sets are; without it they come from the hub.
        rows: Only so many windows, spread evenly over each text; all, if not given.
        replicates: Passes over the text, each with fresh times and masks; more make the error smaller.
        precision: Pass as often as it takes for a standard error of this share of the nats, 0.01 for 1 %.
        per_document: One document a row, instead of windows of running text.
        lines: Every line of a text file is a document.
        field: The field of JSON lines that holds the text.
        column: The column of tables that holds the text.
        seed: Of the times and masks.
    """
    from unmask.cli.progress import progress
    from unmask.data.sources import SourceOptions
    from unmask.measurement import Effort, evaluate_set, layout_of, prepared, rows_of

    check_out(out)
    effort = Effort(rows, replicates, precision, seed)
    measured: list[tuple[FetchedSet, Corpus, Score]] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        texts, missing = _fetched(sources, scratch, folder, SourceOptions(lines, field, column))
        lm, speaks = stack.enter_context(shared_model(model))
        lm.denoise.pack()
        corpora = [prepared(lm, text, scratch / str(number)) for number, text in enumerate(texts)]
        for text, corpus in zip(texts, corpora, strict=True):
            total = (
                rows_of(corpus, layout_of(lm, corpus, per_document), effort) if precision is None else None
            )
            with progress(text.name, total, "rows", quiet=as_json or not speaks) as report:
                result = evaluate_set(lm, text, corpus, per_document, effort, report)
            measured.append((text, corpus, result))
        digest = model_digest(model)
    if speaks:
        identities = {text.name: text.identity for text, _, _ in measured}
        figures = [
            {"name": t.name, "origin": t.origin, "per_word": t.per_word, "data": c.digest, **s.figures()}
            for t, c, s in measured
        ]
        for text, _, s in measured:
            check_precision(text.name, s.standard_error / s.nats_per_token, precision)
        if not publish({"texts": figures, "missing": missing}, seed, identities, digest, out, as_json):
            _print_scores(measured)
    for sentence in missing.values():
        print(f"unmask: {sentence}", file=sys.stderr)
    if missing:
        sys.exit(1)


def judge(
    model: Model,
    judge: str | None = None,  # the option's name is the command's
    samplers: tuple[SamplerName, ...] = ("default",),
    steps: tuple[int, ...] = (8, 32, 128),
    n: Number = 16,
    length: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what a model writes: a judge's perplexity, entropy, repetition and time, by steps and sampler.

    For example:
      unmask judge runs/demo/model --judge my_causal_model/ --samplers ancestral confidence
      unmask judge runs/demo/model --steps 4 16 64 --n 32 --out runs/demo/judge.json

    A judge that knows the language gives low perplexity to good text, and also to text that repeats itself:
    read it beside the entropy.

    Args:
        model: A model folder with a tokenizer.
        judge: A causal language model: a folder, a .gguf file or a name on the hub; without one, only what
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
    from unmask.diffusion.categorical import Choice
    from unmask.evaluation.judge import CausalJudge
    from unmask.measurement import Contestant, judge_samples, judged_figures

    if not samplers or not steps:
        raise ValueError("--samplers and --steps need at least one value each")
    check_out(out)
    measured: list[Generated] = []
    with shared_model(model) as (lm, speaks):
        lm.denoise.pack()
        contestants: dict[str, Contestant] = {}
        for name in samplers:
            for count in steps:
                built = lm.sampler(name, count, Choice(temperature, top_k, top_p))
                contestants.setdefault(repr(built), Contestant(name, asked_steps(built), built))
        judging = None if judge is None else CausalJudge.load(judge)
        with progress("judging", len(contestants), "samplers", quiet=as_json or not speaks) as report:
            for number, contestant in enumerate(contestants.values(), start=1):
                measured.append(judge_samples(lm, contestant, n, length, seed, judging))
                report(number)
        digest = model_digest(model)
    data = {} if judging is None else {"judge": f"sha256:{judging.digest()}"}
    if speaks and not publish({"judged": judged_figures(measured)}, seed, data, digest, out, as_json):
        _print_generated(measured)


def report(
    run: Model,
    out: Path | None = None,
    rows: int = 80,
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
        rows: How many held-out windows are measured.
        samples: How many texts are written, with the order in which their tokens were revealed.
        steps: In how many steps.
        seed: Of the measurement and the samples.
    """
    from unmask.cli.progress import progress
    from unmask.report import ReportSettings, write_report

    settings = ReportSettings(rows=rows, samples=samples, steps=steps, seed=seed)
    print(write_report(run, out, settings, progress))


def _fetched(
    sources: tuple[str, ...], scratch: Path, folder: Path | None, options: object
) -> tuple[list[FetchedSet], dict[str, str]]:
    """All texts, before any is measured; of the paper's seven, those that are not to be had are named."""
    from unmask.data.sources import SourceOptions
    from unmask.evaluation.textsets import PUBLISHED, fetch

    assert isinstance(options, SourceOptions)
    texts, missing = [], {}
    for number, name in enumerate(sources):
        for each in PUBLISHED if name == PAPER else (name,):
            try:
                texts.append(fetch(each, scratch / f"set-{number}", folder, options))
            except ValueError as error:
                if name != PAPER:
                    raise
                missing[each] = f"{each} is missing: {error}"
    if not texts:
        first = next(iter(missing.values()), "name files or text sets")
        more = f" (and so are {len(missing) - 1} more: {', '.join(list(missing)[1:])})" if missing else ""
        raise ValueError(f"there is no text to measure: {first}{more}")
    return texts, missing


def _bits(score: Score) -> str:
    return "" if score.size is None else f"{score.bits_per_byte:.3f} bits/byte  "


def _print_scores(measured: list[tuple[FetchedSet, Corpus, Score]]) -> None:
    header = ("text", "nats/token", "perplexity", "bits/byte", "bits/character", "perplexity/word", "tokens")
    lines = []
    for text, _, score in measured:
        f = {name: value for name, value in score.figures().items() if isinstance(value, int | float)}
        lines.append(
            (
                text.name,
                plus_minus(f["nats_per_token"], f["standard_error"]),
                plus_minus(f["perplexity"], f["perplexity_error"]),
                plus_minus(f["bits_per_byte"], f["bits_per_byte_error"]),
                plus_minus(f["bits_per_character"], f["bits_per_character_error"]),
                plus_minus(f["word_perplexity"], f["word_perplexity_error"]),
                f"{score.tokens:,}",
            )
        )
    print_table(header, lines)


def _print_generated(measured: list[Generated]) -> None:
    header = ("sampler", "steps", "perplexity", "entropy", "distinct-2", "repetition", "calls", "seconds")
    lines = [
        (
            each.sampler,
            "" if each.steps is None else str(each.steps),
            plus_minus(each.perplexity, each.perplexity_error),
            plus_minus(each.entropy, each.entropy_error),
            plus_minus(each.distinct_2, None),
            plus_minus(each.repetition, None),
            str(each.network_calls),
            f"{each.seconds:.1f}",
        )
        for each in measured
    ]
    print_table(header, lines)
    if any(each.steps not in (None, each.network_calls) for each in measured):
        print("steps were asked for, calls made: a step with nothing to write needs none", file=sys.stderr)
    if measured[0].judge is not None:
        print(f"judge: {measured[0].judge}")
