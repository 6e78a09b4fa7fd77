"""Write the public names of the lazy packages out for type checkers: `make exports`.

Packages such as `unmask.sampling` import their classes on first use (`unmask.registry.LazyExports`), which type
checkers cannot follow. This program writes the same names as imports below `if TYPE_CHECKING:`; a test checks
that they are up to date.
"""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import takewhile
from pathlib import Path

PACKAGES = (
    "unmask.diffusion",
    "unmask.backbones",
    "unmask.objectives",
    "unmask.sampling",
    "unmask.baselines",
    "unmask.distillation",
    "unmask.data.loader",
    "unmask",
)
HEADER = "if TYPE_CHECKING:  # written by `make exports`\n"


def visible(module: str, package: str) -> str:
    """The module itself or, for a private module of another package, that package."""
    owner, _, name = module.rpartition(".")
    return owner if name.startswith("_") and owner != package else module


def updated(package: str) -> tuple[Path, str, str]:
    """The file of a package, its text, and its text with the imports that it should have."""
    module = import_module(package)
    exports = vars(module)["__getattr__"]
    modules = {name: f"{package}.{submodule}" for name, submodule in exports.names.items()}
    for family in exports.families:
        modules |= {name: visible(family[entry].__module__, package) for name, entry in family.class_names.items()}
    lines = {f"    from {modules[name]} import {name} as {name}\n" for name in modules}
    file = Path(str(module.__file__))
    text = file.read_text(encoding="utf-8")
    before, header, rest = text.partition(HEADER)
    body = rest.splitlines(keepends=True)
    present = list(takewhile(lambda line: line.startswith("    "), body))
    if set(present) == lines:  # ruff has its own order
        return file, text, text
    return file, text, before + header + "".join(sorted(lines)) + "".join(body[len(present) :])


def main() -> None:
    """Update the files, or with --check only say which ones are not up to date."""
    stale = [(file, new) for file, old, new in map(updated, PACKAGES) if old != new]
    for file, new in stale:
        if "--check" not in sys.argv:
            file.write_text(new, encoding="utf-8")
        print(file)
    if stale and "--check" in sys.argv:
        sys.exit("the files above do not list the names of their tables: run `make exports`")


if __name__ == "__main__":
    main()
