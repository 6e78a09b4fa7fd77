"""Embeddings: the mean of hidden states, alone and in company, for every network; OpenAI's client."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import torch

from cached_setups import LENGTH, LLAMA, VOCAB
from engine_harness import PendingTasks, running_engine
from live_server import LiveServer, language_model, live_server
from unmask import MDLM, DiMambaConfig, DiTConfig, LanguageModel, MambaConfig, ModelConfig, NextToken, TimeConditioning
from unmask.backbones import BackboneConfig
from unmask.backbones.dit import LlamaBlock
from unmask.backbones.hf import HFBackboneConfig
from unmask.objectives import Objective
from unmask.serve._embeddings import _embedding_job, _PooledFeatures
from unmask.serve.limits import Limits

TEXTS = ["abc", "h", "abc abc def gh", "d" * 30]
DIT: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "max_length": LENGTH, "dropout": 0.0}
NETWORKS: dict[str, tuple[BackboneConfig, Objective]] = {
    "DiT": (DiTConfig(**DIT), MDLM()),
    "DiT with times": (DiTConfig(**DIT, time_conditioning=TimeConditioning(width=8)), MDLM()),
    "Llama": (DiTConfig(**DIT, llama=LlamaBlock(24, kv_heads=1)), MDLM()),
    "next token": (DiTConfig(**DIT, causal=True), NextToken()),
    "Hugging Face": (HFBackboneConfig(json.dumps(LLAMA), 1.0), MDLM()),
    "Mamba": (MambaConfig(width=12, depth=2), NextToken()),
    "DiMamba": (DiMambaConfig(width=12, depth=2, dropout=0.0), MDLM()),
}


def mean_of_features(lm: LanguageModel, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        vector = lm.denoiser.features(torch.tensor([ids]))[0].mean(0).double().numpy()
    return np.asarray(vector / np.linalg.norm(vector))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_alone_and_in_company(name: str) -> None:
    backbone, objective = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        denoiser = ModelConfig(VOCAB, backbone, objective).build().double().eval()
        for parameter in denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    lm = LanguageModel(denoiser)
    rows = [[0, 1, 2], [5, 6, 0, 1, 2, 3, 3], [1], [2, 0] * 9]
    with running_engine(lm) as running:
        # One object for each request, as in the route: their calls are shared all the same.
        waiting = PendingTasks([_embedding_job(_PooledFeatures(lm), ids) for ids in rows])
        running.submit(waiting.tasks)
        found = waiting.wait()
        assert "unmask_forward_passes_total 1.0" in running.metrics.render().decode()
        for ids, vector in zip(rows, found, strict=True):
            alone = PendingTasks([_embedding_job(_PooledFeatures(lm), ids)])
            running.submit(alone.tasks)
            np.testing.assert_allclose(alone.wait()[0], vector, atol=1e-9)
            np.testing.assert_allclose(vector, mean_of_features(lm, ids), atol=1e-9)
            assert np.linalg.norm(vector) == pytest.approx(1)
    assert not np.allclose(found[0], found[1])


def test_openais_client(server: LiveServer) -> None:
    lm = language_model()
    assert lm.tokenizer is not None
    expected = [mean_of_features(lm, lm.tokenizer.encode(text)) for text in TEXTS]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS)  # in base64
        for index, (each, vector) in enumerate(zip(answer.data, expected, strict=True)):
            assert each.index == index
            np.testing.assert_allclose(each.embedding, vector, atol=1e-6)
        assert answer.usage.prompt_tokens == sum(map(len, TEXTS))
        plain = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
        np.testing.assert_allclose(plain.data[0].embedding, expected[0], atol=1e-9)
        ids = lm.tokenizer.encode(TEXTS[0])
        for given, count in ((ids, 1), ([ids, ids], 2)):
            by_ids = client.embeddings.create(model="tiny", input=given, encoding_format="float")
            assert len(by_ids.data) == count
            np.testing.assert_allclose(by_ids.data[-1].embedding, expected[0], atol=1e-9)


def test_base64_is_float32(server: LiveServer) -> None:
    raw = server.post("/v1/embeddings", input="abc", encoding_format="base64").json()["data"][0]["embedding"]
    plain = server.post("/v1/embeddings", input="abc").json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), np.float32(plain))


def test_many_requests_with_others_between(server: LiveServer) -> None:
    expected = {text: server.post("/v1/embeddings", input=text).json()["data"][0]["embedding"] for text in TEXTS}
    with ThreadPoolExecutor(8) as pool:
        others = pool.map(lambda n: server.post("/v1/infill", template=f"abc<mask:{9 + n}>", steps=8), range(6))
        answers = list(pool.map(lambda text: server.post("/v1/embeddings", input=text).json(), TEXTS * 4))
        assert all(other.status_code == 200 for other in others)
    for text, answer in zip(TEXTS * 4, answers, strict=True):
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected[text], atol=1e-9)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({}, 422, "the field input is missing"),
        ({"input": ""}, 422, "the field input"),
        ({"input": []}, 422, "the field input"),
        ({"input": [[]]}, 422, "the field input"),
        ({"input": ["a", 3]}, 422, "the field input"),
        ({"input": [999]}, 400, "the token 999 is not one of"),
        ({"input": ["a"] * 9}, 400, "this server allows texts up to 8; got 9"),
        ({"input": "a" * 49}, 400, "maximum context length is 48 tokens"),
        ({"input": "a", "dimensions": 4}, 422, "dimensions is not supported"),
        ({"input": "a", "encoding_format": "int8"}, 422, "encoding_format"),
        ({"input": "a", "model": "other"}, 404, "there is no model 'other' here"),
    ],
)
def test_refused(body: dict[str, Any], status: int, told: str, small: LiveServer) -> None:
    answer = small.http.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    assert told in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def small() -> Any:
    with live_server(limits=Limits(texts=8)) as served:
        yield served
