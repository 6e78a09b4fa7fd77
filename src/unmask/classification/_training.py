"""The trainer of a classifier: its loss, and the hook that keeps the best epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from unmask.classification._classifier import Classifier
from unmask.classification._encoding import EncodedRows, LabelledBatch, RowEncoder, TrainingBatches
from unmask.classification._experiment import ClassificationExperiment, LoadedData
from unmask.classification._metrics import evaluate, metric_names
from unmask.classification._network import ClassifierConfig, SequenceClassifier
from unmask.distributed import Distributed
from unmask.io.atomic import atomic_file
from unmask.model import LanguageModel
from unmask.training.ema import trainable_parameters
from unmask.training.hooks import Hook
from unmask.training.loss import LossSum
from unmask.training.trainer import Trainer

_MAX_STEPS_BETWEEN_CHECKPOINTS = 500


class ClassificationLoss:
    """Cross-entropy of the classes, or the squared error of the number, summed over the rows that count."""

    def __init__(self, is_number: bool) -> None:
        self.is_number = is_number

    def __call__(self, model: Any, batch: LabelledBatch, generator: torch.Generator) -> LossSum:
        logits = model(batch.tokens, batch.context)
        counted = batch.counted.to(logits.dtype)
        if self.is_number:
            losses = (logits[:, 0] - batch.targets.to(logits.dtype)).square()
            return LossSum((losses * counted).sum(), counted.sum())
        targets = batch.targets.long()
        losses = F.cross_entropy(logits, targets, reduction="none")
        correct = ((logits.argmax(1) == targets) & batch.counted).sum()
        return LossSum((losses * counted).sum(), counted.sum(), {"accuracy": correct})


class BestEpoch(Hook):
    """Evaluates on validation rows after each epoch, keeps the best weights in a file, and may end the run early.

    Every rank evaluates its share and knows all results. The file is replaced atomically; a run that was killed
    evaluates the epoch again, with the same result.
    """

    def __init__(
        self,
        classifier: Classifier,
        rows: EncodedRows,
        targets: NDArray[np.float64],
        metric: str,
        steps_per_epoch: int,
        file: Path,
        patience: int | None = None,
    ) -> None:
        self.classifier, self.rows, self.targets, self.metric = classifier, rows, targets, metric
        self.steps_per_epoch, self.file, self.patience = steps_per_epoch, file, patience
        self.history: list[dict[str, float]] = []
        self.last: dict[str, float] = {}

    @property
    def best(self) -> int | None:
        """The number of the best epoch, from 1; the earlier one of two that are alike."""
        values = [_or_worst(epoch[f"valid_{self.metric}"]) for epoch in self.history]
        return 1 + values.index(max(values)) if values else None

    def after_step(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if trainer.state.step % self.steps_per_epoch:
            return
        epoch = trainer.state.step // self.steps_per_epoch
        with trainer.ema.swapped_in(trainer.model):
            self.last = self._evaluate()
            self.history = [*self.history[: epoch - 1], self.last]
            if self.best == epoch and trainer.distributed.is_main:
                self._save(trainer)
        if self.patience is not None and epoch - (self.best or epoch) >= self.patience:
            trainer.state.ended_early = True

    def load_best(self, trainer: Trainer) -> None:
        """Put the best weights into the model, on every rank."""
        trainer.distributed.barrier()
        weights = load_file(self.file)
        with torch.no_grad():
            for name, parameter in trainable_parameters(trainer.model).items():
                parameter.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        return {"history": [{name: _finite(value) for name, value in epoch.items()} for epoch in self.history]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = [
            {name: math.nan if value is None else value for name, value in epoch.items()} for epoch in state["history"]
        ]

    def _evaluate(self) -> dict[str, float]:
        labels = self.classifier.labels
        logits = self.classifier.logits(self.rows)
        result = evaluate(labels, self.targets, self.classifier.decide(logits), resamples=0)
        figures = {f"valid_{name}": result.value(name) for name in result.metrics}
        return {"valid_loss": _mean_loss(logits, self.targets, labels.is_number), **figures}

    def _save(self, trainer: Trainer) -> None:
        weights = {name: p.detach().cpu().contiguous() for name, p in trainable_parameters(trainer.model).items()}
        with atomic_file(self.file) as new:
            save_file(weights, new)


def build_classifier(
    experiment: ClassificationExperiment, data: LoadedData, init_model: LanguageModel, distributed: Distributed
) -> Classifier:
    """A classifier with the network of a model and a new head."""
    if init_model.tokenizer is None:
        raise ValueError(f"{experiment.init_from} has no tokenizer to read text with")
    torch.manual_seed(experiment.training.seed)
    capabilities = init_model.denoiser.backbone.capabilities
    encoder = RowEncoder(init_model.tokenizer, None)
    pooling = experiment.pooling or _usual_pooling(capabilities.causal, encoder)
    config = ClassifierConfig(
        model=init_model.denoiser.config,
        labels=data.labels.names,
        pooling=pooling,
        hidden_layer=pooling == "first",
        dropout=experiment.dropout,
        max_length=_max_length(experiment.max_length, capabilities.max_length),
        columns=data.train.columns,
        both_strands=_reads_both_strands(experiment, encoder, len(data.train.columns)) and not capabilities.causal,
    )
    network = SequenceClassifier(config)
    network.backbone.load_state_dict(init_model.denoiser.backbone.state_dict())
    network.to(distributed.device).freeze_unused()
    if experiment.head_only:
        network.backbone.requires_grad_(False)
    if experiment.lora is not None:
        experiment.lora.apply(network)
        network.head.requires_grad_(True)
    return Classifier(network, init_model.tokenizer, distributed)


def build_trainer(
    experiment: ClassificationExperiment, data: LoadedData, classifier: Classifier, folder: Path
) -> tuple[Trainer, BestEpoch | None, dict[str, int]]:
    """The trainer at its first step, the hook that keeps the best epoch, and how many rows were cut."""
    encoder, too_long = classifier.encoder, experiment.too_long
    rows = encoder.encode(data.train.texts, too_long)
    strands = _reads_both_strands(experiment, encoder, len(data.train.columns))
    batches = TrainingBatches(
        rows,
        data.targets(data.train),
        experiment.training.batch_size,
        experiment.training.seed,
        encoder.pad_id,
        classifier.uses_segments,
        encoder.complement if strands else None,
    )
    cut = {"train": rows.num_cut}
    hooks: list[Hook] = []
    best = None
    if data.valid is not None:
        valid_rows = encoder.encode(data.valid.texts, too_long)
        cut["valid"] = valid_rows.num_cut
        metric = experiment.metric or metric_names(data.labels)[0]
        best = BestEpoch(
            classifier,
            valid_rows,
            data.targets(data.valid),
            metric,
            batches.steps_per_epoch,
            folder / "best.safetensors",
            experiment.patience,
        )
        hooks = [best]
    steps = experiment.epochs * batches.steps_per_epoch
    config = replace(
        experiment.training,
        steps=steps,
        warmup_steps=round(experiment.warmup_fraction * steps),
        eval_every=batches.steps_per_epoch,
        save_every=min(batches.steps_per_epoch, _MAX_STEPS_BETWEEN_CHECKPOINTS),
    )
    loss = ClassificationLoss(data.labels.is_number)
    trainer = Trainer(classifier.network, loss, batches, config, hooks, distributed=classifier.distributed)
    return trainer, best, cut


def _usual_pooling(causal: bool, encoder: RowEncoder) -> str:
    return "last" if causal else "first" if encoder.has_prefix else "mean"


def _reads_both_strands(experiment: ClassificationExperiment, encoder: RowEncoder, texts: int) -> bool:
    possible = encoder.complement is not None and texts == 1
    if experiment.reverse_complement and not possible:
        raise ValueError("reverse_complement is for single texts of DNA, letter by letter; leave it out")
    return possible and experiment.reverse_complement is not False


def _max_length(asked: int | None, longest: int | None) -> int | None:
    lengths = [length for length in (asked, longest) if length is not None]
    return min(lengths, default=None)


def _mean_loss(logits: NDArray[np.float64], targets: NDArray[np.float64], is_number: bool) -> float:
    if is_number:
        return float(np.mean((logits[:, 0] - targets) ** 2))
    return float(F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(targets).long()))


def _or_worst(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
