"""The server with other kinds of models and ways of writing: it writes what the library writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from live_server import ALPHABET, LENGTH, language_model, live_server
from unmask import (
    MDLM,
    Ancestral,
    BlockDiffusion,
    Blockwise,
    CaduceusConfig,
    Confidence,
    GenMD4,
    Guidance,
    LanguageModel,
    MambaConfig,
    NextToken,
    Tokenizer,
    load,
)
from unmask.backbones import BackboneConfig
from unmask.diffusion.denoiser import DenoiserLike
from unmask.objectives import Objective
from unmask.sampling import Sampler
from unmask.sampling.blockwise import DualCache, PrefixCache
from unmask.sampling.canvas import Canvas
from unmask.sampling.factory import make_sampler
from unmask.types import Tokens

DNA = Tokenizer.dna()
GOLDEN = Path(__file__).parents[1] / "golden"
CASES: dict[str, tuple[Objective, dict[str, Any], Sampler | None]] = {
    "block diffusion": (BlockDiffusion(block_size=5), {"steps": 4}, Blockwise(sampler=Ancestral(4))),
    "block diffusion, by confidence": (
        BlockDiffusion(block_size=5),
        {"steps": 3, "sampler": "confidence"},
        Blockwise(sampler=Confidence(3)),
    ),
    "in blocks": (MDLM(), {"steps": 3, "block_size": 6}, Blockwise(6, Confidence(3))),
    "prefix cache": (
        MDLM(),
        {"steps": 3, "block_size": 6, "cache": "prefix"},
        Blockwise(6, Confidence(3), PrefixCache()),
    ),
    "dual cache": (
        MDLM(),
        {"steps": 3, "block_size": 6, "cache": "dual"},
        Blockwise(6, Confidence(3), DualCache()),
    ),
    "autoregression": (NextToken(), {}, None),
    "a schedule for each token": (GenMD4(), {"steps": 6}, Ancestral(6)),
}


@pytest.mark.parametrize(("objective", "asked", "sampler"), CASES.values(), ids=list(CASES))
def test_it_writes_what_the_library_writes(
    objective: Objective, asked: dict[str, Any], sampler: Sampler | None
) -> None:
    lm, template = language_model(objective), "abc<mask:14>de<mask:3>"
    expected = lm.infill(template, n=2, sampler=sampler, seed=5)
    with live_server(lm) as served:
        answer = served.post("/v1/infill", template=template, n=2, seed=5, alternatives=2, **asked).json()
        streamed = served.post("/v1/infill", template=template, n=2, seed=5, stream=True, **asked).text
    assert [result["text"] for result in answer["results"]] == expected.texts
    for result in answer["results"]:  # every token says how probable it was when it was written
        assert all(token["logprob"] < 0 for span in result["spans"] for token in span["tokens"])
    assert streamed.count("event: result") == 2


@pytest.mark.parametrize("family", ["sdar_tiny", "llada2_moe_tiny", "fastdllm2_tiny", "a2d_qwen3_tiny"])
def test_published_models_answer(family: str) -> None:
    """With the sampler that they come with, in sub-blocks, and up to the end of the text."""
    lm, prompts = load(GOLDEN / family), ["1 2 3", "17 4 9 11 26"]
    expected = [lm.complete([prompt], 24, seed=3) for prompt in prompts]
    (ended,) = lm.complete(prompts[:1], 24, sampler=_with_sub_blocks(lm, 2), seed=3).texts
    with live_server(lm) as served:
        answer = served.post("/v1/completions", prompt=prompts, max_tokens=24, seed=3).json()
        parts = served.post(
            "/v1/completions", prompt=prompts[0], max_tokens=24, seed=3, sub_block_size=2, block_size=_block_size(lm)
        ).json()
        (card,) = served.http.get("/v1/models").json()["data"]
    for choice, alone in zip(answer["choices"], expected, strict=True):
        assert choice["text"].strip() == alone.text.strip()
        assert choice["finish_reason"] == ("length" if len(alone.ids[0]) == 24 else "stop")
    assert parts["choices"][0]["text"].strip() == ended.strip()
    assert card["default_sampler"] == "blockwise"
    inner, params = lm.denoiser.own_sampler.inner, lm.denoiser.own_sampler.inner.params
    assert {name: card["defaults"].get(name) for name in vars(params)} == vars(params)
    assert card["defaults"].get("steps") == inner.steps
    assert card["defaults"].get("block_size") == (lm.denoiser.process.block_size or lm.denoiser.own_sampler.block_size)
    assert card["caches"] == (["none", "prefix", "dual"] if lm.denoiser.process.block_size is None else ["none"])


def _block_size(lm: LanguageModel) -> int | None:
    return None if lm.denoiser.process.block_size is not None else 8


def _with_sub_blocks(lm: LanguageModel, size: int) -> Sampler:
    return make_sampler(lm.denoiser, block_size=_block_size(lm), sub_block_size=size)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("confidence", {"stop_entropy": 5.0, "stable_steps": 2, "measure": "margin", "block_size": 8, "steps": 8}),
        ("threshold", {"threshold": 0.02}),
        ("joint-threshold", {"threshold": 0.02, "edit_threshold": 0.03, "max_post_steps": 3}),
        ("factor", {"factor": 30.0}),
        ("entropy-bounded", {"entropy_bound": 5.0}),
    ],
)
def test_a_sampler_heeds_its_options(name: str, options: dict[str, Any]) -> None:
    lm = language_model()
    asked = {"template": "a<mask:20>b", "seed": 3}
    alone = lm.infill(asked["template"], sampler=make_sampler(lm.denoiser, name, **options), seed=3)
    plain = lm.infill(asked["template"], sampler=make_sampler(lm.denoiser, name, options.get("steps")), seed=3)
    assert alone.nfe != plain.nfe  # the options do something
    with live_server(lm) as served:
        answer = served.post("/v1/infill", **asked, sampler=name, **options).json()
        assert answer["results"][0]["text"] == alone.text
        refused = served.post("/v1/infill", **asked, sampler="ancestral", **options)
        assert refused.status_code == 400
        assert "sampler 'ancestral' has no " in refused.json()["error"]["message"]


def test_options_of_samplers_are_within_limits() -> None:
    with live_server(language_model()) as served:
        for wrong in ({"threshold": 1.5}, {"stop_entropy": 0}, {"measure": "luck", "sampler": "confidence"}):
            refused = served.post("/v1/infill", template="a<mask:3>", **{"sampler": "threshold", **wrong})
            assert 400 <= refused.status_code < 500, wrong
        many = {"sampler": "joint-threshold", "max_post_steps": 10**9}
        refused = served.post("/v1/infill", template="a<mask:3>", **many)
        assert "this server allows steps up to" in refused.json()["error"]["message"]


def test_what_cannot_be_written_in_blocks_is_said() -> None:
    with live_server(language_model()) as served:
        refused = served.post("/v1/infill", template="a<mask:3>", cache="dual")
        assert refused.status_code == 400
        assert "say how long a block is" in refused.json()["error"]["message"]
        refused = served.post("/v1/infill", template="a<mask:3>", block_size=2, cache="triple")
        assert "there is no cache 'triple'" in refused.json()["error"]["message"]


def test_holes_match_and_prompts_guide() -> None:
    lm, template = language_model(), "abc<mask:6>de<mask:3>"
    guide = Guidance(regex=("[a-d]{3,}", None))
    expected = lm.infill(template, n=3, sampler=Ancestral(4), seed=5, guidance=guide)
    pulled = lm.infill(template, n=3, sampler=Ancestral(4), seed=5, guidance=Guidance(cfg_scale=2.0))
    with live_server(lm) as served:
        asked = {"template": template, "n": 3, "seed": 5, "steps": 4}
        found = served.post("/v1/infill", **asked, regex=["[a-d]{3,}", None]).json()
        strong = served.post("/v1/infill", **asked, cfg_scale=2.0).json()
        for pattern, words in (("[a-d", "unterminated"), ("x+", "match"), ("a" * 300, "200")):
            refused = served.post("/v1/infill", **asked, regex=pattern)
            assert refused.status_code in (400, 422)
            assert words in refused.json()["error"]["message"]
        assert served.post("/v1/infill", **asked).status_code == 200
    assert [result["text"] for result in found["results"]] == expected.texts
    assert all(re.fullmatch("[a-d]{6}", result["spans"][0]["text"]) for result in found["results"])
    assert [result["text"] for result in strong["results"]] == pulled.texts
    assert pulled.texts != expected.texts


@dataclass(frozen=True)
class _LeftFirst(Sampler):
    """A sampler from outside the package: one token per step from left to right, the most probable one."""

    steps: int = 0

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        z, mask_id = canvas.tokens.clone(), denoiser.vocab.mask_id
        t = torch.ones(len(z), 1, dtype=torch.float64)
        for position in (z[0] == mask_id).nonzero().flatten().tolist():
            at = torch.zeros_like(z, dtype=torch.bool)
            at[:, position] = True
            z[:, position] = denoiser(z, t, at).argmax(-1)
            yield z.clone()


def test_a_sampler_object_of_the_caller_is_served_by_its_name() -> None:
    lm = language_model()
    with live_server(lm, samplers={"left-first": _LeftFirst()}) as server:
        (card,) = server.http.get("/v1/models").json()["data"]
        assert card["samplers"][-1] == "left-first"
        schema = server.http.get("/openapi.json").json()["components"]["schemas"]["InfillRequest"]
        assert schema["properties"]["sampler"]["enum"] == card["samplers"]
        answer = server.post("/v1/infill", template="abc <mask:4>", sampler="left-first", seed=1).json()
        for option, value in (("temperature", 0.5), ("top_k", 3), ("top_p", 0.5)):
            asked = {"template": "abc <mask:4>", "sampler": "left-first", option: value}
            refused = server.post("/v1/infill", **asked)
            assert refused.status_code == 400
            said = refused.json()["error"]["message"]
            assert said.startswith("the sampler left-first has no temperature, top_k or top_p")
        assert server.post("/v1/infill", template="abc <mask>", sampler="left-first", temperature=1).status_code == 200
    expected = lm.infill("abc <mask:4>", sampler=_LeftFirst(), seed=1)
    assert answer["results"][0]["text"] == expected.texts[0]
    assert [token["step"] for token in answer["results"][0]["spans"][0]["tokens"]] == [1, 2, 3, 4]


def test_a_request_cannot_import_code() -> None:
    with live_server() as server:
        refused = server.post("/v1/infill", template="abc <mask:4>", sampler="unmask.sampling.ancestral:Ancestral")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("there is no sampler 'unmask.sampling.ancestral:Ancestral'")


STATE_SPACE: dict[str, tuple[BackboneConfig, Tokenizer, dict[str, Any], Sampler | None]] = {
    "mamba": (MambaConfig(width=12, depth=2, max_length=LENGTH), Tokenizer.characters(ALPHABET), {}, None),
    "caduceus": (
        CaduceusConfig(width=12, depth=2, max_length=LENGTH, equivariant=True, complement_ids=DNA.complement_ids or ()),
        DNA,
        {"steps": 4},
        Ancestral(4),
    ),
}


def state_space_model(backbone: BackboneConfig, tokenizer: Tokenizer) -> LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = LanguageModel.from_config(backbone, NextToken() if backbone.causal else MDLM(), tokenizer)
        for name, parameter in lm.denoiser.named_parameters():
            if "A_log" not in name and "dt_proj.bias" not in name:
                torch.nn.init.normal_(parameter, std=0.4)
    lm.denoiser.double().eval()
    return lm


@pytest.mark.parametrize(("backbone", "tokenizer", "asked", "sampler"), STATE_SPACE.values(), ids=list(STATE_SPACE))
def test_state_space_networks_write_and_score_what_the_library_does(
    backbone: BackboneConfig, tokenizer: Tokenizer, asked: dict[str, Any], sampler: Sampler | None
) -> None:
    """Mamba with its recurrent cache, Caduceus on both strands."""
    lm = state_space_model(backbone, tokenizer)
    text = "ACGNTTAC" if tokenizer is DNA else "abc defg"
    template = f"{text}<mask:7>{text[:2]}<mask:3>"
    with live_server(lm) as served:
        filled = served.post("/v1/infill", template=template, n=2, seed=5, **asked).json()
        drawn = served.post("/v1/infill", template="<mask:12>", n=2, seed=6, **asked).json()
        completed = served.post("/v1/completions", prompt=text, max_tokens=6, seed=7, n=2, **asked).json()
        scored = served.post("/v1/score", text=text, draws=32, seed=3).json()
    assert [result["text"] for result in filled["results"]] == lm.infill(template, n=2, sampler=sampler, seed=5).texts
    assert [result["text"] for result in drawn["results"]] == lm.sample(2, 12, sampler=sampler, seed=6).texts
    whole = lm.infill(f"{text}<mask:6>", n=2, sampler=sampler, seed=7).texts
    assert [text + choice["text"] for choice in completed["choices"]] == whole
    expected = lm.score(text, draws=32, seed=3)
    assert scored["nats"] == pytest.approx(expected.nats)
    assert scored["nats_per_token"] == pytest.approx(expected.nats_per_token)
    assert scored["exact"] is backbone.causal
