"""`unmask train`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from unmask.cli._arguments import AllowCodeFlag, RecipeArg, allow_imports, build_typed, import_typed, load_model
from unmask.cli._signature import Option
from unmask.config import external_kinds, from_json, lookup, override, to_json
from unmask.io.untrusted import read_json
from unmask.registry import AllowCode

if TYPE_CHECKING:
    from unmask.experiment import Experiment
    from unmask.objectives import Objective

Overrides = Annotated[tuple[tuple[str, ...], ...], Option(name="set", metavar="FIELD=VALUE", repeated=True)]
_FrozenDtype = Literal["float32", "bfloat16", "int8", "int4"]
_ObjectiveArg = Annotated[str | None, Option(family="unmask.baselines:EVERY_OBJECTIVE")]


def train(
    recipe: RecipeArg = "",
    out: Path = Path("runs/train"),
    objective: _ObjectiveArg = None,
    sources: tuple[str, ...] = (),
    valid_sources: tuple[str, ...] = (),
    tokenizer: str | None = None,
    init_from: str | None = None,
    lora_rank: int | None = None,
    dtype: _FrozenDtype | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    overrides: Overrides = (),
    restart: bool = False,
    print_config: bool = False,
    help_settings: bool = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Train a model by a recipe, and save it; resume the run if it was interrupted.

    For example:
      unmask train stdlib-tiny --out runs/tiny
      unmask train stdlib-tiny --sources my_texts/ --steps 1000 --out runs/mine
      unmask train stdlib-tiny --set training.max_grad_norm=0.5 --print-config
      unmask train dna-tiny --sources genome.fa.gz --valid-sources genome.fa.gz:chr2 --out runs/dna
      unmask train runs/tiny/experiment.json --out runs/again --seed 1
      unmask train finetune --init-from runs/demo --sources notes.txt --out runs/notes
      unmask train sft --init-from runs/demo --sources pairs.jsonl --lora-rank 8
      unmask train sft --init-from runs/demo --sources pairs.jsonl --lora-rank 8 --dtype int8 --out runs/int8
      unmask train my_package.my_module:my_recipe --out runs/my-recipe
      torchrun --nproc_per_node 2 -m unmask train stdlib-tiny --out runs/tiny

    Give the same command again to resume from the last checkpoint, or with more --steps to extend a finished run:
    from there on, learning rate and curriculum follow a run of the new length. SIGTERM and SIGINT finish the step,
    save a checkpoint, and exit with code 3.

    Args:
        recipe: The settings to start from: a name that `unmask recipes` lists, a JSON file such as another run's
            experiment.json, or package.module:name for a recipe of your own.
        out: The run's folder: corpus, checkpoints, metrics.jsonl and, at the end, model/.
        objective: Another objective than the recipe's, with the attention that it needs.
        sources: Your own text instead of the recipe's.
        valid_sources: Sources to hold out for validation, instead of a fraction of the text.
        tokenizer: Another tokenizer than the recipe's, as `unmask prepare` takes it.
        init_from: A model to fine-tune: a folder or a name on the hub. Its network, tokenizer and (unless
            another one is named) objective are used, with rows that it can take.
        lora_rank: Fine-tune with LoRA of this rank instead of all weights.
        dtype: With LoRA, the type in which the frozen weights are kept: float32, or less memory.
        steps: Another number of steps.
        batch_size: Another global batch size.
        seed: Another seed.
        overrides: Any setting that --help-settings lists, applied after the flags above:
            `training.max_grad_norm=0.5`, or `objective.schedule=Cosine` for another kind with its defaults. A kind of
            your own is written package.module:Name.
        restart: Begin at step 1 again; earlier checkpoints and metrics are kept in aside-1/.
        print_config: Print the experiment as JSON, and stop.
        help_settings: Explain every setting of the recipe that --set can change, and stop.
    """
    if help_settings:
        from unmask.cli._settings import describe_settings

        print(describe_settings(_load_experiment(recipe or "stdlib-tiny", allow_code)))
        return
    if not recipe:
        raise ValueError(
            "unmask train needs RECIPE: the settings to start from, one of those that `unmask recipes` lists"
            " (`unmask train --help` has examples)"
        )
    recipe_experiment = experiment = _load_experiment(recipe, allow_code)
    if init_from is not None:
        experiment = experiment.with_init_from(init_from, load_model(Path(init_from), allow_code=allow_code))
    model_length = experiment.layout.length
    flags = {
        "sources": sources or None,
        "prepare.valid_sources": valid_sources or None,
        "tokenizer": tokenizer,
        "training.steps": steps,
        "training.batch_size": batch_size,
        "training.seed": seed,
        "lora.dtype": dtype,
    }
    if dtype is not None and lora_rank is None and experiment.lora is None:
        raise ValueError("--dtype is that of weights that LoRA freezes: give --lora-rank, or leave it out")
    experiment = customize(experiment, objective, lora_rank, flags, [each for group in overrides for each in group])
    if print_config:
        print(json.dumps(to_json(experiment), indent=2, ensure_ascii=False))
        return
    _check_required(experiment, recipe)
    shortened = experiment.layout.length == model_length != recipe_experiment.layout.length
    note = f"rows are {model_length} tokens long, the most that {init_from} takes" if shortened else ""
    run_in_folder(experiment, out, restart, note, allow_code or {*external_kinds(experiment), experiment.tokenizer})


def run_in_folder(experiment: Experiment, out: Path, restart: bool, note: str, allow_code: AllowCode) -> None:
    from unmask.cli._progress import progress
    from unmask.data.readers import Sources
    from unmask.distributed import init_distributed
    from unmask.run import run_experiment

    with init_distributed() as distributed:
        if distributed.is_main and note:
            print(note, file=sys.stderr)
        preparing = progress(
            "preparing", Sources(experiment.sources).text_bytes(), "bytes", quiet=not distributed.is_main
        )
        finished = run_experiment(
            experiment, out, distributed, prepare_progress=preparing, restart=restart, allow_code=allow_code
        )
    if not finished:
        sys.exit(3)
    if distributed.is_main:
        print(out / "model")


def _load_experiment(recipe: str, allow_code: bool) -> Experiment:
    """The experiment of a recipe: by its name, from a JSON file, or from outside the package."""
    from unmask.experiment import Experiment
    from unmask.recipes import RECIPES
    from unmask.training.run_folder import settings_of

    allow_imports(allow_code)
    path = Path(recipe)
    if path.suffix != ".json":
        return build_typed(recipe, Experiment) if ":" in recipe else lookup(recipe, RECIPES, "recipe")()
    if not path.exists():
        raise ValueError(f"{path} cannot be read: No such file or directory")
    settings = read_json(path)
    if isinstance(settings, dict):
        settings = settings_of(settings)
        if isinstance(settings.get("backbone"), dict):
            settings["backbone"].setdefault("kind", "DiTConfig")
    experiment: Experiment = from_json(Experiment, settings, str(path), allow_code=allow_code)
    return experiment


def customize(
    experiment: Experiment,
    objective: str | None,
    lora_rank: int | None,
    flags: dict[str, Any],
    overrides: list[str],
) -> Experiment:
    """The experiment with what was given on the command line; the --set overrides come last."""
    from unmask.training.lora import LoRA

    if objective is not None:
        experiment = experiment.with_objective(_make_objective(objective))
    if lora_rank is not None:
        experiment = replace(experiment, lora=LoRA(lora_rank))
    changes = [f"{name}={json.dumps(value)}" for name, value in flags.items() if value is not None] + overrides
    _reject_ignored_overrides(changes, experiment.init_from)
    allow_imports(any(":" in change for change in changes))
    return override(experiment, *changes, allow_code=True)


def _make_objective(name: str) -> Objective:
    from unmask.baselines import EVERY_OBJECTIVE
    from unmask.objectives import OBJECTIVES

    if ":" not in name:
        named: Objective = EVERY_OBJECTIVE[name].recommended()
        return named
    found = import_typed(name, OBJECTIVES.base)
    if isinstance(found, type):
        found = cast("type[Objective]", found).recommended()
    made: Objective = found if isinstance(found, OBJECTIVES.base) else found()
    return made


def _reject_ignored_overrides(overrides: Iterable[str], init_from: str | None) -> None:
    """ValueError for settings of the network or tokenizer, which --init-from would ignore."""
    for change in overrides:
        name = change.partition("=")[0].strip()
        if init_from is not None and name.split(".")[0] in ("backbone", "tokenizer"):
            whose = f"those of {init_from}" if init_from else "those of the model that --init-from names"
            raise ValueError(f"{name} would have no effect: network and tokenizer are {whose}; leave it out")
        if name == "init_from":
            raise ValueError("the model to fine-tune is named with --init-from MODEL, and not with --set")


def _check_required(experiment: Experiment, recipe: str) -> None:
    """ValueError if the recipe needs options that were not given."""
    missing = {"--init-from MODEL": experiment.init_from == "", "--sources TEXT": not experiment.sources}
    options = " and ".join(option for option, absent in missing.items() if absent)
    if options:
        raise ValueError(f"{recipe} needs {options}: it fine-tunes your model on your text")
