"""Table 3: perplexity of data sets that a model was not trained on."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.evaluation.datasets import DATASETS, MDLM_ZERO_SHOT, ResolvedDataset, resolve_dataset
from unmask.evaluation.evaluate import evaluate_dataset, tokenize_dataset
from unmask.likelihood.corpus import EvalConfig
from unmask.reproduce._statistics import below
from unmask.reproduce._trainings import TEXT, missing_text, text_trainings
from unmask.reproduce._vocabulary import Column, Estimate, Figures, Needs, Row, Setup, Table, TrainedModel, Training

_NAMES = {
    "ptb": "PTB",
    "wikitext": "Wikitext",
    "lm1b": "LM1B",
    "lambada": "Lambada",
    "ag_news": "AG News",
    "pubmed": "Pubmed",
    "arxiv": "Arxiv",
}
_PAPER = {
    "ar": ("82.05", "25.75", "51.25", "51.28", "52.09", "49.01", "41.73"),
    "sedd": ("100.09", "34.28", "68.20", "49.86", "62.09", "44.53", "38.48"),
    "mdlm": ("95.26", "32.83", "67.01", "47.52", "61.15", "41.89", "37.37"),
}
_MEAN = Column("mean_nats", "mean nats/token")


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, "mdlm", "ar", "sedd")


def _measure(trained: TrainedModel) -> Figures:
    """Perplexity of each data set that is there, and the mean of their nats."""
    windows = trained.setup.windows
    config = EvalConfig(None if windows is None else max(40, windows // 2), replicates=4, seed=trained.seed)
    columns: dict[str, Estimate] = {}
    nats = []
    for name in _NAMES:
        dataset = _find(name, trained)
        if dataset is not None:
            corpus = tokenize_dataset(trained.lm, dataset, trained.scratch / name)
            score = evaluate_dataset(trained.lm, dataset, corpus, config=config)
            columns[name] = Estimate(score.perplexity, score.perplexity * score.standard_error)
            nats.append(Estimate(score.nats_per_token, score.standard_error))
    error = sum(each.error**2 for each in nats) ** 0.5 / len(nats)
    columns[_MEAN.key] = Estimate(sum(each.value for each in nats) / len(nats), error)
    return {trained.method: columns}


def _find(name: str, trained: TrainedModel) -> ResolvedDataset | None:
    """The data set on the paper's split, or on the other one if only that is there; None if neither is."""
    published = next(each for each in MDLM_ZERO_SHOT if each.startswith(f"{name}:"))
    if trained.setup.data is None:
        return resolve_dataset(published, trained.scratch / "texts", None)
    for each in (published, f"{name}:test"):
        try:
            return resolve_dataset(each, trained.scratch / "texts", trained.setup.data)
        except ValueError:
            continue
    return None


def _missing(setup: Setup) -> str | None:
    if setup.data is None:
        return "its data sets must be in a folder: give --data" if setup.is_tiny else None
    found = []
    for name in _NAMES:
        for split in ("validation", "test"):
            try:
                found += DATASETS[name].find_files(split, setup.data)
            except ValueError:
                continue
    return missing_text(setup) if found else f"{setup.data} has none of the data sets {', '.join(_NAMES)}"


TABLE = Table(
    name="zero-shot",
    number="Table 3",
    title="Zero-shot perplexity",
    columns=(*(Column(key, label) for key, label in _NAMES.items()), _MEAN),
    rows=tuple(
        Row(key, label, dict(zip(_NAMES, _PAPER[key], strict=True)))
        for key, label in (("ar", "AR"), ("sedd", "SEDD"), ("mdlm", "MDLM"))
    ),
    trainings=_trainings,
    measure=_measure,
    claims=(
        below("MDLM has a lower zero-shot perplexity than SEDD on average.", "mdlm", "sedd", column=_MEAN.key),
        *(
            below(f"MDLM has a lower perplexity than SEDD on {_NAMES[name]}.", "mdlm", "sedd", column=name)
            for name in _NAMES
        ),
        *(
            below(f"MDLM has a lower perplexity than AR on {_NAMES[name]}.", "mdlm", "ar", column=name)
            for name in ("lambada", "pubmed", "arxiv")
        ),
    ),
    protocol=(
        "Windows of running text with an end-of-text token after each row of a data set, where the paper has none; on"
        " the paper's splits where these are there, and on the test split otherwise.",
        "Small models are trained on WikiText-2 and samples of C4 and Wikipedia, so Wikitext is not out of domain"
        " for them.",
    ),
    needs=Needs(
        f"data sets in DATA: {', '.join(_NAMES)}, as far as they are there",
        f"{', '.join(_NAMES)} in DATA or from the hub",
    )
    + TEXT,
    missing=_missing,
    plot_columns=(_MEAN.key,),
)
