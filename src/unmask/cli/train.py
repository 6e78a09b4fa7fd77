"""Commands that make models: prepare, train, export, recipes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from unmask.cli.arguments import ModelPath, RecipeArg, TextArgs, load_model
from unmask.cli.signature import Option
from unmask.config import from_json, lookup, override, to_json
from unmask.io.untrusted import read_json

if TYPE_CHECKING:
    from unmask.experiment import Experiment

_Overrides = Annotated[tuple[tuple[str, ...], ...], Option(name="set", metavar="FIELD=VALUE", repeated=True)]
_UNSUPPORTED_SUFFIXES = (
    ".gguf",
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".json",
    ".zip",
    ".tflite",
    ".mlmodel",
)
"""How files end that people may expect to get, and that are not folders."""
_ObjectiveArg = Annotated[str | None, Option(family="unmask.objectives:OBJECTIVES")]


def prepare(
    sources: TextArgs,
    out: Path = Path("corpus"),
    tokenizer: str = "bpe:4096",
    validation_fraction: float = 0.05,
    shard: str | None = None,
    lines: bool = False,
    field: str = "text",
    column: str = "text",
    prompt: str | None = None,
    completion: str | None = None,
    messages: str | None = None,
    encoding: str = "utf-8",
    delimiter: str | None = None,
    allow_unknown: bool = False,
) -> None:
    """Turn text into a folder of token ids, which training maps into memory.

    For example:
      unmask prepare my_texts/ --tokenizer bpe:8192 --out corpora/mine
      unmask prepare reads.fastq.gz --tokenizer dna --out corpora/reads
      unmask prepare pairs.jsonl --prompt question --completion reply --out corpora/pairs

    Lines may end in CRLF: it is read as a newline. A text of which more than 5 % of the characters are
    unknown to the tokenizer (English as DNA) is refused; fewer are counted and told.

    Args:
        sources: Files or folders (text, .json, .jsonl, .csv, .tsv, .parquet, .arrow, FASTA, FASTQ, each also
            with .gz), folders of `save_to_disk`, stdlib, or hub:NAME.
        out: The folder; what is there already and up to date is left as it is.
        tokenizer: bytes, text8, dna, protein, bpe:SIZE (trained on the text), a tokenizer.json, or hub:NAME.
        validation_fraction: The part of the text that is held out for validation, within one document.
        shard: I/N prepares every N-th document from the I-th (0 to N - 1); the N parts join by themselves.
        lines: Every line of a text file is a document.
        field: The field of JSON objects that holds the text.
        column: The column of tables that holds the text.
        prompt: A row is a pair; this column or field holds what is given.
        completion: The column or field that holds what is to be learned.
        messages: A row is a chat, a list of messages in this column or field; the last one is the answer.
        encoding: The encoding of text files, as latin-1 or utf-16.
        delimiter: What stands between the columns of csv and tsv files, as ';' or tab.
        allow_unknown: Take text even if much of it is unknown to the tokenizer.
    """
    from unmask.cli.progress import progress
    from unmask.data.corpus import PrepareConfig
    from unmask.data.corpus import prepare as prepare_corpus
    from unmask.data.readers import AnyPairFormat, ChatRecord, PromptCompletion, SourceConfig, Sources

    part = _parse_shard(shard)
    if (prompt is None) != (completion is None) or (messages is not None and prompt is not None):
        raise ValueError("pairs need --prompt and --completion, or --messages alone")
    pairs: AnyPairFormat | None = None if messages is None else ChatRecord(messages)
    if prompt is not None and completion is not None:
        pairs = PromptCompletion(prompt, completion)
    delimiter = {"tab": "\t", "\\t": "\t"}.get(delimiter or "", delimiter)
    source = SourceConfig(lines, field, column, pairs, encoding, delimiter)
    options = PrepareConfig(source, validation_fraction, part, allow_unknown)
    size = Sources(sources).text_bytes()
    total = size // part[1] if size is not None and part is not None else size
    with progress("preparing", total, "bytes") as report:
        corpus = prepare_corpus(sources, out, tokenizer, options, report)
    for name, split in corpus.splits.items():
        print(
            f"{name}: {split.num_tokens:,} tokens in {split.num_documents:,} documents,"
            f" {split.text_stats.bytes:,} bytes"
        )
    for note in corpus.describe():
        print(note)
    print(f"vocabulary: {corpus.vocab.size:,} with the mask; in {corpus.folder}")


def train(
    recipe: RecipeArg,
    out: Path = Path("runs/train"),
    objective: _ObjectiveArg = None,
    sources: tuple[str, ...] = (),
    tokenizer: str | None = None,
    init_from: str | None = None,
    lora_rank: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    overrides: _Overrides = (),
    restart: bool = False,
    print_config: bool = False,
) -> None:
    """Train a model, or go on training it; `torchrun` runs the same on many processes.

    For example:
      unmask train stdlib-tiny --out runs/tiny
      unmask train stdlib-tiny --set training.optimizer=Muon training.optimizer.lr=0.002 --print-config
      unmask train runs/tiny/experiment.json --out runs/again --seed 1
      unmask train finetune --init-from runs/demo --sources notes.txt --out runs/notes
      unmask train sft --init-from runs/demo --sources pairs.jsonl --lora-rank 8
      torchrun --nproc_per_node 2 -m unmask train stdlib-tiny --out runs/tiny

    A run that was killed goes on from its last checkpoint when the same command is given again. SIGTERM and
    SIGINT finish the step, save, and exit with code 3.

    Args:
        recipe: The settings to start from: a name that `unmask recipes` lists, or a file of JSON such as
            another run's experiment.json.
        out: The run's folder: corpus, checkpoints, metrics.jsonl and, at the end, model/.
        objective: Another objective than the recipe's, with the attention that it needs.
        sources: Your own text instead of the recipe's.
        tokenizer: Another tokenizer than the recipe's.
        init_from: A model to go on from: a folder or a name on the hub. Its network, tokenizer and (unless
            another one is named) objective are taken, and rows that it can take.
        lora_rank: Learn only differences of so low a rank to the weights of --init-from.
        steps: Another number of steps.
        batch_size: Another global batch size.
        seed: Another seed.
        overrides: Any setting that --print-config shows, after the flags above: `training.max_grad_norm=0.5`, or
            `objective.schedule=Cosine` for another kind with its defaults.
        restart: Begin at step 1 again; the checkpoints and metrics of before are kept in aside-1/.
        print_config: Print the experiment as JSON, and stop.
    """
    from unmask.cli.progress import progress
    from unmask.data.readers import Sources
    from unmask.distributed import init_distributed
    from unmask.objectives import OBJECTIVES
    from unmask.run import run_experiment
    from unmask.training.lora import LoRA

    recipes_own = experiment = _load_experiment(recipe)
    if init_from is not None:
        experiment = experiment.with_init_from(init_from, load_model(Path(init_from)))
    fitted = experiment.layout.length
    if objective is not None:
        experiment = experiment.with_objective(OBJECTIVES[objective].recommended())
    if lora_rank is not None:
        experiment = replace(experiment, lora=LoRA(lora_rank))
    flags = {
        "sources": sources or None,
        "tokenizer": tokenizer,
        "training.steps": steps,
        "training.batch_size": batch_size,
        "training.seed": seed,
    }
    given = [f"{name}={json.dumps(value)}" for name, value in flags.items() if value is not None]
    given += [change for group in overrides for change in group]
    _reject_ignored_overrides(given, experiment.init_from)
    experiment = override(experiment, *given)
    if print_config:
        print(json.dumps(to_json(experiment), indent=2, ensure_ascii=False))
        return
    _check_required(experiment, recipe)
    with init_distributed() as where:
        if where.is_main and experiment.layout.length == fitted != recipes_own.layout.length:
            print(f"rows are {fitted} tokens long, which is what {init_from} takes", file=sys.stderr)
        preparing = progress("preparing", Sources(experiment.sources).text_bytes(), "bytes", not where.is_main)
        finished = run_experiment(experiment, out, where, prepare_progress=preparing, restart=restart)
    if not finished:
        sys.exit(3)
    if where.is_main:
        print(out / "model")


def _reject_ignored_overrides(overrides: list[str], init_from: str | None) -> None:
    """A model to go on from brings a network and a tokenizer: nobody shall think that others are used."""
    for change in overrides:
        name = change.partition("=")[0].strip()
        if init_from is not None and name.split(".")[0] in ("backbone", "tokenizer"):
            whose = f"those of {init_from}" if init_from else "those of the model that --init-from names"
            raise ValueError(f"{name} would have no effect: network and tokenizer are {whose}; leave it out")
        if name == "init_from":
            raise ValueError("the model to go on from is named with --init-from MODEL, and not with --set")


def _check_required(experiment: Experiment, recipe: str) -> None:
    """Ask for what a recipe cannot know."""
    missing = {"--init-from MODEL": experiment.init_from == "", "--sources TEXT": not experiment.sources}
    named = " and ".join(option for option, absent in missing.items() if absent)
    if named:
        raise ValueError(f"{recipe} needs {named}: it goes on from a model of yours with text of yours")


def export(
    source: ModelPath,
    out: ModelPath,
    format: Literal["unmask", "upstream"] = "unmask",
    license: str | None = None,
    dataset: tuple[str, ...] = (),
    language: tuple[str, ...] = (),
) -> None:
    """Write a model folder, or an ONNX file, from a run's newest checkpoint or from another model folder.

    For example:
      unmask export runs/tiny tiny-model --license apache-2.0 --language en
      unmask export runs/tiny/model tiny.onnx
      unmask train stdlib-tiny --out runs/plain \\
        --set backbone.local_init=None backbone.activation=gelu backbone.rope_theta=10000
      unmask export runs/plain plain-mdlm --format upstream

    Args:
        source: The folder of a run (its averaged weights are taken) or of a model.
        out: The new folder; or a file that ends in .onnx, for onnxruntime and its like: tokens
            [batch, length] in, log-probabilities of the clean token out.
        format: In the layout that such models are published in (MDLM, BD3LM, LLaDA, Dream, transformers).
            MDLM's is of plain networks, as runs/plain above is; what does not fit is named, with a remedy.
        license: The model's license for its card, as hubs name it: apache-2.0, mit, cc-by-4.0.
        dataset: Names of the data sets that it was trained on, for its card.
        language: Codes of the languages that it writes, for its card: en, de.
    """
    from unmask.cli.progress import heartbeat
    from unmask.pretrained import CardMetadata, export_onnx, save
    from unmask.run import load_ema_model, read_card_metadata

    onnx = out.suffix == ".onnx"
    if format == "upstream" and onnx:
        raise ValueError("--format upstream writes a folder, and an .onnx file is none; ask for one of them")
    if onnx and (license or dataset or language):
        raise ValueError("--license, --dataset and --language are for a folder's card; an .onnx file has none")
    if out.suffix in _UNSUPPORTED_SUFFIXES:
        raise ValueError(f"{out.suffix} files are not written here; name a new folder, or a file that ends in .onnx")
    if out.exists():
        raise ValueError(f"{out} exists already, and export replaces nothing: choose another name")
    given = CardMetadata(license, dataset, language)
    run = (source / "experiment.json").exists()
    lm, facts = load_ema_model(source, _warn) if run else (load_model(source), None)
    if onnx:
        with heartbeat("writing the ONNX graph, which takes a minute or so"):
            print(export_onnx(lm, out))
        return
    known = read_card_metadata(source) if run else CardMetadata()
    metadata = replace(given, datasets=dataset or known.datasets, results=known.results)
    print(save(lm, out, upstream_format=format == "upstream", facts=facts, metadata=metadata))


def recipes() -> None:
    """List the named experiments.

    For example:
      unmask recipes
    """
    from unmask.recipes import RECIPES

    for name, function in RECIPES.items():
        print(f"{name:12} {(function.__doc__ or '').strip()}")


def _load_experiment(recipe: str) -> Experiment:
    """A named experiment, or one from a file."""
    from unmask.experiment import Experiment
    from unmask.recipes import RECIPES
    from unmask.training.run_folder import settings_of

    path = Path(recipe)
    if path.suffix != ".json":
        return lookup(recipe, RECIPES, "recipe")()
    if not path.exists():
        raise ValueError(f"{path} cannot be read: No such file or directory")
    stated = read_json(path)
    if isinstance(stated, dict):
        stated = settings_of(stated)
        if isinstance(stated.get("backbone"), dict):
            stated["backbone"].setdefault("kind", "DiTConfig")  # as people may leave out
    experiment: Experiment = from_json(Experiment, stated, str(path))
    return experiment


def _warn(text: str) -> None:
    print(f"unmask: {text}", file=sys.stderr)


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"a shard is written I/N, 0/4 to 3/4 for four; got {text!r}")
    return int(parts[0]), int(parts[1])
