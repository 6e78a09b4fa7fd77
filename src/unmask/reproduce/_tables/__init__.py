"""The tables of the paper, one file each."""

from __future__ import annotations

from unmask.reproduce._tables import lm, schedules
from unmask.reproduce._vocabulary import Table

TABLES: dict[str, Table] = {table.name: table for table in (lm.TABLE, schedules.TABLE)}
"""By the names that `unmask reproduce` takes, in the order in which `all` carries them out."""
