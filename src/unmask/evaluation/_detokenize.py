"""Spaced tokens back to plain text, by the rules of the published zero-shot evaluations (SEDD, MDLM).

A perplexity depends on the text that is scored, so the rules are kept as published, with their flaws: none fully
inverts its tokenizer, and their order matters. Each rule passes over the text once, from left to right. The rules do
not change case, `<unk>` (except for PTB), ` n't` (except for PTB), and the `` and '' of the original LAMBADA files.

One published rule for WikiText is left out: it was meant to join `' 90`, but its pattern also requires two slashes,
which no text has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

_Rule: TypeAlias = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


@dataclass(frozen=True)
class Detokenizer:
    """Rules (pattern, replacement), applied one after the other."""

    name: str
    rules: tuple[_Rule, ...]

    def __call__(self, text: str) -> str:
        for pattern, replacement in self.rules:
            text = pattern.sub(replacement, text)
        return text


def _literal(old: str, new: str) -> _Rule:
    return re.compile(re.escape(old)), new


def _strip_inside(opening: str, closing: str) -> _Rule:
    """Remove white space inside a pair, which ends at the first closing mark."""
    inner = f"[^{re.escape(closing)}]"
    # A * before a lazy group and another after it would try every division of a long run of spaces.
    pattern = re.compile(f"{re.escape(opening)}({inner}*){re.escape(closing)}")
    return pattern, lambda match: f"{opening}{match[1].strip()}{closing}"


def _unpad_inside(opening: str, closing: str) -> _Rule:
    """`( a )` to `(a)`: one space on both sides, and no other such mark between them."""
    inner = f"[^{re.escape(opening + closing)}]"
    pattern = re.compile(f"{re.escape(opening)} ({inner}+) {re.escape(closing)}")
    return pattern, lambda match: f"{opening}{match[1]}{closing}"


def _attach_left(mark: str) -> _Rule:
    """Remove the space before a mark between two spaces."""
    return _literal(f" {mark} ", f"{mark} ")


WIKITEXT = Detokenizer(
    "WikiText",
    (
        _literal("s '", "s'"),
        *(_literal(f" @{mark}@ ", mark) for mark in "-,."),
        *map(_attach_left, ":;.!?,"),
        *(_strip_inside(*pair) for pair in ("()", "[]", "{}", '""', "''")),
        *(_literal(" ".join("=" * depth), "=" * depth) for depth in (4, 3, 2)),
        _literal(" ° ", "°"),
        _literal(" \n", "\n"),
        _literal("\n ", "\n"),
        _literal(" N ", " 1 "),  # a number, where it was PTB's
        _literal(" 's", "'s"),
    ),
)

PTB = Detokenizer(
    "PTB",
    (
        _literal(" 's", "'s"),
        _literal("s ' ", "s' "),
        _literal(" n't", "n't"),
        _literal(" \n ", "\n"),
        _literal(r"\/", "/"),
        (re.compile("(?<= )N(?= )"), "1"),  # every N between spaces; one at an end of the text stays
        _literal("$ 1", "$1"),
        _literal("# 1", "#1"),
        _literal("<unk>", "?"),
    ),
)

LM1B = Detokenizer(
    "LM1B",
    (
        _literal("http : / / ", "http://"),
        _literal("https : / / ", "https://"),
        (re.compile(r" (?='\w)"), ""),
        (re.compile(r" (\w+) \. "), r" \1. "),
        (re.compile(r" (\w+) \.$"), r" \1."),
        *(rule for mark in "?!" for rule in (_attach_left(mark), (re.compile(rf" \{mark}$"), mark))),
        *map(_attach_left, ",:;"),
        _literal(" / ", "/"),
        *(_unpad_inside(*pair) for pair in ('""', "''", "()", "[]")),
        _literal("$ ", "$"),
        _literal("£ ", "£"),
    ),
)

LAMBADA = Detokenizer(
    "LAMBADA",
    (
        (re.compile("[“”]"), '"'),
        (re.compile(r"\s+\Z"), ""),
        (re.compile(r"\A\s*"), "\n"),  # a passage starts on a new line
    ),
)

SCIENTIFIC_PAPERS = Detokenizer("scientific papers", WIKITEXT.rules + LM1B.rules)
"""Scientific papers: WikiText's rules, then LM1B's."""
