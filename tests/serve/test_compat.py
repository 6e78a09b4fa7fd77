"""What clients of other servers send, and the words in which they are answered."""

from __future__ import annotations

from typing import Any

import pytest

from live_server import LENGTH, LiveServer, language_model, live_server
from unmask import Ancestral, SamplingParams
from unmask.serve._api_docs import _EXAMPLES
from unmask.serve._chat_schemas import ChatResponse
from unmask.serve._compat import IGNORED_FIELDS, NEUTRAL_VALUES
from unmask.serve._embeddings import EmbeddingsResponse
from unmask.serve._llama_cpp_schemas import IGNORED_BY_INFILL
from unmask.serve._ollama_schemas import IGNORED_BY_OLLAMA
from unmask.serve._response_schemas import (
    ClassifyResponse,
    CompletionResponse,
    InfillResponse,
    ScoreResponse,
    TokenizeResponse,
)

GOOD = {"prompt": "ab", "max_tokens": 5, "steps": 3, "seed": 1}


def text(server: LiveServer, **more: Any) -> str:
    answer = server.post("/v1/completions", **{**GOOD, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def problem(server: LiveServer, path: str, status: int, **body: Any) -> dict[str, Any]:
    answer = server.post(path, **body)
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])


def test_fields_without_effect_are_accepted(server: LiveServer) -> None:
    plain = text(server)
    assert text(server, **{name: {"any": ["thing"]} for name in IGNORED_FIELDS}) == plain
    for which in (0, -1):
        assert text(server, **{name: values[which] for name, values in NEUTRAL_VALUES.items()}) == plain
    assert text(server, **dict.fromkeys([*IGNORED_FIELDS, *NEUTRAL_VALUES])) == plain  # null
    assert text(server, best_of=1) == plain
    assert server.post("/v1/infill", template="a<mask>", user="x", metadata={}).status_code == 200
    assert server.post("/v1/score", text="abc", draws=16, user="x").status_code == 200


@pytest.mark.parametrize("name", [*NEUTRAL_VALUES, "best_of"])
def test_what_would_change_the_text_is_refused(server: LiveServer, name: str) -> None:
    value = {"1": 2} if name == "logit_bias" else "no" if name == "ignore_eos" else 3
    told = problem(server, "/v1/completions", 422, **GOOD, **{name: value})
    assert told["param"] == name
    assert "not supported" in told["message"]


def test_a_misspelt_field_is_named(server: LiveServer) -> None:
    told = problem(server, "/v1/completions", 422, **GOOD, temperture=1)
    assert told["param"] == "temperture"
    assert told["message"] == "there is no field 'temperture' (did you mean temperature?)"
    assert len(problem(server, "/v1/completions", 422, **GOOD, **{"x" * 9999: 1})["message"]) < 200


def test_null_is_not_given(server: LiveServer) -> None:
    names = ("n", "temperature", "top_p", "top_k", "stream", "echo", "logprobs", "stop", "suffix", "sampler")
    assert text(server, **dict.fromkeys(names)) == text(server)
    assert len(text(server, max_tokens=None)) == 16
    assert server.post("/v1/completions", **{**GOOD, "seed": None}).status_code == 200


def test_max_completion_tokens(server: LiveServer) -> None:
    assert text(server, max_tokens=None, max_completion_tokens=5) == text(server)
    assert text(server, max_completion_tokens=5) == text(server)
    assert "mean the same" in problem(server, "/v1/completions", 422, **GOOD, max_completion_tokens=6)["message"]


def test_values_that_others_take(server: LiveServer) -> None:
    sampler = Ancestral(3, SamplingParams(top_k=1))
    assert f"ab{text(server, top_p=0)}" == language_model().infill("ab<mask:5>", sampler=sampler, seed=1).text
    assert text(server, top_k=0) == text(server, top_k=-1) == text(server)
    assert len({text(server, seed=-1, max_tokens=20) for _ in range(4)}) > 1
    assert text(server, seed=-7) == text(server, seed=-7)
    assert text(server, seed=2**63 - 1) == text(server, seed=2**63 - 1)
    many = [f"no{number}" for number in range(20)]
    assert text(server, stop=many) == text(server)
    assert problem(server, "/v1/completions", 422, **GOOD, stop=["a"] * 65)["param"] == "stop"
    assert problem(server, "/v1/completions", 422, **GOOD, stop=[""])["param"] == "stop"


def test_no_tokens(server: LiveServer) -> None:
    for request, expected in (
        ({"prompt": "ab"}, [""]),
        ({"prompt": ["ab", ""], "n": 2, "echo": True}, ["ab", "ab", "", ""]),
    ):
        answer = server.post("/v1/completions", **request, max_tokens=0).json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert answer["usage"]["completion_tokens"] == 0
        streamed = server.post("/v1/completions", **request, max_tokens=0, stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert streamed.text.count('"finish_reason": "length"') == len(expected)
    assert problem(server, "/v1/completions", 400, prompt="a", max_tokens=0, n=10**9)["param"] == "n"
    assert problem(server, "/v1/completions", 422, prompt="a", max_tokens=0, logprobs=1)["param"] == "logprobs"
    assert problem(server, "/v1/completions", 400, prompt="a" * 49, max_tokens=0)["code"]


def test_more_than_the_model_takes(server: LiveServer) -> None:
    told = problem(server, "/v1/completions", 400, prompt="ab", max_tokens=256)
    message = "you requested 258 tokens (2 in the prompt; 256 for the completion)"
    assert told == {
        "message": f"This model's maximum context length is {LENGTH} tokens. However, {message}."
        " Please reduce the prompt or max_tokens.",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "context_length_exceeded",
    }
    assert problem(server, "/v1/completions", 400, prompt="ab", max_tokens=10**18)["code"] == told["code"]


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        ("infill", {"segments": ["a", 0]}, "segments[1]", "must be a text, a number of at least 1 or a list"),
        ("infill", {"segments": 3}, "segments", "the field segments must be a list"),
        ("infill", {"template": "a<mask>", "n": 0}, "n", "the field n must be a number of at least 1"),
        ("infill", {"template": "a<mask>", "n": "x"}, "n", "the field n must be a whole number"),
        ("infill", {"template": "a<mask>", "stream": 7}, "stream", "must be true or false"),
        ("infill", {}, "template", "send either template or segments"),
        ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens", "the field max_tokens must be"),
        ("completions", {"prompt": {"a": 1}}, "prompt", "the field prompt must be a text"),
        ("completions", {"prompt": "a", "temperature": 101}, "temperature", "a number of at most 100"),
        ("score", {}, "text", "the field text is missing"),
        ("score", {"text": ""}, "text", "a text of at least 1 character"),
    ],
)
def test_faults_are_told_in_the_words_of_the_request(
    server: LiveServer, path: str, body: dict[str, Any], param: str, told: str
) -> None:
    fault = problem(server, f"/v1/{path}", 422, **body)
    assert fault["param"] == param
    assert told in fault["message"]
    assert not any(word in fault["message"] for word in ("Input", "constrained", ".str", "int]"))


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b'{"prompt": "a",\n "n": }', 400, "the body is not JSON: expecting value at line 2, column 7"),
        (b"{", 400, "the body is not JSON: expecting property name enclosed in double quotes at line 1"),
        (b'{"text": "\xff"}', 400, "must be UTF-8"),
        (b"", 422, "the body must be a JSON object"),
        (b"[]", 422, "the body must be a JSON object"),
        (b'"text"', 422, "the body must be a JSON object"),
    ],
)
def test_bodies_that_are_none(server: LiveServer, body: bytes, status: int, told: str) -> None:
    answer = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    fault = answer.json()["error"]
    assert (answer.status_code, fault["param"]) == (status, None)
    assert told in fault["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "told"),
    [
        ("POST", "/v1/responses", 404, "POST /v1/chat/completions answers conversations"),
        ("POST", "/embedding", 404, "POST /v1/embeddings makes embeddings"),
        ("POST", "/beta/completions", 404, "POST /v1/infill fills any holes"),
        ("POST", "/completions", 404, "did you mean POST /v1/completions?"),
        ("POST", "/v1/v1/completions", 404, "did you mean POST /v1/completions?"),
        ("POST", "/v1/scores", 404, "(did you mean /v1/score?)"),
        ("GET", "/nowhere", 404, "there are GET /health, GET /ready,"),
        ("GET", "/v1/infill", 405, "/v1/infill takes POST"),
    ],
)
def test_routes_that_are_none(server: LiveServer, method: str, path: str, status: int, told: str) -> None:
    sent = {"json": {}} if method == "POST" else {}
    answer = server.http.request(method, path, **sent)
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]


def test_the_schema_says_what_programs_need(server: LiveServer) -> None:
    schema = server.http.get("/openapi.json").json()
    for path in ("/v1/infill", "/v1/completions", "/v1/chat/completions", "/v1/fim/completions", "/infill"):
        content = schema["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
        assert "$ref" in content["application/json"]["schema"] or path == "/infill"
    for name in ("InfillRequest", "FimRequest", "LlamaCppRequest", "OllamaGenerateRequest", "OllamaChatRequest"):
        assert "ancestral" in schema["components"]["schemas"][name]["properties"]["sampler"]["enum"]
    names = [told["operationId"] for path in schema["paths"].values() for told in path.values()]
    assert {"infill", "completions", "score", "models", "health"} <= set(names)
    assert len(names) == len(set(names))
    assert "security" not in schema
    with live_server(token="x", ready=False) as locked:
        locked.http.headers["Authorization"] = "Bearer x"
        schema = locked.http.get("/openapi.json").json()
        assert schema["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
        assert {"token": []} in schema["security"]
        assert schema["paths"]["/health"]["get"]["security"] == []
        assert "Authorization: Bearer $UNMASK_TOKEN" in locked.http.get("/docs").text


def test_the_reference_speaks_of_the_server_that_was_asked(server: LiveServer) -> None:
    page = server.http.get("/docs", headers={"Host": "localhost:8301"}).text
    assert "curl http://localhost:8301/v1/infill" in page
    assert "localhost:8000" not in page
    assert '<header><p class="brand"><a href="/">' in page
    assert all(name in page for name in (*IGNORED_FIELDS, *NEUTRAL_VALUES))
    icon = server.http.get("/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
    assert all(name in page for name in (*IGNORED_BY_INFILL, *IGNORED_BY_OLLAMA))
    kinds = (
        *(InfillResponse, CompletionResponse, ChatResponse, ChatResponse, EmbeddingsResponse, ScoreResponse),
        *(ClassifyResponse, TokenizeResponse),
    )
    for (request, answer), kind in zip(_EXAMPLES.values(), kinds, strict=True):
        kind.model_validate(answer, strict=True, extra="forbid")
        assert request
