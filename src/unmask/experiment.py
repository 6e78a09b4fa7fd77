"""An experiment is everything that decides a model: text, tokenizer, network, objective, training.

Carried out in a folder, it leaves `experiment.json` (what it is), `corpus/`, `step-*/` (checkpoints),
`metrics.jsonl` and, at the end, `model/`, ready for `unmask.load`. Carrying it out again goes on where it
stopped; carrying out another one in the same folder is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unmask.backbones import AnyBackbone
from unmask.backbones.dit import DiTConfig
from unmask.config import from_json, to_json
from unmask.data.corpus import Corpus, PrepareOptions, is_corpus, outdated, prepare
from unmask.data.encoding import Progress
from unmask.data.folders import replacing_file
from unmask.data.loader import Layout, Loader, Wrapped
from unmask.data.notes import notes
from unmask.diffusion.times import PartTimes
from unmask.evaluation.likelihood import score_rows
from unmask.measurement import AT_ONCE
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.objectives import D3PM, MDLM, SEDD, AnyObjective, Autoregression, BlockDiffusion
from unmask.release import Facts, Metadata, Result, load, save
from unmask.release.weights import weight_files
from unmask.training import checkpoint
from unmask.training.folder import (
    CORPUS,
    EXPERIMENT,
    MODEL,
    NETWORK,
    TOKENIZER,
    claimed,
    differences,
    read_statement,
    refuse,
    resume,
    undamaged,
    write_statement,
)
from unmask.training.log import Log, last_evaluation
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
    backbone: AnyBackbone = DiTConfig()
    objective: AnyObjective = MDLM()
    training: Training = Training()
    layout: Layout = Wrapped()
    options: PrepareOptions = PrepareOptions()
    evaluate_rows: int = 64
    unigram_start: bool = False
    start: str | None = None
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        if self.start is None:
            self._check_fresh_network()
        if self.evaluate_rows < 1:
            raise ValueError(f"evaluate_rows must be at least 1; got {self.evaluate_rows}")
        if self.start is not None and self.unigram_start:
            raise ValueError(
                "a model to go on from has learned how often tokens occur: leave out unigram_start"
            )
        if self.training.curriculum is not None:
            self.training.curriculum.applied(self.objective, 0.0, PartTimes())

    def _check_fresh_network(self) -> None:
        if not isinstance(self.backbone, DiTConfig):
            raise ValueError("a network of another library comes with its weights: name its folder as start")
        if self.low_rank is not None:
            raise ValueError("low_rank is for going on from a model: name one as start")
        if self.layout.length > self.backbone.length:
            raise ValueError(
                f"rows of {self.layout.length} tokens are longer than the model's {self.backbone.length}"
            )
        causal = isinstance(self.objective, Autoregression)
        if self.backbone.causal != causal:
            raise ValueError(
                f"{type(self.objective).__name__} needs backbone.causal={str(causal).lower()};"
                " `with_objective` and --objective see to it"
            )

    def with_objective(self, objective: AnyObjective) -> Experiment:
        """The same with another objective, and the network that it needs: an autoregressive one looks back
        only, so it has no use for a start at both neighbours or a curriculum of times."""
        causal, backbone = isinstance(objective, Autoregression), self.backbone
        training = replace(self.training, curriculum=None) if causal else self.training
        if self.start is None and isinstance(backbone, DiTConfig):
            backbone = replace(backbone, causal=causal, local=None if causal else backbone.local)
        return replace(self, objective=objective, backbone=backbone, training=training)

    def with_start(self, start: str, lm: LanguageModel) -> Experiment:
        """The same, going on from the model that `start` names: with its network, tokenizer and objective,
        and in rows that it takes."""
        longest = lm.denoise.max_length
        length = self.layout.length if longest is None else min(self.layout.length, longest)
        return replace(
            self,
            start=start,
            tokenizer=f"that of {start}",
            backbone=lm.denoise.config.backbone,
            objective=lm.objective,
            layout=replace(self.layout, length=length),
            unigram_start=False,
        )


OBJECTIVES: dict[str, AnyObjective] = {
    "mdlm": MDLM(),
    "d3pm": D3PM(),
    "sedd": SEDD(),
    "ar": Autoregression(),
    "block": BlockDiffusion(exact_counts=True),
}
"""The counterparts that any experiment can be repeated with."""


def carry_out(
    experiment: Experiment,
    folder: Path,
    world: World,
    *,
    preparing: AbstractContextManager[Progress | None] | None = None,
    restart: bool = False,
) -> bool:
    """Prepare, train (or go on training) and export; False if a signal stopped it before its end.

    `preparing` is entered while text is prepared, and gives what is told the bytes done so far. `restart`:
    begin at step 1 again; what was there is kept beside.
    """
    start = _checked(experiment, folder)
    with claimed(folder, world):
        with preparing or nullcontext() as progress:
            corpus = prepare_corpus(experiment, folder, world, progress, start)
        run = begin(experiment, corpus, world, start=start)
        start = None  # its weights were copied: their memory is needed
        if world.first:
            write_statement(folder, NETWORK, to_json(run.denoise.config))
            if read_statement(folder) is None:
                write_statement(folder, EXPERIMENT, {**_with_effect(experiment), "corpus": corpus.digest})
        world.barrier()
        news = resume(run, folder, restart)
        if run.state.step == 0:
            news = [*notes(corpus, experiment.layout), *news]
        finished = _train(experiment, corpus, run, folder, news)
        if finished and world.first:
            lm, facts = averaged_model(folder)
            save(lm, folder / MODEL, overwrite=True, facts=facts, metadata=run_metadata(folder))
        world.barrier()
    return finished


def _checked(experiment: Experiment, folder: Path) -> LanguageModel | None:
    """Refuse what can be seen to be wrong before anything is written; the model to go on from, if any."""
    if not experiment.sources:
        raise ValueError("an experiment needs text to learn: name it as sources")
    if experiment.start == "":
        raise ValueError("this experiment goes on from a model: name it as start")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another folder for the run")
    if (folder / "config.json").exists() and weight_files(folder):
        raise ValueError(f"{folder} is the folder of a model; choose another one for the run")
    if is_corpus(folder):
        raise ValueError(f"{folder} is a prepared corpus; choose another folder for the run")
    if experiment.start is None:
        return None
    start = load(experiment.start)
    longest = start.denoise.max_length
    if start.tokenizer is None:
        raise ValueError(f"{experiment.start} has no tokenizer to read text with")
    if longest is not None and experiment.layout.length > longest:
        raise ValueError(
            f"rows of {experiment.layout.length} tokens are longer than the {longest} that"
            f" {experiment.start} takes: set layout.length={longest}"
        )
    return start


def _train(experiment: Experiment, corpus: Corpus, run: Run, folder: Path, news: list[str]) -> bool:
    """Train to the end, or to a signal (then False); nothing is left to do if the end was reached before."""
    settings, quiet = experiment.training, not run.world.first
    log = Log(folder, settings.steps, run.state.step, quiet, settings.trackers)
    if run.state.step >= settings.steps:
        log.say(
            f"already finished: {settings.steps:,} steps; the model is in {folder / MODEL}, and --restart"
            " trains anew"
        )
        return True
    with log:
        for line in news:
            log.say(line)
        return train(run, folder, log, lambda: _evaluate(experiment, corpus, run))


def prepare_corpus(
    experiment: Experiment,
    folder: Path,
    world: World,
    progress: Progress | None = None,
    start: LanguageModel | None = None,
) -> Corpus:
    """The experiment's text in its folder; free if it is there already, which is then verified.

    A folder of another experiment, or of the same on another text, is refused with what differs. Rank 0
    prepares, the others then read; `progress` is told the bytes done so far. `start` is the model to go on
    from, if it is at hand.
    """
    corpus = _prepared(experiment, folder, progress, start) if world.first else None
    world.barrier()
    return corpus or Corpus.open(folder / CORPUS, verify=False)


def _prepared(
    experiment: Experiment, folder: Path, progress: Progress | None, start: LanguageModel | None
) -> Corpus:
    before, where = _claim(folder), folder / CORPUS
    if before is not None:
        refuse(folder, differences(_comparable(before[0]), _comparable(experiment)))
    tokenizer = experiment.tokenizer
    if experiment.start is not None:
        tokenizer = str(folder / TOKENIZER)
        if before is None or not (folder / TOKENIZER).exists():
            _write_tokenizer(start or load(experiment.start), experiment.start, folder)
    request = (experiment.sources, where, tokenizer, experiment.options)
    if before is None or not where.exists():
        corpus = prepare(*request, progress)
    else:  # which must not be replaced
        corpus = undamaged(where)
        refuse(folder, [f"{what} has changed since" for what in outdated(*request)])
    if before is not None and corpus.digest != before[1]:
        refuse(folder, [f"the SHA-256 of {where} was {before[1]} and is now {corpus.digest}"])
    return corpus


def _write_tokenizer(lm: LanguageModel, name: str, folder: Path) -> None:
    """That of the model to go on from, in a file of the run's own."""
    if lm.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer to read text with")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_file(folder / TOKENIZER) as fresh:
        fresh.write_text(lm.tokenizer.to_json(), encoding="utf-8")


def _claim(folder: Path) -> tuple[Experiment, str] | None:
    """The experiment that the folder belongs to, if any, and the digest of its corpus.

    Settings that are newer than the folder have their defaults.
    """
    statement = read_statement(folder)
    if statement is None:
        return None
    corpus: str = statement.pop("corpus")
    return from_json(Experiment, statement, str(folder / EXPERIMENT)), corpus


def _with_effect(experiment: Experiment) -> dict[str, Any]:
    """All settings that weights depend on."""
    found: dict[str, Any] = to_json(experiment)
    for name in WITHOUT_EFFECT:
        found["training"].pop(name)
    return found


def _comparable(experiment: Experiment) -> dict[str, Any]:
    """The same but for what a model to go on from brings along: a network and a tokenizer."""
    brought = ("backbone", "tokenizer") if experiment.start is not None else ()
    return {key: value for key, value in _with_effect(experiment).items() if key not in brought}


def averaged_model(folder: Path, say: Callable[[str], None] = lambda _: None) -> tuple[LanguageModel, Facts]:
    """The model of a run's newest checkpoint with the averaged weights, and how it was trained.

    `say` is told of newer checkpoints that are damaged.
    """
    claim = _claim(folder)
    if claim is None:
        raise ValueError(f"{folder} is not the folder of a run: it has no {EXPERIMENT}")
    experiment, _ = claim
    newest, damaged = checkpoint.newest(folder)
    if newest is None and damaged:
        raise ValueError(f"{folder} has no checkpoint that is whole: {'; '.join(damaged)}")
    if newest is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    for problem in damaged:
        say(f"{problem}; the checkpoint of step {checkpoint.step_of(newest)} is used")
    corpus = Corpus.open(folder / CORPUS, verify=False)  # for its tokenizer only
    network: ModelConfig | None = None
    # Unless only differences to it were kept, the model that a run went on from need not be there any more.
    if (folder / NETWORK).exists() and experiment.low_rank is None:
        network = from_json(ModelConfig, read_object(folder / NETWORK), str(folder / NETWORK))
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


def run_metadata(folder: Path) -> Metadata:
    """What a run's folder tells a hub: data sets of the hub that it read, and what it measured last."""
    sources = [str(source) for source in (read_statement(folder) or {}).get("sources") or ()]
    names = tuple(source.removeprefix("hub:") for source in sources if source.startswith("hub:"))
    last = last_evaluation(folder)
    if last is None:
        return Metadata(datasets=names)
    step, nats, error = last
    perplexity = math.exp(min(nats, 700.0))
    figures = {"nats_per_token": (nats, error), "perplexity": (perplexity, perplexity * error)}
    text, about = ", ".join(sources), f"upper bound, held-out part, step {step:,}"
    results = (Result(text, name, *figure, about) for name, figure in figures.items())
    return Metadata(datasets=names, results=tuple(results))


def begin(
    experiment: Experiment,
    corpus: Corpus,
    world: World,
    network: ModelConfig | None = None,
    start: LanguageModel | None = None,
) -> Run:
    """A run of the experiment at its first step.

    `network`: what it turned out to be, for a run whose weights are about to be read from a checkpoint.
    `start`: the model to go on from, if it is at hand.
    """
    training = experiment.training
    torch.manual_seed(training.seed)
    denoise = _first(experiment, corpus, start) if network is None else network.build()
    if experiment.unigram_start:
        denoise.backbone.expect(_log_frequencies(corpus))
    if experiment.low_rank is not None:
        experiment.low_rank.apply(denoise)
    loader = Loader(corpus.splits["train"], experiment.layout, training.batch_size, training.seed)
    return Run(denoise, experiment.objective, loader, training, world)


def _first(experiment: Experiment, corpus: Corpus, start: LanguageModel | None) -> Denoiser:
    """The network before its first step: fresh, or that of the model to go on from."""
    if experiment.start is None:
        return ModelConfig(corpus.vocab, experiment.backbone, experiment.objective).build()
    old = (start or load(experiment.start)).denoise
    if corpus.tokenizer.size > old.vocab.size:
        raise ValueError(
            f"the text's tokenizer has {corpus.tokenizer.size} ids, and {experiment.start} only"
            f" {old.vocab.size}"
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
