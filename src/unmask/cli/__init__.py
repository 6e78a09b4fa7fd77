"""The command line: parse, build, call.

Help must come at once: only the command that was asked for is imported, and torch only inside commands.
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
    "export": "export.export",
    "sample": "generate.sample",
    "complete": "generate.complete",
    "infill": "generate.infill",
    "serve": "serve.serve",
    "score": "score.score",
    "eval": "evaluate.evaluate",
    "eval-samples": "evaluate.eval_samples",
    "report": "report.report",
    "completion": "completion.completion",
}
"""Where each command lives, from here; the first line of its docstring is its line in the help."""

_HELP_TEMPLATE = """\
usage: unmask COMMAND [OPTIONS]

Masked diffusion language models: train, measure, sample, infill and serve.

To begin:
  unmask recipes
  unmask train stdlib-tiny --out runs/tiny
  unmask sample runs/tiny/model --watch

Commands:
{commands}

`unmask COMMAND --help` shows the options and examples of a command.
`source <(unmask completion bash)` completes commands, options and names (bash, zsh or fish).

Exit codes: 0 done; 1 failure; 2 bad input, told in one sentence; 3 a signal stopped training, which goes
on when the same command is given again; 130 interrupted. UNMASK_TRACEBACK=1 shows where a failure was."""

_EXIT_INTERRUPTED, _EXIT_BROKEN_PIPE = 130, 141
"""As shells count: 128 and the number of the signal."""

_WRITE_ERRNOS = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_USER_ERRNOS = {*_WRITE_ERRNOS, errno.EACCES, errno.EPERM}
"""What a disk answers that is read-only, full or somebody else's: no failure of the program."""


def main() -> None:
    """Carry out the command of sys.argv; its exit codes are told in HELP."""
    try:
        _main()
    except SystemExit as end:
        if isinstance(end.code, int):
            _exit_ranks(end.code)
        raise
    _exit_ranks(0)


def _exit_ranks(code: int) -> None:
    """Where there are other processes, end as one of them."""
    if "unmask.distributed" in sys.modules:  # otherwise no command has come so far as to join them
        from unmask.distributed import exit_rank

        exit_rank(code)


def _main() -> None:
    try:
        try:
            _dispatch(sys.argv[1:])
        finally:
            sys.stdout.flush()  # a closed pipe is noticed here, and not when Python has begun to leave
    except ValueError as error:
        _exit(2, str(error))
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader has seen enough, as in `unmask sample ... | head -1`
        _discard_stdout()
        sys.exit(_EXIT_BROKEN_PIPE)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno in _USER_ERRNOS:
            if error.filename is None:  # it may be stdout that is full
                _discard_stdout()
            _exit(2, _os_error_message(error))
        if os.environ.get("UNMASK_TRACEBACK"):
            raise
        _exit(1, str(error).strip().splitlines()[0] if str(error) else repr(error))


def command_function(command: str) -> Callable[..., Any]:
    """The function of a command; a ValueError with the nearest name, if there is none."""
    from unmask.config import lookup

    module, _, name = lookup(command, COMMANDS, "command").partition(".")
    found: Callable[..., Any] = getattr(import_module(f"{__name__}._{module}"), name)
    return found


def _dispatch(arguments: list[str]) -> None:
    if not arguments:
        print(_help_text(), file=sys.stderr)
        sys.exit(2)
    command, *rest = arguments
    if command in ("-h", "--help"):
        print(_help_text())
    elif command == "--version":
        from unmask import __version__

        print(f"unmask {__version__}")
    else:
        from unmask.cli._help import help_text
        from unmask.cli._parsing import HELP_FLAGS as ASKED
        from unmask.cli._parsing import parse

        called = command_function(command)
        if set(ASKED) & set(itertools.takewhile(lambda word: word != "--", rest)):
            print(help_text(command, called))
        else:
            called(**parse(command, called, rest))


def _help_text() -> str:
    lines = [f"  {name:12}  {(command_function(name).__doc__ or '').splitlines()[0]}" for name in COMMANDS]
    return _HELP_TEMPLATE.format(commands="\n".join(lines))


def _os_error_message(error: OSError) -> str:
    """Which file could not be used, and why."""
    why = error.strerror or str(error)
    if error.filename is None:
        return why
    use = "written" if error.errno in _WRITE_ERRNOS else "read or written"
    return f"{os.fsdecode(error.filename)} cannot be {use}: {why}"


def _discard_stdout() -> None:
    """What stdout could not take is not tried again when Python leaves, which would change the exit code."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit(code: int, message: str) -> None:
    print(f"unmask: {message}", file=sys.stderr)
    sys.exit(code)
