"""An experiment is everything that decides a model: text, tokenizer, network, objective, training.

Carried out in a folder, it leaves `experiment.json` (what it is), `corpus/`, `step-*/` (checkpoints),
`metrics.jsonl` and, at the end, `model/`, ready for `unmask.load`. Carrying it out again goes on where it
stopped; carrying out another one in the same folder is refused.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unmask.backbones.dit import DiTConfig
from unmask.config import from_json, to_json
from unmask.data.corpus import Corpus, PrepareOptions, is_corpus, outdated, prepare
from unmask.data.encoding import Progress
from unmask.data.loader import Layout, Loader, Wrapped
from unmask.evaluation.likelihood import score_rows
from unmask.measurement import AT_ONCE
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import D3PM, MDLM, SEDD, AnyObjective, Autoregression
from unmask.release import Facts, save
from unmask.training import checkpoint
from unmask.training.log import Log
from unmask.training.loop import Run, Training, train
from unmask.world import World

WITHOUT_EFFECT = (
    "microbatch",
    "parallelism",
    "log_every",
    "save_every",
    "evaluate_every",
    "keep",
    "patience",
    "compile",
    "trackers",
)
"""Settings of training that a resumed run may change: the weights do not depend on them."""


@dataclass(frozen=True)
class Experiment:
    """`sources` as `unmask prepare` takes them; `evaluate_rows` held-out rows are scored on the way.

    `unigram_start`: the network begins by predicting each token as often as it occurs, which it would
    otherwise have to learn first.
    """

    sources: tuple[str, ...] = ("stdlib",)
    tokenizer: str = "bpe:4096"
    backbone: DiTConfig = DiTConfig()
    objective: AnyObjective = MDLM()
    training: Training = Training()
    layout: Layout = Wrapped()
    options: PrepareOptions = PrepareOptions()
    evaluate_rows: int = 64
    unigram_start: bool = False

    def __post_init__(self) -> None:
        if self.layout.length > self.backbone.length:
            raise ValueError(
                f"rows of {self.layout.length} tokens are longer than the model's {self.backbone.length}"
            )
        if self.evaluate_rows < 1:
            raise ValueError(f"evaluate_rows must be at least 1; got {self.evaluate_rows}")
        causal = isinstance(self.objective, Autoregression)
        if self.backbone.causal != causal:
            raise ValueError(
                f"{type(self.objective).__name__} needs backbone.causal={str(causal).lower()};"
                " `with_objective` and --objective see to it"
            )
        if self.training.curriculum is not None:
            self.training.curriculum.applied(self.objective, 0.0)

    def with_objective(self, objective: AnyObjective) -> Experiment:
        """The same with another objective, and the network that it needs: an autoregressive one looks back
        only, so it has no use for a start at both neighbours or a curriculum of times."""
        if isinstance(objective, Autoregression):
            backbone = replace(self.backbone, causal=True, local=None)
            return replace(
                self,
                objective=objective,
                backbone=backbone,
                training=replace(self.training, curriculum=None),
            )
        return replace(self, objective=objective, backbone=replace(self.backbone, causal=False))


OBJECTIVES: dict[str, AnyObjective] = {
    "mdlm": MDLM(),
    "d3pm": D3PM(),
    "sedd": SEDD(),
    "ar": Autoregression(),
}
"""The counterparts that any experiment can be repeated with."""


def carry_out(experiment: Experiment, folder: Path, world: World) -> bool:
    """Prepare, train (or go on training) and export; False if a signal stopped it before its end."""
    corpus = prepare_corpus(experiment, folder, world)
    run = begin(experiment, corpus, world)
    path, damaged = checkpoint.newest(folder)
    if path is not None:
        run.resume(path)
    trackers = experiment.training.trackers
    with Log(folder, experiment.training.steps, run.state.step, not world.first, trackers) as log:
        for problem in damaged:
            log.say(f"{problem}; an older checkpoint is used")
        finished = train(run, folder, log, lambda: _evaluate(experiment, corpus, run))
    if finished and world.first:
        lm, facts = averaged_model(folder)
        save(lm, folder / "model", overwrite=True, facts=facts)
    world.barrier()
    return finished


def prepare_corpus(
    experiment: Experiment, folder: Path, world: World, progress: Progress | None = None
) -> Corpus:
    """The experiment's text in its folder, which from then on belongs to it; free if it is there already.

    A folder of another experiment, or of the same on another text, is refused with what differs. Rank 0
    prepares, the others then read; `progress` is told the bytes done so far.
    """
    path = folder / "experiment.json"
    stated = to_json(experiment)
    for name in WITHOUT_EFFECT:
        stated["training"].pop(name)
    before = _stated(path) if path.exists() else None
    if before is not None:
        _refuse(folder, _differences(before, {**stated, "corpus": before["corpus"]}))
    if world.first:
        request = (experiment.sources, folder / "corpus", experiment.tokenizer, experiment.options)
        if before is not None and is_corpus(folder / "corpus"):  # which must not be replaced
            _refuse(folder, [f"{what} has changed since" for what in outdated(*request)])
        prepare(*request, progress)
    world.barrier()
    corpus = Corpus.open(folder / "corpus")
    stated["corpus"] = corpus.digest
    if before is not None:
        _refuse(folder, _differences(before, stated))
    if world.first and before is None:
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(stated, indent=2), encoding="utf-8")
        os.replace(fresh, path)
    world.barrier()
    return corpus


def averaged_model(folder: Path) -> tuple[LanguageModel, Facts]:
    """The model of a run's newest checkpoint with the averaged weights, and how it was trained."""
    path = folder / "experiment.json"
    if not path.exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no {path.name}")
    stated = _stated(path)
    stated.pop("corpus")
    experiment: Experiment = from_json(Experiment, stated, str(path))
    newest, _ = checkpoint.newest(folder)
    if newest is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    corpus = Corpus.open(folder / "corpus")
    run = begin(experiment, corpus, World())
    run.resume(newest)
    run.ema.settle(run.denoise)
    return LanguageModel(run.denoise.eval(), corpus.tokenizer), _facts(experiment, corpus, run)


def _facts(experiment: Experiment, corpus: Corpus, run: Run) -> Facts:
    training = experiment.training
    return {
        "text": ", ".join(experiment.sources),
        "corpus (SHA-256)": corpus.digest,
        "steps": f"{run.state.step:,} of {training.steps:,}, {training.batch_size} rows each",
        "tokens seen": f"{run.state.tokens:,}",
        "optimizer": type(training.optimizer).__name__,
        "weights": f"moving average, decay {training.ema:g}",
        "seed": str(training.seed),
    }


def begin(experiment: Experiment, corpus: Corpus, world: World) -> Run:
    """A run of the experiment at its first step."""
    training = experiment.training
    torch.manual_seed(training.seed)
    denoise = ModelConfig(corpus.vocab, experiment.backbone, experiment.objective).build()
    if experiment.unigram_start:
        denoise.backbone.expect(_log_frequencies(corpus))
    loader = Loader(corpus.splits["train"], experiment.layout, training.batch_size, training.seed)
    return Run(denoise, experiment.objective, loader, training, world)


def _log_frequencies(corpus: Corpus) -> torch.Tensor:
    """log((count + 1)/(total + V)) of each token [V], from 64 stretches of the training text."""
    text = corpus.splits["train"]
    counts = torch.ones(corpus.vocab.size, dtype=torch.float64)
    for part in range(64):
        first = text.tokens * part // 64
        ids = text.read(first, min(text.tokens * (part + 1) // 64, first + 16_384))
        counts += torch.bincount(torch.from_numpy(ids.astype("int64")), minlength=len(counts))
    return (counts / counts.sum()).log()


def _stated(path: Path) -> dict[str, Any]:
    """What a run's folder says it is."""
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(stated, dict) or not isinstance(stated.get("corpus"), str):
        raise ValueError(f"{path} is not what a run writes there: it does not say which corpus was used")
    return stated


def _refuse(folder: Path, changes: list[str]) -> None:
    if changes:
        raise ValueError(
            f"{folder} belongs to another experiment: {'; '.join(changes[:5])}."
            " Take another folder, or go back to what it was"
        )


def _differences(old: Any, new: Any, where: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            d for key in keys for d in _differences(old.get(key), new.get(key), f"{where}.{key}".strip("."))
        ]
    return [] if old == new else [f"{where} was {old!r} and is now {new!r}"]


def _evaluate(experiment: Experiment, corpus: Corpus, run: Run) -> dict[str, float]:
    """Held-out nats per token."""
    if "valid" not in corpus.splits:
        return {}
    split = corpus.splits["valid"]
    layout = replace(experiment.layout, length=min(experiment.layout.length, split.tokens))
    loader = Loader(split, layout, batch_size=min(AT_ONCE, experiment.evaluate_rows))
    with torch.no_grad():
        score = score_rows(
            run.denoise,
            experiment.objective,
            loader,
            None,
            experiment.evaluate_rows,
            replicates=4,
            seed=0,
            world=run.world,
        )
    return {"valid_nats_per_token": score.nats_per_token, "valid_standard_error": score.standard_error}
