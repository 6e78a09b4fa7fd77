"""Fast encoders of bytes, characters and GPT-2 words: the same ids as the `tokenizers` library, much faster.

Bytes and characters are looked up by numpy at hundreds of megabytes a second. Byte-level BPE encodes each word
separately, and most words repeat: each is encoded by the library once and then looked up.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import tokenizers
from numpy.typing import NDArray

TokenIds: TypeAlias = NDArray[np.unsignedinteger[Any]]
UIntDtype: TypeAlias = np.dtype[np.unsignedinteger[Any]]

_WHITESPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_NON_ASCII = r"\x80-\U0010ffff"

# GPT-2's words. Its classes of letters and digits are implemented for ASCII only: where another character
# follows, the rest up to the next space stays together, and the library finds the words in it.
_PRETOKEN_PATTERN = re.compile(
    rf"""
    \ ?[A-Za-z]++(?![{_NON_ASCII}])
    | '(?:s|t|re|ve|m|ll|d)
    | \ ?[^{_WHITESPACE}A-Za-z0-9{_NON_ASCII}]++(?![{_NON_ASCII}])
    | \ ?[0-9]++(?![{_NON_ASCII}])
    | \ ?[^{_WHITESPACE}]++
    | [{_WHITESPACE}]+(?![^{_WHITESPACE}])
    | [{_WHITESPACE}]+
    """,
    re.VERBOSE,
)

_MAX_CACHED_CHARS = 64
"""Characters of the longest word that is cached."""

_MAX_CACHED_WORDS = 1 << 18


class ByteEncoder:
    """The id of a byte is the byte."""

    def encode(self, texts: Sequence[str], dtype: UIntDtype) -> list[TokenIds]:
        """The UTF-8 bytes of each text."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError as error:
            char = error.object[error.start]
            raise ValueError(f"{char!r} is half a surrogate pair and has no UTF-8 bytes") from None
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(dtype)
        return _split_ids(ids, [len(data) for data in encoded])


class CharEncoder:
    """The id of a character is looked up in a table; characters that are not in it become `unk_id`."""

    def __init__(self, vocab: dict[str, int], unk_id: int | None = None) -> None:
        self._unk_id = -1 if unk_id is None else unk_id
        # One entry more than the largest code: larger codes are clipped to that one.
        self._table = np.full(max(map(ord, vocab)) + 2, self._unk_id, np.int32)
        self._known = np.zeros(len(self._table), bool)
        for char, id_ in vocab.items():
            self._table[ord(char)] = id_
            self._known[ord(char)] = True

    def encode_with_counts(self, texts: Sequence[str], dtype: UIntDtype) -> tuple[list[TokenIds], dict[str, int]]:
        """One id for each character of each text, and the counts of characters that are not in the table."""
        # A lone surrogate is passed on, to be reported as an unknown character.
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), "<u4")
        indices = np.minimum(codes, len(self._table) - 1)
        missing, counts = np.unique(codes[~self._known[indices]], return_counts=True)
        ids = _split_ids(self._table[indices].astype(dtype), [len(text) for text in texts])
        return ids, {chr(code): count for code, count in zip(missing.tolist(), counts.tolist(), strict=True)}


class CachedWordEncoder:
    """Encodes word by word, with a cache of words."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._cache: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str], dtype: UIntDtype) -> list[TokenIds]:
        """The ids of each text. New words of all texts are encoded in one call: the library uses all cores."""
        if len(self._cache) > _MAX_CACHED_WORDS:
            self._cache.clear()
        split_texts = [_pretokenize(text) for text in texts]
        new = list(set().union(*split_texts).difference(self._cache))
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            self._cache[word] = array(dtype.char, encoding.ids).tobytes()
        lookup = self._cache.__getitem__
        ids = [np.frombuffer(b"".join(map(lookup, words)), dtype) for words in split_texts]
        for word in new:
            if len(word) > _MAX_CACHED_CHARS:
                del self._cache[word]
        return ids


def sample_words(texts: Iterable[str], max_words: int) -> Iterator[str]:
    """About `max_words` words with the frequencies of the texts: every k-th of all their words in sorted order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_pretokenize(text))
    step = max(1, -(-counts.total() // max_words))
    position = 0
    for word in sorted(counts):
        before, position = position, position + counts[word]
        for _ in range(before // step, position // step):
            yield word


def _pretokenize(text: str) -> list[str]:
    """The words of a text, which byte-level BPE encodes separately."""
    return _PRETOKEN_PATTERN.findall(text)


def _split_ids(ids: TokenIds, lengths: Sequence[int]) -> list[TokenIds]:
    return [ids[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
