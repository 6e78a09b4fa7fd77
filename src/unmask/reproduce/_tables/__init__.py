"""The tables of the paper, one file each."""

from __future__ import annotations

from unmask.reproduce._tables import (
    ablation,
    caching,
    dna,
    gen_ppl,
    genomic,
    glue,
    lm,
    schedules,
    ssd_lm,
    steps,
    time,
    zero_shot,
)
from unmask.reproduce._vocabulary import Table

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        lm.TABLE,
        schedules.TABLE,
        steps.TABLE,
        zero_shot.TABLE,
        ablation.TABLE,
        time.TABLE,
        caching.TABLE,
        gen_ppl.TABLE,
        ssd_lm.TABLE,
        dna.TABLE,
        glue.TABLE,
        genomic.TABLE,
    )
}
"""By the names that `unmask reproduce` takes, in the order in which `all` carries them out."""
