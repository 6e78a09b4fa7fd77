"""What samplers wrote, as ids and as text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unmask.data.tokenizer import Tokenizer
from unmask.types import Tokens

SHOWN, LONGEST_SHOWN = 4, 60
"""How many texts a representation shows, and how much of each."""


@dataclass(frozen=True, repr=False)
class Samples:
    """What a sampler wrote: ids [n, L], how often the network was called, and the texts."""

    tokens: Tokens
    network_calls: int
    head_rows: int
    tokenizer: Tokenizer | None

    def __repr__(self) -> str:
        rows: list[object] = [*(self.ids if self.tokenizer is None or not self._readable else self.texts)]
        shown = [
            text if len(text := repr(row)) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..." for row in rows
        ]
        more = [] if len(shown) <= SHOWN else [f"and {len(shown) - SHOWN:,} more"]
        return (
            f"{type(self).__name__}({', '.join([*shown[:SHOWN], *more])}; {self.network_calls} network calls)"
        )

    @property
    def _readable(self) -> bool:
        """Whether all of it is text by now: while it is being written, it has masks."""
        try:
            return bool(self.texts)
        except ValueError:
            return False

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


@dataclass(frozen=True, repr=False)
class Completions(Samples):
    """What was written after prompts of different lengths: `written` are its places [n, L]."""

    written: Tensor
    end: int | None

    @property
    def ids(self) -> list[list[int]]:
        """The ids after each prompt, up to the one that ends a text."""
        rows = [row[new].tolist() for row, new in zip(self.tokens, self.written, strict=True)]
        return [row[: row.index(self.end)] if self.end in row else row for row in rows]
