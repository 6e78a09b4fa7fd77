"""The averaged weights of a run as a model, and what its model card says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from unmask.config import from_json
from unmask.data.corpus import Corpus
from unmask.experiment import Experiment
from unmask.io.hub import HUB_PREFIX
from unmask.io.untrusted import read_json_object
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.pretrained import CardMetadata, EvalResult, TrainingFacts, save
from unmask.registry import AllowCode
from unmask.run._build import frozen_dtype, initial_denoiser
from unmask.run._prepare import load_init_model, read_experiment
from unmask.training.ema import trainable_parameters
from unmask.training.lora import merge_lora
from unmask.training.run_folder import RunFolder
from unmask.training.trainer import Trainer


def load_ema_model(
    folder: Path, warn: Callable[[str], None] = lambda _: None, *, allow_code: AllowCode = False
) -> tuple[LanguageModel, TrainingFacts]:
    """The averaged weights of a run's newest checkpoint as a model, and how it was trained.

    `warn` is called with a sentence for each newer checkpoint that is damaged. `allow_code` is that of `unmask.load`.
    """
    run = RunFolder(folder, allow_code=allow_code)
    experiment = read_experiment(run)
    step, problems = run.checkpoints.latest()
    if step is None:
        why = f"has no intact checkpoint: {'; '.join(problems)}" if problems else "has no checkpoint yet"
        raise ValueError(f"{folder} {why}")
    for problem in problems:
        warn(f"{problem}; the checkpoint of step {step} is used")
    corpus = Corpus.open(run.corpus, verify=False, allow_code=run.allow_code)  # for its tokenizer only
    if experiment.lora is None:  # the model that the run started from need not be there any more
        stored = read_json_object(run.model_config_file)
        denoiser = from_json(ModelConfig, stored, str(run.model_config_file), allow_code=allow_code).build()
    else:
        denoiser = initial_denoiser(experiment, corpus, load_init_model(experiment, run))
        experiment.lora.apply(denoiser)
    weights = {name: parameter.detach() for name, parameter in trainable_parameters(denoiser).items()}
    state = run.checkpoints.load(step, {"ema": weights})
    if experiment.lora is not None:
        merge_lora(denoiser)
    facts = _training_facts(experiment, run, corpus, state["step"], state["tokens"])
    return LanguageModel(denoiser.eval(), corpus.tokenizer, chat_template=run.read_chat_template()), facts


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


def export_model(experiment: Experiment, corpus: Corpus, trainer: Trainer, run: RunFolder) -> None:
    """Write the live averaged weights as `model/`. Every rank must call this: shards are gathered."""
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with trainer.ema.swapped_in(trainer.model):
        weights = get_model_state_dict(trainer.model, options=gather)
        if not run.distributed.is_main:
            return
        denoiser: Denoiser = (
            trainer.model.config.build()
            if frozen_dtype(experiment) == "float32"
            else initial_denoiser(experiment, corpus, load_init_model(experiment, run))
        )
        if experiment.lora is not None:
            experiment.lora.apply(denoiser)
        denoiser.load_state_dict(weights)
    if experiment.lora is not None:
        merge_lora(denoiser)
    lm = LanguageModel(denoiser.eval(), corpus.tokenizer, chat_template=run.read_chat_template())
    facts = _training_facts(experiment, run, corpus, trainer.state.step, trainer.state.tokens)
    save(lm, run.model, overwrite=True, facts=facts, metadata=read_card_metadata(run.path))


def _training_facts(experiment: Experiment, run: RunFolder, corpus: Corpus, step: int, tokens: int) -> TrainingFacts:
    config, stored = experiment.training, run.read_experiment() or {}
    extended = "".join(f", extended from {steps:,}" for steps in stored.get("extended_from", []))
    distilled, tokens_are = {}, "tokens seen"
    if experiment.distillation is not None:
        distilled = {
            "distilled from": str(experiment.init_from),
            "distillation": experiment.distillation.describe(step),
        }
        tokens_are = "tokens in the loss"
    return {
        **distilled,
        "text": ", ".join(experiment.sources),
        "corpus (SHA-256)": corpus.digest,
        "steps": f"{step:,} of {config.steps:,}, {config.batch_size} rows each{extended}",
        tokens_are: f"{tokens:,}",
        "optimizer": type(config.optimizer).__name__,
        "weights": f"moving average, decay {config.ema_decay:g}",
        "seed": str(config.seed),
    }
