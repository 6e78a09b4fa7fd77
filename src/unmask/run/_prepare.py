"""The corpus of a run, and the checks that it is the experiment of its folder."""

from __future__ import annotations

from dataclasses import replace

from unmask.config import from_json
from unmask.data.chat import CHAT_TEMPLATE_FILE, named_template
from unmask.data.corpus import Corpus, PrepareConfig, is_corpus, prepare, stale_reasons
from unmask.data.readers import ChatRecord
from unmask.data.tokenizers import BaseTokenizer, get_tokenizer, is_external
from unmask.experiment import Experiment
from unmask.model import LanguageModel
from unmask.pretrained import load
from unmask.pretrained.state_dict import list_weight_files
from unmask.registry import class_id
from unmask.run._build import frozen_dtype
from unmask.training.run_folder import RunFolder, diff_settings
from unmask.types import ProgressFn


def prepare_corpus(
    experiment: Experiment,
    run: RunFolder,
    progress: ProgressFn | None = None,
    init_model: LanguageModel | None = None,
) -> Corpus:
    """The experiment's text in its folder, prepared or, if it is there already, verified.

    A folder of another experiment, or of the same on another text, is refused with what differs. Rank 0
    prepares; the others then read. The sources are read once to say what they are.
    """
    tokenizer = _make_tokenizer(experiment.tokenizer, run)
    corpus = _prepare_on_main(experiment, run, tokenizer, progress, init_model) if run.distributed.is_main else None
    run.distributed.barrier()
    return corpus or Corpus.open(run.corpus, verify=False, allow_code=run.allow_code)


def _prepare_on_main(
    experiment: Experiment,
    run: RunFolder,
    tokenizer: str | BaseTokenizer,
    progress: ProgressFn | None,
    init_model: LanguageModel | None,
) -> Corpus:
    stored = run.read_experiment()
    if stored is not None:
        _check_same_experiment(run, read_experiment(run), experiment)
    if experiment.init_from is not None:
        tokenizer = str(run.tokenizer_file)
        if stored is None or not run.tokenizer_file.exists():
            init_model = init_model or load_init_model(experiment, run)
            assert init_model is not None
            assert init_model.tokenizer is not None
            run.write_tokenizer(init_model.tokenizer.to_json())
            if init_model.chat_template is not None:
                run.write_chat_template(init_model.chat_template)
    request = (experiment.sources, run.corpus, tokenizer, _with_chat_template(experiment, run))
    if stored is None or not run.corpus.exists():
        corpus = prepare(*request, progress)
    else:  # which must not be replaced
        corpus = run.open_corpus()
        run.raise_if_changed([f"{reason} has changed since" for reason in stale_reasons(*request)])
    if stored is not None and corpus.digest != stored["corpus_sha256"]:
        run.raise_if_changed([f"the SHA-256 of {run.corpus} was {stored['corpus_sha256']} and is now {corpus.digest}"])
    return corpus


def _with_chat_template(experiment: Experiment, run: RunFolder) -> PrepareConfig:
    """The config with the chat template of the model, if conversations are learned: a new model gets the plain one."""
    config, chats = experiment.prepare, experiment.prepare.source.pair_format
    if not isinstance(chats, ChatRecord):
        return config
    template = chats.template or run.read_chat_template()
    if template is None and experiment.init_from is not None:
        raise ValueError(
            f"{experiment.init_from} has no chat template to learn conversations with: put a {CHAT_TEMPLATE_FILE} into"
            " its folder, or learn prompts and completions"
        )
    template = template or named_template("plain")
    run.write_chat_template(template)
    return replace(config, source=replace(config.source, pair_format=replace(chats, template=template)))


def _make_tokenizer(name: str, run: RunFolder) -> str | BaseTokenizer:
    """A tokenizer from outside the package, whose class the run's corpus may then name; other names stay names."""
    if not is_external(name):
        return name
    tokenizer = get_tokenizer(name, allow_code=run.allow_code)
    if run.allow_code is not True:
        run.allow_code = {*(run.allow_code or ()), class_id(type(tokenizer))}
    return tokenizer


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


def load_init_model(experiment: Experiment, run: RunFolder) -> LanguageModel | None:
    """Refuse what can be seen to be wrong before anything is written; the model to start from, if any."""
    folder = run.path
    if not experiment.sources:
        raise ValueError("an experiment needs text: name it as sources")
    if experiment.init_from == "":
        raise ValueError("this experiment fine-tunes a model: name it as init_from")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another folder for the run")
    if (folder / "config.json").exists() and list_weight_files(folder):
        raise ValueError(f"{folder} is a model folder; choose another folder for the run")
    if is_corpus(folder):
        raise ValueError(f"{folder} is a prepared corpus; choose another folder for the run")
    if experiment.init_from is None:
        return None
    init_model = load(experiment.init_from, allow_code=run.allow_code, dtype=frozen_dtype(experiment))
    if experiment.distillation is not None:
        _check_teacher(experiment, init_model)
    longest = init_model.denoiser.max_length
    if init_model.tokenizer is None:
        raise ValueError(f"{experiment.init_from} has no tokenizer to read text with")
    if longest is not None and experiment.layout.length > longest:
        raise ValueError(
            f"rows of {experiment.layout.length} tokens are longer than the {longest} that"
            f" {experiment.init_from} takes: set layout.length={longest}"
        )
    return init_model


def _check_teacher(experiment: Experiment, teacher: LanguageModel) -> None:
    assert experiment.distillation is not None
    if experiment.objective != teacher.objective:
        raise ValueError(
            f"a student has its teacher's objective, and {experiment.init_from} has another one than the experiment:"
            " leave the objective out"
        )
    reason = experiment.distillation.refuse(teacher.denoiser, teacher.objective)
    if reason is not None:
        raise ValueError(f"{experiment.init_from} cannot be the teacher: {reason}")


def read_experiment(run: RunFolder) -> Experiment:
    """The experiment of the folder; settings that are newer than the folder have their defaults."""
    experiment: Experiment = from_json(
        Experiment, run.read_settings(), str(run.experiment_file), allow_code=run.allow_code
    )
    return experiment
