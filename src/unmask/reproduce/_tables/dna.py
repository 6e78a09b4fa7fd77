"""Tables 6 and 7, on DNA: listed, and not yet carried out."""

from __future__ import annotations

from unmask.reproduce._vocabulary import Figures, Setup, Table, TrainedModel

_REASON = "it needs rows of DNA and training by MLM, which this version of unmask does not have"


def _measure(_trained: TrainedModel) -> Figures:
    raise ValueError(_REASON)


def _missing(_setup: Setup) -> str:
    return _REASON


def _listed(name: str, number: str, title: str) -> Table:
    return Table(
        name=name,
        number=number,
        title=title,
        columns=(),
        rows=(),
        trainings=lambda _setup: (),
        measure=_measure,
        claims=(),
        protocol=(),
        data=f"a genome; {_REASON}",
        missing=_missing,
    )


TABLE = _listed("dna", "Table 6", "Perplexity of human DNA")
GENOMIC_TABLE = _listed("genomic", "Table 7", "Classification of DNA")
