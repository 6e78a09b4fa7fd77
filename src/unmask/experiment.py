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
from unmask.diffusion.times import PartTimes
from unmask.evaluation.likelihood import score_rows
from unmask.measurement import AT_ONCE
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.objectives import D3PM, MDLM, SEDD, AnyObjective, Autoregression, BlockDiffusion
from unmask.release import Facts, load, save
from unmask.training import checkpoint
from unmask.training.log import Log
from unmask.training.loop import Run, Training, train
from unmask.training.lowrank import LowRank, merge
from unmask.untrusted import read_object
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
    otherwise have to learn first. `start`: a model to go on from, as `unmask.load` takes it, whose network
    and tokenizer stand for `backbone` and `tokenizer`. `low_rank`: only such differences to it are learned.
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
    start: str | None = None
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        if self.start is None and self.layout.length > self.backbone.length:
            raise ValueError(
                f"rows of {self.layout.length} tokens are longer than the model's {self.backbone.length}"
            )
        if self.evaluate_rows < 1:
            raise ValueError(f"evaluate_rows must be at least 1; got {self.evaluate_rows}")
        if self.start is None and self.low_rank is not None:
            raise ValueError("low_rank is for going on from a model: name one as start")
        if self.start is not None and self.unigram_start:
            raise ValueError(
                "a model to go on from has learned how often tokens occur: leave out unigram_start"
            )
        causal = isinstance(self.objective, Autoregression)
        if self.start is None and self.backbone.causal != causal:
            raise ValueError(
                f"{type(self.objective).__name__} needs backbone.causal={str(causal).lower()};"
                " `with_objective` and --objective see to it"
            )
        if self.training.curriculum is not None:
            self.training.curriculum.applied(self.objective, 0.0, PartTimes())

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


NETWORK = "network.json"
"""The config of the network that a run trains, beside `experiment.json`."""

OBJECTIVES: dict[str, AnyObjective] = {
    "mdlm": MDLM(),
    "d3pm": D3PM(),
    "sedd": SEDD(),
    "ar": Autoregression(),
    "block": BlockDiffusion(exact_counts=True),
}
"""The counterparts that any experiment can be repeated with."""


def carry_out(experiment: Experiment, folder: Path, world: World) -> bool:
    """Prepare, train (or go on training) and export; False if a signal stopped it before its end."""
    corpus = prepare_corpus(experiment, folder, world)
    run = begin(experiment, corpus, world)
    if world.first:
        _write_json(folder / NETWORK, to_json(run.denoise.config))
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
    stated = _with_effect(experiment)
    before = _filled_in(path) if path.exists() else None
    if before is not None:
        _refuse(folder, _differences(before, {**stated, "corpus": before["corpus"]}))
    if world.first:
        tokenizer = experiment.tokenizer if experiment.start is None else _own_tokenizer(experiment, folder)
        request = (experiment.sources, folder / "corpus", tokenizer, experiment.options)
        if before is not None and is_corpus(folder / "corpus"):  # which must not be replaced
            _refuse(folder, [f"{what} has changed since" for what in outdated(*request)])
        prepare(*request, progress)
    world.barrier()
    corpus = Corpus.open(folder / "corpus")
    stated["corpus"] = corpus.digest
    if before is not None:
        _refuse(folder, _differences(before, stated))
    if world.first and before is None:
        _write_json(path, stated)
    world.barrier()
    return corpus


def _own_tokenizer(experiment: Experiment, folder: Path) -> str:
    """That of the model to go on from, in a file of the run's own."""
    file = folder / "tokenizer.json"
    if not file.exists():
        assert experiment.start is not None
        lm = load(experiment.start)
        if lm.tokenizer is None:
            raise ValueError(f"{experiment.start} has no tokenizer to read text with")
        folder.mkdir(parents=True, exist_ok=True)
        _write(file, lm.tokenizer.to_json())
    return str(file)


def _write_json(path: Path, data: Any) -> None:
    _write(path, json.dumps(data, indent=2))


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    fresh = path.with_name(f".{path.name}.writing")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


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
    network: ModelConfig | None = None
    # Unless only differences to it were kept, the model that a run went on from need not be there any more.
    if (folder / NETWORK).exists() and experiment.low_rank is None:
        stated = read_object(folder / NETWORK)
        network = from_json(ModelConfig, stated, str(folder / NETWORK))
    run = begin(experiment, corpus, World(), network)
    run.resume(newest)
    run.ema.settle(run.denoise)
    if experiment.low_rank is not None:
        merge(run.denoise)
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


def begin(experiment: Experiment, corpus: Corpus, world: World, network: ModelConfig | None = None) -> Run:
    """A run of the experiment at its first step.

    `network`: what it turned out to be, for a run whose weights are about to be read from a checkpoint.
    """
    training = experiment.training
    torch.manual_seed(training.seed)
    denoise = _first(experiment, corpus) if network is None else network.build()
    if experiment.unigram_start:
        denoise.backbone.expect(_log_frequencies(corpus))
    if experiment.low_rank is not None:
        experiment.low_rank.apply(denoise)
    loader = Loader(corpus.splits["train"], experiment.layout, training.batch_size, training.seed)
    return Run(denoise, experiment.objective, loader, training, world)


def _first(experiment: Experiment, corpus: Corpus) -> Denoiser:
    """The network before its first step: fresh, or that of the model to go on from."""
    if experiment.start is None:
        return ModelConfig(corpus.vocab, experiment.backbone, experiment.objective).build()
    old = load(experiment.start).denoise
    if corpus.tokenizer.size > old.vocab.size:
        raise ValueError(
            f"the text's tokenizer has {corpus.tokenizer.size} ids, and {experiment.start} only"
            f" {old.vocab.size}"
        )
    if old.max_length is not None and experiment.layout.length > old.max_length:
        raise ValueError(
            f"rows of {experiment.layout.length} tokens are longer than the {old.max_length} that"
            f" {experiment.start} takes"
        )
    # A model that did not know how texts end learns it from the ones it goes on with.
    end = corpus.separator if old.vocab.end is None else old.vocab.end
    config = replace(old.config, objective=experiment.objective, vocab=replace(old.vocab, end=end))
    denoise = config.build()
    denoise.load_state_dict(old.state_dict())
    return denoise


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
    stated = read_object(path)
    if not isinstance(stated.get("corpus"), str):
        raise ValueError(f"{path} is not what a run writes there: it does not say which corpus was used")
    return stated


def _filled_in(path: Path) -> dict[str, Any]:
    """What a run's folder says it is, with the defaults of settings that are newer than it."""
    stated = _stated(path)
    corpus = stated.pop("corpus")
    return {**_with_effect(from_json(Experiment, stated, str(path))), "corpus": corpus}


def _with_effect(experiment: Experiment) -> dict[str, Any]:
    """All settings that weights depend on."""
    stated: dict[str, Any] = to_json(experiment)
    for name in WITHOUT_EFFECT:
        stated["training"].pop(name)
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
