"""Schemas that hypothesis makes: what is written is valid, and what is valid is written, with `jsonschema` as judge."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unmask.guidance import Structure
from unmask.guidance.regex._byte_dfa import START_STATE, ByteDFA, byte_dfa

# Values that schemas are compared on: everything up to a size, from scalars that bounds and enums are about.
SCALARS: list[Any] = [None, True, False, -2, 0, 1, 3, "", "a", "b", "ab", 'a"', "é"]
NAMES = ["a", "b", "c"]


def values_up_to(depth: int) -> list[Any]:
    """Scalars, lists of up to two values and objects of up to two members, nested `depth` times."""
    values = list(SCALARS)
    for _ in range(depth):
        few = values[::3]
        lists = [list(items) for n in range(3) for items in itertools.product(few, repeat=n)]
        objects = [
            dict(zip(names, items, strict=True))
            for n in range(3)
            for names in itertools.permutations(NAMES, n)
            for items in itertools.product(few, repeat=n)
        ]
        values = [*SCALARS, *lists, *objects]
    return values


VALUES = values_up_to(1)

scalar_schemas = st.one_of(
    st.just(True),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": st.sampled_from(SCALARS)}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "minimum": st.integers(-3, 3),
            "maximum": st.integers(-3, 3),
            "exclusiveMinimum": st.integers(-3, 3),
            "exclusiveMaximum": st.integers(-3, 3),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 3),
            "maxLength": st.integers(0, 3),
            "pattern": st.sampled_from(["a", "^a", "b$", "^[ab]*$", '"', "^.é?$", "a|^$"]),
        },
    ),
    st.fixed_dictionaries({"type": st.lists(st.sampled_from(["null", "boolean", "string", "integer"]), min_size=1)}),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=2)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": inner,
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "minItems": st.integers(0, 3),
                "maxItems": st.integers(0, 3),
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
                "required": names,
                "additionalProperties": st.one_of(st.booleans(), inner),
            },
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)}),
    )


schemas = st.recursive(scalar_schemas, containers, max_leaves=4)


def closed(schema: Any) -> Any:
    """The same schema for the judge: objects have no members that it does not name, unless it says so."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    whole = {word: value if word in ("enum", "const") else closed(value) for word, value in schema.items()}
    if "properties" in schema:
        whole["properties"] = {name: closed(value) for name, value in schema["properties"].items()}
    if schema.get("type") == "object":
        named = dict.fromkeys(schema.get("required", []), True)
        more = schema.get("additionalProperties", True)
        named = {name: closed(more) for name in named}
        whole["properties"] = {**named, **whole.get("properties", {})}
        whole.setdefault("additionalProperties", False)
    return whole


def is_written_in_order(schema: Any, value: Any) -> bool:
    """Whether the members of a value stand in the order of the schema, for some way of choosing among options."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return True
    if "anyOf" in schema:
        fitting = [each for each in schema["anyOf"] if jsonschema.Draft202012Validator(closed(each)).is_valid(value)]
        return any(is_written_in_order(each, value) for each in fitting)
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        inner = [*first, *[schema.get("items", True)] * len(value)]
        return all(is_written_in_order(each, item) for each, item in zip(inner, value, strict=False))
    if isinstance(value, dict) and schema.get("type") == "object":
        named = [*schema.get("properties", {}), *schema.get("required", [])]
        places = [named.index(name) if name in named else len(named) for name in value]
        more = schema.get("additionalProperties", True)
        inside = [
            is_written_in_order(schema.get("properties", {}).get(name, more), item) for name, item in value.items()
        ]
        return places == sorted(places) and all(inside)
    return True


def accepts(dfa: ByteDFA, text: str) -> bool:
    state = START_STATE
    for byte in text.encode():
        state = int(dfa.transitions[state, byte])
    return bool(dfa.accepting[state])


def spelled(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def distances(dfa: ByteDFA) -> np.ndarray[Any, Any]:
    """How many bytes each state is away from an end."""
    away = np.where(dfa.accepting, 0, 1 << 20)
    for _ in range(len(away)):
        nearer = np.minimum(away, 1 + away[dfa.transitions].min(1))
        if (nearer == away).all():
            return away
        away = nearer
    return away


def walks(dfa: ByteDFA, draws: int, seed: int) -> Iterator[str]:
    """Random texts of an automaton: some steps anywhere, then the shortest way to an end."""
    source, away = random.Random(seed), distances(dfa)
    for _ in range(draws):
        state, text, wander = START_STATE, bytearray(), source.randrange(24)
        while True:
            open_ = np.flatnonzero(away[dfa.transitions[state]] < 1 << 20)
            if dfa.accepting[state] and (len(text) >= wander or not len(open_)):
                break
            if len(text) >= wander:
                open_ = open_[away[dfa.transitions[state, open_]] == away[dfa.transitions[state, open_]].min()]
            byte = source.choice(open_.tolist())
            text.append(byte)
            state = int(dfa.transitions[state, byte])
        yield text.decode()


def compiled(schema: Any) -> tuple[ByteDFA | None, str]:
    """The automaton of a schema, or the sentence of its refusal."""
    try:
        return byte_dfa(Structure.json_schema(schema).expression()), ""
    except ValueError as error:
        return None, str(error)


def check(schema: Any, seed: int = 0) -> None:
    judge, strict = (jsonschema.Draft202012Validator(each) for each in (schema, closed(schema)))
    fitting = [value for value in VALUES if strict.is_valid(value) and is_written_in_order(schema, value)]
    dfa, refusal = compiled(schema)
    if dfa is None:
        assert "more than 8192 states" in refusal or ("no text" in refusal and not fitting), refusal
        return
    assert [value for value in fitting if not accepts(dfa, spelled(value))] == []
    assert [value for value in VALUES if not judge.is_valid(value) and accepts(dfa, spelled(value))] == []
    for text in walks(dfa, 8, seed):
        judge.validate(json.loads(text))
        strict.validate(json.loads(text))


@given(schemas, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_valid_and_what_is_valid_is_written(schema: Any, seed: int) -> None:
    check(schema, seed)


@pytest.mark.slow
@given(schemas, st.integers(0, 99))
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
def test_thousands_of_schemas(schema: Any, seed: int) -> None:
    check(schema, seed)


def joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that must hold together, or of which exactly one must, beside other keywords, or by reference."""
    several = st.lists(inner, min_size=1, max_size=2)
    whole = st.one_of(st.fixed_dictionaries({"allOf": several}), st.fixed_dictionaries({"oneOf": several}))
    beside = st.tuples(inner, inner, st.sampled_from(["allOf", "anyOf", "oneOf", "$ref"])).map(_beside)
    return st.one_of(containers(inner), whole, beside)


def _beside(parts: tuple[Any, Any, str]) -> Any:
    base, added, word = parts
    base = dict(base) if isinstance(base, dict) else {}
    return {**base, word: "#/$defs/shared" if word == "$ref" else [added]}


@st.composite
def documents(draw: st.DrawFn) -> Any:
    """Schemas with a definition that they may refer to, which may refer to itself."""
    inner = st.one_of(scalar_schemas, st.just({"$ref": "#/$defs/shared"}))
    own, shared = draw(st.recursive(inner, joined, max_leaves=4)), draw(st.recursive(inner, joined, max_leaves=3))
    return {**(own if isinstance(own, dict) else {}), "$defs": {"shared": shared}}


def check_what_is_written(schema: Any, seed: int) -> None:
    dfa, refusal = compiled(schema)
    if dfa is None:
        assert 20 < len(refusal) < 300
        return
    judge = jsonschema.Draft202012Validator(schema)
    for text in walks(dfa, 6, seed):
        value = json.loads(text)
        try:
            judge.validate(value)
        except RecursionError:  # the judge's own: a definition that is itself
            return


@given(documents(), st.integers(0, 99))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_joined_and_recursive_schemas_write_is_valid(schema: Any, seed: int) -> None:
    check_what_is_written(schema, seed)


@pytest.mark.slow
@given(documents(), st.integers(0, 99))
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
def test_thousands_of_joined_and_recursive_schemas(schema: Any, seed: int) -> None:
    check_what_is_written(schema, seed)
