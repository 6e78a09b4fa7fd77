"""Whole runs: an experiment carried out in a folder, from text to an exported model."""

from __future__ import annotations

from unmask.run._build import build_trainer
from unmask.run._prepare import prepare_corpus
from unmask.run.api import train
from unmask.run.experiment_run import run_experiment
from unmask.run.export import load_ema_model, read_card_metadata

__all__ = ["build_trainer", "load_ema_model", "prepare_corpus", "read_card_metadata", "run_experiment", "train"]
