"""Table 12: does a network that is told the time learn more?"""

from __future__ import annotations

from collections.abc import Sequence

from unmask.reproduce._measures import NATS, PERPLEXITY, held_out_columns
from unmask.reproduce._statistics import same
from unmask.reproduce._trainings import TEXT, missing_text, text_trainings
from unmask.reproduce._vocabulary import Row, Setup, Table, Training


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, "mdlm", "mdlm-time")


TABLE = Table(
    name="time",
    number="Table 12",
    title="Perplexity with and without time conditioning",
    columns=(PERPLEXITY, NATS),
    rows=(
        Row("mdlm-time", "with time conditioning", {PERPLEXITY.key: "23.21"}),
        Row("mdlm", "without", {PERPLEXITY.key: "23.05"}),
    ),
    trainings=_trainings,
    measure=held_out_columns,
    claims=(
        same(
            "Time conditioning changes the perplexity by less than 3 percent.",
            "mdlm",
            ("mdlm-time",),
            column=NATS.key,
            margin=0.03,
        ),
    ),
    protocol=(
        "With time conditioning every block is modulated by an embedding of t (adaLN); without, it has no such"
        " parameters, while the paper feeds a constant.",
    ),
    needs=TEXT,
    missing=missing_text,
)
