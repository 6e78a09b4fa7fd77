"""Every recipe builds, with each of its counterparts."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from unmask import Tokenizer
from unmask.backbones.caduceus import CaduceusConfig
from unmask.cli import main
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
    if objective == "ar" and isinstance(RECIPES[name]().backbone, CaduceusConfig):
        with pytest.raises(ValueError, match="CaduceusConfig has causal=False, and this objective needs causal=True"):
            RECIPES[name]().with_objective(OBJECTIVES[objective].recommended())
        return
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


def test_hg38_has_the_settings_of_the_paper() -> None:
    experiment = RECIPES["hg38-caduceus"]()
    with torch.device("meta"):
        model = ModelConfig(Tokenizer.dna().model_vocab, experiment.backbone, experiment.objective).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 470_702  # of the published 4 x 118
    training = experiment.training
    assert training.batch_size * experiment.layout.length == 2**20
    assert training.optimizer.lr * training.lr_schedule.factor(1.0) == pytest.approx(1e-4)  # type: ignore[union-attr]


def test_hg38_is_read_by_its_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is extended to a fixed length, and what is held out is not learned."""
    monkeypatch.chdir(tmp_path)
    bases = "".join(random.Random(0).choices("ACGT", k=1000))
    Path("hg38.ml.fa").write_text(f">chr1\n{bases}\n")
    Path("sequences_human.bed").write_text("chr1\t0\t50\ttrain\nchr1\t300\t350\ttrain\nchr1\t500\t550\tvalid\n")
    small = ["backbone.width=8", "backbone.depth=1", "layout.length=32", "prepare.source.interval_bases=256"]
    words = ["hg38-caduceus", "--steps", "2", "--batch-size", "4", "--set", *small, "training.warmup_steps=1"]
    monkeypatch.setattr("sys.argv", ["unmask", "train", *words, "eval_windows=4", "--out", "run"])
    main()
    share = 256 / (256 + 256 + 200)  # of the third interval, of the first, and of the second up to the third
    assert f"held-out text: 1 documents, 257 tokens, {share:.2%} of the text" in capsys.readouterr().err
    assert {line["step"] for line in map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())} == {2}
