from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unmask.data.tokenizer import Tokenizer

WHITE = " two  spaces\ttab\nline\r\n\n  indented \u00a0 end \n"
BYTES = Tokenizer.bytes()


@settings(deadline=None)
@given(text=st.text(max_size=60))
@example(WHITE)
@example("naïve Ω 漢字 🙂 \x00\x7f")
def test_bytes_are_their_own_ids(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert BYTES.decode(ids) == text


def test_every_byte_has_an_id() -> None:
    assert BYTES.size == 256
    known = BYTES.inner.get_vocab()
    assert sorted(known.values()) == list(range(256))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0xFF], "\ufffd"),
        ([ord("a"), 0xC3, ord("b")], "a\ufffdb"),  # a character cut after its first byte
        ([0x80, ord("a")], "\ufffda"),
    ],
)
def test_bytes_that_are_no_text_are_shown_as_such(ids: list[int], text: str) -> None:
    assert BYTES.decode(ids) == text


@settings(deadline=None)
@given(text=st.text(min_size=1, max_size=60))
@example(WHITE)
@example("a\u0301e\u0300")  # an accent is a character of its own
def test_characters_round_trip(text: str) -> None:
    tokenizer = Tokenizer.characters(text)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.size == len(set(text))
    assert tokenizer.decode(ids) == text


def test_characters_are_numbered_in_order() -> None:
    tokenizer = Tokenizer.characters("cab bac")
    assert tokenizer.encode(" abc") == [0, 1, 2, 3]
    assert tokenizer.encode("") == []


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(ValueError, match=r"^the character 'ß' is not in the tokenizer's alphabet$"):
        Tokenizer.characters("abc").encode("abßc")


def test_an_alphabet_is_not_empty() -> None:
    with pytest.raises(ValueError, match=r"^an alphabet needs at least one character$"):
        Tokenizer.characters("")


@pytest.mark.parametrize("tokenizer", [BYTES, Tokenizer.characters(WHITE)], ids=["bytes", "characters"])
def test_a_file_gives_the_tokenizer_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    back = Tokenizer.from_file(path)
    assert back.size == tokenizer.size
    assert back.encode(WHITE) == tokenizer.encode(WHITE)
    assert back.decode(back.encode(WHITE)) == WHITE
    assert back.to_json() == tokenizer.to_json()


@pytest.mark.parametrize(
    "contents",
    ["", "{", "[]", json.dumps({"model": {"type": "Nonsense"}}), BYTES.to_json()[:-200]],
    ids=["empty", "brace", "list", "nonsense", "cut"],
)
def test_a_broken_file_is_named(contents: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(contents, encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a tokenizer\.json that can be read: "
    ) as error:
        Tokenizer.from_file(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json is not a tokenizer\.json that can be read: "):
        Tokenizer.from_file(tmp_path / "absent.json")
