"""A regular expression, JSON schema or grammar by its source: what commands and requests give, and caches know."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from unmask.config import suggest
from unmask.guidance.regex._expression import CharClass, Concat, Expression, Node, Repeat, literal
from unmask.guidance.regex._parser import parse
from unmask.guidance.structure._gbnf import parse_grammar
from unmask.guidance.structure._schema import schema_expression

_MAX_SHOWN = 60
_MAX_SOURCE = 1 << 16
"""Characters of a schema or grammar."""
_Wanted = TypeVar("_Wanted")
_PARSERS: dict[str, Callable[[str], tuple[Node, Mapping[str, Node]]]] = {
    "regex": lambda source: (parse(source), {}),
    "json_schema": schema_expression,
    "grammar": parse_grammar,
}
_NAMES = {"regex": "the pattern", "json_schema": "the JSON schema", "grammar": "the grammar"}


@dataclass(frozen=True)
class Structure:
    """What the text of a hole must match."""

    kind: Literal["regex", "json_schema", "grammar"]
    """The language that the source is written in."""
    source: str
    """A regular expression, a JSON schema as JSON, or a grammar in GBNF, the format of llama.cpp."""
    before: str = ""
    """A fixed text before that, such as the tag of a call."""
    after: str = ""
    """A fixed text after it, which blanks may follow."""

    def __post_init__(self) -> None:
        if self.kind != "regex" and len(self.source) > _MAX_SOURCE:
            raise ValueError(f"{self.name} has {len(self.source):,} characters; it may have up to {_MAX_SOURCE:,}")

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """Texts that match a regular expression in full."""
        return cls("regex", pattern)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Structure:
        """JSON texts of a schema, which is given as a dictionary or as JSON."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            source = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from None
        return cls("json_schema", source)

    @classmethod
    def grammar(cls, text: str) -> Structure:
        """Texts of a context-free grammar, from its rule `root` on."""
        return cls("grammar", text)

    @classmethod
    def choose(
        cls,
        regex: _Wanted | None = None,
        schema: Mapping[str, Any] | bool | str | None = None,
        grammar: str | None = None,
    ) -> _Wanted | Structure | None:
        """The one of these that is given; ValueError if there are two."""
        if sum(each is not None for each in (regex, schema, grammar)) > 1:
            raise ValueError("a text can have one of regex, a JSON schema and a grammar; give one of them")
        if schema is not None:
            return cls.json_schema(schema)
        return regex if grammar is None else cls.grammar(grammar)

    @staticmethod
    def schema_of_response(response_format: Mapping[str, Any]) -> Mapping[str, Any] | bool | None:
        """The schema that a request asks for, as OpenAI's clients say it; None for any text.

        `{"type": "json_object"}` is any object, unless it has a `schema`, as llama.cpp's clients send it.
        """
        kind = response_format.get("type")
        if kind == "text":
            return None
        known = {"json_object": ("type", "schema"), "json_schema": ("type", "json_schema")}
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(f"the type of response_format must be text, json_object or json_schema; got {kind!r}")
        for name in response_format:
            if name not in known[kind]:
                raise ValueError(f"response_format of type {kind} has no field {name!r}{suggest(name, known[kind])}")
        if kind == "json_object":
            schema = response_format.get("schema", {"type": "object", "additionalProperties": True})
        else:
            described = response_format.get("json_schema")
            schema = described.get("schema") if isinstance(described, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise ValueError(
                'response_format must have a schema, as in {"type": "json_schema", "json_schema": {"schema": {}}}'
            )
        return schema

    @property
    def name(self) -> str:
        """What it is, as in `the pattern`."""
        return _NAMES[self.kind]

    @property
    def subject(self) -> str:
        """What messages call it."""
        shown = self.source if len(self.source) <= _MAX_SHOWN else f"{self.source[: _MAX_SHOWN - 3]}..."
        return f"{self.name} {shown!r}"

    def expression(self) -> Expression:
        """Its tree; ValueError if it is malformed or not supported."""
        root, rules = _PARSERS[self.kind](self.source)
        if self.before or self.after:
            blanks = Repeat(CharClass(r"[ \n]"), 0, None)
            root = Concat((literal(self.before), root, literal(self.after), blanks))
        return Expression(self.subject, root, rules)
