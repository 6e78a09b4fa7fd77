"""Evaluation of a language model: its bound on corpora and datasets, and metrics of its samples."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from unmask.data.corpus import Corpus, PrepareConfig, Split, is_corpus, prepare
from unmask.data.loader import GenomeWindows, Loader, PerDocument, RowLayout, Wrapped
from unmask.evaluation._text_stats import window_text_stats
from unmask.evaluation.datasets import ResolvedDataset
from unmask.evaluation.orders import own_nats
from unmask.evaluation.reference_model import ReferenceModel
from unmask.evaluation.sample_metrics import SampleMetrics, sample_metrics
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.likelihood.score import TIME_BINS, Score
from unmask.model import LanguageModel
from unmask.registry import class_id
from unmask.sampling import Sampler
from unmask.types import ProgressFn

EVAL_BATCH_SIZE = 2 * TIME_BINS
"""Windows in a network call: their times are stratified, so that every bin of the time gets two."""


def evaluate_corpus(
    lm: LanguageModel,
    corpus: Corpus,
    split: str,
    layout: RowLayout,
    config: EvalConfig = EvalConfig(),  # noqa: B008
    progress: ProgressFn | None = None,
) -> Score:
    """The bound on -log p of a split of a corpus; `progress` is called with the number of windows scored so far."""
    if corpus.tokenizer.digest != (lm.tokenizer.digest if lm.tokenizer is not None else None):
        raise ValueError(f"{corpus.folder} was prepared with another tokenizer than the model's")
    text = corpus.splits[split]
    loader = Loader(text, layout, batch_size=EVAL_BATCH_SIZE)
    with lm.inference_mode():
        stats = window_text_stats(lm.tokenizer, text, loader, config.windows)
        return score_corpus(lm.predictor, lm.objective, loader, config, stats, lm.distributed, progress)


def tokenize_dataset(lm: LanguageModel, dataset: ResolvedDataset, scratch: Path) -> Corpus:
    """The dataset as a corpus in the model's tokens, below `scratch`; a prepared corpus is opened as it is."""
    if lm.tokenizer is None:
        raise ValueError("this model has no tokenizer, so it cannot be evaluated on text")
    if is_corpus(dataset.source):
        corpus = Corpus.open(dataset.source, verify=False, allow_code=(class_id(type(lm.tokenizer)),))
        corpus.verify(eval_split(corpus).record.name)  # not all of it, which may be large
        return corpus
    scratch.mkdir(parents=True, exist_ok=True)
    options = PrepareConfig(dataset.source_config, validation_fraction=0)
    return prepare([dataset.source], scratch / f"corpus-of-{Path(dataset.source).stem}", lm.tokenizer, options)


def eval_layout(lm: LanguageModel, corpus: Corpus, per_document: bool) -> RowLayout:
    """Rows of the model's maximum length: windows of running text (of DNA, inside contigs), or one document each."""
    longest = lm.denoiser.max_length
    if longest is None:
        raise ValueError("this model has no maximum length; use evaluate_corpus with a layout of its own")
    if not per_document and corpus.tokenizer.complement_ids is not None:
        return GenomeWindows(longest)
    return PerDocument(longest) if per_document else Wrapped(min(longest, eval_split(corpus).num_tokens))


def eval_split(corpus: Corpus) -> Split:
    """The validation split, or the training split if nothing was held out."""
    return corpus.splits.get("valid", corpus.splits["train"])


def num_windows(corpus: Corpus, layout: RowLayout, config: EvalConfig) -> int:
    """The number of windows to score, over all replicates that are certain."""
    rows = Loader(eval_split(corpus), layout, EVAL_BATCH_SIZE).num_sequential_rows
    return (rows if config.windows is None else min(rows, config.windows)) * config.replicates


def evaluate_dataset(
    lm: LanguageModel,
    dataset: ResolvedDataset,
    corpus: Corpus,
    per_document: bool = False,
    config: EvalConfig = EvalConfig(),  # noqa: B008
    progress: ProgressFn | None = None,
) -> Score:
    """The bound on a dataset; words of a named dataset are counted before detokenization."""
    split = eval_split(corpus)
    score = evaluate_corpus(lm, corpus, split.record.name, eval_layout(lm, corpus, per_document), config, progress)
    if dataset.num_words is None or score.text_stats is None:
        return score
    share = score.text_stats.bytes / split.text_stats.bytes
    return replace(score, text_stats=replace(score.text_stats, words=round(dataset.num_words * share)))


@dataclass(frozen=True)
class SamplerSpec:
    """A sampler, its name, and its number of steps if it has one."""

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
    own_law: bool = False,
) -> SampleMetrics:
    """Generate `n` texts with the sampler, take the time, and measure them; with `own_law`, also what they cost under
    the sampler's own law."""
    started = time.perf_counter()
    samples = lm.sample(n, length, sampler=spec.sampler, seed=seed)
    seconds = time.perf_counter() - started
    metrics = sample_metrics(
        samples.texts,
        samples.tokens,
        reference_model,
        sampler=spec.name,
        steps=spec.steps,
        seconds=seconds,
        nfe=samples.nfe,
    )
    own = own_nats(lm, spec.sampler, samples.tokens, seed) if own_law else None
    if own is None:
        return metrics
    return replace(metrics, own_nats_at_least=own.at_least, own_nats_at_most=own.at_most, own_nats_error=own.error)
