"""What samplers wrote, as ids and as text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unmask.data.tokenizer import Tokenizer
from unmask.types import Tokens


@dataclass(frozen=True)
class Samples:
    """What a sampler wrote: ids [n, L], how often the network was called, and the texts."""

    tokens: Tokens
    network_calls: int
    head_rows: int
    tokenizer: Tokenizer | None

    @property
    def ids(self) -> list[list[int]]:
        """The ids of each text."""
        rows: list[list[int]] = self.tokens.tolist()
        return rows

    @property
    def texts(self) -> list[str]:
        """The ids as text."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: its samples are ids, in .ids")
        return [self.tokenizer.decode(ids) for ids in self.ids]

    @property
    def text(self) -> str:
        """The first text."""
        return self.texts[0]


@dataclass(frozen=True)
class Completions(Samples):
    """What was written after prompts of different lengths: `written` are its places [n, L]."""

    written: Tensor
    end: int | None

    @property
    def ids(self) -> list[list[int]]:
        """The ids after each prompt, up to the one that ends a text."""
        rows = [row[new].tolist() for row, new in zip(self.tokens, self.written, strict=True)]
        return [row[: row.index(self.end)] if self.end in row else row for row in rows]
