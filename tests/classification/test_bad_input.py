"""What is wrong with labelled rows, settings and texts is said in one sentence, before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labelled import experiment, letter_rows, tiny_folder, write_csv
from unmask import Tokenizer
from unmask.classification import LabelledData, find_task, run_classification, task_data
from unmask.training.lora import LoRA

HEADER = ["text", "label"]
GOOD: list[list[object]] = [["abc", "yes"], ["bcd", "no"], ["cde", "yes"], ["def", "no"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model") / "model")


def refused(tmp_path: Path, model: str, sentence: str, **changes: Any) -> None:
    train = changes.pop("train", None) or write_csv(tmp_path / "train.csv", HEADER, GOOD)
    test = changes.pop("test", None)
    with pytest.raises(ValueError, match=sentence) as caught:
        run_classification(experiment(model, train, test, **{"epochs": 1, **changes}), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("header", "rows", "sentence"),
    [
        (["words", "label"], GOOD, "has no column 'text' and 'label' or .*; its first line has 'words', 'label'"),
        (["text", "class"], GOOD, "has no column .*its first line has 'text', 'class'"),
        (HEADER, [*GOOD, ["abc", ""]], "train.csv line 6 has no label; every row needs one"),
        (HEADER, [["abc", "yes"], ["bcd", "yes"]], "all rows have the label 'yes': a classifier needs two classes"),
        (HEADER, [*GOOD, [" ", "yes"]], r"train.csv line 6 has an empty text in 'text': fill it, or .*--skip-empty"),
        (HEADER, [], "train.csv holds no rows"),
        (HEADER, [*GOOD, ["abc", "3.5"], ["abc", "1"]], None),
        (HEADER, [["abc", "3.5"], ["abc", "1"]], "line 2 has the label '3.5', a number: say --predict number"),
        (HEADER, [*GOOD, ["éèê" * 9, "no"]], "cannot be written; it has"),
    ],
)
def test_training_rows(
    header: list[str], rows: list[list[object]], sentence: str | None, model: str, tmp_path: Path
) -> None:
    table = write_csv(tmp_path / "train.csv", header, rows)
    if sentence is None:
        assert run_classification(experiment(model, table, epochs=1), tmp_path / "run") is not None
    else:
        refused(tmp_path, model, sentence, train=table)


def test_unknown_labels_in_the_test_are_found_before_training(model: str, tmp_path: Path) -> None:
    test = write_csv(tmp_path / "test.csv", HEADER, [["abc", "yes"], ["abc", "yess"]])
    refused(tmp_path, model, r"test.csv line 3 has the unknown label 'yess' \(did you mean yes\?\)", test=test)
    test = write_csv(tmp_path / "test.csv", HEADER, [["abc", ""]])
    refused(tmp_path, model, "test.csv line 2 has no label", test=test)


def test_labels_that_the_test_lacks_are_told(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_csv(tmp_path / "train.csv", HEADER, GOOD)
    test = write_csv(tmp_path / "test.csv", HEADER, [["abc", "yes"]])
    assert run_classification(experiment(model, train, test, epochs=1), tmp_path / "run") is not None
    assert "no row of test has the label no, which the training rows have" in capsys.readouterr().err


def test_numbers(model: str, tmp_path: Path) -> None:
    refused(tmp_path, model, "train.csv line 2 has the label 'yes', which is not a finite number", is_number=True)
    same = write_csv(tmp_path / "same.csv", HEADER, [["abc", 1.5], ["bcd", 1.5]])
    refused(tmp_path, model, "all 2 training rows have the label 1.5: there is nothing", is_number=True, train=same)


def test_too_many_tokens(model: str, tmp_path: Path) -> None:
    long = write_csv(tmp_path / "long.csv", HEADER, [*GOOD, ["abcdefgh" * 4, "no"]])
    refused(tmp_path, model, "1 of 5 rows have more than the 24 tokens", train=long, too_long="refuse")
    result = run_classification(experiment(model, long, long, epochs=1), tmp_path / "run")
    assert result is not None
    assert result.cut == {"train": 1, "test": 1}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epochs": 0}, "epochs must be at least 1; got 0"),
        ({"pooling": "max"}, "pooling must be one of first, mean, last; got 'max'"),
        ({"patience": 2}, "patience needs validation rows"),
        ({"metric": "accuracies"}, r"there is no metric 'accuracies' \(did you mean accuracy\?\)"),
        ({"validation_fraction": 0.01}, "a share of 0.01 of 4 rows leaves 0 rows for validation"),
        ({"validation_fraction": 1.0}, r"validation_fraction is a share of the rows, in \[0, 1\); got 1.0"),
        ({"head_only": True, "lora": LoRA(2)}, "either only the head is trained, or LoRA adapters"),
        ({"reverse_complement": True}, "reverse_complement is for single texts of DNA"),
        ({"max_length": 1}, "max_length 1 leaves no room for text beside 1 special tokens"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\); got 1.0"),
        ({"folds": 9}, "4 rows can be divided into 2 to 4 folds; got 9"),
    ],
)
def test_settings(changes: dict[str, Any], sentence: str, model: str, tmp_path: Path) -> None:
    refused(tmp_path, model, sentence, **changes)


def test_sources_that_are_no_tables(model: str, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("abc")
    refused(tmp_path, model, "notes.txt is no table with columns; tables are .json, .jsonl", train=str(text))
    refused(tmp_path, model, "there is no file or folder", train=str(tmp_path / "missing.csv"))


def test_tasks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no task 'sst-2' \(did you mean sst2\?\); there are cola"):
        find_task("sst-2")
    with pytest.raises(ValueError, match="is not a folder with labelled sets"):
        task_data("sst2", tmp_path / "missing")
    with pytest.raises(ValueError, match=r"has no SST-2/train or sst2/train with a suffix of .json"):
        task_data("sst2", tmp_path)
    (tmp_path / "QNLI").mkdir()
    write_csv(tmp_path / "QNLI" / "dev.tsv", ["question", "sentence", "label"], [["a", "b", "entailment"]], "\t")
    with pytest.raises(ValueError, match="there are no training rows, only those of the test: divide these with"):
        task_data("qnli", tmp_path)
    assert task_data("qnli", tmp_path, folds=2).train is None
    with pytest.raises(ValueError, match="there are no labelled rows"):
        LabelledData()


def test_texts_of_another_alphabet(model: str, tmp_path: Path) -> None:
    dna = tiny_folder(tmp_path / "dna", tokenizer=Tokenizer.dna())
    prose = write_csv(tmp_path / "prose.csv", HEADER, [["good film", "1"], ["bad film", "0"]])
    with pytest.raises(ValueError, match=r"would become \[UNK\]"):
        run_classification(experiment(dna, prose, epochs=1), tmp_path / "run")


def test_a_run_that_is_not_finished_has_no_classifier(model: str, tmp_path: Path) -> None:
    from unmask.classification import load_classifier

    table = write_csv(tmp_path / "train.csv", HEADER, letter_rows(8))
    settings = experiment(model, table, epochs=1)
    run_classification(settings, tmp_path / "run")
    assert load_classifier(tmp_path / "run").predict([]) == []
    (tmp_path / "run" / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a run that is not finished: give its command again"):
        load_classifier(tmp_path / "run")
    changed = replace(settings, training=replace(settings.training, seed=9))
    with pytest.raises(ValueError, match=r"training.seed was 3 and is now 9"):
        run_classification(changed, tmp_path / "run")
