"""Every command and every line of Python in the README runs, in order, on a run like the demo's."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
SMALL = "--set backbone.width=32 backbone.depth=1 backbone.heads=2 evaluate_rows=8"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def lines(*programs: str) -> list[str]:
    found = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in found if line.split()[0] in programs]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    name, *arguments = shlex.split(command)
    return subprocess.run(
        [BIN / name, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"},
    )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's run in it, much smaller, and with texts of one's own."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_texts").mkdir()
    shutil.copy(ROOT / "CONTRIBUTING.md", folder)
    shutil.copy(ROOT / "CONTRIBUTING.md", folder / "my_texts" / "one.txt")
    shutil.copy(ROOT / "README.md", folder / "my_texts" / "two.txt")
    trained = run(f"unmask train stdlib-tiny --out runs/demo --steps 3 --batch-size 4 {SMALL}", folder)
    assert trained.returncode == 0, trained.stderr
    return folder


def test_make_knows_the_targets() -> None:
    assert lines("make") == ["make demo", "make test", "make bench"]
    for command in lines("make"):
        subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_the_demo(workplace: Path) -> None:
    """What `make demo` does, but for the training."""
    demo = ["make", "--dry-run", "demo", f"DEMO={workplace / 'runs' / 'demo'}", f"BIN={BIN}"]
    shown = subprocess.run(demo, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    commands = [line for line in shown.splitlines() if line.startswith(f"{BIN}/unmask")]
    assert [command.split()[1] for command in commands] == ["train", "eval", "sample", "infill", "report"]
    outputs = [
        subprocess.run(["sh", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for command in commands[1:]
    ]
    assert "bits/byte" in outputs[0]
    assert "def is_even(n):" in outputs[2]
    assert outputs[3].strip() == str(workplace / "runs" / "demo" / "report" / "index.html")


def test_commands(workplace: Path) -> None:
    commands = [command for command in lines("unmask", "torchrun") if "serve" not in command]
    assert len(commands) == 18
    for command in commands:
        small = SMALL if "train" in command and "--set" not in command else ""
        shown = run(f"{command} {small}", workplace)
        assert shown.returncode == 0, (command, shown.stderr)
        assert shown.stdout


def test_serving(workplace: Path) -> None:
    (serve,) = (command for command in lines("unmask") if "serve" in command)
    (curl,) = lines("curl")
    server = subprocess.Popen(
        ["sh", "-c", f"exec {BIN}/{serve} --port 0"], cwd=workplace, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        address = re.search(r"127\.0\.0\.1:\d+", server.stderr.readline())
        assert address is not None
        assert "is ready" in server.stderr.readline()
        asked = shlex.split(curl.replace("localhost:8000", address[0]))
        shown = subprocess.run(asked, capture_output=True, text=True, check=True)
        (result,) = json.loads(shown.stdout)["results"]
        assert result["text"].startswith("for i in")
        assert len(result["spans"][0]["tokens"]) == 4
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0


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


def test_the_readme_has_no_pictures_that_only_a_checkout_has() -> None:
    """It is also the description of the package, which is shown where there is no docs/."""
    assert not re.findall(r"!\[[^\]]*\]\((?!https?://)", (ROOT / "README.md").read_text())
    assert "<img" not in (ROOT / "README.md").read_text()
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "docs/pictures/README.md").read_text()):
        assert (ROOT / "docs/pictures" / picture).is_file()


def test_the_package_says_who_made_it_and_where_it_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "The unmask developers"}]
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    assert project["classifiers"] == sorted(project["classifiers"])
    assert not any(name.startswith("License ::") for name in project["classifiers"])  # the expression says it
