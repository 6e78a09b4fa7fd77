"""Bytes and characters to ids by numpy: hundreds of megabytes a second, where a tokenizer takes a few."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.unsignedinteger[Any]]
UIntDtype: TypeAlias = np.dtype[np.unsignedinteger[Any]]


class ByteEncoder:
    """The id of a byte is the byte."""

    def encode(self, texts: Sequence[str], dtype: UIntDtype) -> list[TokenIds]:
        """The UTF-8 bytes of each text."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            char = error.object[error.start]
            raise ValueError(f"{char!r} is half a character and has no bytes") from None
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(dtype)
        return _split_ids(ids, [len(each) for each in encoded])


class CharEncoder:
    """The id of a character stands in a table; one that does not is `unknown`, or to be refused."""

    def __init__(self, vocab: dict[str, int], unk_id: int | None = None) -> None:
        self._unk_id = -1 if unk_id is None else unk_id
        # One entry more than the largest code: all codes beyond it are clipped to that one.
        self._table = np.full(max(map(ord, vocab)) + 2, self._unk_id, np.int32)
        self._known = np.zeros(len(self._table), bool)
        for char, id_ in vocab.items():
            self._table[ord(char)] = id_
            self._known[ord(char)] = True

    def encode_with_counts(self, texts: Sequence[str], dtype: UIntDtype) -> tuple[list[TokenIds], dict[str, int]]:
        """One id for each character of each text, and how often those occur that are not in the table."""
        # A lone surrogate is passed on, to be told by name as every other unknown character.
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), "<u4")
        places = np.minimum(codes, len(self._table) - 1)
        missing, counts = np.unique(codes[~self._known[places]], return_counts=True)
        ids = _split_ids(self._table[places].astype(dtype), [len(text) for text in texts])
        return ids, {chr(code): count for code, count in zip(missing.tolist(), counts.tolist(), strict=True)}


def _split_ids(ids: TokenIds, lengths: Sequence[int]) -> list[TokenIds]:
    return [ids[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
