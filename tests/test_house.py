"""The rules of the house: short functions, few public names, one screen for the heart of the network."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "unmask"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 60
MAX_PUBLIC_NAMES = 450

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function))


def body_lines(function: Function) -> int:
    """Lines of a function without its decorators and docstring."""
    first = function.body[0]
    docstring = 0
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        docstring = (first.end_lineno or first.lineno) - first.lineno + 1
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def decisions(function: Function) -> int:
    """`if`, `for`, `while`, `and`, `or`, conditional expressions, comprehensions' conditions, handlers."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler):
            count += 1
    return count


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_are_short(path: Path) -> None:
    assert [f"{f.name}: {body_lines(f)} lines" for f in functions(path) if body_lines(f) > MAX_LINES] == []


def test_the_linter_bounds_complexity() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "C901" in lint["select"]
    assert lint["mccabe"]["max-complexity"] == 10


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_there_are_few_public_names() -> None:
    """Functions and classes without an underscore, in modules without one."""
    public = [path for path in MODULES if not any(is_private(part) for part in path.relative_to(PACKAGE).parts)]
    nodes = [node for path in public for node in ast.parse(path.read_text()).body]
    names = [node.name for node in nodes if isinstance(node, Function | ast.ClassDef) and not is_private(node.name)]
    assert len(names) < MAX_PUBLIC_NAMES


def test_private_modules_are_used_by_their_own_package() -> None:
    """`unmask/serve/_engine.py` belongs to `serve`, and nothing else in the package imports it."""
    strangers = []
    for path in MODULES:
        package = path.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unmask."):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                if any(is_private(part) for part in parts) and parts[1] != package.removesuffix(".py"):
                    strangers.append(f"{path.relative_to(PACKAGE)}: {node.module}")
    assert strangers == []


def test_the_encoder_fits_on_a_screen() -> None:
    (encode,) = (f for f in functions(PACKAGE / "backbones" / "dit.py") if f.name == "encode")
    assert body_lines(encode) <= 25
    assert decisions(encode) <= 10


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("custom_*.py")), ids=lambda path: path.name)
def test_examples_of_extensions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 40
