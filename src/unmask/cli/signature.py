"""What a command takes, read from the signature and the docstring of its function.

Parsing, help and completion all rest on this list, so they cannot disagree.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

MISSING = dataclasses.MISSING
LONGEST_METAVAR = 40


@dataclass(frozen=True)
class Positional:
    """Marks a parameter that is written without its name, in the order of the signature."""


@dataclass(frozen=True)
class Inline:
    """Marks a dataclass whose fields are options of the command itself, without the parameter's name."""


@dataclass(frozen=True)
class Option:
    """What else is to be said of a parameter than its type does."""

    name: str | None = None
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    help: str | None = None
    repeated: bool = False
    words: str | None = None
    """For completion: `module:MAPPING`, whose keys are what may be written here."""


@dataclass(frozen=True)
class Argument:
    """One thing that a command takes: where it goes, how it is written, and what it is for."""

    target: tuple[str, ...]
    """The parameter and, if that is a dataclass, its field."""
    names: tuple[str, ...]
    """`--n` and its other names; a positional has one, in capitals."""
    kind: type
    """str, int, float, bool or Path: what each of its values is."""
    count: int | None
    """How many values it takes; None for any number, 0 for a flag."""
    choices: tuple[str, ...]
    default: Any
    help: str
    metavar: str
    positional: bool
    repeated: bool
    words: str | None

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is MISSING

    @property
    def written(self) -> str:
        """As the help shows it: `--top-k N`, `--match TEXT ...`, `MODEL`."""
        if self.positional:
            return self.names[0] + (" ..." if self.count is None else "")
        if self.count == 0:
            return ", ".join(self.names)
        several = self.count if self.count and " " not in self.metavar else 1  # or it names each of them
        values = " ".join([self.metavar] * several) + (" ..." if self.count is None else "")
        return ", ".join(f"{name} {values}" for name in self.names)


def arguments(function: Callable[..., Any]) -> list[Argument]:
    """All that a command takes, in the order of its signature."""
    found: list[Argument] = []
    texts = _described(function)
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
        base, marks = unwrapped(hints[name])
        if dataclasses.is_dataclass(base):
            prefix = "" if any(isinstance(mark, Inline) for mark in marks) else f"{name}."
            found += _fields(name, prefix, base, default)
        else:
            found.append(_argument((name,), name, hints[name], default, texts.get(name, "")))
    return found


def _fields(parameter: str, prefix: str, kind: Any, default: Any) -> Iterator[Argument]:
    """The fields of a dataclass as options; their texts are the strings below them."""
    texts = _field_texts(kind)
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value = field.default if default is MISSING else getattr(default, field.name)
        yield _argument(
            (parameter, field.name), prefix + field.name, hints[field.name], value, texts.get(field.name, "")
        )


def _argument(target: tuple[str, ...], name: str, hint: Any, default: Any, text: str) -> Argument:
    base, marks = unwrapped(hint)
    option = next((mark for mark in marks if isinstance(mark, Option)), Option())
    positional = any(isinstance(mark, Positional) for mark in marks)
    kind, count, choices = _values(base)
    if option.repeated:  # a list of what each use of the option gives
        kind, count, choices = _values(get_args(base)[0])
    long = f"--{(option.name or name).replace('_', '-')}"
    metavar = option.metavar or _METAVARS[kind]
    if choices and option.metavar is None:
        metavar = "{" + ",".join(choices) + "}"
        if len(metavar) > LONGEST_METAVAR:  # the text says which there are
            metavar, text = "NAME", f"{text} One of {', '.join(choices)}."
    return Argument(
        target=target,
        names=(name.upper(),) if positional else (long, *option.aliases),
        kind=kind,
        count=count,
        choices=choices,
        default=default,
        help=option.help or text,
        metavar=metavar,
        positional=positional,
        repeated=option.repeated,
        words=option.words,
    )


_METAVARS = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH", bool: ""}


def _values(base: Any) -> tuple[type, int | None, tuple[str, ...]]:
    """What each value is, how many there are, and which there may be."""
    if get_origin(base) in (Union, types.UnionType):
        base = next(part for part in get_args(base) if part is not types.NoneType)
    if get_origin(base) is Literal:
        return str, 1, tuple(map(str, get_args(base)))
    if get_origin(base) is tuple:
        items = get_args(base)
        kind, _, choices = _values(items[0])
        return kind, None if items[-1] is Ellipsis else len(items), choices
    if base not in _METAVARS:
        raise TypeError(f"a command cannot take a {base}")
    return base, 0 if base is bool else 1, ()


def unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and the marks of its Annotated, if it is one."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        return base, tuple(marks)
    return hint, ()


def description(function: Callable[..., Any]) -> str:
    """The docstring up to its list of arguments."""
    return inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[0].strip()


def _described(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring's `Args:` says of each parameter.

    The items are those lines that are indented least; all others go on with the item before them.
    """
    block = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[2]
    texts: dict[str, str] = {}
    name = ""
    parameters = inspect.signature(function).parameters
    for line in textwrap.dedent(block).splitlines():
        item = re.match(r"(\w+): (.*)", line)
        if item and item[1] in parameters:
            name = item[1]
            texts[name] = item[2].strip()
        elif name and line.strip():
            texts[name] += f" {line.strip()}"
    return texts


def _field_texts(kind: Any) -> dict[str, str]:
    """The strings below the fields of a dataclass, which Python itself does not keep."""
    (whole,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(whole, ast.ClassDef)
    texts: dict[str, str] = {}
    for before, after in zip(whole.body, whole.body[1:], strict=False):
        if (
            isinstance(before, ast.AnnAssign)
            and isinstance(before.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            texts[before.target.id] = " ".join(inspect.cleandoc(str(after.value.value)).split())
    return texts
