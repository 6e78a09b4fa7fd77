"""The script is sourced and asked in a real bash."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unmask.baselines import EVERY_OBJECTIVE
from unmask.cli import COMMANDS
from unmask.recipes import RECIPES
from unmask.sampling import SAMPLERS

ASK = """
source "$1"; shift
name=$(complete -p unmask | sed -E 's/.*-F ([^ ]+) .*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"$name"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "unmask.bash"
    made = subprocess.run([sys.executable, "-m", "unmask", "completion", "bash"], capture_output=True, check=True)
    path.write_bytes(made.stdout)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["inf"], {"infill"}),
        (["infill", "--tem"], {"--temperature"}),
        (["sample", "runs/demo", "--wa"], {"--watch"}),
        (["train", "stdlib-tiny", "--objective", "se"], {"sedd"}),
        (["train", "stdlib-tiny", "--objective", ""], set(EVERY_OBJECTIVE)),
        (["train", ""], set(RECIPES)),
        (["train", "stdlib-tiny", "--print-config", "--obj"], {"--objective"}),
        (["sample", "runs/demo", "--sampler", ""], {"default", *SAMPLERS}),
        (["eval-samples", "runs/demo", "--samplers", "ancestral", "conf"], {"confidence"}),
        (["sample", "runs/demo", "--sampler", "confidence", "nothing-like-it"], {""}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        ([""], {*(name.split()[0] for name in COMMANDS), "-h", "--help"}),
        (["classify", ""], {"train", "eval", "predict"}),
        (["classify", "train", "runs/demo", "--pool"], {"--pooling"}),
        (["classify", "train", "runs/demo", "--task", "sst"], {"sst2"}),
    ],
)
def test_bash_completes(script: Path, words: list[str], expected: set[str]) -> None:
    asked = subprocess.run(
        ["bash", "-c", ASK, "bash", str(script), "unmask", *words], capture_output=True, text=True, check=True
    )
    assert set(asked.stdout.splitlines()) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_files_where_there_is_nothing_else(script: Path) -> None:
    shown = subprocess.run(
        ["bash", "-c", f"source {script}; complete -p unmask"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("complete -o default -F ")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_too(shell: str, command: Callable[..., Any]) -> None:
    made = command("completion", shell)
    assert made.code == 0
    assert all(re.search(rf"\b{name}\b", made.out) for name in (*" ".join(COMMANDS).split(), *RECIPES, *SAMPLERS))


def test_an_unknown_shell_is_refused(command: Callable[..., Any]) -> None:
    made = command("completion", "tcsh")
    assert (made.code, made.out) == (2, "")
    assert "bash" in made.err
