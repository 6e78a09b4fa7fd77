"""Holes of unknown length in the server: the lengths and texts of the library, in any company."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine_harness import PendingTasks, canvas_ids, running_engine
from live_server import LiveServer, language_model, live_server
from unmask import Ancestral, NextToken
from unmask.objectives import UniformDiffusion
from unmask.sampling.factory import make_sampler
from unmask.serve._engine import DeadlineError
from unmask.serve._jobs import generation_job, lengths_job
from unmask.serve._text_codec import TextCodec

OPEN = "ab<mask:0..3>cd<mask:1..2>e"


def texts(server: LiveServer, seed: int, **more: Any) -> list[str]:
    answer = server.post("/v1/infill", template=OPEN, steps=3, seed=seed, **more)
    assert answer.status_code == 200, answer.text
    return [result["text"] for result in answer.json()["results"]]


def test_templates_are_filled_as_by_the_library(server: LiveServer) -> None:
    expected = language_model().infill(OPEN, n=8, sampler=Ancestral(3), seed=5).texts
    answer = server.post("/v1/infill", template=OPEN, n=8, steps=3, seed=5).json()
    assert [result["text"] for result in answer["results"]] == expected
    assert len({len(text) for text in expected}) > 1  # or nothing was chosen
    for result, text in zip(answer["results"], expected, strict=True):
        first, second = result["spans"]
        assert (first["start"], text[first["end"] :][:2], second["end"]) == (2, "cd", len(text) - 1)
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": sum(len(t) - 5 for t in expected)} | {
        "total_tokens": 5 + sum(len(t) - 5 for t in expected)
    }


def test_in_company_a_text_is_what_it_is_alone(server: LiveServer) -> None:
    expected = {seed: language_model().infill(OPEN, sampler=Ancestral(3), seed=seed).texts for seed in range(6)}
    with ThreadPoolExecutor(6) as pool:
        others = pool.map(lambda n: server.post("/v1/infill", template=f"abc<mask:{9 + n}>", steps=4), range(4))
        found = dict(zip(range(6), pool.map(lambda seed: texts(server, seed), range(6)), strict=True))
        assert all(other.status_code == 200 for other in others)
    assert found == expected


def test_streams_have_a_canvas_for_each_candidate(server: LiveServer) -> None:
    body = {"template": OPEN, "n": 3, "steps": 3, "seed": 5}
    streamed = server.post("/v1/infill", **body, stream=True).text
    events = [chunk.split("\n", 1) for chunk in streamed.strip().split("\n\n")]
    data = [(name.removeprefix("event: "), json.loads(rest.removeprefix("data: "))) for name, rest in events]
    canvases = [event for name, event in data if name == "canvas"]
    assert [canvas["index"] for canvas in canvases] == [0, 1, 2]
    results = server.post("/v1/infill", **body).json()["results"]
    for canvas, result in zip(canvases, results, strict=True):
        assert len(canvas["tokens"]) == len(result["text"])  # tokens are letters
    assert data[-1][0] == "response"
    assert data[-1][1]["results"] == results
    closed = server.post("/v1/infill", template="a<mask:2>", n=2, steps=2, stream=True).text
    assert closed.count("event: canvas") == 1


def test_completions_in_front_of_a_suffix(server: LiveServer) -> None:
    body = {"prompt": ["ab", "h"], "suffix": "cd", "min_tokens": 0, "max_tokens": 4, "n": 3, "seed": 3, "steps": 3}
    answer = server.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    lm, found = language_model(), [choice["text"] for choice in answer.json()["choices"]]
    expected = [
        text[len(prompt) : -2]
        for prompt in ("ab", "h")
        for text in lm.infill(f"{prompt}<mask:0..4>cd", n=3, sampler=Ancestral(3), seed=3).texts
    ]
    assert found == expected
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == ("length" if len(choice["text"]) == 4 else "stop")
    lines = server.post("/v1/completions", **body, stream=True).text.split("\n\n")[:-2]
    streamed = [json.loads(line.removeprefix("data: ")) for line in lines]
    for index, text in enumerate(expected):
        parts = [each["choices"][0] for each in streamed if each["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == text
    exact = server.post("/v1/completions", prompt="ab", suffix="cd", min_tokens=4, max_tokens=4, steps=3, seed=3).json()
    plain = server.post("/v1/completions", prompt="ab", suffix="cd", max_tokens=4, steps=3, seed=3).json()
    assert exact["choices"] == plain["choices"]


def test_lengths_can_match_the_pattern(server: LiveServer) -> None:
    """Drawn from the posterior, given that the length is one of those that can match."""
    template, seeds = "abc<mask:0..6>def", range(16)
    posterior = language_model().hole_lengths(template)
    share = {n: p for (n,), p in zip(posterior.lengths, posterior.probabilities, strict=True) if n in (2, 5)}
    among = posterior.where([{2, 5}])
    assert dict(zip(among.lengths, among.probabilities, strict=True)) == pytest.approx(
        {(n,): p / sum(share.values()) for n, p in share.items()}
    )
    with pytest.raises(ValueError, match="none can match the pattern"):
        posterior.where([{99}])
    body = {"template": template, "regex": "(gh){2,3}", "steps": 3, "n": len(seeds), "seed": 0}
    answer = server.post("/v1/infill", **body)
    assert answer.status_code == 200, answer.text
    found = [result["spans"][0]["text"] for result in answer.json()["results"]]
    assert set(found) <= {"ghgh", "ghghgh"}
    narrow = language_model().hole_lengths("abc<mask:4..6>def").where([{4, 6}])
    assert [len(text) for text in found] == [narrow.draw(seed)[0] for seed in seeds]
    told = server.post("/v1/infill", **{**body, "regex": "(gh){9}"})
    assert told.status_code == 400
    assert "no hole of 0 to 6 tokens can match the pattern '(gh){9}'" in told.json()["error"]["message"]
    apart = {"template": "a<mask:0..2>b<mask:0..2>c", "regex": ["[gh]+", None], "n": 8, "steps": 2, "seed": 0}
    answer = server.post("/v1/infill", **apart)
    assert answer.status_code == 200, answer.text
    for result in answer.json()["results"]:
        first, second = (span["text"] for span in result["spans"])
        assert first
        assert set(first) <= {"g", "h"}
        assert second
    told = server.post("/v1/infill", **{**apart, "regex": ["a"]})
    assert (told.status_code, "one per hole (2); got 1" in told.text) == (400, True)
    whole = server.post("/infill", input_prefix="abc", input_suffix="def", n_predict=6, grammar='root ::= "gh"+')
    assert whole.status_code == 200, whole.text
    assert set(whole.json()["content"]) == {"g", "h"}


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("infill", {"template": "a<mask:0..9>b<mask:0..9>c<mask:0..9>d"}, 400, "1,000 combinations of lengths"),
        ("infill", {"template": "a<mask:0..60>b"}, 400, "maximum context length is 48 tokens"),
        ("infill", {"template": "a<mask:5..3>b"}, 400, "from the smaller to the larger"),
        ("infill", {"template": "<mask:1..3>"}, 400, "no text is given around the holes"),
        ("completions", {"prompt": "a", "suffix": "b", "min_tokens": 9, "max_tokens": 3}, 422, "above max_tokens"),
        ("completions", {"prompt": "a", "min_tokens": 2}, 422, "min_tokens is not supported without a suffix"),
    ],
)
def test_what_cannot_be_told_is_one_sentence(
    server: LiveServer, path: str, body: dict[str, Any], status: int, told: str
) -> None:
    answer = server.post(f"/v1/{path}", **body)
    assert answer.status_code == status, answer.text
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("objective", [NextToken(), UniformDiffusion()], ids=["next token", "uniform noise"])
def test_models_without_lengths_say_so(objective: Any) -> None:
    with live_server(language_model(objective)) as served:
        for path, body in (
            ("/v1/infill", {"template": "a<mask:1..3>b"}),
            ("/v1/completions", {"prompt": "a", "suffix": "b", "min_tokens": 0, "max_tokens": 3}),
            ("/v1/fim/completions", {"prompt": "a", "suffix": "b"}),
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ):
            answer = served.post(path, **body)
            assert answer.status_code == 400, answer.text
            message = answer.json()["error"]["message"]
            assert "the length of a hole is found by models" in message or "does not see what follows" in message
        exact = {"min_tokens": 3, "max_tokens": 3, "steps": 2}
        answer = served.post("/v1/fim/completions", prompt="a", suffix="b", **exact)
        assert answer.status_code == (400 if isinstance(objective, NextToken) else 200)
        assert served.post("/v1/fim/completions", prompt="a", max_tokens=3).status_code == 200


def test_lengths_are_a_job_as_any_other() -> None:
    """It shares the engine with others, whose answers it does not change, and ends at its deadline."""
    lm = language_model()
    assert lm.tokenizer is not None
    template = TextCodec(lm.tokenizer, lm.vocab.mask_id).encode_template("abc<mask:0..6>def gh")
    expected = lm.hole_lengths("abc<mask:0..6>def gh")
    ids = canvas_ids(lm, 9, 1)
    with running_engine(lm) as running:
        work = generation_job(lm, ids, make_sampler(lm.denoiser, "default", 6), 7)
        lonely = PendingTasks([work])
        running.submit(lonely.tasks)
        (single,) = lonely.wait()
        waiting = PendingTasks([lengths_job(template), work, lengths_job(template), work])
        running.submit(waiting.tasks)
        first, one, second, other = waiting.wait()
        assert one.ids == other.ids == single.ids
        for found in (first, second):
            by_length = dict(zip(found.lengths, found.probabilities, strict=True))
            assert by_length == pytest.approx(dict(zip(expected.lengths, expected.probabilities, strict=True)))
        late = PendingTasks([lengths_job(template)], seconds=0)
        running.submit(late.tasks)
        assert isinstance(late.wait()[0], DeadlineError)
