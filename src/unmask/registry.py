"""Tables of named parts, and parts from outside the package.

A part (a sampler, a schedule, a network, ...) is found by its name in the table of its family or, if it comes
from elsewhere, as "package.module:Name". Importing such a name runs code, so it happens only for names that the
user typed or allowed.
"""

from __future__ import annotations

import reprlib
import sys
import types
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

_T = TypeVar("_T")

AllowCode: TypeAlias = bool | Collection[str]
"""Which classes from outside the package may be imported: none (False), any (True), or those of these names."""


class Family(MutableMapping[str, Any], Generic[_T]):
    """The table of a family such as the samplers: name -> class (or function), imported when it is first used.

    An entry is written "package.module:Name"; to add one is to add one line. Command line choices, API schemas,
    `unmask.Name`, JSON kinds, contract tests and documents all read the table.
    """

    def __init__(self, base: str, entries: Mapping[str, Any], *, extends: Family[_T] | None = None) -> None:
        """`base`: the class that all members subclass (or return), written "package.module:Name" too.

        `extends`: a family of the same base in a lower package; where JSON names a kind of that one, it may name
        one of these.
        """
        self._base, self._entries = base, dict(entries)
        self.extensions: list[Family[_T]] = []
        if extends is not None:
            extends.extensions.append(self)
        _FAMILIES.setdefault(base, self)

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        return _import(entry) if isinstance(entry, str) else entry

    def __setitem__(self, name: str, entry: Any) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def class_names(self) -> dict[str, str]:
        """Class name -> name in the table; nothing is imported."""
        return {_entry_name(entry): name for name, entry in self._entries.items()}

    @property
    def base(self) -> type[_T]:
        """The class that all members subclass, or that all functions in the table return."""
        return cast("type[_T]", _import(self._base))

    def find(self, name: str) -> Any:
        """The member of this name; "package.module:Name" is imported, so pass only names that the user typed."""
        return resolve(name, self.base) if ":" in name else self[name]


_FAMILIES: dict[str, Family[Any]] = {}
"""Every table, by its base class."""


def family_of(base: type) -> Family[Any] | None:
    """The family of which a class is the base."""
    return _FAMILIES.get(_dotted_name(base))


class LazyExports:
    """The `__getattr__` of a package that imports its public names on first use: torch takes seconds, help needs none.

    The names are the classes of `families`, and `names` (name=submodule). `make exports` writes them out for type
    checkers.
    """

    def __init__(self, package: str, *families: Family[Any], **names: str) -> None:
        self.package, self.families, self.names = package, families, names

    def __call__(self, name: str) -> Any:
        if name == "__all__":
            return sorted({*self.names, *(each for family in self.families for each in family.class_names)})
        for family in self.families:
            if name in family.class_names:
                return family[family.class_names[name]]
        if name not in self.names:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        return getattr(import_module(f"{self.package}.{self.names[name]}"), name)


def resolve(name: str, base: type[_T]) -> Any:
    """Import "package.module:name": a subclass or an instance of `base`, or a function that returns one.

    This runs code: call it only with names that the user typed or allowed.
    """
    found = _import(name)
    if isinstance(found, type):
        fits = issubclass(found, base)
    else:
        fits = isinstance(found, (base, types.FunctionType, types.MethodType))
    if not fits:
        raise ValueError(f"{name} must be a {base.__name__} (see {base.__module__}); it is {reprlib.repr(found)}")
    return found


def build(name: str, base: type[_T]) -> _T:
    """The instance of `base` that "package.module:name" is, or returns when it is called without arguments."""
    found = resolve(name, base)
    made = found if isinstance(found, base) else found()
    if not isinstance(made, base):
        raise ValueError(f"{name} must return a {base.__name__} (see {base.__module__}); it returned {made!r}")
    return made


def class_id(cls: type) -> str:
    """How JSON names a class: its name for classes of unmask, "package.module:Name" for others."""
    dotted = _dotted_name(cls)
    if _is_own(dotted):
        return cls.__name__
    if "<locals>" in dotted:
        raise ValueError(f"{cls.__qualname__} cannot be saved: define the class at the top level of a module")
    return dotted


def _is_own(dotted: str) -> bool:
    return dotted.partition(":")[0].partition(".")[0] == __name__.partition(".")[0]


def _dotted_name(cls: type) -> str:
    module = _main_module_name() if cls.__module__ == "__main__" else cls.__module__
    return f"{module}:{cls.__qualname__}"


def _main_module_name() -> str:
    """The name by which another program can import the script that is running."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    return "__main__" if file is None else Path(file).stem


def _entry_name(entry: Any) -> str:
    return entry.partition(":")[2] if isinstance(entry, str) else str(entry.__name__)


def _import(name: str) -> Any:
    """The object "package.module:name"; `name` may have dots of its own."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ValueError(f"{name!r} is not of the form package.module:name")
    try:
        module = import_module("__main__" if module_name == _main_module_name() else module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} cannot be imported: there is no module {error.name!r}") from None
    except Exception as error:
        raise ValueError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"the module {module_name} has no {path}")
        found = getattr(found, part)
    return found
