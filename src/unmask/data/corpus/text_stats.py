"""The size of a text in the units of a likelihood: bytes, characters, words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextStats:
    """UTF-8 bytes, characters (code points) and words.

    Words are separated by white space, and the end of a line counts as a word, as in word-level models of
    Penn Treebank, WikiText and One Billion Words.
    """

    bytes: int = 0
    characters: int = 0
    words: int = 0

    @classmethod
    def from_text(cls, text: str, is_last: bool = True) -> TextStats:
        """The size of a text; `is_last`: its last line ends there, even without a newline."""
        size = len(text) if text.isascii() else len(text.encode())
        lines = text.count("\n") + (is_last and not text.endswith("\n"))
        return cls(size, len(text), len(text.split()) + lines)

    def __add__(self, other: TextStats) -> TextStats:
        return TextStats(self.bytes + other.bytes, self.characters + other.characters, self.words + other.words)
