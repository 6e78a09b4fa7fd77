"""`unmask train --help-settings`: every setting with its type, its value and what it does."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from unmask.cli._signature import field_docstrings
from unmask.config import describe_type, field_types, to_json

_WIDTH = 100


def describe_settings(config: Any) -> str:
    """One entry for each field of a config and of the configs in it, by the name that --set takes."""
    intro = (
        "Settings for --set NAME=VALUE, with their types and the values of this recipe. A kind such as Cosine stands"
        " for all its defaults; its own settings are set by longer names, as in objective.schedule.eps=0.01."
    )
    return "\n".join([textwrap.fill(intro, _WIDTH), "", *_entries(config, "")])


def _entries(config: Any, prefix: str) -> Iterator[str]:
    docstrings, types = field_docstrings(type(config)), field_types(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        is_part = dataclasses.is_dataclass(value)
        shown = type(value).__name__ if is_part else json.dumps(to_json(value), ensure_ascii=False)
        yield f"{name} = {shown}"
        yield textwrap.indent(textwrap.fill(f"({describe_type(types[field.name])})", _WIDTH - 4), "    ")
        if field.name in docstrings:
            yield textwrap.indent(textwrap.fill(docstrings[field.name], _WIDTH - 4), "    ")
        if is_part:
            yield from _entries(value, f"{name}.")
