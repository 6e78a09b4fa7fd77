"""Whole reproductions in a tiny world: resumed, spread over machines, shown."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import reproduction_worker
from reference_models import write_reference_model
from tools import reproduction
from unmask import MDLM, LanguageModel, Tokenizer, load, save
from unmask.cli import main
from unmask.reproduce import TABLES, Setup, _lab, _trainings, plan_tables, reproduce, table_lines
from unmask.reproduce._shards import in_order, select_shard
from unmask.reproduce._vocabulary import Published

ROOT = Path(__file__).parents[2]
QUICK = ("--minutes", "0.0005", "--seeds", "2")


class Result(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reproduction_worker.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def tiny_world(monkeypatch: pytest.MonkeyPatch) -> None:
    reproduction_worker.shrink(monkeypatch.setattr)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["unmask", "reproduce", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run


def figures(folder: Path) -> dict[str, Any]:
    return {
        str(file.relative_to(folder)): json.loads(file.read_text())["figures"]
        for file in sorted(folder.glob("cells/*/*.json"))
    }


def write_plan(folder: Path, steps: int) -> None:
    """A plan as a first machine would have measured it."""
    folder.mkdir(parents=True)
    plan = {"format": "unmask-reproduce-1", "scale": "tiny", "minutes": 0.0005, "bf16": False, "steps": {"text": steps}}
    (folder / "plan.json").write_text(json.dumps(plan))


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables, carried out without a break."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    write_plan(folder, 16)
    with pytest.MonkeyPatch.context() as patch:
        reproduction_worker.shrink(patch.setattr)
        patch.setattr(
            sys, "argv", ["unmask", "reproduce", "lm", "schedules", *QUICK, f"--data={data}", f"--out={folder}"]
        )
        main()
    return folder


def test_everything_is_written(whole: Path) -> None:
    assert len(figures(whole)) == 2 * (2 + 1)
    table = json.loads((whole / "results" / "lm.json").read_text())
    assert [row["key"] for row in table["rows"]] == ["ar", "mdlm", "sedd", "d3pm"]
    assert {claim["outcome"] for claim in table["claims"]} <= {"reproduced", "refuted", "undecided"}
    mdlm = next(row for row in table["rows"] if row["key"] == "mdlm")
    assert set(mdlm["figures"]["nats"]["seeds"]) == {"1", "2"}
    assert mdlm["paper"]["perplexity"].startswith("27.04")
    steps = {cell["method"]: cell["steps"] for cell in table["cells"]}
    assert steps == {"ar": 8, "mdlm": 16}
    assert all(cell["provenance"]["data"]["corpus"].startswith("sha256:") for cell in table["cells"])
    rates = json.loads((whole / "plan.json").read_text())["rates"]
    assert set(rates) == {f"text-{method}" for method in steps}
    assert rates["text-mdlm"]["factor"] == float(
        min(rates["text-mdlm"]["pilots"], key=rates["text-mdlm"]["pilots"].get)
    )
    assert not list(whole.glob("runs/*/pilot-*")) + list(whole.glob("runs/*/*/step-*"))
    assert len(list((whole / "corpora").glob("text"))) == 1


def test_what_is_done_is_not_done_again(whole: Path, data: Path, command: Command) -> None:
    before = {file: file.stat().st_mtime_ns for file in [*whole.glob("cells/*/*"), *whole.glob("runs/*/*/model/*")]}
    log = (whole / "log.txt").read_bytes()
    done = command("lm", "schedules", *QUICK, "--data", data, "--out", whole)
    assert (done.code, done.err) == (0, "6 of 6 cells are done already\n")
    assert "Tables 1 and 2: Perplexity of held-out text (tiny, seeds: 2)" in done.out
    assert done.out.endswith(f"{whole / 'index.html'}\n")
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert (whole / "log.txt").read_bytes() == log


def test_the_same_model_serves_several_tables(whole: Path) -> None:
    assert not (whole / "runs" / "schedules-mdlm").exists()
    trainings = {file.parent.name for file in whole.glob("runs/*/seed-1")}
    assert trainings == {"text-ar", "text-mdlm"}


def test_the_page_opens(whole: Path) -> None:
    page = (whole / "index.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 3
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    for text in ("Table 9", "undecided at this scale", "27.04 (LM1B)"):
        assert text in page


def test_json_is_one_object(whole: Path, data: Path, command: Command) -> None:
    done = command("schedules", *QUICK, "--data", data, "--out", whole, "--json")
    (table,) = json.loads(done.out)["tables"]
    assert table["name"] == "schedules"
    assert table["rows"][0]["figures"]["mean"]["mean"] > 0


def test_the_document_is_written_from_the_results(whole: Path, tmp_path: Path) -> None:
    """Every figure of the page is in the JSON files, which name no folder of this machine."""
    page = reproduction.write(whole, tmp_path).read_text(encoding="utf-8")
    place = "<!-- remarks: schedules -->\n"
    (tmp_path / "reproduction.md").write_text(page.replace(place, f"{place}A remark.\n"), encoding="utf-8")
    again = reproduction.write(whole, tmp_path).read_text(encoding="utf-8")
    assert again == page.replace(place, f"{place}A remark.\n")
    stored = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "results").glob("*.json")}
    assert set(stored) == {"lm", "schedules", "plan"}
    assert all(str(whole) not in file.read_text() for file in (tmp_path / "results").rglob("*.json"))
    del stored["plan"]
    for table in stored.values():
        _, rows = table_lines(table)
        assert all(cell in page for row in rows for cell in row)
        assert all(f"{claim['text']} |" in page for claim in table["claims"])


def test_what_was_written_for_the_document_can_be_joined(
    whole: Path, data: Path, tmp_path: Path, command: Command
) -> None:
    reproduction.write(whole, tmp_path)
    out = tmp_path / "out"
    done = command("lm", "schedules", *QUICK, "--data", data, "--out", out, "--join", tmp_path / "results")
    assert done.err == "6 cells joined\n6 of 6 cells are done already\n"
    assert figures(out) == figures(whole)


def test_shards_make_the_whole(whole: Path, data: Path, tmp_path: Path, command: Command) -> None:
    """Two machines with the same plan, joined, have the figures of one."""
    parts = [tmp_path / "first", tmp_path / "second"]
    for number, part in enumerate(parts, start=1):
        write_plan(part, 16)
        done = command("lm", "schedules", *QUICK, "--data", data, "--out", part, "--shard", f"{number}/2")
        assert done.code == 0, done.err
    assert not set(figures(parts[0])) & set(figures(parts[1]))
    joined = tmp_path / "joined"
    done = command("lm", "schedules", *QUICK, "--data", data, "--out", joined, "--join", *parts)
    assert done.err == "6 cells joined\n6 of 6 cells are done already\n"
    assert figures(joined) == figures(whole)
    ours, theirs = (json.loads((folder / "results" / "lm.json").read_text()) for folder in (joined, whole))
    assert (ours["rows"], ours["claims"]) == (theirs["rows"], theirs["claims"])


def test_folders_with_other_steps_are_not_joined(whole: Path, data: Path, tmp_path: Path, command: Command) -> None:
    write_plan(tmp_path / "other", 8)
    done = command("lm", *QUICK, "--data", data, "--out", tmp_path / "other", "--join", whole)
    assert done.code == 2
    assert "trains text for 16 steps, and this folder for 8" in done.err


def test_killed_and_resumed(whole: Path, data: Path, tmp_path: Path, command: Command) -> None:
    """kill -9 in the middle of a training: what was done stays, and the figures are those without a break."""
    folder = tmp_path / "killed"
    write_plan(folder, 16)
    arguments = ["lm", "schedules", *QUICK, f"--data={data}", f"--out={folder}"]
    worker = [sys.executable, str(ROOT / "tests" / "reproduction_worker.py"), "reproduce", *arguments]
    process = subprocess.Popen(worker, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=_environment())
    try:
        deadline = time.monotonic() + 300
        second = folder / "runs" / "text-ar" / "seed-1" / "experiment.json"
        while not second.exists() and time.monotonic() < deadline:  # the second training has begun
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = {file: file.stat().st_mtime_ns for file in folder.glob("cells/*/*.json")}
    assert 1 <= len(done) < 6
    resumed = command(*arguments)
    assert resumed.code == 0, resumed.err
    assert f"{len(done)} of 6 cells are done already" in resumed.err
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert figures(folder) == figures(whole)


def test_a_damaged_measurement_is_named(whole: Path, data: Path, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder, symlinks=True)
    file = folder / "cells" / "lm" / "mdlm-seed-1.json"
    for content in ("{", '{"format": "unmask-reproduce-1", "figures": {"mdlm": 3}}', "[]", '{"format": "other"}'):
        file.write_text(content)
        done = command("lm", *QUICK, "--data", data, "--out", folder)
        assert (done.code, str(file) in done.err, done.err.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "needs TABLES"),
        (("lms",), "there is no table 'lms' (did you mean lm?)"),
        (("lm", "--seeds", "0"), "the seeds are 1 to 100; got 0"),
        (("lm", "--minutes", "0"), "the minutes of a cell must be above 0"),
        (("lm", "--minutes", "nan"), "the minutes of a cell must be above 0"),
        (("lm", "--scale", "paper", "--minutes", "1"), "--minutes is for --scale tiny"),
        (("lm", "--scale", "huge"), "--scale cannot be 'huge'"),
        (("lm", "--data", "/nowhere"), "is not a folder with data sets"),
        (("lm", "--data", "."), "has no text to train on"),
        (("lm", "--shard", "3/2"), "--shard is written I/N"),
        (("lm", "--shard", "half"), "--shard is written I/N"),
        (("lm", "--join", "nowhere"), "nowhere is not the folder of a reproduction"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], told: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert told in done.err
    assert done.err.splitlines()[-1].startswith("unmask: ")


def test_another_budget_in_the_same_folder_is_refused(whole: Path, data: Path, command: Command) -> None:
    done = command("lm", "--minutes", "7", "--data", data, "--out", whole)
    assert done.code == 2
    assert "was begun with --minutes 0.0005" in done.err


def test_the_list_and_the_plan(data: Path, command: Command) -> None:
    listed = command("--list")
    assert all(f"\n{name}" in f"\n{listed.out}" for name in TABLES)
    planned = command("all", "--plan", "--data", data, "--minutes", "2")
    assert "trainings" in planned.out
    paper = json.loads(command("all", "--plan", "--scale", "paper", "--json").out)["plan"]
    assert all(each["gpu_days"] >= 0 for each in paper)


def test_the_plan_of_the_paper() -> None:
    """3.5 trainings of a million steps of 512 rows of 128 tokens, with three seeds."""
    (lm,) = plan_tables([TABLES["lm"]], Setup("paper"))
    assert lm["tokens"] == 3 * 3.5 * 1_000_000 * 512 * 128
    assert 1 < lm["gpu_days"] < 100


def test_a_shared_training_is_planned_once() -> None:
    first, second = plan_tables([TABLES["lm"], TABLES["schedules"]], Setup())
    assert "text-mdlm" in first["new_trainings"]
    assert second["new_trainings"] == []
    assert second["shared_trainings"] == ["text-mdlm"]


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1.0, {0.5, 1, 2}),
        (2.0, {1, 2, 4}),
        (8.0, {1, 2, 4, 8}),
        (0.5, {0.25, 0.5, 1, 2}),
        (0.125, {0.125, 0.25, 0.5, 1, 2}),
    ],
)
def test_the_learning_rate_is_better_than_its_neighbours(best: float, tried: set[float]) -> None:
    """Pilots go on beyond the first three where the best of them is at an end."""
    asked = set()

    def bound(factor: float) -> float:
        asked.add(factor)
        return abs(math.log2(factor / best))

    assert _trainings.descend(_trainings.RATE_FACTORS, bound) == best
    assert asked == tried


def test_zero_shot_takes_the_data_sets_that_are_there(data: Path, tmp_path: Path, command: Command) -> None:
    """One from its validation split, one from its test split, five that are missing."""
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    text = (data / "wikitext2" / "train.tokens").read_text()
    for name in ("ptb/valid.txt", "lambada/test.txt"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text[:2000])
    write_plan(tmp_path / "out", 8)
    mdlm = replace(TABLES["zero-shot"], trainings=lambda setup: _trainings.text_trainings(setup, "mdlm"))
    (table,) = reproduce([mdlm], Setup("tiny", folder, 0.0005, 1), tmp_path / "out")
    figures = next(row for row in table["rows"] if row["key"] == "mdlm")["figures"]
    assert set(figures) == {"ptb", "lambada", "mean_nats"}
    assert figures["mean_nats"]["mean"] == pytest.approx(
        (math.log(figures["ptb"]["mean"]) + math.log(figures["lambada"]["mean"])) / 2
    )
    assert "has none of the data sets" in command("zero-shot", "--data", data, "--out", tmp_path / "none").err


def test_trainings_start_from_published_models_and_from_each_other(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model as it is, one trained from it, and one trained from that: each is measured, the first two as given.

    The last comes first, so that its pace is planned while what it starts from is not there.
    """
    setup = Setup("tiny", data, 0.0005, 1)
    (base,) = _trainings.text_trainings(setup, "mdlm")
    lm = LanguageModel.from_config(base.experiment.backbone, MDLM(), Tokenizer.bytes())
    published = save(lm, tmp_path / "published")
    given = replace(
        base, name="given", method="given", share=0.0, group="other", published=lambda _folder: Published(published)
    )
    tuned = replace(given, name="tuned", method="tuned", share=1.0)
    child = replace(tuned, name="child", method="child", published=None, parent=tuned)
    table = replace(TABLES["lm"], trainings=lambda setup: [child, tuned, given])
    write_plan(tmp_path / "out", 8)
    plan = tmp_path / "out" / "plan.json"
    plan.write_text(json.dumps({key: value for key, value in json.loads(plan.read_text()).items() if key != "steps"}))
    monkeypatch.setattr(_lab.Lab, "_seconds_per_step", lambda *_: 60 * setup.minutes / 8)
    reproduce([table], setup, tmp_path / "out")
    cells = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out" / "cells" / "lm").glob("*.json")}
    assert {name: cell["steps"] for name, cell in cells.items()} == {
        "given-seed-1": 0,
        "tuned-seed-1": 8,
        "child-seed-1": 8,
    }
    assert cells["tuned-seed-1"]["experiment"]["init_from"] == str(published.resolve())
    assert cells["child-seed-1"]["experiment"]["init_from"] == "OUT/runs/tuned/seed-1/model"
    same = load(tmp_path / "out" / "runs" / "given" / "seed-1" / "model").denoiser.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in lm.denoiser.state_dict().items())


@pytest.mark.slow
def test_every_table_on_text(data: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that needs nothing but text and a reference model, with one seed."""
    monkeypatch.setattr(_lab, "RATE_FACTORS", (1.0,))
    write_reference_model(tmp_path / "judge", "gpt2")
    write_plan(tmp_path / "out", 8)
    names = ["lm", "schedules", "steps", "ablation", "time", "caching", "gen-ppl", "ssd-lm"]
    options = ("--minutes", "0.0005", "--seeds", "1", "--data", data, "--reference-model", tmp_path / "judge")
    done = command(*names, *options, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    for name in names:
        table = json.loads((tmp_path / "out" / "results" / f"{name}.json").read_text())
        reached = [row["key"] for row in table["rows"] if row["figures"]]
        assert name == "lm" or reached == [row["key"] for row in table["rows"]]
    caching = json.loads((tmp_path / "out" / "results" / "caching.json").read_text())
    calls = {row["key"]: row["figures"]["calls_10"]["mean"] for row in caching["rows"]}
    assert calls["mdlm-advance"] <= 16 < calls["mdlm-cached"] < calls["mdlm"] <= 160


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}


def test_cells_are_carried_out_seed_by_seed_and_training_by_training(data: Path) -> None:
    setup = Setup(data=data, seeds=2)
    cells = in_order([cell for name in ("lm", "zero-shot") for cell in TABLES[name].cells(setup)])
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    first = [(cell.training.name, cell.table) for cell in cells if cell.seed == 1]
    assert first.index(("text-mdlm", "zero-shot")) == first.index(("text-mdlm", "lm")) + 1
    half = [cell for shard in (1, 2) for cell in select_shard(cells, (shard, 2))]
    assert sorted(cell.name for cell in half) == sorted(cell.name for cell in cells)
