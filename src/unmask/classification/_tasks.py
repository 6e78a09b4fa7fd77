"""Labelled sets by name: GLUE, Genomic Benchmarks and GUE, with the protocol of the paper that reports them.

A task is read from a folder, as tables or as folders of classes, or from the hub by the package `datasets`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from unmask.config import lookup
from unmask.data.readers import class_folders
from unmask.data.readers.tables import table_readers
from unmask.io.hub import HUB_PREFIX

_TABLE_SUFFIXES = tuple(table_readers())
_TRAIN, _DEV, _TEST = "train", "dev", "test"


@dataclass(frozen=True)
class Protocol:
    """How a classifier is trained, selected and tested."""

    epochs: int = 3
    batch_size: int = 16
    lr: float = 5e-5
    weight_decay: float = 0.0
    decay: str = "linear"
    """How the learning rate falls: linear to 0, or cosine to a tenth."""
    warmup_fraction: float = 0.0
    max_length: int | None = None
    """Tokens of a row; None: as many as the network takes."""
    pooling: str | None = None
    """None: as the network suggests."""
    seeds: tuple[int, ...] = (0,)
    validation_fraction: float = 0.0
    """The share of the training rows that the best epoch is chosen by; 0: none, the last epoch is taken."""
    notes: tuple[str, ...] = ()
    """Where the protocol departs from good practice, or we from the published code."""


OWN_DATA = Protocol()
"""For tables without a name."""

GLUE_PROTOCOL = Protocol(
    lr=2e-5,
    max_length=128,
    seeds=(42,),
    notes=(
        "the development set is the test set, as in the MDLM paper: nothing is left that no choice was made by",
        "one seed: differences between models may be chance (--seeds 5 tells)",
    ),
)
"""The MDLM paper's for GLUE (appendix D.6)."""

GENOMIC_PROTOCOL = Protocol(
    epochs=10,
    batch_size=128,
    lr=1e-3,
    weight_decay=0.1,
    decay="cosine",
    warmup_fraction=0.01,
    pooling="mean",
    seeds=(1, 2, 3, 4, 5),
    validation_fraction=0.1,
    notes=(
        "what the paper calls 5-fold cross-validation is five seeds, each with a random tenth held out for validation"
        " and the same test set; its +- is max - min, the range below, and not an error",
        "the paper takes the best of learning rates 1e-3 and 2e-3 and batches of 128 and 256 for each model; here --lr"
        " and --batch-size are used as they are",
        "padding is neither read nor pooled here; in the published code it is, and a model sees how long a text is",
        "the learning rate falls over the training rows only; in the published code the test rows were counted, too",
    ),
)
"""That of Caduceus, which the MDLM paper follows (appendix D.7)."""

GUE_PROTOCOL = replace(
    GENOMIC_PROTOCOL,
    validation_fraction=0.0,
    notes=(
        "GUE has a validation set of its own, by which the best epoch is chosen; everything else is as in the"
        " Genomic Benchmarks, and not as in DNABERT-2's paper",
        *GENOMIC_PROTOCOL.notes[1:],
    ),
)


@dataclass(frozen=True)
class Split:
    """Rows that belong together: where they are, and in which columns."""

    name: str
    sources: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...] = ()
    """Alternatives, each one or two columns of text and, last, that of the label; none: the usual names."""


@dataclass(frozen=True)
class Task:
    """A labelled set with a name."""

    hub_id: str
    """Its id on the hub, with its configuration, if it has one: id:configuration."""
    folders: tuple[str, ...]
    """Names of its folder in a folder of sets."""
    columns: tuple[tuple[str, ...], ...]
    """Alternatives of columns: texts and, last, the label."""
    metric: str
    """The figure that is reported."""
    labels: tuple[str, ...] = ()
    """The classes; none: those of the training set."""
    is_number: bool = False
    """Whether labels are numbers."""
    protocol: Protocol = GLUE_PROTOCOL
    headerless_columns: tuple[str, ...] = ()
    """The columns of its .tsv files, by number, if these have no header."""
    test_words: tuple[str, ...] = (_TEST,)
    """The parts that it is tested on, as files are called."""
    hub_names: tuple[tuple[str, str], ...] = ()
    """The hub's names of parts, where they are others."""

    def splits(self, folder: Path | None) -> tuple[Split | None, Split | None, tuple[Split, ...]]:
        """Training, validation and test rows, as far as they are in the folder; from the hub without one."""
        uses_dev = self.test_words == (_TEST,) and self.protocol.validation_fraction == 0
        if folder is None:
            parts = [self._on_hub(word) for word in (_TRAIN, _DEV, *self.test_words)]
            return parts[0], parts[1] if uses_dev else None, tuple(parts[2:])
        train, dev, *tests = [self._in_folder(word, folder) for word in (_TRAIN, _DEV, *self.test_words)]
        found = tuple(test for test in tests if test is not None)
        if train is None and not found:
            names = " or ".join(f"{name}/{_TRAIN}" for name in self.folders)
            raise ValueError(
                f"{folder} has no {names} with a suffix of {' '.join(_TABLE_SUFFIXES)}, nor a folder of classes there"
            )
        return train, dev if uses_dev else None, found

    def _on_hub(self, word: str) -> Split:
        hub_id, _, config = self.hub_id.partition(":")
        name = dict(self.hub_names).get(word, word)
        return Split(word, (f"{HUB_PREFIX}{hub_id}:{config}:{name}",), self.columns)

    def _in_folder(self, word: str, folder: Path) -> Split | None:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder with labelled sets")
        words = {word, dict(self.hub_names).get(word, word)}
        stems = [
            stem
            for name in self.folders
            for each in sorted(words)
            for stem in (f"{name}/{each}", f"{each}_{name}", f"{name}_{each}")
        ]
        for stem in stems:
            for pattern in (stem, f"*/{stem}"):
                tables = [file for suffix in _TABLE_SUFFIXES for file in sorted(folder.glob(f"{pattern}{suffix}"))]
                found = [*tables, *(path for path in sorted(folder.glob(pattern)) if class_folders(path))]
                if found:
                    headerless = self.headerless_columns and found[0].suffix == ".tsv"
                    return Split(word, (str(found[0]),), (self.headerless_columns,) if headerless else self.columns)
        return None


_glue = partial(Task, test_words=(_DEV,), hub_names=((_DEV, "validation"),), protocol=GLUE_PROTOCOL)
_PAIR = ("sentence1", "sentence2", "label")
_GLUE = {
    "cola": _glue(
        "nyu-mll/glue:cola",
        ("CoLA", "cola"),
        (("sentence", "label"),),
        "matthews",
        ("unacceptable", "acceptable"),
        headerless_columns=("4", "2"),
    ),
    "sst2": _glue(
        "nyu-mll/glue:sst2", ("SST-2", "sst2"), (("sentence", "label"),), "accuracy", ("negative", "positive")
    ),
    "mrpc": _glue(
        "nyu-mll/glue:mrpc",
        ("MRPC", "mrpc"),
        (_PAIR, ("#1 String", "#2 String", "Quality")),
        "f1",
        ("not_equivalent", "equivalent"),
    ),
    "stsb": _glue(
        "nyu-mll/glue:stsb",
        ("STS-B", "stsb"),
        (_PAIR, ("sentence1", "sentence2", "score")),
        "spearman",
        is_number=True,
    ),
    "qqp": _glue(
        "nyu-mll/glue:qqp",
        ("QQP", "qqp"),
        (("question1", "question2", "label"), ("question1", "question2", "is_duplicate")),
        "f1",
        ("not_duplicate", "duplicate"),
    ),
    "mnli": _glue(
        "nyu-mll/glue:mnli",
        ("MNLI", "mnli"),
        (("premise", "hypothesis", "label"), ("sentence1", "sentence2", "gold_label")),
        "accuracy",
        ("entailment", "neutral", "contradiction"),
        test_words=("dev_matched", "dev_mismatched"),
        hub_names=(("dev_matched", "validation_matched"), ("dev_mismatched", "validation_mismatched")),
    ),
    "qnli": _glue(
        "nyu-mll/glue:qnli",
        ("QNLI", "qnli"),
        (("question", "sentence", "label"),),
        "accuracy",
        ("entailment", "not_entailment"),
    ),
    "rte": _glue("nyu-mll/glue:rte", ("RTE", "rte"), (_PAIR,), "accuracy", ("entailment", "not_entailment")),
}

_DNA_COLUMNS = (("seq", "label"), ("sequence", "label"))
_GENOMIC_LENGTHS = {
    "dummy_mouse_enhancers_ensembl": 1024,
    "demo_coding_vs_intergenomic_seqs": 200,
    "demo_human_or_worm": 200,
    "human_enhancers_cohn": 500,
    "human_enhancers_ensembl": 512,
    "human_ensembl_regulatory": 512,
    "human_ocr_ensembl": 512,
    "human_nontata_promoters": 251,
}
"""The bases of a row in Caduceus' experiments; the end-of-text token comes on top."""

_GENOMIC = {
    name: Task(
        f"katarinagresova/Genomic_Benchmarks_{name}",
        (name,),
        _DNA_COLUMNS,
        "accuracy",
        protocol=replace(GENOMIC_PROTOCOL, max_length=length + 1),
    )
    for name, length in _GENOMIC_LENGTHS.items()
}

_GUE_NAMES = (
    *(f"mouse_{number}" for number in range(5)),
    *(f"tf_{number}" for number in range(5)),
    *(f"prom_{size}_{kind}" for size in ("core", "300") for kind in ("all", "notata", "tata")),
)
_GUE = {
    name: Task(
        f"leannmlindsey/GUE:{'human_' if name.startswith('tf_') else ''}{name}",
        (name, f"gue/{name}", f"GUE/{name}"),
        _DNA_COLUMNS[::-1],
        "matthews",
        protocol=GUE_PROTOCOL,
    )
    for name in _GUE_NAMES
}

TASKS: dict[str, Task] = {**_GLUE, **_GENOMIC, **_GUE}
"""Every set with a name."""


def find_task(name: str) -> Task:
    """The task of that name."""
    return lookup(name, TASKS, "task")
