"""The benchmark of requests with caches runs, and texts are the same in company."""

from __future__ import annotations

import sys

import pytest

from benchmarks import serving_caches
from unmask import BlockDiffusion, DiTConfig


def test_a_quick_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = DiTConfig(width=16, depth=1, heads=2, max_length=128)
    kind = "block diffusion (8)"
    monkeypatch.setitem(serving_caches.KINDS, kind, (small, BlockDiffusion(block_size=8), {"steps": 2}))
    monkeypatch.setattr(sys, "argv", ["serving_caches", "--quick", "--kinds", kind])
    serving_caches.main()
    told = capsys.readouterr().out
    assert "100.0% of the texts are the same" in told
    assert "a prompt of 100 tokens" in told
