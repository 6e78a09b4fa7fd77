"""Generated ids, and their texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from unmask.data.tokenizers import BaseTokenizer
from unmask.types import Tokens

_MAX_SHOWN_TEXTS, _MAX_SHOWN_CHARS = 4, 60
"""Texts that a repr shows, and characters of each."""


@dataclass(frozen=True, repr=False)
class Samples:
    """Generated texts, with the number of network calls that they took."""

    tokens: Tokens
    """int64 [n, L]: the canvas."""
    nfe: int
    """Network calls (number of function evaluations)."""
    num_queries: int
    """Positions at which the output head was evaluated."""
    tokenizer: BaseTokenizer | None
    """What decodes the ids."""
    valid: Tensor | None = None
    """bool [n, L]: the positions of each text; None where all are, as texts of one length have no padding."""
    num_sequence_calls: int = 0
    """Sequences that the network read, summed over its calls: the calls that the texts would take one by one."""

    def __repr__(self) -> str:
        rows: list[object] = [*(self.ids if self.tokenizer is None or not self._is_decodable else self.texts)]
        shown = [
            text if len(text := repr(row)) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..." for row in rows
        ]
        more = [] if len(shown) <= _MAX_SHOWN_TEXTS else [f"and {len(shown) - _MAX_SHOWN_TEXTS:,} more"]
        return f"{type(self).__name__}({', '.join([*shown[:_MAX_SHOWN_TEXTS], *more])}; {self.nfe} network calls)"

    @property
    def _is_decodable(self) -> bool:
        """Whether the tokenizer can decode it: unfinished texts have masks."""
        try:
            return bool(self.texts)
        except ValueError:
            return False

    @property
    def ids(self) -> list[list[int]]:
        """The ids of each text."""
        if self.valid is not None:
            return [row[valid].tolist() for row, valid in zip(self.tokens.cpu(), self.valid.cpu(), strict=True)]
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
    """Generated texts after prompts of different lengths; `ids` and `texts` are those of the completions."""

    completion_mask: Tensor = field(kw_only=True)
    """bool [n, L]: the positions of the completions."""
    end_ids: tuple[int, ...] = field(kw_only=True)
    """The tokens that end a text, if the model has any."""

    @property
    def ids(self) -> list[list[int]]:
        """The ids after each prompt, up to the token that ends the text."""
        rows = [row[new].tolist() for row, new in zip(self.tokens, self.completion_mask, strict=True)]
        return [list(takewhile(lambda id_: id_ not in self.end_ids, row)) for row in rows]
