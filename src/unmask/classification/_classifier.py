"""A classifier with its tokenizer: from texts to classes with probabilities, or to numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from unmask.classification._encoding import EncodedRows, RowEncoder, pad_rows
from unmask.classification._labels import Labels
from unmask.classification._metrics import Evaluation, evaluate
from unmask.classification._network import SequenceClassifier
from unmask.classification._table import Table
from unmask.context import Context
from unmask.data.tokenizers import BaseTokenizer
from unmask.distributed import Distributed
from unmask.types import NonFiniteError, ProgressFn

Texts: TypeAlias = Sequence[str | tuple[str, str]]
"""Texts or, for a classifier of pairs, pairs of texts."""

_BATCH_TOKENS = 8192
"""Tokens of a network call, padding included."""


class Classifier:
    """A `SequenceClassifier` with its tokenizer."""

    def __init__(
        self,
        network: SequenceClassifier,
        tokenizer: BaseTokenizer,
        distributed: Distributed = Distributed(),  # noqa: B008
    ) -> None:
        self.network, self.tokenizer, self.distributed = network, tokenizer, distributed
        self.config = network.config
        self.labels = Labels(self.config.labels)
        self.encoder = RowEncoder(tokenizer, self.config.max_length)

    def __repr__(self) -> str:
        what = "a number" if self.labels.is_number else f"{len(self.labels.names)} classes"
        parameters = sum(parameter.numel() for parameter in self.network.parameters())
        return f"Classifier({what}, {self.config.pooling} pooling, {parameters:,} parameters, {self.tokenizer})"

    def predict(self, texts: Texts) -> list[str | float]:
        """The most probable class of each text, or its number."""
        return [self.labels.name(each) for each in self.decide(self.logits(self.encode_texts(texts)))]

    def predict_proba(self, texts: Texts) -> list[dict[str, float]]:
        """The probability of each class, for each text."""
        if self.labels.is_number:
            raise ValueError("this classifier predicts numbers, which have no probabilities: call predict()")
        return self.probabilities(self.logits(self.encode_texts(texts)))

    def evaluate_rows(self, rows: EncodedRows, table: Table, progress: ProgressFn | None = None) -> Evaluation:
        """How well the predictions for the encoded rows of a table fit its labels."""
        return evaluate(self.labels, table.targets(self.labels), self.decide(self.logits(rows, progress)))

    def encode_texts(self, texts: Texts, too_long: str = "cut") -> EncodedRows:
        """The rows of texts, each of which must be one text, or two where the classifier reads pairs."""
        rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        wanted = len(self.config.columns)
        for number, row in enumerate(rows):
            if len(row) != wanted or not all(isinstance(text, str) for text in row):
                expected = "a pair of texts" if wanted == 2 else "one text"
                raise ValueError(f"text {number} must be {expected}, as this classifier was trained; got {row!r:.80}")
            if not all(text.strip() for text in row):
                raise ValueError(f"text {number} is empty: there is nothing to classify")
        return self.encoder.encode(rows, too_long)

    def decide(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        """The id of the class with the largest logit, or the number."""
        return logits[:, 0] if self.labels.is_number else logits.argmax(1).astype(np.float64)

    def probabilities(self, logits: NDArray[np.float64]) -> list[dict[str, float]]:
        """Softmax of the logits of each row, by class."""
        shares = torch.from_numpy(logits).softmax(1).tolist()
        return [dict(zip(self.labels.names, row, strict=True)) for row in shares]

    @cached_property
    def complement(self) -> NDArray[np.int64] | None:
        """The complementary id of each id, if both strands are read."""
        return self.encoder.complement if self.config.both_strands else None

    def logits(self, rows: EncodedRows, progress: ProgressFn | None = None) -> NDArray[np.float64]:
        """Logits [rows, K]; the ranks share the rows, and each has all results. `progress` gets rows done so far."""
        result = torch.zeros(len(rows), self.labels.num_outputs, dtype=torch.float64)
        first, count = self.distributed.shard(len(rows))
        done = 0
        with self.inference_mode():
            for batch in _batches_by_length(rows, range(first, first + count)):
                logits = self._forward(rows, batch, [rows.ids[row] for row in batch])
                if self.complement is not None:
                    other = self._forward(rows, batch, rows.other_strand(self.complement, batch))
                    logits = (logits + other) / 2
                result[torch.tensor(batch)] = logits
                done += len(batch)
                if progress is not None:
                    progress(done)
        result = self.distributed.all_reduce(result)
        if not bool(result.isfinite().all()):
            raise NonFiniteError("the classifier answers with numbers that are not finite: its weights are damaged")
        return result.numpy()

    def _forward(self, rows: EncodedRows, batch: list[int], ids: list[NDArray[np.int64]]) -> torch.Tensor:
        tokens, valid = pad_rows(ids, self.encoder.pad_id)
        segments = pad_rows([rows.segments[row] for row in batch], 0)[0] if self.uses_segments else None
        device = self.network.head.output.weight.device
        context = Context(
            valid=None if valid is None else valid.to(device),
            segment_ids=None if segments is None else segments.to(device),
        )
        logits: torch.Tensor = self.network(tokens.to(device), context)
        return logits.double().cpu()

    @property
    def uses_segments(self) -> bool:
        """Whether the network is told which of two texts a token is of."""
        return len(self.config.columns) == 2 and self.network.backbone.capabilities.supports_segments

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """No gradients and no dropout; training modes are restored afterwards."""
        training = [module for module in self.network.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            for module in training:
                module.training = True


def _batches_by_length(rows: EncodedRows, indices: Sequence[int]) -> Iterator[list[int]]:
    """Rows of similar length together, the longest first, as many as fit."""
    order = sorted(indices, key=lambda row: -len(rows.ids[row]))
    while order:
        size = max(1, _BATCH_TOKENS // max(1, len(rows.ids[order[0]])))
        yield order[:size]
        order = order[size:]
