"""The real client of OpenAI, against a live server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from live_server import LiveServer, language_model, live_server
from unmask import Ancestral
from unmask.serve.limits import Limits


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        live_server(token="secret", limits=Limits(steps=100)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as found,
    ):
        yield found


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for unknown in ("gpt-9", "org/gpt-9"):
        with pytest.raises(openai.NotFoundError, match=f"there is no model '{unknown}' here") as found:
            client.models.retrieve(unknown)
        assert found.value.code == "model_not_found"


def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny",
        prompt="ab",
        suffix="cd",
        max_tokens=6,
        n=2,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["\n\n"],
        logprobs=1,
        extra_body={"steps": 6, "sampler": "confidence"},
    )
    assert len(done.choices) == 2
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 12)
    assert done.object == "text_completion"
    assert all(choice.finish_reason in ("length", "stop") for choice in done.choices)


def test_the_seed_gives_the_librarys_text(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt="ab", max_tokens=6, seed=4, extra_body={"steps": 5})
    expected = language_model().sample(length=8, prompt="ab", sampler=Ancestral(5), seed=4).text
    assert f"ab{done.choices[0].text}" == expected


def test_streams(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="ab", max_tokens=9, seed=4).choices[0].text
    chunks = list(client.completions.create(model="tiny", prompt="ab", max_tokens=9, seed=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    drafts = [chunk.choices[0].model_extra["draft"] for chunk in chunks]  # type: ignore[index]
    assert "<mask:" in drafts[0]
    assert drafts[-1] == f"ab{whole}"


def test_errors_are_the_clients_own(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here"):
        client.completions.create(model="gpt-9", prompt="ab")
    with pytest.raises(openai.BadRequestError, match="this server allows steps up to 100; got 101"):
        client.completions.create(model="tiny", prompt="ab", extra_body={"steps": 101})
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        client.completions.create(model="tiny", prompt="ab", temperature=-1)
    with pytest.raises(openai.UnprocessableEntityError, match="presence_penalty is not supported"):
        client.completions.create(model="tiny", prompt="ab", presence_penalty=1)
    with pytest.raises(openai.UnprocessableEntityError, match="stepps"):
        client.completions.create(model="tiny", prompt="ab", extra_body={"stepps": 3})
    with pytest.raises(openai.AuthenticationError, match="token"):
        client.with_options(api_key="wrong").completions.create(model="tiny", prompt="ab")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 48 tokens") as found:
        client.completions.create(model="tiny", prompt="ab", max_tokens=256)
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="this model has no chat template, so it cannot chat"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "ab"}])
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions is not supported"):
        client.embeddings.create(model="tiny", input="ab", dimensions=4)
    with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions answers"):
        client.responses.create(model="tiny", input="ab")
