"""Tables 1 and 2: perplexity of held-out text by method."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.reproduce._measures import BITS_PER_BYTE, NATS, PERPLEXITY, held_out_columns
from unmask.reproduce._statistics import below
from unmask.reproduce._trainings import TEXT, missing_text, text_trainings
from unmask.reproduce._vocabulary import Row, Setup, Table, Training


def _trainings(setup: Setup) -> Sequence[Training]:
    return text_trainings(setup, "mdlm", "ar", "sedd", "d3pm", dataset="lm1b")


TABLE = Table(
    name="lm",
    number="Tables 1 and 2",
    title="Perplexity of held-out text",
    columns=(PERPLEXITY, NATS, BITS_PER_BYTE),
    rows=(
        Row("ar", "AR", {PERPLEXITY.key: "22.32 (LM1B), 17.54 (OWT)"}),
        Row("mdlm", "MDLM", {PERPLEXITY.key: "27.04 (LM1B), 23.21 (OWT)"}),
        Row("sedd", "SEDD", {PERPLEXITY.key: "32.79 (LM1B), 24.10 (OWT)"}),
        Row("d3pm", "D3PM, absorbing", {PERPLEXITY.key: "76.90 (LM1B)"}),
    ),
    trainings=_trainings,
    measure=held_out_columns,
    claims=(
        below(
            "AR has a lower perplexity than MDLM, MDLM than SEDD, and SEDD than D3PM.",
            "ar",
            "mdlm",
            "sedd",
            "d3pm",
            column=NATS.key,
        ),
        below("MDLM has a lower perplexity than SEDD.", "mdlm", "sedd", column=NATS.key),
        below("MDLM has a lower perplexity than D3PM.", "mdlm", "d3pm", column=NATS.key),
    ),
    protocol=(
        "Every method has the same text, tokenizer, network, batches and number of rows; AR has half the steps, as in"
        " the paper, so that as many tokens are predicted.",
        "Perplexities are upper bounds but for AR's, which is exact; D3PM's is that of 1,000 steps.",
    ),
    needs=TEXT,
    missing=missing_text,
)
