"""A tiny model in a folder, and a way to give commands without a new process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import unmask
from unmask.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0)
        lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.characters("abc "))
    return str(unmask.save(lm, tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["unmask", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run
