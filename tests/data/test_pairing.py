"""Pairs as rows: the prompt is frozen, the answer ends, and a batch is the same however it is split."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import denoiser
from unmask.config import from_json, to_json
from unmask.data.columns import PromptAnswer
from unmask.data.corpus import PrepareOptions, prepare
from unmask.data.loader import Layout, Loader, Pairs
from unmask.data.pairing import STEP, EndOfText, Padding
from unmask.data.sources import SourceOptions
from unmask.diffusion.denoise import Around
from unmask.evaluation.likelihood import score_rows
from unmask.objectives import D3PM, MDLM, SEDD, AnyObjective, BlockDiffusion, UniformDiffusion
from unmask.types import Batch

END = 0


class Stream:
    """Tokens are numbered 1, 2, ..., so that a row says where it is from; every pair ends with END."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        number = itertools.count(1)
        self.pairs = [([next(number) for _ in range(p)], [next(number) for _ in range(a)]) for p, a in sizes]
        self.ids = np.array([id_ for prompt, answer in self.pairs for id_ in (*prompt, *answer, END)])
        self.ends = np.cumsum([p + a + 1 for p, a in sizes])
        self.given = np.array([p for p, _ in sizes])
        self.tokens = len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


def kept(prompt: list[int], answer: list[int], length: int) -> tuple[list[int], list[int]]:
    """What should be left of a pair, END included, by the rules of `PairRows`."""
    answer = [*answer, END]
    if len(prompt) >= length:
        room = min(len(answer), length // 2)
        prompt = prompt[len(prompt) - (length - room) :]
    return prompt, answer[: length - len(prompt)]


def rows(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """The frozen tokens of each row, the counted ones and those on padding."""
    assert batch.frozen is not None
    valid = torch.ones_like(batch.frozen) if batch.valid is None else batch.valid
    frozen, counted = batch.frozen, batch.counted
    parts = zip(batch.tokens, frozen, counted, valid, strict=True)
    return [(row[f].tolist(), row[c].tolist(), row[~v].tolist()) for row, f, c, v in parts]


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(sizes=sizes, length=st.integers(2, 50), batch_size=st.integers(1, 7), seed=st.integers(0, 9))
@pytest.mark.parametrize("end", [EndOfText(), Padding()])
def test_an_epoch_has_every_pair_once(
    sizes: list[tuple[int, int]], length: int, batch_size: int, seed: int, end: EndOfText | Padding
) -> None:
    stream = Stream(sizes)
    loader = Loader(stream, Pairs(length, end), batch_size, seed)
    expected = [kept(prompt, answer, length) for prompt, answer in stream.pairs]
    seen = []
    for step in range(-(-len(sizes) // batch_size)):
        batch = loader.batch(step)
        width, longest = batch.tokens.shape[1], 0
        for prompt, answer, padding in rows(batch):
            rest = width - len(prompt) - len(answer)
            assert len(padding) == rest
            if isinstance(end, EndOfText):
                assert rest == 0
                while answer[-2:] == [END, END]:
                    answer.pop()
            longest = max(longest, len(prompt) + len(answer))
            seen.append((prompt, answer))
        assert longest <= width <= min(length, longest + STEP - 1)
        assert width % STEP == 0 or width == length
    assert all(row in expected for row in seen)
    assert sorted(seen[: len(sizes)]) == sorted(expected)


@settings(max_examples=40)
@given(sizes=sizes, cuts=st.lists(st.integers(0, 12), max_size=4), step=st.integers(0, 20))
@pytest.mark.parametrize("end", [EndOfText(), Padding()])
def test_any_split_of_a_batch_is_the_batch(
    sizes: list[tuple[int, int]], cuts: list[int], step: int, end: EndOfText | Padding
) -> None:
    loader = Loader(Stream(sizes), Pairs(48, end), 12)
    edges = sorted({0, 12, *cuts})
    parts = [loader.batch(step, a, b - a) for a, b in itertools.pairwise(edges)]
    whole = loader.batch(step)
    for look in (lambda b: b.tokens, lambda b: b.frozen, lambda b: b.counted):
        assert torch.equal(torch.cat([look(part) for part in parts]), look(whole))
    assert [part.first_row for part in parts] == edges[:-1]
    assert all(part.global_rows == 12 for part in parts)


@given(sizes=sizes, length=st.integers(2, 50))
def test_what_is_cut_is_counted(sizes: list[tuple[int, int]], length: int) -> None:
    stream = Stream(sizes)
    left = [kept(prompt, answer, length) for prompt, answer in stream.pairs]
    told = Loader(stream, Pairs(length), 1).cut
    assert told is not None
    assert told.pairs == len(sizes)
    assert told.answers == sum(answer[-1] != END for _, answer in left)
    whole = [prompt for prompt, _ in stream.pairs]
    assert told.prompts == sum(a != b for (a, _), b in zip(left, whole, strict=True))
    assert str(told).startswith(f"of {len(sizes)} pairs, {told.answers} lose the end of the answer")


@given(sizes=sizes, data=st.data())
def test_in_order_a_pair_is_by_itself(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    stream = Stream(sizes)
    loader = Loader(stream, Pairs(30), 4)
    first = data.draw(st.integers(0, len(sizes) - 1))
    found = rows(loader.in_order(first, 4))
    expected = [kept(prompt, answer, 30) for prompt, answer in stream.pairs]
    assert [row[:2] for row in found] == expected[first : first + 4]
    assert loader.rows_in_order == loader.rows == len(sizes)
    spans = zip(*loader.spans_in_order(first, 4), strict=True)
    assert [stream.read(a, b).tolist() for a, b in spans] == [p + a for p, a in expected[first : first + 4]]


class Spy(Around):
    """A denoiser that remembers what it was shown first."""

    z: Tensor | None = None

    def __call__(self, z: Tensor, *args: Any, **context: Any) -> Tensor:
        self.z = z if self.z is None else self.z
        return self.denoise(z, *args, **context)


@pytest.mark.parametrize(
    "objective",
    [MDLM(), MDLM(exact_counts=True), D3PM(), SEDD(), UniformDiffusion(), BlockDiffusion(block=4)],
    ids=repr,
)
@pytest.mark.parametrize("end", [EndOfText(), Padding()])
def test_prompts_are_never_noised_and_answers_always_may_be(
    objective: AnyObjective, end: EndOfText | Padding
) -> None:
    loader = Loader(Stream([(3, 2), (1, 5), (4, 4), (2, 1)]), Pairs(12, end), 4)
    batch = loader.batch(0)
    touched = torch.zeros_like(batch.counted)
    for step in range(40):
        spy = Spy(denoiser(objective, size=40, mask=39))
        nats = objective.token_nll(spy, batch, torch.Generator().manual_seed(step))
        assert spy.z is not None
        noisy = spy.z[:, :12] != batch.tokens
        assert not bool((noisy & ~batch.counted).any())
        assert float(nats[~batch.counted].abs().sum()) == 0
        touched |= noisy
    assert torch.equal(touched, batch.counted)
    assert batch.frozen is not None
    assert bool(batch.frozen.any())


def test_scores_do_not_depend_on_how_rows_are_filled() -> None:
    objective, stream = MDLM(), Stream([(3, 2), (1, 5), (2, 1)])

    def score(layout: Layout) -> tuple[float, int]:
        loader = Loader(stream, layout, 2)
        found = score_rows(denoiser(objective, 40, 39), objective, loader, None, None, replicates=4, seed=0)
        return found.nats, found.tokens

    assert score(Pairs(12)) == score(Pairs(12, Padding()))
    assert score(Pairs(12))[1] == (2 + 5 + 1) + 3


def test_a_prepared_corpus_is_read(tmp_path: Path) -> None:
    pairs = [(f"{i}?", "yes" * (i % 3 + 1)) for i in range(20)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in pairs))
    options = PrepareOptions(SourceOptions(pairs=PromptAnswer()), share=0.2)
    splits = prepare([str(file)], tmp_path / "out", "bytes", options).splits
    found = [
        (bytes(prompt).decode(), bytes(answer).rstrip(b"\0").decode())
        for split in splits.values()
        for prompt, answer, _ in rows(Loader(split, Pairs(64), split.documents).batch(0))
    ]
    assert sorted(found) == sorted(pairs)


def test_what_cannot_be_read_as_pairs_is_refused(tmp_path: Path) -> None:
    stream = Stream([(3, 2)])
    with pytest.raises(
        ValueError, match=r"^a row of a prompt and an answer has a length of at least 2; got 1$"
    ):
        Loader(stream, Pairs(1), 1)
    (tmp_path / "a.txt").write_text("text\n" * 500)
    plain = prepare([str(tmp_path / "a.txt")], tmp_path / "out", "bytes").splits["train"]
    with pytest.raises(ValueError, match=r"^this corpus is not one of pairs; prepare it with source\.pairs="):
        Loader(plain, Pairs(8), 1)
    stream.ends, stream.given = stream.ends[:0], stream.given[:0]
    with pytest.raises(ValueError, match=r"^this split has no pairs; prepare it from more pairs or with"):
        Loader(stream, Pairs(8), 1)


def test_the_layout_is_json() -> None:
    for layout in (Pairs(), Pairs(64, Padding())):
        assert from_json(Layout, to_json(layout)) == layout
    assert Pairs().end == EndOfText()
