"""Dispatch, help, exit codes: what all commands have in common."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unmask import cli
from unmask.cli import COMMANDS

UNMASK = [sys.executable, "-m", "unmask"]


def test_the_help_lists_every_command_and_says_how_to_begin(command: Callable[..., Any]) -> None:
    shown = command("--help")
    assert shown.code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*\.$", shown.out, flags=re.MULTILINE), name
    assert "unmask train stdlib-tiny" in shown.out
    assert "Exit codes: 0 success; 1 failure; 2 bad input" in shown.out
    assert "unmask completion bash" in shown.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, command: Callable[..., Any]) -> None:
    shown = command(*name.split(), "--help")
    assert shown.code == 0
    assert f"usage: unmask {name}" in shown.out
    examples = re.findall(rf"^(?:Example:| ) unmask {name}\b", shown.out, flags=re.MULTILINE)
    assert examples


def test_help_waits_for_nothing_heavy() -> None:
    """In a process of its own; a command imports what it needs when it runs."""
    code = (
        "import sys, unmask.cli\n"
        "for name in ('', *unmask.cli.COMMANDS):\n"
        "    sys.argv = ['unmask', *name.split(), '--help']\n"
        "    try: unmask.cli.main()\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: unmask") == 1 + len(COMMANDS)


def test_the_installed_command_is_this_one() -> None:
    installed = Path(sys.executable).with_name("unmask")
    for start in ([installed], UNMASK):
        shown = subprocess.run([*start, "infill", "--help"], capture_output=True, text=True, check=True)
        assert 'unmask infill runs/demo "Flat is <mask:2> nested."' in shown.stdout


def test_version(command: Callable[..., Any]) -> None:
    assert re.fullmatch(r"unmask \d+\.\d+\.\d+\S*\n", command("--version").out)


def test_a_group_shows_its_commands(command: Callable[..., Any]) -> None:
    shown = command("classify", "--help")
    assert shown.code == 0
    assert "usage: unmask classify {train,eval,predict} [OPTIONS]" in shown.out
    bare = command("classify")
    assert (bare.code, bare.out, bare.err) == (2, "", shown.out)
    wrong = command("classify", "trian")
    assert wrong.code == 2
    assert "there is no command 'classify trian' (did you mean classify train?)" in wrong.err


def test_nothing_to_do_shows_the_help_and_exits_with_2(command: Callable[..., Any]) -> None:
    shown = command()
    assert (shown.code, shown.out) == (2, "")
    assert "Commands:" in shown.err


def test_a_mistyped_command_is_one_sentence(command: Callable[..., Any]) -> None:
    shown = command("infil", "x", "y")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith("unmask: there is no command 'infil' (did you mean infill?); there are ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ValueError("n must be 1"), 2, "unmask: n must be 1\n"),
        (RuntimeError("first\nsecond"), 1, "unmask: first\n"),
        (MemoryError(), 1, "unmask: MemoryError()\n"),
        (OSError(5, "Input/output error"), 1, "unmask: [Errno 5] Input/output error\n"),
        (OSError(28, "No space left", "a/b"), 2, "unmask: a/b cannot be written: No space left\n"),
        (
            OSError(30, "Read-only file system", "a"),
            2,
            "unmask: a cannot be written: Read-only file system\n",
        ),
        (OSError(122, "Quota exceeded", "a"), 2, "unmask: a cannot be written: Quota exceeded\n"),
        (PermissionError(13, "No!", "a"), 2, "unmask: a cannot be read or written: No!\n"),
        (OSError(28, "No space left on device"), 2, "unmask: No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_goes_wrong_has_an_exit_code(
    error: BaseException, code: int, told: str, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert command("recipes") == (code, "", told)


def test_a_failure_can_be_traced(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: list[str]) -> None:
        raise RuntimeError("deep down")

    monkeypatch.setattr(cli, "_dispatch", fail)
    monkeypatch.setenv("UNMASK_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="deep down"):
        command("recipes")


@pytest.mark.parametrize("asked", [["--help"], ["recipes", "--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(asked: list[str]) -> None:
    """The pipe is closed before anything is written into it, and what is written waits for the end."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    work = subprocess.Popen([*UNMASK, *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered)
    assert work.stdout is not None
    work.stdout.close()
    assert work.stderr is not None
    assert work.stderr.read() == b""
    work.stderr.close()
    assert work.wait(60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_does_not_fit_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*UNMASK, "--help"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (2, b"unmask: No space left on device\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_leaves_without_a_traceback(folder: str) -> None:
    """Sent by another process while texts are written, after the first frame has been seen."""
    many = [*UNMASK, "sample", folder, "--n", "300", "--steps", "100000", "--sampler", "remdm", "--watch"]
    work = subprocess.Popen(many, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert work.stdout is not None
    assert work.stderr is not None
    assert work.stderr.readline().startswith(b"step 0")
    time.sleep(0.2)
    os.kill(work.pid, signal.SIGINT)
    out, err = work.communicate(timeout=60)
    assert work.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
