"""From words to the values of a command; whatever is wrong with them is one sentence with a hint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from unmask.cli.signature import MISSING, Argument, arguments, unwrapped
from unmask.config import did_you_mean

HELP = ("-h", "--help")
_SHORT = re.compile(r"-[A-Za-z]\S*")
"""A single dash and letters is taken for an option; `-`, `-1` and texts with spaces are not."""
_KINDS: dict[type, str] = {int: "a whole number", float: "a number"}


def parse(command: str, function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments for the function of a command."""
    known = arguments(function)
    options = {name: each for each in known if not each.positional for name in each.names}
    given: dict[Argument, Any] = {}
    free: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word == "--":
            free += words[place:]
            break
        if not (word.startswith("--") or _SHORT.fullmatch(word)):
            free.append(word)
            continue
        name, equals, value = word.partition("=")
        argument = _option(command, options, name)
        if equals:
            values = [value]
        else:
            values = _following(words, place, argument.count)
            place += len(values)
        read = _read(argument, name, values, bool(equals))
        given[argument] = [*given.get(argument, []), read] if argument.repeated else read
    given.update(_positionals(command, [each for each in known if each.positional], free))
    return _called(function, known, given)


def _option(command: str, options: dict[str, Argument], name: str) -> Argument:
    spelled = name if name in options else name.replace("_", "-")
    if spelled not in options:
        hint = did_you_mean(spelled, [*options, *HELP]) or f"; `unmask {command} --help` shows all"
        raise ValueError(f"unmask {command} has no option {name}{hint}")
    return options[spelled]


def _following(words: Sequence[str], place: int, count: int | None) -> list[str]:
    """The words that are an option's values: up to `count`, and none that begins with two dashes."""
    values: list[str] = []
    while place < len(words) and (count is None or len(values) < count):
        if words[place].startswith("--"):
            break
        values.append(words[place])
        place += 1
    return values


def _read(argument: Argument, name: str, values: list[str], joined: bool) -> Any:
    """The value of an option, or of a positional, from its words."""
    if argument.count == 0:
        if joined:
            raise ValueError(f"{name} is a switch and takes no value; got {values[0]!r}")
        return True
    if argument.count is not None and len(values) != argument.count:
        wanted = "a value" if argument.count == 1 else f"{argument.count} values"
        got = f"; got {len(values)}" if values else ""
        equals = f" (one that begins with -- is written {name}=--...)" if argument.kind is str else ""
        raise ValueError(f"{name} needs {wanted}: {argument.written}{got}{equals}")
    read = tuple(_value(argument, name, value) for value in values)
    return read[0] if argument.count == 1 else read


def _value(argument: Argument, name: str, text: str) -> Any:
    if argument.kind is Path:
        if not text:
            raise ValueError(f"{name} is empty, and must name a file or folder")
        return Path(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be UTF-8 text; {text!r} holds bytes that are not") from None
    if argument.choices:
        if text not in argument.choices:
            raise ValueError(
                f"{name} cannot be {text!r}{did_you_mean(text, argument.choices)};"
                f" it is one of {', '.join(argument.choices)}"
            )
        return text
    if argument.default is None and argument.kind is not str and text.lower() == "none":
        return None
    try:
        return argument.kind(text)
    except ValueError:
        raise ValueError(f"{name} must be {_KINDS[argument.kind]}; got {_short(text)}") from None


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _positionals(command: str, wanted: list[Argument], free: list[str]) -> dict[Argument, Any]:
    """The words without an option, in their order; a last one may take any number, but at least one."""
    found: dict[Argument, Any] = {}
    left = list(free)
    for argument in wanted:
        mine = left if argument.count is None else left[: argument.count]
        left = left[len(mine) :]
        if mine:
            found[argument] = _read(argument, argument.names[0], mine, joined=False)
        elif argument.required:
            raise ValueError(
                f"unmask {command} needs {argument.names[0]}: {_lowered(argument.help)}"
                f" (`unmask {command} --help` has examples)"
            )
    if left:
        takes = " ".join(each.names[0] for each in wanted) or "nothing"
        raise ValueError(
            f"unmask {command} takes {takes} and no more; {_short(left[0])} is left over"
            " (a text with spaces needs quotes)"
        )
    return found


def _lowered(text: str) -> str:
    """A sentence inside another."""
    return (text[:1].lower() + text[1:]).rstrip(".")


def _called(
    function: Callable[..., Any], known: list[Argument], given: dict[Argument, Any]
) -> dict[str, Any]:
    """What the function is called with: fields of one dataclass together."""
    hints = get_type_hints(function, include_extras=True)
    keywords: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    for argument in known:
        value = given.get(argument, argument.default)
        assert value is not MISSING
        if argument.repeated:
            value = tuple(value)
        if len(argument.target) == 1:
            keywords[argument.target[0]] = value
        else:
            fields.setdefault(argument.target[0], {})[argument.target[1]] = value
    for parameter, values in fields.items():
        kind, _ = unwrapped(hints[parameter])
        keywords[parameter] = kind(**values)
    return keywords
