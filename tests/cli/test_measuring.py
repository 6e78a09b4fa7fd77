from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def test_score(folder: str, command: Callable[..., Any]) -> None:
    done = command("score", folder, "abc", "a b c", "--draws", "32", "--json")
    scores = json.loads(done.out)["scores"]
    assert [score["text"] for score in scores] == ["abc", "a b c"]
    assert scores[1]["tokens"] == 5
    assert "± " in command("score", folder, "abc").out
