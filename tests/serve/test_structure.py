"""JSON schemas and grammars of requests: valid texts, sentences for what cannot be, and nobody else waits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch

from live_server import LiveServer, live_server
from schemas import hostile_schemas
from unmask import MDLM, DiTConfig, LanguageModel, Tokenizer
from unmask.sampling.factory import make_sampler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
GRAMMAR = 'root ::= "(" root ")" | [a-c]+'


@cache
def bytes_model() -> LanguageModel:
    """A random network over bytes."""
    backbone = DiTConfig(width=16, depth=1, heads=2, max_length=80, dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = LanguageModel.from_config(backbone, MDLM(), Tokenizer.bytes())
    lm.denoiser.double().eval()
    return lm


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(bytes_model()) as server:
        yield server


def test_json_of_a_schema_in_all_routes(served: LiveServer) -> None:
    """Holes, completions, streams, and OpenAI's client; the texts are those of the library."""
    asked = {"seed": 3, "steps": 8, "sampler": "confidence", "response_format": FORMAT}
    found = served.post("/v1/infill", template="x = <mask:32> # ", n=2, **asked).json()
    sampler = make_sampler(bytes_model().denoiser, "confidence", 8)
    texts = [result["text"] for result in found["results"]]
    assert texts == bytes_model().infill("x = <mask:32> # ", n=2, seed=3, schema=PERSON, sampler=sampler).texts
    written = [result["spans"][0]["text"] for result in found["results"]]
    done = served.post("/v1/completions", prompt="ab", max_tokens=32, **asked).json()
    written.append(done["choices"][0]["text"])
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    stream = client.completions.create(
        model="tiny", prompt="ab", max_tokens=32, seed=3, stream=True, extra_body={**asked, "response_format": FORMAT}
    )
    written.append("".join(part.choices[0].text for part in stream if part.choices))
    assert written[-1] == written[-2]
    for text in written:
        jsonschema.validate(json.loads(text), PERSON)


def test_any_object_and_grammars(served: LiveServer) -> None:
    for name, wanted in (("response_format", {"type": "json_object"}), ("grammar", GRAMMAR)):
        found = served.post(
            "/v1/completions", prompt="a", max_tokens=9, steps=4, sampler="confidence", **{name: wanted}
        )
        text = found.json()["choices"][0]["text"]
        if name == "grammar":
            assert re.fullmatch(r"\(*[a-c]+\)*", text)
            assert text.count("(") == text.count(")")
        else:
            assert isinstance(json.loads(text), dict)
    free = served.post("/v1/completions", prompt="a", max_tokens=4, seed=1, response_format={"type": "text"}).json()
    assert free["choices"] == served.post("/v1/completions", prompt="a", max_tokens=4, seed=1).json()["choices"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": FORMAT, "grammar": GRAMMAR}, "one of regex, a JSON schema and a grammar"),
        ({"response_format": FORMAT, "regex": "a+"}, "one of regex, a JSON schema and a grammar"),
        ({"response_format": {"type": "xml"}}, "must be text, json_object or json_schema; got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "must have a schema"),
        ({"response_format": {"type": "json_object", "shema": {}}}, "has no field 'shema'"),
        ({"response_format": {"type": "json_object", "schema": {"minimun": 1}}}, "'minimun'"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": FORMAT}, "needs at least 19 tokens"),
        ({"grammar": "root ::= ab"}, "refers to 'ab'"),
        ({"grammar": "a" * 70_000}, "it may have up to 65,536"),
        ({"grammar": 3}, "grammar"),
    ],
)
def test_what_is_wrong_is_told(served: LiveServer, fields: dict[str, Any], message: str) -> None:
    refused = served.post("/v1/infill", template="<mask:8>", **fields)
    assert refused.status_code in (400, 422)
    assert message in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": "root ::= ab"}, "grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}}, "response_format"),
        ({"regex": "("}, "regex"),
        ({"regex": ["a+", "("]}, "regex[1]"),
    ],
)
def test_a_refusal_names_its_field(served: LiveServer, fields: dict[str, Any], param: str) -> None:
    refused = served.post("/v1/infill", template="<mask:8> <mask:8>", **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def check_that_nobody_waits(served: LiveServer, schemas: list[Any]) -> None:
    """Two clients send these; a third one, and one that has a schema of its own, are answered all the time."""

    def ask(schema: Any) -> int:
        body = {"template": "<mask:16>", "steps": 2, "sampler": "confidence", "timeout": 30}
        wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
        answer = httpx.post(f"{served.url}/v1/infill", json={**body, "response_format": wanted}, timeout=90)
        if answer.status_code != 200:
            message = answer.json()["error"]["message"]
            assert "\n" not in message
            assert len(message) < 350
        return answer.status_code

    waited = []
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, schema) for schema in schemas]
        while not all(each.done() for each in asked):
            began = time.monotonic()
            assert served.post("/v1/infill", template="ab<mask>", steps=1).status_code == 200
            waited.append(time.monotonic() - began)
    assert {each.result() for each in asked} <= {200, 400}
    assert max(waited) < 5


def test_hostile_schemas_get_an_answer_and_nobody_waits(served: LiveServer) -> None:
    check_that_nobody_waits(served, hostile_schemas()[::4])


@pytest.mark.slow
def test_all_hostile_schemas_get_an_answer_and_nobody_waits(served: LiveServer) -> None:
    check_that_nobody_waits(served, hostile_schemas())
