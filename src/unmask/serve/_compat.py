"""Fields of other servers' APIs.

Unknown fields are refused, because a misspelt option must not be ignored. But clients also send labels (such as
`user`) and options that are switched off: labels are accepted and ignored, and unsupported options are accepted
with their neutral value only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

from unmask.config import suggest

IGNORED_FIELDS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "priority",
    "cache_prompt",
    "keep_alive",
)
"""Accepted with any value and ignored: they do not affect the text."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({}, []),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "mirostat": (0,),
    "min_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "modalities": (["text"],),
}
"""Unsupported options of other servers, and their values without effect."""


@dataclass(frozen=True)
class Dialect:
    """What the clients of another server send beside the fields of a request."""

    ignored: tuple[str, ...] = ()
    """Accepted with any value and ignored."""
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Unsupported options, and their values without effect."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields."""
    empty: tuple[str, ...] = ()
    """Fields of which an empty text means that they are not given."""


def normalize_fields(body: dict[str, Any], field_names: Iterable[str], dialect: Dialect) -> dict[str, Any]:
    """The supported fields of a request; null means not given."""
    names = set(field_names)
    neutral_values = {**NEUTRAL_VALUES, **dialect.neutral}
    body = {name: value for name, value in body.items() if not (name in dialect.empty and value == "")}
    for alias, canonical in dialect.aliases.items():
        body = _rename_field(body, alias, canonical)
    if "max_tokens" in names:
        body = _rename_field(body, "max_completion_tokens", "max_tokens")
    supported = {}
    for name, value in body.items():
        if name in names:
            if value is not None:
                supported[name] = value
        elif name == "best_of":
            _check_best_of(value, body.get("n"))
        elif name in neutral_values:
            if value is not None and not any(_is_neutral(value, each) for each in neutral_values[name]):
                neutral = " or ".join(_to_json(each) for each in neutral_values[name])
                raise field_error(name, f"{name} is not supported here: leave it out, or send {neutral}")
        elif name not in IGNORED_FIELDS and name not in dialect.ignored:
            shown = name if len(name) <= 40 else f"{name[:40]}..."
            hint = suggest(shown, [*names, *neutral_values])
            raise field_error(shown, f"there is no field {shown!r}{hint}")
    return supported


def field_error(param: str, message: str) -> PydanticCustomError:
    """An error of a field; the message is returned to the client unchanged."""
    return PydanticCustomError("refused", "{sentence}", {"param": param, "sentence": message})


def _rename_field(body: dict[str, Any], alias: str, canonical: str) -> dict[str, Any]:
    if alias not in body:
        return body
    both = body.get(canonical) is not None and body[alias] is not None
    if both and body[canonical] != body[alias]:
        raise field_error(alias, f"{alias} and {canonical} mean the same but differ: send one of them")
    rest = {name: value for name, value in body.items() if name != alias}
    return rest if body.get(canonical) is not None else {**rest, canonical: body[alias]}


def _check_best_of(value: Any, n: Any) -> None:
    candidates = n if isinstance(n, int) else 1
    if value is not None and not (isinstance(value, int) and value <= candidates):
        raise field_error("best_of", "best_of above n is not supported: request n candidates and choose one")


def _is_neutral(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and (isinstance(value, bool) == isinstance(neutral, bool))


def _to_json(value: Any) -> str:
    return json.dumps(value)
