"""What a server holds does not grow with the shapes that it has met."""

from __future__ import annotations

from pathlib import Path

import pytest

import unmask
from benchmarks.serving_memory import measure_memory
from unmask import DiTConfig, LanguageModel, Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "small"
    backbone = DiTConfig(width=64, depth=2, heads=2, max_length=512)
    unmask.save(LanguageModel.from_config(backbone, unmask.MDLM(), Tokenizer.bytes()), path)
    return path


@pytest.mark.parametrize(
    "count", [pytest.param(60, id="some"), pytest.param(12_000, id="many", marks=pytest.mark.slow)]
)
def test_memory_stays(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bounds on torch's caches it is twice the start after some hundred requests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    start, *sizes = measure_memory(str(folder), count, clients=4)
    assert max(sizes) < 1.3 * start
    assert sizes[-1] < 1.1 * sizes[4]
