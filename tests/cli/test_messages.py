"""What people are told beside the result: on stderr, or in the JSON."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.cli import _progress as progress

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def left_to_right(tmp_path_factory: pytest.TempPathFactory) -> str:
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0, causal=True)
    lm = unmask.LanguageModel.from_config(backbone, unmask.NextToken(), unmask.Tokenizer.characters("abc "))
    return str(unmask.save(lm, tmp_path_factory.mktemp("ar") / "model"))


def test_a_model_that_does_not_look_ahead_says_so(left_to_right: str, folder: str, command: Command) -> None:
    told = "unmask: this model reads from left to right: the text after a hole is kept, but does not influence it\n"
    assert command("infill", left_to_right, "ab<mask:2>c").err == told
    assert command("infill", left_to_right, "ab<mask:2>").err == ""
    assert command("infill", folder, "ab<mask:2>c").err == ""


def test_texts_of_any_length_for_a_model_that_reads_from_left_to_right(left_to_right: str, command: Command) -> None:
    done = command("sample", left_to_right, "--length", "50", "--prompt", "abc")
    assert (done.code, len(done.out.rstrip("\n"))) == (0, 50)
    done = command("complete", left_to_right, "abc " * 9, "a", "--length", "20", "--json")
    assert [len(text) for text in json.loads(done.out)["texts"]] == [20, 20]
    done = command("sample", left_to_right, "--steps", "3")
    assert "this model's sampler chooses the number of steps itself" in done.err


def test_completions_say_which_prompt_they_belong_to(folder: str, command: Command) -> None:
    done = command("complete", folder, "abc", "a b", "--length", "4", "--n", "2")
    heads = [line for line in done.out.splitlines() if line.startswith("─")]
    assert [head.rstrip("─") for head in heads] == [
        "─── 1 of 4 after 'abc' ",
        "─── 2 of 4 after 'abc' ",
        "─── 3 of 4 after 'a b' ",
        "─── 4 of 4 after 'a b' ",
    ]
    assert "─" not in command("complete", folder, "abc", "--length", "4").out
    told = json.loads(command("complete", folder, "abc", "a b", "--length", "4", "--json").out)
    assert told["prompts"] == ["abc", "a b"]


def test_steps_asked_for_are_told_beside_calls(folder: str, command: Command) -> None:
    told = json.loads(command("sample", folder, "--length", "8", "--steps", "100", "--json").out)
    assert told["steps"] == 100
    assert told["nfe"] <= 8
    judged = command("eval-samples", folder, "--steps", "100", "--n", "2", "--length", "8")
    assert judged.err == "nfe is below steps where a step has no token to unmask\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [(["sample", "--prompt", "<mask:3>"], "a prompt"), (["score", "<mask:3>"], "a text that is scored")],
)
def test_a_hole_where_none_can_be_is_pointed_out(words: list[str], what: str, folder: str, command: Command) -> None:
    name, *rest = words
    done = command(name, folder, *rest)
    assert f"unmask: <mask:3> in {what} is taken literally; `unmask infill` fills holes\n" in done.err


def test_score_reads_standard_input(folder: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(b"abc abc")

    monkeypatch.setattr(sys, "stdin", Stdin)
    read = json.loads(command("score", folder, "-", "--json").out)["scores"][0]
    given = json.loads(command("score", folder, "abc abc", "--json").out)["scores"][0]
    assert {**read, "text": ""} == {**given, "text": ""}
    Stdin.buffer = io.BytesIO(b"ab\xff")
    assert "standard input must be UTF-8 text; byte 2 is not" in command("score", folder, "-").err


def test_scores_of_long_texts_say_that_there_were_windows(folder: str, command: Command) -> None:
    done = command("score", folder, "abc " * 10, "abc")
    lines = done.out.splitlines()
    assert lines[0].endswith("(in 3 windows of 16 tokens)")
    assert "windows" not in lines[1]
    told = json.loads(command("score", folder, "abc " * 10, "--json").out)
    assert told["scores"][0]["windows"] == 3


def test_a_folder_without_the_papers_sets_is_one_short_sentence(folder: str, command: Command, tmp_path: Path) -> None:
    done = command("eval", folder, "mdlm-zero-shot", "--folder", str(tmp_path))
    assert done.code == 2
    assert done.err.startswith("unmask: there is no text to evaluate: ptb:validation is missing: ")
    assert done.err.endswith("arxiv:test, pubmed:test)\n") or "more:" in done.err
    assert len(done.err) < 700


def test_work_without_an_end_in_sight_tells_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SHOW_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_LINE_INTERVAL_SECONDS", 0.01)
    told = ""
    with progress.heartbeat("exporting"):
        for _ in range(500):
            told += capsys.readouterr().err
            if told.count("\n") > 1:
                break
            time.sleep(0.01)
    assert told.startswith("exporting: 0 s so far\nexporting: ")
    with progress.heartbeat("nothing", quiet=True):
        time.sleep(0.05)
    assert "nothing" not in capsys.readouterr().err
