"""The pieces of a report: texts cut by token, smoothed curves, readable numbers, readable colours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unmask.data.tokenizers import Tokenizer, token_texts
from unmask.report._run_log import Curves, read_curves
from unmask.report._sample_html import _luminance, _palette, palette_css
from unmask.report.formatting import format_cell, format_with_error, human_count

CURVES = Curves((), (), (), (), (), (), 0, (), (), (), ())


@pytest.mark.parametrize("text", ["plain", "naïve café, 漢字 🙂!", "end in half 漢"])
def test_pieces_join_to_the_text(text: str) -> None:
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode(text)
    pieces = token_texts(tokenizer.decode, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    half = token_texts(tokenizer.decode, ids[:-1])
    assert "".join(half) == tokenizer.decode(ids[:-1])


def test_a_character_belongs_to_its_last_byte() -> None:
    tokenizer = Tokenizer.bytes()
    assert token_texts(tokenizer.decode, tokenizer.encode("a漢b")) == ["a", "", "", "漢", "b"]


def test_spaces_that_a_tokenizer_adds_are_kept() -> None:
    words = {0: "one", 1: "two", 2: "three"}
    assert token_texts(lambda ids: " ".join(words[i] for i in ids), [0, 1, 2]) == ["one", " two", " three"]


def test_damaged_lines_are_left_out_of_the_curves(tmp_path: Path) -> None:
    good = b'{"step": 1, "loss": 2.0, "tokens_per_second": 3.0, "tokens": 4}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\n[1]\n" + good + b'{"step": 2, "lo')
    assert read_curves(tmp_path).step == (1,)


def test_smoothing_has_no_bias_at_the_start_and_bridges_gaps() -> None:
    assert replace(CURVES, loss=(3.0, 3.0, None, 3.0)).smoothed() == pytest.approx([3.0] * 4)
    assert replace(CURVES, loss=(None, 1.0, 2.0)).smoothed() == [None, 1.0, pytest.approx(5 / 3)]


def test_time_in_training_is_the_sum_of_tokens_over_speed() -> None:
    curves = replace(CURVES, tokens=(100, 300, 400), tokens_per_second=(50.0, 100.0, None))
    assert curves.seconds == 2 + 2  # the last line has no speed
    assert curves.tokens_seen == 400
    assert CURVES.seconds is None


def test_numbers_for_people() -> None:
    assert format_with_error(5.32149, 0.0123) == ("5.321", "± 0.012")
    assert format_with_error(1234.5, 230.0) == ("1,234", "± 230")
    assert format_with_error(2.5, 0.0) == ("2.5", "")
    assert [human_count(n) for n in (0, 9_999, 12_345, 7_100_000, 3.2e9)] == [
        "0",
        "9,999",
        "12.3 k",
        "7.1 M",
        "3.2 G",
    ]
    assert [format_cell(v) for v in (None, "x", 2048, 0.123456789)] == ["-", "x", "2,048", "0.12346"]


def test_text_can_be_read_on_every_colour() -> None:
    css = palette_css()
    for shade, color in enumerate(_palette()):
        light = f".k{shade} {{ background: {color}; color: #fff; }}" in css
        ground = _luminance(color)
        contrast = 1.05 / (ground + 0.05) if light else (ground + 0.05) / 0.05
        assert contrast >= 4.5
    assert _luminance("#ffffff") == pytest.approx(1)
