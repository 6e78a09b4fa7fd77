"""Folders of classes, FOLDER/CLASS/FILE: as tables of a text and its label, and as the Genomic Benchmarks' layout."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from labelled import tiny_folder
from unmask import Tokenizer
from unmask.classification import TASKS, column_options, make_experiment, read_table, run_classification, task_data
from unmask.classification._experiment import load_data
from unmask.data.readers import class_folders

TEXTS = {"positive": {"10.txt": "ACGT\n", "2.txt": "ggg"}, "negative": {"1.txt": "TTT", "0.txt": "CAN"}}


def write_classes(folder: Path, classes: dict[str, dict[str, str]] = TEXTS) -> Path:
    for name, files in classes.items():
        (folder / name).mkdir(parents=True)
        for file, text in files.items():
            (folder / name / file).write_text(text)
    return folder


def test_classes_and_files_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_classes(tmp_path)
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    table = read_table([str(tmp_path)], with_labels=True)
    assert table.texts == (("CAN",), ("TTT",), ("ACGT",), ("ggg",))
    assert table.cells == ("negative", "negative", "positive", "positive")
    assert table.places[2] == str(tmp_path / "positive" / "10.txt")
    assert read_table([str(tmp_path)], column_options(label=None), with_labels=False).texts == table.texts


def test_gzipped_files_are_read(tmp_path: Path) -> None:
    write_classes(tmp_path)
    (tmp_path / "positive" / "3.txt.gz").write_bytes(gzip.compress(b"AC\r\n"))
    assert ("AC",) in read_table([str(tmp_path)], with_labels=True).texts


def test_folders_of_tables_are_no_classes(tmp_path: Path) -> None:
    (tmp_path / "part-1").mkdir()
    (tmp_path / "part-1" / "rows.csv").write_text("text,label\na,x\nb,y\n")
    assert class_folders(tmp_path) is None
    assert len(read_table([str(tmp_path)], with_labels=True)) == 2
    write_classes(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\nc,x\n")
    assert class_folders(tmp_path) is None


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ({"empty/": b""}, r"empty is the folder of a class and holds no files$"),
        ({"positive/0.txt": b"A\xff"}, "0.txt is not UTF-8: byte 0xff at offset 1"),
        ({"positive/0.txt": b"A\0"}, "0.txt is not text: it has a NUL byte at offset 1$"),
        ({"positive/0.fa": b">a\nACGT"}, "0.fa is not a file of text; a folder of classes has one text in each file$"),
        ({"positive/0.txt": b"\n"}, r"0.txt has an empty text in 'text': fill it, or leave such rows out \(--skip-emp"),
        ({"positive/more/": b""}, "more is a folder where a file of the class 'positive' is expected$"),
        ({"README.md": b"a"}, "is a folder of classes, and README.md in it belongs to none$"),
    ],
)
def test_what_is_wrong_is_one_sentence(broken: dict[str, bytes], sentence: str, tmp_path: Path) -> None:
    write_classes(tmp_path)
    for name, content in broken.items():
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        read_table([str(tmp_path)], with_labels=True)
    assert "\n" not in str(caught.value)


def test_there_are_no_columns_of_other_names(tmp_path: Path) -> None:
    write_classes(tmp_path)
    for options, name in ((column_options(("words",)), "words"), (column_options(("text", "other")), "other")):
        with pytest.raises(ValueError, match=f"a folder of classes, has no column '{name}'; it has 'text', 'sentence'"):
            read_table([str(tmp_path)], options, with_labels=True)


def test_genomic_benchmarks_as_they_are_published(tmp_path: Path) -> None:
    name = "human_nontata_promoters"
    many = {label: {f"{i}.txt": base * (i + 1) for i in range(12)} for label, base in (("b", "C"), ("a", "A"))}
    for part in ("train", "test"):
        write_classes(tmp_path / "sets" / name / part, many)
    data = task_data(name, tmp_path / "sets")
    assert data == task_data(name, tmp_path)  # a folder of folders of sets
    loaded = load_data(data, seed=1)
    assert loaded.labels.names == ("a", "b")
    assert (len(loaded.train) + len(loaded.valid or ()), len(loaded.tests["test"])) == (24, 24)
    assert loaded.tests["test"].columns == ("seq",)
    model = tiny_folder(tmp_path / "model", tokenizer=Tokenizer.dna())
    result = run_classification(make_experiment(model, data, TASKS[name].protocol, epochs=1), tmp_path / "run")
    assert result is not None
    assert set(result.evaluations) == {"test"}


def test_one_class_is_refused(tmp_path: Path) -> None:
    name = "human_enhancers_cohn"
    write_classes(tmp_path / name / "train", {"only": {f"{i}.txt": "ACGT" for i in range(20)}})
    with pytest.raises(ValueError, match=r"all rows have the label 'only': a classifier needs two classes or more$"):
        load_data(task_data(name, tmp_path), seed=1)


def test_the_hub_calls_the_human_factors_of_gue_so() -> None:
    train, _, _ = TASKS["tf_3"].splits(None)
    assert train is not None
    assert train.sources == ("hub:leannmlindsey/GUE:human_tf_3:train",)
    assert TASKS["mouse_1"].hub_id == "leannmlindsey/GUE:mouse_1"
