"""Sets with a name: where their rows are found, and the protocol of the paper that reports them."""

from __future__ import annotations

from pathlib import Path

import pytest

from labelled import write_csv
from unmask.classification._experiment import load_data, task_data
from unmask.classification._tasks import _GENOMIC, _GLUE, _GUE, TASKS

BASES = [["ACGTACGTAA" if n % 2 else "GGGGCCGGTT", n % 2] for n in range(40)]


def test_the_papers_sets_are_known() -> None:
    assert (len(_GLUE), len(_GENOMIC)) == (8, 8)
    assert {*_GLUE, *_GENOMIC, *_GUE} == set(TASKS)


@pytest.mark.parametrize("name", sorted(_GLUE))
def test_glue_has_the_protocol_of_the_mdlm_paper(name: str) -> None:
    protocol = TASKS[name].protocol
    assert (protocol.lr, protocol.epochs, protocol.batch_size, protocol.max_length) == (2e-5, 3, 16, 128)
    assert (protocol.seeds, protocol.decay, protocol.weight_decay) == ((42,), "linear", 0.0)
    train, valid, tests = TASKS[name].splits(None)
    assert (train is None, valid) == (False, None)  # the development set is the test set
    assert [test.name for test in tests] == (["dev_matched", "dev_mismatched"] if name == "mnli" else ["dev"])


@pytest.mark.parametrize("name", sorted(_GENOMIC))
def test_a_genomic_benchmark_is_read_and_a_tenth_held_out(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    for part in ("train", "test"):
        write_csv(tmp_path / name / f"{part}.csv", ["sequence", "label"], BASES)
    first, other = (load_data(task_data(name, tmp_path), seed) for seed in (1, 2))
    assert first.valid is not None
    assert other.valid is not None
    assert (len(first.train), len(first.valid), len(first.tests["test"])) == (36, 4, 40)
    assert first.digest != other.digest  # each seed holds out rows of its own
    protocol = TASKS[name].protocol
    assert (protocol.epochs, protocol.seeds, protocol.pooling) == (10, (1, 2, 3, 4, 5), "mean")


def test_gue_has_a_validation_set_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "gue" / "mouse_0").mkdir(parents=True)
    for part, rows in (("train", 30), ("dev", 20), ("test", 10)):
        write_csv(tmp_path / "gue" / "mouse_0" / f"{part}.csv", ["sequence", "label"], BASES[:rows])
    found = load_data(task_data("mouse_0", tmp_path), 1)
    assert found.valid is not None
    assert (len(found.train), len(found.valid), len(found.tests["test"])) == (30, 20, 10)
