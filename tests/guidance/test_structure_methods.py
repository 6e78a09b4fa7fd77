"""JSON of models that write in blocks, with caches, or from left to right; and of vocabularies that lack characters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import decoders

from schemas import SCHEMAS
from tiny_models import tiny_denoiser, words_of
from unmask import MDLM, LanguageModel, Tokenizer, load
from unmask.objectives import SEDD, BlockDiffusion, GenMD4, NextToken, Objective
from unmask.sampling import Ancestral, Blockwise, Confidence, Sampler
from unmask.sampling.blockwise import DualCache, PrefixCache

GOLDEN = Path(__file__).parents[1] / "golden"
LENGTH = 64
METHODS: dict[str, tuple[Objective, Sampler | None]] = {
    "blocks of a block diffusion": (BlockDiffusion(block_size=5), Blockwise(sampler=Ancestral(3))),
    "its blocks, by confidence": (BlockDiffusion(block_size=8), Blockwise(sampler=Confidence(3))),
    "its own sampler": (BlockDiffusion(block_size=4), None),
    "blocks": (MDLM(), Blockwise(7, Confidence(2))),
    "a prefix cache": (MDLM(), Blockwise(16, Confidence(4), PrefixCache())),
    "a dual cache": (MDLM(), Blockwise(16, Ancestral(4), DualCache())),
    "from left to right": (NextToken(), None),
    "scores": (SEDD(), Confidence(16)),
}
WRITTEN = ["person", "recursive tree", "one of"]


def model_of(objective: Objective, tokenizer: Tokenizer) -> LanguageModel:
    """A random network."""
    size = tokenizer.vocab_size
    return LanguageModel(tiny_denoiser(objective, size + 1, size, length=LENGTH + 16), tokenizer)


@pytest.mark.parametrize("method", METHODS)
def test_json_is_valid_across_blocks_and_caches(method: str) -> None:
    """A value may begin in one block and end in another; what a cached call does not show is known."""
    objective, sampler = METHODS[method]
    lm = model_of(objective, Tokenizer.bytes())
    for name in WRITTEN:
        checker = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=jsonschema.FormatChecker())
        for template in (f"<mask:{LENGTH}>", f"x = <mask:{LENGTH - 7}> # "):
            texts = lm.infill(template, n=2, schema=SCHEMAS[name], sampler=sampler, seed=1).texts
            for text in texts:
                checker.validate(json.loads(text.removeprefix("x = ").removesuffix(" # ")))
        (text,) = lm.complete(["x = "], LENGTH, schema=SCHEMAS[name], sampler=sampler, seed=1).texts
        checker.validate(json.loads(text))


@pytest.mark.parametrize("objective", [SEDD(), GenMD4()], ids=["scores", "learned schedules"])
def test_models_whose_sampler_needs_independent_probabilities_say_so(objective: Objective) -> None:
    with pytest.raises(ValueError, match=r"which this sampler needs for this model: use one that draws tokens"):
        model_of(objective, Tokenizer.bytes()).infill("<mask:24>", schema=SCHEMAS["types"])


@pytest.mark.parametrize("family", ["sdar_tiny", "llada2_moe_tiny", "fastdllm2_tiny", "a2d_qwen3_tiny"])
def test_published_families_write_structures_in_their_own_blocks(family: str) -> None:
    """Their words are numbers, so that they can write these, and no JSON object."""
    lm = load(GOLDEN / family)
    (text,) = lm.complete(["1 2 3"], 12, grammar='root ::= " "? pair+\npair ::= "1 " pair? "2 " | "1 2"', seed=3).texts
    assert re.fullmatch(r"[12 ]+", text)
    assert text.count("1") == text.count("2")
    with pytest.raises(ValueError, match="no sequence of the tokenizer's tokens matches the JSON schema"):
        lm.complete(["1 2 3"], 12, schema=SCHEMAS["person"])


LACKING: dict[str, tuple[list[str], Any, str]] = {
    "no brackets": (["a", '"'], {"type": "object", "additionalProperties": True}, "no sequence of the tokenizer's"),
    "no quotes": (["{", "}", ":", "a", "1"], {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, "no seq"),
    "no letter of a key": (["{", "}", '"', ":", "1"], {"required": ["name"]}, "no sequence of the tokenizer's tokens"),
}


@pytest.mark.parametrize("case", LACKING)
def test_a_vocabulary_that_cannot_spell_a_schema_is_told(case: str) -> None:
    words, schema, sentence = LACKING[case]
    with pytest.raises(ValueError, match=sentence):
        model_of(MDLM(), words_of(words, decoders.Fuse())).infill("<mask:9>", schema=schema)


def test_what_a_vocabulary_can_spell_is_written() -> None:
    """Without letters beyond a and b, strings and other members have none; values that it cannot spell are left out."""
    tokenizer = words_of(["{", "}", '"', ":", ",", "a", "b", "1", "[", "]"], decoders.Fuse())
    schema = {
        "properties": {"a": {"enum": ["b", "c", 1, True]}, "c": {"type": "null"}, "b": {"type": "string"}},
        "required": ["a"],
    }
    lm = model_of(MDLM(), tokenizer)
    seen = {}
    for text in lm.infill("<mask:14>", n=200, schema=schema, sampler=Ancestral(1), seed=1).texts:
        value = json.loads(text)
        jsonschema.validate(value, schema)
        assert "c" not in value
        seen[json.dumps(value["a"])] = True
    assert set(seen) <= {'"b"', "1"}
