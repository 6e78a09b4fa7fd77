from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.sampling.canvas import blank_canvas, encode_template, parse_template


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<mask>", ["", 1, ""]),
        ("a <mask:3> b", ["a ", 3, " b"]),
        ("<mask:2><mask:10>!", ["", 2, "", 10, "!"]),
        ("x < mask <mask:1>\n<mask:", ["x < mask ", 1, "\n<mask:"]),
        (["a", 4, "b", 1], ["a", 4, "b", 1]),
    ],
)
def test_templates(template: str | list[str | int], expected: list[str | int]) -> None:
    assert parse_template(template) == expected


@given(st.lists(st.tuples(st.text("abc <>", max_size=5), st.integers(1, 30)), min_size=1, max_size=4))
def test_texts_and_holes_keep_their_order_and_length(pieces: list[tuple[str, int]]) -> None:
    template = "".join(f"{text}<mask:{hole}>" for text, hole in pieces)
    ids = encode_template(template, lambda text: [ord(c) for c in text], mask_id=7)
    expected: list[int] = []
    for text, hole in pieces:
        expected += [*map(ord, text), *[7] * hole]
    assert ids == expected


def test_blank_starts_with_the_prompt() -> None:
    assert blank_canvas(2, 4, mask_id=9, prompt=[1, 2]).tolist() == [[1, 2, 9, 9]] * 2
