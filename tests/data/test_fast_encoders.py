from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from unmask.data.tokenizers._fast_encoders import _pretokenize, sample_words

LIBRARY = pre_tokenizers.ByteLevel(add_prefix_space=False)
TRICKY = st.text(alphabet=" \n\t\r'stlREmd foé漢—12²½Ⅷ\x1c\x85\xa0\u3000\u0301_<|>.,🙂", max_size=40)


def ends(text: str) -> set[int]:
    """Where the library's words end."""
    return {stop for _, (_, stop) in LIBRARY.pre_tokenize_str(text)}


@settings(deadline=None, max_examples=400)
@given(text=TRICKY | st.text(max_size=30))
@example("I'm sure they'll don't 'sé 'sun x'd")
@example("naïve café's abcé 12½ 1² --é —— a\u0301b")
@example("a\x1cb \x1c\x1d c\x85d \x85 e\xa0f  g\u3000h\n\n  i \n j\t\tk ")
def test_words_are_whole_words_of_the_library(text: str) -> None:
    parts = _pretokenize(text)
    assert "".join(parts) == text
    stops = list(accumulate(map(len, parts)))
    assert set(stops) <= ends(text)
    alone = {stop - len(part) + end for part, stop in zip(parts, stops, strict=True) for end in ends(part)}
    assert alone == ends(text), "a word has the same parts alone and in the text"


@pytest.mark.parametrize(
    "text", ["a" * 300_000, "é" * 300_000, "aé" * 150_000, " " * 300_000, "a1" * 150_000, "-é" * 9]
)
def test_no_text_takes_for_ever(text: str) -> None:
    assert "".join(_pretokenize(text)) == text


def test_a_choice_of_words_has_their_frequencies() -> None:
    text = "".join(f" w{'x' * (i % 40)}" * (1 + i % 40) for i in range(400))
    counts = Counter(_pretokenize(text))
    chosen = list(sample_words([text], 900))
    assert 800 <= len(chosen) <= 900
    step = -(-counts.total() // 900)
    assert all(abs(n - counts[word] / step) < 1 for word, n in Counter(chosen).items())


def test_the_choice_does_not_depend_on_the_order() -> None:
    parts = ["one two three\n", "two three four\n", "five six\n"] * 5
    assert list(sample_words(parts, 12)) == list(sample_words(reversed(parts), 12))
    assert Counter(sample_words(parts, 10**6)) == Counter(_pretokenize("".join(parts)))
    assert list(sample_words([], 5)) == []
