"""The command line: parse, build, call. torch is imported inside the commands, so that help comes at once."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from unmask.model import LanguageModel, Samples
    from unmask.sampling import AnySampler

Model = Annotated[Path, tyro.conf.Positional]
Text = Annotated[str, tyro.conf.Positional]
Texts = Annotated[tuple[str, ...], tyro.conf.Positional]
Json = Annotated[bool, tyro.conf.arg(name="json", help="Print one JSON object instead of text.")]


SamplerName = Literal[
    "default",
    "ancestral",
    "first-hitting",
    "random-order",
    "confidence",
    "threshold",
    "entropy-bounded",
    "remask",
]


@dataclass(frozen=True)
class Writing:
    """How tokens are written."""

    n: int = 1
    """How many texts."""
    steps: int = 128
    """Steps of the sampler; more are better and slower."""
    temperature: float = 1.0
    """0 takes the most probable token, 1 samples the model as it is."""
    top_k: int | None = None
    """Sample from the k most probable tokens only."""
    top_p: float | None = None
    """Sample from the most probable tokens that together reach p only."""
    seed: int = 0
    """Row i is drawn with seed + i."""
    sampler: SamplerName = "default"
    """In which order holes are filled; the default is the plain one of the model's kind."""

    def build(self, lm: LanguageModel, length: int | None) -> AnySampler:
        """The sampler that was named; in sliding windows, if the text is longer than the model."""
        from unmask import sampling
        from unmask.diffusion.categorical import Choice

        choice = Choice(self.temperature, self.top_k, self.top_p)
        if self.sampler == "default":
            chosen = lm.default_sampler(self.steps, choice)
        else:
            kind = getattr(sampling, "".join(word.title() for word in self.sampler.split("-")))
            steps = {"steps": self.steps} if "steps" in kind.__dataclass_fields__ else {}
            chosen = kind(**steps, choice=choice)
        longest = lm.denoise.max_length
        if (
            length is None
            or longest is None
            or length <= longest
            or not isinstance(chosen, sampling.WINDOWED)
        ):
            return chosen
        return sampling.SemiAutoregressive(stride=max(1, longest // 2), sampler=chosen)


Written = Annotated[Writing, tyro.conf.arg(name="")]


def sample(
    model: Model,
    length: int | None = None,
    prompt: str = "",
    writing: Written = Writing(),  # noqa: B008
    as_json: Json = False,
) -> None:
    """Write texts from nothing, or from a prompt.

    Example: unmask sample runs/demo --n 4 --length 16 --steps 16

    Args:
        model: A model folder, of ours or in the published MDLM layout.
        length: How many tokens each; the model's longest if not given.
        prompt: What each text begins with.
    """
    lm = _load(model)
    start = prompt or ()
    sampler = writing.build(lm, length)
    _show(lm.sample(writing.n, length, prompt=start, sampler=sampler, seed=writing.seed), as_json)


def infill(
    model: Model,
    template: Text,
    writing: Written = Writing(),  # noqa: B008
    as_json: Json = False,
) -> None:
    """Fill the holes of a text.

    Example: unmask infill runs/demo "Flat is <mask:2> nested."

    Args:
        model: A model folder, of ours or in the published MDLM layout.
        template: Text with <mask:12> for twelve hidden tokens, <mask> for one; any number of holes.
    """
    lm = _load(model)
    _show(lm.infill(template, n=writing.n, sampler=writing.build(lm, None), seed=writing.seed), as_json)


def score(model: Model, texts: Texts, draws: int = 64, seed: int = 0, as_json: Json = False) -> None:
    """Say how many nats a model needs for texts, with the standard error.

    Example: unmask score runs/demo "Flat is better than nested." "nested than better is Flat."

    Args:
        model: A model folder, of ours or in the published MDLM layout.
        texts: One or more texts.
        draws: Random maskings of each text; more make the error smaller.
        seed: Of the maskings.
    """
    names = ("tokens", "nats_per_token", "standard_error", "perplexity", "bits_per_byte")
    result = _load(model).score(list(texts), draws=draws, seed=seed)
    if as_json:
        scores = [{name: getattr(each, name) for name in names} for each in result.each]
        _print_json({"scores": [{"text": t, **s} for t, s in zip(texts, scores, strict=True)]})
        return
    for each, text in zip(result.each, texts, strict=True):
        print(
            f"{each.nats_per_token:.3f} ± {each.standard_error:.3f} nats/token"
            f"  perplexity {each.perplexity:.2f}  {each.bits_per_byte:.3f} bits/byte  {text!r}"
        )


def prepare(
    sources: Texts,
    out: Path = Path("corpus"),
    tokenizer: str = "bpe:4096",
    share: float = 0.05,
    shard: str | None = None,
    lines: bool = False,
    field: str = "text",
    column: str = "text",
) -> None:
    """Turn text into a folder of token ids, which training maps into memory.

    Example: unmask prepare my_texts/ --tokenizer bpe:8192 --out corpora/mine

    Args:
        sources: Files or folders (text, .gz, .jsonl, .csv, .tsv, .parquet, FASTA), stdlib, or hub:NAME.
        out: The folder; what is there already and up to date is left as it is.
        tokenizer: bytes, text8, dna, bpe:SIZE (trained on the text), a tokenizer.json, or hub:NAME.
        share: The part of the text that is held out for validation.
        shard: I/N prepares every N-th document from the I-th (0 to N - 1); the N parts join by themselves.
        lines: Every line of a text file is a document.
        field: The field of JSON lines that holds the text.
        column: The column of tables that holds the text.
    """
    from unmask.data.corpus import PrepareOptions
    from unmask.data.corpus import prepare as prepare_corpus
    from unmask.data.sources import SourceOptions

    options = PrepareOptions(SourceOptions(lines, field, column), share, _shard(shard))
    corpus = prepare_corpus(sources, out, tokenizer, options)
    for name, split in corpus.splits.items():
        print(f"{name}: {split.tokens:,} tokens in {split.documents:,} documents, {split.text.bytes:,} bytes")
    print(f"vocabulary: {corpus.vocab.size:,} with the mask; in {corpus.folder}")


def train(
    recipe: Text,
    out: Path = Path("runs/train"),
    objective: Literal["mdlm", "d3pm", "sedd", "ar"] = "mdlm",
    sources: tuple[str, ...] = (),
    tokenizer: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
) -> None:
    """Train a model, or go on training it; `torchrun` runs the same on many processes.

    Example: unmask train stdlib-tiny --out runs/tiny
    Example: torchrun --nproc_per_node 2 -m unmask train stdlib-tiny --out runs/tiny

    A run that was killed goes on from its last checkpoint when the same command is given again. SIGTERM and
    SIGINT finish the step, save, and exit with code 3.

    Args:
        recipe: The settings to start from; `unmask recipes` lists them.
        out: The run's folder: corpus, checkpoints, metrics.jsonl and, at the end, model/.
        objective: What to train with.
        sources: Your own text instead of the recipe's.
        tokenizer: Another tokenizer than the recipe's.
        steps: Another number of steps.
        batch_size: Another global batch size.
        seed: Another seed.
    """
    from dataclasses import replace

    from unmask.experiment import OBJECTIVES, carry_out
    from unmask.recipes import RECIPES
    from unmask.world import world

    experiment = _known(RECIPES, recipe, "recipe")()
    if objective != "mdlm":
        experiment = experiment.with_objective(OBJECTIVES[objective])
    given = {"steps": steps, "batch_size": batch_size, "seed": seed}
    changes = {name: value for name, value in given.items() if value is not None}
    experiment = replace(
        experiment,
        sources=sources or experiment.sources,
        tokenizer=tokenizer or experiment.tokenizer,
        training=replace(experiment.training, **changes),
    )
    with world() as where:
        finished = carry_out(experiment, out, where)
    if not finished:
        sys.exit(3)
    if where.first:
        print(out / "model")


def evaluate(
    model: Model,
    sources: Texts,
    rows: int | None = None,
    replicates: int = 8,
    lines: bool = False,
    field: str = "text",
    column: str = "text",
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Measure a model on text: nats per token, perplexity and bits per byte, with the standard error.

    Example: unmask eval runs/tiny/model my_test.txt

    Args:
        model: A model folder with a tokenizer.
        sources: Files or folders, as `unmask prepare` takes them.
        rows: Only so many windows of text; all, if not given.
        replicates: Passes over the text, each with fresh times and masks; more make the error smaller.
        lines: Every line of a text file is a document.
        field: The field of JSON lines that holds the text.
        column: The column of tables that holds the text.
        seed: Of the times and masks.
    """
    from tempfile import TemporaryDirectory

    from unmask.data.corpus import PrepareOptions
    from unmask.data.corpus import prepare as prepare_corpus
    from unmask.data.loader import Wrapped
    from unmask.data.sources import SourceOptions
    from unmask.experiment import evaluate as evaluate_model

    lm = _load(model)
    if lm.tokenizer is None or lm.denoise.max_length is None:
        raise ValueError(f"{model} has no tokenizer, so text cannot be measured with it")
    options = PrepareOptions(SourceOptions(lines, field, column), share=0)
    with TemporaryDirectory() as scratch:
        corpus = prepare_corpus(sources, Path(scratch) / "corpus", str(model / "tokenizer.json"), options)
        layout = Wrapped(min(lm.denoise.max_length, corpus.splits["train"].tokens))
        score = evaluate_model(lm, corpus, "train", layout, rows, replicates, seed)
    if as_json:
        _print_json({**score.figures(), "sources": sources, "seed": seed})
        return
    print(
        f"{score.nats_per_token:.4f} ± {score.standard_error:.4f} nats/token"
        f"  perplexity {score.perplexity:.2f}  {score.bits_per_byte:.4f} bits/byte"
        f"  ({score.tokens:,} tokens)"
    )


def export(source: Model, out: Model, published: bool = False) -> None:
    """Write a model folder from a run's newest checkpoint, or from another model folder.

    Example: unmask export runs/tiny tiny-model
    Example: unmask export runs/tiny/model tiny-mdlm --published

    Args:
        source: The folder of a run (its averaged weights are taken) or of a model.
        out: The new folder.
        published: In the layout of the published MDLM models instead of ours.
    """
    from unmask.experiment import averaged_model
    from unmask.release import save
    from unmask.world import World

    run = (source / "experiment.json").exists()
    print(save(averaged_model(source, World()) if run else _load(source), out, published=published))


def recipes() -> None:
    """List the named experiments.

    Example: unmask recipes
    """
    from unmask.recipes import RECIPES

    for name, function in RECIPES.items():
        print(f"{name:12} {(function.__doc__ or '').strip()}")


def main() -> None:
    """Exit with 0; 1 on failure; 2 on bad input, told in one sentence; 3 if a signal stopped training."""
    commands: dict[str, Callable[..., Any]] = {
        "prepare": prepare,
        "train": train,
        "eval": evaluate,
        "sample": sample,
        "infill": infill,
        "score": score,
        "export": export,
        "recipes": recipes,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="unmask", description="Masked diffusion language models."
        )
    except ValueError as error:
        print(f"unmask: {error}", file=sys.stderr)
        sys.exit(2)
    except (OSError, MemoryError, RuntimeError) as error:
        if os.environ.get("UNMASK_TRACEBACK"):
            raise
        print(f"unmask: {str(error).strip().splitlines()[0] if str(error) else error!r}", file=sys.stderr)
        sys.exit(1)


def _known(choices: dict[str, Any], name: str, what: str) -> Any:
    if name not in choices:
        close = difflib.get_close_matches(name, choices, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"there is no {what} {name!r}{hint}; there are {', '.join(choices)}")
    return choices[name]


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"a shard is written I/N, 0/4 to 3/4 for four; got {text!r}")
    return int(parts[0]), int(parts[1])


def _load(folder: Path) -> LanguageModel:
    from unmask.release import load

    return load(folder)


def _show(samples: Samples, as_json: bool) -> None:
    tokens = samples.tokens.tolist()
    texts = None if samples.tokenizer is None else samples.texts
    if as_json:
        _print_json({"texts": texts, "tokens": tokens, "network_calls": samples.network_calls})
        return
    for row in texts or [" ".join(map(str, ids)) for ids in tokens]:
        print(row)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False))
