"""What a tokenizer is: text to ids and back. If the mask is not part of it, models add it as one more id."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from unmask.config import suggest, to_json
from unmask.data.tokenizers._fast_encoders import TokenIds, UIntDtype
from unmask.data.tokenizers._unknown_stats import MAX_UNKNOWN_FRACTION, UnknownStats

if TYPE_CHECKING:
    from unmask.types import Vocab

REPLACEMENT_CHAR = "\ufffd"
"""What bytes that are not UTF-8 are decoded to."""


class BaseTokenizer(ABC):
    """Text to ids and back.

    A tokenizer from outside the package subclasses this and implements `vocab_size`, `encode` and `decode`. If it
    is a frozen dataclass, it can be saved to a `tokenizer.json`; reading that file imports its class, so it needs
    `allow_code`.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @abstractmethod
    def encode(self, text: str, allow_unknown: bool = False, *, parse_special_tokens: bool = False) -> list[int]:
        """The ids of a text, nothing added; raises if the text cannot be encoded.

        `allow_unknown`: accept text with many unknown characters. `parse_special_tokens`: special tokens spelled
        out in the text, such as [CLS], become their ids.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one."""
        return None

    @property
    def mask_id(self) -> int | None:
        """The id of its own mask token; None if models add the mask as one more id."""
        return None

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Ids that are read but never predicted, drawn or counted, such as N in DNA."""
        return ()

    @property
    def complement_ids(self) -> tuple[int, ...] | None:
        """Of DNA, the id of each id's complement, for all ids of a model: A-T, C-G, all others themselves."""
        return None

    @property
    def model_vocab(self) -> Vocab:
        """The ids of a model of this tokenizer's text."""
        from unmask.types import Vocab  # imports torch, which takes a second and is not needed to prepare

        if self.mask_id is None:
            return Vocab(self.vocab_size + 1, self.vocab_size, self.eos_id, self.context_ids)
        size = self.vocab_size if self.complement_ids is None else len(self.complement_ids)
        return Vocab(size, self.mask_id, self.eos_id, self.context_ids)

    @property
    def unk_token(self) -> str | None:
        """The token that unknown text becomes, if there is one."""
        return None

    @property
    def special_tokens(self) -> frozenset[str]:
        """How special tokens are spelled."""
        return frozenset()

    @property
    def added_tokens(self) -> frozenset[str]:
        """How tokens that are found in a text before all others are spelled, special or not."""
        return self.special_tokens

    @property
    def known_ids(self) -> frozenset[int]:
        """The ids that have a token."""
        return frozenset(range(self.vocab_size))

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        return {self.decode([id_]): id_ for id_ in sorted(self.known_ids)}

    def id_to_token(self, id_: int) -> str | None:
        """How the vocabulary spells an id."""
        return next((token for token, other in self.vocab.items() if other == id_), None)

    def find_ids(self, tokens: Iterable[str]) -> tuple[int, ...]:
        """The ids of tokens, as the vocabulary spells them."""
        for token in tokens:
            if token not in self.vocab:
                raise ValueError(f"the tokenizer has no token {token!r}{suggest(token, self.vocab)}")
        return tuple(self.vocab[token] for token in tokens)

    def to_json(self) -> str:
        """The contents of a `tokenizer.json`."""
        return json.dumps(to_json(self), indent=2, ensure_ascii=False)

    @property
    def dtype(self) -> UIntDtype:
        """The smaller of uint16 and uint32 that holds every id and the mask."""
        return np.dtype(np.uint16 if self.vocab_size < 1 << 16 else np.uint32)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its JSON: tokenizers with the same digest give the same ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of many texts, as `encode` gives them but faster, in arrays of `dtype`."""
        return self.encode_batch_with_stats(texts)[0]

    def encode_batch_with_stats(self, texts: Sequence[str]) -> tuple[list[TokenIds], UnknownStats]:
        """The ids of many texts, and how much of them is unknown."""
        ids = [np.array(self.encode(text, allow_unknown=True), dtype=self.dtype) for text in texts]
        return ids, UnknownStats(sum(map(len, texts)))

    def unknown_text_message(self, stats: UnknownStats) -> str:
        """Why a text with so many unknown characters is refused."""
        letters = "".join(token for token in self.vocab if token not in self.special_tokens)
        is_alphabet = len(letters) == self.vocab_size - len(self.special_tokens) < 64
        known = repr("".join(sorted(letters))) if is_alphabet else f"{self.vocab_size:,} tokens"
        effect = (
            f"and would become {self.unk_token}, more than {MAX_UNKNOWN_FRACTION:.0%}"
            if self.unk_token
            else "and cannot be written"
        )
        return (
            f"{stats.format_counts()} {effect}; it has {known}: give it such a text, or take another tokenizer, as"
            " bytes or bpe:4096"
        )


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The decoded text of `ids`, divided among the ids.

    A tokenizer may decode an id differently after other ids (spaces, parts of characters), so the text of an id is
    what it adds to the decoded text. Of a character of several tokens, the last one gets all.
    """
    texts: list[str] = []
    context = done = 0
    for end in range(1, len(ids) + 1):
        known, longer = decode(ids[context:done]), decode(ids[context:end])
        if longer.endswith(REPLACEMENT_CHAR) and end < len(ids):
            texts.append("")
            continue
        texts.append(longer[len(known) :])
        context, done = done, end
    return texts
