"""Everything that decides a classifier: the network to start from, labelled rows, head and training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.classification._encoding import TOO_LONG
from unmask.classification._labels import Labels, check_classes, find_labels
from unmask.classification._metrics import metric_names
from unmask.classification._table import Table, fold_rows, read_table, split_rows
from unmask.classification._tasks import OWN_DATA, Protocol, Split, find_task
from unmask.config import lookup, to_json
from unmask.experiment import MAY_CHANGE_ON_RESUME
from unmask.training.config import TrainingConfig
from unmask.training.lora import LoRA
from unmask.training.optim import AdamW, AnyLRSchedule, CosineDecay, LinearDecay

_DECAYS: dict[str, AnyLRSchedule] = {"linear": LinearDecay(), "cosine": CosineDecay(min_factor=0.1)}


@dataclass(frozen=True)
class LabelledData:
    """Which rows are trained, validated and tested on."""

    train: Split | None = None
    """The training rows; None: folds of the test rows are trained on."""
    valid: Split | None = None
    """Rows that the best epoch is chosen by."""
    tests: tuple[Split, ...] = ()
    """Rows that are tested once, at the end."""
    labels: tuple[str, ...] = ()
    """The classes in their order; none: those of the training rows."""
    is_number: bool = False
    """Whether labels are numbers."""
    validation_fraction: float = 0.0
    """The share of the training rows that is held out for validation, where there are no others."""
    folds: int | None = None
    """In how many parts the rows are divided, each tested in turn."""
    fold: int = 0
    """The part that is tested, from 0."""
    skip_empty: bool = False
    """Leave out rows without text, instead of refusing them."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is a share of the rows, in [0, 1); got {self.validation_fraction}")
        if self.folds is not None and not 0 <= self.fold < self.folds:
            raise ValueError(f"fold must be one of 0..{self.folds - 1}; got {self.fold}")
        if self.train is None and not self.tests:
            raise ValueError("there are no labelled rows: name a task or a table to train on")
        if self.train is None and self.folds is None:
            raise ValueError(
                "there are no training rows, only those of the test: divide these with --folds 5, or name a table"
                " with --train"
            )


@dataclass(frozen=True)
class ClassificationExperiment:
    """Everything that decides a classifier."""

    init_from: str
    """The model to start from, as `unmask.load` takes it."""
    data: LabelledData
    """The labelled rows."""
    pooling: str | None = None
    """first, mean or last; None: last for a causal network, else first if rows begin with a special token, else
    mean."""
    dropout: float = 0.1
    """Dropout of the head."""
    max_length: int | None = None
    """The most tokens of a row; None: as many as the network takes."""
    too_long: str = "cut"
    """Whether longer rows are cut or refused."""
    head_only: bool = False
    """Whether the network stays as it is and only the head is trained."""
    lora: LoRA | None = None
    """Train LoRA adapters and the head only."""
    reverse_complement: bool | None = None
    """Train on both strands of DNA and, unless the network is causal, average them in tests; None: if it is DNA."""
    epochs: int = 3
    """Passes over the training rows."""
    warmup_fraction: float = 0.0
    """The share of the steps in which the learning rate rises."""
    patience: int | None = None
    """Epochs without improvement on the validation rows after which training ends; None: it goes on."""
    metric: str | None = None
    """The figure that the best epoch is chosen by; None: the usual one of the labels."""
    training: TrainingConfig = TrainingConfig()
    """Optimizer, batches and seed; its numbers of steps follow from the epochs."""

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ValueError(f"too_long must be {' or '.join(TOO_LONG)}; got {self.too_long!r}")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1; got {self.epochs}")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1; got {self.patience}")
        if self.patience is not None and self.data.valid is None and not self.data.validation_fraction:
            raise ValueError("patience needs validation rows: --valid FILE or --validation-fraction 0.1")
        if self.head_only and self.lora is not None:
            raise ValueError("either only the head is trained, or LoRA adapters, too; got both")
        if self.lora is not None and self.lora.dtype != "float32":
            raise ValueError(f"a classifier's frozen weights are float32; got lora.dtype={self.lora.dtype}")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"warmup_fraction is a share of the steps, in [0, 1]; got {self.warmup_fraction}")
        if self.metric is not None:
            lookup(
                self.metric,
                dict.fromkeys(metric_names(Labels() if self.data.is_number else Labels(("", "-")))),
                "metric",
            )

    def with_seed(self, seed: int) -> ClassificationExperiment:
        """The same with another seed, of the head, the order of rows, dropout and the rows held out."""
        return replace(self, training=replace(self.training, seed=seed))

    def with_fold(self, fold: int, folds: int) -> ClassificationExperiment:
        """The same on one of several folds."""
        return replace(self, data=replace(self.data, folds=folds, fold=fold))

    def fixed_settings(self) -> dict[str, Any]:
        """As JSON, all settings that weights depend on: those that a resumed run may not change."""
        settings: dict[str, Any] = to_json(self)
        for name in MAY_CHANGE_ON_RESUME:
            settings["training"].pop(name)
        return settings


def make_experiment(
    init_from: str, data: LabelledData, protocol: Protocol = OWN_DATA, **changes: Any
) -> ClassificationExperiment:
    """The experiment of a protocol; `changes`: other values of the fields of either."""
    known = {field: changes.pop(field) for field in vars(protocol) if field in changes and field in vars(protocol)}
    protocol = replace(protocol, **known)
    training = TrainingConfig(
        batch_size=protocol.batch_size,
        optimizer=AdamW(lr=protocol.lr, weight_decay=protocol.weight_decay),
        warmup_steps=0,
        lr_schedule=lookup(protocol.decay, _DECAYS, "decay"),
        ema_decay=0.0,
        seed=protocol.seeds[0],
    )
    fields = {
        "pooling": protocol.pooling,
        "max_length": protocol.max_length,
        "epochs": protocol.epochs,
        "warmup_fraction": protocol.warmup_fraction,
        "training": training,
    }
    return ClassificationExperiment(init_from, data, **{**fields, **changes})


def task_data(name: str, folder: Path | None, folds: int | None = None) -> LabelledData:
    """The rows of a task, from files in a folder or from the hub."""
    task = find_task(name)
    train, valid, tests = task.splits(folder)
    fraction = task.protocol.validation_fraction if valid is None else 0.0
    return LabelledData(train, valid, tests, task.labels, task.is_number, fraction, folds)


@dataclass(frozen=True)
class LoadedData:
    """The rows of an experiment, in memory."""

    labels: Labels
    train: Table
    valid: Table | None
    tests: dict[str, Table]
    digest: str
    """The SHA-256 of all texts and labels, and of who is trained on them."""

    def targets(self, table: Table) -> NDArray[np.float64]:
        """Ids of classes, or numbers."""
        return table.targets(self.labels)


def load_data(data: LabelledData, seed: int) -> LoadedData:
    """Read, check and divide the rows; `seed` decides which are held out."""
    pool = _read(data, data.train) if data.train is not None else None
    tests = {split.name: _read(data, split) for split in data.tests}
    if data.folds is not None:
        whole = pool if pool is not None else next(iter(tests.values()))
        held_out, rest = fold_rows(len(whole), data.folds, data.fold)
        pool, tests = whole.select(rest), {"fold": whole.select(held_out)}
    assert pool is not None
    valid = None if data.valid is None else _read(data, data.valid)
    labels = _labels(data, pool)
    if valid is None and data.validation_fraction:
        held_out, rest = split_rows(len(pool), data.validation_fraction, seed)
        valid, pool = pool.select(held_out), pool.select(rest)
    check_classes(labels, pool.targets(labels).tolist(), "training rows")
    for table in (*([] if valid is None else [valid]), *tests.values()):
        _check_same_texts(pool, table)
        table.targets(labels)  # unknown labels are refused before anything is trained
    return LoadedData(labels, pool, valid, tests, _digest([pool, valid, *tests.values()]))


def _read(data: LabelledData, split: Split) -> Table:
    return read_table(split.sources, split.columns, with_labels=True, skip_empty=data.skip_empty)


def _labels(data: LabelledData, train: Table) -> Labels:
    if data.is_number:
        return Labels()
    if not data.labels:
        return find_labels(zip(train.places, train.cells, strict=True))
    return Labels(data.labels)


def _check_same_texts(train: Table, other: Table) -> None:
    if len(train.columns) != len(other.columns):
        raise ValueError(
            f"{other.places[0]} has {len(other.columns)} texts, and the training rows have {len(train.columns)}"
        )


def _digest(tables: Sequence[Table | None]) -> str:
    total = hashlib.sha256()
    for table in tables:
        rows = (
            [] if table is None else [[*texts, str(cell)] for texts, cell in zip(table.texts, table.cells, strict=True)]
        )
        total.update(json.dumps(rows).encode())
    return total.hexdigest()
