"""Grammars in GBNF, the format of llama.cpp: rules such as `root ::= "a" root? [0-9]{2,3} # a comment`."""

from __future__ import annotations

import re

from unmask.config import suggest
from unmask.guidance.regex._expression import (
    Alternation,
    CharClass,
    Concat,
    Node,
    Reference,
    Repeat,
    children,
    literal,
)

_TOKEN = re.compile(
    r"""
      (?P<skip> \s+ | \#[^\n]* )
    | (?P<rule> [A-Za-z_][A-Za-z0-9_-]* (?=\s*::=) )
    | (?P<name> [A-Za-z_][A-Za-z0-9_-]* )
    | (?P<text> "(?:\\.|[^"\\\n])*" )
    | (?P<class> \[(?:\\.|[^]\\])*\] )
    | (?P<count> \{\s*\d+\s*(?:,\s*\d*\s*)?\} )
    | (?P<sign> ::= | [|()*+?.] )
    """,
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|([^\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_ANY = CharClass(r"[\s\S]")


def parse_grammar(text: str) -> tuple[Node, dict[str, Node]]:
    """The node of the rule `root`, and all rules; ValueError if the grammar is malformed."""
    try:
        rules = _Parser(text).parse_rules()
        used = {name: _references(node) for name, node in rules.items()}
    except RecursionError:
        raise ValueError("the grammar is nested too deeply; use fewer groups") from None
    if "root" not in rules:
        raise ValueError("the grammar has no rule `root`, with which its texts begin; name one so")
    for name, references in used.items():
        for unknown in references - rules.keys():
            hint = suggest(unknown, list(rules))
            raise ValueError(f"the rule {name!r} of the grammar refers to {unknown!r}, which there is not{hint}")
    return Reference("root"), rules


def _references(node: Node) -> set[str]:
    if isinstance(node, Reference):
        return {node.rule}
    return set().union(*map(_references, children(node)))


class _Parser:
    """A recursive-descent parser over the tokens of a grammar."""

    def __init__(self, text: str) -> None:
        self.tokens, self.index = _tokens(text), 0

    def parse_rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._kind != "end":
            name = self._take("rule")
            self._take("::=")
            if name in rules:
                raise ValueError(f"the grammar has the rule {name!r} twice; join its alternatives with |")
            rules[name] = self._parse_alternatives()
        return rules

    def _parse_alternatives(self) -> Node:
        options = [self._parse_sequence()]
        while self._kind == "|":
            self._take("|")
            options.append(self._parse_sequence())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _parse_sequence(self) -> Node:
        parts: list[Node] = []
        while self._kind not in ("|", ")", "rule", "end"):
            part = self._parse_item()
            while self._kind in ("*", "+", "?", "count"):
                part = _repeated(part, self._take(self._kind))
            parts.append(part)
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _parse_item(self) -> Node:
        kind, token, _ = self.tokens[self.index]
        if kind == "(":
            self._take("(")
            inside = self._parse_alternatives()
            self._take(")")
            return inside
        self._take(kind if kind in ("name", "text", "class", ".") else "name, text, class or group")
        if kind == "name":
            return Reference(token)
        if kind == "text":
            return literal("".join(_characters(token[1:-1])))
        return _ANY if kind == "." else _char_class(token)

    @property
    def _kind(self) -> str:
        return self.tokens[self.index][0]

    def _take(self, kind: str) -> str:
        found, token, line = self.tokens[self.index]
        if found != kind:
            what = "its end" if found == "end" else repr(token[:40])
            wanted = "a rule, as in `root ::= ...`" if kind == "rule" else kind
            raise ValueError(f"line {line} of the grammar has {what} where {wanted} should be")
        self.index += 1
        return token


def _tokens(text: str) -> list[tuple[str, str, int]]:
    """(kind, text, line) of each token; the kind of a sign is the sign."""
    tokens, place, line = list[tuple[str, str, int]](), 0, 1
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            shown = text[place : place + 20].splitlines()[0]
            raise ValueError(f"line {line} of the grammar has {shown!r}, which is no token of GBNF")
        if token.lastgroup != "skip":
            tokens.append((token[0] if token.lastgroup == "sign" else str(token.lastgroup), token[0], line))
        place, line = token.end(), line + token[0].count("\n")
    return [*tokens, ("end", "", line)]


def _repeated(part: Node, sign: str) -> Node:
    if sign in ("*", "+", "?"):
        return Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
    low, comma, high = sign[1:-1].replace(" ", "").partition(",")
    if high and int(high) < int(low):
        raise ValueError(f"the grammar repeats from {low} to {high} times; the first number must not be larger")
    return Repeat(part, int(low), int(high) if high else None if comma else int(low))


def _characters(text: str) -> list[str]:
    """The characters of a text with escapes."""
    characters = []
    for found in _CHARACTER.finditer(text):
        *codes, escaped, plain = found.groups()
        code = next((int(code, 16) for code in codes if code), None)
        if code is not None and (code > 0x10FFFF or 0xD800 <= code < 0xE000):
            raise ValueError(f"the grammar has {found[0]!r}, which is no character")
        if escaped and escaped not in _ESCAPES:
            raise ValueError(f"the grammar has the escape {found[0]!r}, which is unknown; write it without \\")
        characters.append(chr(code) if code is not None else _ESCAPES[escaped] if escaped else plain)
    return characters


def _char_class(token: str) -> Node:
    """A class such as [^a-z\\n], in the syntax of `re`."""
    negated = token.startswith("[^")
    inside = token[2:-1] if negated else token[1:-1]
    # A hyphen is a range only if it is not escaped and stands between two characters.
    pieces = [found[0] for found in _CHARACTER.finditer(inside)]
    codes = [ord(character) for character in _characters(inside)]
    ranges, index = list[tuple[int, int]](), 0
    while index < len(codes):
        is_range = pieces[index + 1 : index + 2] == ["-"] and index + 2 < len(codes)
        last = index + 2 if is_range else index
        if codes[index] > codes[last]:
            raise ValueError(f"the class {token[:40]!r} of the grammar has a range that ends before it begins")
        ranges.append((codes[index], codes[last]))
        index = last + 1
    if not ranges:
        return _ANY if negated else Alternation(())
    spelled = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
    return CharClass(f"[{'^' * negated}{spelled}]")
