"""The tables of the MDLM paper by one command: cells, tables, and verdicts on its claims."""

from __future__ import annotations

from unmask.reproduce._cost_model import H100, MASKED_FRACTION, Cluster, ModelShape
from unmask.reproduce._lab import Stopped
from unmask.reproduce._plan import plan_tables
from unmask.reproduce._reproduce import join_cells, reproduce, write_tables
from unmask.reproduce._results import outcome_in_words, seeds_done, table_lines
from unmask.reproduce._tables import TABLES
from unmask.reproduce._vocabulary import Cell, Claim, Estimate, Measurement, Setup, Table, Training, Verdict

__all__ = [
    "H100",
    "MASKED_FRACTION",
    "TABLES",
    "Cell",
    "Claim",
    "Cluster",
    "Estimate",
    "Measurement",
    "ModelShape",
    "Setup",
    "Stopped",
    "Table",
    "Training",
    "Verdict",
    "join_cells",
    "outcome_in_words",
    "plan_tables",
    "reproduce",
    "seeds_done",
    "table_lines",
    "write_tables",
]
