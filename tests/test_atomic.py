"""A folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from unmask.io.atomic import atomic_folder
from unmask.io.locks import file_lock


def _write(path: Path, text: str, error: BaseException | None = None) -> None:
    with file_lock(path) as alone, atomic_folder(path, alone) as fresh:
        (fresh / "text").write_text(text)
        if error is not None:
            raise error


def test_the_new_folder_takes_the_place_of_the_old_one_and_nothing_else_is_left(tmp_path: Path) -> None:
    for text in ("old", "new"):
        _write(tmp_path / "it", text)
    assert (tmp_path / "it" / "text").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]


def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "it"
    _write(path, "old")
    with pytest.raises(KeyboardInterrupt):
        _write(path, "new", KeyboardInterrupt())
    assert (path / "text").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]


def test_a_folder_that_was_moved_away_by_a_killed_process_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "it"
    _write(path, "old")
    path.rename(tmp_path / ".it.tmp-1-old")  # here it was killed, before the fresh one took its place
    (tmp_path / ".it.tmp-1").mkdir()
    with pytest.raises(KeyboardInterrupt):
        _write(path, "new", KeyboardInterrupt())
    assert (path / "text").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]
