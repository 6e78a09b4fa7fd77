"""Table 8: what continuous time, carry-over and zero masking are worth."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.reproduce._measures import NATS, PERPLEXITY, held_out_columns
from unmask.reproduce._statistics import below, same
from unmask.reproduce._trainings import TEXT, missing_text, text_trainings
from unmask.reproduce._vocabulary import Row, Setup, Table, Training


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, "mdlm", "mdlm-discrete", "mdlm-no-carry-over", "d3pm", dataset="lm1b")


TABLE = Table(
    name="ablation",
    number="Table 8",
    title="What the parts of MDLM are worth",
    columns=(PERPLEXITY, NATS),
    rows=(
        Row("mdlm", "MDLM", {PERPLEXITY.key: "27.04 ± .01"}),
        Row("mdlm-discrete", "without continuous time", {PERPLEXITY.key: "27.19 ± .07"}),
        Row("mdlm-no-carry-over", "and without carry-over", {PERPLEXITY.key: "28.56 ± .15"}),
        Row("d3pm", "and without zero masking (D3PM)", {PERPLEXITY.key: "28.51 ± .15"}),
    ),
    trainings=_trainings,
    measure=held_out_columns,
    claims=(
        below("Continuous time lowers the perplexity.", "mdlm", "mdlm-discrete", column=NATS.key),
        below("Carry-over lowers the perplexity.", "mdlm-discrete", "mdlm-no-carry-over", column=NATS.key),
        same(
            "Without carry-over, zero masking changes little.",
            "mdlm-no-carry-over",
            ("d3pm",),
            column=NATS.key,
            margin=0.03,
        ),
    ),
    protocol=(
        "The last three are trained and measured in 1,000 steps; without carry-over the visible tokens of z_0 must be"
        " predicted, too.",
        "Seeds are trainings here; the paper's are evaluations of one training.",
    ),
    needs=TEXT,
    missing=missing_text,
)
