"""A run's folder: who owns it, what a refused run leaves, what damage stops, and what people are told."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unmask
from test_experiment import TEXT, tiny
from unmask.cli import main
from unmask.distributed import Distributed
from unmask.experiment import Experiment
from unmask.io.locks import folder_lock
from unmask.recipes import RECIPES
from unmask.run import load_ema_model, run_experiment

Told = tuple[int, str, str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints at 3 and 6, beside its text."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "fox.txt").write_text(TEXT)
    assert run_experiment(tiny(folder / "fox.txt"), folder / "run", Distributed())
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def experiment(finished: Path) -> Experiment:
    return tiny(finished.parent / "fox.txt")


@pytest.fixture
def command(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Told]:
    monkeypatch.setitem(RECIPES, "tiny", lambda: experiment)

    def give(*arguments: str | Path) -> Told:
        monkeypatch.setattr(sys, "argv", ["unmask", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capsys.readouterr())

    return give


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def step_back(run: Path) -> None:
    """As if the run had been killed after step 3."""
    shutil.rmtree(run / "step-00000006")
    shutil.rmtree(run / "model")


# Damage


def test_a_damaged_corpus_stops_the_run_by_the_name_of_its_file(run: Path, command: Callable[..., Told]) -> None:
    step_back(run)
    flip(run / "corpus" / "train-00000.bin")
    before = contents(run)
    code, out, err = command("train", "tiny", "--out", run)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{run / 'corpus' / 'train-00000.bin'} is damaged: its SHA-256 is not the one in the manifest" in err
    assert f"delete {run / 'corpus'} and give the same command again" in err
    assert contents(run) == before
    shutil.rmtree(run / "corpus")  # as the sentence says
    assert command("train", "tiny", "--out", run)[0] == 0
    assert (run / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("file", ["manifest.json", "tokenizer.json", "train-00000.bin"])
def test_a_corpus_that_may_not_be_read_is_not_to_be_deleted(
    file: str, run: Path, command: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    step_back(run)

    def refusing(open_file: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *rest: Any, **options: Any) -> Any:
            if not isinstance(path, int) and Path(path) == run / "corpus" / file:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return open_file(path, *rest, **options)

        return refuse

    for module in (os, io):  # who tests as root may read everything
        monkeypatch.setattr(module, "open", refusing(module.open))
    code, _, err = command("train", "tiny", "--out", run)
    assert (code, err.count("\n")) == (2, 1)
    assert "Permission denied" in err
    assert "damaged" not in err
    assert "delete" not in err


def test_no_whole_checkpoint_is_said_and_nothing_is_lost(run: Path, command: Callable[..., Told]) -> None:
    for path in run.glob("step-*"):
        flip(next(path.glob("*.distcp")))
    before, metrics = contents(run), (run / "metrics.jsonl").read_bytes()
    code, out, err = command("train", "tiny", "--out", run)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(r"no intact checkpoint: .*step-00000006/\S+ is damaged.*step-00000003/\S+ is", err)
    assert "--restart to begin at step 1" in err
    assert contents(run) == before
    code, out, err = command("export", run, run.parent / "out")
    assert (code, out) == (2, "")
    assert re.search(r"no intact checkpoint: .*step-00000006/\S+ is damaged", err)
    code, out, err = command("train", "tiny", "--out", run, "--restart")
    assert code == 0
    assert f"starting anew; what was there is in {run / 'aside-1'}" in err
    assert (run / "aside-1" / "metrics.jsonl").read_bytes() == metrics
    names = ["metrics.jsonl", "step-00000003", "step-00000006"]
    assert sorted(entry.name for entry in (run / "aside-1").iterdir()) == names
    assert sorted(entry.name for entry in run.glob("step-*")) == names[1:]


def test_an_older_checkpoint_is_used_and_said(run: Path, experiment: Experiment, command: Any) -> None:
    file = next((run / "step-00000006").glob("*.distcp"))
    flip(file)
    said: list[str] = []
    _, facts = load_ema_model(run, said.append)
    assert facts["steps"].startswith("3 of 6")
    assert len(said) == 1
    assert said[0].startswith(f"{file} is damaged")
    code, _, err = command("train", "tiny", "--out", run)
    assert code == 0
    assert "an older checkpoint is used\nresumed from step 3\n" in err


def test_metrics_of_a_run_without_checkpoints_are_kept(run: Path, command: Callable[..., Told]) -> None:
    for path in run.glob("step-*"):
        shutil.rmtree(path)
    metrics = (run / "metrics.jsonl").read_bytes()
    code, _, err = command("train", "tiny", "--out", run)
    assert code == 0
    assert f"this begins at step 1; the old metrics are in {run / 'aside-1'}" in err
    assert (run / "aside-1" / "metrics.jsonl").read_bytes() == metrics


def test_nothing_is_measured_on_damaged_text(run: Path, command: Callable[..., Told]) -> None:
    flip(run / "corpus" / "train-00000.bin")
    assert command("eval", run, run / "corpus", "--windows", "1")[0] == 0, "which the held-out part is not of"
    flip(run / "corpus" / "valid-00000.bin")
    for given in (("eval", run, run / "corpus", "--windows", "1"), ("report", run)):
        code, out, err = command(*given)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{run / 'corpus' / 'valid-00000.bin'} is damaged" in err


# What people are told


def test_resuming_and_having_finished_are_said(run: Path, command: Callable[..., Told]) -> None:
    code, out, err = command("train", "tiny", "--out", run)
    assert (code, out) == (0, f"{run / 'model'}\n")
    assert err == (
        f"already finished: 6 steps; the model is in {run / 'model'}. --restart trains anew, and a larger"
        " training.steps goes on\n"
    )
    step_back(run)
    code, _, err = command("train", "tiny", "--out", run)
    assert code == 0
    assert err.startswith("resumed from step 3\n")


def test_a_signal_says_that_it_was_saved(
    run: Path, command: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    from unmask.training.trainer import Trainer

    step_back(run)
    take_step = Trainer.step

    def interrupted(self: Trainer) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return take_step(self)

    monkeypatch.setattr(Trainer, "step", interrupted)
    code, _, err = command("train", "tiny", "--out", run)
    assert code == 3
    assert err.endswith("saved at step 4, stopping (give the same command again to go on)\n")


# Whose it is


def test_a_second_training_is_refused_by_name_of_the_first(
    run: Path, experiment: Experiment, command: Callable[..., Told]
) -> None:
    """The first is another process; its lock goes with it, though it is killed."""
    code = "import sys, time; from pathlib import Path; from unmask.io.locks import folder_lock\n"
    code += "with folder_lock(Path(sys.argv[1])): print('in', flush=True); time.sleep(600)"
    first = subprocess.Popen([sys.executable, "-c", code, run], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "in\n"
        before = contents(run)
        code_, out, err = command("train", "tiny", "--out", run)
        assert (code_, out, err.count("\n")) == (2, "", 1)
        assert f"{run} is in use by process {first.pid} on " in err
        assert contents(run) == before
    finally:
        first.kill()
        first.communicate()
    assert (run / ".lock").exists(), "it was killed"
    assert command("train", "tiny", "--out", run)[0] == 0
    assert not (run / ".lock").exists()


def test_a_folder_is_free_again_at_the_end(tmp_path: Path) -> None:
    for _ in range(2):
        with folder_lock(tmp_path):
            with (
                pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"),
                folder_lock(tmp_path),
            ):
                pass
            assert (tmp_path / ".lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_refused_run_leaves_nothing(
    finished: Path, experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = replace(experiment, init_from=str(finished / "model"))
    (tmp_path / "pairs.jsonl").write_text("no pairs\n")
    (tmp_path / "loud.txt").write_text("LOUD!\n" * 99)
    refused = {
        "rows of 17 tokens are longer": replace(start, layout=replace(start.layout, length=17)),
        "nowhere.txt": replace(start, sources=("nowhere.txt",)),
        "pairs.jsonl": replace(start, sources=(str(tmp_path / "pairs.jsonl"),)),
        "loud.txt": replace(experiment, tokenizer="text8", sources=(str(tmp_path / "loud.txt"),)),
        "attention_annealing needs a causal": replace(start, training=replace(start.training, attention_annealing=0.5)),
        "needs text": replace(experiment, sources=()),
        "this experiment fine-tunes a model": replace(experiment, init_from=""),
    }
    for sentence, wrong in refused.items():
        with pytest.raises(ValueError, match=sentence):
            run_experiment(wrong, tmp_path / "runs" / "one", Distributed())
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["loud.txt", "pairs.jsonl"], sentence
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    with pytest.raises(ValueError, match="attention_annealing needs a causal"):
        run_experiment(refused["attention_annealing needs a causal"], tmp_path / "mine", Distributed())
    assert contents(tmp_path / "mine") == {"notes": b"keep"}
    assert run_experiment(experiment, tmp_path / "mine", Distributed())


def test_models_corpora_and_files_are_no_place_for_a_run(
    finished: Path, command: Callable[..., Told], tmp_path: Path
) -> None:
    shutil.copytree(finished / "model", tmp_path / "model")
    shutil.copytree(finished / "corpus", tmp_path / "corpus")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    for name, sentence in (
        ("model", "is a model folder"),
        ("corpus", "is a prepared corpus"),
        ("file", "is a file"),
    ):
        code, out, err = command("train", "tiny", "--out", tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert sentence in err
    assert contents(tmp_path) == before


def test_the_same_source_may_be_spelled_in_many_ways(
    run: Path, finished: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_back(run)
    monkeypatch.chdir(finished.parent)
    for spelled in ("fox.txt", "./fox.txt", str(finished / ".." / "fox.txt")):
        assert run_experiment(replace(experiment, sources=(spelled,)), run, Distributed())
    Path("other.txt").write_text("other text\n" * 99)
    with pytest.raises(ValueError, match=r"another experiment: sources was \['.*fox\.txt'\] and is now \['oth"):
        run_experiment(replace(experiment, sources=("other.txt",)), run, Distributed())


# Going on from a model


def test_what_would_be_ignored_is_refused(finished: Path, command: Callable[..., Told], tmp_path: Path) -> None:
    for wrong in (
        ("--set", "backbone.depth=3"),
        ("--tokenizer", "bytes"),
        ("--set", "training.max_grad_norm=2", "tokenizer=bytes"),
    ):
        given = (
            "train",
            "finetune",
            "--init-from",
            finished,
            "--sources",
            "x",
            "--out",
            tmp_path / "o",
            *wrong,
        )
        code, out, err = command(*given)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"would have no effect: network and tokenizer are those of {finished}" in err
    assert "named with --init-from" in command("train", "tiny", "--set", f"init_from={finished}")[2]
    assert list(tmp_path.iterdir()) == []


def test_what_a_recipe_cannot_know_is_asked_for(
    finished: Path, command: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    for recipe in ("finetune", "sft"):
        for given, asked in (
            ((), "--init-from MODEL and --sources TEXT"),
            (("--init-from", finished), "--sources TEXT"),
            (("--sources", "text.txt"), "--init-from MODEL"),
        ):
            code, out, err = command("train", recipe, *given)
            assert (code, out) == (2, "")
            assert err == f"unmask: {recipe} needs {asked}: it fine-tunes your model on your text\n"
    assert os.listdir() == ["text.txt"]


def test_what_is_shown_is_what_is_used(finished: Path, command: Callable[..., Told]) -> None:
    code, out, err = command("train", "finetune", "--init-from", finished, "--print-config")
    assert (code, err) == (0, "")
    shown, lm = json.loads(out), unmask.load(finished)
    assert shown["backbone"] == unmask.config.to_json(lm.denoiser.config.backbone)
    assert shown["tokenizer"] == f"that of {finished}"
    assert shown["layout"]["length"] == 16


def test_rows_are_fitted_to_the_model_and_that_is_said(
    finished: Path, command: Callable[..., Told], tmp_path: Path
) -> None:
    """`train sft` has rows of 256, and this model takes 16."""
    rows = [{"prompt": f"{n} is ", "completion": "odd" if n % 2 else "even"} for n in range(100)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("train", "sft", "--init-from", finished, "--sources", tmp_path / "pairs.jsonl", "--steps", "2")
    given += ("--batch-size", "2", "--out", tmp_path / "run")
    code, out, err = command(*given)
    assert (code, out) == (0, f"{tmp_path / 'run' / 'model'}\n")
    assert err.startswith(f"rows are 16 tokens long, the most that {finished} takes\n")
    code, _, err = command(*given[:-1], tmp_path / "other", "--set", "layout.length=32")
    assert code == 2
    assert f"rows of 32 tokens are longer than the 16 that {finished} takes: set layout.length=16" in err
    assert not (tmp_path / "other").exists()
