"""`unmask push` with the hub's real client, and a stand-in for the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml

import unmask
from fake_hub import TOKEN, FakeHub, fake_hub
from unmask.pretrained import CardMetadata, EvalResult

Command = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client itself


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # a protocol of another service
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with fake_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


@pytest.fixture
def model(folder: str, tmp_path: Path) -> Path:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "notes.txt").write_text("not for others")
    return copy


def front_matter(card: bytes) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.decode().split("---\n")[1])
    return found


def test_a_model_is_one_commit(hub: FakeHub, model: Path, command: Command, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(
        json.dumps({"texts": [{"name": "ptb", "perplexity": 31.5, "perplexity_error": 0.2}]})
    )
    options = ("--license", "mit", "--language", "en", "--dataset", "my/data", "--results", str(tmp_path / "eval.json"))
    done = command("push", str(model), "me/tiny", *options, "--message", "First")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{hub.url}/me/tiny/commit/1\n"
    assert hub.private == {"me/tiny": True}
    assert hub.messages == ["First"]
    files = hub.files["me/tiny"]
    assert "notes.txt" not in files
    assert all(files[name] == (model / name).read_bytes() for name in files.keys() - {"README.md"})
    about = front_matter(files["README.md"])
    assert (about["license"], about["language"], about["datasets"]) == ("mit", ["en"], ["my/data"])
    assert about["model-index"][0]["results"][0]["metrics"][0]["value"] == 31.5
    assert "| perplexity on ptb (upper bound) | 31.5 ± 0.2 |" in files["README.md"].decode()
    assert (model / "README.md").read_bytes() != files["README.md"]  # what is here stays as it is
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in files.items():
        (copy / name).write_bytes(content)
    assert unmask.load(copy).sample(1, 5).ids == unmask.load(model).sample(1, 5).ids
    again = command("push", str(model), "me/tiny", "--public")
    assert again.code == 0
    assert hub.private == {"me/tiny": True}  # one that exists stays as it is
    assert command("push", str(model), "me/open", "--public").code == 0
    assert hub.private["me/open"] is False


def test_a_dry_run_uploads_nothing(hub: FakeHub, model: Path, command: Command) -> None:
    done = command("push", str(model), "me/tiny", "--license", "mit", "--dry-run")
    assert done.code == 0
    assert done.out.startswith("me/tiny, private:\n  README.md ")
    assert 'license: "mit"' in done.out
    assert "model.safetensors" in done.out
    assert hub.private == {}


def test_cards_keep_what_they_say() -> None:
    front = "---\nlicense: mit\ntags:\n- mine\nmodel-index:\n- name: x\n  results:\n  - task: {}\n---\n"
    card = f"{front}# Title\n\n## Results\n\n| a | b |\n|---|---|\n| c | 1 |\n"
    result = EvalResult("ptb", "perplexity", 2.0)
    added = CardMetadata(license="Apache-2.0", results=(result,)).added_to(card)
    about = front_matter(added.encode())
    assert about["license"] == "apache-2.0"
    assert about["tags"] == ["mine"]
    assert [each.get("dataset", {}).get("name") for each in about["model-index"][0]["results"]] == [None, "ptb"]
    assert added.endswith("| c | 1 |\n| perplexity on ptb | 2 |\n")
    assert CardMetadata().added_to(card) == card
    assert front_matter(CardMetadata(license="mit").added_to("# By hand\n").encode()) == {"license": "mit"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model, patch: patch.delenv("HF_TOKEN"), "the hub takes models with a token only: run `hf auth login`"),
        (lambda model, patch: patch.setenv("HF_TOKEN", "wrong"), "the hub did not take me/tiny: "),
        (lambda model, patch: patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9"), "the hub cannot be reached from here"),
        (lambda model, patch: (model / "config.json").unlink(), "is not a model folder"),
        (lambda model, patch: (model / "model.safetensors").unlink(), "has no weights in safetensors"),
        (lambda model, patch: (model / "model.safetensors").write_bytes(b"12345678"), "is damaged: its SHA-256"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    change: Callable[[Path, pytest.MonkeyPatch], Any],
    sentence: str,
    hub: FakeHub,
    model: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(model, monkeypatch)
    done = command("push", str(model), "me/tiny")
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert hub.files.get("me/tiny", {}) == {}


def test_names_results_and_refusals(hub: FakeHub, model: Path, command: Command, tmp_path: Path) -> None:
    assert "a repository is written OWNER/NAME" in command("push", str(model), "tiny", "--dry-run").err
    (tmp_path / "eval.json").write_text("{}")
    refused = command("push", str(model), "me/tiny", "--results", str(tmp_path / "eval.json"))
    assert "has no perplexities of texts, as `unmask eval --out` writes them" in refused.err
    hub.refused = "you may not write here"
    refused = command("push", str(model), "me/tiny")
    assert refused.code == 2
    assert "the hub did not take me/tiny" in refused.err
    assert hub.files["me/tiny"] == {}
