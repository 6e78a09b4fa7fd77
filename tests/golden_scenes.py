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
    BlockDiffusion,
    Blockwise,
    Confidence,
    DiTConfig,
    EntropyBounded,
    Factor,
    FirstHitting,
    Guidance,
    LanguageModel,
    LlamaBlock,
    NextToken,
    RandomOrder,
    ReMDM,
    SamplingParams,
    SemiAutoregressive,
    Threshold,
    TimeConditioning,
    Tokenizer,
    UniformAncestral,
    UniformDiffusion,
)
from unmask.backbones.dit import LocalInit
from unmask.backbones.hf import HFBackboneConfig
from unmask.cli import main
from unmask.data.corpus import PrepareConfig
from unmask.data.loader import PadIgnored, PerDocument, PromptCompletionRows, Wrapped
from unmask.data.readers import PromptCompletion, SourceConfig
from unmask.diffusion.schedule import (
    Cosine,
    CosineSquared,
    Geometric,
    Hyperbolic,
    IntegratedRate,
    LinearSigma,
    LogLinear,
    Polynomial,
)
from unmask.diffusion.time_sampling import HistogramTimes, PowerTimes
from unmask.distributed import Distributed, init_distributed
from unmask.experiment import Experiment
from unmask.guidance import AllowedTokens, ExactClassifierGuidance, TaylorClassifierGuidance
from unmask.hardware.flops import count_flops
from unmask.report import ReportConfig, write_report
from unmask.run import load_ema_model, run_experiment
from unmask.sampling.factory import default_sampler
from unmask.sampling.remdm import Loop
from unmask.training._parallelism import FSDP
from unmask.training.config import TrainingConfig
from unmask.training.curriculum import TimeWidening, VarianceClipping
from unmask.training.lora import LoRA
from unmask.training.optim import AdamW, CosineDecay, LinearDecay, Muon

__all__ = ["Distributed", "init_distributed", "ranks", "report", "samples", "scores", "trained", "training"]

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
        {"prompt": f"{n % 7} is " * (1 + n % 3), "completion": ("odd " if n % 2 else "even ") * (1 + n % 4)}
        for n in range(60)
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


# Training.

DIT = DiTConfig(width=32, depth=2, heads=2, max_length=LENGTH, dropout=0.1)
CAUSAL = replace(DIT, causal=True)
LINES = PrepareConfig(source=SourceConfig(lines=True))
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
        "warmup_steps": 4,
        "ema_decay": 0.9,
        "bf16": False,
        "log_every": 1,
    }
    settings |= {key: changes.pop(key) for key in [*changes] if key in TrainingConfig.__dataclass_fields__}
    given: dict[str, Any] = {
        "sources": (str(folder / "text.txt"),),
        "tokenizer": "bytes",
        "backbone": DIT,
        "layout": Wrapped(LENGTH),
        "eval_windows": 8,
        "training": TrainingConfig(**settings),
    }
    return Experiment(**(given | changes))


def going_on(folder: Path, **changes: Any) -> Experiment:
    """From the model of `begun`."""
    return experiment(folder, init_from=str(folder / "base"), **changes)


def answering(folder: Path, **changes: Any) -> Experiment:
    """From the same, on prompts and answers."""
    options = PrepareConfig(source=SourceConfig(pair_format=PromptCompletion()))
    return going_on(folder, sources=(str(folder / "pairs.jsonl"),), prepare=options, **changes)


def begun(folder: Path) -> None:
    """What runs need: the texts, and models to go on from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text())
    (folder / "pairs.jsonl").write_text(pairs())
    unmask.save(_model(DIT, MDLM(), Tokenizer.bytes()), folder / "base")


def _opened(folder: Path) -> str:
    """A causal network as the transformers library makes it."""
    if not (folder / "opened").exists():
        model = _model(
            HFBackboneConfig(json.dumps(LLAMA), future_visibility=1.0), MDLM(), Tokenizer.bytes(), spread=None
        )
        unmask.save(model, folder / "opened", upstream_format=True)
    return str(folder / "opened")


def training(folder: Path) -> Iterator[tuple[str, Experiment]]:
    """Runs of one process."""

    def plain(**changes: Any) -> Experiment:
        return experiment(folder, **changes)

    told = replace(DIT, time_conditioning=TimeConditioning(width=16))
    near = replace(DIT, activation="relu2", rope_theta=100.0, local_init=LocalInit(), qk_norm=True, tie_embeddings=True)
    yield "mdlm", plain()
    yield "mdlm in 8 steps", plain(objective=MDLM(steps=8))
    yield "mdlm without zero masking", plain(objective=D3PM(steps=None, carry_over=True))
    yield "mdlm without carry-over", plain(objective=MDLM(carry_over=False))
    yield "mdlm, exact counts", plain(objective=MDLM(exact_mask_counts=True))
    yield "d3pm", plain(objective=D3PM(steps=50))
    yield "sedd", plain(objective=SEDD())
    yield "uniform", plain(objective=UniformDiffusion(steps=50))
    yield "ar", plain(objective=NextToken(), backbone=CAUSAL)
    yield "block", plain(objective=BlockDiffusion(block_size=8))
    yield "power times", plain(objective=MDLM(times=PowerTimes(2.0)))
    yield "widening", plain(curriculum=TimeWidening())
    clipping = VarianceClipping(every=7, batches=2)
    yield (
        "clipping",
        plain(objective=BlockDiffusion(block_size=8, exact_mask_counts=True), curriculum=clipping),
    )
    yield "muon", plain(optimizer=Muon(weight_decay=0.1), lr_schedule=LinearDecay(min_factor=0.1))
    piecewise = MDLM(times=HistogramTimes((3.0, 1.0, 2.0)))
    decayed = AdamW(lr=3e-3, weight_decay=0.1)
    yield "piecewise times, decay", plain(objective=piecewise, optimizer=decayed, lr_schedule=CosineDecay())
    yield "clipped, another seed", plain(max_grad_norm=0.1, ema_decay=0.0, seed=7)
    yield "random length", plain(random_length_prob=0.5)
    yield "microbatches", plain(microbatch_size=2)
    yield "recompute", plain(gradient_checkpointing=True)
    yield "time", plain(backbone=told, objective=MDLM(schedule=Cosine()))
    yield "time, sedd", plain(backbone=told, objective=SEDD())
    start = {"unigram_bias_init": True, "objective": MDLM(exact_mask_counts=True)}
    yield "local start", plain(backbone=near, **start)
    yield (
        "llama",
        plain(backbone=replace(DIT, llama=LlamaBlock(intermediate_size=48, kv_heads=1, qkv_bias=True))),
    )
    yield "shifted", plain(backbone=replace(DIT, shift_logits=True))
    yield "packed documents", plain(layout=Wrapped(LENGTH, isolate_documents=True), prepare=LINES)
    yield (
        "packed documents, block",
        plain(
            layout=Wrapped(LENGTH, isolate_documents=True),
            prepare=LINES,
            objective=BlockDiffusion(block_size=8),
        ),
    )
    yield "a document a row", plain(layout=PerDocument(LENGTH), prepare=LINES)
    yield "going on", going_on(folder)
    yield "low rank", going_on(folder, lora=LoRA(rank=4))
    yield "low rank, some layers", going_on(folder, lora=LoRA(rank=2, target_modules=("attention.qkv",)))
    yield "answers", answering(folder, layout=PromptCompletionRows(LENGTH))
    yield "answers, padded", answering(folder, layout=PromptCompletionRows(LENGTH, PadIgnored()))
    yield (
        "answers, low rank, block",
        answering(
            folder,
            layout=PromptCompletionRows(LENGTH),
            lora=LoRA(rank=4),
            objective=BlockDiffusion(block_size=8),
        ),
    )
    opened = _opened(folder)
    yield "transformers", plain(init_from=opened)
    yield "transformers, opening", plain(init_from=opened, attention_annealing=0.5, lora=LoRA(rank=2))


def ranks(folder: Path) -> Iterator[tuple[str, Experiment]]:
    """Runs of two processes: with replicas, and with shards."""
    objectives: dict[str, Any] = {
        "mdlm": MDLM(),
        "d3pm": D3PM(steps=50),
        "sedd": SEDD(),
        "uniform": UniformDiffusion(steps=50),
        "ar": NextToken(),
        "block": BlockDiffusion(block_size=8),
    }
    few = {"steps": 10, "backbone": replace(DIT, depth=1)}
    for how, spread in (("replicated", {}), ("sharded", {"parallelism": FSDP()})):
        for name, objective in objectives.items():
            settings = few if name != "mdlm" else {}
            settings = settings | ({"backbone": replace(CAUSAL, depth=1)} if name == "ar" else {})
            yield f"{name}, {how}", experiment(folder, objective=objective, **settings, **spread)
        muon = {
            "optimizer": Muon(),
            "batch_size": 5,
            "microbatch_size": 2,
            "objective": MDLM(exact_mask_counts=True),
        }
        yield f"muon, {how}", experiment(folder, **few, **muon, **spread)
    clipping = {"objective": objectives["block"], "curriculum": VarianceClipping(every=7, batches=2)}
    yield "clipping, replicated", experiment(folder, **few, **clipping)
    yield "low rank, sharded", going_on(folder, steps=10, lora=LoRA(rank=4), parallelism=FSDP())
    yield (
        "answers, sharded",
        answering(folder, steps=10, layout=PromptCompletionRows(LENGTH), parallelism=FSDP()),
    )


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """Without what only takes time: measuring the machine, counting operations, waiting for the disk."""
    with (
        mock.patch("unmask.training._throughput.peak_flops", return_value=1.0),
        mock.patch("unmask.training.trainer.count_flops", side_effect=lambda _wanted: count_flops(False)),
        mock.patch("os.fsync"),
    ):
        yield


def trained(chosen: Experiment, folder: Path, where: Distributed) -> Figures:
    """The losses and gradients of all steps, what is measured at the end, and the averaged weights."""
    with contextlib.redirect_stderr(io.StringIO()), hurried():
        assert run_experiment(chosen, folder, where)
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in logged if "loss" in line]
    (held_out,) = (line for line in logged if "valid_nats_per_token" in line)
    return {
        "loss": [line["loss"] for line in steps],
        "gradient": [line["grad_norm"] for line in steps],
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
    lm = LanguageModel.from_config(backbone, objective, tokenizer or Tokenizer.characters(LETTERS))
    if spread is not None:
        for parameter in lm.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=spread)
    return LanguageModel(lm.denoiser.eval(), lm.tokenizer)


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
    told = _model(replace(DIT, time_conditioning=TimeConditioning(width=16)), MDLM(schedule=Cosine()))
    grouped = _model(
        replace(DIT, llama=LlamaBlock(intermediate_size=48, kv_heads=1)),
        MDLM(schedule=LogLinear(0.0)),
        spread=0.4,
    )
    shifted = _model(replace(DIT, shift_logits=True), MDLM())
    block = _model(DIT, BlockDiffusion(block_size=8))
    ar, uniform = _model(CAUSAL, NextToken()), _model(DIT, UniformDiffusion(steps=50))
    d3pm, sedd = _model(DIT, D3PM(steps=50)), _model(DIT, SEDD())
    liking, some = Liking(mdlm), "the cat <mask:6> on <mask:5>."

    def sampled(lm: LanguageModel, sampler: Any, *, n: int = 3, **options: Any) -> Figures:
        return written(lm.sample(n, prompt="the cat", sampler=sampler, seed=11, **options))

    choices = {
        "temperature 0.5": SamplingParams(0.5),
        "temperature 0": SamplingParams(0.0),
        "top k": SamplingParams(top_k=5),
        "top p": SamplingParams(top_p=0.7),
        "all of them": SamplingParams(0.8, 12, 0.9),
    }
    for name, choice in choices.items():
        yield f"ancestral, {name}", sampled(mdlm, Ancestral(8, choice))
        yield f"confidence, {name}", sampled(mdlm, Confidence(8, params=choice))
        yield f"ar, {name}", sampled(ar, unmask.Autoregressive(choice))
        yield f"uniform, {name}", sampled(uniform, UniformAncestral(8, choice))
    mixed = SamplingParams(0.8, top_p=0.9)
    masked: dict[str, Any] = {
        "ancestral": Ancestral(8),
        "first hitting": FirstHitting(),
        "random order": RandomOrder(6),
        **{f"confidence by {name}": Confidence(6, name) for name in ("probability", "margin", "entropy")},
        "confidence, some late": Confidence(8, delayed_tokens=(0, 1, 2)),
        "threshold": Threshold(0.3, mixed),
        "factor": Factor(1.5, mixed),
        "entropy bounded": EntropyBounded(2.0, mixed),
        **{
            f"remask by {name}": ReMDM(12, kind)
            for name, kind in (("cap", "cap"), ("rescale", "rescale"), ("least-sure", "conf"))
        },
        "remask in a loop": ReMDM(16, "conf", Loop()),
        "semi-autoregressive": SemiAutoregressive(6, 12, Ancestral(4)),
        "semi-autoregressive, remask": SemiAutoregressive(5, 12, ReMDM(6, "conf")),
    }
    for name, sampler in masked.items():
        yield name, sampled(mdlm, sampler)
    inside: dict[str, Any] = {
        "ancestral": Ancestral(3),
        "confidence": Confidence(3, params=mixed),
        "threshold": Threshold(0.3),
        "remask": ReMDM(5, "conf"),
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
    yield "blocks with a stop", sampled(mdlm, Blockwise(6, Ancestral(3), end_ids=(4,)))
    yield "block with a stop", sampled(block, Blockwise(sampler=Ancestral(3), end_ids=(4,)))
    models = {"mdlm": mdlm, "time": told, "llama": grouped, "shifted": shifted, "d3pm": d3pm, "sedd": sedd}
    for name, lm in (models | {"uniform": uniform, "ar": ar, "block": block}).items():
        plain = default_sampler(lm.denoiser, steps=5)
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
        yield f"{name}, guided by the prompt", sampled(lm, Ancestral(6), guidance=Guidance(cfg_scale=1.5))
    guides: dict[str, Any] = {
        "guided by the prompt": Guidance(cfg_scale=1.5),
        "never some tokens": Guidance(banned_tokens=(0, 4, 9, 26)),
        "allowed by place": lambda denoise, _z, _t: AllowedTokens.at_positions(denoise, {8: [1, 2], 20: [5]}, LENGTH),
        "enumerated classifier": lambda denoise, _z, _t: ExactClassifierGuidance(denoise, liking.of_tokens, 2.0),
        "first-order classifier": lambda denoise, _z, _t: TaylorClassifierGuidance(denoise, liking, 2.0),
    }
    for name, guide in guides.items():
        yield f"confidence, {name}", sampled(mdlm, Confidence(6, params=mixed), guidance=guide)
        yield f"remask, {name}", sampled(mdlm, ReMDM(8), guidance=guide)
    patterns: dict[str, Any] = {
        "digits": "[0-9]+",
        "words": "[a-z]+( [a-z]+)*",
        "two": (r"(sat|ate|slept)[a-z ]*", "[0-9]{1,3}[.,a]*"),
    }
    for name, match in patterns.items():
        guide = Guidance(regex=match)
        yield (
            f"matching {name}",
            written(mdlm.infill(some, n=2, sampler=Ancestral(4), seed=5, guidance=guide)),
        )
        yield (
            f"matching {name}, confidence",
            written(mdlm.infill(some, n=2, sampler=Confidence(4), seed=5, guidance=guide)),
        )
    everything = Guidance(cfg_scale=1.0, regex="[a-z]+", banned_tokens=(1, 2))
    yield "all that can be asked", written(mdlm.infill(some, n=2, sampler=Ancestral(4), guidance=everything))
    frames = list(mdlm.generate_steps(mdlm.encode_template(some, 2), ReMDM(5, "conf"), seed=6))
    yield "every step", {"ids": [frame.ids for frame in frames]}
    packed = _model(DIT, MDLM())
    packed.denoiser.prepack()
    yield "packed matrices", sampled(packed, Ancestral(6))


def written(found: Any) -> Figures:
    """What was written, and the work that it was."""
    return {
        "ids": found.ids,
        "texts": found.texts,
        "calls": found.nfe,
        "head rows": found.num_queries,
    }


# Measuring.

TEXTS = ["the cat sat", "7 trees of 1984, and a rat while its old friend slept under the mat.", "a"]


def scores(folder: Path) -> Iterator[tuple[str, Figures]]:
    """What texts cost."""
    told = replace(DIT, time_conditioning=TimeConditioning(width=16))
    schedules: dict[str, Any] = {
        "linear": LogLinear(0.0),
        "cosine": Cosine(),
        "cosine squared": CosineSquared(),
        "geometric": Geometric(),
        "linear sigma": LinearSigma(),
        "polynomial": Polynomial(),
        "hyperbolic": Hyperbolic(),
        "from a rate": IntegratedRate(lambda t: 1 / (1 - t)),
    }
    models: dict[str, tuple[Any, Any]] = {
        "mdlm": (DIT, MDLM()),
        "mdlm in 8 steps": (DIT, MDLM(steps=8)),
        "mdlm without zero masking": (DIT, D3PM(steps=None, carry_over=True)),
        "mdlm without carry-over": (DIT, MDLM(carry_over=False)),
        "mdlm, power times": (told, MDLM(times=PowerTimes(2.0))),
        "mdlm, piecewise times": (told, MDLM(times=HistogramTimes((3.0, 1.0, 2.0)))),
        "d3pm": (DIT, D3PM(steps=50)),
        "sedd": (DIT, SEDD()),
        "sedd, time": (told, SEDD()),
        "uniform": (DIT, UniformDiffusion(steps=50)),
        "ar": (CAUSAL, NextToken()),
        "block": (DIT, BlockDiffusion(block_size=8)),
        "block, time": (told, BlockDiffusion(block_size=8)),
        "llama": (replace(DIT, llama=LlamaBlock(intermediate_size=48, kv_heads=1)), MDLM()),
        "shifted": (replace(DIT, shift_logits=True), MDLM()),
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
        "nats": [each.nats for each in score.per_text],
        "standard errors": [each.standard_error for each in score.per_text],
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
    effort = ReportConfig(windows=8, replicates=2, sweep_windows=4, sweep_replicates=2, samples=2, steps=6, seed=1)
    plain = {
        "mdlm": experiment(folder),
        "ar": experiment(folder, objective=NextToken(), backbone=CAUSAL),
    }
    for name, chosen in plain.items():
        run = folder / "runs" / name
        yield f"{name}: run", trained(chosen, run, Distributed())
        found = json.loads((write_report(run, config=effort).parent / "report.json").read_text())
        curves = found["curves"]
        yield (
            f"{name}: report",
            {
                "headline": {key: value for key, value in found["headline"].items() if "second" not in key},
                "held out": found["validation"],
                "step bounds": found["step_bounds"],
                "loss": curves["loss"],
                "samples": [sample["text"] for sample in found["samples"]],
            },
        )
        lm = unmask.load(run)
        unmask.save(lm, folder / f"{name} again")
        unmask.save(load_ema_model(run)[0], folder / f"{name} averaged")
        roads = ["again", "averaged"]
        if name == "mdlm":
            unmask.save(lm, folder / f"{name} published", upstream_format=True)
            unmask.save(unmask.load(folder / f"{name} published"), folder / f"{name} back")
            roads += ["published", "back"]
        yield f"{name}: weights", {road: digest(folder / f"{name} {road}") for road in roads}
        yield f"{name}: scores", scored(lm.score(TEXTS, draws=16))
        yield f"{name}: samples", written(lm.sample(2, 16, seed=4))
