"""Every route of a live server: what it answers, and what it says to what it cannot."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest

from live_server import LENGTH, LiveServer, language_model, live_server, metric, wait_until
from unmask import Ancestral, NextToken, SamplingParams
from unmask.serve.limits import Limits


def events(answer: httpx.Response) -> list[tuple[str, Any]]:
    """The server-sent events of an answer."""
    found = []
    for block in answer.text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((lines.get("event", ""), json.loads(lines["data"]) if lines["data"] != "[DONE]" else None))
    return found


def test_it_says_how_it_is(server: LiveServer) -> None:
    assert server.http.get("/health").json() == {"status": "alive", "models": {"tiny": "ready"}}
    assert server.http.get("/ready").json() == {"status": "ready", "models": {"tiny": "ready"}}
    (model,) = server.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["objective"], model["max_length"]) == (
        "tiny",
        "model",
        "MDLM",
        LENGTH,
    )
    assert model["limits"]["steps"] == Limits().steps
    assert "confidence" in model["samplers"]


def test_infilling_is_the_librarys(server: LiveServer) -> None:
    template = "abc<mask:5>def<mask>"
    answer = server.post("/v1/infill", template=template, n=3, steps=6, seed=7, top_p=0.8, alternatives=4)
    results = answer.json()["results"]
    lm = language_model()
    expected = lm.infill(template, n=3, sampler=Ancestral(6, SamplingParams(top_p=0.8)), seed=7)
    assert [result["text"] for result in results] == expected.texts
    assert [result["seed"] for result in results] == [7, 8, 9]
    for result in results:
        first, second = result["spans"]
        assert (first["start"], first["end"], second["start"], second["end"]) == (3, 8, 11, 12)
        for span in (first, second):
            assert span["text"] == result["text"][span["start"] : span["end"]]
            for token in span["tokens"]:
                assert token["logprob"] < 0
                assert 1 <= token["step"] <= 6
                assert len(token["alternatives"]) == 4
                assert 0 < sum(other["probability"] for other in token["alternatives"]) <= 1 + 1e-9
    assert answer.json()["usage"] == {"prompt_tokens": 6, "completion_tokens": 18, "total_tokens": 24}


def test_segments_are_a_template_and_a_text_may_contain_the_marks(server: LiveServer) -> None:
    both = [
        server.post("/v1/infill", **request, seed=1, steps=4).json()["results"][0]["text"]
        for request in ({"template": "ab<mask:4>cd"}, {"segments": ["ab", 4, "cd"]})
    ]
    assert both[0] == both[1]
    refused = server.post("/v1/infill", segments=["a<mask:2>", 3])
    assert refused.status_code == 400  # these are characters of the text, which this alphabet has not
    assert "'<'" in refused.json()["error"]["message"]


def test_a_stream_tells_every_step_and_ends_with_the_answer(server: LiveServer) -> None:
    request = {"template": "ab<mask:6>cd", "n": 2, "steps": 4, "seed": 3, "alternatives": 2}
    answer = server.post("/v1/infill", **request, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = events(answer)
    assert told[0][0] == "canvas"
    assert [token and token["text"] for token in told[0][1]["tokens"]] == [*"ab", *[None] * 6, *"cd"]
    whole = server.post("/v1/infill", **request).json()
    assert told[-1][1]["results"] == whole["results"]
    for index in (0, 1):
        canvas: list[str | None] = [*"ab", *[None] * 6, *"cd"]
        steps = [data for name, data in told if name == "step" and data["index"] == index]
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        for step in steps:
            for change in step["changes"]:
                assert canvas[change["position"]] is None
                canvas[change["position"]] = change["text"]
            hidden = "".join("\0" if token is None else token for token in canvas)
            assert step["draft"] == re.sub("\0+", lambda run: f"<mask:{len(run[0])}>", hidden)
        (result,) = (data for name, data in told if name == "result" and data["index"] == index)
        assert "".join(filter(None, canvas)) == result["text"] == whole["results"][index]["text"]


def test_drafts_are_templates(server: LiveServer) -> None:
    told = events(server.post("/v1/infill", template="ab<mask:9>cd", steps=5, seed=2, stream=True))
    drafts = [data["draft"] for name, data in told if name == "step"]
    assert drafts[-1] == told[-1][1]["results"][0]["text"]
    again = server.post("/v1/infill", template=drafts[0], seed=0, steps=3)
    assert again.status_code == 200
    assert "<mask" in drafts[0]


def test_completions_with_a_suffix_and_several_prompts(server: LiveServer) -> None:
    answer = server.post(
        "/v1/completions", prompt=["ab", "cd"], suffix="ef", max_tokens=5, n=2, steps=4, seed=1, logprobs=2
    ).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    lm = language_model()
    for prompt, choices in (("ab", answer["choices"][:2]), ("cd", answer["choices"][2:])):
        texts = lm.infill(f"{prompt}<mask:5>ef", n=2, sampler=Ancestral(4), seed=1).texts
        assert [f"{prompt}{choice['text']}ef" for choice in choices] == texts
    first = answer["choices"][0]
    assert "".join(first["logprobs"]["tokens"]) == first["text"]
    assert first["finish_reason"] == "length"
    assert len(first["logprobs"]["top_logprobs"][0]) == 2
    assert answer["usage"]["completion_tokens"] == 20
    ids = lm.tokenizer.encode("ab")  # type: ignore[union-attr]
    by_ids = server.post("/v1/completions", prompt=ids, suffix="ef", max_tokens=5, steps=4, seed=1, echo=True)
    assert by_ids.json()["choices"][0]["text"] == f"ab{first['text']}"


def test_a_stop_cuts_and_saves_steps(server: LiveServer) -> None:
    request = {"prompt": "ab", "max_tokens": 30, "steps": 30, "seed": 5, "sampler": "first-hitting"}
    whole = server.post("/v1/completions", **request).json()["choices"][0]["text"]
    stop = whole[4:6]
    cut = server.post("/v1/completions", **request, stop=[stop, "no such"]).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    streamed = events(server.post("/v1/completions", **request, stop=stop, stream=True))
    chunks = [data["choices"][0] for _, data in streamed if data is not None]
    assert "".join(chunk["text"] for chunk in chunks) == cut["text"]
    assert chunks[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("sampler", ["default", "remdm", "confidence"])
def test_streamed_completions_add_up_to_the_whole(server: LiveServer, sampler: str) -> None:
    request = {"prompt": "ab", "max_tokens": 12, "n": 2, "steps": 8, "seed": 5, "sampler": sampler}
    whole = [choice["text"] for choice in server.post("/v1/completions", **request).json()["choices"]]
    told = events(server.post("/v1/completions", **request, stream=True, stream_options={"include_usage": True}))
    assert told[-1] == ("", None)
    assert told[-2][1]["usage"]["completion_tokens"] == 24
    for index in (0, 1):
        chunks = [d["choices"][0] for _, d in told[:-2] if d["choices"][0]["index"] == index]
        assert "".join(chunk["text"] for chunk in chunks) == whole[index]
        assert chunks[-1]["draft"] == f"ab{whole[index]}"
        assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_scores_have_errors_and_add_up(server: LiveServer) -> None:
    text = "abc def abc"
    found = server.post("/v1/score", text=text, draws=64, seed=2).json()
    expected = language_model().score(text, draws=64, seed=2)
    for name in ("nats_per_token", "standard_error", "perplexity", "bits_per_byte"):
        assert found[name] == pytest.approx(getattr(expected, name))
    assert found["bits_per_byte_error"] > 0
    assert not found["exact"]
    assert "".join(token["text"] for token in found["tokens"]) == text
    assert sum(token["nats"] for token in found["tokens"]) == pytest.approx(found["nats"])
    assert sum(part["nats_per_token"] for part in found["by_time"]) == pytest.approx(found["nats_per_token"])


def test_tokens(server: LiveServer) -> None:
    assert [each["text"] for each in server.post("/v1/tokenize", text="a b").json()["tokens"]] == [
        "a",
        " ",
        "b",
    ]


def test_an_autoregressive_model_is_served_too() -> None:
    with live_server(language_model(NextToken())) as server:
        (model,) = server.http.get("/v1/models").json()["data"]
        assert model["samplers"] == ["default"]
        completed = server.post("/v1/completions", prompt="ab", max_tokens=5, seed=1).json()["choices"][0]
        assert len(completed["text"]) == 5
        assert server.post("/v1/score", text="abc").json()["exact"]
        refused = server.post("/v1/infill", template="a<mask:2>b", sampler="confidence")
        assert refused.status_code == 400
        assert "for autoregression: use the default sampler" in refused.json()["error"]["message"]


LIMITS = Limits(prompt_tokens=20, max_tokens=12, n=4, steps=50, draws=64, alternatives=5, body_bytes=2000)


@pytest.fixture(scope="module")
def strict() -> Any:
    with live_server(limits=LIMITS) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        ("infill", {"template": "<mask:13>"}, "template", "generates up to 12 tokens; got 13"),
        ("infill", {"template": f"{'a' * 21}<mask>"}, "template", "reads up to 20 tokens; template has 21"),
        ("infill", {"template": "<mask>", "n": 5}, "n", "allows n up to 4; got 5"),
        ("infill", {"template": "<mask>", "steps": 51}, "steps", "allows steps up to 50"),
        ("infill", {"template": "<mask>", "alternatives": 6}, "alternatives", "up to 5"),
        ("infill", {"template": "<mask:99999999999>"}, None, "1 to 1,000,000"),
        ("infill", {"template": "<mask>", "sampler": "confidense"}, None, "no sampler 'confidense'"),
        ("completions", {"prompt": ["a", "b", "c"], "n": 2}, "n", "up to 4"),
        (
            "completions",
            {"prompt": "a", "max_tokens": 10**9},
            "max_tokens",
            "you requested 1000000001 tokens",
        ),
        ("completions", {"prompt": [3, 999]}, None, "token 999"),
        ("completions", {"prompt": []}, None, "empty"),
        ("completions", {"prompt": "xyz"}, None, "'x'"),
        ("score", {"text": "abc", "draws": 65}, "draws", "up to 64"),
        ("score", {"text": "a" * 21}, "text", "reads up to 20 tokens"),
    ],
)
def test_too_much_gets_a_sentence(
    strict: LiveServer, path: str, body: dict[str, Any], param: str | None, told: str
) -> None:
    answer = strict.post(f"/v1/{path}", **body)
    assert answer.status_code == 400
    problem = answer.json()["error"]
    assert problem["param"] == param
    assert told in problem["message"]


def test_a_canvas_longer_than_the_model(server: LiveServer) -> None:
    answer = server.post("/v1/infill", template="abc<mask:46>")
    assert answer.status_code == 400
    problem = answer.json()["error"]
    assert (problem["code"], problem["param"]) == ("context_length_exceeded", "template")
    assert "maximum context length is 48 tokens" in problem["message"]
    assert "(3 in the prompt; 46 for the completion)" in problem["message"]


def test_while_the_model_is_loading() -> None:
    with live_server(ready=False) as server:
        assert server.http.get("/health").status_code == 200
        for answer in (
            server.http.get("/ready"),
            server.http.get("/v1/models"),
            server.post("/v1/score", text="abc"),
            server.post("/v1/infill", template="<mask>"),
        ):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0


def slowly(server: LiveServer, seconds: float) -> None:
    """Calls of the network take so long from now on."""
    model = server.service.model.denoiser
    inner = model.forward

    def forward(*inputs: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return inner(*inputs, **options)

    model.forward = forward


def running(server: LiveServer) -> float:
    return metric(server.http.get("/metrics").text, "unmask_running_sequences")


def test_a_late_answer_is_504_and_in_a_stream_an_event() -> None:
    with live_server() as server:
        slowly(server, 0.05)
        request = {"template": "<mask:40>", "steps": 40, "timeout": 1}
        answer = server.post("/v1/infill", **request)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout")
        told = events(server.post("/v1/infill", **request, stream=True))
        assert told[-1][0] == "error"
        wait_until(lambda: running(server) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(stream: bool) -> None:
    with live_server() as server:
        slowly(server, 0.1)
        body = {"template": "<mask:40>", "sampler": "first-hitting", "n": 3, "stream": stream}

        def leave() -> None:
            with (
                httpx.Client(base_url=server.url, timeout=1) as impatient,
                suppress(httpx.ReadTimeout),
                impatient.stream("POST", "/v1/infill", json=body) as answer,
            ):
                started = time.monotonic()
                for _ in answer.iter_bytes():
                    if time.monotonic() - started > 1:
                        return

        thread = threading.Thread(target=leave)
        thread.start()
        wait_until(lambda: running(server) == 3)
        thread.join()
        wait_until(lambda: running(server) == 0, seconds=2)  # forty calls would take four


def test_a_full_server_says_when_to_come_back() -> None:
    with live_server(max_batch=1, max_queue=2) as server:
        slowly(server, 0.1)
        body = {"template": "<mask:8>", "sampler": "first-hitting"}
        codes: list[int] = []
        threads = [
            threading.Thread(target=lambda: codes.append(server.post("/v1/infill", **body).status_code))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.15)
        refused = server.post("/v1/infill", **body)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "busy" in refused.json()["error"]["message"]
        for thread in threads:
            thread.join()
        assert codes == [200, 200, 200]


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (
            RuntimeError("[enforce fail] can't allocate memory: you tried"),
            503,
            "out of memory for a single sequence",
        ),
        (KeyError("secret"), 500, "internal error; the server's log has the details"),
    ],
)
def test_what_breaks_inside_is_told_as_well(error: Exception, status: int, told: str) -> None:
    with live_server() as server:

        def forward(*_: Any, **__: Any) -> Any:
            raise error

        server.service.model.denoiser.forward = forward  # type: ignore[method-assign]
        whole = server.post("/v1/infill", template="a<mask>")
        (*_, (name, streamed)) = events(server.post("/v1/infill", template="a<mask>", stream=True))
        assert (whole.status_code, name) == (status, "error")
        for answer in (whole.json(), streamed):
            assert told in answer["error"]["message"]
        assert server.http.get("/ready").status_code == 200


def test_metrics_count(server: LiveServer) -> None:
    before = server.http.get("/metrics").text
    server.post("/v1/infill", template="ab<mask:5>", n=2, steps=3)
    server.http.get("/nowhere")
    after = server.http.get("/metrics").text
    assert metric(after, "unmask_generated_tokens_total") == metric(before, "unmask_generated_tokens_total") + 10
    assert metric(after, "unmask_forward_passes_total") > metric(before, "unmask_forward_passes_total")
    assert 'unmask_requests_total{route="/v1/infill",status="200"}' in after
    assert 'route="other",status="404"' in after
    assert "nowhere" not in after
    assert "unmask_request_seconds_bucket" in after


def test_the_api_describes_itself(server: LiveServer) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path in ("/v1/infill", "/v1/completions", "/v1/score", "/v1/models", "/metrics"):
        assert path in page.text
        assert path in server.http.get("/openapi.json").json()["paths"]
    assert "http://" not in page.text.replace(server.url, "")
    assert f"curl {server.url}/v1/infill -H" in page.text
    assert "cdn" not in page.text


def test_scores_of_many_texts(server: LiveServer) -> None:
    """Each is what it is alone, however the texts are sent."""
    given = ["abc", "def gh", "h"]
    alone = [server.post("/v1/score", text=text, draws=32, seed=5).json() for text in given]
    for body in ({"text": given}, {"texts": given}):
        answer = server.post("/v1/score", **body, draws=32, seed=5).json()
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        for found, expected in zip(answer["results"], alone, strict=True):
            assert found["nats"] == pytest.approx(expected["nats"])
            assert [token["text"] for token in found["tokens"]] == [token["text"] for token in expected["tokens"]]
            assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"])
    assert len(server.post("/v1/score", texts=["abc"], draws=16).json()["results"]) == 1
    for body, status, told in (
        ({"text": "a", "texts": ["b"]}, 422, "text and texts say what is meant twice"),
        ({"texts": []}, 422, "the field texts must be a list of at least 1"),
        ({"text": ["a", ""]}, 422, "text[1]"),
        ({"texts": ["a"] * 65}, 400, "this server allows texts up to 64; got 65"),
        ({"texts": ["a", "é"]}, 400, "cannot be written"),
    ):
        answer = server.post("/v1/score", **body)
        assert answer.status_code == status, answer.text
        assert told in answer.json()["error"]["message"]
