"""Table 7: classification of DNA by networks that were trained with several objectives."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.reproduce._dna import GENOMES, dna_trainings, missing_genome
from unmask.reproduce._downstream import downstream_scores, mean_score, tasks_in
from unmask.reproduce._statistics import below, same
from unmask.reproduce._vocabulary import Column, Figures, Needs, Row, Setup, Table, TrainedModel, Training

_GUE = {"prom_core_tata": "core promoters, TATA", "mouse_0": "mouse 0", "mouse_2": "mouse 2"}
"""Tasks of GUE, with their training sets; the Genomic Benchmarks have only test sets here, which are divided."""
_BENCHMARKS = {
    "dummy_mouse_enhancers_ensembl": "mouse enhancers",
    "demo_coding_vs_intergenomic_seqs": "coding",
    "demo_human_or_worm": "human or worm",
    "human_enhancers_cohn": "enhancers Cohn",
    "human_enhancers_ensembl": "enhancers Ensembl",
    "human_ensembl_regulatory": "regulatory",
    "human_ocr_ensembl": "OCR",
    "human_nontata_promoters": "nonTATA promoters",
}
_SMALL_TASKS = ("human_nontata_promoters", "prom_core_tata", "mouse_2")
_MORE_TASKS = ("human_enhancers_cohn", "mouse_0")
"""For cells of ten minutes and more: a network of this size reads 5,000 bases a second on a core."""
_PAPER = {
    "ar": ("76.3", "89.7", "96.7", "73.4", "85.6", "86.1", "80.6", "92.6"),
    "mlm": ("81.0", "91.3", "97.0", "73.7", "90.7", "87.4", "82.1", "93.5"),
    "sedd": ("78.4", "91.3", "97.0", "74.6", "90.5", "82.8", "81.6", "93.5"),
    "mdlm": ("79.5", "91.3", "97.0", "74.3", "89.9", "86.8", "82.3", "94.0"),
}
_AVERAGE = Column("average", "average")


def _trainings(setup: Setup) -> Sequence[Training]:
    return dna_trainings(setup, "mdlm", "mlm", "sedd", "ar")


def _measure(trained: TrainedModel) -> Figures:
    setup = trained.setup
    folder = None if setup.data is None else setup.data / "dna"
    if setup.is_tiny:
        has_time = setup.minutes >= 10
        tasks, epochs = tasks_in(folder, (*_SMALL_TASKS, *(_MORE_TASKS if has_time else ()))), 3 if has_time else 1
    else:
        tasks, epochs = list(_BENCHMARKS), 10
        folder = folder if len(tasks_in(folder, tasks)) == len(tasks) else None
    scores = downstream_scores(trained, tasks, folder, metric="accuracy", epochs=epochs)
    return {trained.method: {**scores, _AVERAGE.key: mean_score(scores)}}


def _missing(setup: Setup) -> str | None:
    folder = None if setup.data is None else setup.data / "dna"
    if setup.is_tiny and not tasks_in(folder, _SMALL_TASKS):
        return f"it needs labelled rows of {', '.join(_SMALL_TASKS)} in DATA/dna"
    return missing_genome(setup)


TABLE = Table(
    name="genomic",
    number="Table 7",
    title="Classification of DNA, accuracy in percent",
    columns=(*(Column(key, label) for key, label in {**_BENCHMARKS, **_GUE}.items()), _AVERAGE),
    rows=tuple(
        Row(key, label, dict(zip(_BENCHMARKS, _PAPER[key], strict=True)))
        for key, label in (
            ("ar", "Mamba, autoregressive"),
            ("mlm", "Caduceus, MLM"),
            ("sedd", "Caduceus, SEDD"),
            ("mdlm", "Caduceus, MDLM"),
        )
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
        "Of the eight Genomic Benchmarks the test sets of two are at hand. That of the promoters is divided into five"
        " parts, of which a seed tests one and learns the others, a quarter of the rows that the paper had. Two tasks"
        " of GUE stand beside it, on their own parts; with --minutes 10 and more the enhancers and a third task, too.",
        "Everything is fine-tuned by the protocol of the Genomic Benchmarks, for one epoch (3 with --minutes 10 and"
        " more) instead of 10, with one learning rate and batch size for all where the paper takes the best of four;"
        " the best epoch is chosen on rows held out for it.",
        "Plaid is left out: its network reads vectors.",
    ),
    needs=GENOMES + Needs("labelled sets in DATA/dna", "the Genomic Benchmarks in DATA/dna or from the hub"),
    missing=_missing,
    measuring_cost=1.5,
    plot_columns=(_AVERAGE.key,),
)
