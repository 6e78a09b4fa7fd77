"""The words of a reproduction: trainings, cells and their measurements, tables, claims and verdicts.

A *cell* is one experiment with one seed. Its measurement is a file; a table is a function of finished cells, and a
claim is a function of a table's figures. So nothing but the measurements must be kept, and all else can be computed
again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from unmask.distributed import Distributed

if TYPE_CHECKING:
    from unmask.data.corpus import Corpus
    from unmask.experiment import Experiment
    from unmask.model import LanguageModel

Outcome: TypeAlias = Literal["reproduced", "refuted", "undecided"]
ALPHA = 0.05
"""The level of all tests."""


class Estimate(NamedTuple):
    """What was measured of one trained model, and its standard error given that model."""

    value: float
    error: float = 0.0


Figures: TypeAlias = Mapping[str, Mapping[str, Estimate]]
"""What a cell measures: row of the table -> column -> estimate."""

Seeds: TypeAlias = Mapping[int, Estimate]
"""An entry of a table: seed -> estimate."""

Results: TypeAlias = Mapping[tuple[str, str], Seeds]
"""A table: (row, column) -> seed -> estimate."""


@dataclass(frozen=True)
class Setup:
    """What all cells of a reproduction have in common."""

    scale: str = "tiny"
    """tiny: minutes on two cores; paper: the paper's networks, steps and data."""
    data: Path | None = None
    """The folder with data sets; None: the source of Python's standard library."""
    minutes: float = 5.0
    """The training time of a cell at the scale tiny; its number of steps is that of a measured speed."""
    seeds: int = 3
    """Cells of each experiment, with the seeds 1, 2, ..."""
    reference_model: str | None = None
    """The causal language model that scores generated texts."""

    def __post_init__(self) -> None:
        if self.scale not in ("tiny", "paper"):
            raise ValueError(f"the scale is tiny or paper; got {self.scale!r}")
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"the minutes of a cell must be above 0; got {self.minutes}")
        if not 1 <= self.seeds <= 100:
            raise ValueError(f"the seeds are 1 to 100; got {self.seeds}")
        if self.data is not None and not self.data.is_dir():
            raise ValueError(f"{self.data} is not a folder with data sets")

    @property
    def is_tiny(self) -> bool:
        """Whether networks and texts are small."""
        return self.scale == "tiny"

    @property
    def windows(self) -> int | None:
        """Held-out windows that are scored: more of them if there is more time; all at the paper's scale."""
        return max(40, min(400, round(100 * self.minutes))) if self.is_tiny else None


class Published(NamedTuple):
    """A published model, and text for it if it needs text of its own."""

    model: Path
    sources: tuple[str, ...] = ()
    """The text to learn; none: that of the experiment."""
    valid_sources: tuple[str, ...] = ()
    """The text that is held out."""

    def change_text(self, experiment: Experiment) -> Experiment:
        """The experiment on this text."""
        if not self.sources:
            return experiment
        prepare = replace(experiment.prepare, valid_sources=self.valid_sources)
        return replace(experiment, sources=self.sources, prepare=prepare)


@dataclass(frozen=True)
class Training:
    """How a method is trained; several tables may measure the same model."""

    name: str
    """Such as text-mdlm: trainings of one name are the same."""
    method: str
    """The method's row in tables."""
    experiment: Experiment
    """Its settings; at the scale tiny, all but the number of steps and the factor of the learning rate."""
    group: str = "text"
    """Trainings of one group have the same text, and the same number of steps but for their `share`."""
    share: float = 1.0
    """Steps as a share of the group's."""
    relative_cost: float = 1.0
    """Seconds of a step, as a multiple of those of `pace`: a guess for plans, that decides nothing."""
    pace: Experiment | None = None
    """The experiment whose speed decides the steps of the group; None: its own."""
    parent: Training | None = None
    """The training whose model, of the same seed, this one starts from."""
    published: Callable[[Path], Published] | None = None
    """Gives a published model, below a folder to write to: what this training starts from or, without a share of the
    steps, what is measured as it is."""


class Cell(NamedTuple):
    """One experiment with one seed: what is measured for a table of the model of one training."""

    table: str
    training: Training
    seed: int

    @property
    def name(self) -> str:
        """Where its measurement lies, below cells/."""
        return f"{self.table}/{self.training.method}-seed-{self.seed}"


@dataclass(frozen=True)
class TrainedModel:
    """What a cell is measured on."""

    setup: Setup
    seed: int
    method: str
    lm: LanguageModel
    corpus: Corpus
    experiment: Experiment
    run: Path
    """The folder of its run, for further trainings from its model; and `run`/model the model itself."""
    scratch: Path
    """A folder for prepared data sets, which all cells share."""
    distributed: Distributed = Distributed()


@dataclass(frozen=True)
class Measurement:
    """The finished cell as a file holds it."""

    table: str
    method: str
    seed: int
    figures: Figures
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Steps, tokens, seconds, learning rate; and the provenance."""


@dataclass(frozen=True)
class Verdict:
    """The answer to a claim: two p-values, each of the hypothesis that the opposite is true."""

    p_reproduced: float
    """The probability of figures like ours if the claim were false."""
    p_refuted: float
    """The probability of figures like ours if the claim were true."""
    evidence: str
    """The figures that were compared, in words."""

    @property
    def outcome(self) -> Outcome:
        """Reproduced, refuted, or undecided at this scale."""
        if self.p_reproduced < ALPHA:
            return "reproduced"
        return "refuted" if self.p_refuted < ALPHA else "undecided"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the test that decides it on our figures."""

    text: str
    test: Callable[[Results], Verdict]
    method: str
    """The test in words."""


class Column(NamedTuple):
    """A column of a table."""

    key: str
    label: str


@dataclass(frozen=True)
class Needs:
    """What text, data or models a table needs at each scale, in words."""

    tiny: str
    paper: str

    def __add__(self, other: Needs) -> Needs:
        """Both."""
        return Needs(f"{self.tiny}; {other.tiny}", f"{self.paper}; {other.paper}")


@dataclass(frozen=True)
class Row:
    """A row of a table, with the paper's figures as it prints them."""

    key: str
    label: str
    paper: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """A table of the paper: what is trained, what is measured, what is claimed."""

    name: str
    number: str
    """As the paper counts, such as Table 1."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    trainings: Callable[[Setup], Sequence[Training]]
    """The trainings whose models are measured."""
    measure: Callable[[TrainedModel], Figures]
    """What is measured of one model."""
    claims: tuple[Claim, ...]
    protocol: tuple[str, ...]
    """How it is done here, and what differs from the paper: a sentence each."""
    needs: Needs
    """What must be there."""
    missing: Callable[[Setup], str | None] = lambda _setup: None
    """Why it cannot be carried out with this setup; None if it can."""
    plot_columns: tuple[str, ...] = ()
    """Columns that the page plots; by default the first."""
    curve: tuple[str, str] | None = None
    """Two columns that the page plots against each other; rows whose keys differ in their last word only are joined."""
    measuring_cost: float = 0.2
    """The time of a measurement as a multiple of a cell's minutes: a guess for plans, that decides nothing."""

    def cells(self, setup: Setup) -> list[Cell]:
        """All cells, a seed after the other: the table is whole as often as a seed is done."""
        trainings = self.trainings(setup)
        return [Cell(self.name, training, seed) for seed in range(1, setup.seeds + 1) for training in trainings]


def collect_results(measurements: Sequence[Measurement]) -> Results:
    """The entries of a table from its finished cells."""
    results: dict[tuple[str, str], dict[int, Estimate]] = {}
    for each in sorted(measurements, key=lambda measurement: measurement.seed):
        for row, figures in each.figures.items():
            for column, estimate in figures.items():
                results.setdefault((row, column), {})[each.seed] = estimate
    return results


def summarize(seeds: Seeds) -> Estimate:
    """The mean over seeds and its standard error; of a single seed, its estimate as it is."""
    values = [estimate.value for estimate in seeds.values()]
    if len(values) == 1:
        return next(iter(seeds.values()))
    return Estimate(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))
