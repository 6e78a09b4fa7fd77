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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

MISSING = dataclasses.MISSING
_MAX_METAVAR_LENGTH = 40


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
    completions: str | None = None
    """For completion: `module:MAPPING`, whose keys are names that may be written here, among others."""
    family: str | None = None
    """`module:TABLE` of a family: one of its names, or package.module:name for a member from elsewhere."""
    extra_choices: tuple[str, ...] = ()
    """Names that may be written besides those of the family."""


@dataclass(frozen=True)
class Argument:
    """One thing that a command takes: where it goes, how it is written, and what it is for."""

    dest: tuple[str, ...]
    """The parameter and, if that is a dataclass, its field."""
    names: tuple[str, ...]
    """`--n` and its other names; a positional has one, in capitals."""
    value_type: type
    """str, int, float, bool or Path: what each of its values is."""
    nargs: int | None
    """How many values it takes; None for any number, 0 for a flag."""
    choices: tuple[str, ...]
    default: Any
    help: str
    metavar: str
    positional: bool
    repeated: bool
    completions: str | None
    is_open: bool
    """Whether package.module:name may be written instead of one of the choices."""

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is MISSING

    @property
    def usage(self) -> str:
        """As the help shows it: `--top-k N`, `--regex TEXT ...`, `MODEL`."""
        if self.positional:
            return self.names[0] + (" ..." if self.nargs is None else "")
        if self.nargs == 0:
            return ", ".join(self.names)
        several = self.nargs if self.nargs and " " not in self.metavar else 1  # or it names each of them
        values = " ".join([self.metavar] * several) + (" ..." if self.nargs is None else "")
        return ", ".join(f"{name} {values}" for name in self.names)


def command_arguments(function: Callable[..., Any]) -> list[Argument]:
    """All that a command takes, in the order of its signature."""
    found: list[Argument] = []
    texts = _argument_help(function)
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
        base, marks = unwrap_annotated(hints[name])
        if dataclasses.is_dataclass(base):
            prefix = "" if any(isinstance(mark, Inline) for mark in marks) else f"{name}."
            found += _dataclass_arguments(name, prefix, base, default)
        else:
            found.append(_make_argument((name,), name, hints[name], default, texts.get(name, "")))
    return found


def _dataclass_arguments(parameter: str, prefix: str, dataclass_type: Any, default: Any) -> Iterator[Argument]:
    """The fields of a dataclass as options; their texts are the strings below them."""
    texts = field_docstrings(dataclass_type)
    hints = get_type_hints(dataclass_type, include_extras=True)
    for field in dataclasses.fields(dataclass_type):
        value = field.default if default is MISSING else getattr(default, field.name)
        yield _make_argument(
            (parameter, field.name), prefix + field.name, hints[field.name], value, texts.get(field.name, "")
        )


def _make_argument(dest: tuple[str, ...], name: str, hint: Any, default: Any, help_text: str) -> Argument:
    base, marks = unwrap_annotated(hint)
    option = next((mark for mark in marks if isinstance(mark, Option)), Option())
    positional = any(isinstance(mark, Positional) for mark in marks)
    kind, count, choices = _value_spec(base)
    if option.repeated:  # a list of what each use of the option gives
        kind, count, choices = _value_spec(get_args(base)[0])
    if option.family is not None:
        choices = (*option.extra_choices, *import_table(option.family))
    long = f"--{(option.name or name).replace('_', '-')}"
    metavar = option.metavar or _METAVARS[kind]
    if choices and option.metavar is None:
        metavar = "{" + ",".join(choices) + "}"
        if len(metavar) > _MAX_METAVAR_LENGTH:  # the text says which there are
            metavar, help_text = "NAME", f"{help_text} One of {', '.join(choices)}."
    if option.family is not None:
        help_text = f"{help_text} Or package.module:name, for one of your own."
    return Argument(
        dest=dest,
        names=(name.upper(),) if positional else (long, *option.aliases),
        value_type=kind,
        nargs=count,
        choices=choices,
        default=default,
        help=option.help or help_text,
        metavar=metavar,
        positional=positional,
        repeated=option.repeated,
        completions=option.completions,
        is_open=option.family is not None,
    )


def import_table(name: str) -> Mapping[str, Any]:
    """The table `module:NAME`."""
    module, _, variable = name.partition(":")
    table: Mapping[str, Any] = getattr(import_module(module), variable)
    return table


_METAVARS = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH", bool: ""}


def _value_spec(annotation: Any) -> tuple[type, int | None, tuple[str, ...]]:
    """What each value is, how many there are, and which there may be."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is Literal:
        return str, 1, tuple(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        kind, _, choices = _value_spec(items[0])
        return kind, None if items[-1] is Ellipsis else len(items), choices
    if annotation not in _METAVARS:
        raise TypeError(f"a command cannot take a {annotation}")
    return annotation, 0 if annotation is bool else 1, ()


def unwrap_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and the marks of its Annotated, if it is one."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        return base, tuple(marks)
    return hint, ()


def command_description(function: Callable[..., Any]) -> str:
    """The docstring up to its list of arguments."""
    return inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[0].strip()


def _argument_help(function: Callable[..., Any]) -> dict[str, str]:
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


def field_docstrings(dataclass_type: Any) -> dict[str, str]:
    """The strings below the fields of a dataclass and its bases, which Python itself does not keep."""
    texts: dict[str, str] = {}
    for cls in reversed(dataclass_type.__mro__):
        if dataclasses.is_dataclass(cls):
            texts |= _class_docstrings(cls)
    return texts


def _class_docstrings(cls: Any) -> dict[str, str]:
    (whole,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
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
