"""`--json-schema` and `--grammar`, and the same in files of requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import unmask
from unmask import MDLM, DiTConfig, LanguageModel, Tokenizer

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bytes") / "model"
    backbone = DiTConfig(width=16, depth=1, heads=2, max_length=64, dropout=0.0)
    unmask.save(LanguageModel.from_config(backbone, MDLM(), Tokenizer.bytes()), folder)
    return str(folder)


def test_the_three_commands(model: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    file, rules = tmp_path / "point.json", tmp_path / "letters.gbnf"
    file.write_text(json.dumps(SCHEMA))
    rules.write_text('root ::= "<" root ">" | [a-z]')
    steps = ["--steps", "4", "--sampler", "confidence", "--json"]
    for given in (str(file), json.dumps(SCHEMA)):
        out = command("infill", model, "p=<mask:12>", "--json-schema", given, *steps).out
        jsonschema.validate(json.loads(json.loads(out)["texts"][0].removeprefix("p=")), SCHEMA)
    out = command("complete", model, "p=", "--length", "12", "--json-schema", str(file), *steps).out
    assert '{"x":' in out.replace("\\", "").replace(": ", ":")
    out = command("sample", model, "--length", "3", "--grammar", str(rules), *steps).out
    (text,) = json.loads(out)["texts"]
    assert (text[0], text[1].islower(), text[2]) == ("<", True, ">")


def test_what_is_wrong_is_one_sentence(model: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    schema = json.dumps(SCHEMA)
    wrong = {
        ("--json-schema", str(tmp_path / "none.json")): "cannot be read: No such file or directory",
        ("--grammar", str(tmp_path)): "cannot be read: Is a directory",
        ("--json-schema", "{"): "is not JSON",
        ("--json-schema", '{"type": "sting"}'): "the type 'sting'",
        ("--json-schema", schema, "--regex", "a"): "one of regex, a JSON schema and a grammar",
        ("--json-schema", schema): "needs at least 7 tokens",
        ("--grammar", "root ::= x"): "refers to 'x'",
    }
    for options, message in wrong.items():
        done = command("infill", model, "a<mask:2>", *options)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
        assert len(done.err.splitlines()) == 1


def test_files_of_requests(model: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    lines = [
        {"template": "p=<mask:10>", "response_format": wanted},
        {"template": "p=<mask:3>", "grammar": 'root ::= "<" [a-z] ">"'},
        {"template": "p=<mask:3>", "grammar": str(tmp_path / "in.jsonl")},
        {"template": "p=<mask:3>", "response_format": wanted},
        {"template": "p=<mask:3>", "response_format": "json"},
        {"template": "p=<mask:3>"},
    ]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = command("infill", model, "--input", str(source), "--regex", "[0-9]+", "--steps", "2")
    assert done.code == 4
    first, second, *wrong, last = (json.loads(line) for line in done.out.splitlines())
    jsonschema.validate(json.loads(first["results"][0]["spans"][0]["text"]), SCHEMA)
    assert second["results"][0]["spans"][0]["text"][::2] == "<>"
    for answer, message in zip(wrong, ("must have rules", "needs at least 7", "must be an object"), strict=True):
        assert message in answer["error"]["message"]
    assert last["results"][0]["spans"][0]["text"].isdecimal()  # the command's own pattern
