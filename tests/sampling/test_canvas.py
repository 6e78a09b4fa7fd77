from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.sampling.canvas import blank_canvas
from unmask.sampling.templates import encode_template, parse_template


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<mask>", ["", 1, ""]),
        ("a <mask:3> b", ["a ", 3, " b"]),
        ("<mask:2><mask:10>!", ["", 2, "", 10, "!"]),
        ("x < mask <mask:1>\n<mask:", ["x < mask ", 1, "\n<mask:"]),
        (["a", 4, "b", 1], ["a", 4, "b", 1]),
        ("a<mask:3..12>b<mask:*>", ["a", range(3, 13), "b", range(33), ""]),
        ("<mask:0..1> <mask:1..> <mask:..2>", ["", range(2), " <mask:1..> <mask:..2>"]),
        (["a", range(2, 4)], ["a", range(2, 4)]),
    ],
)
def test_templates(template: str | list[str | int | range], expected: list[str | int | range]) -> None:
    assert parse_template(template) == expected


@given(st.lists(st.tuples(st.text("abc <>", max_size=5), st.integers(1, 30)), min_size=1, max_size=4))
def test_texts_and_holes_keep_their_order_and_length(pieces: list[tuple[str, int]]) -> None:
    template = "".join(f"{text}<mask:{hole}>" for text, hole in pieces)
    closed = encode_template(template, lambda text: [ord(c) for c in text]).close(mask_id=7)
    expected, holes = list[int](), list[tuple[int, int]]()
    for text, hole in pieces:
        holes.append((len(expected) + len(text), hole))
        expected += [*map(ord, text), *[7] * hole]
    assert (closed.ids, closed.holes) == (expected, holes)
    assert closed.num_masked == sum(hole for _, hole in pieces)


def test_open_holes_get_lengths() -> None:
    template = encode_template("a<mask:2..5><mask:2>b<mask:0..1>", lambda text: [ord(c) for c in text])
    assert template.is_open
    closed = template.close(7, [3, 0])
    assert closed.ids == [ord("a"), 7, 7, 7, 7, 7, ord("b")]
    assert closed.holes == [(1, 3), (4, 2), (7, 0)]
    with pytest.raises(ValueError, match="the length of every hole must be known, as in <mask:12>"):
        template.close(7)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("<mask:5..3>", "from the smaller to the larger, as in <mask:3..12>; '<mask:5..3>' has 5..3"),
        ("<mask:0..0>", "a hole must have 1 to 1,000,000 tokens"),
        ("<mask:1..2000000>", "'<mask:1..2000000>' has one of 2,000,000"),
        (["a", range(0, 9, 2)], "from the smaller to the larger"),
    ],
)
def test_impossible_lengths(template: str | list[str | range], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_template(template)


def test_blank_starts_with_the_prompt() -> None:
    assert blank_canvas(2, 4, mask_id=9, prompt=[1, 2]).tolist() == [[1, 2, 9, 9]] * 2
