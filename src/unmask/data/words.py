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

from unmask.data.lookup import Ids, Unsigned

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_BEYOND = r"\x80-\U0010ffff"

# GPT-2's words. Its classes of letters and digits are known here for ASCII only, so where a character beyond
# ASCII follows, the rest up to the next space stays together: the library finds the words in it.
_WORD = re.compile(
    rf"""
    \ ?[A-Za-z]++(?![{_BEYOND}])
    | '(?:s|t|re|ve|m|ll|d)
    | \ ?[^{_SPACE}A-Za-z0-9{_BEYOND}]++(?![{_BEYOND}])
    | \ ?[0-9]++(?![{_BEYOND}])
    | \ ?[^{_SPACE}]++
    | [{_SPACE}]+(?![^{_SPACE}])
    | [{_SPACE}]+
    """,
    re.VERBOSE,
)

LONGEST = 64
"""Characters of a word that is worth remembering."""

REMEMBERED = 1 << 18


def words(text: str) -> list[str]:
    """The text in parts that byte-level BPE encodes each for itself."""
    return _WORD.findall(text)


class WordLookup:
    """The ids of a text word by word, remembered."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        self._known: dict[str, bytes] = {}

    def encode(self, texts: Sequence[str], dtype: Unsigned) -> list[Ids]:
        """The ids of each text. The new words of all texts go to the library at once: it uses all cores."""
        if len(self._known) > REMEMBERED:
            self._known.clear()
        parted = [words(text) for text in texts]
        new = list(set().union(*parted).difference(self._known))
        encodings = self._inner.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            self._known[word] = array(dtype.char, encoding.ids).tobytes()
        known = self._known.__getitem__
        ids = [np.frombuffer(b"".join(map(known, parts)), dtype) for parts in parted]
        for word in new:
            if len(word) > LONGEST:
                del self._known[word]
        return ids


def representative(texts: Iterable[str], most: int) -> Iterator[str]:
    """About `most` words with the frequencies of the texts: every k-th of all their words in sorted order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(words(text))
    step = max(1, -(-counts.total() // most))
    position = 0
    for word in sorted(counts):
        before, position = position, position + counts[word]
        for _ in range(before // step, position // step):
            yield word
