"""What samplers wrote, as ids and as text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from unmask.data.tokenizers import Tokenizer
from unmask.types import Tokens

_MAX_SHOWN_TEXTS, _MAX_SHOWN_CHARS = 4, 60
"""How many texts a representation shows, and how much of each."""


@dataclass(frozen=True, repr=False)
class Samples:
    """What a sampler wrote: ids [n, L], how often the network was called, and the texts."""

    tokens: Tokens
    nfe: int
    num_queries: int
    tokenizer: Tokenizer | None

    def __repr__(self) -> str:
        rows: list[object] = [*(self.ids if self.tokenizer is None or not self._is_decodable else self.texts)]
        shown = [
            text if len(text := repr(row)) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..." for row in rows
        ]
        more = [] if len(shown) <= _MAX_SHOWN_TEXTS else [f"and {len(shown) - _MAX_SHOWN_TEXTS:,} more"]
        return f"{type(self).__name__}({', '.join([*shown[:_MAX_SHOWN_TEXTS], *more])}; {self.nfe} network calls)"

    @property
    def _is_decodable(self) -> bool:
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

    completion_mask: Tensor
    eos_id: int | None

    @property
    def ids(self) -> list[list[int]]:
        """The ids after each prompt, up to the one that ends a text."""
        rows = [row[new].tolist() for row, new in zip(self.tokens, self.completion_mask, strict=True)]
        return [row[: row.index(self.eos_id)] if self.eos_id in row else row for row in rows]
