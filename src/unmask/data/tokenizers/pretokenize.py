"""The words that byte-level BPE works on: the same words occur again and again, and need to be encoded once.

A library takes a second for one or two megabytes, most of it to find the words and keep track of where they
stood. Here each word is looked up, and only new ones go to the library.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from unmask.data.tokenizers.fast_encoders import TokenIds, UIntDtype

_WHITESPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_NON_ASCII = r"\x80-\U0010ffff"

# GPT-2's words. Its classes of letters and digits are known here for ASCII only, so where a character beyond
# ASCII follows, the rest up to the next space stays together: the library finds the words in it.
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
"""Characters of a word that is worth remembering."""

_MAX_CACHED_WORDS = 1 << 18


def _pretokenize(text: str) -> list[str]:
    """The text in parts that byte-level BPE encodes each for itself."""
    return _PRETOKEN_PATTERN.findall(text)


class CachedWordEncoder:
    """The ids of a text word by word, remembered."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._cache: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str], dtype: UIntDtype) -> list[TokenIds]:
        """The ids of each text. The new words of all texts go to the library at once: it uses all cores."""
        if len(self._cache) > _MAX_CACHED_WORDS:
            self._cache.clear()
        parted = [_pretokenize(text) for text in texts]
        new = list(set().union(*parted).difference(self._cache))
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            self._cache[word] = array(dtype.char, encoding.ids).tobytes()
        known = self._cache.__getitem__
        ids = [np.frombuffer(b"".join(map(known, parts)), dtype) for parts in parted]
        for word in new:
            if len(word) > _MAX_CACHED_CHARS:
                del self._cache[word]
        return ids


def sample_words(texts: Iterable[str], max_words: int) -> Iterator[str]:
    """About `most` words with the frequencies of the texts: every k-th of all their words in sorted order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_pretokenize(text))
    step = max(1, -(-counts.total() // max_words))
    position = 0
    for word in sorted(counts):
        before, position = position, position + counts[word]
        for _ in range(before // step, position // step):
            yield word
