"""Table 6: perplexity of human DNA."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.reproduce._dna import GENOMES, dna_trainings, missing_genome
from unmask.reproduce._measures import NATS, PERPLEXITY, held_out_columns
from unmask.reproduce._statistics import below
from unmask.reproduce._vocabulary import Row, Setup, Table, Training


def _trainings(setup: Setup) -> Sequence[Training]:
    return dna_trainings(setup, "mdlm", "ar", "sedd", "plaid")


TABLE = Table(
    name="dna",
    number="Table 6",
    title="Perplexity of human DNA",
    columns=(PERPLEXITY, NATS),
    rows=(
        Row("ar", "Mamba, autoregressive", {PERPLEXITY.key: "3.067 ± .010"}),
        Row("plaid", "Caduceus, Plaid", {PERPLEXITY.key: "3.240 ± .005"}),
        Row("sedd", "Caduceus, SEDD", {PERPLEXITY.key: "3.216 ± .003"}),
        Row("mdlm", "Caduceus, MDLM", {PERPLEXITY.key: "3.199 ± .010"}),
    ),
    trainings=_trainings,
    measure=held_out_columns,
    claims=(
        below("MDLM has a lower perplexity than SEDD.", "mdlm", "sedd", column=NATS.key),
        below("MDLM has a lower perplexity than Plaid.", "mdlm", "plaid", column=NATS.key),
        below("Autoregressive Mamba has a lower perplexity than MDLM.", "ar", "mdlm", column=NATS.key),
    ),
    protocol=(
        "Networks of the paper's size on rows of 256 bases of 20 megabases of chromosome X (at the paper's scale 1,024"
        " bases of hg38); whole megabases are held out, N is never a target, and rows are read on either strand.",
        "The diffusion objectives start from one Caduceus-Ph trained by MLM for as many steps; Mamba has as many as"
        " both together (at the paper's scale all start from 10,000 steps of pre-training and have 50,000). The"
        " paper's ± is max minus min; ours is a standard error.",
        "A perplexity of 4 knows nothing, and one near 3.9 the frequencies of the bases.",
        "HyenaDNA is not among our networks.",
    ),
    needs=GENOMES,
    missing=missing_genome,
)
