"""The server with other kinds of models and ways of writing: it writes what the library writes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from live_server import language_model, live_server
from unmask import MDLM, Ancestral, BlockDiffusion, Blockwise, Confidence, Guidance, NextToken
from unmask.objectives import Objective
from unmask.sampling import Sampler
from unmask.sampling.blockwise import DualCache, PrefixCache

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
