"""What is looked for on the hub, and that nobody waits for one that does not answer."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

import unmask
from unmask.cli import main
from unmask.io import hub
from unmask.io.hub import UNREACHABLE_MESSAGE, _is_reachable, hub_session, parse_repo_id


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub whose port is closed; what asks somebody else fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "_retry_after", {})
    monkeypatch.chdir(tmp_path)


def test_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for text, expected in (
        ("kuleshov-group/mdlm-owt", "kuleshov-group/mdlm-owt"),
        ("hub:gpt2", "gpt2"),
        ("hub:mine/model", "mine/model"),
        ("mine/model", None),
        ("runs/uni", None),
        ("./a/b", None),
        ("/a/b", None),
        ("a/b/c", None),
        ("gpt2", None),
    ):
        assert parse_repo_id(text) == expected, text


def test_nobody_answers(nobody: None) -> None:
    assert not _is_reachable()
    with hub_session("some/name") as online:
        assert not online
        assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in os.environ
    with hub_session(".") as online:  # what is here is not looked for
        assert online


def test_somebody_answers(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert _is_reachable()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not _is_reachable()


def test_a_model_that_is_not_to_be_had_is_told_at_once(nobody: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^org/name is neither a folder nor .*: {UNREACHABLE_MESSAGE}$"):
        unmask.load("org/name")
    (tmp_path / "mine").mkdir()
    for name in ("runs/uni", "mine/model"):
        with pytest.raises(ValueError, match=rf"^there is no folder {name} \("):
            unmask.load(name)


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", "hub:some/thing", "--out", "corpus"],
        ["prepare", "text.txt", "--tokenizer", "hub:some/thing", "--out", "corpus"],
    ],
)
def test_commands_do_not_wait(
    words: list[str], nobody: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("text")
    monkeypatch.setattr(sys, "argv", ["unmask", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert "some/thing" in err
    assert UNREACHABLE_MESSAGE in err
    assert err.count("\n") == 1


def test_a_reference_model_that_cannot_be_reached_fails_at_once(nobody: None) -> None:
    pytest.importorskip("transformers")
    from unmask.evaluation.reference_model import CausalReferenceModel

    for name in ("nope", "org/nope", "hub:org/nope"):
        with pytest.raises(ValueError, match=f"nope is neither here nor on the hub: {UNREACHABLE_MESSAGE}$"):
            CausalReferenceModel.load(name)
    with pytest.raises(ValueError, match=r"^there is no reference model runs/nope: it is neither a folder"):
        CausalReferenceModel.load("runs/nope")
