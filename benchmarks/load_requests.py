"""Requests of all kinds, a tenth of them hostile, for `benchmarks.serving_load`."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.serving import PROMPTS

Behaviour = Literal["reads", "leaves", "sends half", "reads slowly"]
"""What a client does: it reads the whole answer; closes the connection after a while; closes it in the middle of its
request; reads a few bytes at a time, and then closes it."""

_REGEXES = (
    "[a-z]{3,30}",
    "[0-9]+",
    "(yes|no|perhaps)( (yes|no|perhaps))*",
    r"\d{4}(-\d+)*",
    "[A-Z][a-z]+ [a-z]+",
    "(ab|cd)*",
    r"\w+@\w+\.org",
    "[^\\n]*",
)
_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "string", "maxLength": 12},
)
_HOSTILE_REGEXES = (
    "(a|b)*a(a|b){60}",
    ".*a.{100}b",
    "(a?){5000}",
    "a{4294967294}",
    "((((a{9}){9}){9}){9}){9}",
    "(((((a*)*)*)*)*)*",
    r"([^\W\d]){1,500}",
    "(.*,){100}P",
    "(.+){99}",
    "((a{1,30}){1,30}){1,30}",
    "(.)\\1{99}",
    "[[a]b]{99}",
    "(" * 99,
)
_HOSTILE_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"enum": []},
    {"type": "string", "minLength": 9, "maxLength": 3},
    {"type": "array", "minItems": 10**6},
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}},
    {"type": "string", "pattern": "(a|b)*a(a|b){60}"},
    {"anyOf": [{"type": "array", "minItems": n, "items": {"enum": [*range(50)]}} for n in range(40)]},
    {"not": {}},
    {"type": 3},
)
_BAD_BODIES = (
    b"{",
    b"",
    b"[" * 5000,
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "tempratur": 1}',
    b'{"prompt": "a", "n": 1e99}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "' + b"a" * 1_100_000 + b'"}',
    b'{"prompt": "a", "max_tokens": 999999999}',
    b"null",
)


@dataclass(frozen=True)
class LoadRequest:
    """A request, and how its client behaves."""

    kind: str
    path: str
    body: bytes
    behaviour: Behaviour = "reads"
    is_hostile: bool = False


def make_request(number: int, kinds: dict[str, int], seed: int = 0) -> LoadRequest:
    """A request that follows from its number; every tenth is hostile, whatever its number of tokens."""
    chance = random.Random(f"{seed} {number}")
    if number % 10 == 9:
        return _hostile(number, chance)
    kind = chance.choices(list(kinds), list(kinds.values()))[0]
    path, body = _make_body(kind, chance)
    seeded = {} if kind == "tokenize" else {"seed": number}
    return LoadRequest(kind, path, json.dumps({**body, **seeded}).encode())


KINDS = {
    "short": 30,
    "tokenize": 10,
    "infill": 14,
    "completion": 12,
    "stream": 12,
    "score": 6,
    "regex": 6,
    "schema": 5,
    "chat": 6,
    "long": 3,
}
"""Kinds of requests that are not hostile, and how many there are of each, in relation."""


def _make_body(kind: str, chance: random.Random) -> tuple[str, dict[str, Any]]:
    prompt, tokens = chance.choice(PROMPTS) * chance.randint(1, 4), chance.randint(4, 24)
    template = f"{prompt}<mask:{tokens}> in <mask:{chance.randint(1, 8)}>"
    completion = {"prompt": prompt, "max_tokens": tokens, "steps": 8}
    if kind == "stream":
        if chance.random() < 0.5:
            return "/v1/completions", {**completion, "stream": True}
        return "/v1/infill", {"template": template, "steps": 8, "stream": True}
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "short": ("/v1/completions", {"prompt": chance.choice(PROMPTS), "max_tokens": 1, "steps": 1}),
        "tokenize": ("/v1/tokenize", {"text": prompt}),
        "infill": ("/v1/infill", {"template": template, "steps": 8, "n": chance.randint(1, 3)}),
        "completion": ("/v1/completions", {**completion, "n": chance.randint(1, 2)}),
        "score": ("/v1/score", {"text": prompt, "draws": 32}),
        "regex": ("/v1/completions", {**completion, "max_tokens": 24, "regex": chance.choice(_REGEXES)}),
        "schema": ("/v1/completions", {**completion, "max_tokens": 32, "response_format": _json(_SCHEMAS, chance)}),
        "chat": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "steps": 8},
        ),
        "long": ("/v1/completions", {"prompt": "import ", "max_tokens": 96, "steps": 96, "n": 2}),
    }
    return made[kind]


def _json(schemas: tuple[dict[str, Any], ...], chance: random.Random) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": chance.choice(schemas)}}


def _hostile(number: int, chance: random.Random) -> LoadRequest:
    completion = {"prompt": chance.choice(PROMPTS), "max_tokens": 24, "steps": 8, "seed": number}
    long = {**completion, "max_tokens": 96, "steps": 96, "n": 4}

    def request(kind: str, body: dict[str, Any] | bytes, behaviour: Behaviour = "reads") -> LoadRequest:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return LoadRequest(kind, "/v1/completions", data, behaviour, is_hostile=True)

    kind = chance.choice(("pattern", "schema", "leaver", "half", "slow reader", "bad body"))
    if kind == "pattern":
        return request("hostile pattern", {**completion, "regex": chance.choice(_HOSTILE_REGEXES)})
    if kind == "schema":
        return request("hostile schema", {**completion, "response_format": _json(_HOSTILE_SCHEMAS, chance)})
    if kind == "leaver":
        return request("leaver", {**long, "stream": chance.random() < 0.5}, "leaves")
    if kind == "half":
        return request("half a request", long, "sends half")
    if kind == "slow reader":
        return request("slow reader", {**long, "stream": True}, "reads slowly")
    return request("bad body", chance.choice(_BAD_BODIES))
