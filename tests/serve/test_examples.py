"""Examples fit the model: its kind of text, its length; and whatever the model, it fills them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from live_server import language_model, live_server
from unmask import BlockDiffusion, NextToken, Tokenizer
from unmask.data.tokenizers import get_tokenizer
from unmask.objectives import Objective, UniformDiffusion
from unmask.sampling.factory import default_sampler
from unmask.sampling.templates import parse_template
from unmask.serve._examples import example_templates


def bpe(*texts: str) -> Tokenizer:
    return Tokenizer.train_bpe(iter(texts), 600)


def code() -> Tokenizer:
    library = Path(sysconfig.get_path("stdlib"))
    return bpe(*((library / f"{name}.py").read_text() for name in ("argparse", "ast", "inspect")))


def prose() -> Tokenizer:
    decisions = sorted((Path(__file__).parents[2] / "docs" / "decisions").glob("*.md"))
    lines = (line for path in decisions for line in path.read_text().splitlines())
    return bpe(*(line for line in lines if line[:1].isalpha() and "`" not in line))


@pytest.mark.parametrize(
    ("tokenizer", "names"),
    [
        (code(), {"Class", "Function"}),
        (prose(), {"Story", "Article"}),
        (get_tokenizer("bytes"), {"Class"}),
        (get_tokenizer("text8"), {"Letters"}),
        (get_tokenizer("dna"), {"DNA"}),
        (Tokenizer.characters("ACDEFGHIKLMNPQRSTVWY"), {"Protein"}),
        (Tokenizer.characters("αβγ"), {"Tokens"}),
        (Tokenizer.characters("+-"), {"Tokens"}),
    ],
    ids=["code", "prose", "bytes", "text8", "dna", "protein", "greek", "signs"],
)
@pytest.mark.parametrize("length", [1, 7, 48, 1024])
def test_the_kind_and_length_of_a_text_fit(tokenizer: Tokenizer, names: set[str], length: int) -> None:
    found = example_templates(tokenizer, length)
    assert found[0].name in names
    for example in found:
        pieces = parse_template(example.template)
        sizes = [piece if isinstance(piece, int) else len(tokenizer.encode(str(piece))) for piece in pieces]
        assert 1 <= sum(sizes) <= length
        assert any(isinstance(piece, int) for piece in pieces)
        assert len(tokenizer.encode(example.text)) <= length


@pytest.mark.parametrize(
    ("objective", "sampler"),
    [
        (NextToken(), "autoregressive"),
        (BlockDiffusion(block_size=5), "blockwise"),
        (UniformDiffusion(), "uniform-ancestral"),
    ],
    ids=["autoregression", "blocks", "uniform"],
)
def test_models_of_all_kinds_fill_their_examples(objective: Objective, sampler: str) -> None:
    with live_server(language_model(objective)) as served:
        (model,) = served.http.get("/v1/models").json()["data"]
        assert model["default_sampler"] == sampler
        for example in model["examples"]:
            answer = served.post("/v1/infill", template=example["template"], steps=4)
            assert answer.status_code == 200, answer.text


def test_ids_may_be_given_between_holes() -> None:
    lm = language_model()
    mask = lm.vocab.mask_id
    with live_server(lm) as served:
        (found,) = served.post("/v1/infill", segments=["ab", 2, [5, 4], 3], seed=7, steps=4).json()["results"]
        assert found["text"] == lm.infill(["ab", 2, [5, 4], 3], sampler=default_sampler(lm.denoiser, 4), seed=7).text
        assert found["text"][4:6] == lm.tokenizer.decode([5, 4]) if lm.tokenizer else False
        assert [len(span["tokens"]) for span in found["spans"]] == [2, 3]
        for wrong in (mask, 10_000):
            refused = served.post("/v1/infill", segments=["ab", [wrong], 3])
            assert refused.status_code == 400
            assert f"the token {wrong} is not one of the tokenizer's" in refused.json()["error"]["message"]
