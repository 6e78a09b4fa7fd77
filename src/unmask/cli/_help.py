"""The help of a command: usage, description, examples, arguments and options."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from typing import Any

from unmask.cli._signature import MISSING, Argument, command_arguments, command_description

_INDENT, _TEXT_COLUMN = 2, 26
"""The columns of names and of their descriptions."""
_MAX_WIDTH = 110


def help_text(command: str, function: Callable[..., Any]) -> str:
    """All that `unmask COMMAND --help` prints."""
    known = command_arguments(function)
    positional = [each for each in known if each.positional]
    options = [each for each in known if not each.positional]
    usage = " ".join(["usage: unmask", command, *(each.usage for each in positional), "[OPTIONS]"])
    parts = [usage, _wrap(command_description(function))]
    if positional:
        parts.append(_section("Arguments", positional))
    return "\n\n".join([*parts, _section("Options", options)])


def _section(title: str, known: list[Argument]) -> str:
    lines = [f"{title}:", *(line for each in known for line in _entry(each.usage, _help_with_default(each)))]
    if title == "Options":
        lines += _entry("-h, --help", "Show this help and exit.")
    return "\n".join(lines)


def _help_with_default(argument: Argument) -> str:
    """The description of an argument, with its default."""
    default = argument.default
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    if argument.repeated or argument.nargs == 0 or default in (MISSING, None, ""):
        return argument.help
    return f"{argument.help} (default: {default})"


def _entry(usage: str, text: str) -> list[str]:
    """The name with its description to the right, or below it if the name is long."""
    rest = textwrap.wrap(text, _width() - _TEXT_COLUMN)
    first = f"{'':{_INDENT}}{usage}"
    fits = len(first) + 2 <= _TEXT_COLUMN and bool(rest)
    lines = [f"{first:{_TEXT_COLUMN}}{rest.pop(0)}" if fits else first]
    return lines + [f"{'':{_TEXT_COLUMN}}{line}" for line in rest]


def _wrap(text: str) -> str:
    """Wrap paragraphs to the width of the terminal; indented ones are kept as they are."""
    parts = []
    for part in text.split("\n\n"):
        plain = not any(line.startswith(" ") for line in part.splitlines())
        parts.append(textwrap.fill(" ".join(part.split()), _width()) if plain else part)
    return "\n\n".join(parts)


def _width() -> int:
    return max(60, min(_MAX_WIDTH, shutil.get_terminal_size().columns))
