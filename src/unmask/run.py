"""Carry out an experiment in a folder: prepare text, train or resume, export the model.

Running the same experiment in the same folder again resumes it; with more steps, it extends it. Another
experiment in the same folder is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from unmask.config import external_kinds, from_json, to_json
from unmask.data.corpus import Corpus, ProgressFn, is_corpus, prepare, stale_reasons
from unmask.data.loader import Loader
from unmask.data.tokenizers import Tokenizer, is_external
from unmask.distributed import Distributed
from unmask.evaluation.evaluate import EVAL_BATCH_SIZE
from unmask.experiment import Experiment
from unmask.io.hub import HUB_PREFIX
from unmask.io.untrusted import read_json_object
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.pretrained import CardMetadata, EvalResult, TrainingFacts, load, save
from unmask.pretrained.state_dict import list_weight_files
from unmask.registry import AllowCode, build
from unmask.training.denoising import build_denoising_trainer
from unmask.training.ema import trainable_parameters
from unmask.training.logger import TrainingLogger
from unmask.training.loop import train as run_training_loop
from unmask.training.lora import merge_lora
from unmask.training.run_folder import RunFolder, diff_settings
from unmask.training.trainer import Trainer


def run_experiment(
    experiment: Experiment,
    folder: Path,
    distributed: Distributed,
    *,
    prepare_progress: AbstractContextManager[ProgressFn | None] | None = None,
    restart: bool = False,
    allow_code: AllowCode = False,
) -> bool:
    """Prepare, train (or resume, or extend) and export; False if a signal stopped it before its end.

    `prepare_progress` is entered while text is prepared, and gives a function that is called with the bytes
    done so far. `restart`: begin at step 1 again; what was there is kept in another folder. `allow_code`: whether
    classes from outside unmask may be imported for the tokenizer and the model to start from.
    """
    run = RunFolder(folder, distributed)
    init_model = _load_init_model(experiment, folder, allow_code)
    with run.claim():
        with prepare_progress or nullcontext() as progress:
            corpus = prepare_corpus(experiment, run, progress, init_model, allow_code)
        trainer = build_trainer(experiment, corpus, distributed, init_model)
        init_model = None  # its weights were copied: their memory is needed
        messages = _write_settings(experiment, run, corpus, trainer) if distributed.is_main else []
        distributed.barrier()
        messages = run.resume(trainer, restart) + messages
        if trainer.state.step == 0:
            messages = [*corpus.describe(experiment.layout), *messages]
        finished = _train(experiment, corpus, trainer, run, messages)
        if finished:
            _export(experiment, corpus, trainer, run)
        distributed.barrier()
    return finished


def build_trainer(
    experiment: Experiment, corpus: Corpus, distributed: Distributed, init_model: LanguageModel | None = None
) -> Trainer:
    """A trainer of the experiment at its first step; `init_model`: that of `init_from`, if it is loaded already."""
    config = experiment.training
    torch.manual_seed(config.seed)
    denoiser = _initial_denoiser(experiment, corpus, init_model)
    if experiment.unigram_bias_init:
        denoiser.backbone.init_output_bias(_unigram_log_probs(corpus))
    if experiment.lora is not None:
        experiment.lora.apply(denoiser)
    loader = Loader(corpus.splits["train"], experiment.layout, config.batch_size, config.seed)
    return build_denoising_trainer(denoiser, experiment.objective, loader, config, distributed)


def prepare_corpus(
    experiment: Experiment,
    run: RunFolder,
    progress: ProgressFn | None = None,
    init_model: LanguageModel | None = None,
    allow_code: AllowCode = False,
) -> Corpus:
    """The experiment's text in its folder, prepared or, if it is there already, verified.

    A folder of another experiment, or of the same on another text, is refused with what differs. Rank 0
    prepares; the others then read. The sources are read once to say what they are.
    """
    corpus = None
    if run.distributed.is_main:
        tokenizer = _make_tokenizer(experiment.tokenizer, allow_code)
        corpus = _prepare_on_main(experiment, run, tokenizer, progress, init_model)
    run.distributed.barrier()
    return corpus or Corpus.open(run.corpus, verify=False)


def load_ema_model(
    folder: Path, warn: Callable[[str], None] = lambda _: None, *, allow_code: AllowCode = False
) -> tuple[LanguageModel, TrainingFacts]:
    """The averaged weights of a run's newest checkpoint as a model, and how it was trained.

    `warn` is called with a sentence for each newer checkpoint that is damaged.
    """
    run = RunFolder(folder)
    experiment = _read_experiment(run, allow_code)
    step, problems = run.checkpoints.latest()
    if step is None:
        why = f"has no intact checkpoint: {'; '.join(problems)}" if problems else "has no checkpoint yet"
        raise ValueError(f"{folder} {why}")
    for problem in problems:
        warn(f"{problem}; the checkpoint of step {step} is used")
    corpus = Corpus.open(run.corpus, verify=False)  # for its tokenizer only
    if experiment.lora is None:  # the model that the run started from need not be there any more
        stored = read_json_object(run.model_config_file)
        denoiser = from_json(ModelConfig, stored, str(run.model_config_file), allow_code=allow_code).build()
    else:
        denoiser = _initial_denoiser(experiment, corpus, None)
        experiment.lora.apply(denoiser)
    weights = {name: parameter.detach() for name, parameter in trainable_parameters(denoiser).items()}
    state = run.checkpoints.load(step, {"ema": weights})
    if experiment.lora is not None:
        merge_lora(denoiser)
    facts = _training_facts(experiment, run, corpus, state["step"], state["tokens"])
    return LanguageModel(denoiser.eval(), corpus.tokenizer), facts


def read_card_metadata(folder: Path) -> CardMetadata:
    """What a run's folder says for a model card: data sets of the hub that it read, and its last evaluation."""
    run = RunFolder(folder)
    sources = [str(source) for source in run.read_settings().get("sources") or ()]
    names = tuple(source.removeprefix(HUB_PREFIX) for source in sources if source.startswith(HUB_PREFIX))
    last = run.last_evaluation()
    if last is None:
        return CardMetadata(datasets=names)
    step, nats, error = last
    perplexity = math.exp(min(nats, 700.0))
    metrics = {"nats_per_token": (nats, error), "perplexity": (perplexity, perplexity * error)}
    text, about = ", ".join(sources), f"upper bound, held-out part, step {step:,}"
    results = (EvalResult(text, name, *values, about) for name, values in metrics.items())
    return CardMetadata(datasets=names, results=tuple(results))


def _load_init_model(experiment: Experiment, folder: Path, allow_code: AllowCode) -> LanguageModel | None:
    """Refuse what can be seen to be wrong before anything is written; the model to start from, if any."""
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
    init_model = load(experiment.init_from, allow_code=allow_code)
    longest = init_model.denoiser.max_length
    if init_model.tokenizer is None:
        raise ValueError(f"{experiment.init_from} has no tokenizer to read text with")
    if longest is not None and experiment.layout.length > longest:
        raise ValueError(
            f"rows of {experiment.layout.length} tokens are longer than the {longest} that"
            f" {experiment.init_from} takes: set layout.length={longest}"
        )
    return init_model


def _make_tokenizer(name: str, allow_code: AllowCode) -> str | Tokenizer:
    """A tokenizer from outside the package, if it is allowed; any other name stays a name."""
    allowed = allow_code is True or (allow_code is not False and name in allow_code)
    return build(name, Tokenizer) if is_external(name) and allowed else name


def _prepare_on_main(
    experiment: Experiment,
    run: RunFolder,
    tokenizer: str | Tokenizer,
    progress: ProgressFn | None,
    init_model: LanguageModel | None,
) -> Corpus:
    stored = run.read_experiment()
    if stored is not None:
        _check_same_experiment(run, _read_experiment(run, external_kinds(experiment)), experiment)
    if experiment.init_from is not None:
        tokenizer = str(run.tokenizer_file)
        if stored is None or not run.tokenizer_file.exists():
            init_model = init_model or load(experiment.init_from)
            if init_model.tokenizer is None:
                raise ValueError(f"{experiment.init_from} has no tokenizer to read text with")
            run.write_tokenizer(init_model.tokenizer.to_json())
    request = (experiment.sources, run.corpus, tokenizer, experiment.prepare)
    if stored is None or not run.corpus.exists():
        corpus = prepare(*request, progress)
    else:  # which must not be replaced
        corpus = run.open_corpus()
        run.raise_if_changed([f"{reason} has changed since" for reason in stale_reasons(*request)])
    if stored is not None and corpus.digest != stored["corpus_sha256"]:
        run.raise_if_changed([f"the SHA-256 of {run.corpus} was {stored['corpus_sha256']} and is now {corpus.digest}"])
    return corpus


def _check_same_experiment(run: RunFolder, old: Experiment, new: Experiment) -> None:
    """Refuse another experiment than the folder's; it may only have more steps."""
    if new.training.steps < old.training.steps:
        raise ValueError(
            f"{run.path} is a run of {old.training.steps} steps, and training.steps={new.training.steps} is fewer:"
            " give the same number to resume it, a larger one to extend it, or take another folder"
        )
    before, now = old.fixed_settings(), new.fixed_settings()
    for settings in (before, now):
        del settings["training"]["steps"]
        if new.init_from is not None:  # network and tokenizer are those of the model to start from
            del settings["backbone"], settings["tokenizer"]
    run.raise_if_changed(diff_settings(before, now))


def _write_settings(experiment: Experiment, run: RunFolder, corpus: Corpus, trainer: Trainer) -> list[str]:
    """Write what is trained in the folder, if it is new or extended; messages for the log."""
    run.write_model_config(to_json(trainer.model.config))
    stored, steps = run.read_experiment(), experiment.training.steps
    if stored is None:
        run.write_experiment(experiment.fixed_settings(), corpus.digest, [])
        return []
    before = _read_experiment(run, external_kinds(experiment)).training.steps
    if before == steps:
        return []
    extended_from = [*stored.get("extended_from", []), before]
    run.write_experiment(experiment.fixed_settings(), corpus.digest, extended_from)
    return [
        f"extended from {before:,} to {steps:,} steps: from here on, learning rate and curriculum follow a run of"
        f" {steps:,} steps"
    ]


def _train(experiment: Experiment, corpus: Corpus, trainer: Trainer, run: RunFolder, messages: list[str]) -> bool:
    """Train to the end, or to a signal (then False); there is nothing to do if the end was reached before."""
    config, quiet = experiment.training, not run.distributed.is_main
    log = TrainingLogger(run.path, config.steps, trainer.state.step, quiet, config.trackers)
    if trainer.state.step >= config.steps:
        log.info(
            f"already finished: {config.steps:,} steps; the model is in {run.model}. --restart trains anew, and a"
            " larger training.steps goes on"
        )
        return True
    with log:
        for message in messages:
            log.info(message)
        return run_training_loop(trainer, run.checkpoints, log, lambda: _evaluate(experiment, corpus, trainer))


def _export(experiment: Experiment, corpus: Corpus, trainer: Trainer, run: RunFolder) -> None:
    """Write the live averaged weights as `model/`. Every rank must call this: shards are gathered."""
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with trainer.ema.swapped_in(trainer.model):
        weights = get_model_state_dict(trainer.model, options=gather)
        if not run.distributed.is_main:
            return
        denoiser: Denoiser = trainer.model.config.build()
        if experiment.lora is not None:
            experiment.lora.apply(denoiser)
        denoiser.load_state_dict(weights)
    if experiment.lora is not None:
        merge_lora(denoiser)
    lm = LanguageModel(denoiser.eval(), corpus.tokenizer)
    facts = _training_facts(experiment, run, corpus, trainer.state.step, trainer.state.tokens)
    save(lm, run.model, overwrite=True, facts=facts, metadata=read_card_metadata(run.path))


def _read_experiment(run: RunFolder, allow_code: AllowCode) -> Experiment:
    """The experiment of the folder; settings that are newer than the folder have their defaults."""
    file = str(run.experiment_file)
    experiment: Experiment = from_json(Experiment, run.read_settings(), file, allow_code=allow_code)
    return experiment


def _training_facts(experiment: Experiment, run: RunFolder, corpus: Corpus, step: int, tokens: int) -> TrainingFacts:
    config, stored = experiment.training, run.read_experiment() or {}
    extended = "".join(f", extended from {steps:,}" for steps in stored.get("extended_from", []))
    return {
        "text": ", ".join(experiment.sources),
        "corpus (SHA-256)": corpus.digest,
        "steps": f"{step:,} of {config.steps:,}, {config.batch_size} rows each{extended}",
        "tokens seen": f"{tokens:,}",
        "optimizer": type(config.optimizer).__name__,
        "weights": f"moving average, decay {config.ema_decay:g}",
        "seed": str(config.seed),
    }


def _initial_denoiser(experiment: Experiment, corpus: Corpus, init_model: LanguageModel | None) -> Denoiser:
    """The network before its first step: new, or that of the model to start from."""
    if experiment.init_from is None:
        return ModelConfig(corpus.vocab, experiment.backbone, experiment.objective).build()
    old = (init_model or load(experiment.init_from)).denoiser
    if corpus.tokenizer.vocab_size > old.vocab.size:
        raise ValueError(
            f"the text's tokenizer has {corpus.tokenizer.vocab_size} ids, and {experiment.init_from} only"
            f" {old.vocab.size}"
        )
    # A model without an end-of-text id learns one from the new text.
    eos_id = corpus.eos_id if old.vocab.eos_id is None else old.vocab.eos_id
    config = replace(old.config, objective=experiment.objective, vocab=replace(old.vocab, eos_id=eos_id))
    denoiser = config.build()
    denoiser.load_state_dict(old.state_dict())
    return denoiser


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
    layout = experiment.layout.with_length(min(experiment.layout.length, split.num_tokens))
    loader = Loader(split, layout, batch_size=min(EVAL_BATCH_SIZE, experiment.eval_windows))
    with torch.no_grad():
        config = EvalConfig(experiment.eval_windows, replicates=4)
        score = score_corpus(trainer.model, experiment.objective, loader, config, distributed=trainer.distributed)
    return {"valid_nats_per_token": score.nats_per_token, "valid_standard_error": score.standard_error}
