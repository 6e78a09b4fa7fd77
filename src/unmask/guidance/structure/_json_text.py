"""The texts of JSON values as expressions.

Every value has one spelling, up to a space that may follow a comma or a colon: strings are written as UTF-8 with the
short escapes of JSON only, and integers without a fraction or an exponent.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from unmask.guidance.regex._expression import (
    Alternation,
    ByteRange,
    CharClass,
    Concat,
    Joined,
    Node,
    Product,
    Repeat,
    literal,
    optional,
)
from unmask.guidance.regex._parser import parse

_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_PLAIN = r'[^"\\\x00-\x1f]'
_DIGIT = ByteRange(ord("0"), ord("9"))
_DIGITS = Repeat(_DIGIT, 1, None)

SPACE = optional(literal(" "))
COMMA, COLON = Concat((literal(","), SPACE)), Concat((literal(":"), SPACE))


def _character(source: str) -> Node:
    """A character of a class in the syntax of `re`, as it is written inside a string."""
    if len(source) == 1 and source != ".":
        return literal("\\" + _ESCAPES[source] if source in _ESCAPES else source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated syntax of `re`
        matches = re.compile(source)
    escapes = [literal("\\" + sign) for character, sign in _ESCAPES.items() if matches.fullmatch(character)]
    return Alternation((CharClass(f"(?={_PLAIN}){source}"), *escapes))


ANY_CHARACTER: Node = Alternation((CharClass(_PLAIN), *(literal("\\" + sign) for sign in _ESCAPES.values())))


def quoted(content: Node) -> Node:
    """A string with this content."""
    return Concat((literal('"'), content, literal('"')))


ANY_STRING = quoted(Repeat(ANY_CHARACTER, 0, None))


def escaped(node: Node) -> Node:
    """The content of strings whose values match the tree of a regular expression."""
    match node:
        case CharClass(source):
            return _character(source)
        case Concat(parts):
            return Concat(tuple(map(escaped, parts)))
        case Alternation(options):
            return Alternation(tuple(map(escaped, options)))
        case Repeat(part, least, most):
            return Repeat(escaped(part), least, most)
        case _:
            return node


def all_of(nodes: Sequence[Node]) -> Node:
    """Texts that match all nodes."""
    result = nodes[0]
    for node in nodes[1:]:
        result = Product(result, node)
    return result


def array_of(parts: Sequence[Node], is_optional: Sequence[bool] = (), rest: Node | None = None) -> Node:
    """A list of these items."""
    flags = tuple(is_optional) or (False,) * len(parts)
    return Concat((literal("["), Joined(tuple(parts), flags, COMMA, rest), literal("]")))


def object_of(members: Sequence[Node], is_optional: Sequence[bool], rest: Node | None = None) -> Node:
    """An object with these members, in this order."""
    return Concat((literal("{"), Joined(tuple(members), tuple(is_optional), COMMA, rest), literal("}")))


def member(key: str, value: Node) -> Node:
    """`"key": value`."""
    return Concat((string_literal(key), COLON, value))


def string_literal(value: str) -> Node:
    """A string; ValueError if it has a character without a spelling here."""
    if re.search(r"[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]", value):
        raise ValueError(f"the JSON schema has the text {value[:40]!r}, whose control characters are not supported")
    return literal('"' + "".join("\\" + _ESCAPES[c] if c in _ESCAPES else c for c in value) + '"')


def constant(value: Any) -> Node:
    """The text of a JSON value."""
    match value:
        case None:
            return literal("null")
        case bool():
            return literal("true" if value else "false")
        case str():
            return string_literal(value)
        case list():
            return array_of([constant(item) for item in value])
        case dict():
            return object_of([member(key, constant(item)) for key, item in value.items()], [False] * len(value))
        case _:
            return literal(repr(value))


NUMBER = Concat(
    (
        optional(literal("-")),
        Alternation((literal("0"), Concat((ByteRange(ord("1"), ord("9")), Repeat(_DIGIT, 0, None))))),
        optional(Concat((literal("."), _DIGITS))),
        optional(
            Concat(
                (
                    Alternation((literal("e"), literal("E"))),
                    optional(Alternation((literal("+"), literal("-")))),
                    Repeat(_DIGIT, 1, 2),
                )
            )
        ),
    )
)


def number(low: int | None, high: int | None, excludes_low: bool, excludes_high: bool) -> Node:
    """The numbers from `low` to `high`, or between them, without exponents."""
    options = []
    if high is None or high > 0 or (high == 0 and not excludes_high):
        from_zero = low is None or low < 0
        options.append(_decimal(0 if from_zero else low or 0, high, excludes_low and not from_zero, excludes_high))
    if low is None or low < 0:
        to_zero = high is None or high >= 0
        most = None if low is None else -low
        least = _decimal(0 if to_zero else -(high or 0), most, to_zero or excludes_high, excludes_low)
        options.append(Concat((literal("-"), least)))
    return Alternation(tuple(options))


def _decimal(low: int, high: int | None, excludes_low: bool, excludes_high: bool) -> Node:
    """The numbers from `low`, which is 0 or above, to `high`."""
    zeros, above_zero = Repeat(literal("0"), 0, None), ByteRange(ord("1"), ord("9"))
    no_fraction = optional(Concat((literal(".0"), zeros)))
    positive = Concat((literal("."), zeros, above_zero, Repeat(_DIGIT, 0, None)))
    any_fraction = optional(Concat((literal("."), _DIGITS)))
    if high == low:
        return Alternation(() if excludes_low or excludes_high else (Concat((literal(str(low)), no_fraction)),))
    options: list[Node] = [Concat((literal(str(low)), positive if excludes_low else any_fraction))]
    if high is None or high - low > 1:
        options.append(Concat((_natural(low + 1, None if high is None else high - 1), any_fraction)))
    if high is not None and not excludes_high:
        options.append(Concat((literal(str(high)), no_fraction)))
    return Alternation(tuple(options))


def integer(low: int | None, high: int | None) -> Node:
    """The integers from `low` to `high`; None is no bound."""
    options = []
    if high is None or high >= 0:
        options.append(_natural(max(low or 0, 0), high))
    if low is None or low < 0:
        most = None if low is None else -low
        options.append(Concat((literal("-"), _natural(max(1, -high if high is not None else 1), most))))
    return Alternation(tuple(options))


def _natural(low: int, high: int | None) -> Node:
    """The integers from `low`, which is 0 or above, to `high`."""
    options, length = list[Node](), len(str(low))
    last = length if high is None else len(str(high))
    for digits in range(length, last + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        final = 10**digits - 1 if high is None else min(high, 10**digits - 1)
        if first <= final:
            options.append(_between(str(first), str(final)))
    if high is None:
        options.append(Concat((ByteRange(ord("1"), ord("9")), Repeat(_DIGIT, length, None))))
    return Alternation(tuple(options))


def _between(first: str, final: str) -> Node:
    """The texts of digits of one length from `first` to `final`."""
    if first == "0" * len(first) and final == "9" * len(first):
        return Repeat(_DIGIT, len(first), len(first))
    if first[0] == final[0]:
        return Concat((literal(first[0]), _between(first[1:], final[1:])))
    nines, zeros = "9" * (len(first) - 1), "0" * (len(first) - 1)
    low, high = ord(first[0]), ord(final[0])
    options: list[Node] = []
    if first[1:] != zeros:
        options.append(Concat((literal(first[0]), _between(first[1:], nines))))
        low += 1
    if final[1:] != nines:
        options.append(Concat((literal(final[0]), _between(zeros, final[1:]))))
        high -= 1
    if low <= high:
        options.append(Concat((ByteRange(low, high), Repeat(_DIGIT, len(zeros), len(zeros)))))
    return Alternation(tuple(options))


_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_CLOCK})"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"

_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
}
FORMATS = tuple(_FORMATS)
"""The formats of strings that are regular."""


def format_content(name: str) -> Node:
    """The content of strings of a format."""
    return escaped(parse(_FORMATS[name]))
