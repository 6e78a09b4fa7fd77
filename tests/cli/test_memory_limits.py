"""What cannot be done is told before anything is, in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tiny_models
import unmask
from unmask.hardware import memory as room
from unmask.sampling import RandomOrder

MILLION, HUGE = str(10**6), str(10**20)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["sample", "{}", "--length", str(10**11)],
            "1 text of 100,000,000,000 tokens would need about 13 TB",
        ),
        (["sample", "{}", "--length", HUGE], "are available"),
        (["sample", "{}", "--n", str(10**12)], "1,000,000,000,000 texts of 16 tokens would need about"),
        (["sample", "{}", "--steps", HUGE], "steps must be a whole number from 1 to 1,048,576"),
        (["infill", "{}", "a<mask>", "--n", str(10**12)], "generate fewer or shorter texts"),
        (["infill", "{}", "<mask:99999999>"], "a hole must have 1 to 1,000,000 tokens"),
        (["infill", "{}", f"<mask:{'9' * 5000}>"], "a hole must have 1 to 1,000,000 tokens"),
        (
            ["infill", "{}", f"<mask:{MILLION}>" * 3],
            "at most 1,000,000 tokens together; these have 3,000,000",
        ),
        (["complete", "{}", "a", "b", "--n", str(10**12)], "2,000,000,000,000 texts of 64 tokens"),
        (["complete", "{}", "a", "--length", HUGE], "are available"),
        (["score", "{}", "abc", "--draws", HUGE], "and at most 1,048,576; got 1000000"),
        (["eval-samples", "{}", "--n", str(10**12), "--steps", "2"], "generate fewer or shorter texts"),
        (["eval-samples", "{}", "--steps", HUGE], "steps must be a whole number from 1 to 1,048,576"),
        (["sample", "{}", "--temperature", "nan"], "got nan"),
        (["sample", "{}", "--cfg-scale", "inf"], "got inf"),
        (["sample", "{}", "--seed", HUGE], "a seed must be 0 or above and below 2^63"),
        (["sample", ""], "MODEL must name a file or folder; got an empty string"),
    ],
)
def test_too_much_is_one_sentence(words: list[str], sentence: str, folder: str, command: Callable[..., Any]) -> None:
    done = command(*(word.replace("{}", folder) for word in words))
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_what_fits_is_decided_by_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = unmask.LanguageModel(tiny_models.tiny_denoiser(unmask.MDLM()))
    monkeypatch.setattr(room, "_available_memory", lambda: 10**6)
    assert len(lm.sample(2, 5).ids) == 2
    with pytest.raises(ValueError, match="1,000 texts of 12 tokens would need about 14 MB"):
        lm.sample(1000)
    monkeypatch.setattr(room, "_available_memory", lambda: None)  # where no system tells
    assert len(lm.sample(1000, sampler=unmask.RandomOrder(1)).ids) == 1000


def test_the_memory_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    whole = room._available_memory()
    assert whole is not None
    for text, expected in (("123456\n", 123456), ("max\n", None)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(room, "_CGROUP", tmp_path)
        found = room._available_memory()
        assert found == expected or (expected is None and found is not None and found >= whole)


def test_more_steps_than_places_change_nothing() -> None:
    lm = unmask.LanguageModel(tiny_models.tiny_denoiser(unmask.MDLM()))
    texts = [lm.sample(2, sampler=RandomOrder(steps), seed=1).ids for steps in (tiny_models.LENGTH, 40, 1 << 20)]
    assert texts[0] == texts[1] == texts[2]


def test_too_many_passes_are_refused(folder: str, command: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "text.txt").write_text("abc abc " * 20)
    done = command("eval", folder, str(tmp_path / "text.txt"), "--replicates", str(10**9))
    assert (done.code, done.err) == (2, "unmask: replicates are at most 4,096; got 1,000,000,000\n")
