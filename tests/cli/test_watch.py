"""`--watch`: what is drawn, and a real process on a pseudo-terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import unmask
from unmask.cli import _watch as watch
from unmask.cli._watch import (
    _MASK_GLYPH,
    _MASKED_STYLE,
    _NEW_STYLE,
    _OLD_STYLE,
    _styled_pieces,
    _token_separator,
)

BYTES = unmask.Tokenizer.bytes()
MASK = 256


def changed(row: list[int], before: list[int]) -> list[bool]:
    return [new != old for new, old in zip(row, before, strict=True)]


def plain(row: list[watch._StyledText]) -> str:
    return "".join(text for text, _ in row)


def test_masked_new_and_old_tokens_have_different_styles() -> None:
    row, before = [*b"ab", MASK, MASK, *b"cd"], [ord("a"), MASK, MASK, MASK, *b"cd"]
    assert _styled_pieces(row, changed(row, before), MASK, BYTES.decode, "") == [
        ("a", _OLD_STYLE),
        ("b", _NEW_STYLE),
        (_MASK_GLYPH * 2, _MASKED_STYLE),
        ("cd", _OLD_STYLE),
    ]


def test_a_character_belongs_to_the_piece_that_completes_it() -> None:
    whole = list("a€b".encode())
    before = [*whole[:2], MASK, MASK, whole[4]]
    assert _styled_pieces(whole, changed(whole, before), MASK, BYTES.decode, "") == [
        ("a", _OLD_STYLE),
        ("€", _NEW_STYLE),
        ("b", _OLD_STYLE),
    ]
    half = _styled_pieces(before, changed(before, before), MASK, BYTES.decode, "")
    assert half == [("a\ufffd", _OLD_STYLE), (_MASK_GLYPH * 2, _MASKED_STYLE), ("b", _OLD_STYLE)]


@given(st.lists(st.tuples(st.integers(0, MASK), st.booleans()), min_size=1, max_size=40))
def test_any_bytes_can_be_shown_and_none_is_lost(tokens: list[tuple[int, bool]]) -> None:
    row = [token for token, _ in tokens]
    before = [MASK if fresh else token for token, fresh in tokens]
    shown = _styled_pieces(row, changed(row, before), MASK, BYTES.decode, "")
    runs = [(hidden, list(run)) for hidden, run in groupby(row, key=lambda token: token == MASK)]
    whole = "".join(_MASK_GLYPH * len(run) if hidden else BYTES.decode(run) for hidden, run in runs)
    assert plain(shown) == whole.translate(watch.CONTROL_PICTURES)
    steering = {chr(code) for code in [*range(32), *range(0x7F, 0xA0)]} - {"\n"}
    assert not steering & set(plain(shown))


def test_words_are_kept_apart() -> None:
    """A tokenizer of words puts spaces between them; then holes need them too."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    inner = tokenizers.Tokenizer(models.WordLevel({"flat": 0, "is": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    words = unmask.Tokenizer(inner)
    gap = _token_separator(words)
    assert gap == " "
    assert (
        plain(_styled_pieces([0, 3, 3, 1], [True] * 4, 3, words.decode, gap)) == f"flat {_MASK_GLYPH} {_MASK_GLYPH} is"
    )
    assert _token_separator(BYTES) == ""
    assert _token_separator(None) == " "


def test_a_token_is_new_for_one_step_only() -> None:
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=8, dropout=0.0)
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.characters("abc"))
    frames = lm.generate_steps(lm.encode_template("a<mask:6>b"), unmask.RandomOrder(steps=3))
    counts = [
        tuple(
            sum(len(text) for text, style in rows[0] if style == wanted)
            for wanted in (_OLD_STYLE, _NEW_STYLE, _MASKED_STYLE)
        )
        for _, rows, _ in watch._styled_frames(frames, lm.vocab.mask_id)
    ]
    assert counts == [(2, 0, 6), (2, 2, 4), (4, 2, 2), (6, 2, 0)]


def test_a_text_taller_than_the_terminal_shows_the_first_mask() -> None:
    console = Console(width=10, height=8, file=open(os.devnull, "w"))  # noqa: SIM115
    settled = [(f"line {i:02}\n", _OLD_STYLE) for i in range(30)]
    for text, seen in [
        ([*settled, (_MASK_GLYPH, _MASKED_STYLE)], f"line 29\n{_MASK_GLYPH}"),
        ([(_MASK_GLYPH + "\n", _MASKED_STYLE), *settled], f"{_MASK_GLYPH}\nline 00"),
        (
            [*settled[:12], (_MASK_GLYPH + "\n", _MASKED_STYLE), *settled[12:]],
            f"line 11\n{_MASK_GLYPH}\nline 12",
        ),
    ]:
        drawn = [line.plain for line in watch._layout("title", [text], console).renderables]
        assert len(drawn) <= console.height - 1
        assert seen in "\n".join(line.rstrip() for line in drawn)
    console.file.close()


def test_without_a_terminal_frames_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=8, dropout=0.0)
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.characters("a\n"))
    frames = list(lm.generate_steps(lm.encode_template("a<mask:2>a", n=2), unmask.RandomOrder(steps=2)))
    last = watch.watch(frames, lm.vocab.mask_id, delay=3.0)
    assert last is frames[-1]
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("step")] == [
        "step 0: 4 masked",
        "step 1: 2 masked",
        "step 2: 0 masked",
    ]
    assert lines[1:3] == [f"  a{_MASK_GLYPH}{_MASK_GLYPH}a"] * 2
    assert lines[-2:] == ["  " + text.replace("\n", "⏎") for text in last.texts]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_real_terminal(folder: str) -> None:
    """stderr is a terminal, where frames take each other's place; stdout is a pipe, which gets the text."""
    import pty

    master, slave = pty.openpty()
    work = subprocess.Popen(
        [sys.executable, "-m", "unmask", "infill", folder, "a<mask:3>b", "--watch", "--delay", "0"],
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(slave)
    seen = b""
    while True:
        try:
            some = os.read(master, 4096)
        except OSError:  # on Linux: the other side is closed
            break
        if not some:
            break
        seen += some
    os.close(master)
    out, _ = work.communicate(timeout=60)
    assert work.returncode == 0
    text, shown = out.decode(), seen.decode()
    assert text == unmask.load(folder).infill("a<mask:3>b").text + "\n"
    assert f"a\x1b[2m{_MASK_GLYPH * 3}\x1b[0mb" in shown
    assert re.search(r"\x1b\[1;32m[abc ]+\x1b\[0m", shown)  # new tokens
    assert re.search(r"step \d+: \d+ masked", shown)
    assert "\x1b[1A\x1b[2K" in shown  # each frame replaces the one before
    assert shown.endswith("\x1b[2K")  # and the last one is erased
