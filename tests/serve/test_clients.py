"""Clients that people use, against a live server with a chat model: litellm, the `llm` command line, LangChain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chat_models import WEATHER, chat_model
from live_server import LiveServer, live_server

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(chat_model(), token="secret") as served:
        served.http.headers["Authorization"] = "Bearer secret"
        yield served


def expected(server: LiveServer) -> str:
    response = server.post("/v1/chat/completions", messages=HELLO, max_tokens=12, seed=3)
    return str(response.json()["choices"][0]["message"]["content"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_litellm(server: LiveServer) -> None:
    litellm = pytest.importorskip("litellm")
    given = {
        "model": "openai/tiny",
        "api_base": f"{server.url}/v1",
        "api_key": "secret",
        "messages": HELLO,
        "max_tokens": 12,
        "seed": 3,
    }
    done = litellm.completion(**given, logprobs=True, top_logprobs=2)
    assert done.choices[0].message.content == expected(server)
    assert done.choices[0].logprobs.content
    chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(server)
    called = litellm.completion(**{**given, "max_tokens": 64}, tools=[WEATHER], tool_choice="required")
    assert called.choices[0].finish_reason == "tool_calls"
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["unit"] in ("C", "F")
    with pytest.raises(litellm.BadRequestError, match="has the role 'wizard'"):
        litellm.completion(**{**given, "messages": [{"role": "wizard", "content": "a"}]})


@pytest.mark.slow
def test_the_llm_command_line(server: LiveServer, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    model = f"- model_id: mine\n  model_name: tiny\n  api_base: {server.url}/v1\n  api_key_name: mine\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    (tmp_path / "keys.json").write_text('{"mine": "secret"}')
    command = [sys.executable, "-m", "llm", "-m", "mine", "-o", "max_tokens", "12", "-o", "seed", "3", "Hello"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    for options in ([], ["--no-stream"]):
        done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, f"{expected(server)}\n"), done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_langchain(server: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key="secret", max_tokens=12, seed=3, temperature=1
    )
    done = chat.invoke("Hello")
    text = server.post("/v1/chat/completions", messages=HELLO, max_tokens=12, seed=3, temperature=1).json()["choices"][
        0
    ]["message"]["content"]
    assert done.content == text
    assert done.usage_metadata["total_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == text
    caller = langchain.ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="secret", max_tokens=64)
    called = caller.bind_tools([WEATHER], tool_choice="weather").invoke("Hello")
    assert called.tool_calls[0]["name"] == "weather"
    assert called.tool_calls[0]["args"]["unit"] in ("C", "F")
