"""Trackers that a run's metrics may also go to: TensorBoard and Weights & Biases.

Each is a frozen dataclass whose `open` gives a `Tracker`. The run's own record is `metrics.jsonl`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias


class Tracker(Protocol):
    """Receives metrics during a run."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


@dataclass(frozen=True)
class TensorBoard:
    """Event files for TensorBoard."""

    folder: str | None = None
    """The folder of the event files; None: `tensorboard/` in the run's folder."""

    def open(self, run_folder: Path, resumed_at: int) -> Tracker:
        """A tracker that continues after step `resumed_at`; later metrics of an earlier process are hidden."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise ValueError("this tracker needs the extra tensorboard: pip install 'unmask[tensorboard]'") from None
        folder = self.folder or str(run_folder / "tensorboard")
        return _TensorBoardTracker(SummaryWriter(folder, purge_step=resumed_at + 1))


@dataclass(frozen=True)
class WandB:
    """A run on Weights & Biases."""

    project: str = "unmask"
    """The project that the run is shown in."""
    name: str | None = None
    """The name of the run; None: W&B makes one up."""
    offline: bool = False
    """Keep the metrics in `wandb/` of the run's folder until `wandb sync`."""

    def open(self, run_folder: Path, resumed_at: int) -> Tracker:
        """A tracker that continues the curves of this folder."""
        try:
            import wandb
        except ImportError:
            raise ValueError("this tracker needs the extra wandb: pip install 'unmask[wandb]'") from None
        settings = run_folder / "experiment.json"
        try:
            run = wandb.init(
                project=self.project,
                name=self.name,
                id=_wandb_run_id(run_folder),
                resume="allow",
                dir=run_folder,
                config=json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else None,
                mode="offline" if self.offline else None,
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise RuntimeError(f"W&B did not start: {error}; log in with `wandb login`, or say offline") from error
        return _WandBTracker(run)


AnyTracker: TypeAlias = TensorBoard | WandB


@dataclass(frozen=True)
class _TensorBoardTracker:
    writer: Any

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


@dataclass(frozen=True)
class _WandBTracker:
    run: Any

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # W&B refuses steps that it has: a resumed run repeats some, with the same metrics.
        if step >= self.run.step:
            self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


def _wandb_run_id(run_folder: Path) -> str:
    """The run's name for W&B, kept in its folder: the same after a move, another in another folder."""
    path = run_folder / "wandb-id.txt"
    if not path.exists():
        path.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
