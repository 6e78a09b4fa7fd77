"""Every recipe builds, with each of its counterparts."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from unmask.config import from_json, to_json
from unmask.experiment import Experiment
from unmask.model import ModelConfig
from unmask.objectives import OBJECTIVES
from unmask.recipes import RECIPES
from unmask.types import Vocab

FRESH = [name for name, recipe in RECIPES.items() if recipe().init_from is None]
"""Others go on from a model, and have its network."""


@pytest.mark.parametrize(("name", "objective"), list(itertools.product(FRESH, OBJECTIVES)))
def test_every_recipe_builds(name: str, objective: str) -> None:
    experiment = RECIPES[name]().with_objective(OBJECTIVES[objective].recommended())
    with torch.device("meta"):  # shapes only: the large ones need no memory
        model = ModelConfig(Vocab(30, 29), experiment.backbone, experiment.objective).build()
    assert model.backbone.capabilities.causal == (objective == "ar")
    assert experiment.layout.length <= (experiment.backbone.max_length or 0)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name: str) -> None:
    experiment = RECIPES[name]()
    assert from_json(Experiment, json.loads(json.dumps(to_json(experiment)))) == experiment
    assert RECIPES[name].__doc__
