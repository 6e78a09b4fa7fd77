"""What counts as a checkpoint, what is kept of them, and what a damaged one may not do."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from unmask.training._checkpoint import CheckpointStore
from unmask.training.logger import TrainingLogger


def saved(folder: Path, *steps: int) -> list[Path]:
    store = CheckpointStore(folder)
    return [store.save(step, {"w": torch.ones(4)}, {"step": step}) for step in steps]


def damage(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("contents", ["{}", "[]", "null", '"x"', "", "{", "[" * 10_000])
def test_a_manifest_that_lists_nothing_is_not_whole(tmp_path: Path, contents: str) -> None:
    _, last = saved(tmp_path, 1, 2)
    (last / "manifest.json").write_text(contents)
    step, skipped = CheckpointStore(tmp_path).latest()
    assert step == 1
    assert str(last) in skipped[0]
    assert "damaged" in skipped[0]


@pytest.mark.parametrize("lost", ["state.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("file_too", [False, True])
def test_a_manifest_that_lacks_a_file_is_not_whole(tmp_path: Path, lost: str, file_too: bool) -> None:
    (only,) = saved(tmp_path, 1)
    sums = json.loads((only / "manifest.json").read_text())
    del sums[lost]
    (only / "manifest.json").write_text(json.dumps(sums))
    if file_too:
        (only / lost).unlink()
    error = CheckpointStore(tmp_path).integrity_error(1)
    assert error == f"{only / 'manifest.json'} is damaged: it does not list {lost}"


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    """Two damaged ones that are the newest push out nothing, and go when there are enough newer ones."""
    for damaged in saved(tmp_path, 1, 2, 7, 8)[2:]:
        damage(damaged)
    CheckpointStore(tmp_path).delete_old(2)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (1, 2, 7, 8)]
    saved(tmp_path, 3)
    CheckpointStore(tmp_path).delete_old(2)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (2, 3, 7, 8)]
    saved(tmp_path, 9, 10)
    CheckpointStore(tmp_path).delete_old(2)
    assert names(tmp_path) == ["step-00000009", "step-00000010"]


def test_a_checkpoint_is_read_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = CheckpointStore(tmp_path), list[int]()
    real = store.integrity_error
    saved(tmp_path, 1, 2)
    monkeypatch.setattr(store, "integrity_error", lambda step: (read.append(step), real(step))[1])
    store.delete_old(2)
    store.delete_old(2)
    assert read == [2, 1]


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (moved,) = saved(elsewhere, 1)
    folder.mkdir()
    (folder / "step-00000001").symlink_to(moved)
    (folder / "step-00000000").symlink_to(tmp_path / "nowhere")
    assert CheckpointStore(folder).latest() == (1, [])
    saved(folder, 2, 3)
    CheckpointStore(folder).delete_old(2)
    assert names(folder) == ["step-00000002", "step-00000003"]
    assert CheckpointStore(elsewhere).integrity_error(1) is None
    (folder / "step-00000004").symlink_to(tmp_path / "nowhere")
    saved(folder, 4)
    assert CheckpointStore(folder).latest() == (4, [])


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for where in ("torch.distributed.checkpoint.filesystem.torch.save", "unmask.training._checkpoint.fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(where, full)
            with pytest.raises(OSError, match="No space left on device") as error:
                saved(tmp_path, 2)
        assert error.value.errno == errno.ENOSPC
        assert names(tmp_path) == ["step-00000001"]


def test_what_killed_processes_left_is_swept_up(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.writing").mkdir()
    saved(tmp_path, 1)
    CheckpointStore(tmp_path).remove_leftovers()
    assert names(tmp_path) == ["step-00000001"]


def test_what_is_set_aside_is_never_written_over(tmp_path: Path) -> None:
    for n in (1, 2):
        saved(tmp_path, 1)
        (tmp_path / "metrics.jsonl").write_text(str(n))
        assert CheckpointStore(tmp_path).set_aside("metrics.jsonl", "absent") == tmp_path / f"aside-{n}"
    assert names(tmp_path) == ["aside-1", "aside-2"]
    assert names(tmp_path / "aside-1") == ["metrics.jsonl", "step-00000001"]
    assert (tmp_path / "aside-1" / "metrics.jsonl").read_text() == "1"
    assert CheckpointStore(tmp_path).set_aside("metrics.jsonl") is None


def test_broken_lines_lock_nobody_out(tmp_path: Path) -> None:
    good, late = b'{"step": 3, "loss": 1.0}\n', b'{"step": 5}\n'
    broken = [b"\xff\xfe\n", b"[1]\n", b"1\n", b'{"loss": 1}\n', b'{"step": "x"}\n', b"[" * 9999 + b"\n"]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(good + b"".join(broken) + good + late + b'{"step": 3, "lo')
    with TrainingLogger(tmp_path, 10, 4):
        pass
    assert file.read_bytes() == good + good
    assert names(tmp_path) == ["metrics.jsonl"]
