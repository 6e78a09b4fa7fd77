"""score, eval and judge: figures with their errors, for people and for programs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
import unmask
from reference_models import write_reference_model
from unmask.evaluation.reference_model import CausalReferenceModel
from unmask.report.formatting import format_estimate, print_table

TEXT = "abc cab\n\nbca abc a b c\n" * 12


@pytest.fixture
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the letters of TEXT."""
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0)
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.characters("abc \n"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.nn.init.normal_(lm.denoiser.backbone.lm_head.weight)
    return str(unmask.save(lm, tmp_path_factory.mktemp("model") / "tiny"))


def test_score(folder: str, command: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "scores.json"
    done = command("score", folder, "abc", "a b c", "--draws", "32", "--out", str(out), "--json")
    found = json.loads(done.out)
    assert json.loads(out.read_text()) == found
    assert [score["text"] for score in found["scores"]] == ["abc", "a b c"]
    assert found["scores"][1]["tokens"] == 5
    assert math.isclose(sum(found["scores"][1]["by_time"]), found["scores"][1]["nats_per_token"])
    weights = (Path(folder) / "model.safetensors").read_bytes()
    assert found["provenance"]["model"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert found["provenance"]["command"].startswith("unmask score")
    assert {"python", "torch", "unmask"} <= found["provenance"]["versions"].keys()
    assert "± " in command("score", folder, "abc").out


def test_eval_is_a_table(alphabet: str, command: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(TEXT)
    files = [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]
    header, *lines = command("eval", alphabet, *files, "--replicates", "2").out.splitlines()
    assert header.split()[:3] == ["text", "nats/token", "perplexity"]
    assert [line.split()[0] for line in lines] == files
    assert lines[0].split()[1:] == lines[1].split()[1:]  # the same text twice

    found = json.loads(command("eval", alphabet, files[0], "--seed", "4", "--json").out)
    (text,) = found["texts"]
    assert text["bytes"] == text["characters"] == len(TEXT)
    assert text["words"] == 12 * (2 + 5 + 3)  # two lines of words, and the ends of three
    assert text["bits_per_byte"] == pytest.approx(text["nats_per_token"] * text["tokens"] / math.log(2) / len(TEXT))
    assert found["provenance"]["seed"] == 4
    assert found["provenance"]["data"].keys() == {files[0]}
    per_document = json.loads(command("eval", alphabet, files[0], "--per-document", "--lines", "--json").out)
    assert per_document["texts"][0]["tokens"] < text["tokens"]  # empty lines are no documents


def test_orders_are_told_apart(alphabet: str, command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(TEXT)
    some = ("eval", alphabet, str(tmp_path / "one.txt"), "--windows", "3")
    done = command(*some, "--order", "left-to-right", "random", "--order-block-size", "4", "--order-draws", "6")
    header, first, second, *notes = done.out.splitlines()
    assert header.split()[:3] == ["text", "order", "nats/token"]
    assert (first.split()[1], second.split()[1]) == ("left-to-right", "random")
    assert ("±" in first, "±" in second) == (False, True)
    assert notes[0] == "left-to-right: exact -log p: from left to right"
    assert notes[1].startswith("random: importance-weighted bound on -log p, 6 orders")
    assert "at least" in notes[-1]
    assert "tangent" in notes[-1]
    (text,) = json.loads(command(*some, "--order", "margin", "--json").out)["texts"]
    (order,) = text["orders"]
    assert (order["order"], order["standard_error"], order["nfe"], order["tokens"]) == ("margin", 0, 16, 48)

    for options, sentence in (
        (("--order", "upwards"), "choose one of left-to-right, confidence"),
        (("--tokens-per-step", "2"), "--tokens-per-step is for orders: name some with --order"),
        (("--order", "random", "--order-draws", "2"), "at least 4 orders"),
    ):
        done = command(*some, *options)
        assert (done.code, done.out) == (2, "")
        assert sentence in done.err


def test_samples_are_told_what_they_cost(alphabet: str, command: Callable[..., Any]) -> None:
    several = ("--samplers", "ancestral", "confidence", "entropy-bounded")
    done = command("eval-samples", alphabet, *several, "--steps", "4", "--n", "3", "--own-law")
    header, ancestral, confidence, bounded = done.out.splitlines()
    assert header.endswith("own nats/token")
    assert " to " in ancestral
    assert confidence.endswith(" -")
    assert " to " not in bounded
    assert "own nats are not known for confidence" in done.err


def test_some_rows_stand_for_the_text_that_they_are(alphabet: str, command: Callable[..., Any], tmp_path: Path) -> None:
    """Not for their share of a text that is alike throughout: here it begins with short words."""
    (tmp_path / "one.txt").write_text("a\n" * 100 + "abc" * 100)
    found = json.loads(command("eval", alphabet, str(tmp_path / "one.txt"), "--windows", "4", "--json").out)
    (text,) = found["texts"]
    assert text["tokens"] == text["bytes"] == 64  # one byte a token, and no separator among these rows
    assert text["words"] == 2 * 16 + 2 * 1  # two rows of a-and-newline, two of one long word each


def test_what_cannot_be_measured_is_told_first(alphabet: str, command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(TEXT)
    text = str(tmp_path / "one.txt")
    for arguments, sentence in (
        (("eval", alphabet, text, "--windows", "0"), "windows must be at least 1; got 0"),
        (("eval", alphabet, text, "--seed", "-1"), "a seed must be 0 or above"),
        (("eval", alphabet, text, "--out", str(tmp_path)), "is a folder"),
        (("eval", alphabet, text, "--out", f"{text}/x.json"), "cannot be written"),
        (("eval-samples", alphabet, "--steps"), "at least one value"),
    ):
        done = command(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert sentence in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.txt"]


def test_a_precision_that_is_not_reached_is_said(folder: str, command: Callable[..., Any]) -> None:
    model = unmask.load(folder)
    for parameter in model.denoiser.parameters():
        parameter.data.normal_(std=0.3)
    unmask.save(model, f"{folder}-random", overwrite=True)
    done = command("score", f"{folder}-random", "abc abc", "--precision", "0.00001")
    assert "not the 0.00% requested" in done.err
    assert "nats/token" in done.out


def test_eval_of_known_sets(alphabet: str, command: Callable[..., Any], tmp_path: Path) -> None:
    """By name, from a folder; words are counted as the set is distributed."""
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "valid.txt").write_text(" abc a \n ab c \n" * 9)
    done = command("eval", alphabet, "ptb:validation", "--folder", str(tmp_path), "--json")
    (text,) = json.loads(done.out)["texts"]
    assert (text["name"], text["per_word"], text["words"]) == ("ptb:validation", True, 9 * 6)
    assert text["word_perplexity"] == pytest.approx(math.exp(text["nats_per_token"] * text["tokens"] / 54))
    done = command("eval", alphabet, "mdlm-zero-shot", "--folder", str(tmp_path), "--json")
    found = json.loads(done.out)
    assert done.code == 1  # it was not all to be had, and that is said
    assert [text["name"] for text in found["texts"]] == ["ptb:validation"]
    assert len(found["missing"]) == 6
    assert done.err.count("is missing") == 6


def test_the_recipe_of_a_known_set_is_printed(alphabet: str, command: Callable[..., Any], tmp_path: Path) -> None:
    """Split, detokenizer, separators, windows and passes; JSON has it for every text."""
    (tmp_path / "ptb.txt").write_text(" abc a \n ab c \n" * 9)
    named = ("eval", alphabet, "--folder", str(tmp_path))
    recipe = command(*named, "ptb", "--windows", "3").out.splitlines()[-1]
    assert recipe == (
        "ptb: the test split, detokenized by the 9 rules of SEDD and MDLM (PTB); empty rows are left out;"
        r" '\n' after each document, which counts as a token; windows of 16 tokens of all documents one after another,"
        " each by itself, 3 of them, spread evenly; 8 passes of other masks"
    )
    raw = json.loads(command(*named, "ptb:raw", "--per-document", "--precision", "0.5", "--json").out)["texts"][0]
    assert raw["recipe"].startswith("the test split, as it is distributed; ")
    assert "; documents by themselves, in windows of 16 tokens; at least 8 passes" in raw["recipe"]
    (tmp_path / "mine.txt").write_text(TEXT)
    plain = command("eval", alphabet, str(tmp_path / "mine.txt"), "--windows", "2").out.splitlines()
    assert len(plain) == 2  # no table of others has this text


def test_eval_of_a_prepared_corpus_is_of_what_was_held_out(
    alphabet: str, command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    corpus = str(tmp_path / "corpus")
    tokenizer = str(Path(alphabet) / "tokenizer.json")
    options = ("--out", corpus, "--tokenizer", tokenizer, "--validation-fraction", "0.2", "--lines")
    command("prepare", str(tmp_path / "text.txt"), *options)
    (text,) = json.loads(command("eval", alphabet, corpus, "--json").out)["texts"]
    assert 0.1 < text["bytes"] / (20 * len(TEXT)) < 0.3


def test_a_mistyped_set_is_told_before_anything_is_measured(
    alphabet: str, command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text(TEXT)
    done = command("eval", alphabet, str(tmp_path / "one.txt"), "lambda")
    assert (done.code, done.out) == (2, "")
    assert "the datasets are ptb" in done.err


def test_judge_without_a_judge(folder: str, command: Callable[..., Any]) -> None:
    """One line for each sampler and number of steps; one for samplers without steps."""
    options = ("--samplers", "ancestral", "first-hitting", "--steps", "2", "4", "--n", "3", "--length", "8")
    header, *lines = command("eval-samples", folder, *options).out.splitlines()
    assert header.split() == [
        "sampler",
        "steps",
        "perplexity",
        "entropy",
        "distinct-2",
        "repetition",
        "nfe",
        "seconds",
    ]
    assert [line.split()[:2] for line in lines[:2]] == [["ancestral", "2"], ["ancestral", "4"]]
    assert lines[2].split()[0] == "first-hitting"
    assert len(lines) == 3
    judged = json.loads(command("eval-samples", folder, *options, "--json").out)["sample_evals"]
    assert [each["nfe"] for each in judged] == [2, 4, 8]
    assert all(each["texts"] == 3 and each["tokens"] == 24 for each in judged)
    assert all(each["perplexity"] is None and each["seconds"] > 0 for each in judged)


def test_a_judge_is_named_by_its_weights(alphabet: str, command: Callable[..., Any], tmp_path: Path) -> None:
    judge = write_reference_model(tmp_path / "gpt", "gpt2")
    options = ("--reference-model", str(judge), "--steps", "2", "--n", "3", "--length", "8")
    out = tmp_path / "sample_evals.json"
    assert "gpt (context 24" in command("eval-samples", alphabet, *options, "--out", str(out)).out
    found = json.loads(out.read_text())
    assert found["sample_evals"][0]["perplexity"] > 1
    assert found["provenance"]["data"] == {"reference_model": f"sha256:{CausalReferenceModel.load(judge).digest()}"}


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (3.21449, 0.0123, "3.214 ± 0.012"),
        (1234.5, 56.7, "1,234 ± 57"),
        (8.3, 1e-9, "8.3000 ± 0.0000"),
        (2.5, 0.0, "2.5"),
        (0.123456, None, "0.1235"),
        (123456.7, None, "123,457"),
        (3e12, 1e11, "3.00e+12"),
        (math.inf, 1.0, "inf"),
        (None, None, "-"),
    ],
)
def test_figures_have_the_digits_that_mean_something(value: float | None, error: float | None, shown: str) -> None:
    assert format_estimate(value, error) == shown


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "long title"), [("longer", "1"), ("b", "22")])
    assert capsys.readouterr().out == "a       long title\nlonger           1\nb               22\n"


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens depend on one another."""
    lm = unmask.LanguageModel(tiny_models.tiny_denoiser(unmask.MDLM(), 6, 5), unmask.Tokenizer.characters("abc d"))
    return str(unmask.save(lm, tmp_path_factory.mktemp("model") / "random"))


def test_score_after_a_prompt(random_model: str, command: Callable[..., Any]) -> None:
    (found,) = json.loads(command("score", random_model, "c", "--prompt", "ab", "--json").out)["scores"]
    lm = unmask.load(random_model)
    assert found["nats_per_token"] == pytest.approx(lm.score("c", "ab").nats, rel=1e-5)
    assert abs(found["nats_per_token"] - lm.score("c").nats) > 1e-3
    assert (found["prompt"], found["text"], found["tokens"]) == ("ab", "c", 1)


def test_score_without_a_text_is_refused(random_model: str, command: Callable[..., Any]) -> None:
    done = command("score", random_model)
    assert (done.code, done.out) == (2, "")
    assert "give texts, or a file of requests with --input" in done.err
