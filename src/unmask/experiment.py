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

from unmask.backbones import BackboneConfig
from unmask.backbones.dit import DiTConfig
from unmask.config import from_json, to_json
from unmask.data.corpus import Corpus, PrepareConfig, ProgressFn, is_corpus, prepare, stale_reasons
from unmask.data.loader import Loader, PerDocument, PromptCompletionRows, Wrapped
from unmask.diffusion.time_sampling import ClippedTimes
from unmask.distributed import Distributed
from unmask.evaluation.evaluate import EVAL_BATCH_SIZE
from unmask.io.atomic import atomic_file
from unmask.io.untrusted import read_json_object
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.objectives import MDLM, NextToken, Objective
from unmask.objectives.base import MaskedObjective
from unmask.pretrained import CardMetadata, EvalResult, TrainingFacts, load, save
from unmask.pretrained.state_dict import list_weight_files
from unmask.training import checkpoint
from unmask.training.logger import TrainingLogger, read_last_evaluation
from unmask.training.lora import LoRA, merge_lora
from unmask.training.run_folder import (
    CORPUS_FOLDER,
    EXPERIMENT_FILE,
    MODEL_CONFIG_FILE,
    MODEL_FOLDER,
    TOKENIZER_FILE,
    claim_run_folder,
    diff_settings,
    open_run_corpus,
    raise_if_changed,
    read_experiment_json,
    resume_latest,
    write_json,
)
from unmask.training.trainer import Trainer, TrainingConfig, train

_MAY_CHANGE_ON_RESUME = (
    "microbatch_size",
    "parallelism",
    "log_every",
    "save_every",
    "eval_every",
    "keep_checkpoints",
    "max_nonfinite_steps",
    "compile",
    "trackers",
)
"""Settings of training that a resumed run may change: the weights do not depend on them."""


@dataclass(frozen=True)
class Experiment:
    """`sources` as `unmask prepare` takes them; `eval_windows` held-out rows are scored on the way.

    `unigram_bias_init`: the network begins by predicting each token as often as it occurs, which it would
    otherwise have to learn first. `start`: a model to go on from, as `unmask.load` takes it, whose network
    and tokenizer stand for `backbone` and `tokenizer`. `low_rank`: only such differences to it are learned.
    """

    sources: tuple[str, ...] = ("stdlib",)
    tokenizer: str = "bpe:4096"
    backbone: BackboneConfig = DiTConfig()
    objective: Objective = MDLM()
    training: TrainingConfig = TrainingConfig()
    layout: Wrapped | PerDocument | PromptCompletionRows = Wrapped()
    prepare: PrepareConfig = PrepareConfig()
    eval_windows: int = 64
    unigram_bias_init: bool = False
    init_from: str | None = None
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        if self.init_from is None:
            self._check_new_model()
        if self.eval_windows < 1:
            raise ValueError(f"eval_windows must be at least 1; got {self.eval_windows}")
        if self.init_from is not None and self.unigram_bias_init:
            raise ValueError("a model to go on from has learned how often tokens occur: leave out unigram_bias_init")
        if self.training.curriculum is not None:
            self.training.curriculum.objective_at(self.objective, 0.0, ClippedTimes())

    def _check_new_model(self) -> None:
        if self.backbone.needs_weights:
            raise ValueError("a network of another library comes with its weights: name its folder as init_from")
        if self.lora is not None:
            raise ValueError("lora is for going on from a model: name one as init_from")
        longest = self.backbone.max_length
        if longest is not None and self.layout.length > longest:
            raise ValueError(f"rows of {self.layout.length} tokens are longer than the model's {longest}")
        causal = isinstance(self.objective, NextToken)
        if self.backbone.causal != causal:
            raise ValueError(
                f"{type(self.objective).__name__} needs backbone.causal={str(causal).lower()};"
                " `with_objective` and --objective see to it"
            )

    def with_objective(self, objective: Objective) -> Experiment:
        """The same with another objective, and the network that it needs: an autoregressive one looks back
        only, so it has no use for a start at both neighbours or a curriculum of times."""
        causal, backbone = isinstance(objective, NextToken), self.backbone
        has_times = isinstance(objective, MaskedObjective)
        training = self.training if has_times else replace(self.training, curriculum=None)
        if self.init_from is None:
            backbone = backbone.with_causal(causal)
        return replace(self, objective=objective, backbone=backbone, training=training)

    def with_init_from(self, init_from: str, lm: LanguageModel) -> Experiment:
        """The same, going on from the model that `start` names: with its network, tokenizer and objective,
        and in rows that it takes."""
        longest = lm.denoiser.max_length
        length = self.layout.length if longest is None else min(self.layout.length, longest)
        return replace(
            self,
            init_from=init_from,
            tokenizer=f"that of {init_from}",
            backbone=lm.denoiser.config.backbone,
            objective=lm.objective,
            layout=replace(self.layout, length=length),
            unigram_bias_init=False,
        )


def run_experiment(
    experiment: Experiment,
    folder: Path,
    distributed: Distributed,
    *,
    prepare_progress: AbstractContextManager[ProgressFn | None] | None = None,
    restart: bool = False,
) -> bool:
    """Prepare, train (or go on training) and export; False if a signal stopped it before its end.

    `preparing` is entered while text is prepared, and gives what is told the bytes done so far. `restart`:
    begin at step 1 again; what was there is kept beside.
    """
    start = _load_init_model(experiment, folder)
    with claim_run_folder(folder, distributed):
        with prepare_progress or nullcontext() as progress:
            corpus = _prepare_corpus(experiment, folder, distributed, progress, start)
        run = build_trainer(experiment, corpus, distributed, init_model=start)
        start = None  # its weights were copied: their memory is needed
        if distributed.is_main:
            write_json(folder, MODEL_CONFIG_FILE, to_json(run.denoiser.config))
            if read_experiment_json(folder) is None:
                write_json(folder, EXPERIMENT_FILE, {**_fixed_settings(experiment), "corpus": corpus.digest})
        distributed.barrier()
        news = resume_latest(run, folder, restart)
        if run.state.step == 0:
            news = [*corpus.describe(experiment.layout), *news]
        finished = _train_and_log(experiment, corpus, run, folder, news)
        if finished and distributed.is_main:
            lm, facts = load_ema_model(folder)
            save(lm, folder / MODEL_FOLDER, overwrite=True, facts=facts, metadata=read_card_metadata(folder))
        distributed.barrier()
    return finished


def _load_init_model(experiment: Experiment, folder: Path) -> LanguageModel | None:
    """Refuse what can be seen to be wrong before anything is written; the model to go on from, if any."""
    if not experiment.sources:
        raise ValueError("an experiment needs text to learn: name it as sources")
    if experiment.init_from == "":
        raise ValueError("this experiment goes on from a model: name it as init_from")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another folder for the run")
    if (folder / "config.json").exists() and list_weight_files(folder):
        raise ValueError(f"{folder} is the folder of a model; choose another one for the run")
    if is_corpus(folder):
        raise ValueError(f"{folder} is a prepared corpus; choose another folder for the run")
    if experiment.init_from is None:
        return None
    start = load(experiment.init_from)
    longest = start.denoiser.max_length
    if start.tokenizer is None:
        raise ValueError(f"{experiment.init_from} has no tokenizer to read text with")
    if longest is not None and experiment.layout.length > longest:
        raise ValueError(
            f"rows of {experiment.layout.length} tokens are longer than the {longest} that"
            f" {experiment.init_from} takes: set layout.length={longest}"
        )
    return start


def _train_and_log(experiment: Experiment, corpus: Corpus, trainer: Trainer, folder: Path, messages: list[str]) -> bool:
    """Train to the end, or to a signal (then False); nothing is left to do if the end was reached before."""
    settings, quiet = experiment.training, not trainer.distributed.is_main
    log = TrainingLogger(folder, settings.steps, trainer.state.step, quiet, settings.trackers)
    if trainer.state.step >= settings.steps:
        log.info(
            f"already finished: {settings.steps:,} steps; the model is in {folder / MODEL_FOLDER}, and --restart"
            " trains anew"
        )
        return True
    with log:
        for line in messages:
            log.info(line)
        return train(trainer, folder, log, lambda: _evaluate(experiment, corpus, trainer))


def _prepare_corpus(
    experiment: Experiment,
    folder: Path,
    distributed: Distributed,
    progress: ProgressFn | None = None,
    init_model: LanguageModel | None = None,
) -> Corpus:
    """The experiment's text in its folder; free if it is there already, which is then verified.

    A folder of another experiment, or of the same on another text, is refused with what differs. Rank 0
    prepares, the others then read; `progress` is told the bytes done so far. `start` is the model to go on
    from, if it is at hand.
    """
    corpus = _prepare_on_main(experiment, folder, progress, init_model) if distributed.is_main else None
    distributed.barrier()
    return corpus or Corpus.open(folder / CORPUS_FOLDER, verify=False)


def _prepare_on_main(
    experiment: Experiment, folder: Path, progress: ProgressFn | None, init_model: LanguageModel | None
) -> Corpus:
    before, where = _read_experiment(folder), folder / CORPUS_FOLDER
    if before is not None:
        raise_if_changed(folder, diff_settings(_comparable_settings(before[0]), _comparable_settings(experiment)))
    tokenizer = experiment.tokenizer
    if experiment.init_from is not None:
        tokenizer = str(folder / TOKENIZER_FILE)
        if before is None or not (folder / TOKENIZER_FILE).exists():
            _write_tokenizer(init_model or load(experiment.init_from), experiment.init_from, folder)
    request = (experiment.sources, where, tokenizer, experiment.prepare)
    if before is None or not where.exists():
        corpus = prepare(*request, progress)
    else:  # which must not be replaced
        corpus = open_run_corpus(where)
        raise_if_changed(folder, [f"{what} has changed since" for what in stale_reasons(*request)])
    if before is not None and corpus.digest != before[1]:
        raise_if_changed(folder, [f"the SHA-256 of {where} was {before[1]} and is now {corpus.digest}"])
    return corpus


def _write_tokenizer(lm: LanguageModel, name: str, folder: Path) -> None:
    """That of the model to go on from, in a file of the run's own."""
    if lm.tokenizer is None:
        raise ValueError(f"{name} has no tokenizer to read text with")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / TOKENIZER_FILE) as fresh:
        fresh.write_text(lm.tokenizer.to_json(), encoding="utf-8")


def _read_experiment(folder: Path) -> tuple[Experiment, str] | None:
    """The experiment that the folder belongs to, if any, and the digest of its corpus.

    Settings that are newer than the folder have their defaults.
    """
    statement = read_experiment_json(folder)
    if statement is None:
        return None
    corpus: str = statement.pop("corpus")
    return from_json(Experiment, statement, str(folder / EXPERIMENT_FILE)), corpus


def _fixed_settings(experiment: Experiment) -> dict[str, Any]:
    """All settings that weights depend on."""
    found: dict[str, Any] = to_json(experiment)
    for name in _MAY_CHANGE_ON_RESUME:
        found["training"].pop(name)
    return found


def _comparable_settings(experiment: Experiment) -> dict[str, Any]:
    """The same but for what a model to go on from brings along: a network and a tokenizer."""
    brought = ("backbone", "tokenizer") if experiment.init_from is not None else ()
    return {key: value for key, value in _fixed_settings(experiment).items() if key not in brought}


def load_ema_model(folder: Path, warn: Callable[[str], None] = lambda _: None) -> tuple[LanguageModel, TrainingFacts]:
    """The model of a run's newest checkpoint with the averaged weights, and how it was trained.

    `say` is told of newer checkpoints that are damaged.
    """
    claim = _read_experiment(folder)
    if claim is None:
        raise ValueError(f"{folder} is not the folder of a run: it has no {EXPERIMENT_FILE}")
    experiment, _ = claim
    newest, damaged = checkpoint.latest(folder)
    if newest is None and damaged:
        raise ValueError(f"{folder} has no checkpoint that is whole: {'; '.join(damaged)}")
    if newest is None:
        raise ValueError(f"{folder} has no checkpoint yet")
    for problem in damaged:
        warn(f"{problem}; the checkpoint of step {checkpoint.checkpoint_step(newest)} is used")
    corpus = Corpus.open(folder / CORPUS_FOLDER, verify=False)  # for its tokenizer only
    network: ModelConfig | None = None
    # Unless only differences to it were kept, the model that a run went on from need not be there any more.
    if (folder / MODEL_CONFIG_FILE).exists() and experiment.lora is None:
        network = from_json(ModelConfig, read_json_object(folder / MODEL_CONFIG_FILE), str(folder / MODEL_CONFIG_FILE))
    run = build_trainer(experiment, corpus, Distributed(), network)
    run.load_checkpoint(newest)
    run.ema.copy_to(run.denoiser)
    if experiment.lora is not None:
        merge_lora(run.denoiser)
    return LanguageModel(run.denoiser.eval(), corpus.tokenizer), _training_facts(experiment, corpus, run)


def _training_facts(experiment: Experiment, corpus: Corpus, trainer: Trainer) -> TrainingFacts:
    training = experiment.training
    return {
        "text": ", ".join(experiment.sources),
        "corpus (SHA-256)": corpus.digest,
        "steps": f"{trainer.state.step:,} of {training.steps:,}, {training.batch_size} rows each",
        "tokens seen": f"{trainer.state.tokens:,}",
        "optimizer": type(training.optimizer).__name__,
        "weights": f"moving average, decay {training.ema_decay:g}",
        "seed": str(training.seed),
    }


def read_card_metadata(folder: Path) -> CardMetadata:
    """What a run's folder tells a hub: data sets of the hub that it read, and what it measured last."""
    sources = [str(source) for source in (read_experiment_json(folder) or {}).get("sources") or ()]
    names = tuple(source.removeprefix("hub:") for source in sources if source.startswith("hub:"))
    last = read_last_evaluation(folder)
    if last is None:
        return CardMetadata(datasets=names)
    step, nats, error = last
    perplexity = math.exp(min(nats, 700.0))
    figures = {"nats_per_token": (nats, error), "perplexity": (perplexity, perplexity * error)}
    text, about = ", ".join(sources), f"upper bound, held-out part, step {step:,}"
    results = (EvalResult(text, name, *figure, about) for name, figure in figures.items())
    return CardMetadata(datasets=names, results=tuple(results))


def build_trainer(
    experiment: Experiment,
    corpus: Corpus,
    distributed: Distributed,
    model_config: ModelConfig | None = None,
    init_model: LanguageModel | None = None,
) -> Trainer:
    """A run of the experiment at its first step.

    `network`: what it turned out to be, for a run whose weights are about to be read from a checkpoint.
    `start`: the model to go on from, if it is at hand.
    """
    training = experiment.training
    torch.manual_seed(training.seed)
    denoise = _initial_denoiser(experiment, corpus, init_model) if model_config is None else model_config.build()
    if experiment.unigram_bias_init:
        denoise.backbone.init_output_bias(_unigram_log_probs(corpus))
    if experiment.lora is not None:
        experiment.lora.apply(denoise)
    loader = Loader(corpus.splits["train"], experiment.layout, training.batch_size, training.seed)
    return Trainer(denoise, experiment.objective, loader, training, distributed)


def _initial_denoiser(experiment: Experiment, corpus: Corpus, init_model: LanguageModel | None) -> Denoiser:
    """The network before its first step: fresh, or that of the model to go on from."""
    if experiment.init_from is None:
        return ModelConfig(corpus.vocab, experiment.backbone, experiment.objective).build()
    old = (init_model or load(experiment.init_from)).denoiser
    if corpus.tokenizer.vocab_size > old.vocab.size:
        raise ValueError(
            f"the text's tokenizer has {corpus.tokenizer.vocab_size} ids, and {experiment.init_from} only"
            f" {old.vocab.size}"
        )
    # A model that did not know how texts end learns it from the ones it goes on with.
    end = corpus.eos_id if old.vocab.eos_id is None else old.vocab.eos_id
    config = replace(old.config, objective=experiment.objective, vocab=replace(old.vocab, eos_id=end))
    denoise = config.build()
    denoise.load_state_dict(old.state_dict())
    return denoise


def _unigram_log_probs(corpus: Corpus) -> torch.Tensor:
    """log((count + 1)/(total + V)) of each token [V], from 64 stretches of the training text."""
    text = corpus.splits["train"]
    counts = torch.ones(corpus.vocab.size, dtype=torch.float64)
    for part in range(64):
        first = text.num_tokens * part // 64
        ids = text.read(first, min(text.num_tokens * (part + 1) // 64, first + 16_384))
        counts += torch.bincount(torch.from_numpy(ids.astype("int64")), minlength=len(counts))
    return (counts / counts.sum()).log()


def _evaluate(experiment: Experiment, corpus: Corpus, trainer: Trainer) -> dict[str, float]:
    """Held-out nats per token."""
    if "valid" not in corpus.splits:
        return {}
    split = corpus.splits["valid"]
    layout = replace(experiment.layout, length=min(experiment.layout.length, split.num_tokens))
    loader = Loader(split, layout, batch_size=min(EVAL_BATCH_SIZE, experiment.eval_windows))
    with torch.no_grad():
        config = EvalConfig(experiment.eval_windows, replicates=4)
        score = score_corpus(trainer.denoiser, experiment.objective, loader, config, distributed=trainer.distributed)
    return {"valid_nats_per_token": score.nats_per_token, "valid_standard_error": score.standard_error}
