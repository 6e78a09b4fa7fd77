"""The routes of llama.cpp's server, with the bodies that its editors' plugins send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from live_server import LENGTH, LiveServer, language_model, live_server
from unmask import Ancestral, NextToken

CHUNK = {"text": "fgh\n", "time": [4, 2], "filename": "a"}
VIM: dict[str, Any] = {  # llama.vim
    "id_slot": 0,
    "input_prefix": "abc\n",
    "input_suffix": "\ndef\n",
    "input_extra": [CHUNK],
    "prompt": "a",
    "n_predict": 4,
    "stop": [],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.90,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": [
        "content",
        "timings/prompt_n",
        "timings/prompt_ms",
        "timings/prompt_per_token_ms",
        "timings/prompt_per_second",
        "timings/predicted_n",
        "timings/predicted_ms",
        "timings/predicted_per_token_ms",
        "timings/predicted_per_second",
        "truncated",
        "tokens_cached",
    ],
}
VIM_WARM_UP: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": [CHUNK],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
VSCODE: dict[str, Any] = {  # llama.vscode
    "input_prefix": "abc\n",
    "input_suffix": "\ndef\n",
    "input_extra": [CHUNK],
    "prompt": "a",
    "n_predict": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 2,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}
VSCODE_WARM_UP: dict[str, Any] = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": [],
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
CONTINUE = {"prompt": "abc", "stream": True, "n_predict": 6, "stop": ["h"], "temperature": 0.5}  # continue.dev
MINE = {"seed": 3, "steps": 3}


def post(server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = server.post("/infill", **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_llama_vim(server: LiveServer) -> None:
    found = post(server, **VIM, **MINE)
    assert set(found) == set(VIM["response_fields"])
    assert found["timings/predicted_n"] == len(found["content"])
    assert found["timings/prompt_n"] == len("a\nfgh\n\nabc\na\ndef\n")
    assert found["truncated"] is False
    assert post(server, **VIM_WARM_UP) == {}
    assert post(server, **{**VIM, "model": "tiny"})["content"] is not None


def test_llama_vscode(server: LiveServer) -> None:
    found = post(server, **VSCODE, **MINE)
    whole = "a\nfgh\n\nabc\na<mask:0..4>\ndef\n"
    lm = language_model()
    sampler = Ancestral(3).with_params(_params(40, 0.99), "ancestral")
    expected = lm.infill(whole, sampler=sampler, seed=3).text
    assert f"a\nfgh\n\nabc\na{found['content']}\ndef\n" == expected
    assert found["stop"] is True
    assert found["stop_type"] == ("limit" if len(found["content"]) == 4 else "eos")
    assert found["tokens_predicted"] == len(found["content"])
    assert found["generation_settings"]["seed"] == 3
    assert found["timings"]["predicted_per_second"] >= 0
    warm = post(server, **VSCODE_WARM_UP)
    assert (warm["content"], warm["tokens_predicted"]) == ("", 0)
    by_default = server.http.get("/metrics").text
    assert 'unmask_requests_total{route="/infill",status="200"}' in by_default


def _params(top_k: int, top_p: float) -> Any:
    from unmask import SamplingParams

    return SamplingParams(1.0, top_k, top_p)


def test_warm_ups_ask_the_network_nothing() -> None:
    with live_server() as served:
        for body in (VIM_WARM_UP, VSCODE_WARM_UP):
            post(served, **body)
        assert 'unmask_forward_passes_total{model="tiny"} 0.0' in served.http.get("/metrics").text


def test_continue_dev(server: LiveServer) -> None:
    streamed = server.post("/completion", **CONTINUE, **MINE)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    parts = [json.loads(line.removeprefix("data: ")) for line in streamed.text.strip().split("\n\n")]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    whole = server.post("/completion", **{**CONTINUE, "stream": False}, **MINE).json()
    assert "".join(part["content"] for part in parts) == whole["content"]
    text = language_model().infill("abc<mask:6>", sampler=Ancestral(3).with_params(_temperature(0.5), ""), seed=3).text
    assert whole["content"] == text[3:].split("h")[0]
    if "h" in text[3:]:
        assert (whole["stop_type"], whole["stopping_word"]) == ("word", "h")


def _temperature(value: float) -> Any:
    from unmask import SamplingParams

    return SamplingParams(value)


def test_probabilities_and_tokens(server: LiveServer) -> None:
    found = post(server, prompt="ab", n_predict=5, n_probs=2, return_tokens=True, **MINE)
    assert len(found["completion_probabilities"]) == len(found["tokens"]) == 5
    for entry, id_ in zip(found["completion_probabilities"], found["tokens"], strict=True):
        assert entry["id"] == id_
        assert len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode() == entry["token"]
    assert "".join(entry["token"] for entry in found["completion_probabilities"]) == found["content"]


def test_what_is_far_from_the_hole_is_not_read(server: LiveServer) -> None:
    far = {"input_prefix": "h" * 90 + "abc", "input_suffix": "def" + "g" * 90, "n_predict": 4, "min_tokens": 4}
    found = post(server, **far, **MINE)
    assert found["truncated"] is True
    assert found["tokens_evaluated"] + found["tokens_predicted"] == LENGTH
    assert found["prompt"] == ("h" * 90 + "abc")[-33:]  # a quarter of what is read follows the hole
    cut = "h" * 30 + "abc<mask:4>def" + "g" * 8
    assert found["content"] == language_model().infill(cut, sampler=Ancestral(3), seed=3).text[33:37]
    one_sided = post(server, **{**far, "input_prefix": "abc"}, **MINE)
    assert (one_sided["prompt"], one_sided["tokens_evaluated"]) == ("abc", LENGTH - 4)
    one_sided = post(server, **{**far, "input_suffix": "def"}, **MINE)
    assert (len(one_sided["prompt"]), one_sided["tokens_evaluated"]) == (LENGTH - 7, LENGTH - 4)
    long = post(server, prompt="ab", input_suffix="c", n_predict=10**30, min_tokens=10**29, **MINE)
    assert (long["tokens_predicted"], long["stop_type"]) == (LENGTH // 2, "limit")
    long = post(server, prompt="ab", n_predict=4096, **MINE)
    assert long["tokens_predicted"] == LENGTH // 2
    assert post(server, prompt="ab", n_predict=-1, **MINE)["tokens_predicted"] == LENGTH // 2


def test_grammars_and_schemas(server: LiveServer) -> None:
    found = post(server, prompt="ab", n_predict=3, grammar='root ::= "c" [a-b]+', **MINE)
    assert found["content"][0] == "c"
    assert set(found["content"][1:]) <= set("ab")
    assert post(server, prompt="ab", n_predict=3, grammar="", **MINE)["content"]


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"n_predct": 3}, 422, "there is no field 'n_predct' (did you mean n_predict?)"),
        ({"input_extra": [{"filename": "a"}]}, 422, "the field input_extra[0].text is missing"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, 422, "lora is not supported here: leave it out, or send []"),
        ({"min_p": 0.05}, 422, "min_p is not supported here"),
        ({"n": 2}, 422, "the field n must be a number of at most 1"),
        ({"n_predict": -5}, 422, "the field n_predict must be a number of at least -1"),
        ({"min_tokens": 5, "n_predict": 4}, 422, "min_tokens is above n_predict"),
        ({"model": "other"}, 404, "there is no model 'other' here"),
        ({"prompt": "é"}, 400, "cannot be written"),
    ],
)
def test_refused(server: LiveServer, body: dict[str, Any], status: int, told: str) -> None:
    answer = server.post("/infill", **body)
    assert answer.status_code == status, answer.text
    assert told in answer.json()["error"]["message"]


def test_autoregressive_models_continue_and_do_not_fill() -> None:
    with live_server(language_model(NextToken())) as served:
        assert post(served, prompt="ab", n_predict=3)["tokens_predicted"] == 3
        answer = served.post("/infill", **VIM)
        assert answer.status_code == 400
        assert "does not see what follows a hole: leave the suffix out" in answer.json()["error"]["message"]
        post(served, **VIM_WARM_UP)


def test_props_and_health(server: LiveServer) -> None:
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == LENGTH
    assert props["model_path"] == "tiny"
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/health").status_code == 200


def test_tokens(server: LiveServer) -> None:
    ids = server.post("/v1/tokenize", text="abc").json()["tokens"]
    plain = [token["id"] for token in ids]
    assert server.post("/tokenize", content="abc", add_special=True, parse_special=True).json() == {"tokens": plain}
    pieces = server.post("/tokenize", content="abc", with_pieces=True).json()["tokens"]
    assert pieces == [{"id": id_, "piece": letter} for id_, letter in zip(plain, "abc", strict=True)]
    found = server.post("/tokenize", model="tiny", prompt="abc", add_special_tokens=True).json()  # vLLM
    assert found == {"count": 3, "max_model_len": LENGTH, "tokens": plain, "token_strs": None}
    named = server.post("/tokenize", prompt="abc", return_token_strs=True).json()
    assert named["token_strs"] == ["a", "b", "c"]
    assert server.post("/detokenize", tokens=plain).json() == {"content": "abc", "prompt": "abc"}
    assert server.post("/v1/detokenize", tokens=plain).json() == {"text": "abc"}
    for path, body, status, told in (
        ("/tokenize", {}, 422, "the field content is missing"),
        ("/tokenize", {"content": "a", "prompt": "a"}, 422, "send one of them"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, 400, "no chat template"),
        ("/detokenize", {"tokens": [999]}, 400, "the token 999 is not one of"),
        ("/detokenize", {"tokens": [-1]}, 422, "tokens[0]"),
    ):
        answer = server.post(path, **body)
        assert answer.status_code == status, answer.text
        assert told in answer.json()["error"]["message"]
