"""Example templates that fit a model.

The kind of training data is inferred from the tokenizer: it does not know the characters of other texts, or
needs many more tokens for them.
"""

from __future__ import annotations

from functools import lru_cache

from unmask.data.tokenizers import BaseTokenizer
from unmask.serve._response_schemas import ExampleTemplate

_MAX_EXAMPLES = 4
"""The number of examples."""

_SAMPLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Function": (
        ("def is_even(n):\n    if", " n is None", ":\n        return", " False", "\n"),
        ("    for i in", " range(n)", ":\n        self.", "append", "(i)\n    return", " n"),
    ),
    "Class": (
        ("class Counter:\n    def __init__(self, name", "=None", "):\n        self.name =", " name", "\n"),
        ("\n    def add(self, value):\n        if", " value is None", ":\n            raise", " ValueError"),
        ("\n        self.", "count", " += len(value)\n        return self.", "count"),
    ),
    "Story": (
        ("The old man had lived by the", " river", " all his life, and he knew", " every boat"),
        (" that came down it. In the evening, when the", " work", " was done, he", " sat before"),
        (" his house and told the", " children", " about the great city."),
    ),
    "Article": (
        ("The town was founded in the", " nineteenth", " century, and its first", " railway station"),
        (" was opened a few years later. Today it is known for its", " old university"),
        (", which has", " more than", " ten thousand students."),
    ),
    "Letters": (
        ("the old man had lived by the ", "river", " all his life and he knew ", "every boat"),
        (" that came down it in the evening when the ", "work", " was done he ", "sat before"),
        (" his house and told the ", "children", " about the great city"),
    ),
    "Protein": (
        ("MKLAVTGSWE", "DLRKQ", "HFNPIYCMAG", "TVEKL", "RSDWQ"),
        ("NGHYFPLICA", "VMEKT", "RQSDNWGHLP"),
    ),
    "DNA": (
        ("ATGGCTAAGCTTGACCGT", "TACGGA", "CATTGCAAGTCCGATGAA", "CCTAGG", "TTCAAC"),
        ("GCATTAGCCGTTAAG", "CTGGAT", "ACCTGATAATGA"),
    ),
}
"""Each part of a text alternates between given and masked pieces; a part that is too long is left out."""

_SUPERSEDED_BY = {"Letters": "Story", "Protein": "Story", "DNA": "Protein"}
"""Samples that are left out if the tokenizer can also encode the other, which needs more characters."""


@lru_cache(maxsize=8)
def example_templates(tokenizer: BaseTokenizer, max_tokens: int) -> list[ExampleTemplate]:
    """At least one example of at most `max_tokens` tokens, the best fit first."""
    fits = {name: fit for name in _SAMPLES if (fit := _tokenizer_fit(tokenizer, name)) is not None}
    best = max((fit[0] for fit in fits.values()), default=0.0)
    names = [name for name, fit in fits.items() if fit[0] >= best / 2 and _SUPERSEDED_BY.get(name) not in fits]
    names.sort(key=lambda name: fits[name], reverse=True)
    return [_sample_example(tokenizer, name, max_tokens) for name in names[:_MAX_EXAMPLES]] or [
        _alphabet_example(tokenizer, max_tokens)
    ]


def _tokenizer_fit(tokenizer: BaseTokenizer, name: str) -> tuple[float, int] | None:
    """Characters per token of a sample, and its number of distinct tokens; None if some are unknown."""
    text = "".join(piece for part in _SAMPLES[name] for piece in part)
    try:
        ids = tokenizer.encode(text)
    except ValueError:
        return None
    unknown = tokenizer.unk_token
    if not ids or (unknown is not None and tokenizer.vocab.get(unknown) in ids):
        return None
    return round(len(text) / len(ids), 1), len(set(ids))


def _sample_example(tokenizer: BaseTokenizer, name: str, max_tokens: int) -> ExampleTemplate:
    """As many parts of a sample as fit, with holes as long as the text they replace; at least one hole."""
    template, text, room, parts = "", "", max_tokens, _SAMPLES[name]
    for part in parts:
        sizes = [len(tokenizer.encode(piece)) for piece in part]
        if sum(sizes) > room:
            break
        pieces = enumerate(zip(part, sizes, strict=True))
        template += "".join(f"<mask:{size}>" if index % 2 else piece for index, (piece, size) in pieces)
        text += "".join(part)
        room -= sum(sizes)
    if text:
        return ExampleTemplate(name=name, template=template, text=text)
    return _single_hole_example(tokenizer, name, parts[0][0], max_tokens)


def _single_hole_example(tokenizer: BaseTokenizer, name: str, text: str, max_tokens: int) -> ExampleTemplate:
    """The beginning of a text and a hole after it, for very short sequences."""
    hole = max(1, min(16, max_tokens // 3))
    ends = range(len(text), -1, -1)
    end = next(end for end in ends if end == 0 or len(tokenizer.encode(text[:end])) <= max_tokens - hole)
    return ExampleTemplate(name=name, template=f"{text[:end]}<mask:{hole}>", text=text[:end])


def _alphabet_example(tokenizer: BaseTokenizer, max_tokens: int) -> ExampleTemplate:
    """Characters of a vocabulary that fits none of the samples, and a hole."""
    characters = sorted(token for token in tokenizer.vocab if len(token) == 1 and token.isalnum())
    try:
        return _single_hole_example(tokenizer, "Tokens", "".join(characters[:8]), max_tokens)
    except ValueError:  # the tokenizer cannot encode them side by side
        return _single_hole_example(tokenizer, "Tokens", "", max_tokens)
