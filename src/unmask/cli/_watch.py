"""`--watch`: the canvas after each step, on stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise, takewhile, tee
from typing import TYPE_CHECKING, TypeAlias

import torch

from unmask.sampling.trace import track_steps

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text
    from torch import Tensor

    from unmask.data.tokenizers import BaseTokenizer
    from unmask.model import Samples

_MASK_GLYPH = "█"
_MASKED_STYLE, _NEW_STYLE, _OLD_STYLE = "dim", "bold green", ""
_CONTEXT_LINES = 2
"""Lines shown above the first masked token when a text is taller than the terminal."""

_StyledText: TypeAlias = tuple[str, str]
"""A text and its style."""
_DecodeFn: TypeAlias = Callable[[Sequence[int]], str]

CONTROL_PICTURES: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32)},  # ␛ for escape: a model must not control the terminal
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
    ord("\n"): "\n",
    ord("\t"): "    ",
}
"""What is shown in place of control characters."""


def watch(frames: Iterable[Samples], mask_id: int, delay: float) -> Samples:
    """Show every frame and return the last: in place and `delay` seconds apart on a terminal, else as lines."""
    last = deque(_show_live(frames, mask_id, delay) if sys.stderr.isatty() else _print_lines(frames, mask_id), maxlen=1)
    return last.pop()


def _show_live(frames: Iterable[Samples], mask_id: int, delay: float) -> Iterator[Samples]:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    # Transient: at the end the texts are printed to stdout.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for title, rows, frame in _styled_frames(frames, mask_id):
            live.update(_layout(title, rows, console), refresh=True)
            time.sleep(delay)
            yield frame


def _print_lines(frames: Iterable[Samples], mask_id: int) -> Iterator[Samples]:
    for title, rows, frame in _styled_frames(frames, mask_id):
        print(title, file=sys.stderr)
        for row in rows:
            print("  " + "".join(text for text, _ in row).replace("\n", "⏎"), file=sys.stderr, flush=True)
        yield frame


def _styled_frames(frames: Iterable[Samples], mask_id: int) -> Iterator[tuple[str, list[list[_StyledText]], Samples]]:
    """Each frame with its title and its sequences as styled pieces."""
    shown, tracked = tee(frames)
    initial = next(tracked)
    separator = _token_separator(initial.tokenizer)
    decode = _format_ids if initial.tokenizer is None else initial.tokenizer.decode

    def style(step: int, frame: Samples, changed: Tensor) -> tuple[str, list[list[_StyledText]], Samples]:
        pairs = zip(frame.tokens.tolist(), changed.tolist(), strict=True)
        rows = [_styled_pieces(ids, is_new, mask_id, decode, separator) for ids, is_new in pairs]
        return f"step {step}: {int((frame.tokens == mask_id).sum())} masked", rows, frame

    yield style(0, next(shown), torch.zeros_like(initial.tokens, dtype=torch.bool))
    steps = track_steps((frame.tokens for frame in tracked), initial.tokens, mask_id)
    for frame, step in zip(shown, steps, strict=True):
        yield style(step.number, frame, step.changed)


def _styled_pieces(
    ids: Sequence[int], changed: Sequence[bool], mask_id: int, decode: _DecodeFn, separator: str
) -> list[_StyledText]:
    """A sequence as pieces of one style each: masked tokens, changed tokens, and the rest."""
    found: list[_StyledText] = []
    for masked, run in groupby(range(len(ids)), key=lambda i: ids[i] == mask_id):
        positions = list(run)
        if masked:
            found += [(separator, _OLD_STYLE), (separator.join([_MASK_GLYPH] * len(positions)), _MASKED_STYLE)]
        else:
            is_new = [changed[i] for i in positions]
            found += [(separator, _OLD_STYLE), *_decode_run([ids[i] for i in positions], is_new, decode)]
    return [piece for piece in found[1:] if piece[0]]


def _decode_run(ids: list[int], is_new: list[bool], decode: _DecodeFn) -> Iterator[_StyledText]:
    """The pieces of a run of unmasked tokens.

    A token may be a part of a character, so the run is decoded as a whole, and split where its decoded prefixes
    diverge from it: a character belongs to the piece that completes it.
    """
    text = decode(ids)
    cuts = [i for i in range(1, len(ids)) if is_new[i] != is_new[i - 1]]
    ends = [_common_prefix_length(decode(ids[:cut]), text) for cut in cuts]
    for start, (first, last) in zip([0, *cuts], pairwise([0, *ends, len(text)]), strict=True):
        yield text[first:last].translate(CONTROL_PICTURES), _NEW_STYLE if is_new[start] else _OLD_STYLE


def _common_prefix_length(one: str, other: str) -> int:
    """The length of the longest common prefix of two texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _token_separator(tokenizer: BaseTokenizer | None) -> str:
    """What the tokenizer puts between tokens: a space for tokenizers of whole words, else nothing."""
    if tokenizer is None:
        return " "
    for token in sorted(tokenizer.vocab.values()):
        word = tokenizer.decode([token])
        if word.isalnum():
            return " " if tokenizer.decode([token, token]) == f"{word} {word}" else ""
    return ""


def _format_ids(ids: Sequence[int]) -> str:
    """The ids as text, for a model without a tokenizer."""
    return " ".join(map(str, ids))


def _layout(title: str, rows: list[list[_StyledText]], console: Console) -> Group:
    """The sequences one below the other, wrapped; if taller than the terminal, the part around the first mask."""
    from rich.console import Group
    from rich.text import Text

    lines: list[Text] = []
    for number, row in enumerate(rows):
        if number:
            lines.append(Text("─" * min(8, console.width), style=_MASKED_STYLE))
        lines += Text.assemble(*row).wrap(console, console.width, overflow="fold")
    height = max(1, console.height - 2)
    first = next((i for i, line in enumerate(lines) if _MASK_GLYPH in line.plain), len(lines))
    top = max(0, min(first - _CONTEXT_LINES, len(lines) - height))
    return Group(Text(title, style="bold"), *lines[top : top + height])
