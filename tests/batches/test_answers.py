"""Answers on disk: what a killed process or a full disk leaves behind is either a whole result or none."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from unmask.batches import AnswerFile

IDENTITY = {"input": "1" * 64, "seed": 0}


def test_results_survive_and_the_end_replaces_the_folder(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "answers.jsonl")
    with file.open_run(IDENTITY, restart=False):
        file.append(1, [{"text": "é"}])
    other_rank = AnswerFile(tmp_path / "answers.jsonl", rank=1)
    other_rank.append(0, ["a", "b"])
    with file.open_run(IDENTITY, restart=False):
        assert file.read() == {1: [{"text": "é"}], 0: ["a", "b"]}
        file.write(iter(["one", "two"]), {"failed": 3})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["answers.jsonl", "answers.jsonl.run.json"]
    assert file.path.read_text() == "one\ntwo\n"
    done = file.finished_run(IDENTITY)
    assert done is not None
    assert done["failed"] == 3


@pytest.mark.parametrize("keep", [1, 10, -1])
def test_a_line_that_was_cut_off_is_no_result(tmp_path: Path, keep: int) -> None:
    file = AnswerFile(tmp_path / "answers.jsonl")
    with file.open_run(IDENTITY, restart=False):
        file.append(0, ["a"])
        file.append(1, ["b"])
    journal = file.folder / "rank-0.jsonl"
    whole = journal.read_bytes()
    first = whole.index(b"\n") + 1
    journal.write_bytes(whole[:first] + whole[first:][:keep])
    assert file.read() == {0: ["a"]}
    file.repair()
    file.append(1, ["c"])
    assert file.read() == {0: ["a"], 1: ["c"]}


def test_what_is_no_json_is_no_result(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "answers.jsonl")
    with file.open_run(IDENTITY, restart=False):
        (file.folder / "rank-0.jsonl").write_bytes(b"\0\0\0\n")
        file.append(1, ["b"])
    assert file.read() == {1: ["b"]}


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AnswerFile(tmp_path / "answers.jsonl")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with file.open_run(IDENTITY, restart=False):
        file.append(0, ["a"])
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(ValueError, match=r"rank-0\.jsonl cannot be written: No space left"):
                file.append(1, ["b"])
            with pytest.raises(ValueError, match=r"answers\.jsonl cannot be written: No space left"):
                file.write(iter(["one"]), {})
        assert file.read()[0] == ["a"]
        assert not file.path.exists()


def test_other_settings_and_other_requests_are_refused(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "answers.jsonl")
    with file.open_run(IDENTITY, restart=False):
        file.append(0, ["a"])
    with pytest.raises(ValueError, match=r"another seed \(0 then, 1 now\); --restart"):
        file.open_run({**IDENTITY, "seed": 1}, restart=False).__enter__()
    with pytest.raises(ValueError, match="made with another input; --restart begins anew"):
        file.open_run({**IDENTITY, "input": "2" * 64}, restart=False).__enter__()
    assert file.read() == {0: ["a"]}
    with file.open_run({**IDENTITY, "seed": 1}, restart=True):
        assert file.read() == {}


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "answers.jsonl")
    file.path.write_text("mine\n")
    with pytest.raises(ValueError, match="exists already; --restart replaces it"):
        file.finished_run(IDENTITY)
    record = {"identity": IDENTITY, "sha256": "0" * 64, "failed": 0}
    (tmp_path / "answers.jsonl.run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="has changed since it was written"):
        file.finished_run(IDENTITY)


def test_two_processes_do_not_write_the_same_file(tmp_path: Path) -> None:
    one, other = AnswerFile(tmp_path / "answers.jsonl"), AnswerFile(tmp_path / "answers.jsonl")
    with one.open_run(IDENTITY, restart=False), pytest.raises(ValueError, match="is in use by process"):
        other.open_run(IDENTITY, restart=True).__enter__()


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        AnswerFile(tmp_path).check_path()
    with pytest.raises(ValueError, match="there is no folder"):
        AnswerFile(tmp_path / "a" / "b").check_path()
    with pytest.raises(ValueError, match="not a plain file"):
        AnswerFile(Path("/dev/null")).check_path()
    (tmp_path / "c.partial").write_text("")
    with pytest.raises(ValueError, match=r"c\.partial is not a folder"):
        AnswerFile(tmp_path / "c").check_path()
