"""A classifier as the engine runs it, and its job: texts of all requests share network calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from unmask.classification import Classifier
from unmask.context import Cache, Context, Prefix
from unmask.data.tokenizers import BaseTokenizer
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Process
from unmask.serve._engine import Job
from unmask.serve._response_schemas import Classification
from unmask.types import NonFiniteError, Positions, RowFn, Times, Tokens, Vocab


class ServedClassifier:
    """A classifier whose calls the engine batches as it batches those of a denoiser: one query for each sequence.

    The answer to a query is the row of the sequence's logits.
    """

    normalized, time_independent, shift_logits = True, True, False

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier

    @property
    def predictor(self) -> DenoiserLike:
        """What the engine calls."""
        return self

    @property
    def tokenizer(self) -> BaseTokenizer:
        """The tokenizer."""
        return self.classifier.tokenizer

    @property
    def vocab(self) -> Vocab:
        """The token ids."""
        return self.classifier.config.model.vocab

    @property
    def process(self) -> Process:
        """That of the network that the classifier was made from; nothing is noised here."""
        return self.classifier.config.model.objective.process

    @property
    def max_length(self) -> int | None:
        """The most tokens of a row."""
        return self.classifier.config.max_length

    def inference_mode(self) -> AbstractContextManager[None]:
        """No gradients and no dropout."""
        return self.classifier.inference_mode()

    def new_cache(self, prefix: Prefix | None = None) -> Cache:
        raise ValueError("a classifier has no cache")

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        logits: Tensor = self.classifier.network(z, context)
        return logits


def classification_job(served: ServedClassifier, text: str | tuple[str, str], index: int, too_long: str) -> Job:
    """A job whose result is the class of a text or pair with all probabilities, or its number."""
    classifier = served.classifier
    rows = classifier.encode_texts([text], too_long)
    strands = [rows.ids[0]]
    if classifier.complement is not None:
        strands += rows.other_strand(classifier.complement, [0])

    def job(denoiser: DenoiserLike, _emit: Callable[[Any], None]) -> Classification:
        tokens = torch.stack([torch.from_numpy(ids) for ids in strands])  # in the engine's thread, as all of torch
        segments = torch.from_numpy(rows.segments[0])[None] if classifier.uses_segments else None
        first = torch.zeros_like(tokens, dtype=torch.bool)
        first[:, 0] = True
        logits = denoiser(tokens, torch.zeros(len(tokens), 1), first, Context(segment_ids=segments))
        mean = logits.double().mean(0, keepdim=True)
        if not bool(mean.isfinite().all()):
            raise NonFiniteError("the classifier answers with numbers that are not finite: its weights are damaged")
        found = mean.numpy()
        (decided,) = classifier.decide(found)
        if classifier.labels.is_number:
            return Classification(index=index, value=float(decided), cut=bool(rows.num_cut))
        return Classification(
            index=index,
            label=str(classifier.labels.name(decided)),
            probabilities=classifier.probabilities(found)[0],
            cut=bool(rows.num_cut),
        )

    return job
