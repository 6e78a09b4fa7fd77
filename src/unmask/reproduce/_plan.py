"""What a reproduction will take, told before it begins: cells, tokens, time, data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unmask.reproduce._cost_model import H100, flops_per_token
from unmask.reproduce._trainings import PILOT_SHARE, USUAL_PILOTS
from unmask.reproduce._vocabulary import Setup, Table, Training

_VOCAB_SIZES = {"hub:gpt2": 50_258, "hub:bert-base-uncased": 30_522, "dna": 16}


def plan_tables(tables: Sequence[Table], setup: Setup) -> list[dict[str, Any]]:
    """For each table: cells, trainings that no table before it has, their tokens and time, and what it needs."""
    seen: set[str] = set()
    plans = []
    for table in tables:
        missing = table.missing(setup)
        # What the paper's scale would take is told before its data is there.
        trainings = [] if missing and setup.is_tiny else list(table.trainings(setup))
        needed = {each.name: each for training in trainings for each in (training.parent, training) if each is not None}
        new = [training for training in needed.values() if training.name not in seen]
        seen.update(training.name for training in new)
        plans.append(
            {
                "name": table.name,
                "number": table.number,
                "title": table.title,
                "cells": setup.seeds * len(trainings),
                "new_trainings": [training.name for training in new],
                "shared_trainings": [name for name in needed if name not in {each.name for each in new}],
                "needs": getattr(table.needs, setup.scale),
                "missing": missing,
                **(_tiny_cost(table, trainings, new, setup) if setup.is_tiny else _paper_cost(new, setup)),
            }
        )
    return plans


def _tiny_cost(table: Table, trainings: Sequence[Training], new: Sequence[Training], setup: Setup) -> dict[str, Any]:
    """Minutes on this machine: cells, pilots of the learning rate, and measurements."""
    pilots = USUAL_PILOTS * PILOT_SHARE
    minutes = sum((setup.seeds + pilots) * each.share * each.relative_cost for each in new)
    minutes += table.measuring_cost * setup.seeds * sum(each.relative_cost for each in trainings)
    return {"minutes": round(minutes * setup.minutes, 2)}


def _paper_cost(new: Sequence[Training], setup: Setup) -> dict[str, Any]:
    """Tokens, and days of one H100 by the cost model; what is measured afterwards is not counted."""
    tokens = sum(_tokens(each) for each in new)
    days = sum(_tokens(each) * _flops_per_token(each) / H100.flops / 86400 for each in new)
    return {"tokens": setup.seeds * tokens, "gpu_days": round(setup.seeds * days, 2)}


def _tokens(training: Training) -> int:
    config = training.experiment.training
    return config.steps * config.batch_size * training.experiment.layout.length


def _flops_per_token(training: Training) -> float:
    experiment = training.experiment
    vocab = _VOCAB_SIZES[experiment.tokenizer]
    return flops_per_token(experiment.backbone, vocab, experiment.layout.length)
