"""The command line: results on stdout, one sentence and exit code 2 on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unmask
from unmask.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, length=16, dropout=0.0)
    lm = unmask.LanguageModel.new(backbone, unmask.MDLM(), unmask.Tokenizer.characters("abc "))
    return str(unmask.save(lm, tmp_path_factory.mktemp("model") / "tiny"))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["unmask", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_sample(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(monkeypatch, "sample", folder, "--n", "3", "--length", "8", "--prompt", "abc", "--steps", "4")
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(len(line) == 8 and line.startswith("abc") for line in lines)


@pytest.mark.parametrize(
    "name",
    ["ancestral", "first-hitting", "random-order", "confidence", "threshold", "entropy-bounded", "remask"],
)
def test_every_sampler_has_a_name(
    name: str, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And writes texts longer than the model, in sliding windows."""
    assert run(monkeypatch, "sample", folder, "--length", "21", "--steps", "3", "--sampler", name) == 0
    assert len(capsys.readouterr().out.rstrip("\n")) == 21


def test_sample_json(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "sample", folder, "--length", "8", "--steps", "4", "--seed", "3", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    expected = unmask.load(folder).sample(length=8, sampler=unmask.Ancestral(4), seed=3)
    assert result["texts"] == expected.texts
    assert result["tokens"] == expected.tokens.tolist()
    assert result["network_calls"] == expected.network_calls


def test_infill(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--temperature", "0", "--top-k", "2", "--top-p", "0.9")
    assert run(monkeypatch, "infill", folder, "a<mask:2>b<mask>", *options) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert (len(text), text[0], text[3]) == (5, "a", "b")


def test_score(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "score", folder, "abc", "a b c", "--draws", "32", "--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert [score["text"] for score in scores] == ["abc", "a b c"]
    assert scores[1]["tokens"] == 5
    assert run(monkeypatch, "score", folder, "abc") == 0
    assert "± " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sample", "{folder}", "--steps", "0"], "steps must be a whole number from 1 on; got 0"),
        (["sample", "{folder}", "--temperature", "-1"], "temperature must be 0"),
        (["infill", "{folder}", "<mask:17>"], "longer than the model's 16"),
        (["infill", "{folder}", "abc"], "no hole"),
        (["infill", "{folder}", "xyz<mask>"], "'x' is not in the tokenizer's alphabet"),
        (["score", "{folder}", ""], "empty"),
        (["sample", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    sentence: str,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *(a.format(folder=folder) for a in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("unmask: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def test_an_unknown_command_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "infil") == 2


def test_help_does_not_wait_for_torch() -> None:
    """The installed command itself, and no torch on the way to its help."""
    command = Path(sys.executable).with_name("unmask")
    shown = subprocess.run([command, "infill", "--help"], capture_output=True, text=True, check=True)
    assert 'unmask infill runs/demo "Flat is <mask:2> nested."' in shown.stdout
    code = "import sys, unmask.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
