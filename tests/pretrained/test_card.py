from __future__ import annotations

import html
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from tokenizers import models, pre_tokenizers

import unmask
from unmask import D3PM, MDLM, SEDD, DiTConfig, LanguageModel, NextToken, Tokenizer, UniformDiffusion
from unmask.backbones.dit import TimeConditioning
from unmask.cli import main
from unmask.diffusion.schedule import Geometric
from unmask.objectives import Objective
from unmask.pretrained.model_card import CardMetadata, EvalResult, model_card

PLAIN = DiTConfig(width=16, depth=2, heads=2, max_length=12)
TIMED = replace(PLAIN, time_conditioning=TimeConditioning(width=8))


def words(*vocabulary: str) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, ""))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)


TOKENIZERS: dict[str, Tokenizer | None] = {
    "bytes": Tokenizer.bytes(),
    "characters": Tokenizer.characters("\n`|<'abc"),
    "DNA bases": Tokenizer.dna(),
    "BPE": Tokenizer.train_bpe(iter(["the cat sat on the mat"]), 260),
    "words": words("\n", "<|end|>", "better", "flat"),
    "none: ids in": None,
}


def new(
    tokenizer: Tokenizer | None = TOKENIZERS["bytes"],
    backbone: DiTConfig = PLAIN,
    objective: Objective = MDLM(),  # noqa: B008
) -> LanguageModel:
    lm = LanguageModel.from_config(backbone, objective, tokenizer or Tokenizer.characters("abc"))
    return lm if tokenizer is not None else LanguageModel(lm.denoiser)


def rows(text: str) -> dict[str, str]:
    """The cells of the tables as a reader sees them."""
    page = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text.split("---\n", 2)[2])
    cells = re.findall(r"<tr>\s*<td>(.*?)</td>\s*<td>(.*?)</td>\s*</tr>", page, flags=re.DOTALL)
    assert page.count("<tr>") == len(cells) + page.count("<table>")
    return {html.unescape(name): html.unescape(value) for name, value in cells}


def test_the_numbers_are_the_model_s() -> None:
    lm = new(backbone=TIMED, objective=SEDD(schedule=Geometric(sigma_min=1e-3)))
    assert rows(model_card(lm)) == {
        "objective": "SEDD",
        "schedule": "Geometric(sigma_min=0.001, sigma_max=20.0)",
        "time conditioning": "yes",
        "network": "2 layers of width 16 with 2 heads",
        "parameters": f"{sum(p.numel() for p in lm.denoiser.parameters()):,}",
        "vocabulary": "257 ids; the mask is 256",
        "tokenizer": "bytes, 256 tokens",
        "longest text": "12 tokens",
    }
    assert rows(model_card(new()))["time conditioning"] == "no"


def test_a_tied_weight_is_one_parameter() -> None:
    untied, tied = new(), new(backbone=replace(PLAIN, tie_embeddings=True))
    difference = int(rows(model_card(untied))["parameters"].replace(",", "")) - 257 * 16
    assert rows(model_card(tied))["parameters"] == f"{difference:,}"


@pytest.mark.parametrize("unit", TOKENIZERS)
def test_the_tokenizer_s_kind_is_told(unit: str) -> None:
    assert rows(model_card(new(TOKENIZERS[unit])))["tokenizer"].startswith(f"{unit},")


@pytest.mark.parametrize(
    ("objective", "pipeline", "tags"),
    [
        (MDLM(), "fill-mask", ["masked-diffusion", "mdlm"]),
        (D3PM(), "fill-mask", ["masked-diffusion", "d3pm"]),
        (UniformDiffusion(), "text-generation", ["uniform-diffusion"]),
        (NextToken(), "text-generation", ["autoregressive"]),
    ],
)
def test_a_hub_can_file_it(objective: Objective, pipeline: str, tags: list[str]) -> None:
    causal = isinstance(objective, NextToken)
    text = model_card(new(backbone=replace(PLAIN, causal=causal), objective=objective))
    listed = "".join(f"- {tag}\n" for tag in [*tags, "language-model"])
    assert text.startswith(f"---\nlibrary_name: unmask\npipeline_tag: {pipeline}\ntags:\n{listed}---\n\n# ")


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    main()


@pytest.mark.parametrize(
    "lm",
    [
        *(pytest.param(new(tokenizer), id=unit) for unit, tokenizer in TOKENIZERS.items()),
        pytest.param(new(backbone=replace(PLAIN, max_length=2)), id="very short"),
        pytest.param(new(None, replace(PLAIN, causal=True), NextToken()), id="autoregressive"),
    ],
)
def test_what_the_card_says_runs_as_it_stands(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unmask.save(lm, tmp_path / "m")
    text = (folder / "README.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```(python|bash)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(blocks["python"], "README.md", "exec"), names)
    assert float(capsys.readouterr().out.strip().splitlines()[-1]) > 0
    commands = blocks["bash"].strip().splitlines()
    assert [command.split()[1] for command in commands] == ["sample", "infill", "score"]
    for command in commands:
        run(command, monkeypatch)
        assert capsys.readouterr().out


def test_a_model_that_reads_nothing_has_a_card(tmp_path: Path) -> None:
    one = new(Tokenizer.bytes(), replace(PLAIN, max_length=1))
    assert "longest text | 1 tokens" in model_card(one)
    assert "longest text" in model_card(new(Tokenizer.characters("\n\t")))


def test_without_facts_nothing_is_said_about_training() -> None:
    assert "Training" not in model_card(new())
    assert model_card(new(), {}) == model_card(new())


def test_facts_come_last_in_their_order() -> None:
    facts = {"steps": "1,000", "data digest": "ab12", "held-out nats per token": "1.23 ± 0.04"}
    text = model_card(new(), facts)
    assert list(rows(text).items())[-3:] == list(facts.items())
    assert text.startswith(model_card(new()).rstrip())
    assert "## Training" in text


MARKUP = ["*a*", "_a_", "`a`", "~~a~~", "[a](b)", "<b>a</b>", "<https://a.b>", "&amp;", "a|b", "a\\|b", "\\*"]


@pytest.mark.parametrize("text", MARKUP)
def test_markup_from_outside_is_shown_as_it_is(text: str) -> None:
    assert rows(model_card(new(), {text: f"so {text}"}))[text] == f"so {text}"


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"))), st.text("\\`*_[]()<>|~&$!#-\n ax:/."))
def test_text_from_outside_is_shown_as_it_is(name: str, value: str) -> None:
    if not name.split():
        name += "x"
    shown = rows(model_card(new(), {f"a{name}": value, "after": "it"}))
    assert shown[" ".join(f"a{name}".split())] == " ".join(value.split())
    assert shown["after"] == "it"


@pytest.mark.parametrize("facts", [{"steps": 1000}, {1: "one"}, {"steps": None}])
def test_facts_must_be_texts(facts: Mapping[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"facts must be texts by name, as in \{'steps': '1000'\}; got"):
        unmask.save(new(), tmp_path / "m", facts=facts)
    assert list(tmp_path.iterdir()) == []


NASTY = "a: b # c\n- 'd' \"e\" é {f}"
METADATA = CardMetadata(
    license="Apache-2.0",
    datasets=("user/set", NASTY),
    languages=("en", "no"),
    results=(
        EvalResult("user/set", "perplexity", 12.5, 0.25, "upper bound"),
        EvalResult(NASTY, "nats_per_token", 2.5, 0.02),
    ),
)


def test_hubs_read_what_is_known() -> None:
    """By the hub's own library, whatever is in the texts."""
    read = huggingface_hub.ModelCard(model_card(new(), {"steps": "3"}, METADATA)).data
    assert (read.library_name, read.pipeline_tag, read.license) == ("unmask", "fill-mask", "apache-2.0")
    assert read.datasets == ["user/set", NASTY]
    assert read.language == ["en", "no"]
    assert read.tags == ["masked-diffusion", "mdlm", "language-model"]
    assert [
        (each.dataset_name, each.metric_type, each.metric_value, each.metric_args) for each in read.eval_results
    ] == [
        ("user/set", "perplexity", 12.5, {"standard_error": 0.25}),
        (NASTY, "nats_per_token", 2.5, {"standard_error": 0.02}),
    ]
    assert rows(model_card(new(), None, METADATA))["perplexity on user/set (upper bound)"] == "12.5 ± 0.25"


def test_nothing_is_claimed_that_was_not_given() -> None:
    read = huggingface_hub.ModelCard(model_card(new())).data.to_dict()
    assert sorted(read) == ["library_name", "pipeline_tag", "tags"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"license": "my own\nlicense"}, "a license must be"), ({"languages": ("English",)}, "a language must be")],
)
def test_metadata_are_identifiers(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CardMetadata(**wrong)


@pytest.mark.parametrize("unit", ["bytes", "characters", "BPE"])
def test_transformers_knows_the_mask_and_the_end(unit: str, tmp_path: Path) -> None:
    lm = new(TOKENIZERS[unit])
    assert lm.tokenizer is not None
    read = transformers.AutoTokenizer.from_pretrained(unmask.save(lm, tmp_path / "m"))
    assert read.mask_token_id == lm.vocab.mask_id
    assert read.encode(f"ab{read.mask_token}", add_special_tokens=False) == [
        *lm.tokenizer.encode("ab"),
        lm.vocab.mask_id,
    ]
    if unit == "BPE":
        assert read.eos_token_id == read.pad_token_id == lm.tokenizer.eos_id
