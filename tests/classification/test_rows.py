"""From tables to rows of ids: special tokens, cutting, padding, the other strand, splits and folds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labelled import bert_folder, letter_rows, write_csv
from unmask import Tokenizer
from unmask.classification import Labels, column_options, read_table
from unmask.classification._encoding import RowEncoder, TrainingBatches, pad_rows
from unmask.classification._labels import find_labels
from unmask.classification._table import fold_rows, split_rows
from unmask.data.tokenizers import load_tokenizer

DNA = Tokenizer.dna()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = bert_folder(tmp_path_factory.mktemp("bert"))
    return Path(folder)


def test_rows_have_the_special_tokens_and_segments_of_berts_template(bert: Path) -> None:
    encoder = RowEncoder(load_tokenizer(bert / "tokenizer.json"), 32)
    (single,) = encoder.encode([("the film",)]).ids
    assert single.tolist() == [2, 9, 7, 3]
    pair = encoder.encode([("the film", "was good")])
    assert pair.ids[0].tolist() == [2, 9, 7, 3, 10, 5, 3]
    assert pair.segments[0].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert encoder.has_prefix
    assert encoder.pad_id == 0


def test_without_a_template_a_text_ends_with_the_end_of_text() -> None:
    bytes_ = RowEncoder(Tokenizer.bytes(), None)
    assert bytes_.encode([("ab",)]).ids[0].tolist() == [97, 98, 0]
    assert bytes_.encode([("a", "b")]).ids[0].tolist() == [97, 0, 98, 0]
    assert RowEncoder(DNA, None).encode([("ACGT",)]).ids[0].tolist() == [7, 8, 9, 10]  # on either strand
    assert RowEncoder(DNA, None).encode([("A", "C")]).ids[0].tolist() == [7, 1, 8, 1]
    with pytest.raises(ValueError, match="no token to put between two texts"):
        RowEncoder(Tokenizer.protein(), None).encode([("A", "C")])


@given(st.integers(0, 9), st.integers(0, 9), st.integers(5, 16))
def test_of_two_texts_the_longer_one_is_cut(first: int, second: int, room: int) -> None:
    """As long as there are too many tokens, the longer text (of two alike, the second) loses its last one."""
    encoder = RowEncoder(Tokenizer.bytes(), room)
    lengths = [first, second]
    while sum(lengths) + 2 > room:
        lengths[0 if lengths[0] > lengths[1] else 1] -= 1
    assert encoder._lengths([first, second], 2) == lengths


def test_too_many_tokens_are_cut_and_counted_or_refused() -> None:
    encoder = RowEncoder(DNA, 4)
    rows = encoder.encode([("ACGTACGT",), ("AC",)])
    assert ([len(row) for row in rows.ids], rows.num_cut) == ([4, 2], 1)
    with pytest.raises(ValueError, match=r"^1 of 2 rows have more than the 4 tokens that are read: raise --max-length"):
        encoder.encode([("ACGTACGT",), ("AC",)], "refuse")


@given(st.lists(st.text("ACGTN", min_size=1, max_size=12), min_size=1, max_size=4))
def test_the_other_strand_of_the_other_strand_is_the_text(texts: list[str]) -> None:
    encoder = RowEncoder(DNA, None)
    rows = encoder.encode([(text,) for text in texts])
    assert encoder.complement is not None
    strands = rows.other_strand(encoder.complement, range(len(texts)))
    other = str.maketrans("ACGTN", "TGCAN")
    assert [DNA.decode(ids) for ids in strands] == [text[::-1].translate(other) for text in texts]


@pytest.mark.parametrize("tokenizer", [Tokenizer.bytes(), Tokenizer.protein(), Tokenizer.text8()])
def test_only_dna_has_another_strand(tokenizer: Tokenizer) -> None:
    assert RowEncoder(tokenizer, None).complement is None


def test_an_epoch_has_every_row_once_on_any_number_of_ranks() -> None:
    encoder = RowEncoder(DNA, None)
    texts = ["A" * (n + 1) for n in range(10)]
    batches = TrainingBatches(encoder.encode([(t,) for t in texts]), np.arange(10.0), 4, 7, encoder.pad_id)
    assert batches.steps_per_epoch == 3
    seen = []
    for step in range(3):
        whole = batches.batch(step, 0, 4)
        assert whole.valid is not None
        assert torch.equal(whole.valid.sum(1), whole.targets.long() + 1)
        parts = [batches.batch(step, 0, 1), batches.batch(step, 1, 3)]
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        seen += whole.targets[whole.counted].tolist()
    assert sorted(seen) == list(range(10))
    assert not torch.equal(batches.batch(0, 0, 4).targets, batches.batch(3, 0, 4).targets)


def test_half_of_the_rows_are_read_on_the_other_strand() -> None:
    encoder = RowEncoder(DNA, None)
    rows = encoder.encode([("AAC",)] * 200)
    batches = TrainingBatches(rows, np.zeros(200), 200, 0, 0, complement=encoder.complement)
    read = {DNA.decode(row.tolist()) for row in batches.batch(0, 0, 200).tokens}
    assert read == {"AAC", "GTT"}
    share = (batches.batch(0, 0, 200).tokens[:, 0] == 9).float().mean()
    assert 0.4 < share < 0.6


def test_padding_is_on_the_right() -> None:
    tokens, valid = pad_rows([np.array([1, 2]), np.array([3])], 9)
    assert tokens.tolist() == [[1, 2], [3, 9]]
    assert valid is not None
    assert valid.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz"])
def test_tables_of_all_formats_are_read(suffix: str, tmp_path: Path) -> None:
    rows = [["good film", "yes"], ["bad film", "no"]]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    elif suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": [r[0] for r in rows], "label": [r[1] for r in rows]}), path)
    else:
        write_csv(tmp_path / "plain", ["text", "label"], rows, "\t" if suffix == ".tsv" else ",")
        plain = (tmp_path / "plain").read_bytes()
        path.write_bytes(gzip.compress(plain) if suffix.endswith(".gz") else plain)
    table = read_table([str(path)], with_labels=True)
    assert table.texts == (("good film",), ("bad film",))
    labels = find_labels(zip(table.places, table.cells, strict=True))
    assert labels.names == ("no", "yes")
    assert table.targets(labels).tolist() == [1.0, 0.0]


def test_columns_may_be_named_or_counted(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "rows.tsv", ["x1", "0"], [["x2", "1"]], "\t")
    assert read_table([path], column_options(("1",), "2"), with_labels=True).texts == (("x1",), ("x2",))
    path = write_csv(tmp_path / "pairs.csv", ["a", "b", "same"], [["p", "q", 1], ["r", "s", 0]])
    pairs = read_table([path], column_options(("a", "b"), "same"), with_labels=True)
    assert (pairs.texts, pairs.columns) == ((("p", "q"), ("r", "s")), ("a", "b"))


def test_classes_that_are_numbers_are_in_their_order() -> None:
    labels = find_labels(("", value) for value in ("10", 9, "2", 2.0, True))
    assert labels.names == ("1", "2", "9", "10")
    named = Labels(("negative", "positive"))
    assert [named.parse(value, "") for value in ("positive", 0, "1")] == [1.0, 0.0, 1.0]


def test_splits_and_folds_divide_the_rows() -> None:
    valid, train = split_rows(100, 0.1, seed=1)
    assert (len(valid), len(train)) == (10, 90)
    assert sorted([*valid, *train]) == list(range(100))
    assert split_rows(100, 0.1, seed=2)[0].tolist() != valid.tolist()
    folds = [fold_rows(11, 3, number) for number in range(3)]
    assert sorted(row for test, _ in folds for row in test) == list(range(11))
    assert all(sorted([*test, *rest]) == list(range(11)) for test, rest in folds)


def test_the_letters_of_the_other_tests_have_two_classes() -> None:
    assert {row[1] for row in letter_rows(4)} == {"yes", "no"}
