"""JSON schemas as expressions.

The members of an object are written in the order of the schema. Those that it does not name are written only if
`additionalProperties` asks for them. What is not supported is refused by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from unmask.config import suggest
from unmask.guidance.regex._expression import (
    Alternation,
    Concat,
    Node,
    Product,
    Reference,
    Repeat,
    literal,
    optional,
)
from unmask.guidance.regex._parser import parse_search
from unmask.guidance.regex.limits import WorkBudget
from unmask.guidance.structure import _json_text as text
from unmask.guidance.structure._schema_merge import (
    ANNOTATIONS,
    KEYWORDS_OF_TYPE,
    TYPES,
    Schema,
    are_disjoint,
    merged,
    type_of,
    types_of,
    values_of,
)

_MAX_STEPS = 1 << 14
"""Schemas inside a schema, counted as often as they are referred to beside other keywords."""
_MAX_COUNT = 1 << 12
_MAX_NESTING = 200
_ANY_VALUE = "any value"
_ASSERTIONS = {word for words in KEYWORDS_OF_TYPE.values() for word in words}
_KEYWORDS = {"type", "enum", "const", "nullable", "anyOf", "oneOf", "allOf", "$ref", *_ASSERTIONS, *ANNOTATIONS}
_BLANK = Alternation((literal(" "), literal("\n")))


def schema_expression(source: str) -> tuple[Node, dict[str, Node]]:
    """The texts of a JSON schema, and the rules that they refer to; a blank may precede, and blanks may follow."""
    try:
        document = json.loads(source, parse_constant=_refuse_constant)
        compiler = _Compiler(document)
        value = compiler.node(document, "#")
    except json.JSONDecodeError as error:
        raise ValueError(f"the JSON schema {source[:60]!r} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError("the JSON schema is nested too deeply; use fewer levels") from None
    return Concat((optional(_BLANK), value, Repeat(_BLANK, 0, None))), compiler.rules


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the JSON schema has {name}, which is no number of JSON")


class _Compiler:
    """Turns schemas of one document into nodes; each definition becomes a rule."""

    def __init__(self, document: Any) -> None:
        self.document, self.budget = document, WorkBudget("the JSON schema", _MAX_STEPS)
        anything = Reference(_ANY_VALUE)
        scalars = (*map(text.constant, (None, True, False)), text.NUMBER, text.ANY_STRING)
        some_member = Concat((text.ANY_STRING, text.COLON, anything))
        lists = text.array_of((), rest=anything), text.object_of((), (), some_member)
        self.rules: dict[str, Node] = {_ANY_VALUE: Alternation((*scalars, *lists))}

    def node(self, schema: Any, place: str) -> Node:
        """The texts of a schema; `place` is where it is, for messages."""
        self.budget.spend(1)
        if isinstance(schema, bool):
            return Reference(_ANY_VALUE) if schema else Alternation(())
        _check_schema(schema, place)
        rest = {word: value for word, value in schema.items() if word not in ANNOTATIONS}
        if rest.keys() == {"$ref"}:
            return self._reference(rest["$ref"], place)
        plain = self._plain(rest, place)
        for word in ("anyOf", "oneOf"):
            if isinstance(plain, Mapping) and word in plain:
                return self._options(word, plain, place)
        if isinstance(plain, bool) or not plain:
            return self.node(plain is not False, place)
        values = values_of(plain)
        types = types_of(plain)
        if values is None:
            return Alternation(tuple(getattr(self, f"_{name}")(plain, place) for name in types))
        known = [value for value in values if type_of(value) in types or (type_of(value), "number") in _integers(types)]
        literals = Alternation(tuple(map(text.constant, known)))
        if not plain.keys() & _ASSERTIONS:
            return literals
        others = {word: value for word, value in plain.items() if word not in ("enum", "const")}
        return Product(literals, self.node(others, place))

    def _reference(self, pointer: Any, place: str) -> Node:
        """The rule of a definition, which is compiled when it is first referred to."""
        target = self._resolve(pointer, place)
        if pointer not in self.rules:
            self.rules[pointer] = Alternation(())  # it may refer to itself
            self.rules[pointer] = self.node(target, pointer)
        return Reference(pointer)

    def _resolve(self, pointer: Any, place: str) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise ValueError(f"the $ref {pointer!r} at {place} is not supported; refer to a place as in '#/$defs/name'")
        here = self.document
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(here, list) and key.isdecimal() and int(key) < len(here):
                here = here[int(key)]
            elif isinstance(here, dict) and key in here:
                here = here[key]
            else:
                hint = suggest(key, list(here)) if isinstance(here, dict) else ""
                raise ValueError(f"the $ref {pointer!r} at {place} leads nowhere{hint}")
        return here

    def _plain(self, schema: Schema, place: str, nesting: int = 0) -> Schema:
        """The schema with its `$ref` and `allOf` replaced by what they say."""
        self.budget.spend(1)
        if isinstance(schema, bool) or not schema.keys() & {"$ref", "allOf"}:
            return schema
        if nesting > _MAX_NESTING:
            raise ValueError(f"the schema at {place} refers to itself beside other keywords, without an end")
        joined = [self._resolve(schema["$ref"], place)] if "$ref" in schema else []
        joined += _schemas(schema, "allOf", place) if "allOf" in schema else []
        result: Schema = {word: value for word, value in schema.items() if word not in ("$ref", "allOf")}
        for each in joined:
            if not isinstance(each, bool):
                _check_schema(each, place)
            part = self._plain(each, place, nesting + 1)
            if isinstance(result, bool) or isinstance(part, bool):
                result = result if part is True else False
                continue
            try:
                result = merged(result, part)
            except ValueError as error:
                raise ValueError(f"at {place} of the JSON schema, {error}") from None
        return result

    def _options(self, word: str, schema: Mapping[str, Any], place: str) -> Node:
        base = {name: value for name, value in schema.items() if name != word}
        options = _schemas(schema, word, place)
        if word == "oneOf" and not self._are_disjoint(options, place):
            raise ValueError(
                f"the options of oneOf at {place} may share values, as far as can be told from their types,"
                " constants and required members; use anyOf"
            )
        joined = [{"allOf": [base, option]} for option in options] if base else options
        return Alternation(tuple(self.node(each, f"{place}/{word}/{index}") for index, each in enumerate(joined)))

    def _are_disjoint(self, options: list[Any], place: str) -> bool:
        def plain(schema: Schema) -> Schema:
            self.budget.spend(1)
            if not isinstance(schema, bool):
                _check_schema(schema, place)
            return self._plain(schema, place)

        known = [plain(option) for option in options]
        pairs = ((one, other) for index, one in enumerate(known) for other in known[:index])
        return all(
            isinstance(one, Mapping) and isinstance(other, Mapping) and are_disjoint(one, other, plain)
            for one, other in pairs
        )

    def _null(self, schema: Mapping[str, Any], place: str) -> Node:
        return text.constant(None)

    def _boolean(self, schema: Mapping[str, Any], place: str) -> Node:
        return Alternation((text.constant(True), text.constant(False)))

    def _integer(self, schema: Mapping[str, Any], place: str) -> Node:
        least, most, above, below = _bounds(schema, place)
        lows = [math.ceil(least)] if least is not None else []
        lows += [math.floor(above) + 1] if above is not None else []
        highs = [math.floor(most)] if most is not None else []
        highs += [math.ceil(below) - 1] if below is not None else []
        return text.integer(max(lows, default=None), min(highs, default=None))

    def _number(self, schema: Mapping[str, Any], place: str) -> Node:
        least, most, above, below = _bounds(schema, place)
        low = max((bound for bound in (least, above) if bound is not None), default=None)
        high = min((bound for bound in (most, below) if bound is not None), default=None)
        if low is None and high is None:
            return text.NUMBER
        for bound in (low, high):
            if bound is not None and bound != int(bound):
                raise ValueError(f"the bound {bound} of numbers at {place} is not supported; use an integer")
        if low is not None and high is not None and low > high:
            return Alternation(())
        ends = None if low is None else int(low), None if high is None else int(high)
        return text.number(*ends, above is not None and low == above, below is not None and high == below)

    def _string(self, schema: Mapping[str, Any], place: str) -> Node:
        least, most = _counts(schema, "Length", place)
        if most is not None and most < least:
            return Alternation(())
        contents: list[Node] = []
        if "pattern" in schema:
            pattern = _typed(schema, "pattern", str, "a regular expression", place)
            contents.append(text.escaped(parse_search(pattern)))
        if "format" in schema:
            if schema["format"] not in text.FORMATS:
                raise ValueError(
                    f"the format {schema['format']!r} at {place} is not supported; use one of"
                    f" {', '.join(text.FORMATS)}, or pattern"
                )
            contents.append(text.format_content(schema["format"]))
        if least or most is not None or not contents:
            contents.append(Repeat(text.ANY_CHARACTER, least, most))
        return text.quoted(text.all_of(contents))

    def _array(self, schema: Mapping[str, Any], place: str) -> Node:
        if schema.get("uniqueItems", False) is not False:
            raise ValueError(f"uniqueItems at {place} is not supported; leave it out, or use enum")
        prefix = _schemas(schema, "prefixItems", place) if "prefixItems" in schema else []
        first = [self.node(each, f"{place}/prefixItems/{index}") for index, each in enumerate(prefix)]
        item = self.node(schema.get("items", True), f"{place}/items")
        least, most = _counts(schema, "Items", place)
        for count in (least, most or 0):
            if count > _MAX_COUNT:
                raise ValueError(f"the number of items at {place} is {count:,}; it may be up to {_MAX_COUNT:,}")
        if most is not None and most < least:
            return Alternation(())
        # Fewer items than there are in `prefixItems`, then all of these and more.
        lengths = range(least, len(first) if most is None else min(len(first), most + 1))
        shorter = [text.array_of(first[:count]) for count in lengths]
        if most is not None and most < len(first):
            return Alternation(tuple(shorter))
        needed = first + [item] * (least - len(first))
        extra = 0 if most is None else most - len(needed)
        flags = [False] * len(needed) + [True] * extra
        longer = text.array_of(needed + [item] * extra, flags, item if most is None else None)
        return Alternation((*shorter, longer))

    def _object(self, schema: Mapping[str, Any], place: str) -> Node:
        properties = _typed(schema, "properties", dict, "an object of schemas", place)
        required = _typed(schema, "required", list, "a list of names", place)
        if not all(isinstance(name, str) for name in required):
            raise ValueError(f"required at {place} must be a list of names; got {str(required)[:60]}")
        more = schema.get("additionalProperties", False)
        other = self.node(more, f"{place}/additionalProperties")
        members = {key: self.node(value, f"{place}/properties/{key}") for key, value in properties.items()}
        unnamed = self.node(schema.get("additionalProperties", True), place) if required else other
        members |= {key: unnamed for key in required if key not in members}
        rest: Node | None = None
        if more is not False:
            names = Alternation(tuple(map(text.string_literal, members)))
            key = Product(text.ANY_STRING, names, excludes=True) if members else text.ANY_STRING
            rest = Concat((key, text.COLON, other))
        nodes = [text.member(key, value) for key, value in members.items()]
        return text.object_of(nodes, [key not in required for key in members], rest)


def _check_schema(schema: Any, place: str) -> None:
    """ValueError for what is no schema, or has keywords that are not supported."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"the JSON schema must have an object, true or false at {place}; got {str(schema)[:40]!r}")
    for word in schema:
        if word not in _KEYWORDS:
            raise ValueError(
                f"the JSON schema has {word[:40]!r} at {place}, which is not supported{suggest(word, list(_KEYWORDS))}"
            )
    types = schema.get("type", "object")
    for name in types if isinstance(types, list) else [types]:
        if name not in TYPES:
            raise ValueError(f"the JSON schema has the type {name!r} at {place}; types are {', '.join(TYPES)}")
    if not isinstance(schema.get("enum", []), list):
        raise ValueError(f"enum at {place} must be a list of values; got {str(schema['enum'])[:40]!r}")


def _integers(types: list[str]) -> set[tuple[str, str]]:
    """Integers are numbers too."""
    return {("integer", "number")} if "number" in types else set()


def _schemas(schema: Mapping[str, Any], word: str, place: str) -> list[Any]:
    given = schema[word]
    if not isinstance(given, list) or not given:
        raise ValueError(f"{word} at {place} must be a list of schemas; got {str(given)[:40]!r}")
    return given


def _typed(schema: Mapping[str, Any], word: str, type_: Callable[[], Any], what: str, place: str) -> Any:
    value = schema.get(word, type_())
    if not isinstance(value, type_):  # type: ignore[arg-type]
        raise ValueError(f"{word} at {place} must be {what}; got {str(value)[:40]!r}")
    return value


def _bounds(schema: Mapping[str, Any], place: str) -> list[float | int | None]:
    """minimum, maximum, exclusiveMinimum and exclusiveMaximum."""
    bounds = [schema.get(word) for word in KEYWORDS_OF_TYPE["number"]]
    for word, bound in zip(KEYWORDS_OF_TYPE["number"], bounds, strict=True):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float)):
            raise ValueError(f"{word} at {place} must be a number; got {str(bound)[:40]!r}")
        if bound is not None and abs(bound) > 1e300:
            raise ValueError(f"{word} at {place} must be a number of at most 300 digits")
    return bounds


def _counts(schema: Mapping[str, Any], of: str, place: str) -> tuple[int, int | None]:
    """minLength and maxLength, or minItems and maxItems."""
    for word in (f"min{of}", f"max{of}"):
        count = schema.get(word, 0)
        if isinstance(count, bool) or not (isinstance(count, int | float) and count >= 0 and count == int(count)):
            raise ValueError(f"{word} at {place} must be an integer of 0 or above; got {str(count)[:40]!r}")
    most = schema.get(f"max{of}")
    return int(schema.get(f"min{of}", 0)), None if most is None else int(most)
