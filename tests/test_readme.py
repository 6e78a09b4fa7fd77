"""Every command and every line of Python in the README runs, in order, on a model from the demo."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/demo in it, from the demo itself, cut short."""
    folder = tmp_path_factory.mktemp("readme")
    shown = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--seconds", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert "three templates, filled" in shown.stdout
    assert "Saved in runs/demo" in shown.stdout
    return folder


def test_make_knows_the_targets() -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("make")]
    assert commands == ["make demo", "make test"]
    for command in commands:
        subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_commands(workplace: Path) -> None:
    shutil.copy(ROOT / "README.md", workplace)
    bin_folder = Path(sys.executable).parent
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("unmask")]
    assert len(commands) == 8
    for command in commands:
        name, *arguments = shlex.split(command)
        shown = subprocess.run(
            [bin_folder / name, *arguments],
            cwd=workplace,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout


def test_python(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(workplace)
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "nats per token" in printed
    assert "0 tokens still hidden" in printed
    assert (workplace / "runs" / "fox" / "model.safetensors").exists()


def test_the_tree_is_the_one_on_disk() -> None:
    tree = README.split("## The tree")[1]
    package = ROOT / "src" / "unmask"
    entries = [p.name for p in package.iterdir() if not p.name.startswith(("_", "py.typed"))]
    for entry in entries:
        assert f"  {entry}" in tree, entry
