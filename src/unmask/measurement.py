"""What a model is worth: its bound on given texts, and what it writes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from unmask.data.corpus import Corpus, PrepareOptions, Split, is_corpus, prepare
from unmask.data.loader import Layout, Loader, PerDocument, Wrapped
from unmask.data.textsize import TextSize, counts
from unmask.data.tokenizer import Tokenizer
from unmask.evaluation.generative import Generated, measure
from unmask.evaluation.judge import Judge
from unmask.evaluation.likelihood import score_rows
from unmask.evaluation.score import CELLS, Score
from unmask.evaluation.textsets import FetchedSet
from unmask.model import LanguageModel
from unmask.sampling import AnySampler

AT_ONCE = 2 * CELLS
"""Rows of text in a network call: of their times, which are spread evenly, each cell then gets two."""

Report = Callable[[int], None]


@dataclass(frozen=True)
class Effort:
    """How much of a text is measured and how often: see `score_rows`."""

    rows: int | None = None
    replicates: int = 8
    precision: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows must be at least 1; got {self.rows}")
        if self.seed < 0:
            raise ValueError(f"a seed must be 0 or above; got {self.seed}")


def evaluate(
    lm: LanguageModel,
    corpus: Corpus,
    split: str,
    layout: Layout,
    effort: Effort = Effort(),  # noqa: B008
    report: Report | None = None,
) -> Score:
    """The bound on -log p of a corpus, with its error; `report` is told the rows done so far."""
    if corpus.tokenizer.digest != (lm.tokenizer.digest if lm.tokenizer is not None else None):
        raise ValueError(f"{corpus.folder} was prepared with another tokenizer than the model's")
    text = corpus.splits[split]
    loader = Loader(text, layout, batch_size=AT_ONCE)
    with lm.inference():
        return score_rows(
            lm.denoise,
            lm.objective,
            loader,
            _size_of(lm.tokenizer, text, loader, effort.rows),
            effort.rows,
            effort.replicates,
            effort.seed,
            effort.precision,
            lm.world,
            report,
        )


def _size_of(tokenizer: Tokenizer | None, text: Split, loader: Loader, rows: int | None) -> TextSize:
    """The size of the rows that are scored; of some of them only, what their tokens stand for is counted."""
    if tokenizer is None or rows is None or rows >= loader.rows_in_order:
        return text.text
    size = TextSize()
    for start, stop in np.stack(loader.spans_in_order(0, rows, of=rows), 1).tolist():
        ids = text.read(start, stop)
        last = text.ends[
            np.searchsorted(text.ends, start, "right") : np.searchsorted(text.ends, stop, "right")
        ]
        last = last - 1 - start  # where documents end, with a separator that is no text
        kept = np.delete(ids, last[ids[last] == tokenizer.separator])
        size += TextSize(*counts(tokenizer.decode(kept.tolist()), ends=False))
    return size


def prepared(lm: LanguageModel, text: FetchedSet, scratch: Path) -> Corpus:
    """The text in the model's tokens, in a folder of its own in `scratch`; a prepared corpus as it is."""
    if lm.tokenizer is None:
        raise ValueError("this model has no tokenizer, so text cannot be measured with it")
    if is_corpus(text.source):
        corpus = Corpus.open(text.source, verify=False)
        corpus.verify(measured_split(corpus).record.name)  # which may be a small part of it
        return corpus
    scratch.mkdir(parents=True, exist_ok=True)
    tokenizer = scratch / "tokenizer.json"
    tokenizer.write_text(lm.tokenizer.to_json(), encoding="utf-8")
    options = PrepareOptions(text.options, share=0)
    return prepare([text.source], scratch / f"corpus-of-{Path(text.source).stem}", str(tokenizer), options)


def layout_of(lm: LanguageModel, corpus: Corpus, per_document: bool) -> Layout:
    """Rows as long as the model takes them: windows of running text, or a document each."""
    longest = lm.denoise.max_length
    if longest is None:
        raise ValueError("this model has no longest length; measure it on a corpus with a layout of its own")
    return PerDocument(longest) if per_document else Wrapped(min(longest, measured_split(corpus).tokens))


def measured_split(corpus: Corpus) -> Split:
    """What was held out, if anything was; else all of it."""
    return corpus.splits.get("valid", corpus.splits["train"])


def rows_of(corpus: Corpus, layout: Layout, effort: Effort) -> int:
    """How many rows will be passed over, as far as is known before."""
    rows = Loader(measured_split(corpus), layout, AT_ONCE).rows_in_order
    return (rows if effort.rows is None else min(rows, effort.rows)) * effort.replicates


def evaluate_set(
    lm: LanguageModel,
    text: FetchedSet,
    corpus: Corpus,
    per_document: bool = False,
    effort: Effort = Effort(),  # noqa: B008
    report: Report | None = None,
) -> Score:
    """The bound on a text; of a known set, words are counted as they stood before detokenising."""
    split = measured_split(corpus)
    score = evaluate(lm, corpus, split.record.name, layout_of(lm, corpus, per_document), effort, report)
    if text.words is None or score.size is None:
        return score
    share = score.size.bytes / split.text.bytes
    return replace(score, size=replace(score.size, words=round(text.words * share)))


@dataclass(frozen=True)
class Contestant:
    """A sampler under its name, and its number of steps if it has one."""

    name: str
    steps: int | None
    sampler: AnySampler


def judge_samples(
    lm: LanguageModel, contestant: Contestant, n: int, length: int | None, seed: int, judge: Judge | None
) -> Generated:
    """Let the sampler write `n` texts, by the clock, and measure them."""
    started = time.perf_counter()
    samples = lm.sample(n, length, sampler=contestant.sampler, seed=seed)
    seconds = time.perf_counter() - started
    return measure(
        samples.texts,
        samples.tokens,
        judge,
        sampler=contestant.name,
        steps=contestant.steps,
        seconds=seconds,
        network_calls=samples.network_calls,
    )


def judged_figures(all_measured: Sequence[Generated]) -> list[dict[str, object]]:
    """For JSON."""
    return [asdict(measured) for measured in all_measured]
