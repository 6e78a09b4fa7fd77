"""How much text some tokens stand for, in the units that a likelihood is quoted in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextStats:
    """UTF-8 bytes, characters (code points) and words.

    A word is what stands between white space, and the end of a line is one more: so do word-level models of
    Penn Treebank, WikiText and One Billion Words count.
    """

    bytes: int = 0
    characters: int = 0
    words: int = 0

    @classmethod
    def from_text(cls, text: str) -> TextStats:
        """The size of a whole text; its last line ends even if no newline says so."""
        return cls(*count_text(text, is_last=True))

    def __add__(self, other: TextStats) -> TextStats:
        return TextStats(self.bytes + other.bytes, self.characters + other.characters, self.words + other.words)


def count_text(text: str, is_last: bool) -> tuple[int, int, int]:
    """Bytes, characters and words of a piece of text, which `ends` a document or not."""
    size = len(text) if text.isascii() else len(text.encode())
    lines = text.count("\n") + (is_last and not text.endswith("\n"))
    return size, len(text), len(text.split()) + lines
