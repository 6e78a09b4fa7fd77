"""What the documents show as printed is what is printed after `make demo`, by all who have that machine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from doc_examples import (
    ROOT,
    Example,
    document_examples,
    documented_demo,
    output_mismatch,
    run_demo,
    run_example,
    stable_lines,
)

pytestmark = pytest.mark.demo
SHOWN = [example for example in document_examples() if example.output is not None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of somebody who has just run `make demo`, and what that printed."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / ".reference-model").symlink_to(ROOT / ".reference-model")
    return folder, run_demo(folder)


@pytest.fixture(scope="module")
def same_machine(made: tuple[Path, str]) -> bool:
    """Whether numbers are rounded here as they were where the documents were made."""
    lines = [line for line in documented_demo().splitlines() if line.startswith("runs/demo/corpus")]
    return set(lines) <= set(made[1].splitlines())


def test_the_demo_prints_what_the_quickstart_shows(made: tuple[Path, str], same_machine: bool) -> None:
    """But for the lines that tell of progress."""
    now = [line for line in made[1].splitlines() if not re.match(r"step \d+/", line)]
    if same_machine:
        assert [line for line in stable_lines(documented_demo()) if line not in stable_lines(made[1])] == []
    else:
        assert output_mismatch(documented_demo(), "\n".join(now), exactly=False) is None


@pytest.mark.parametrize("example", SHOWN, ids=lambda example: f"{example.where}: {example.commands[0][:40]}")
def test_an_output_is_the_one_that_is_shown(example: Example, made: tuple[Path, str], same_machine: bool) -> None:
    assert example.output is not None
    assert output_mismatch(example.output, run_example(example, made[0]), same_machine) is None
