"""Where cells are carried out: a folder with a plan, runs, measurements and tables.

plan.json               scale, minutes, text; steps of each group, learning rate of each training
corpora/                prepared text, once for all runs
runs/TRAINING/seed-1/   a run, resumed after kill -9 as any run
cells/TABLE/...json     a measurement, written atomically when a cell is done
TABLE.json, index.html  tables and verdicts, functions of the measurements
log.txt                 what training prints
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unmask.config import from_json
from unmask.data.corpus import Corpus
from unmask.distributed import Distributed
from unmask.experiment import Experiment
from unmask.hardware.precision import bf16_is_faster
from unmask.io.atomic import write_json
from unmask.io.locks import file_lock
from unmask.io.untrusted import read_json_object
from unmask.pretrained import load
from unmask.provenance import collect_provenance
from unmask.reproduce._measurements import FORMAT, measurement_to_json, read_measurement
from unmask.reproduce._trainings import PILOT_SEED, PILOT_SHARE, RATE_FACTORS, descend, with_steps
from unmask.reproduce._vocabulary import Cell, Figures, Measurement, Setup, Table, TrainedModel, Training
from unmask.run import build_trainer, prepare_corpus, run_experiment
from unmask.training.logger import format_duration
from unmask.training.loop import DivergedError
from unmask.training.run_folder import RunFolder

_SPEED_STEPS = 12
"""Steps whose time says how many fit into the minutes of a cell; the first two set things up and do not count."""
_MIN_STEPS = 8
"""So many steps a training has at least, however short its time."""


class Stopped(Exception):  # noqa: N818
    """A signal ended a training; the same command goes on from there."""


@dataclass(frozen=True)
class Lab:
    """The folder of a reproduction; every rank has one."""

    folder: Path
    setup: Setup
    distributed: Distributed = Distributed()

    def open(self) -> None:
        """Write the plan, or refuse a folder that was planned otherwise."""
        if not self.distributed.is_main:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file; choose another folder for the reproduction")
        with self.edit_plan() as plan:
            plan.setdefault("format", FORMAT)
            mine = {"scale": self.setup.scale, "minutes": self.setup.minutes if self.setup.is_tiny else None}
            for name, value in mine.items():
                if plan.setdefault(name, value) != value:
                    raise ValueError(
                        f"{self.folder} was begun with --{name} {plan[name]}, and cells of different {name} cannot be"
                        f" compared: give the same, or another folder; got {value}"
                    )

    def run(self, table: Table, cell: Cell) -> Measurement:
        """Carry out a cell, or read its measurement if it is done."""
        done = self.read(cell)
        if done is not None:
            return done
        started = time.time()
        experiment, run, rate = self._trained(cell.training, cell.seed)
        with self._logged():
            trained = self._load(cell, experiment, run)
            figures = table.measure(trained)
        _require_finite(cell, figures)
        facts = {
            "training": cell.training.name,
            "steps": experiment.training.steps if cell.training.share else 0,
            "tokens": _tokens(experiment) if cell.training.share else 0,
            "learning_rate_factor": rate,
            "seconds": round(time.time() - started, 1),
            "load": [round(load, 2) for load in os.getloadavg()],
            "experiment": self._without_folders(experiment.fixed_settings()),
            "provenance": collect_provenance(cell.seed, {"corpus": f"sha256:{trained.corpus.digest}"}),
        }
        measurement = Measurement(cell.table, cell.training.method, cell.seed, figures, facts)
        if self.distributed.is_main:
            write_json(self._cell_file(cell), measurement_to_json(measurement))
        self.distributed.barrier()
        return measurement

    def _without_folders(self, settings: dict[str, Any]) -> Any:
        """Settings whose files are named from DATA and OUT, wherever these are."""
        text = json.dumps(settings)
        for folder, name in ((self.setup.data, "DATA"), (self.folder, "OUT")):
            if folder is not None:
                text = text.replace(json.dumps(str(folder.resolve()))[1:-1], name)
        return json.loads(text)

    def _trained(self, training: Training, seed: int) -> tuple[Experiment, Path, float]:
        """Train a model and what it starts from, as far as that is not done: its experiment, folder and rate."""
        run = self.folder / "runs" / training.name / f"seed-{seed}"
        if not training.share:
            return self._started(training, seed).experiment, run, 1.0
        steps, rate = self._steps(training), self._rate(training)
        started = self._started(training, seed)
        experiment = self._experiment(started, steps, rate, seed)
        self._train(training, experiment, run)
        return experiment, run, rate

    def _started(self, training: Training, seed: int) -> Training:
        """The training with the model that it starts from, which is trained or fetched first."""
        experiment = training.experiment
        if training.parent is not None:
            folder = self._trained(training.parent, seed)[1] / "model"
        elif training.published is not None:
            published = training.published(self.folder / "published")
            folder, experiment = published.model, published.change_text(experiment)
        else:
            return training
        started = experiment.with_init_from(str(folder.resolve()), load(folder))
        return replace(training, experiment=started.with_objective(experiment.objective))

    def read(self, cell: Cell) -> Measurement | None:
        """The measurement of a finished cell; None if it is not done."""
        file = self._cell_file(cell)
        return read_measurement(file) if file.exists() else None

    def measurements(self, table: Table) -> list[Measurement]:
        """Of all finished cells of a table."""
        return [read_measurement(file) for file in sorted((self.folder / "cells" / table.name).glob("*.json"))]

    def _cell_file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.json"

    def plan(self) -> dict[str, Any]:
        """What plan.json says."""
        file = self.folder / "plan.json"
        return read_json_object(file) if file.exists() else {}

    @contextlib.contextmanager
    def edit_plan(self) -> Iterator[dict[str, Any]]:
        """The plan, to be changed: other processes on the same folder wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "plan.json"
        with file_lock(file):
            plan = self.plan()
            if plan and plan.get("format") != FORMAT:
                raise ValueError(f"{file} is not the plan of a reproduction of this version; choose another folder")
            before = json.dumps(plan)
            yield plan
            if json.dumps(plan) != before:
                write_json(file, plan)

    def _steps(self, training: Training) -> int:
        """The steps of a cell: the paper's, or a share of its group's, whose number is measured once."""
        if not self.setup.is_tiny:
            return training.experiment.training.steps
        if training.group not in self.plan().get("steps", {}):
            # Before the plan is locked: what it starts from may have to be planned, and trained, too.
            paced = self._started(replace(training, experiment=training.pace or training.experiment), PILOT_SEED)
        if self.distributed.is_main:
            with self.edit_plan() as plan:
                planned = plan.setdefault("steps", {})
                if training.group not in planned:
                    plan.setdefault("bf16", bf16_is_faster(self.distributed.device))
                    seconds = self._seconds_per_step(paced, plan["bf16"])
                    planned[training.group] = max(_MIN_STEPS, int(60 * self.setup.minutes / seconds))
                    plan.setdefault("seconds_per_step", {})[training.group] = round(seconds, 4)
        self.distributed.barrier()
        steps: int = self.plan()["steps"][training.group]
        return max(_MIN_STEPS, round(training.share * steps))

    def _seconds_per_step(self, training: Training, bf16: bool) -> float:
        """The median of a few steps."""
        experiment = with_steps(training, _SPEED_STEPS, 1.0, PILOT_SEED, bf16)
        run = RunFolder(self.folder / "runs" / training.name / "speed")
        with self._logged():
            self._link_corpus(training, run.path)
            trainer = build_trainer(experiment, prepare_corpus(experiment, run), Distributed())
            trainer.model.train()
            times = []
            for _ in range(_SPEED_STEPS):
                started = time.perf_counter()
                trainer.step()
                times.append(time.perf_counter() - started)
        shutil.rmtree(run.path, ignore_errors=True)
        return statistics.median(times[2:])

    def _rate(self, training: Training) -> float:
        """The factor of the learning rate with which the pilots of the training did best."""
        if not self.setup.is_tiny:
            return 1.0
        chosen = self.plan().get("rates", {}).get(training.name)
        if chosen is None:
            nats: dict[float, float | None] = {}

            def bound(factor: float) -> float:
                if factor not in nats:
                    nats[factor] = self._pilot(training, factor)
                return _or_infinity(nats[factor])

            best = descend(RATE_FACTORS, bound)
            chosen = {"factor": best, "pilots": {str(factor): nats[factor] for factor in sorted(nats)}}
            if self.distributed.is_main:
                with self.edit_plan() as plan:
                    plan.setdefault("rates", {})[training.name] = chosen
                for factor in nats:
                    shutil.rmtree(self._pilot_folder(training, factor), ignore_errors=True)
            self.distributed.barrier()
        rate: float = chosen["factor"]
        return rate

    def _pilot_folder(self, training: Training, factor: float) -> Path:
        return self.folder / "runs" / training.name / f"pilot-{factor:g}"

    def _pilot(self, training: Training, factor: float) -> float | None:
        """Held-out nats per token after a third of the steps with this factor; None if it diverged."""
        steps = max(_MIN_STEPS, round(PILOT_SHARE * self._steps(training)))
        folder = self._pilot_folder(training, factor)
        try:
            started = self._started(training, PILOT_SEED)
            self._train(training, self._experiment(started, steps, factor, PILOT_SEED), folder)
        except DivergedError:
            return None
        return _last_held_out(RunFolder(folder).metrics_file)

    def _experiment(self, training: Training, steps: int, rate: float, seed: int) -> Experiment:
        if self.setup.is_tiny:
            return with_steps(training, steps, rate, seed, self.plan()["bf16"])
        config = replace(training.experiment.training, seed=seed)
        return replace(training.experiment, training=config)

    def _train(self, training: Training, experiment: Experiment, folder: Path) -> None:
        """Train, or resume, or do nothing if it is done. Its checkpoints are no longer needed then."""
        run = RunFolder(folder, self.distributed)
        stored = run.read_experiment()
        if stored is not None and run.is_finished(experiment.training.steps):
            settings: Any = from_json(Experiment, run.read_settings(), str(run.experiment_file))
            if settings.fixed_settings() == experiment.fixed_settings():
                return
        with self._logged():
            self._link_corpus(training, folder)
            finished = run_experiment(experiment, folder, self.distributed)
        if not finished:
            raise Stopped
        if self.distributed.is_main:
            for checkpoint in folder.glob("step-*"):
                shutil.rmtree(checkpoint, ignore_errors=True)
        self.distributed.barrier()

    def _link_corpus(self, training: Training, folder: Path) -> None:
        """Runs of a group share one corpus: that of the run is a link, which is followed."""
        link = folder / "corpus"
        if self.distributed.is_main and not link.exists() and not link.is_symlink():
            corpora = self.folder / "corpora"
            corpora.mkdir(parents=True, exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(corpora / training.group, folder), target_is_directory=True)
        self.distributed.barrier()

    def _load(self, cell: Cell, experiment: Experiment, run: Path) -> TrainedModel:
        if not cell.training.share:
            self._link_published(cell.training, experiment, run)
        lm = load(run / "model").distribute(self.distributed)
        corpus = Corpus.open(run / "corpus", verify=False)
        scratch = self.folder / "corpora" / f"of-{cell.training.group}"
        method = cell.training.method
        return TrainedModel(self.setup, cell.seed, method, lm, corpus, experiment, run, scratch, self.distributed)

    def _link_published(self, training: Training, experiment: Experiment, run: Path) -> None:
        """A model that is measured as it is has a folder like a run: its text, and a link to itself."""
        self._link_corpus(training, run)
        prepare_corpus(experiment, RunFolder(run, self.distributed))
        link = run / "model"
        if self.distributed.is_main and not link.is_symlink():
            assert experiment.init_from is not None
            link.symlink_to(os.path.relpath(experiment.init_from, run), target_is_directory=True)
        self.distributed.barrier()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """What training tells goes to the log."""
        if not self.distributed.is_main:
            yield
            return
        with (self.folder / "log.txt").open("a", encoding="utf-8") as log, contextlib.redirect_stderr(log):
            yield


def run_cells(
    lab: Lab,
    tables: Sequence[Table],
    cells: Sequence[Cell],
    tell: Callable[[str], None],
    whole: Callable[[Table], None],
) -> None:
    """Carry out cells in their order; `tell` gets a line for each, and `whole` is called after a table's last."""
    by_name = {table.name: table for table in tables}
    left = [cell for cell in cells if lab.read(cell) is None]
    if len(left) < len(cells):
        tell(f"{len(cells) - len(left)} of {len(cells)} cells are done already")
    started = time.monotonic()
    for number, cell in enumerate(left, start=1):
        begun = time.monotonic()
        measurement = lab.run(by_name[cell.table], cell)
        now = time.monotonic()
        rest = (now - started) / number * (len(left) - number)
        tell(
            f"{cell.name}: {_headline(measurement)} ({format_duration(now - begun)}); {number} of {len(left)} cells"
            + (f", about {format_duration(rest)} left" if rest else "")
        )
        if all(other.table != cell.table for other in left[number:]):
            whole(by_name[cell.table])


def _require_finite(cell: Cell, figures: Figures) -> None:
    for row, columns in figures.items():
        for column, estimate in columns.items():
            if not all(map(math.isfinite, estimate)):
                raise ValueError(f"{cell.name} has a {column} of {row} that is not finite: {estimate.value}")


def _tokens(experiment: Experiment) -> int:
    return experiment.training.steps * experiment.training.batch_size * experiment.layout.length


def _last_held_out(metrics: Path) -> float | None:
    """The last bound on held-out text in a run's metrics, or the last held-out loss of a model without a bound."""
    last = None
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        record = json.loads(line)
        value = record.get("valid_nats_per_token", record.get("valid_loss"))
        last = last if value is None else float(value)
    return last


def _or_infinity(nats: float | None) -> float:
    return math.inf if nats is None else nats


def _headline(measurement: Measurement) -> str:
    """The first figure of a cell."""
    row, columns = next(iter(measurement.figures.items()))
    column, estimate = next(iter(columns.items()))
    return f"{column} {estimate.value:.4g}" + (f" ({row})" if row != measurement.method else "")
