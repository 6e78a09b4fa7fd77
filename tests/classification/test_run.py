"""Whole runs: learn, choose the epoch, resume, LoRA and head only, seeds and folds, two ranks, folders.

Started as a program, this file is its own worker: `test_run.py FOLDER FILES [killed]`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unmask
from labelled import bert_folder, experiment, letter_rows, tiny_folder, write_csv
from processes import run_program
from unmask import Tokenizer
from unmask.classification import (
    ClassificationExperiment,
    is_classifier,
    load_classifier,
    run_classification,
    run_many,
    save_classifier,
)
from unmask.classification import _run as runs
from unmask.distributed import init_distributed
from unmask.training.lora import LoRA
from unmask.training.trainer import Trainer

INTERRUPTED = {"validation_fraction": 0.2, "epochs": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    header = ["text", "label"]
    return {
        "model": tiny_folder(folder / "model"),
        "train": write_csv(folder / "train.csv", header, letter_rows(60)),
        "valid": write_csv(folder / "valid.csv", header, letter_rows(30, seed=1)),
        "test": write_csv(folder / "test.csv", header, letter_rows(40, seed=2)),
    }


def quick(files: dict[str, str], **changes: Any) -> ClassificationExperiment:
    given = {"epochs": 6, **changes}
    return experiment(files["model"], files["train"], files["test"], given.pop("valid", None), **given)


@pytest.mark.parametrize("way", ["whole", "head", "lora"])
def test_it_learns(way: str, files: dict[str, str], tmp_path: Path) -> None:
    changes = {"head": {"head_only": True, "epochs": 12}, "lora": {"lora": LoRA(2), "epochs": 12}}.get(way, {})
    before = load_file(Path(files["model"]) / "model.safetensors")
    result = run_classification(quick(files, **changes), tmp_path / "run")
    assert result is not None
    assert result.evaluations["test"].value("accuracy") >= 0.85
    classifier = load_classifier(tmp_path / "run")
    assert classifier.predict(["aacadaaa", "bbcbdbbb"]) == ["yes", "no"]
    shares = classifier.predict_proba(["aacadaaa"])[0]
    assert shares["yes"] > 0.5
    assert sum(shares.values()) == pytest.approx(1)
    weights = classifier.network.backbone.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, weights[name])}
    assert bool(changed) == (way != "head")
    assert "embedding.weight" in changed if way == "whole" else "embedding.weight" not in changed
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]


def test_numbers_are_learned(files: dict[str, str], tmp_path: Path) -> None:
    rows = [[text, round(str(text).count("a") / 3, 3)] for text, _ in letter_rows(60)]
    table = write_csv(tmp_path / "numbers.csv", ["text", "label"], rows)
    result = run_classification(
        experiment(files["model"], table, table, is_number=True, epochs=8, pooling="mean"), tmp_path / "run"
    )
    assert result is not None
    assert result.evaluations["test"].value("spearman") > 0.8
    classifier = load_classifier(tmp_path / "run")
    few, many = classifier.predict(["bbbbbbbb", "aaaaaaaa"])
    assert isinstance(few, float)
    assert few < many
    with pytest.raises(ValueError, match="predicts numbers, which have no probabilities"):
        classifier.predict_proba(["a"])


def test_the_best_epoch_is_tested_and_patience_ends_the_run(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation figures are made up: the third epoch is the best, and two worse ones end the run."""
    values = iter([0.5, 0.6, 0.9, 0.8, 0.9, 1.0])
    monkeypatch.setattr(
        "unmask.classification._training.BestEpoch._evaluate", lambda _: {"valid_accuracy": next(values)}
    )
    steps: list[torch.Tensor] = []
    step = Trainer.step

    def record(trainer: Trainer) -> Any:
        found = step(trainer)
        steps.append(trainer.model.head.output.weight.detach().clone())
        return found

    monkeypatch.setattr(Trainer, "step", record)
    result = run_classification(quick(files, valid=files["valid"], patience=2, epochs=9), tmp_path / "run")
    assert result is not None
    assert (result.best_epoch, len(result.epochs)) == (3, 5)
    assert len(steps) == 5 * 4  # 60 rows in batches of 16
    classifier = load_classifier(tmp_path / "run")
    assert torch.equal(classifier.network.head.output.weight, steps[3 * 4 - 1])


def test_a_killed_run_goes_on_as_if_nothing_had_happened(files: dict[str, str], tmp_path: Path) -> None:
    """kill -9 in the middle of the third epoch."""
    settings = quick(files, **INTERRUPTED)
    whole = run_classification(settings, tmp_path / "whole")
    done = run_program(__file__, tmp_path / "killed", json.dumps(files), "killed")
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "results.json").exists()
    assert run_classification(settings, tmp_path / "killed") == whole
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_finished_run_is_only_read_and_another_one_is_refused(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = quick(files, epochs=1)
    first = run_classification(settings, tmp_path / "run")
    monkeypatch.setattr(runs, "build_classifier", None)
    assert run_classification(settings, tmp_path / "run") == first
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"belongs to another experiment: dropout was 0.1 and is now 0.5"):
        run_classification(replace(settings, dropout=0.5), tmp_path / "run")
    again = run_classification(settings, tmp_path / "run", restart=True)
    assert again == first


def test_seeds_and_folds_are_summarized(files: dict[str, str], tmp_path: Path) -> None:
    settings = quick(files, epochs=2)
    results = run_many({f"seed-{seed}": settings.with_seed(seed) for seed in (1, 2)}, tmp_path / "seeds")
    assert results is not None
    summary = results.summaries()["test"]["accuracy"]
    values = [run.evaluations["test"].value("accuracy") for run in results.runs.values()]
    assert summary.values == tuple(values)
    assert summary.mean == pytest.approx(sum(values) / 2)
    assert summary.range == pytest.approx(abs(values[0] - values[1]))
    assert summary.standard_error == pytest.approx(abs(values[0] - values[1]) / 2)
    stored = json.loads((tmp_path / "seeds" / "results.json").read_text())
    assert stored["summaries"]["test"]["accuracy"]["mean"] == pytest.approx(summary.mean)
    with pytest.raises(ValueError, match=r"holds 2 classifiers: name one of them, as in .*seed-1"):
        load_classifier(tmp_path / "seeds")
    folds = run_many({f"fold-{n + 1}": settings.with_fold(n, 3) for n in range(3)}, tmp_path / "folds")
    assert folds is not None
    assert [run.rows for run in folds.runs.values()] == [{"train": 40, "fold": 20}] * 3


def test_both_strands_of_dna_have_one_answer(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", tokenizer=Tokenizer.dna())
    rows = [["ACGTACGTAA" if n % 2 else "GGGGCCGGTT", n % 2] for n in range(20)]
    table = write_csv(tmp_path / "dna.csv", ["sequence", "label"], rows)
    result = run_classification(experiment(model, table, table, epochs=1), tmp_path / "run")
    assert result is not None
    classifier = load_classifier(tmp_path / "run")
    assert classifier.config.both_strands
    one, other = classifier.predict_proba(["AAAAAAAACC", "GGTTTTTTTT"])
    assert one["0"] == pytest.approx(other["0"], rel=1e-5)
    classifier.network.config = classifier.config = replace(classifier.config, both_strands=False)
    del classifier.complement
    one, other = classifier.predict_proba(["AAAAAAAACC", "GGTTTTTTTT"])
    assert one["0"] != pytest.approx(other["0"], rel=1e-5)


def test_causal_networks_read_the_last_token(tmp_path: Path, files: dict[str, str]) -> None:
    model = tiny_folder(tmp_path / "causal", causal=True)
    result = run_classification(experiment(model, files["train"], files["test"], epochs=8), tmp_path / "run")
    assert result is not None
    assert load_classifier(tmp_path / "run").config.pooling == "last"
    assert result.evaluations["test"].value("accuracy") > 0.7


@pytest.mark.slow
def test_two_processes_train_what_one_does(files: dict[str, str], tmp_path: Path) -> None:
    alone = run_classification(quick(files, epochs=2, validation_fraction=0.2, dropout=0.0), tmp_path / "one")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", __file__]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launch, tmp_path / "two", json.dumps(files)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert alone is not None
    found = runs.RunResult.from_json(json.loads((tmp_path / "two" / "results.json").read_text()))
    assert found.rows == alone.rows
    for mine, theirs in zip(alone.epochs, found.epochs, strict=True):
        assert mine["valid_loss"] == pytest.approx(theirs["valid_loss"], rel=1e-3)


def test_a_pair_of_texts_with_a_bert(tmp_path: Path) -> None:
    folder, _ = bert_folder(tmp_path / "bert")
    pairs = [["good film", "good" if n % 2 else "bad", n % 2] for n in range(24)]
    table = write_csv(tmp_path / "pairs.jsonl", [], [])
    lines = [json.dumps({"text": a, "other": b, "label": c}) for a, b, c in pairs]
    Path(table).write_text("\n".join(lines))
    settings = experiment(folder, table, epochs=8)
    split = replace(settings.data.train, columns=(("text", "other", "label"),))  # type: ignore[type-var]
    settings = replace(settings, data=replace(settings.data, train=split))
    assert run_classification(settings, tmp_path / "run") is not None
    classifier = load_classifier(tmp_path / "run")
    assert classifier.config.pooling == "first"
    assert classifier.uses_segments
    assert classifier.predict([("good film", "good"), ("good film", "bad")]) == ["1", "0"]
    with pytest.raises(ValueError, match="text 0 must be a pair of texts"):
        classifier.predict(["good"])


def test_folders_come_back_and_damage_is_found(files: dict[str, str], tmp_path: Path) -> None:
    run_classification(quick(files, epochs=1), tmp_path / "run")
    classifier = load_classifier(tmp_path / "run")
    copy = save_classifier(classifier, tmp_path / "copy")
    assert load_classifier(copy).predict_proba(["abc"]) == classifier.predict_proba(["abc"])
    assert is_classifier(copy)
    assert is_classifier(tmp_path / "run")
    assert not is_classifier(files["model"])
    with pytest.raises(ValueError, match="exists already"):
        save_classifier(classifier, copy)
    with pytest.raises(ValueError, match=r"is a classifier: `unmask classify` and `unmask.load_classifier` read it"):
        unmask.load(copy)
    with pytest.raises(ValueError, match="is not a classifier: its format is 'unmask-2'"):
        load_classifier(files["model"])
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="is damaged: its SHA-256 is not the one"):
        load_classifier(copy)


def test_tensors_that_do_not_fit_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    run_classification(quick(files, epochs=1), tmp_path / "run")
    folder = tmp_path / "run" / "model"
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["labels"] = ["no", "yes", "perhaps"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"head.output.bias has shape \[2\], but config.json asks for \[3\]"):
        load_classifier(folder)


def killed(folder: Path, files: dict[str, str]) -> None:
    """A run whose process is killed before its tenth step."""
    step = Trainer.step

    def killed_after_nine(trainer: Trainer) -> Any:
        if trainer.state.step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer)

    Trainer.step = killed_after_nine  # type: ignore[method-assign]
    run_classification(quick(files, **INTERRUPTED), folder)


def main() -> None:
    folder, files = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if sys.argv[3:] == ["killed"]:
        killed(folder, files)
    with init_distributed() as distributed:
        settings = quick(files, epochs=2, validation_fraction=0.2, dropout=0.0)
        assert run_classification(settings, folder, distributed) is not None


if __name__ == "__main__":
    main()
