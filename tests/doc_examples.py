"""What the documents tell their readers to type, and what they say is printed then.

A block of bash is followed by a plain block if its output is shown: all that its commands print on stdout.
Such blocks are made by `make docs` (this file, run as a program) and compared by tests/test_docs_output.py, both
with the model of `make demo`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unmask.cli import COMMANDS, command_function

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")))
BASH = re.compile(r"^```bash\n(?P<commands>.*?)^```\n(?:\n```\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
EXAMPLES = re.compile(r"For example:\n(?P<commands>(?: {6}.*\n)+)")
VOLATILE = re.compile(r"\d[\d,.]*(?= (?:s|ms|min|GFLOP/s|tokens/s)\b)|\d+%(?= of peak)")
ESTIMATE = re.compile(r"([\d,]+(?:\.\d+)?) ± ([\d,]+(?:\.\d+)?)")


@dataclass(frozen=True)
class Example:
    """Commands that are shown together, where, and their output if that is shown as well."""

    where: str
    commands: tuple[str, ...]
    output: str | None = None


def document_examples() -> Iterator[Example]:
    """Of every document, in order."""
    for name in DOCUMENTS:
        for block in BASH.finditer((ROOT / name).read_text(encoding="utf-8")):
            yield Example(name, _lines(block["commands"]), block["output"])


def help_examples() -> Iterator[Example]:
    """Of every command's help."""
    for name in COMMANDS:
        block = EXAMPLES.search((command_function(name).__doc__ or "") + "\n")
        yield Example(f"unmask {name} --help", () if block is None else _lines(block["commands"]))


def _lines(block: str) -> tuple[str, ...]:
    joined = block.replace("\\\n", " ")
    lines = (re.sub(r"\s+#\s.*", "", line).strip() for line in joined.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def run_in_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a reader gives it, in an activated environment."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )


def stable_lines(text: str) -> list[str]:
    """Lines of an output without what differs from run to run: times, and bars that show them."""
    lines: list[str] = []
    timed = False
    for line in text.splitlines():
        if "━" in line:
            continue
        timed = line.endswith(" seconds") or (timed and bool(re.search(r"\s[\d.]+$", line)))
        lines.append(VOLATILE.sub("#", line.rsplit(None, 1)[0] if timed else line).rstrip())
    return lines


def output_mismatch(shown: str, printed: str, exactly: bool) -> str | None:
    """What is wrong with an output that a document shows, or None.

    Where a machine rounds as the one that the document was made on does, every letter is the same; elsewhere
    another model was trained, and figures agree within their errors and 3 %.
    """
    if exactly:
        pairs = zip(stable_lines(shown), stable_lines(printed), strict=False)
        wrong = next((f"{a!r} is shown, {b!r} printed" for a, b in pairs if a != b), None)
        return wrong or (
            None if len(stable_lines(shown)) == len(stable_lines(printed)) else "the numbers of lines differ"
        )
    if len(ESTIMATE.findall(shown)) != len(ESTIMATE.findall(printed)):
        return "the numbers of figures differ"
    for one, other in zip(ESTIMATE.finditer(shown), ESTIMATE.finditer(printed), strict=True):
        (a, da), (b, db) = ([float(n.replace(",", "")) for n in found.groups()] for found in (one, other))
        if abs(a - b) > 5 * (da**2 + db**2) ** 0.5 + 0.03 * a:
            return f"{one[0]} is shown, {other[0]} printed"
    return None


def run_example(example: Example, folder: Path) -> str:
    """What the commands print on stdout there; whoever fails raises."""
    outputs = []
    for command in example.commands:
        if command.startswith("source "):  # `in_shell` does it
            continue
        done = run_in_shell(command, folder)
        if done.returncode != 0:
            raise RuntimeError(f"{example.where}: {command} ended with {done.returncode}: {done.stderr}")
        outputs.append(done.stdout)
    return "".join(outputs)


def demo_commands(demo: Path | str = "runs/demo") -> list[str]:
    """What `make demo` does."""
    asked = ["make", "--dry-run", "demo", f"DEMO={demo}", f"BIN={BIN}"]
    shown = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [line for line in shown.splitlines() if line.startswith(f"{BIN}/unmask")]


def run_demo(folder: Path) -> str:
    """What `make demo` prints where there is nothing yet."""
    outputs = []
    for command in demo_commands():
        done = run_in_shell(f"{command} 2>&1", folder)
        outputs.append(f"{command.replace(str(BIN), '.venv/bin')}\n{done.stdout}")
    return "".join(outputs)


def documented_demo() -> str:
    """What docs/quickstart.md says `make demo` prints, but for the last line, which is make's own."""
    quickstart = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    return quickstart.split("```bash\nmake demo\n```\n")[1].split("```\n")[1].rpartition("Open the page")[0]


def _update_documents(folder: Path) -> None:
    """Carry out all examples whose output is shown, and put what they print in its place."""
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        for block in BASH.finditer(text):
            if block["output"] is not None:
                example = Example(name, _lines(block["commands"]))
                now = block[0].replace(f"```\n{block['output']}```", f"```\n{run_example(example, folder)}```")
                text = text.replace(block[0], now)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _update_documents(Path(sys.argv[1]))
