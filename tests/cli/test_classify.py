"""`unmask classify train`, `eval` and `predict`, as a user gives them."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labelled import letter_rows, tiny_folder, write_csv

Command = Callable[..., Any]
HEADER = ["text", "label"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classify")
    tiny_folder(folder / "model")
    write_csv(folder / "train.csv", HEADER, letter_rows(48))
    write_csv(folder / "test.csv", HEADER, letter_rows(24, seed=1))
    (folder / "glue" / "CoLA").mkdir(parents=True)
    lines = [f"src\t{int(label == 'yes')}\t\t{text}\n" for text, label in letter_rows(24)]
    for part in ("train", "dev"):
        (folder / "glue" / "CoLA" / f"{part}.tsv").write_text("".join(lines))
    return folder


QUICK = ("--lr", "0.02", "--epochs", "4", "--set", "training.bf16=false")


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """The run of all tests that need one."""
    from unmask.cli import main

    before = sys.argv
    words = [str(place / "model"), "--train", str(place / "train.csv"), "--test", str(place / "test.csv")]
    sys.argv = ["unmask", "classify", "train", *words, *QUICK, "--out", str(place / "run")]
    try:
        main()
    finally:
        sys.argv = before
    return place / "run"


def test_a_run_says_what_it_found_and_goes_on_when_it_is_given_again(
    trained: Path, place: Path, command: Command
) -> None:
    words = [str(place / "model"), "--train", str(place / "train.csv"), "--test", str(place / "test.csv")]
    shown = command("classify", "train", *words, *QUICK, "--out", str(trained))
    assert shown.code == 0
    header, accuracy, *_ = shown.out.splitlines()
    assert header.split() == ["test", "figure", "value", "95", "%", "interval", "rows"]
    assert accuracy.split()[:2] == ["test", "accuracy"]
    assert shown.out.splitlines()[-1] == str(trained)
    assert json.loads((trained / "results.json").read_text())["rows"] == {"train": 48, "test": 24}


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_as_if_nothing_had_happened(place: Path, tmp_path: Path) -> None:
    """SIGKILL, whenever it comes: results and weights are those of an uninterrupted run, to the last bit."""
    words = ["classify", "train", place / "model", "--train", place / "train.csv", "--test", place / "test.csv"]
    words += ["--validation-fraction", "0.25", "--epochs", "12", "--set", "training.bf16=false", "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def start(folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "unmask", *map(str, words), str(folder)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert start(whole).wait(300) == 0
    process = start(killed)
    try:
        while not list(killed.glob("step-*")):  # a first checkpoint
            assert process.poll() is None
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert not (killed / "results.json").exists()
    assert start(killed).wait(300) == 0
    ours, theirs = (json.loads((folder / "results.json").read_text()) for folder in (killed, whole))
    assert {**ours, "provenance": None} == {**theirs, "provenance": None}
    files = [folder / "model" / "model.safetensors" for folder in (killed, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_eval(trained: Path, place: Path, command: Command, tmp_path: Path) -> None:
    shown = command("classify", "eval", str(trained), str(place / "test.csv"), "--out", str(tmp_path / "eval.json"))
    assert shown.code == 0, shown.err
    assert "matthews" in shown.out
    assert "rows by label (line) and prediction (column)" in shown.out
    stored = json.loads((tmp_path / "eval.json").read_text())
    (evaluation,) = stored["evaluations"].values()
    run = json.loads((trained / "results.json").read_text())["evaluations"]["test"]
    assert evaluation == run
    assert stored["provenance"]["model"]["sha256"]
    as_json = command("classify", "eval", str(trained), str(place / "test.csv"), "--json")
    assert json.loads(as_json.out)["evaluations"] == stored["evaluations"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_predict(suffix: str, trained: Path, place: Path, command: Command, tmp_path: Path) -> None:
    out = tmp_path / f"predictions{suffix}"
    shown = command("classify", "predict", str(trained), str(place / "test.csv"), str(out))
    assert (shown.code, shown.out.strip()) == (0, str(out))
    if suffix == ".csv":
        rows: list[dict[str, Any]] = list(csv.DictReader(out.read_text().splitlines()))
        shares = [float(row["probability of no"]) + float(row["probability of yes"]) for row in rows]
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        shares = [sum(row["probabilities"].values()) for row in rows]
    assert shares == [pytest.approx(1)] * 24
    texts = [row[0] for row in letter_rows(24, seed=1)]
    assert [row["text"] for row in rows] == texts
    from unmask import load_classifier

    assert [row["prediction"] for row in rows] == load_classifier(trained).predict(texts)  # type: ignore[arg-type]


def test_seeds_give_mean_range_and_standard_error(place: Path, command: Command, tmp_path: Path) -> None:
    words = [str(place / "model"), "--task", "cola", "--data", str(place / "glue"), "--seeds", "2"]
    shown = command("classify", "train", *words, *QUICK[:2], "--epochs", "1", "--out", str(tmp_path / "cola"))
    assert shown.code == 0, shown.err
    header, *lines = shown.out.splitlines()
    assert "range (max - min)  standard error  runs" in header
    assert any(line.split()[:3] == ["dev", "matthews", "*"] for line in lines)
    assert "note: the development set is the test set, as in the MDLM paper" in shown.err
    assert {path.name for path in (tmp_path / "cola").iterdir()} == {"seed-42", "seed-43", "results.json"}
    again = command("classify", "train", *words, *QUICK[:2], "--epochs", "1", "--out", str(tmp_path / "cola"), "--json")
    found = json.loads(again.out)
    assert set(found["runs"]) == {"seed-42", "seed-43"}
    assert found["notes"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("train", "MODEL"), "there is nothing to train on: give a table with --train, or a --task by its name"),
        (("train", "MODEL", "--task", "sst3"), "there is no task 'sst3' (did you mean sst2?)"),
        (("train", "MODEL", "--task", "cola", "--train", "x.csv"), "tables and columns of the task cola are known"),
        (("train", "MODEL", "--data", "x", "--train", "x.csv"), "--data is the folder of named tasks"),
        (("train", "MODEL", "--train", "TRAIN", "--seeds", "0"), "--seeds must be at least 1; got 0"),
        (("train", "MODEL", "--train", "TRAIN", "--seeds", "2", "--folds", "2"), "two ways to repeat a run"),
        (("train", "MODEL", "--train", "TRAIN", "--text", "words"), "has no column 'words'"),
        (("train", "nowhere", "--train", "TRAIN"), "nowhere is not a folder, nor a name on the hub"),
        (("eval", "RUN"), "name either tables to test on, or a --task"),
        (("eval", "MODEL", "TRAIN"), "is not a classifier: its format is 'unmask-2'"),
        (("predict", "RUN", "TRAIN", "out.txt"), "out.txt must end in .csv or .jsonl"),
        (("predict", "RUN", "TRAIN", "out.csv", "--text", "a", "b"), "reads 1 columns of text; --text names 2"),
        (("predict", "RUN", "missing.csv", "out.csv"), "there is no file or folder missing.csv"),
    ],
)
def test_bad_input_is_one_sentence(
    words: tuple[str, ...],
    sentence: str,
    trained: Path,
    place: Path,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"MODEL": str(place / "model"), "TRAIN": str(place / "train.csv"), "RUN": str(trained)}
    shown = command("classify", *(paths.get(word, word) for word in words))
    assert (shown.code, shown.out) == (2, "")
    assert sentence in shown.err
    assert shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
