"""Trackers with the real libraries: what they wrote is read back; nothing goes to a network."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unmask.config import from_json, to_json
from unmask.training._trackers import TensorBoard, Tracker, WandB
from unmask.training.config import TrainingConfig
from unmask.training.logger import TrainingLogger

FIGURES = {"loss": 2.5, "tokens_per_second": 100.0}


def test_trackers_in_a_config() -> None:
    settings = TrainingConfig(trackers=(TensorBoard(), WandB(project="mine", offline=True)))
    assert from_json(TrainingConfig, to_json(settings)) == settings


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_one_curve_of_a_killed_and_a_resumed_run(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_at, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        with TrainingLogger(tmp_path, 4, resumed_at, trackers=(TensorBoard(),)) as log:
            for step in steps:
                log.log_step(step, {**FIGURES, "loss": float(10 * resumed_at + step)})
            if resumed_at:
                log.log_evaluation(4, {"valid_nats_per_token": 3.0, "valid_standard_error": 0.1})
    events = reading.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert [(e.step, e.value) for e in events.Scalars("valid_nats_per_token")] == [(4, 3.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_writes_where_it_is_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    TensorBoard(str(tmp_path / "elsewhere")).open(tmp_path, 0).close()
    assert list((tmp_path / "elsewhere").glob("events.out.*"))


def records(file: Path) -> Iterator[bytes]:
    """W&B's file is a log in LevelDB's format: blocks of 32 KiB of pieces with 7 bytes before each."""
    content, at, whole = file.read_bytes(), 7, b""
    while at < len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its last piece
            yield whole
            whole = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_writes_a_run_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody is there, if it should ask
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    (tmp_path / "experiment.json").write_text('{"objective": "a test"}')
    seen = []
    for resumed_at, step in ((0, 1), (1, 2)):
        with TrainingLogger(tmp_path, 4, resumed_at, trackers=(WandB(project="p", name="n", offline=True),)) as log:
            log.log_step(step, FIGURES)
            log.log_evaluation(step, {"valid_nats_per_token": 3.0, "valid_standard_error": 0.1})
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        seen += [Record.FromString(data) for data in records(file)]
    runs = [record.run for record in seen if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        ((tmp_path / "wandb-id.txt").read_text().strip(), "p", "n")
    }
    assert any(item.value_json == '"a test"' for run in runs for item in run.config.update)
    history = [record.history for record in seen if record.WhichOneof("record_type") == "history"]
    figures = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in entry.item} for entry in history
    ]
    wanted = ("_step", "loss", "valid_nats_per_token")
    assert [[entry.get(name) for name in wanted] for entry in figures] == [[1, 2.5, 3.0], [2, 2.5, 3.0]]


class Unplugged:
    """A tracker whose network goes down after its first figures."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def open(self, run_folder: Path, resumed_at: int) -> Tracker:
        return self

    def write(self, step: int, figures: object) -> None:
        self.written.append(step)
        if step > 1:
            raise ConnectionError("the network is down")

    def close(self) -> None:
        raise ConnectionError("the network is still down")


def test_a_tracker_that_fails_is_told_once_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Unplugged()
    with TrainingLogger(tmp_path, 9, 0, trackers=(tracker,)) as log:  # type: ignore[arg-type]
        for step in range(1, 5):
            log.log_step(step, FIGURES)
    assert tracker.written == [1, 2]
    assert capsys.readouterr().err.count("the network is") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_tracker_that_cannot_close_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingLogger(tmp_path, 9, 0, trackers=(Unplugged(),)):  # type: ignore[arg-type]
        pass
    assert "Unplugged failed and gets no more metrics; metrics.jsonl still does" in capsys.readouterr().err


def test_only_the_rank_that_speaks_opens_trackers(tmp_path: Path) -> None:
    tracker = Unplugged()
    with TrainingLogger(tmp_path, 9, 0, quiet=True, trackers=(tracker,)) as log:  # type: ignore[arg-type]
        log.log_step(1, FIGURES)
    assert not tracker.written


@pytest.mark.parametrize(
    ("tracker", "library"), [(TensorBoard(), "torch.utils.tensorboard.writer"), (WandB(), "wandb")]
)
def test_a_missing_library_is_named_with_its_extra(
    tracker: TensorBoard | WandB, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r"needs the extra (\w+): pip install 'unmask\[\1\]'"):
        tracker.open(tmp_path, 0)
