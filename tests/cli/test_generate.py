"""sample and infill: results on stdout, one sentence and exit code 2 on bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

import unmask
from unmask.cli import _generate as writing
from unmask.cli._generation_options import GenerationOptions, _MeasureName, _RemaskingName
from unmask.sampling import (
    SAMPLERS,
    Blockwise,
    Confidence,
    ReMDM,
    Sampler,
    SemiAutoregressive,
)
from unmask.sampling.confidence import CONFIDENCE_MEASURES, Margin, Threshold
from unmask.sampling.remdm import REMASKING_SCHEDULES, Cap, Loop, Rescale

Command = Callable[..., Any]


def test_sample(folder: str, command: Command) -> None:
    done = command("sample", folder, "--n", "3", "--length", "8", "--prompt", "abc", "--steps", "4")
    lines = done.out.splitlines()
    assert (done.code, done.err, len(lines)) == (0, "", 3)
    assert all(len(line) == 8 and line.startswith("abc") for line in lines)


def test_every_option_of_a_sampler_has_a_flag() -> None:
    flags = {field.name for field in fields(GenerationOptions)}
    for kind in (*SAMPLERS.values(), Blockwise, SemiAutoregressive):
        own = {field.name for field in fields(kind)} - {"params", "sampler", "end_ids"}
        assert own <= flags, kind
    assert get_args(_MeasureName) == tuple(CONFIDENCE_MEASURES)
    assert get_args(_RemaskingName) == tuple(REMASKING_SCHEDULES)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "4", "--sampler", "confidence", "--measure", "margin"], Confidence(4, Margin())),
        (["--steps", "4", "--sampler", "remdm", "--remasking", "cap", "--eta", "0.3"], ReMDM(4, Cap(0.3))),
        (["--steps", "4", "--sampler", "remdm", "--eta", "0.3"], ReMDM(4, Rescale(0.3))),
        (["--steps", "4", "--sampler", "remdm", "--loop", "0.5", "0.1", "0.8"], ReMDM(4, loop=Loop(0.5, 0.1, 0.8))),
        (["--sampler", "threshold", "--threshold", "0.8", "--min-tokens", "2"], Threshold(0.8, min_tokens=2)),
        (["--steps", "4", "--stride", "3", "--window", "7"], SemiAutoregressive(3, 7, unmask.Ancestral(4))),
    ],
)
def test_options_reach_their_sampler(options: list[str], expected: Sampler, folder: str, command: Command) -> None:
    done = command("sample", folder, "--length", "14", *options)
    assert done.out.rstrip("\n") == unmask.load(folder).sample(length=14, sampler=expected).text
    assert done.code == 0


@pytest.mark.parametrize("more", [[], ["--block-size", "4"], ["--sampler", "confidence"]])
def test_texts_longer_than_the_model_are_completed_and_infilled(more: list[str], folder: str, command: Command) -> None:
    long = "abc " * 10
    done = command("complete", folder, long, "ab", "--length", "20", *more)
    assert (done.code, done.err) == (0, "")
    assert [len(line) for line in done.out.splitlines() if not line.startswith("─")][-1] == 20
    done = command("infill", folder, f"{long}<mask:3>{long}<mask:30>{long}", *more)
    assert (done.code, done.err, len(done.out)) == (0, "", 3 * 40 + 33 + 1)
    assert done.out.startswith(long)


@pytest.mark.parametrize("name", ["default", *SAMPLERS])
def test_every_sampler_writes_texts_longer_than_the_model(name: str, folder: str, command: Command) -> None:
    """In sliding windows."""
    done = command("sample", folder, "--length", "21", "--sampler", name)
    assert done.code == 0
    assert len(done.out.rstrip("\n")) == 21


def test_sample_json(folder: str, command: Command) -> None:
    done = command("sample", folder, "--length", "8", "--steps", "4", "--seed", "3", "--json")
    result = json.loads(done.out)
    expected = unmask.load(folder).sample(length=8, sampler=unmask.Ancestral(4), seed=3)
    assert result["texts"] == expected.texts
    assert result["tokens"] == expected.tokens.tolist()
    assert result["nfe"] == expected.nfe > 0


def test_bfloat16_where_asked_for_or_measured_faster(
    folder: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ("sample", folder, "--length", "8", "--steps", "4", "--json")

    def dtype(*more: str) -> str:
        return str(json.loads(command(*request, *more).out)["dtype"])

    assert (dtype(), dtype("--dtype", "bfloat16")) == ("float32", "bfloat16")
    monkeypatch.setattr("unmask.pretrained._network._MIN_BF16_PARAMETERS", 0)
    for good, name in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr("unmask.pretrained._network.bf16_is_faster", lambda *_, good=good, **__: good)
        assert (dtype(), dtype("--dtype", "float32")) == (name, "float32")


def test_weights_of_few_bits(folder: str, command: Command) -> None:
    for name in ("int8", "int4"):
        request = ("sample", folder, "--length", "8", "--steps", "4", "--json", "--dtype", name, "--group-size", "8")
        found = json.loads(command(*request).out)
        expected = unmask.load(folder, dtype=name, group_size=8).sample(length=8, sampler=unmask.Ancestral(4))
        assert (found["dtype"], found["texts"]) == (name, expected.texts)
        scored = command("score", folder, "abc", "--dtype", name, "--json").out
        expected_nats = unmask.load(folder, dtype=name).score("abc").nats_per_token
        assert json.loads(scored)["scores"][0]["nats_per_token"] == expected_nats
    refused = command("sample", folder, "--group-size", "8")
    assert refused.code == 2
    assert "--group-size is for --dtype int8 and int4, not auto; drop it" in refused.err


def test_infill(folder: str, command: Command) -> None:
    options = ("--temperature", "0", "--top-k", "2", "--top-p", "0.9")
    text = command("infill", folder, "a<mask:2>b<mask>", *options).out.rstrip("\n")
    assert (len(text), text[0], text[3]) == (5, "a", "b")


def test_watching_changes_nothing_on_stdout(folder: str, command: Command) -> None:
    for request in (
        ("sample", folder, "--length", "8", "--steps", "4", "--n", "2", "--json"),
        ("infill", folder, "a<mask:2>b<mask>", "--steps", "3"),
    ):
        plain, watched = command(*request), command(*request, "--watch")
        assert watched.code == 0
        assert watched.out == plain.out
        assert plain.err == ""
        assert watched.err.startswith("step 0: ")


def test_how_far_it_is_is_told_in_tokens_or_steps(
    folder: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines on stderr from the first step on, if nobody is to wait for them."""
    monkeypatch.setattr("unmask.cli._progress._SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("unmask.cli._progress._LINE_INTERVAL_SECONDS", 0.0)
    request = (
        "sample",
        folder,
        "--length",
        "6",
        "--prompt",
        "ab",
        "--sampler",
        "random-order",
        "--steps",
        "2",
    )
    lines = command(*request).err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"writing: {done} of 4 tokens" for done in (2, 4)]
    assert command(*request, "--json").err == ""


def test_uniform_noise_is_counted_in_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("unmask.cli._progress._SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("unmask.cli._progress._LINE_INTERVAL_SECONDS", 0.0)
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0)
    lm = unmask.LanguageModel.from_config(backbone, unmask.UniformDiffusion(), unmask.Tokenizer.characters("abc "))
    sampler = unmask.UniformAncestral(steps=3)
    writing._last_frame_with_progress(
        lm.generate_steps(lm.blank_canvas(1, 5), sampler), lm.vocab.mask_id, sampler, quiet=False
    )
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"writing: {step} of 3 steps" for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sample", "{folder}", "--steps", "0"], "steps must be a whole number from 1 to 1,048,576; got 0"),
        (["sample", "{folder}", "--temperature", "-1"], "temperature must be 0"),
        (["sample", "{folder}", "--watch", "--delay", "-1"], "delay must be from 0 to 60 seconds; got -1.0"),
        (["sample", "{folder}", "--temperature", "inf"], "or a finite number above; got inf"),
        (
            ["sample", "{folder}", "--threshold", "0.5"],
            "threshold is for threshold or joint-threshold: name that sampler, too",
        ),
        (
            ["sample", "{folder}", "--sampler", "ancestral", "--measure", "margin"],
            "the sampler 'ancestral' has no measure, which is for confidence",
        ),
        (
            ["sample", "{folder}", "--sampler", "first-hitting", "--steps", "3"],
            "the sampler first-hitting chooses the number of steps itself",
        ),
        (["sample", "{folder}", "--stride", "16", "--length", "40"], "stride 16 must be below the model's"),
        (["sample", "{folder}", "--window", "8"], "--window needs --stride"),
        (["sample", "{folder}", "--sampler", "remdm", "--eta", "2"], "must be in [0, 1]; got 2.0"),
        (
            ["sample", "{folder}", "--sampler", "remdm", "--loop", "1", "2", "3"],
            "a loop needs 0 < t_off < t_on",
        ),
        (["infill", "{folder}", "abc"], "no hole"),
        (["infill", "{folder}", "xyz<mask>"], "unknown to the tokenizer"),
        (["score", "{folder}", ""], "empty"),
        (["sample", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, folder: str, command: Command
) -> None:
    done = command(*(a.format(folder=folder) for a in arguments))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("unmask: ")
    assert done.err.count("\n") == 1
    assert sentence in done.err


def test_texts_of_several_lines_are_told_apart(command: Callable[..., Any], tmp_path: Path) -> None:
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0)
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.characters("\n"))
    folder = str(unmask.save(lm, tmp_path / "model"))
    assert command("sample", folder, "--n", "2", "--length", "1").out.splitlines() == [
        "─── 1 of 2 " + "─" * 49,
        "",
        "",
        "─── 2 of 2 " + "─" * 49,
        "",
        "",
    ]
    assert command("sample", folder, "--length", "1").out == "\n\n"
