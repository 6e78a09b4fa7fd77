"""Mistral's route that fills the middle, with the bodies that its client and continue.dev send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from live_server import LiveServer, language_model
from unmask import Ancestral, SamplingParams

CONTINUE: dict[str, Any] = {  # continue.dev
    "model": "tiny",
    "prompt": "abc\n",
    "suffix": "\ndef",
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 0.9,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "stop": ["hhhh"],
    "stream": True,
}
MISTRAL: dict[str, Any] = {
    "model": "tiny",
    "temperature": None,
    "top_p": 0.9,
    "max_tokens": 4,
    "stream": False,
    "stop": ["hhhh"],
    "random_seed": 3,
    "metadata": None,
    "prompt": "abc\n",
    "suffix": "\ndef",
    "min_tokens": 0,
}


def expected() -> str:
    sampler = Ancestral(3).with_params(SamplingParams(1.0, top_p=0.9), "ancestral")
    return language_model().infill("abc\n<mask:0..4>\ndef", sampler=sampler, seed=3).text[4:-4]


def test_the_middle_is_filled(server: LiveServer) -> None:
    answer = server.post("/v1/fim/completions", **MISTRAL, steps=3)
    assert answer.status_code == 200, answer.text
    body, text = answer.json(), expected()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == ("length" if len(text) == 4 else "stop")
    assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": len(text), "total_tokens": 8 + len(text)}
    streamed = server.post("/v1/fim/completions", **CONTINUE, seed=3, steps=3).text.strip().split("\n\n")
    assert streamed[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed[:-1]]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
    assert chunks[-1]["usage"] == body["usage"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_without_a_suffix_a_prompt_is_continued(server: LiveServer) -> None:
    body = server.post("/v1/fim/completions", prompt="abc", max_tokens=5, random_seed=3, steps=3).json()
    text = language_model().infill("abc<mask:5>", sampler=Ancestral(3), seed=3).text
    assert body["choices"][0]["message"]["content"] == text[3:]
    none = server.post("/v1/fim/completions", prompt="abc", suffix="d", max_tokens=0).json()
    assert (none["choices"][0]["message"]["content"], none["usage"]["completion_tokens"]) == ("", 0)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"suffix": "b"}, 422, "the field prompt is missing"),
        ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, 422, "min_tokens is above max_tokens"),
        ({"prompt": "a", "random_seed": 1, "seed": 2}, 422, "mean the same but differ"),
        ({"prompt": "a" * 60, "suffix": "b"}, 400, "maximum context length is 48 tokens"),
        ({"prompt": "a", "suffix": "b", "min_tokens": 0, "max_tokens": 10**30}, 400, "maximum context length is 48"),
        ({"prompt": "a", "n": 2}, 422, "the field n must be a number of at most 1"),
        ({"prompt": "a", "model": "other"}, 404, "there is no model 'other' here"),
    ],
)
def test_refused(server: LiveServer, body: dict[str, Any], status: int, told: str) -> None:
    answer = server.post("/v1/fim/completions", **body)
    assert answer.status_code == status, answer.text
    assert told in answer.json()["error"]["message"]


def test_the_client_of_its_authors(server: LiveServer) -> None:
    mistralai = pytest.importorskip("mistralai.client")
    given = {"model": "tiny", "prompt": "abc\n", "suffix": "\ndef", "max_tokens": 4, "random_seed": 3}
    with mistralai.Mistral(api_key="any", server_url=server.url) as client:
        done = client.fim.complete(**given)
        parts = [event.data for event in client.fim.stream(**given)]
    assert "".join(part.choices[0].delta.content for part in parts) == done.choices[0].message.content
    assert parts[-1].usage.total_tokens == done.usage.total_tokens
