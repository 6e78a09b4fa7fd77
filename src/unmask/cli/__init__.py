"""The command line.

Help must be fast: only the module of the given command is imported, and torch only inside commands.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

COMMANDS = {
    "recipes": "recipes.recipes",
    "prepare": "prepare.prepare",
    "train": "train.train",
    "distill": "distill.distill",
    "export": "export.export",
    "push": "push.push",
    "sample": "generate.sample",
    "complete": "generate.complete",
    "infill": "generate.infill",
    "chat": "chat.chat",
    "serve": "serve.serve",
    "score": "score.score",
    "eval": "evaluate.evaluate",
    "eval-samples": "evaluate.eval_samples",
    "report": "report.report",
    "reproduce": "reproduce.reproduce",
    "classify train": "classify.train",
    "classify eval": "classify.evaluate",
    "classify predict": "classify.predict",
    "completion": "completion.completion",
}
"""The module and function of each command; the first line of its docstring is its line in the help.

A name of two words is a command of a group, which is its first word.
"""

_HELP_TEMPLATE = """\
usage: unmask COMMAND [OPTIONS]

Masked diffusion language models: train, measure, sample, infill and serve.

Quick start:
  unmask recipes
  unmask train stdlib-tiny --out runs/tiny
  unmask sample runs/tiny/model --watch

Commands:
{commands}

`unmask COMMAND --help` shows the options and examples of a command.
`source <(unmask completion bash)` completes commands, options and names (bash, zsh or fish).

Exit codes: 0 success; 1 failure; 2 bad input, explained in one sentence; 3 training was stopped by a signal
(run the same command again to resume); 4 some lines of --input failed; 130 interrupted.
UNMASK_TRACEBACK=1 shows the traceback of a failure."""

_EXIT_INTERRUPTED, _EXIT_BROKEN_PIPE = 130, 141
"""As in shells: 128 plus the number of the signal."""

_WRITE_ERRNOS = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_USER_ERRNOS = {*_WRITE_ERRNOS, errno.EACCES, errno.EPERM}
"""Errors of a disk that is read-only, full, or not the user's: bad input, not a failure of the program."""


def main() -> None:
    """Run the command in sys.argv, and exit with one of the codes in `_HELP_TEMPLATE`."""
    run_command(lambda: _dispatch(sys.argv[1:]))


def run_command(command: Callable[[], None]) -> None:
    """Run a function as a command: its errors are told in one sentence, and the process exits with a code of them."""
    try:
        _run(command)
    except SystemExit as end:
        if isinstance(end.code, int):
            _exit_ranks(end.code)
        raise
    _exit_ranks(0)


def _exit_ranks(code: int) -> None:
    """Under torchrun, exit this rank with `code`."""
    if "unmask.distributed" in sys.modules:  # otherwise no process group was initialized
        from unmask.distributed import exit_rank

        exit_rank(code)


def _run(command: Callable[[], None]) -> None:
    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # a closed pipe must raise here, not at interpreter shutdown
    except ValueError as error:
        _exit(2, str(error))
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader closed the pipe, as in `unmask sample ... | head -1`
        _discard_stdout()
        sys.exit(_EXIT_BROKEN_PIPE)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno in _USER_ERRNOS:
            if error.filename is None:  # stdout may be the full file
                _discard_stdout()
            _exit(2, _os_error_message(error))
        if os.environ.get("UNMASK_TRACEBACK"):
            raise
        _exit(1, str(error).strip().splitlines()[0] if str(error) else repr(error))


def command_function(command: str) -> Callable[..., Any]:
    """The function of a command; ValueError with the nearest name for an unknown one."""
    from unmask.config import lookup

    module, _, name = lookup(command, COMMANDS, "command").partition(".")
    found: Callable[..., Any] = getattr(import_module(f"{__name__}._{module}"), name)
    return found


def _dispatch(arguments: list[str]) -> None:
    if not arguments:
        print(_help_text(), file=sys.stderr)
        sys.exit(2)
    command, rest = _split_command(arguments)
    if command in ("-h", "--help"):
        print(_help_text())
    elif members := _group(command):
        print(_group_help(command, members), file=sys.stdout if rest else sys.stderr)
        sys.exit(0 if rest else 2)
    elif command == "--version":
        from unmask import __version__

        print(f"unmask {__version__}")
    else:
        from unmask.cli._help import help_text
        from unmask.cli._parsing import HELP_FLAGS, parse

        function = command_function(command)
        if set(HELP_FLAGS) & set(itertools.takewhile(lambda word: word != "--", rest)):
            print(help_text(command, function))
        else:
            function(**parse(command, function, rest))


def _split_command(words: list[str]) -> tuple[str, list[str]]:
    """The name of the command, of one word or two, and the words after it."""
    if _group(words[0]) and len(words) > 1 and not words[1].startswith("-"):
        return " ".join(words[:2]), words[2:]
    return words[0], words[1:]


def _group(name: str) -> list[str]:
    """The commands of a group; none if it is no group."""
    return [command for command in COMMANDS if command.startswith(f"{name} ")]


def _group_help(group: str, members: list[str]) -> str:
    usage = f"usage: unmask {group} {{{','.join(name.split()[1] for name in members)}}} [OPTIONS]"
    return f"{usage}\n\nCommands:\n{_command_lines(members)}\n\n`unmask {members[0]} --help` shows the options of one."


def _help_text() -> str:
    return _HELP_TEMPLATE.format(commands=_command_lines(list(COMMANDS)))


def _command_lines(names: list[str]) -> str:
    width = max(map(len, names))
    return "\n".join(f"  {name:{width}}  {(command_function(name).__doc__ or '').splitlines()[0]}" for name in names)


def _os_error_message(error: OSError) -> str:
    """One sentence: which file could not be read or written, and why."""
    why = error.strerror or str(error)
    if error.filename is None:
        return why
    use = "written" if error.errno in _WRITE_ERRNOS else "read or written"
    return f"{os.fsdecode(error.filename)} cannot be {use}: {why}"


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null: flushing it again at interpreter shutdown would change the exit code."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit(code: int, message: str) -> None:
    print(f"unmask: {message}", file=sys.stderr)
    sys.exit(code)
