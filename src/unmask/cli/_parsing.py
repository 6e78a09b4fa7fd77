"""Parse the words of a command line into the arguments of a command; errors are one sentence with a hint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from unmask.cli._signature import MISSING, Argument, command_arguments, unwrap_annotated
from unmask.config import suggest

HELP_FLAGS = ("-h", "--help")
_SHORT_OPTION = re.compile(r"-[A-Za-z]\S*")
"""A dash followed by letters is an option; `-`, `-1` and texts with spaces are values."""
_TYPE_NAMES: dict[type, str] = {int: "a whole number", float: "a number"}


def parse(command: str, function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments for the function of a command."""
    known = command_arguments(function)
    options = {name: each for each in known if not each.positional for name in each.names}
    given: dict[Argument, Any] = {}
    free: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word == "--":
            free += words[index:]
            break
        if not (word.startswith("--") or _SHORT_OPTION.fullmatch(word)):
            free.append(word)
            continue
        name, equals, value = word.partition("=")
        argument = _option(command, options, name)
        if equals:
            values = [value]
        else:
            values = _take_values(words, index, argument.nargs)
            index += len(values)
        read = _parse_values(argument, name, values, bool(equals))
        given[argument] = [*given.get(argument, []), read] if argument.repeated else read
    given.update(_parse_positionals(command, [each for each in known if each.positional], free))
    return _keyword_arguments(function, known, given)


def _option(command: str, options: dict[str, Argument], name: str) -> Argument:
    spelled = name if name in options else name.replace("_", "-")
    if spelled not in options:
        hint = suggest(spelled, [*options, *HELP_FLAGS]) or f"; `unmask {command} --help` shows all"
        raise ValueError(f"unmask {command} has no option {name}{hint}")
    return options[spelled]


def _take_values(words: Sequence[str], index: int, count: int | None) -> list[str]:
    """An option's values: up to `count` words from `index` on, none of which begins with two dashes."""
    values: list[str] = []
    while index < len(words) and (count is None or len(values) < count):
        if words[index].startswith("--"):
            break
        values.append(words[index])
        index += 1
    return values


def _parse_values(argument: Argument, name: str, values: list[str], has_equals: bool) -> Any:
    """The value of an option or positional argument, from its words."""
    if argument.nargs == 0:
        if has_equals:
            raise ValueError(f"{name} is a flag and takes no value; got {values[0]!r}")
        return True
    if argument.nargs is not None and len(values) != argument.nargs:
        wanted = "a value" if argument.nargs == 1 else f"{argument.nargs} values"
        got = f"; got {len(values)}" if values else ""
        equals = f" (write a value that begins with -- as {name}=--...)" if argument.value_type is str else ""
        raise ValueError(f"{name} needs {wanted}: {argument.usage}{got}{equals}")
    read = tuple(_parse_value(argument, name, value) for value in values)
    return read[0] if argument.nargs == 1 else read


def _parse_value(argument: Argument, name: str, text: str) -> Any:
    if argument.value_type is Path:
        if not text:
            raise ValueError(f"{name} must name a file or folder; got an empty string")
        return Path(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be UTF-8 text; {text!r} has bytes that are not") from None
    if argument.choices:
        if text not in argument.choices and not (argument.is_open and ":" in text):
            raise ValueError(
                f"{name} cannot be {text!r}{suggest(text, argument.choices)};"
                f" choose one of {', '.join(argument.choices)}"
            )
        return text
    if argument.default is None and argument.value_type is not str and text.lower() == "none":
        return None
    try:
        return argument.value_type(text)
    except ValueError:
        raise ValueError(f"{name} must be {_TYPE_NAMES[argument.value_type]}; got {_abbreviate(text)}") from None


def _abbreviate(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _parse_positionals(command: str, wanted: list[Argument], words: list[str]) -> dict[Argument, Any]:
    """The positional arguments, in order; the last one may take any number of words, but at least one."""
    found: dict[Argument, Any] = {}
    left = list(words)
    for argument in wanted:
        mine = left if argument.nargs is None else left[: argument.nargs]
        left = left[len(mine) :]
        if mine:
            found[argument] = _parse_values(argument, argument.names[0], mine, has_equals=False)
        elif argument.required:
            raise ValueError(
                f"unmask {command} needs {argument.names[0]}: {_decapitalize(argument.help)}"
                f" (`unmask {command} --help` has examples)"
            )
    if left:
        takes = " ".join(each.names[0] for each in wanted) or "nothing"
        raise ValueError(
            f"unmask {command} takes {takes}; {_abbreviate(left[0])} is one argument too many"
            " (quote a text with spaces)"
        )
    return found


def _decapitalize(text: str) -> str:
    """A sentence in the form of a clause: small first letter, no final period."""
    return (text[:1].lower() + text[1:]).rstrip(".")


def _keyword_arguments(
    function: Callable[..., Any], known: list[Argument], given: dict[Argument, Any]
) -> dict[str, Any]:
    """The keyword arguments of the function; fields of a dataclass parameter are collected into an instance."""
    hints = get_type_hints(function, include_extras=True)
    keywords: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    for argument in known:
        value = given.get(argument, argument.default)
        assert value is not MISSING
        if argument.repeated:
            value = tuple(value)
        if len(argument.dest) == 1:
            keywords[argument.dest[0]] = value
        else:
            fields.setdefault(argument.dest[0], {})[argument.dest[1]] = value
    for parameter, values in fields.items():
        kind, _ = unwrap_annotated(hints[parameter])
        keywords[parameter] = kind(**values)
    return keywords
