"""Table 7: classification of DNA by networks that were trained with several objectives."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.reproduce._dna import GENOME, dna_trainings, missing_genome
from unmask.reproduce._downstream import downstream_scores, mean_score, short_protocol, tasks_in
from unmask.reproduce._statistics import below, same
from unmask.reproduce._vocabulary import Column, Figures, Row, Setup, Table, TrainedModel, Training

_TASKS = {"prom_core_tata": "core promoters, TATA", "mouse_0": "mouse 0", "mouse_2": "mouse 2"}
"""Tasks of GUE, which have training sets here; of the Genomic Benchmarks there are only test sets."""
_AVERAGE = Column("average", "average")


def _trainings(setup: Setup) -> Sequence[Training]:
    return dna_trainings(setup, "mdlm", "mlm", "sedd", "ar")


def _measure(trained: TrainedModel) -> Figures:
    assert trained.setup.data is not None
    folder = trained.setup.data / "dna"
    epochs = short_protocol(trained.setup, 3)
    scores = downstream_scores(trained, tasks_in(folder, list(_TASKS)), folder, metric="accuracy", epochs=epochs)
    return {trained.method: {**scores, _AVERAGE.key: mean_score(scores)}}


def _missing(setup: Setup) -> str | None:
    folder = None if setup.data is None else setup.data / "dna"
    if setup.is_tiny and not tasks_in(folder, list(_TASKS)):
        return f"it needs the training sets of {', '.join(_TASKS)} in DATA/dna/gue"
    return missing_genome(setup)


TABLE = Table(
    name="genomic",
    number="Table 7",
    title="Classification of DNA, accuracy in percent",
    columns=(*(Column(key, label) for key, label in _TASKS.items()), _AVERAGE),
    rows=(
        Row("ar", "Mamba, autoregressive"),
        Row("mlm", "Caduceus, MLM"),
        Row("sedd", "Caduceus, SEDD"),
        Row("mdlm", "Caduceus, MDLM"),
    ),
    trainings=_trainings,
    measure=_measure,
    claims=(
        same(
            "Fine-tuning with MDLM keeps the average of Caduceus trained by MLM, within two points.",
            "mlm",
            ("mdlm",),
            column=_AVERAGE.key,
            margin=2.0,
        ),
        below("Caduceus with MDLM is more accurate than autoregressive Mamba.", "ar", "mdlm", column=_AVERAGE.key),
    ),
    protocol=(
        "Three tasks of GUE stand for the paper's eight Genomic Benchmarks, whose training sets are not at hand, so"
        " the paper's figures do not stand beside ours.",
        "Everything is fine-tuned by the protocol of the Genomic Benchmarks for 3 epochs instead of 10 (one if"
        " --minutes is below 5), with one learning rate for all, and the best epoch is chosen on GUE's validation set.",
        "Plaid is left out: its network reads vectors.",
    ),
    data=f"DATA/{GENOME}, DATA/dna/gue",
    missing=_missing,
    measuring_cost=1.0,
    plot_columns=(_AVERAGE.key,),
)
