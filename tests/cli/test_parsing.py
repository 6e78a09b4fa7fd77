"""Words to values, and one sentence for each mistake; the same format of help for every command."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from unmask.cli import COMMANDS, command_function
from unmask.cli._help import help_text
from unmask.cli._parsing import parse
from unmask.cli._signature import Inline, Option, Positional, command_arguments

ENTRY = re.compile(r"  (-h, --help|--[a-z][a-z.-]*( \S+)*(, --[a-z-]+ \S+)*|[A-Z]+( \.\.\.)?)(  +(\S.*))?")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_one_format(name: str) -> None:
    """Usage, what it does, examples, arguments, options; a text and no `None` for each of them."""
    shown = help_text(name, command_function(name))
    assert shown.startswith(f"usage: unmask {name} ")
    assert "\nFor example:\n  " in shown
    assert "Args:" not in shown
    assert shown.endswith("Show this help and exit.")
    head, _, entries = shown.partition("\nOptions:\n")
    listed = head.partition("\nArguments:\n")[2].strip("\n").splitlines() + entries.splitlines()
    assert "None" not in "\n".join(listed)
    for line, following in zip(listed, [*listed[1:], ""], strict=True):
        if line.startswith(" " * 26):
            continue
        entry = ENTRY.fullmatch(line)
        assert entry, line
        assert entry[6] or following.startswith(" " * 26), f"{line} has no text"
    for argument in command_arguments(command_function(name)):
        assert argument.help.endswith((".", "!")), argument.names
        assert argument.usage in shown


@dataclass(frozen=True)
class Knobs:
    turns: int = 3
    """How often."""
    speed: float | None = None
    """How fast."""


def tried(
    model: Annotated[Path, Positional()],
    texts: Annotated[tuple[str, ...], Positional()],
    knobs: Annotated[Knobs, Inline()] = Knobs(),  # noqa: B008
    mode: Literal["slow", "fast"] = "slow",
    pair: tuple[int, int] | None = None,
    match: tuple[str, ...] = (),
    changes: Annotated[tuple[tuple[str, ...], ...], Option(name="set", repeated=True)] = (),
    loud: bool = False,
) -> None:
    """Try.

    Args:
        model: Which one.
        texts: What,
            on two lines.
        mode: How.
        pair: Two.
        match: Any.
        changes: More.
        loud: So.
    """


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["m", "a b", "-"], {"model": Path("m"), "texts": ("a b", "-"), "knobs": Knobs()}),
        (["m", "--turns", "5", "x", "--speed=-1e3"], {"texts": ("x",), "knobs": Knobs(5, -1000.0)}),
        (["m", "x", "--speed", "None", "--loud"], {"knobs": Knobs(), "loud": True}),
        (["m", "x", "--mode", "fast", "--pair", "1", "-2"], {"mode": "fast", "pair": (1, -2)}),
        (["m", "x", "--match", "a", "b", "--loud"], {"match": ("a", "b"), "loud": True}),
        (["m", "x", "--set", "a=1", "b=2", "--set", "c=3"], {"changes": (("a=1", "b=2"), ("c=3",))}),
        (["m", "--", "--loud"], {"texts": ("--loud",), "loud": False}),
        (["m", "x", "--turns", "1", "--turns", "2"], {"knobs": Knobs(2)}),
        (["m\udce9", "x"], {"model": Path("m\udce9")}),
    ],
)
def test_words_become_values(words: list[str], expected: dict[str, Any]) -> None:
    assert parse("tried", tried, words).items() >= expected.items()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["m", "x", "--trns", "1"], "unmask tried has no option --trns (did you mean --turns?)"),
        (["m", "x", "-q"], "unmask tried has no option -q; `unmask tried --help` shows all"),
        (["m", "x", "--turns", "a"], "--turns must be a whole number; got 'a'"),
        (["m", "x", "--turns", "9" * 5000], "--turns must be a whole number; got '9999"),
        (["m", "x", "--speed", "fast"], "--speed must be a number; got 'fast'"),
        (
            ["m", "x", "--mode", "fsat"],
            "--mode cannot be 'fsat' (did you mean fast?); choose one of slow, fast",
        ),
        (["m", "x", "--turns"], "--turns needs a value: --turns N"),
        (["m", "x", "--pair", "1"], "--pair needs 2 values: --pair N N; got 1"),
        (["m", "x", "--loud=yes"], "--loud is a flag and takes no value; got 'yes'"),
        (["m"], "unmask tried needs TEXTS: what, on two lines"),
        ([], "unmask tried needs MODEL: which one"),
        (["m", "\udcff"], "TEXTS must be UTF-8 text; '\\udcff' has bytes that are not"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}[^\n]*$"):
        parse("tried", tried, words)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sample", "runs/demo", "--lenght", "3"], "(did you mean --length?)"),
        (
            ["sample", "runs/demo", "--sampler", "confidnce"],
            "(did you mean confidence?); choose one of default",
        ),
        (["completion", "bsh"], "SHELL cannot be 'bsh' (did you mean bash?); choose one of bash, zsh, fish"),
        (["export", "a", "b", "c"], "unmask export takes SOURCE OUT; 'c' is one argument too many"),
        (["infill", "runs/demo", b"\xff".decode("utf-8", "surrogateescape")], "TEMPLATE must be UTF-8 text"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words: list[str], hint: str, command: Callable[..., Any]) -> None:
    shown = command(*words)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith("unmask: ")
    assert hint in shown.err
    assert shown.err.count("\n") == 1
