"""What a model is worth: its bound on given texts, and what it writes by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from unmask.data.corpus import Corpus, PrepareConfig, Split, TextStats, is_corpus, prepare
from unmask.data.loader import Loader, PerDocument, RowLayout, Wrapped
from unmask.data.tokenizers import Tokenizer
from unmask.evaluation.datasets import ResolvedDataset
from unmask.evaluation.reference_model import ReferenceModel
from unmask.evaluation.sample_metrics import SampleMetrics, sample_metrics
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.likelihood.score import TIME_BINS, Score
from unmask.model import LanguageModel
from unmask.sampling import Sampler
from unmask.types import ProgressFn

EVAL_BATCH_SIZE = 2 * TIME_BINS
"""Rows of text in a network call: of their times, which are spread evenly, each cell then gets two."""


def evaluate_corpus(
    lm: LanguageModel,
    corpus: Corpus,
    split: str,
    layout: RowLayout,
    config: EvalConfig = EvalConfig(),  # noqa: B008
    progress: ProgressFn | None = None,
) -> Score:
    """The bound on -log p of a corpus, with its error; `report` is told the rows done so far."""
    if corpus.tokenizer.digest != (lm.tokenizer.digest if lm.tokenizer is not None else None):
        raise ValueError(f"{corpus.folder} was prepared with another tokenizer than the model's")
    text = corpus.splits[split]
    loader = Loader(text, layout, batch_size=EVAL_BATCH_SIZE)
    with lm.inference_mode():
        stats = _window_text_stats(lm.tokenizer, text, loader, config.windows)
        return score_corpus(lm.denoiser, lm.objective, loader, config, stats, lm.distributed, progress)


def _window_text_stats(tokenizer: Tokenizer | None, text: Split, loader: Loader, windows: int | None) -> TextStats:
    """The size of the rows that are scored; of some of them only, what their tokens stand for is counted."""
    if tokenizer is None or windows is None or windows >= loader.num_sequential_rows:
        return text.text_stats
    size = TextStats()
    for start, stop in np.stack(loader.sequential_spans(0, windows, num_windows=windows), 1).tolist():
        ids = text.read(start, stop)
        last = text.document_ends[
            np.searchsorted(text.document_ends, start, "right") : np.searchsorted(text.document_ends, stop, "right")
        ]
        last = last - 1 - start  # where documents end, with a separator that is no text
        kept = np.delete(ids, last[ids[last] == tokenizer.eos_id])
        size += TextStats.from_text(tokenizer.decode(kept.tolist()), is_last=False)
    return size


def tokenize_dataset(lm: LanguageModel, dataset: ResolvedDataset, scratch: Path) -> Corpus:
    """The text in the model's tokens, in a folder of its own in `scratch`; a prepared corpus as it is."""
    if lm.tokenizer is None:
        raise ValueError("this model has no tokenizer, so text cannot be measured with it")
    if is_corpus(dataset.source):
        corpus = Corpus.open(dataset.source, verify=False)
        corpus.verify(_eval_split(corpus).record.name)  # which may be a small part of it
        return corpus
    scratch.mkdir(parents=True, exist_ok=True)
    tokenizer = scratch / "tokenizer.json"
    tokenizer.write_text(lm.tokenizer.to_json(), encoding="utf-8")
    options = PrepareConfig(dataset.source_config, validation_fraction=0)
    return prepare([dataset.source], scratch / f"corpus-of-{Path(dataset.source).stem}", str(tokenizer), options)


def eval_layout(lm: LanguageModel, corpus: Corpus, per_document: bool) -> RowLayout:
    """Rows as long as the model takes them: windows of running text, or a document each."""
    longest = lm.denoiser.max_length
    if longest is None:
        raise ValueError("this model has no longest length; measure it on a corpus with a layout of its own")
    return PerDocument(longest) if per_document else Wrapped(min(longest, _eval_split(corpus).num_tokens))


def _eval_split(corpus: Corpus) -> Split:
    """What was held out, if anything was; else all of it."""
    return corpus.splits.get("valid", corpus.splits["train"])


def num_windows(corpus: Corpus, layout: RowLayout, config: EvalConfig) -> int:
    """How many rows will be passed over, as far as is known before."""
    rows = Loader(_eval_split(corpus), layout, EVAL_BATCH_SIZE).num_sequential_rows
    return (rows if config.windows is None else min(rows, config.windows)) * config.replicates


def evaluate_dataset(
    lm: LanguageModel,
    dataset: ResolvedDataset,
    corpus: Corpus,
    per_document: bool = False,
    config: EvalConfig = EvalConfig(),  # noqa: B008
    progress: ProgressFn | None = None,
) -> Score:
    """The bound on a text; of a known set, words are counted as they stood before detokenising."""
    split = _eval_split(corpus)
    score = evaluate_corpus(lm, corpus, split.record.name, eval_layout(lm, corpus, per_document), config, progress)
    if dataset.num_words is None or score.text_stats is None:
        return score
    share = score.text_stats.bytes / split.text_stats.bytes
    return replace(score, text_stats=replace(score.text_stats, words=round(dataset.num_words * share)))


@dataclass(frozen=True)
class SamplerSpec:
    """A sampler under its name, and its number of steps if it has one."""

    name: str
    steps: int | None
    sampler: Sampler


def evaluate_samples(
    lm: LanguageModel,
    spec: SamplerSpec,
    n: int,
    length: int | None,
    seed: int,
    reference_model: ReferenceModel | None,
) -> SampleMetrics:
    """Let the sampler write `n` texts, by the clock, and measure them."""
    started = time.perf_counter()
    samples = lm.sample(n, length, sampler=spec.sampler, seed=seed)
    seconds = time.perf_counter() - started
    return sample_metrics(
        samples.texts,
        samples.tokens,
        reference_model,
        sampler=spec.name,
        steps=spec.steps,
        seconds=seconds,
        nfe=samples.nfe,
    )


def metrics_to_json(metrics: Sequence[SampleMetrics]) -> list[dict[str, object]]:
    """For JSON."""
    return [asdict(measured) for measured in metrics]
