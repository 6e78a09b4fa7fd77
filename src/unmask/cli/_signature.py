"""The arguments of a command, read from the signature and docstring of its function.

Parsing, help and completion use the same list, so they cannot disagree.
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
    """Marks a positional argument."""


@dataclass(frozen=True)
class Inline:
    """Marks a dataclass whose fields are options without the parameter's name as a prefix."""


@dataclass(frozen=True)
class Option:
    """Properties of an option that do not follow from its type."""

    name: str | None = None
    """The name without dashes, if it is not the parameter's."""
    aliases: tuple[str, ...] = ()
    """Other names, with dashes."""
    metavar: str | None = None
    """What the help shows for the value."""
    help: str | None = None
    """The description, if it is not in the docstring."""
    repeated: bool = False
    """Whether the option may be given several times; its values are collected in a tuple."""
    completions: str | None = None
    """For shell completion: `module:MAPPING`, whose keys are possible values (others are accepted too)."""
    family: str | None = None
    """`module:TABLE`: the value is a name in this registry, or package.module:name for a class outside the package."""
    extra_choices: tuple[str, ...] = ()
    """Accepted names besides those of the family."""


@dataclass(frozen=True)
class Argument:
    """A positional argument or an option of a command."""

    dest: tuple[str, ...]
    """The parameter's name and, if it is a dataclass, the field's."""
    names: tuple[str, ...]
    """`--n` and its aliases; a positional argument has one name, in capitals."""
    value_type: type
    """The type of each value: str, int, float, bool or Path."""
    nargs: int | None
    """The number of values; None for any number, 0 for a flag."""
    choices: tuple[str, ...]
    """The accepted values; empty if any value of the type is."""
    default: Any
    """The default value; MISSING for a required argument."""
    help: str
    """The description."""
    metavar: str
    """What the help shows for the value."""
    positional: bool
    """Whether it is given without a name."""
    repeated: bool
    """Whether it may be given several times."""
    completions: str | None
    """As in `Option`."""
    is_open: bool
    """Whether package.module:name is accepted as well as the choices."""

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is MISSING

    @property
    def usage(self) -> str:
        """The argument in the help: `--top-k N`, `--regex TEXT ...`, `MODEL`."""
        if self.positional:
            return self.names[0] + (" ..." if self.nargs is None else "")
        if self.nargs == 0:
            return ", ".join(self.names)
        several = self.nargs if self.nargs and " " not in self.metavar else 1  # a metavar with spaces names each value
        values = " ".join([self.metavar] * several) + (" ..." if self.nargs is None else "")
        return ", ".join(f"{name} {values}" for name in self.names)


def command_arguments(function: Callable[..., Any]) -> list[Argument]:
    """The arguments of a command, in the order of its signature."""
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
    """The fields of a dataclass as options, described by the docstrings under them."""
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
    if option.repeated:  # the annotation is a tuple with one item per use
        kind, count, choices = _value_spec(get_args(base)[0])
    if option.family is not None:
        choices = (*option.extra_choices, *import_table(option.family))
    long = f"--{(option.name or name).replace('_', '-')}"
    metavar = option.metavar or _METAVARS[kind]
    if choices and option.metavar is None:
        metavar = "{" + ",".join(choices) + "}"
        if len(metavar) > _MAX_METAVAR_LENGTH:  # the choices are listed in the description instead
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
    """The type of each value, the number of values, and the choices."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is Literal:
        return str, 1, tuple(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        items = get_args(annotation)
        kind, _, choices = _value_spec(items[0])
        return kind, None if items[-1] is Ellipsis else len(items), choices
    if annotation not in _METAVARS:
        raise TypeError(f"an argument of a command cannot have the type {annotation}")
    return annotation, 0 if annotation is bool else 1, ()


def unwrap_annotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type of an annotation, and the metadata of its Annotated, if it is one."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        return base, tuple(marks)
    return hint, ()


def command_description(function: Callable[..., Any]) -> str:
    """The docstring up to `Args:`."""
    return inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[0].strip()


def _argument_help(function: Callable[..., Any]) -> dict[str, str]:
    """The description of each parameter in the docstring's `Args:`; indented lines continue the one before."""
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
    """The docstrings under the fields of a dataclass and its bases; read from the source, as Python drops them."""
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
