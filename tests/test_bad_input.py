"""Whatever is wrong with what a user hands in is said in one sentence, a ValueError, and not by torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import unmask
from unmask import (
    D3PM,
    MDLM,
    SEDD,
    Ancestral,
    Autoregressive,
    Batch,
    Confidence,
    DiTConfig,
    EntropyBounded,
    FirstHitting,
    LanguageModel,
    NextToken,
    RandomOrder,
    ReMDM,
    SamplingParams,
    SemiAutoregressive,
    Threshold,
    Tokenizer,
    UniformAncestral,
    UniformDiffusion,
    Vocab,
)
from unmask.objectives import Objective
from unmask.sampling import Sampler
from unmask.serve._text_codec import TextCodec
from unmask.types import LogX

TINY = DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0)
MASK = 4  # after the ids 0..3 of " abc"
FEW = Ancestral(steps=4)

Call = Callable[[LanguageModel], object]


def model(objective: Objective | None = None) -> LanguageModel:
    objective = objective or MDLM()
    backbone = replace(TINY, causal=isinstance(objective, NextToken))
    return LanguageModel.from_config(backbone, objective, Tokenizer.characters("abc "))


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return model()


def refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def ids(*values: float) -> Tensor:
    return torch.tensor([values])


def ask(lm: LanguageModel, z: Tensor, t: Tensor | None = None, rows: Tensor | None = None) -> LogX:
    """log_x at every position of z, unless said otherwise."""
    t = torch.full((len(z), 1), 0.5) if t is None else t
    out: LogX = lm.denoiser(z, t, torch.ones(z.shape, dtype=torch.bool) if rows is None else rows)
    return out


def nll(lm: LanguageModel, tokens: Tensor, **flags: Tensor) -> Tensor:
    return lm.objective.token_nll(lm.denoiser, Batch(tokens, **flags), torch.Generator().manual_seed(0))


def time(*values: float) -> Tensor:
    return torch.tensor([values])


OUTSIDE = r"token id 9 is outside the vocabulary 0\.\.4"
NEGATIVE = r"token id -1 is outside the vocabulary 0\.\.4"
FLOATS = "ids must be integers.*got"
HIDDEN = "contains the mask id 4"
TIMES = r"times must be in \[0, 1\].*got"

BAD: dict[str, tuple[Call, str]] = {
    # ids
    "denoise: id outside": (lambda lm: ask(lm, ids(0, 9)), OUTSIDE),
    "denoise: negative id": (lambda lm: ask(lm, ids(0, -1)), NEGATIVE),
    "denoise: float ids": (lambda lm: ask(lm, ids(0.0, 1.0)), FLOATS),
    "denoise: no batch": (lambda lm: ask(lm, ids(0, 1)[0]), r"\[B, L\].*\[2\]"),
    "denoise: too long": (lambda lm: ask(lm, torch.zeros(1, 17).long()), "17 tokens is longer than.* 16"),
    "score: id outside": (lambda lm: lm.score([[0, 9]]), OUTSIDE),
    "score: negative id": (lambda lm: lm.score([[0, -1]]), NEGATIVE),
    "score: float ids": (lambda lm: lm.score([[0.0, 1.0]]), FLOATS),
    "score: mask id": (lambda lm: lm.score([[0, MASK]]), HIDDEN),
    "score: enormous id": (lambda lm: lm.score([[2**70]]), f"{2**70} is outside the vocabulary"),
    "score: ids of no text": (lambda lm: lm.score([1, 2, 3]), "ids.*got 1"),
    "fill: id outside": (lambda lm: lm.generate(ids(MASK, 9)), OUTSIDE),
    "fill: negative id": (lambda lm: lm.generate(ids(MASK, -1)), NEGATIVE),
    "fill: float ids": (lambda lm: lm.generate(ids(4.0, 1.0)), FLOATS),
    "fill: no batch": (lambda lm: lm.generate(ids(MASK, 1)[0]), r"canvas must be \[B, L\].*got shape \[2\]"),
    "fill: no positions": (lambda lm: lm.generate(torch.zeros(2, 0).long()), r"\[2, 0\]"),
    "token_nll: id outside": (lambda lm: nll(lm, ids(0, 9)), OUTSIDE),
    "token_nll: negative id": (lambda lm: nll(lm, ids(0, -1)), NEGATIVE),
    "token_nll: float ids": (lambda lm: nll(lm, ids(0.0, 1.0)), FLOATS),
    "token_nll: mask id": (lambda lm: nll(lm, ids(0, MASK)), HIDDEN),
    "token_nll: too long": (lambda lm: nll(lm, torch.zeros(1, 17).long()), "17 tokens is longer than.* 16"),
    "batch: no batch": (lambda lm: nll(lm, ids(0, 1)[0]), r"tokens must be \[B, L\]; got shape \[2\]"),
    "batch: flags of ids": (
        lambda lm: nll(lm, ids(0, 1), valid=ids(0, 1)),
        r"valid must be booleans of shape \[1, 2\]; got torch.int64",
    ),
    # times and rows
    "t: above 1": (lambda lm: ask(lm, ids(0, 1), time(1.5)), f"{TIMES} 1.5"),
    "t: below 0": (lambda lm: ask(lm, ids(0, 1), time(-0.5)), f"{TIMES} -0.5"),
    "t: NaN": (lambda lm: ask(lm, ids(0, 1), time(math.nan)), f"{TIMES} nan"),
    "t: infinite": (lambda lm: ask(lm, ids(0, 1), time(math.inf)), f"{TIMES} inf"),
    "t: one of many": (lambda lm: ask(lm, ids(0, 1), time(0.5, math.nan)), f"{TIMES} nan"),
    "t: a scalar": (lambda lm: ask(lm, ids(0, 1), torch.tensor(0.5)), r"t must be \[B, 1\].*got shape \[\]"),
    "t: one for three": (
        lambda lm: ask(lm, ids(0, 1), time(0.1, 0.2, 0.3)),
        r"t must be \[B, 1\] or \[B, L\] for tokens \[1, 2\]; got shape \[1, 3\]",
    ),
    "rows: of another shape": (
        lambda lm: ask(lm, ids(0, 1), rows=torch.ones(1, 3, dtype=torch.bool)),
        r"positions.*\[1, 2\].*got.*\[1, 3\]",
    ),
    # sizes
    "sample: nothing": (lambda lm: lm.sample(n=0), "n must be at least 1; got 0"),
    "sample: no length": (lambda lm: lm.sample(length=0), "length must be at least 1; got 0"),
    "infill: nothing": (lambda lm: lm.infill("<mask>", n=0), "n must be at least 1; got 0"),
    # prompts, templates, texts
    "prompt: as long as the text": (
        lambda lm: lm.sample(length=4, prompt="abca"),
        "the prompt has 4 tokens and leaves nothing to write in a length of 4",
    ),
    "prompt: id outside": (lambda lm: lm.sample(length=4, prompt=[9]), OUTSIDE),
    "prompt: float ids": (lambda lm: lm.sample(length=4, prompt=[0.5]), FLOATS),
    "prompt: unknown character": (
        lambda lm: lm.sample(length=4, prompt="az"),
        r"1 of 2 characters is unknown to the tokenizer \('z' 1\)",
    ),
    "template: no hole": (lambda lm: lm.infill("abc"), "'abc' has no hole; mark one as <mask:12>"),
    "template: empty": (lambda lm: lm.infill(""), "the template '' has no hole"),
    "template: no hole in a list": (lambda lm: lm.infill(["ab", "c"]), "has no hole; mark one as"),
    "template: no hole in ids": (lambda lm: lm.infill(ids(0, 1)[0]), "no hole: put the mask id 4 where"),
    "template: hole of length 0": (
        lambda lm: lm.infill("a<mask:0>"),
        "1 to 1,000,000 tokens; 'a<mask:0>' has one of 0",
    ),
    "template: negative hole": (lambda lm: lm.infill(["a", -3]), "1 to 1,000,000 tokens; .* has one of -3"),
    "template: unknown character": (
        lambda lm: lm.infill("<mask>z"),
        r"characters is unknown to the tokenizer \('z' 1\)",
    ),
    "template: id outside": (lambda lm: lm.infill(ids(9, MASK)[0]), OUTSIDE),
    "template: several rows of ids": (
        lambda lm: lm.infill(torch.tensor([[0, MASK], [MASK, 1]])),
        r"one row.*\[2, 2\]",
    ),
    "score: unknown character": (
        lambda lm: lm.score("abz"),
        r"characters is unknown to the tokenizer \('z' 1\)",
    ),
    "score: empty text": (lambda lm: lm.score(["ab", ""]), "text 1 is empty: there is nothing to score"),
    "score: no ids": (lambda lm: lm.score([[]]), "text 0 is empty"),
    "score: no texts": (lambda lm: lm.score([]), "there are no texts to score"),
    "score: too few draws": (lambda lm: lm.score("ab", draws=15), "draws must be at least 16.*got 15"),
    # seeds
    "seed: negative": (lambda lm: lm.sample(length=4, seed=-1), "must be 0 or above.*got -1"),
    "seed: negative, infill": (lambda lm: lm.infill("<mask>", seed=-7), "must be 0 or above.*got -7"),
    "seed: negative, score": (lambda lm: lm.score("ab", seed=-1), "must be 0 or above.*got -1"),
    "seed: enormous": (lambda lm: lm.sample(length=4, seed=2**128), f"below.*got {2**128}"),
    # how tokens are chosen
    "temperature: negative": (lambda lm: SamplingParams(temperature=-0.1), "temperature must be 0.*got -0.1"),
    "temperature: NaN": (lambda lm: SamplingParams(temperature=math.nan), "temperature must be 0.*got nan"),
    "temperature: infinite": (
        lambda lm: SamplingParams(temperature=math.inf),
        "temperature must be.*got inf",
    ),
    "top_k: 0": (lambda lm: SamplingParams(top_k=0), "top_k must keep at least 1 token; got 0"),
    "top_p: 0": (lambda lm: SamplingParams(top_p=0.0), "top_p must be above 0 and at most 1; got 0"),
    "top_p: 1.5": (lambda lm: SamplingParams(top_p=1.5), "top_p must be above 0 and at most 1; got 1.5"),
    "top_p: NaN": (lambda lm: SamplingParams(top_p=math.nan), "top_p must be above 0 and at most 1; got nan"),
    "threshold: 2": (lambda lm: Threshold(threshold=2.0), r"probability in \[0, 1\]; got 2.0"),
    "bound: negative": (lambda lm: EntropyBounded(entropy_bound=-1.0), "must be 0 or above; got -1.0"),
    # windows
    "window: not longer than the stride": (
        lambda lm: SemiAutoregressive(stride=8, window=8),
        "a window of 8 tokens must be longer than its stride 8",
    ),
    "window: the model's, not longer than the stride": (
        lambda lm: lm.sample(length=20, sampler=SemiAutoregressive(stride=16)),
        "stride 16 must be below the model's window of 16 tokens",
    ),
    "stride: 0": (lambda lm: SemiAutoregressive(stride=0), "stride must be at least 1; got 0"),
    # parts that do not belong together
    "mask outside the vocabulary": (lambda lm: Vocab(size=5, mask_id=5), r"mask id 5 is outside.*0\.\.4"),
    "tokenizer larger than the model": (
        lambda lm: LanguageModel(lm.denoiser, Tokenizer.bytes()),
        "the tokenizer has 256 ids and the model only 5",
    ),
    "causal diffusion": (
        lambda lm: LanguageModel.from_config(replace(TINY, causal=True), MDLM(), Tokenizer.characters("abc ")),
        "got causal=True with MDLM",
    ),
    "autoregression in both directions": (
        lambda lm: LanguageModel.from_config(TINY, NextToken(), Tokenizer.characters("abc ")),
        "an autoregressive objective needs a causal backbone.*got causal=False with NextToken",
    ),
}


@pytest.mark.parametrize(
    "call",
    [
        lambda lm: lm.score("hello world"),
        lambda lm: lm.infill("hello <mask:2>"),
        lambda lm: lm.sample(length=12, prompt="hello"),
        lambda lm: TextCodec(lm.tokenizer, lm.vocab.mask_id).encode_template("hello <mask:2> world"),
    ],
    ids=["score", "infill", "sample", "server"],
)
def test_a_text_of_another_alphabet_is_refused_everywhere(call: Call) -> None:
    lm = LanguageModel.from_config(TINY, MDLM(), Tokenizer.dna())
    refused(lambda: call(lm), r"of \d+ characters are unknown to the tokenizer .* would become \[UNK\], more than 5%")
    assert lm.score("ACGTNRacgt", draws=16).tokens == 9  # N is not counted
    refused(lambda: lm.score(["ACGT", "NNN"]), r"text 1 has only tokens that are not counted, as N in DNA")


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=list(BAD))
def test_bad_input_is_refused_in_one_sentence(lm: LanguageModel, call: Call, sentence: str) -> None:
    refused(lambda: call(lm), sentence)


def test_the_same_calls_with_good_input_are_taken(lm: LanguageModel) -> None:
    # Otherwise the refusals above might refuse everything.
    assert ask(lm, ids(0, MASK), time(0.0, 1.0)).shape == (2, 5)
    assert nll(lm, ids(0, MASK), valid=torch.tensor([[True, False]])).shape == (1, 2)  # padding may be masked
    assert lm.sample(length=16, prompt="ab", sampler=FEW).text.startswith("ab")
    assert lm.infill(["a", 2, "c"], sampler=FEW).tokens.shape == (1, 4)
    assert lm.infill(ids(0, MASK)[0], sampler=FEW).tokens[0, 0] == 0
    assert lm.score(["ab", [0, 1]], draws=16).tokens == 4
    assert SamplingParams(temperature=0, top_k=1, top_p=1.0).top_k == 1


def test_ids_of_int32_are_taken_everywhere_or_nowhere(lm: LanguageModel) -> None:
    z = ids(0, MASK, MASK).int()
    calls: list[Callable[[], object]] = [
        lambda: ask(lm, z),
        lambda: nll(lm, z[:, :1]),
        lambda: lm.generate(z, FEW),
    ]
    refusals = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) in (0, len(calls))
    assert all("int64" in sentence for sentence in refusals)


@pytest.mark.parametrize("steps", [0, -3])
@pytest.mark.parametrize("kind", [Ancestral, RandomOrder, Confidence, ReMDM, UniformAncestral, D3PM])
def test_steps_start_at_one(kind: Callable[..., Any], steps: int) -> None:
    refused(lambda: kind(steps=steps), f"steps must be a whole number from 1 to 1,048,576; got {steps}")


MASKED_ONLY: list[Sampler] = [
    Ancestral(),
    FirstHitting(),
    RandomOrder(),
    Confidence(),
    Threshold(),
    EntropyBounded(),
    ReMDM(),
    SemiAutoregressive(stride=2),
]


@pytest.mark.parametrize(
    ("objective", "samplers", "sentence"),
    [
        (MDLM(), [Autoregressive()], "for autoregression.*trained for masked diffusion"),
        (MDLM(), [UniformAncestral()], "for uniform noise.*trained for masked diffusion"),
        (NextToken(), MASKED_ONLY, "for masked diffusion.*trained for autoregression"),
        (NextToken(), [UniformAncestral()], "for uniform noise.*trained for autoregression"),
        (UniformDiffusion(), MASKED_ONLY, "for masked diffusion.*trained for uniform noise"),
        (SEDD(), [FirstHitting()], "first-hitting needs.*sum to one.*take the sampler ancestral"),
        (D3PM(), [FirstHitting()], "first-hitting needs.*sum to one.*take the sampler ancestral"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list | str) else "",
)
def test_a_sampler_must_fit_the_model(objective: Objective, samplers: list[Sampler], sentence: str) -> None:
    lm = model(objective)
    for sampler in samplers:
        refused(lambda sampler=sampler: lm.sample(length=4, sampler=sampler), sentence)


def damaged(objective: Objective) -> LanguageModel:
    lm = model(objective)
    with torch.no_grad():
        lm.denoiser.backbone.layers[0].mlp[0].weight[0, 0] = math.nan
        lm.denoiser.backbone.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return lm


@pytest.mark.parametrize(
    "objective",
    [MDLM(), D3PM(steps=8), SEDD(), UniformDiffusion(steps=8), NextToken()],
    ids=lambda objective: type(objective).__name__,
)
def test_weights_that_are_nan_are_named(objective: Objective) -> None:
    lm = damaged(objective)
    refused(lambda: lm.sample(length=4), "NaN.*weights are damaged")
    refused(lambda: lm.infill("a<mask:2>"), "NaN.*weights are damaged")
    refused(lambda: lm.score("abc", draws=16), "NaN.*weights are damaged")


@pytest.mark.parametrize(
    "choice",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
    ],
)
def test_no_sampler_writes_from_nan(choice: SamplingParams) -> None:
    lm = damaged(MDLM())
    for sampler in MASKED_ONLY:
        if isinstance(sampler, SemiAutoregressive):
            chosen: Sampler = replace(sampler, sampler=Ancestral(params=choice))
        else:
            chosen = replace(sampler, params=choice)
        refused(lambda chosen=chosen: lm.sample(length=4, sampler=chosen), "NaN.*weights are damaged")


@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_probabilities_that_vanish_or_overflow_are_named(logit: float) -> None:
    # SEDD's are free: nothing normalises them before they are drawn from.
    lm = model(SEDD())
    torch.nn.init.constant_(lm.denoiser.backbone.lm_head.bias, logit)
    refused(lambda: lm.sample(length=4, sampler=FEW), "log-probabilities are NaN or.*weights are damaged")


@pytest.fixture
def folder(lm: LanguageModel, tmp_path: Path) -> Path:
    """A good model folder, without the manifest that would notice any change before the reader does."""
    folder = unmask.save(lm, tmp_path / "model")
    (folder / "manifest.json").unlink()
    return folder


def edited(folder: Path, **backbone: object) -> str:
    config = json.loads((folder / "config.json").read_text())
    config["backbone"].update(backbone)
    return json.dumps(config)


def write_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def set_config(**backbone: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(edited(folder, **backbone))


def cut(name: str, keep: int) -> Callable[[Path], object]:
    """Keep the first bytes only, or all but the last."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def replace_by_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def enormous(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["vocab"] = {"size": 2**50, "mask_id": MASK}
    (folder / "config.json").write_text(json.dumps(config))


WEIGHTS = r"model\.safetensors"
NOT_READ = f"{WEIGHTS} is damaged or not a safetensors file"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"incomplete: config\.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), f"incomplete: {WEIGHTS} is missing"),
    "config is a folder": (replace_by_folder, r"config\.json"),
    "config is not JSON": (write_config('{"format": '), r"config\.json is not valid JSON"),
    "config is empty": (write_config(""), r"config\.json is not valid JSON"),
    "config is a list": (write_config("[1, 2]"), r"config\.json must hold a JSON object; got list"),
    "unknown layout": (write_config('{"model_type": "nobody"}'), "unknown format .*nobody.*there are unmask-2,.* mdlm"),
    "only a format": (write_config('{"format": "unmask-2"}'), "incomplete: ModelConfig needs 'vocab'"),
    "unknown setting": (set_config(widht=32), "unknown field 'widht'.*did you mean width"),
    "setting of another type": (set_config(depth="one"), "backbone.depth must be int; got 'one'"),
    "setting out of range": (set_config(depth=0), "depth must be at least 1; got 0"),
    "weights cut at their end": (cut("model.safetensors", -10), NOT_READ),
    "weights cut in their header": (cut("model.safetensors", 20), NOT_READ),
    "weights empty": (cut("model.safetensors", 0), NOT_READ),
    "weights too narrow": (set_config(width=64), r"has shape \[5, 32\], but config\.json asks for \[5, 64\]"),
    "weights too few": (set_config(depth=2), r"lacks the tensors layers\.1.*does not fit its config\.json"),
    "weights too many": (set_config(tie_embeddings=True), r"unknown tensors lm_head\.weight.*does not fit"),
    "sizes beyond all memory": (enormous, r"config\.json"),
    "tokenizer not one": (lambda f: (f / "tokenizer.json").write_text("{}"), r"not a tokenizer\.json"),
    "tokenizer of another model": (
        lambda f: (f / "tokenizer.json").write_text(Tokenizer.bytes().to_json()),
        "the tokenizer has 256 ids and the model only 5",
    ),
    "manifest a list": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json must hold a JSON"),
    "manifest with a lost file": (
        lambda f: (f / "manifest.json").write_text(
            '{"lost.json": "00", "config.json": "00", "model.safetensors": "00"}'
        ),
        r"incomplete: lost\.json is missing",
    ),
    "manifest that names nothing": (
        lambda f: (f / "manifest.json").write_text("{}"),
        r"manifest\.json is damaged: it does not name config\.json",
    ),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_folder_is_refused_in_one_sentence(
    folder: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(folder)
    refused(lambda: unmask.load(folder), sentence)


def test_an_undamaged_folder_is_taken(folder: Path) -> None:
    assert unmask.load(folder).vocab.mask_id == MASK


def test_what_is_no_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    refused(
        lambda: unmask.load(tmp_path / "nowhere"),
        "nowhere is not a folder, nor a name on the hub; a model folder holds config",
    )
    refused(lambda: unmask.load(folder / "config.json"), r"config\.json is not a folder")


def test_a_flipped_byte_is_noticed(lm: LanguageModel, tmp_path: Path) -> None:
    folder = unmask.save(lm, tmp_path / "model")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1  # safetensors itself does not notice: the file is well-formed
    (folder / "model.safetensors").write_bytes(weights)
    refused(lambda: unmask.load(folder), rf"{WEIGHTS} is damaged: its SHA-256 is not the one in manifest\.json")
    (folder / "manifest.json").unlink()
    assert unmask.load(folder).vocab.mask_id == MASK
