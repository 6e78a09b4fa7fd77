"""What a text must match, as a tree: the common form of regular expressions, JSON schemas and grammars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

MAX_DEPTH = 4
"""How often a rule may be open inside itself; recursion at the beginning or end of a rule is not counted."""


@dataclass(frozen=True)
class CharClass:
    """One character of a class, in the syntax of `re`."""

    source: str


@dataclass(frozen=True)
class ByteRange:
    """One byte from `low` to `high`."""

    low: int
    high: int


@dataclass(frozen=True)
class Concat:
    """One part after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alternation:
    """Any one of the options; without options, nothing matches."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A part `min_count` to `max_count` times; None is any number."""

    part: Node
    min_count: int
    max_count: int | None


@dataclass(frozen=True)
class Joined:
    """Parts in their order, with a separator between any two of them; then any number of `rest`, separated too."""

    parts: tuple[Node, ...]
    is_optional: tuple[bool, ...]
    separator: Node
    rest: Node | None = None


@dataclass(frozen=True)
class Product:
    """Texts that match `left`, and also `right`; or, if `excludes`, that match `left` and not `right`."""

    left: Node
    right: Node
    excludes: bool = False


@dataclass(frozen=True)
class Reference:
    """A rule, by its name."""

    rule: str


Node: TypeAlias = CharClass | ByteRange | Concat | Alternation | Repeat | Joined | Product | Reference


@dataclass(frozen=True)
class Expression:
    """A tree and the rules that it refers to; `subject` is what messages call it, as in `the pattern 'a+'`."""

    subject: str
    root: Node
    rules: Mapping[str, Node] = field(default_factory=dict)


def literal(text: str) -> Node:
    """The text itself."""
    return Concat(tuple(ByteRange(byte, byte) for byte in text.encode()))


def optional(part: Node) -> Node:
    """The part or nothing."""
    return Repeat(part, 0, 1)


def children(node: Node) -> tuple[Node, ...]:
    """The nodes that a node consists of."""
    match node:
        case Concat(parts) | Alternation(parts):
            return parts
        case Repeat(part):
            return (part,)
        case Joined(parts, _, separator, rest):
            return (*parts, separator, *(() if rest is None else (rest,)))
        case Product(left, right):
            return left, right
        case _:
            return ()
