from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unmask.data.corpus._splits import _LOOKAHEAD_CHARS, _MIN_SPLITTABLE_CHARS, SplitChunk, assign_splits
from unmask.data.readers import _text as formats
from unmask.data.readers._text import CHUNK_CHARS, TextChunk


def corpus(sizes: list[int]) -> list[TextChunk]:
    """Documents of these many characters, in pieces."""
    numbered = enumerate(sizes)
    return [piece for i, size in numbered for piece in formats.chunk_document("line\n" * (size // 5 + 1), f"{i}")]


def share(placed: list[SplitChunk]) -> float:
    total = sum(len(each.chunk.text) for each in placed)
    return sum(len(each.chunk.text) for each in placed if each.held_out) / total


@pytest.mark.parametrize("wanted", [0.01, 0.05, 0.3, 0.5])
def test_many_documents_are_held_out_evenly(wanted: float) -> None:
    placed = list(assign_splits(corpus([500] * 4000), wanted))
    assert share(placed) == pytest.approx(wanted, abs=0.002)
    for tenth in range(10):
        assert share(placed[400 * tenth : 400 * tenth + 400]) == pytest.approx(wanted, abs=0.01)
    assert all(each.chunk.is_last for each in placed), "no short document is cut"


def test_a_long_document_is_held_out_in_stretches() -> None:
    placed = list(assign_splits(corpus([60 * CHUNK_CHARS]), 0.05))
    assert share(placed) == pytest.approx(0.05, abs=0.02)
    assert [i for i, each in enumerate(placed) if each.held_out] == [12, 33, 46]
    assert {each.document_index for each in placed} == {0}


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 400) | st.integers(1, 3 * CHUNK_CHARS), min_size=1, max_size=8),
    wanted=st.floats(0.001, 0.5),
)
@example(sizes=[5, 5, 4], wanted=0.5)
def test_both_splits_have_text_and_nothing_is_lost(sizes: list[int], wanted: float) -> None:
    pieces = corpus(sizes)
    placed = list(assign_splits(pieces, wanted))
    assert "".join(each.chunk.text for each in placed) == "".join(piece.text for piece in pieces)
    assert sum(each.chunk.is_last for each in placed) == len(sizes)
    total = sum(len(piece.text) for piece in pieces)
    held_out = sum(len(each.chunk.text) for each in placed if each.held_out)
    assert held_out >= 1
    due = min(wanted * total, total // 2)
    assert held_out >= due / 2 - 1 or held_out >= due - max(len(piece.text) for piece in pieces) - 1
    assert total - held_out >= 1
    for before, after in itertools.pairwise(placed):
        assert after.document_index == before.document_index + before.chunk.is_last


def test_a_small_text_is_held_out_at_its_end() -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    one, two = assign_splits([TextChunk(text, True, "here")], 0.2)
    assert (one.held_out, two.held_out) == (False, True)
    assert (one.chunk.is_last, two.chunk.is_last) == (False, True)
    assert one.chunk.text + two.chunk.text == text
    assert one.chunk.text.endswith("\n")
    assert len(two.chunk.text) == pytest.approx(0.2 * len(text), rel=0.05)


@pytest.mark.parametrize(("text", "counts"), [("a", [1]), ("ab", [1, 1]), ("abc", [2, 1])])
def test_a_few_characters(text: str, counts: list[int]) -> None:
    placed = list(assign_splits([TextChunk(text, True, "here")], 0.05))
    assert [len(each.chunk.text) for each in placed] == counts
    assert [each.held_out for each in placed] == [False, True][: len(counts)]


def test_nothing_is_held_out_if_nothing_is_asked_for() -> None:
    assert not any(each.held_out for each in assign_splits(corpus([100] * 50 + [3 * CHUNK_CHARS]), 0.0))


def test_the_stream_is_not_gathered() -> None:
    taken = 0

    def endless() -> object:
        nonlocal taken
        while True:
            taken += 1
            yield TextChunk("x" * CHUNK_CHARS, False, "endless")

    stream = assign_splits(endless(), 0.05)  # type: ignore[arg-type]
    for i in range(100):
        next(stream)
        assert taken <= i + 2 + _LOOKAHEAD_CHARS // CHUNK_CHARS


def test_the_choice_is_a_function_of_the_number_alone() -> None:
    """So that all machines that prepare a part agree, whatever the documents are."""
    one = [each.held_out for each in assign_splits(corpus([600] * 3000), 0.05)][:2000]
    two = [each.held_out for each in assign_splits(corpus([900] * 3000), 0.05)][:2000]
    assert one == two
    assert [i for i, each in enumerate(one) if each][:3] == [12, 33, 46]


def test_following() -> None:
    def placed(document: int, held_out: bool) -> SplitChunk:
        return SplitChunk(TextChunk("x", False, "here"), held_out, document)

    assert not placed(0, False).continues(None)
    assert placed(0, True).continues(placed(0, True))
    assert not placed(0, True).continues(placed(0, False))
    assert not placed(1, True).continues(placed(0, True))


@pytest.mark.parametrize(("count", "size"), [(300, 14), (300, 60), (40, 14), (20, 900), (13, 30)])
def test_few_short_pairs_are_held_out_as_asked_for(count: int, size: int) -> None:
    """Once 1,024 characters were the least: 70 of 300 short pairs, where 15 were due."""
    placed = list(assign_splits([TextChunk("x" * size, True, str(i), 4) for i in range(count)], 0.05))
    assert sum(each.held_out for each in placed) == round(0.05 * count)


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(2, 60) | st.integers(2, 5000), min_size=2, max_size=80),
    wanted=st.floats(0.01, 0.5),
    pairs=st.booleans(),
)
@example(sizes=[100] * 12 + [100_000] + [100] * 7, wanted=0.05, pairs=False)  # the 13th is the first chosen
@example(sizes=[100] * 12 + [500] + [100] * 7, wanted=0.05, pairs=True)
def test_a_small_corpus_is_off_by_one_document_at_most(sizes: list[int], wanted: float, pairs: bool) -> None:
    placed = list(
        assign_splits([TextChunk("x" * size, True, str(i), int(pairs)) for i, size in enumerate(sizes)], wanted)
    )
    held_out = sum(len(each.chunk.text) for each in placed if each.held_out)
    due = min(wanted * sum(sizes), sum(sizes) // 2)
    assert 0 < held_out <= due + max(sizes) + 1
    assert held_out >= due / 2 - 1 or held_out >= due - max(sizes) - 1
    if not pairs and max(sizes) > _MIN_SPLITTABLE_CHARS:  # which can be cut where it is right
        assert held_out <= 2 * due + _MIN_SPLITTABLE_CHARS


def test_sizes_that_follow_the_choice_do_not_lead_it_astray() -> None:
    """The golden ratio's numbers choose every 13th, 34th, ... piece; here those are ten times as long."""
    chosen = [each.held_out for each in assign_splits([TextChunk("x" * 1000, True, "")] * 4000, 0.05)]
    for factor in (10, 0.1):
        uneven = [TextChunk("x" * int(1000 * factor if each else 1000), True, "") for each in chosen]
        placed = list(assign_splits(uneven, 0.05))
        assert share(placed) == pytest.approx(0.05, abs=0.01)


def test_a_short_document_is_held_out_whole_and_a_long_one_cut() -> None:
    placed = list(assign_splits([TextChunk("x" * 60, True, "here")] * 4, 0.01))
    assert [each.held_out for each in placed] == [False] * 3 + [True]
    placed = list(assign_splits([TextChunk("x" * 10_000, True, "here")] * 2, 0.01))
    assert [len(each.chunk.text) for each in placed if each.held_out] == [200]
