"""The routes of Ollama's server, with the bodies that its clients send, and with its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from chat_models import WEATHER, chat_model
from live_server import LENGTH, LiveServer, language_model, live_server
from unmask import Ancestral, NextToken

CONTINUE: dict[str, Any] = {  # continue.dev, autocomplete
    "model": "tiny",
    "prompt": "abc\n",
    "suffix": "\ndef",
    "raw": True,
    "options": {"temperature": 1.0, "num_predict": 4, "stop": ["hhhh", "gggg"], "num_ctx": 4096},
    "keep_alive": 1800,
    "stream": True,
}
PYTHON: dict[str, Any] = {  # the client of Ollama's authors
    "model": "tiny",
    "stream": False,
    "options": {"num_predict": 5, "seed": 3, "steps": 3},
    "prompt": "abc",
    "suffix": "",
    "system": "",
    "template": "",
    "raw": False,
    "think": False,
}
LITELLM: dict[str, Any] = {
    "model": "tiny",
    "prompt": "abc",
    "options": {"num_predict": 5, "temperature": 1},
    "stream": False,
    "images": [],
}
HELLO = [{"role": "user", "content": "Hello"}]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def chat() -> Iterator[LiveServer]:
    with live_server(chat_model()) as served:
        yield served


def test_a_hole_before_a_suffix(server: LiveServer) -> None:
    body = {**CONTINUE, "options": {**CONTINUE["options"], "seed": 3, "steps": 3}}
    streamed = server.post("/api/generate", **body)
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    *parts, last = lines(streamed.text)
    assert [part["done"] for part in parts] == [False] * len(parts)
    text = "".join(part["response"] for part in parts)
    sampler = Ancestral(3).with_params(_sampled(1.0), "ancestral")
    expected = language_model().infill("abc\n<mask:0..4>\ndef", sampler=sampler, seed=3).text
    assert f"abc\n{text}\ndef" == expected
    assert (last["done"], last["response"], last["model"]) == (True, "", "tiny")
    assert last["done_reason"] == ("length" if len(text) == 4 else "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (8, len(text))
    assert last["total_duration"] >= last["eval_duration"] >= 0
    whole = server.post("/api/generate", **{**body, "stream": False}).json()
    assert whole["response"] == text


def _sampled(temperature: float) -> Any:
    from unmask import SamplingParams

    return SamplingParams(temperature)


def test_a_prompt_is_continued(server: LiveServer) -> None:
    answer = server.post("/api/generate", **PYTHON)
    assert answer.status_code == 200, answer.text
    expected = language_model().infill("abc<mask:5>", sampler=Ancestral(3), seed=3).text
    assert answer.json()["response"] == expected[3:]
    assert answer.json()["eval_count"] == 5
    assert len(server.post("/api/generate", **LITELLM).json()["response"]) == 5
    by_default = lines(server.post("/api/generate", model="tiny:latest", prompt="abc").text)
    assert by_default[-1]["done"] is True
    many = server.post("/api/generate", prompt="abc", stream=False, options={"num_predict": -1}).json()
    assert many["eval_count"] == LENGTH // 2


def test_a_model_is_loaded_by_a_request_for_nothing(server: LiveServer) -> None:
    for path, body in (("/api/generate", {"model": "tiny", "keep_alive": "5m"}), ("/api/chat", {"messages": []})):
        answer = server.post(path, **body).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_formats() -> None:
    with live_server(chat_model()) as served:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        for path, body in (
            ("/api/generate", {"prompt": "a", "raw": True}),
            ("/api/generate", {"prompt": "a"}),
            ("/api/chat", {"messages": HELLO}),
        ):
            options = {"num_predict": 24, "steps": 8, "seed": 1}
            answer = served.post(path, **body, format=schema, stream=False, options=options)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            text = found["response"] if "response" in found else found["message"]["content"]
            assert set(json.loads(text)) == {"a"}


def test_chat(chat: LiveServer) -> None:
    expected = chat.post("/v1/chat/completions", messages=HELLO, max_tokens=12, seed=3).json()["choices"][0]
    options = {"num_predict": 12, "seed": 3}
    whole = chat.post("/api/chat", model="tiny", messages=HELLO, stream=False, options=options).json()
    assert whole["message"] == {"role": "assistant", "content": expected["message"]["content"]}
    assert whole["done_reason"] == expected["finish_reason"]
    *parts, last = lines(chat.post("/api/chat", model="tiny", messages=HELLO, options=options).text)
    assert "".join(part["message"]["content"] for part in parts) == expected["message"]["content"]
    assert last["eval_count"] == whole["eval_count"]
    told = chat.post("/api/generate", prompt="Hello", stream=False, options=options).json()
    assert told["response"] == expected["message"]["content"]
    *parts, _ = lines(chat.post("/api/generate", prompt="Hello", options=options).text)
    assert "".join(part["response"] for part in parts) == expected["message"]["content"]
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    asked = chat.post("/v1/chat/completions", messages=system, max_tokens=12, seed=3).json()["choices"][0]["message"]
    told = chat.post("/api/generate", prompt="Hello", system="Be brief.", stream=False, options=options).json()
    assert told["response"] == asked["content"]


def test_tools(chat: LiveServer) -> None:
    body = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "options": {"num_predict": 64, "seed": 3}}
    whole = chat.post("/api/chat", **body, stream=False).json()
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert call["function"]["arguments"]["unit"] in ("C", "F")
    found = [part["message"].get("tool_calls") for part in lines(chat.post("/api/chat", **body).text)]
    assert [calls for calls in found if calls] == [[call]]


def test_models(server: LiveServer, chat: LiveServer) -> None:
    (listed,) = server.http.get("/api/tags").json()["models"]
    assert (listed["name"], listed["model"]) == ("tiny", "tiny")
    assert server.http.get("/api/ps").json()["models"][0]["name"] == "tiny"
    assert server.http.get("/api/version").json()["version"]
    for body in ({"name": "tiny"}, {"model": "tiny:latest", "verbose": False}):
        shown = server.post("/api/show", **body).json()
        assert shown["parameters"] == f"num_ctx {LENGTH}"
        assert ".Suffix" in shown["template"]  # by which continue.dev knows a model that fills holes
        assert shown["capabilities"] == ["completion", "insert", "embedding"]
    assert "tools" in chat.post("/api/show", model="tiny").json()["capabilities"]
    with live_server(language_model(NextToken())) as other:
        shown = other.post("/api/show", model="tiny").json()
        assert (".Suffix" in shown["template"], "insert" in shown["capabilities"]) == (False, False)
        answer = other.post("/api/generate", **CONTINUE)
        assert answer.status_code == 400
        assert "does not see what follows a hole" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("generate", {"prompt": "a", "options": {"sed": 3}}, 422, "there is no field 'sed' (did you mean seed?)"),
        ("generate", {"prompt": "a", "options": {"seed": 3}, "seed": 4}, 422, "seed is given twice"),
        ("generate", {"prompt": "a", "options": {"repeat_penalty": 1.1}}, 422, "repeat_penalty is not supported here"),
        ("generate", {"prompt": "a", "options": 3}, 422, "the field options must be an object"),
        ("generate", {"prompt": "a", "format": "xml"}, 422, "format must be json, or a JSON schema"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 422, "template is not supported here"),
        ("generate", {"prompt": "a", "images": ["AAAA"]}, 422, "images is not supported here"),
        (
            "generate",
            {"prompt": "a", "system": "Be brief."},
            400,
            "a system message needs a model with",
        ),
        ("generate", {"prompt": "a", "model": "other"}, 404, "there is no model 'other' here"),
        ("chat", {"messages": HELLO}, 400, "this model has no chat template"),
        ("chat", {"messages": [{**HELLO[0], "images": ["A"]}]}, 422, "images are not read here"),
        ("show", {"model": "other"}, 404, "there is no model 'other' here"),
        ("embeddings", {}, 404, "POST /api/embed and POST /v1/embeddings make them"),
    ],
)
def test_errors_are_sentences(server: LiveServer, path: str, body: dict[str, Any], status: int, told: str) -> None:
    answer = server.post(f"/api/{path}", **body)
    assert answer.status_code == status, answer.text
    assert told in answer.json()["error"]


def test_errors_before_a_route_are_sentences() -> None:
    with live_server(token="secret") as served:
        assert "needs a token" in served.http.get("/api/tags").json()["error"]


def test_the_client_of_its_authors(chat: LiveServer, server: LiveServer) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=server.url) as client, ollama.Client(host=chat.url) as talker:
        options = {"num_predict": 5, "seed": 3, "steps": 3}
        done = client.generate("tiny", "abc", suffix="def", options=options)
        parts = list(client.generate("tiny", "abc", suffix="def", options=options, stream=True))
        assert "".join(part.response for part in parts) == done.response
        assert done.done_reason in ("stop", "length")
        hello = talker.chat("tiny", messages=HELLO, options={"num_predict": 12, "seed": 3})
        streamed = talker.chat("tiny", messages=HELLO, options={"num_predict": 12, "seed": 3}, stream=True)
        assert "".join(part.message.content for part in streamed) == hello.message.content
        assert [model.model for model in client.list().models] == ["tiny"]
        assert client.show("tiny").modelinfo["unmask.context_length"] == LENGTH
        assert [model.name for model in client.ps().models] == ["tiny"]
        assert len(client.embed("tiny", ["ab", "c"]).embeddings) == 2
        with pytest.raises(ollama.ResponseError, match="there is no model 'other' here") as found:
            client.generate("other", "abc")
        assert found.value.status_code == 404


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_litellm(server: LiveServer, chat: LiveServer) -> None:
    litellm = pytest.importorskip("litellm")
    given = {"messages": HELLO, "max_tokens": 12, "seed": 3}
    expected = chat.post("/v1/chat/completions", **given).json()["choices"][0]["message"]["content"]
    done = litellm.completion(model="ollama_chat/tiny", api_base=chat.url, **given)
    assert done.choices[0].message.content == expected
    chunks = litellm.completion(model="ollama_chat/tiny", api_base=chat.url, stream=True, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    plain = litellm.completion(model="ollama/tiny", api_base=server.url, messages=[{"role": "user", "content": "abc"}])
    assert plain.choices[0].message.content
    text = litellm.text_completion(
        model="text-completion-openai/tiny", api_base=f"{server.url}/v1", api_key="any", prompt="abc", max_tokens=5
    )
    assert len(text.choices[0].text) == 5
