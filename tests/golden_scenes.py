"""What golden runs do, in the library's names: only this file needs to change when names do.

Models are tiny, in float32, with fixed seeds. Each function gives plain figures under names of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

import unmask
from unmask import (
    D3PM,
    MDLM,
    SEDD,
    Ancestral,
    Autoregression,
    BlockDiffusion,
    Blockwise,
    Choice,
    Confidence,
    DiTConfig,
    EntropyBounded,
    Factor,
    FirstHitting,
    Guidance,
    LanguageModel,
    Llama,
    RandomOrder,
    Remask,
    SemiAutoregressive,
    Threshold,
    TimeConditioning,
    Tokenizer,
    UniformAncestral,
    UniformDiffusion,
)
from unmask.backbones.dit import LocalStart
from unmask.backbones.huggingface import HuggingFace
from unmask.cli import main
from unmask.data.columns import PromptAnswer
from unmask.data.corpus import PrepareOptions
from unmask.data.loader import Pairs, PerDocument, Wrapped
from unmask.data.pairing import Padding
from unmask.data.sources import SourceOptions
from unmask.diffusion.schedule import (
    Cosine,
    CosineSquared,
    FromRate,
    Geometric,
    Hyperbolic,
    LinearSigma,
    LogLinear,
    Polynomial,
)
from unmask.diffusion.times import PiecewiseTimes, PowerTimes
from unmask.experiment import Experiment, averaged_model, carry_out
from unmask.guidance import Allowed, Enumerated, FirstOrder
from unmask.report import ReportSettings, write_report
from unmask.sampling.remask import Loop
from unmask.training.curriculum import Clipping, Widening
from unmask.training.loop import Training
from unmask.training.lowrank import LowRank
from unmask.training.machine import counting
from unmask.training.optim import AdamW, CosineDecay, LinearDecay, Muon
from unmask.training.parallel import Sharded
from unmask.world import World, world

__all__ = ["World", "ranks", "report", "samples", "scores", "trained", "training", "world"]

Figures = dict[str, Any]
LENGTH = 24
WORDS = "a cat sat on the mat and ate the rat while its old friend slept under 7 trees of 1984"


def text() -> str:
    """90 lines of words in an order that has some structure."""
    words, lines, word = WORDS.split(), [], 0
    for number in range(90):
        line = []
        for place in range(3 + number * 7 % 11):
            word = (word * 5 + number + place * place + 1) % len(words)
            line.append(words[word])
        lines.append(" ".join(line))
    return "\n".join(lines) + "\n"


def pairs() -> str:
    """60 prompts with answers of different lengths."""
    rows = (
        {"prompt": f"{n % 7} is " * (1 + n % 3), "answer": ("odd " if n % 2 else "even ") * (1 + n % 4)}
        for n in range(60)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


# Training.

DIT = DiTConfig(width=32, depth=2, heads=2, length=LENGTH, dropout=0.1)
CAUSAL = replace(DIT, causal=True)
LINES = PrepareOptions(source=SourceOptions(lines=True))
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": LENGTH,
}


def experiment(folder: Path, **changes: Any) -> Experiment:
    """20 steps on the text; `changes` are those of the training, or of the experiment itself."""
    settings: dict[str, Any] = {
        "steps": 20,
        "batch_size": 6,
        "optimizer": AdamW(lr=3e-3),
        "warmup": 4,
        "ema": 0.9,
        "bf16": False,
        "log_every": 1,
    }
    settings |= {key: changes.pop(key) for key in [*changes] if key in Training.__dataclass_fields__}
    given: dict[str, Any] = {
        "sources": (str(folder / "text.txt"),),
        "tokenizer": "bytes",
        "backbone": DIT,
        "layout": Wrapped(LENGTH),
        "evaluate_rows": 8,
        "training": Training(**settings),
    }
    return Experiment(**(given | changes))


def going_on(folder: Path, **changes: Any) -> Experiment:
    """From the model of `begun`."""
    return experiment(folder, start=str(folder / "base"), **changes)


def answering(folder: Path, **changes: Any) -> Experiment:
    """From the same, on prompts and answers."""
    options = PrepareOptions(source=SourceOptions(pairs=PromptAnswer()))
    return going_on(folder, sources=(str(folder / "pairs.jsonl"),), options=options, **changes)


def begun(folder: Path) -> None:
    """What runs need: the texts, and models to go on from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text())
    (folder / "pairs.jsonl").write_text(pairs())
    unmask.save(_model(DIT, MDLM(), Tokenizer.bytes()), folder / "base")


def _opened(folder: Path) -> str:
    """A causal network as the transformers library makes it."""
    if not (folder / "opened").exists():
        model = _model(HuggingFace(json.dumps(LLAMA), opened=1.0), MDLM(), Tokenizer.bytes(), spread=None)
        unmask.save(model, folder / "opened", published=True)
    return str(folder / "opened")


def training(folder: Path) -> Iterator[tuple[str, Experiment]]:
    """Runs of one process."""

    def plain(**changes: Any) -> Experiment:
        return experiment(folder, **changes)

    told = replace(DIT, time=TimeConditioning(width=16))
    near = replace(DIT, activation="relu2", rotary_base=100.0, local=LocalStart(), qk_norm=True, tied=True)
    yield "mdlm", plain()
    yield "mdlm in 8 steps", plain(objective=MDLM(steps=8))
    yield "mdlm without zero masking", plain(objective=MDLM(zero_masking=False))
    yield "mdlm without carry-over", plain(objective=MDLM(carry_over=False))
    yield "mdlm, exact counts", plain(objective=MDLM(exact_counts=True))
    yield "d3pm", plain(objective=D3PM(steps=50))
    yield "sedd", plain(objective=SEDD())
    yield "uniform", plain(objective=UniformDiffusion(steps=50))
    yield "ar", plain(objective=Autoregression(), backbone=CAUSAL)
    yield "block", plain(objective=BlockDiffusion(block=8))
    yield "power times", plain(objective=MDLM(times=PowerTimes(2.0)))
    yield "widening", plain(curriculum=Widening())
    clipping = Clipping(every=7, batches=2)
    yield "clipping", plain(objective=BlockDiffusion(block=8, exact_counts=True), curriculum=clipping)
    yield "muon", plain(optimizer=Muon(weight_decay=0.1), decay=LinearDecay(floor=0.1))
    piecewise = MDLM(times=PiecewiseTimes((3.0, 1.0, 2.0)))
    decayed = AdamW(lr=3e-3, weight_decay=0.1)
    yield "piecewise times, decay", plain(objective=piecewise, optimizer=decayed, decay=CosineDecay())
    yield "clipped, another seed", plain(clip=0.1, ema=0.0, seed=7)
    yield "random length", plain(random_length=0.5)
    yield "microbatches", plain(microbatch=2)
    yield "recompute", plain(recompute=True)
    yield "time", plain(backbone=told, objective=MDLM(schedule=Cosine()))
    yield "time, sedd", plain(backbone=told, objective=SEDD())
    start = {"unigram_start": True, "objective": MDLM(exact_counts=True)}
    yield "local start", plain(backbone=near, **start)
    yield "llama", plain(backbone=replace(DIT, llama=Llama(hidden=48, kv_heads=1, bias=True)))
    yield "shifted", plain(backbone=replace(DIT, shifted=True))
    yield "packed documents", plain(layout=Wrapped(LENGTH, apart=True), options=LINES)
    yield (
        "packed documents, block",
        plain(layout=Wrapped(LENGTH, apart=True), options=LINES, objective=BlockDiffusion(block=8)),
    )
    yield "a document a row", plain(layout=PerDocument(LENGTH), options=LINES)
    yield "going on", going_on(folder)
    yield "low rank", going_on(folder, low_rank=LowRank(rank=4))
    yield "low rank, some layers", going_on(folder, low_rank=LowRank(rank=2, targets=("attention.qkv",)))
    yield "answers", answering(folder, layout=Pairs(LENGTH))
    yield "answers, padded", answering(folder, layout=Pairs(LENGTH, Padding()))
    yield (
        "answers, low rank, block",
        answering(folder, layout=Pairs(LENGTH), low_rank=LowRank(rank=4), objective=BlockDiffusion(block=8)),
    )
    opened = _opened(folder)
    yield "transformers", plain(start=opened)
    yield "transformers, opening", plain(start=opened, opening=0.5, low_rank=LowRank(rank=2))


def ranks(folder: Path) -> Iterator[tuple[str, Experiment]]:
    """Runs of two processes: with replicas, and with shards."""
    objectives: dict[str, Any] = {
        "mdlm": MDLM(),
        "d3pm": D3PM(steps=50),
        "sedd": SEDD(),
        "uniform": UniformDiffusion(steps=50),
        "ar": Autoregression(),
        "block": BlockDiffusion(block=8),
    }
    few = {"steps": 10, "backbone": replace(DIT, depth=1)}
    for how, spread in (("replicated", {}), ("sharded", {"parallelism": Sharded()})):
        for name, objective in objectives.items():
            settings = few if name != "mdlm" else {}
            settings = settings | ({"backbone": replace(CAUSAL, depth=1)} if name == "ar" else {})
            yield f"{name}, {how}", experiment(folder, objective=objective, **settings, **spread)
        muon = {"optimizer": Muon(), "batch_size": 5, "microbatch": 2, "objective": MDLM(exact_counts=True)}
        yield f"muon, {how}", experiment(folder, **few, **muon, **spread)
    clipping = {"objective": objectives["block"], "curriculum": Clipping(every=7, batches=2)}
    yield "clipping, replicated", experiment(folder, **few, **clipping)
    yield "low rank, sharded", going_on(folder, steps=10, low_rank=LowRank(rank=4), parallelism=Sharded())
    yield "answers, sharded", answering(folder, steps=10, layout=Pairs(LENGTH), parallelism=Sharded())


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Without what only takes time: measuring the machine, counting operations, waiting for the disk."""
    with (
        mock.patch("unmask.training.machine.matmul_peak", return_value=1.0),
        mock.patch("unmask.training.loop.counting", side_effect=lambda _wanted: counting(False)),
        mock.patch("os.fsync"),
    ):
        yield


def trained(chosen: Experiment, folder: Path, where: World) -> Figures:
    """The losses and gradients of all steps, what is measured at the end, and the averaged weights."""
    with contextlib.redirect_stderr(io.StringIO()), hurried():
        assert carry_out(chosen, folder, where)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "loss" in line]
    (held_out,) = (line for line in logged if "valid_nats_per_token" in line)
    return {
        "loss": [line["loss"] for line in steps],
        "gradient": [line["gradient"] for line in steps],
        "tokens": steps[-1]["tokens"],
        "held out": [held_out["valid_nats_per_token"], held_out["valid_standard_error"]],
        "weights": digest(folder / "model"),
    }


def digest(folder: Path) -> str:
    """Of all weights of a model folder, whatever they are called."""
    tensors = load_file(folder / "model.safetensors").values()
    each = sorted(hashlib.sha256(f"{list(t.shape)}".encode() + t.numpy().tobytes()).digest() for t in tensors)
    return hashlib.sha256(b"".join(each)).hexdigest()


# Sampling.

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789.,\n"


def _model(
    backbone: Any, objective: Any, tokenizer: Tokenizer | None = None, spread: float | None = 0.3
) -> LanguageModel:
    """A model with random weights that make every token matter to every other."""
    torch.manual_seed(0)
    lm = LanguageModel.new(backbone, objective, tokenizer or Tokenizer.characters(LETTERS))
    if spread is not None:
        for parameter in lm.denoise.parameters():
            torch.nn.init.normal_(parameter, std=spread)
    return LanguageModel(lm.denoise.eval(), lm.tokenizer)


class Liking:
    """A classifier, log p(y | z) = logsigmoid(sum of a number for each token), and what embeds tokens for
    it."""

    def __init__(self, lm: LanguageModel) -> None:
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(lm.vocab.size, 3, generator=generator)

    def __call__(self, embedded: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(embedded.sum((1, 2)))

    def of_tokens(self, z: Tensor) -> Tensor:
        return self(self.embedding[z])


def samples(_folder: Path) -> Iterator[tuple[str, Figures]]:
    """What every sampler writes."""
    mdlm = _model(DIT, MDLM())
    told = _model(replace(DIT, time=TimeConditioning(width=16)), MDLM(schedule=Cosine()))
    grouped = _model(
        replace(DIT, llama=Llama(hidden=48, kv_heads=1)), MDLM(schedule=LogLinear(0.0)), spread=0.4
    )
    shifted = _model(replace(DIT, shifted=True), MDLM())
    block = _model(DIT, BlockDiffusion(block=8))
    ar, uniform = _model(CAUSAL, Autoregression()), _model(DIT, UniformDiffusion(steps=50))
    d3pm, sedd = _model(DIT, D3PM(steps=50)), _model(DIT, SEDD())
    liking, some = Liking(mdlm), "the cat <mask:6> on <mask:5>."

    def sampled(lm: LanguageModel, sampler: Any, *, n: int = 3, **options: Any) -> Figures:
        return written(lm.sample(n, prompt="the cat", sampler=sampler, seed=11, **options))

    choices = {
        "temperature 0.5": Choice(0.5),
        "temperature 0": Choice(0.0),
        "top k": Choice(top_k=5),
        "top p": Choice(top_p=0.7),
        "all of them": Choice(0.8, 12, 0.9),
    }
    for name, choice in choices.items():
        yield f"ancestral, {name}", sampled(mdlm, Ancestral(8, choice))
        yield f"confidence, {name}", sampled(mdlm, Confidence(8, choice=choice))
        yield f"ar, {name}", sampled(ar, unmask.Autoregressive(choice))
        yield f"uniform, {name}", sampled(uniform, UniformAncestral(8, choice))
    mixed = Choice(0.8, top_p=0.9)
    masked: dict[str, Any] = {
        "ancestral": Ancestral(8),
        "first hitting": FirstHitting(),
        "random order": RandomOrder(6),
        **{f"confidence by {name}": Confidence(6, name) for name in ("probability", "margin", "entropy")},
        "confidence, some late": Confidence(8, late=(0, 1, 2)),
        "threshold": Threshold(0.3, mixed),
        "factor": Factor(1.5, mixed),
        "entropy bounded": EntropyBounded(2.0, mixed),
        **{f"remask by {name}": Remask(12, name) for name in ("cap", "rescale", "least-sure")},
        "remask in a loop": Remask(16, "least-sure", Loop()),
        "semi-autoregressive": SemiAutoregressive(6, 12, Ancestral(4)),
        "semi-autoregressive, remask": SemiAutoregressive(5, 12, Remask(6, "least-sure")),
    }
    for name, sampler in masked.items():
        yield name, sampled(mdlm, sampler)
    inside: dict[str, Any] = {
        "ancestral": Ancestral(3),
        "confidence": Confidence(3, choice=mixed),
        "threshold": Threshold(0.3),
        "remask": Remask(5, "least-sure"),
    }
    for name, sampler in inside.items():
        for cache in ("none", "prefix", "dual"):
            blockwise = Blockwise(6, sampler, cache)
            yield f"blocks of 6, {name}, {cache} cache", sampled(mdlm, blockwise)
        alone = name == "remask"  # several rows fail where only some are asked at the first step of all
        yield f"block, {name}", sampled(block, Blockwise(sampler=sampler), n=1 if alone else 3)
    for cache in ("none", "prefix", "dual"):
        yield f"llama, blocks, {cache} cache", sampled(grouped, Blockwise(6, Confidence(3), cache))
        yield f"shifted, blocks, {cache} cache", sampled(shifted, Blockwise(6, Confidence(3), cache))
        yield f"time, blocks, {cache} cache", sampled(told, Blockwise(6, Confidence(3), cache))
    yield "blocks with a stop", sampled(mdlm, Blockwise(6, Ancestral(3), stop=4))
    yield "block with a stop", sampled(block, Blockwise(sampler=Ancestral(3), stop=4))
    models = {"mdlm": mdlm, "time": told, "llama": grouped, "shifted": shifted, "d3pm": d3pm, "sedd": sedd}
    for name, lm in (models | {"uniform": uniform, "ar": ar, "block": block}).items():
        plain = lm.default_sampler(steps=5)
        yield f"{name}, default sampler", sampled(lm, plain)
        yield f"{name}, completions", written(lm.complete(["a", "the cat ", "x"], 9, sampler=plain, seed=2))
        yield f"{name}, infilling", written(lm.infill(some, n=2, sampler=plain, seed=3))
        yield f"{name}, longer than the model", sampled(lm, plain, length=60, n=2)
        long = f"{text()[:40]}<mask:4>{text()[50:90]}<mask:30>{text()[100:110]}<mask:3>."
        yield f"{name}, windows around holes", written(lm.infill(long, n=2, sampler=plain, seed=4))
    yield (
        "semi-autoregressive, longer",
        sampled(mdlm, SemiAutoregressive(10, sampler=Ancestral(4)), length=60),
    )
    for name, lm in {"mdlm": mdlm, "sedd": sedd, "time": told}.items():
        yield f"{name}, guided by the prompt", sampled(lm, Ancestral(6), guide=Guidance(scale=1.5))
    guides: dict[str, Any] = {
        "guided by the prompt": Guidance(scale=1.5),
        "never some tokens": Guidance(never=(0, 4, 9, 26)),
        "allowed by place": lambda denoise, _z, _t: Allowed.at(denoise, {8: [1, 2], 20: [5]}, LENGTH),
        "enumerated classifier": lambda denoise, _z, _t: Enumerated(denoise, liking.of_tokens, 2.0),
        "first-order classifier": lambda denoise, _z, _t: FirstOrder(denoise, liking, 2.0),
    }
    for name, guide in guides.items():
        yield f"confidence, {name}", sampled(mdlm, Confidence(6, choice=mixed), guide=guide)
        yield f"remask, {name}", sampled(mdlm, Remask(8), guide=guide)
    patterns: dict[str, Any] = {
        "digits": "[0-9]+",
        "words": "[a-z]+( [a-z]+)*",
        "two": (r"(sat|ate|slept)[a-z ]*", "[0-9]{1,3}[.,a]*"),
    }
    for name, match in patterns.items():
        guide = Guidance(match=match)
        yield f"matching {name}", written(mdlm.infill(some, n=2, sampler=Ancestral(4), seed=5, guide=guide))
        yield (
            f"matching {name}, confidence",
            written(mdlm.infill(some, n=2, sampler=Confidence(4), seed=5, guide=guide)),
        )
    everything = Guidance(scale=1.0, match="[a-z]+", never=(1, 2))
    yield "all that can be asked", written(mdlm.infill(some, n=2, sampler=Ancestral(4), guide=everything))
    frames = list(mdlm.frames(mdlm.holes(some, 2), Remask(5, "least-sure"), seed=6))
    yield "every step", {"ids": [frame.ids for frame in frames]}
    packed = _model(DIT, MDLM())
    packed.denoise.pack()
    yield "packed matrices", sampled(packed, Ancestral(6))


def written(found: Any) -> Figures:
    """What was written, and the work that it was."""
    return {
        "ids": found.ids,
        "texts": found.texts,
        "calls": found.network_calls,
        "head rows": found.head_rows,
    }


# Measuring.

TEXTS = ["the cat sat", "7 trees of 1984, and a rat while its old friend slept under the mat.", "a"]


def scores(folder: Path) -> Iterator[tuple[str, Figures]]:
    """What texts cost."""
    told = replace(DIT, time=TimeConditioning(width=16))
    schedules: dict[str, Any] = {
        "linear": LogLinear(0.0),
        "cosine": Cosine(),
        "cosine squared": CosineSquared(),
        "geometric": Geometric(),
        "linear sigma": LinearSigma(),
        "polynomial": Polynomial(),
        "hyperbolic": Hyperbolic(),
        "from a rate": FromRate(lambda t: 1 / (1 - t)),
    }
    models: dict[str, tuple[Any, Any]] = {
        "mdlm": (DIT, MDLM()),
        "mdlm in 8 steps": (DIT, MDLM(steps=8)),
        "mdlm without zero masking": (DIT, MDLM(zero_masking=False)),
        "mdlm without carry-over": (DIT, MDLM(carry_over=False)),
        "mdlm, power times": (told, MDLM(times=PowerTimes(2.0))),
        "mdlm, piecewise times": (told, MDLM(times=PiecewiseTimes((3.0, 1.0, 2.0)))),
        "d3pm": (DIT, D3PM(steps=50)),
        "sedd": (DIT, SEDD()),
        "sedd, time": (told, SEDD()),
        "uniform": (DIT, UniformDiffusion(steps=50)),
        "ar": (CAUSAL, Autoregression()),
        "block": (DIT, BlockDiffusion(block=8)),
        "block, time": (told, BlockDiffusion(block=8)),
        "llama": (replace(DIT, llama=Llama(hidden=48, kv_heads=1)), MDLM()),
        "shifted": (replace(DIT, shifted=True), MDLM()),
        **{f"mdlm, time, {name}": (told, MDLM(schedule=each)) for name, each in schedules.items()},
    }
    for name, (backbone, objective) in models.items():
        yield name, scored(_model(backbone, objective).score(TEXTS, draws=24, seed=3))
    mdlm = _model(DIT, MDLM())
    yield "one text", scored(mdlm.score(TEXTS[1], draws=24))
    yield "to a precision", scored(mdlm.score(TEXTS, draws=16, precision=0.05))
    (folder / "text.txt").write_text(text()[:1200])
    for name in ("mdlm", "mdlm in 8 steps", "sedd", "uniform", "ar", "block"):
        model = unmask.save(_model(*models[name]), folder / name)
        for options in ([], ["--per-document"], ["--precision", "0.1"]) if name == "mdlm" else ([],):
            arguments = ["eval", str(model), str(folder / "text.txt"), "--replicates", "3", "--json"]
            (found,) = command(*arguments, *options)["texts"]
            kept = {key: found[key] for key in found if isinstance(found[key], int | float | list)}
            yield " ".join(["eval", name, *options]), kept


def scored(score: Any) -> Figures:
    """Nats and errors, of all texts and of each."""
    return {
        "nats": [each.nats for each in score.each],
        "standard errors": [each.standard_error for each in score.each],
        "by time": score.by_time,
        "by time error": score.by_time_error,
        "tokens": list(score.token_nats),
        "perplexity": score.perplexity,
        "size": score.tokens,
    }


def command(*arguments: str) -> Any:
    """What a command prints with --json."""
    printed, told = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["unmask", *arguments]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(told),
    ):
        try:
            main()
        except SystemExit:
            raise AssertionError(told.getvalue()) from None
    return json.loads(printed.getvalue())


def report(folder: Path) -> Iterator[tuple[str, Figures]]:
    """A run from its text to its report, its model's way through folders, and what commands say of it."""
    begun(folder)
    effort = ReportSettings(
        rows=8, replicates=2, sweep_rows=4, sweep_replicates=2, samples=2, steps=6, seed=1
    )
    plain = {
        "mdlm": experiment(folder),
        "ar": experiment(folder, objective=Autoregression(), backbone=CAUSAL),
    }
    for name, chosen in plain.items():
        run = folder / "runs" / name
        yield f"{name}: run", trained(chosen, run, World())
        found = json.loads((write_report(run, settings=effort).parent / "report.json").read_text())
        curves = found["curves"]
        yield (
            f"{name}: report",
            {
                "headline": {key: value for key, value in found["headline"].items() if "second" not in key},
                "held out": found["held_out"],
                "step bounds": found["step_bounds"],
                "loss": curves["loss"],
                "samples": [sample["text"] for sample in found["samples"]],
            },
        )
        lm = unmask.load(run)
        unmask.save(lm, folder / f"{name} again")
        unmask.save(averaged_model(run)[0], folder / f"{name} averaged")
        roads = ["again", "averaged"]
        if name == "mdlm":
            unmask.save(lm, folder / f"{name} published", published=True)
            unmask.save(unmask.load(folder / f"{name} published"), folder / f"{name} back")
            roads += ["published", "back"]
        yield f"{name}: weights", {road: digest(folder / f"{name} {road}") for road in roads}
        yield f"{name}: scores", scored(lm.score(TEXTS, draws=16))
        yield f"{name}: samples", written(lm.sample(2, 16, seed=4))
