"""Whatever is sent, the answer is 2xx or 4xx, and the server goes on."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis import GenerationMode

from live_server import LiveServer, live_server
from unmask.serve.limits import Limits

FIELD = {
    "/v1/infill": "template",
    "/v1/completions": "prompt",
    "/v1/score": "text",
    "/v1/tokenize": "text",
    "/v1/embeddings": "input",
    "/v1/fim/completions": "prompt",
    "/infill": "prompt",
    "/tokenize": "content",
    "/api/generate": "prompt",
    "/api/embed": "input",
}
PATHS = list(FIELD)
NESTED = b'{"template": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "half a surrogate": b'{"text": "\\ud800", "template": "\\ud800<mask>", "prompt": "\\ud800"}',
    "nested": NESTED,
    "nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "NaN": b'{"template": "a<mask>", "prompt": "a", "temperature": NaN}',
    "Infinity": b'{"template": "a<mask>", "prompt": "a", "temperature": Infinity, "timeout": Infinity}',
    "a huge number": b'{"template": "a<mask>", "prompt": "a", "steps": 1' + b"0" * 5000 + b"}",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"abc"',
    "a long string": b'{"template": "' + b"a" * 900_000 + b'<mask>"}',
    "many holes": json.dumps({"template": "<mask>" * 50_000}).encode(),
    "many segments": json.dumps({"segments": ["a", 1] * 50_000}).encode(),
    "many prompts": json.dumps({"prompt": ["a"] * 50_000}).encode(),
    "zero bytes": b'{"text": "a\\u0000", "template": "\\u0000<mask>", "prompt": "\\u0000"}',
}


def sentence(answer: httpx.Response) -> str:
    """What the client is told."""
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies(server: LiveServer, path: str, name: str) -> None:
    answer = server.http.post(path, content=BODIES[name], headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert sentence(answer)
    assert len(answer.text) < 2000
    assert server.http.get("/ready").status_code == 200


WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    10**9,
    10**30,
    1.5,
    -0.0,
    1e308,
    "",
    "a",
    "é" * 9,
    [],
    [[]],
    [None],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("path", PATHS)
def test_every_field_with_every_wrong_value(server: LiveServer, path: str) -> None:
    schema = server.http.get("/openapi.json").json()
    name = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = schema["components"]["schemas"][name.rsplit("/", 1)[1]]["properties"]
    good: dict[str, Any] = {FIELD[path]: "ab<mask:2>" if path == "/v1/infill" else "ab"}
    quick = {"steps": 2, "max_tokens": 3, "n_predict": 3, "draws": 16}
    good |= {name: value for name, value in quick.items() if name in fields}
    for field in fields:
        for value in WRONG:
            answer = server.http.post(path, json={**good, field: value})
            assert answer.status_code < 500, (field, value, answer.text)
            assert answer.status_code == 200 or sentence(answer), (field, value)


@hypothesis.settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    )
)
def test_any_json(server: LiveServer, body: Any) -> None:
    for path in PATHS:
        assert server.http.post(path, json=body).status_code < 500


def test_the_schema_holds_for_what_is_made_from_it() -> None:
    """Schemathesis: valid and invalid data for every route, and answers as the schema says."""
    with live_server(limits=Limits(steps=20, n=2, draws=32, timeout=20)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        checked = 0
        for operation, mode in itertools.product(schema.get_all_operations(), GenerationMode):

            @hypothesis.settings(
                max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
            )
            @given(case=operation.ok().as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                nonlocal checked
                answer = case.call(base_url=server.url)
                assert answer.status_code < 500, (case.body, answer.text)
                case.validate_response(
                    answer,
                    checks=[schemathesis.checks.response_schema_conformance],  # type: ignore[attr-defined]
                )
                checked += 1

            if mode == GenerationMode.POSITIVE or "POST" in operation.ok().label:
                check()
        assert checked > 300
        assert server.http.get("/ready").status_code == 200
