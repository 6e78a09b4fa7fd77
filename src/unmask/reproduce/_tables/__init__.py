"""The tables of the paper, one file each."""

from __future__ import annotations

from unmask.reproduce._tables import ablation, caching, gen_ppl, glue, lm, schedules, ssd_lm, steps, time, zero_shot
from unmask.reproduce._vocabulary import Table

TABLES: dict[str, Table] = {
    module.TABLE.name: module.TABLE
    for module in (lm, schedules, steps, zero_shot, ablation, time, caching, gen_ppl, ssd_lm, glue)
}
"""By the names that `unmask reproduce` takes, in the order in which `all` carries them out."""
