"""Measuring and sampling mean the same on one process and on many: real ones, under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unmask
from measuring_worker import measured
from unmask.world import World

WORKER = Path(__file__).with_name("measuring_worker.py")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("ranks")
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, length=16, dropout=0.0)
    lm = unmask.LanguageModel.new(backbone, unmask.MDLM(), unmask.Tokenizer.characters("abc "))
    for parameter in lm.denoise.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    (folder / "text.txt").write_text("abc cab ba " * 150)  # 104 windows: four batches, the last one short
    return unmask.save(lm, folder / "model"), folder / "text.txt"


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_ranks_find_what_one_finds(ranks: int, given: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = given
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the worker: threads change the last bits
    alone = json.loads(json.dumps(measured(model, text, tmp_path / "alone", World())))
    torch.set_num_threads(threads)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    subprocess.run(
        [*command, WORKER, model, text, tmp_path / "found"],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for rank in range(ranks):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert found["tokens"] == alone["tokens"]
        assert found["head_rows"] == alone["head_rows"]
        assert found["eval"] == alone["eval"]
        assert found["precise"] == alone["precise"]
        assert found["score"] == alone["score"]
