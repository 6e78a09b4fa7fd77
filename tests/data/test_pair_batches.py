"""Pairs as rows: the prompt is frozen, the completion ends, and a batch is the same however it is split."""

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

from chat_models import GOLDEN
from tiny_models import tiny_denoiser
from unmask.config import from_json, to_json
from unmask.data.chat import load_chat_template
from unmask.data.corpus import PrepareConfig, prepare
from unmask.data.loader import Loader, PromptCompletionRows, RowLayout
from unmask.data.loader.prompt_completion import _PAD_MULTIPLE, PadIgnored, PadWithEos
from unmask.data.readers import ChatRecord, PromptCompletion, SourceConfig
from unmask.data.tokenizers import Tokenizer
from unmask.diffusion.denoiser import DenoiserWrapper
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.objectives import D3PM, MDLM, SEDD, BlockDiffusion, Objective, UniformDiffusion
from unmask.types import Batch

END = 0


class Stream:
    """Tokens are numbered 1, 2, ..., so that a row says where it is from; every pair ends with END."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        number = itertools.count(1)
        self.pairs = [([next(number) for _ in range(p)], [next(number) for _ in range(a)]) for p, a in sizes]
        self.ids = np.array([id_ for prompt, completion in self.pairs for id_ in (*prompt, *completion, END)])
        self.document_ends = np.cumsum([p + a + 1 for p, a in sizes])
        self.prompt_lengths = np.array([p for p, _ in sizes])
        self.num_tokens = len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


def kept(prompt: list[int], completion: list[int], length: int) -> tuple[list[int], list[int]]:
    """What should be left of a pair, END included, by the rules of `PromptCompletionRows`."""
    completion = [*completion, END]
    if len(prompt) >= length:
        room = min(len(completion), length // 2)
        prompt = prompt[len(prompt) - (length - room) :]
    return prompt, completion[: length - len(prompt)]


def rows(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """The frozen tokens of each row, the counted ones and those on padding."""
    assert batch.prompt_mask is not None
    valid = torch.ones_like(batch.prompt_mask) if batch.valid is None else batch.valid
    frozen, counted = batch.prompt_mask, batch.loss_mask
    parts = zip(batch.tokens, frozen, counted, valid, strict=True)
    return [(row[f].tolist(), row[c].tolist(), row[~v].tolist()) for row, f, c, v in parts]


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(sizes=sizes, length=st.integers(2, 50), batch_size=st.integers(1, 7), seed=st.integers(0, 9))
@pytest.mark.parametrize("end", [PadWithEos(), PadIgnored()])
def test_an_epoch_has_every_pair_once(
    sizes: list[tuple[int, int]], length: int, batch_size: int, seed: int, end: PadWithEos | PadIgnored
) -> None:
    stream = Stream(sizes)
    loader = Loader(stream, PromptCompletionRows(length, end), batch_size, seed)
    expected = [kept(prompt, completion, length) for prompt, completion in stream.pairs]
    seen = []
    for step in range(-(-len(sizes) // batch_size)):
        batch = loader.batch(step)
        width, longest = batch.tokens.shape[1], 0
        for prompt, completion, padding in rows(batch):
            rest = width - len(prompt) - len(completion)
            assert len(padding) == rest
            if isinstance(end, PadWithEos):
                assert rest == 0
                while completion[-2:] == [END, END]:
                    completion.pop()
            longest = max(longest, len(prompt) + len(completion))
            seen.append((prompt, completion))
        assert longest <= width <= min(length, longest + _PAD_MULTIPLE - 1)
        assert width % _PAD_MULTIPLE == 0 or width == length
    assert all(row in expected for row in seen)
    assert sorted(seen[: len(sizes)]) == sorted(expected)


@settings(max_examples=40)
@given(sizes=sizes, cuts=st.lists(st.integers(0, 12), max_size=4), step=st.integers(0, 20))
@pytest.mark.parametrize("end", [PadWithEos(), PadIgnored()])
def test_any_split_of_a_batch_is_the_batch(
    sizes: list[tuple[int, int]], cuts: list[int], step: int, end: PadWithEos | PadIgnored
) -> None:
    loader = Loader(Stream(sizes), PromptCompletionRows(48, end), 12)
    edges = sorted({0, 12, *cuts})
    parts = [loader.batch(step, a, b - a) for a, b in itertools.pairwise(edges)]
    whole = loader.batch(step)
    for look in (lambda b: b.tokens, lambda b: b.prompt_mask, lambda b: b.loss_mask):
        assert torch.equal(torch.cat([look(part) for part in parts]), look(whole))
    assert [part.row_offset for part in parts] == edges[:-1]
    assert all(part.resolved_global_batch_size == 12 for part in parts)


@given(sizes=sizes, length=st.integers(2, 50))
def test_what_is_cut_is_counted(sizes: list[tuple[int, int]], length: int) -> None:
    stream = Stream(sizes)
    left = [kept(prompt, completion, length) for prompt, completion in stream.pairs]
    told = PromptCompletionRows(length).bind(stream).truncation_stats()
    assert told is not None
    assert told.num_pairs == len(sizes)
    assert told.truncated_completions == sum(completion[-1] != END for _, completion in left)
    whole = [prompt for prompt, _ in stream.pairs]
    assert told.truncated_prompts == sum(a != b for (a, _), b in zip(left, whole, strict=True))
    assert str(told).startswith(f"of {len(sizes)} pairs, {told.truncated_completions} lose the end of the completion")


@given(sizes=sizes, data=st.data())
def test_in_order_a_pair_is_by_itself(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    stream = Stream(sizes)
    loader = Loader(stream, PromptCompletionRows(30), 4)
    first = data.draw(st.integers(0, len(sizes) - 1))
    found = rows(loader.sequential_batch(first, 4))
    expected = [kept(prompt, completion, 30) for prompt, completion in stream.pairs]
    assert [row[:2] for row in found] == expected[first : first + 4]
    assert loader.num_sequential_rows == loader.num_rows == len(sizes)
    spans = zip(*loader.sequential_spans(first, 4), strict=True)
    assert [stream.read(a, b).tolist() for a, b in spans] == [p + a for p, a in expected[first : first + 4]]


class Spy(DenoiserWrapper):
    """A denoiser that remembers what it was shown first."""

    z: Tensor | None = None

    def __call__(self, z: Tensor, *args: Any, **options: Any) -> Tensor:
        self.z = z if self.z is None else self.z
        return self.denoiser(z, *args, **options)


@pytest.mark.parametrize(
    "objective",
    [MDLM(), MDLM(exact_mask_counts=True), D3PM(), SEDD(), UniformDiffusion(), BlockDiffusion(block_size=4)],
    ids=repr,
)
@pytest.mark.parametrize("end", [PadWithEos(), PadIgnored()])
def test_prompts_are_never_noised_and_answers_always_may_be(objective: Objective, end: PadWithEos | PadIgnored) -> None:
    loader = Loader(Stream([(3, 2), (1, 5), (4, 4), (2, 1)]), PromptCompletionRows(12, end), 4)
    batch = loader.batch(0)
    touched = torch.zeros_like(batch.loss_mask)
    for step in range(40):
        spy = Spy(tiny_denoiser(objective, size=40, mask=39))
        nats = objective.token_nll(spy, batch, torch.Generator().manual_seed(step))
        assert spy.z is not None
        noisy = spy.z[:, :12] != batch.tokens
        assert not bool((noisy & ~batch.loss_mask).any())
        assert float(nats[~batch.loss_mask].abs().sum()) == 0
        touched |= noisy
    assert torch.equal(touched, batch.loss_mask)
    assert batch.prompt_mask is not None
    assert bool(batch.prompt_mask.any())


def test_scores_do_not_depend_on_how_rows_are_filled() -> None:
    objective, stream = MDLM(), Stream([(3, 2), (1, 5), (2, 1)])

    def score(layout: RowLayout) -> tuple[float, int]:
        loader = Loader(stream, layout, 2)
        found = score_corpus(tiny_denoiser(objective, 40, 39), objective, loader, EvalConfig(replicates=4))
        return found.nats, found.tokens

    assert score(PromptCompletionRows(12)) == score(PromptCompletionRows(12, PadIgnored()))
    assert score(PromptCompletionRows(12))[1] == (2 + 5 + 1) + 3


def test_a_prepared_corpus_is_read(tmp_path: Path) -> None:
    pairs = [(f"{i}?", "yes" * (i % 3 + 1)) for i in range(20)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p, "completion": a}) for p, a in pairs))
    options = PrepareConfig(SourceConfig(pair_format=PromptCompletion()), validation_fraction=0.2)
    splits = prepare([str(file)], tmp_path / "out", "bytes", options).splits
    found = [
        (bytes(prompt).decode(), bytes(completion).rstrip(b"\0").decode())
        for split in splits.values()
        for prompt, completion, _ in rows(Loader(split, PromptCompletionRows(64), split.num_documents).batch(0))
    ]
    assert sorted(found) == sorted(pairs)


def test_what_cannot_be_read_as_pairs_is_refused(tmp_path: Path) -> None:
    stream = Stream([(3, 2)])
    with pytest.raises(ValueError, match=r"^a row of a prompt and a completion has a length of at least 2; got 1$"):
        Loader(stream, PromptCompletionRows(1), 1)
    (tmp_path / "a.txt").write_text("text\n" * 500)
    plain = prepare([str(tmp_path / "a.txt")], tmp_path / "out", "bytes").splits["train"]
    with pytest.raises(ValueError, match=r"^this corpus is not one of pairs; prepare it with source\.pair_format="):
        Loader(plain, PromptCompletionRows(8), 1)
    stream.document_ends, stream.prompt_lengths = stream.document_ends[:0], stream.prompt_lengths[:0]
    with pytest.raises(ValueError, match=r"^this split has no pairs; prepare it from more pairs or with"):
        Loader(stream, PromptCompletionRows(8), 1)


def test_the_layout_is_json() -> None:
    for layout in (PromptCompletionRows(), PromptCompletionRows(64, PadIgnored())):
        assert from_json(RowLayout, to_json(layout)) == layout
    assert PromptCompletionRows().padding == PadWithEos()


def test_of_a_conversation_only_what_the_assistant_writes_is_a_target(tmp_path: Path) -> None:
    """A system turn, several turns, and one that is too long for a row: by the tokens that count, as text."""
    tokenizer = Tokenizer.from_file(GOLDEN / "chat_tiny" / "tokenizer.json")
    template = load_chat_template(GOLDEN / "chat_tiny", tokenizer)
    long = "all the words " * 20
    turns = ("system", "Be brief."), ("user", "One?"), ("assistant", "Uno."), ("user", long), ("assistant", f"{long}!")
    messages = [{"role": role, "content": content} for role, content in turns]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    options = PrepareConfig(SourceConfig(pair_format=ChatRecord(template=template)), validation_fraction=0.0)
    corpus = prepare([str(file)], tmp_path / "out", str(GOLDEN / "chat_tiny" / "tokenizer.json"), options)

    def targets(length: int) -> list[tuple[str, str]]:
        loader = Loader(corpus.splits["train"], PromptCompletionRows(length, PadIgnored()), 2)
        return [(tokenizer.decode(given), tokenizer.decode(counted)) for given, counted, _ in rows(loader.batch(0))]

    first, second = sorted(targets(2048), key=lambda pair: len(pair[0]))
    start = "<|im_start|>assistant\n"
    assert first[1] == "Uno.<|im_end|>\n<|endoftext|>"
    assert first[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n")
    assert first[0].endswith(start)
    assert second[1] == f"{long}!<|im_end|>\n<|endoftext|>"
    assert f"{start}Uno.<|im_end|>\n<|im_start|>user\n{long}<|im_end|>\n{start}" in second[0]
    cut = max(targets(64), key=lambda pair: len(pair[1]))  # the end of the prompt, and the beginning of the answer
    assert second[0].endswith(cut[0])
    assert not second[0].startswith(cut[0])
    assert second[1].startswith(cut[1])
    assert "<|im_end|>" not in cut[1]
    assert "Uno.<|im_end|>\n<|endoftext|>" in [counted for _, counted in targets(64)]
