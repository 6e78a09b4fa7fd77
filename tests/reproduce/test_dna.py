"""The tables on DNA, in a world of one short contig."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from unmask.backbones.caduceus import CaduceusConfig
from unmask.backbones.mamba import MambaConfig
from unmask.reproduce import TABLES, Setup, _dna, _lab, plan_tables, reproduce

SPLITS = ("train", "dev", "test")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    source, folder = random.Random(0), tmp_path / "data"
    genome = folder / _dna.GENOME
    genome.parent.mkdir(parents=True)
    bases = "".join(source.choices("ACGT", k=60_000))
    genome.write_bytes(gzip.compress(f">chrX\n{bases}\n".encode()))
    (folder / "dna" / "gue" / "mouse_0").mkdir(parents=True)
    for split in SPLITS:
        rows = [f"{''.join(source.choices('ACGT', k=30))},{number % 2}\n" for number in range(20)]
        (folder / "dna" / "gue" / "mouse_0" / f"{split}.csv").write_text("sequence,label\n" + "".join(rows))
    return folder


def test_plans_count_what_a_training_starts_from(data: Path) -> None:
    dna, genomic = plan_tables([TABLES["dna"], TABLES["genomic"]], Setup("tiny", data))
    assert set(dna["new_trainings"]) == {"dna-mlm", "dna-mdlm", "dna-ar", "dna-sedd", "dna-plaid"}
    assert genomic["new_trainings"] == []


@pytest.mark.slow
def test_perplexity_and_classification(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All objectives start from the MLM of their seed, Mamba has the steps of both, and one MLM serves both tables."""
    networks = (CaduceusConfig(width=16, depth=1, max_length=32), MambaConfig(width=16, depth=1, max_length=32))
    monkeypatch.setattr(_dna, "_NETWORKS", networks)
    monkeypatch.setattr(_lab, "RATE_FACTORS", (1.0,))
    out = tmp_path / "out"
    out.mkdir()
    plan = {"format": "unmask-reproduce-1", "scale": "tiny", "minutes": 0.0005, "bf16": False, "steps": {"dna": 8}}
    (out / "plan.json").write_text(json.dumps(plan))
    dna, genomic = reproduce([TABLES["dna"], TABLES["genomic"]], Setup("tiny", data, 0.0005, 1), out)
    assert all(2 < row["figures"]["perplexity"]["mean"] < 40 for row in dna["rows"])
    assert {cell["method"]: cell["steps"] for cell in dna["cells"]} == {"ar": 16, "mdlm": 8, "plaid": 8, "sedd": 8}
    assert all(0 <= row["figures"]["average"]["mean"] <= 100 for row in genomic["rows"])
    cell = json.loads((out / "cells" / "dna" / "sedd-seed-1.json").read_text())
    assert cell["experiment"]["init_from"] == "OUT/runs/dna-mlm/seed-1/model"
    assert (out / "runs" / "dna-mlm" / "seed-1" / "classifiers" / "mouse_0" / "results.json").exists()
