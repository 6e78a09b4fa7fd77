"""What torchrun's own process prints and returns when it has started `unmask`.

torchrun reports every failure and every signal with a traceback and exit code 1. The ranks have printed their error
already, so the launcher exits with their code: 3 for a run that was saved, 2 for bad input. torchrun loads what is
registered as `torchrun.handlers` when it starts; where it does not, or where it starts another program than
`-m unmask`, nothing changes.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

_EXIT_STOPPED = 3
"""The exit code of ranks that a signal stopped and that have saved."""

_NOISY_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
)
"""Loggers that report signals and failures of the ranks."""


def register() -> Any:
    """Called by torchrun at start-up, as if it registered a rendezvous backend, which it does not."""
    if not os.environ.get("UNMASK_TRACEBACK") and _launches_unmask(sys.argv[1:]):
        sys.excepthook = _excepthook
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its notice
        for name in _NOISY_LOGGERS:
            logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.CRITICAL)
    return _no_rendezvous


def _exit_code(codes: Sequence[int], signal_number: int | None = None) -> int:
    """What the launcher returns, from the codes of its ranks in the order in which they ended.

    The ranks stop together, after all have saved; ranks that have not exited by then may be killed.
    """
    if _EXIT_STOPPED in codes:
        return _EXIT_STOPPED
    failed = [code for code in codes if code != 0]
    if signal_number is not None and failed:
        return 128 + signal_number
    return 0 if not failed else failed[0] if failed[0] > 0 else 128 - failed[0]


def _launches_unmask(arguments: Sequence[str]) -> bool:
    return any(flag in ("-m", "--module") and module == "unmask" for flag, module in itertools.pairwise(arguments))


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replaces sys.excepthook: exit with the ranks' code, and print only what no rank could print."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if isinstance(error, ChildFailedError):
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        rank, first = failures[0]
        if first.exitcode < 0:
            _print_error(f"rank {rank} was ended by {signal.Signals(-first.exitcode).name}")
        sys.exit(_exit_code([failure.exitcode for _, failure in failures]))
    if isinstance(error, SignalException):
        codes = _child_exit_codes()
        if -signal.SIGKILL in codes:
            _print_error(
                "the ranks did not exit in time and were killed; training resumes from its last checkpoint"
                " when the same command is given again, and torchrun's --shutdown-timeout gives more time"
            )
        sys.exit(_exit_code(codes, error.sigval))
    sys.__excepthook__(kind, error, trace)


def _child_exit_codes() -> list[int]:
    """The exit codes of the processes that this one started; one that still runs will end by the signal."""
    children = [child for child in gc.get_objects() if issubclass(type(child), subprocess.Popen)]
    return [-signal.SIGTERM if child.poll() is None else child.returncode for child in children]


def _print_error(message: str) -> None:
    print(f"unmask: {message}", file=sys.stderr)


def _no_rendezvous(_parameters: Any) -> NoReturn:
    raise ValueError("'unmask' is not a rendezvous; leave out --rdzv-backend, or name one of torchrun's")
