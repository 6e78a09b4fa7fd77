"""The syntax tree of a regular expression.

The syntax is Python's, without back references (which are not regular), lookaround, anchors and flags.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

from unmask.guidance.regex._expression import Alternation, CharClass, Concat, Node, Repeat

_ATOM = re.compile(
    r"""
      \\(?: x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} | 0[0-7]{0,2} | [1-3][0-7]{2}
          | N\{[^}]*\} | [^bBAZ1-9xuUN] )
    | \[\^?\]?(?:\\.|[^]\\])*\]
    | [^\\[\](){}*+?|^$]
    | [\]{}]
    """,
    re.VERBOSE | re.DOTALL,
)
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})")


class _Parser:
    """A recursive-descent parser of patterns that `re` has accepted."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.pos = pattern, 0

    def parse_alternation(self) -> Node:
        options = [self.parse_concat()]
        while self._accept("|"):
            options.append(self.parse_concat())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def parse_search(self) -> Node:
        anything, options = Repeat(CharClass(r"[\s\S]"), 0, None), list[Node]()
        while not options or self._accept("|"):
            before = () if self._accept("^") else (anything,)
            found = self.parse_concat(until="|)$")
            options.append(Concat((*before, found, *(() if self._accept("$") else (anything,)))))
        if self.pos < len(self.pattern):
            raise self._unsupported("'$' before its end")
        return Alternation(tuple(options))

    def parse_concat(self, until: str = "|)") -> Node:
        parts: list[Node] = []
        while self.pos < len(self.pattern) and self.pattern[self.pos] not in until:
            parts.append(self._parse_quantifiers(self._parse_atom()))
        return Concat(tuple(parts))

    def _parse_atom(self) -> Node:
        if self._accept("("):
            if self._accept("?") and not self._accept(":"):
                name = re.compile(r"P<\w+>").match(self.pattern, self.pos)
                if name is None:
                    raise self._unsupported(f"'(?{self.pattern[self.pos : self.pos + 1]}...)'")
                self.pos = name.end()
            inside = self.parse_alternation()
            self.pos += 1  # its closing bracket
            return inside
        atom = _ATOM.match(self.pattern, self.pos)
        if atom is None:
            here = self.pattern[self.pos]
            shown = self.pattern[self.pos : self.pos + 2] if here == "\\" else here
            if here in "^$" or shown in ("\\A", "\\Z"):
                raise ValueError(
                    f"the pattern {self.pattern!r} has an anchor, {shown!r}; remove it: a pattern always matches"
                    " the whole text of a hole"
                )
            raise self._unsupported(repr(shown))
        self.pos = atom.end()
        return CharClass(atom[0] if atom[0] not in ("]", "{", "}") else "\\" + atom[0])

    def _parse_quantifiers(self, part: Node) -> Node:
        while quantifier := _QUANTIFIER.match(self.pattern, self.pos):
            sign, low, comma, high = quantifier.groups()
            if not (sign or low or high):
                return part  # `{}` and `{,}` match themselves
            self.pos = quantifier.end()
            if self._accept("+"):
                raise self._unsupported("a possessive repeat")
            self._accept("?")  # lazy or greedy: the same set of texts
            if sign:
                part = Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
            elif comma:
                part = Repeat(part, int(low or 0), int(high) if high else None)
            else:
                part = Repeat(part, int(low), int(low))
        return part

    def _accept(self, text: str) -> bool:
        accepted = self.pattern.startswith(text, self.pos)
        self.pos += len(text) * accepted
        return accepted

    def _unsupported(self, what: str) -> ValueError:
        return ValueError(
            f"the pattern {self.pattern!r} has {what}, which is not supported; use characters,"
            " character classes, groups, | and repeats"
        )


def parse(pattern: str) -> Node:
    """The tree of a pattern, which must match a text in full; ValueError if it is malformed or not supported."""
    return _parse(pattern, _Parser.parse_alternation)


def parse_search(pattern: str) -> Node:
    """The tree of the texts in which a pattern is found, as in a JSON schema: `^` and `$` may begin and end it."""
    return _parse(pattern, _Parser.parse_search)


def _parse(pattern: str, rule: Callable[[_Parser], Node]) -> Node:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated syntax of `re`
            re.compile(pattern)
        return rule(_Parser(pattern))
    except (re.error, OverflowError) as error:
        raise ValueError(f"the pattern {pattern[:60]!r} is not a regular expression: {error}") from None
    except RecursionError:
        raise ValueError(f"the pattern {pattern[:60]!r} is nested too deeply; use fewer groups") from None
