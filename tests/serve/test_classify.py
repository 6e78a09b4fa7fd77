"""The server with a classifier: it answers what the library answers, whatever else is asked at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from labelled import bert_folder, classifier
from live_server import LiveServer, live_server
from unmask import Tokenizer
from unmask.classification import Classifier, ClassifierConfig, SequenceClassifier, load_encoder
from unmask.serve.limits import Limits

TEXTS = ["abcdef", "h", "a b c d", "ghgh" * 4]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(classifier(), limits=Limits(texts=8), classifies=True) as served:
        yield served


def test_it_answers_what_the_library_answers(server: LiveServer) -> None:
    answer = server.post("/v1/classify", texts=TEXTS)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"]) == ("classification", "tiny")
    expected = classifier()
    assert [result["label"] for result in body["results"]] == expected.predict(TEXTS)
    for result, shares in zip(body["results"], expected.predict_proba(TEXTS), strict=True):
        assert result["probabilities"] == pytest.approx(shares, rel=1e-6)
    assert [result["index"] for result in body["results"]] == [0, 1, 2, 3]


def test_vllms_clients(server: LiveServer) -> None:
    expected = classifier().predict_proba(TEXTS)
    for path, given, count in (("/classify", TEXTS, 4), ("/v1/classify", TEXTS[0], 1)):
        answer = server.post(path, model="tiny", input=given, priority=0).json()
        assert len(answer["results"]) == len(answer["data"]) == count
        for index, (entry, shares) in enumerate(zip(answer["data"], expected, strict=False)):
            assert (entry["index"], entry["num_classes"]) == (index, 3)
            assert entry["probs"] == pytest.approx(list(shares.values()), rel=1e-6)
            assert entry["label"] == answer["results"][index]["label"]
    assert server.post("/v1/classify", texts=TEXTS).json()["data"] is None
    assert server.post("/tokenize", prompt="ab").json()["max_model_len"] == 24


def test_many_requests_at_once_get_what_they_would_alone(server: LiveServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: server.post("/v1/classify", texts=[text]).json(), TEXTS * 8))
    expected = classifier().predict_proba(TEXTS) * 8
    for answer, shares in zip(answers, expected, strict=True):
        assert answer["results"][0]["probabilities"] == pytest.approx(shares, rel=1e-6)


def test_the_server_says_what_it_has(server: LiveServer) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["labels"] == ["no", "yes", "perhaps"]
    assert (card["objective"], card["max_length"], card["samplers"]) == ("classification", 24, [])
    assert set(server.http.get("/openapi.json").json()["paths"]) == {
        *("/health", "/ready", "/metrics", "/v1/models", "/v1/models/{model}", "/v1/classify", "/v1/tokenize"),
        *("/v1/detokenize", "/tokenize", "/detokenize"),
    }
    for page in ("/", "/docs"):
        assert "POST /v1/classify" in server.http.get(page).text.replace("</code>", "").replace("<code>", "")
    assert server.post("/v1/tokenize", text="ab").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({}, 422, "the field texts is missing"),
        ({"texts": ["a"], "input": "a"}, 422, "texts and input say what is meant twice"),
        ({"texts": []}, 422, "the field texts must be a list of at least 1"),
        ({"texts": [""]}, 422, "the field texts[0] must be a text of at least 1 characters"),
        ({"texts": ["  "]}, 400, "text 0 is empty: there is nothing to classify"),
        ({"texts": [["a", "b"]]}, 400, "text 0 must be one text, as this classifier was trained"),
        ({"texts": ["abc" * 20]}, 400, "1 of 1 rows have more than the 24 tokens that are read"),
        ({"texts": ["é" * 9]}, 400, "cannot be written"),
        ({"texts": ["a"] * 9}, 400, "this server allows texts up to 8; got 9"),
        ({"texts": ["a"], "model": "other"}, 404, "there is no model 'other' here"),
        ({"texts": ["a"], "text": "b"}, 422, "text"),
        ({"texts": 3}, 422, "the field texts must be a list"),
    ],
)
def test_bad_requests_are_one_sentence(server: LiveServer, body: dict[str, Any], status: int, sentence: str) -> None:
    answer = server.http.post("/v1/classify", json=body)
    assert answer.status_code == status, answer.text
    assert sentence in answer.json()["error"]["message"]


def test_long_texts_are_cut_if_that_is_asked_for(server: LiveServer) -> None:
    (result,) = server.post("/v1/classify", texts=["abc" * 20], too_long="cut").json()["results"]
    assert result["cut"]
    assert result["probabilities"] == pytest.approx(classifier().predict_proba(["abc" * 8])[0], rel=1e-6)


def test_a_classifier_does_not_generate_and_a_language_model_does_not_classify(server: LiveServer) -> None:
    answer = server.post("/v1/infill", template="a<mask>")
    assert answer.status_code == 404
    assert "/v1/classify" in answer.json()["error"]["message"]
    with live_server() as other:
        answer = other.post("/v1/classify", texts=["a"])
        assert answer.status_code == 404
        assert "`unmask serve` a classifier's folder to classify texts" in answer.json()["error"]["message"]


def test_numbers_and_both_strands() -> None:
    dna = classifier(labels=(), both_strands=True, tokenizer=Tokenizer.dna())
    with live_server(dna, classifies=True) as served:
        results = served.post("/v1/classify", texts=["AACCC", "GGGTT", "ACACA"]).json()["results"]
    values = [result["value"] for result in results]
    assert values == pytest.approx(dna.predict(["AACCC", "GGGTT", "ACACA"]))
    assert values[0] == pytest.approx(values[1])
    assert values[0] != pytest.approx(values[2])
    assert results[0]["label"] is None


def test_pairs_with_segments(tmp_path: Path) -> None:
    folder, _ = bert_folder(tmp_path / "bert")
    lm = load_encoder(folder)
    config = ClassifierConfig(lm.denoiser.config, ("no", "yes"), "first", True, 0.0, 32, ("a", "b"))
    network = SequenceClassifier(config)
    torch.nn.init.normal_(network.head.output.weight)
    assert lm.tokenizer is not None
    pairs = Classifier(network.double().eval(), lm.tokenizer)
    with live_server(pairs, classifies=True) as served:
        results = served.post("/v1/classify", texts=[["good", "bad film"], ["good bad", "film"]]).json()["results"]
    expected = pairs.predict_proba([("good", "bad film"), ("good bad", "film")])
    assert [result["probabilities"] for result in results] == [pytest.approx(each, rel=1e-6) for each in expected]
