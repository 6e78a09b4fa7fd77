"""The supervisor of several processes, with workers that do nothing but say who they are."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from live_server import wait_until

PROGRAM = Path(__file__).parents[1] / "tiny_supervisor.py"


class Supervised:
    """A running supervisor, and connections to it."""

    def __init__(self, process: subprocess.Popen[str], port: int, stack: ExitStack) -> None:
        self.process, self._port, self._stack = process, port, stack

    def connect(self) -> tuple[int, int, str]:
        """Number and process of the worker that answers, and what it was told; the connection stays open."""
        connection = self._stack.enter_context(socket.create_connection(("127.0.0.1", self._port), timeout=10))
        index, pid, told = connection.makefile().readline().split(" ", 2)
        return int(index), int(pid), told.strip()


@contextmanager
def supervised(mode: str = "answers") -> Iterator[Supervised]:
    process = subprocess.Popen([sys.executable, PROGRAM, mode], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = re.search(r":(\d+)/", process.stderr.readline())
        assert found
        with ExitStack() as stack:
            yield Supervised(process, int(found[1]), stack)
    finally:
        process.kill()
        process.communicate()


def both(served: Supervised) -> dict[int, int]:
    """The process of each worker, once both answer."""
    found: dict[int, int] = {}

    def complete() -> bool:
        index, pid, _ = served.connect()
        found[index] = pid
        return len(found) == 2

    wait_until(complete)
    return found


def test_connections_go_to_the_worker_with_the_fewest() -> None:
    with supervised() as served:
        both(served)
        before = Counter(served.connect()[0] for _ in range(60))
        assert set(before) == {0, 1}
        later = Counter(served.connect()[0] for _ in range(20))
        assert later == {0: 10, 1: 10}  # level by now, whoever was first


def test_a_stuck_worker_gets_no_connections_while_there_is_another() -> None:
    with supervised("gets-stuck") as served:
        both(served)
        wait_until(lambda: {served.connect()[0] for _ in range(20)} == {1})


def test_what_the_first_worker_measured_is_told_to_the_others() -> None:
    with supervised() as served:
        told = {}
        while len(told) < 2:
            index, _, measured = served.connect()
            told[index] = measured
        assert told == {0: "{}", 1: '{"by": "0"}'}


def test_a_worker_that_is_killed_is_started_again_and_no_connection_is_refused() -> None:
    with supervised() as served:
        pids = both(served)
        os.kill(pids[1], signal.SIGKILL)
        seen = set()
        wait_until(lambda: seen.add(served.connect()[1]) or len(seen - {*pids.values()}) == 1)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: seen.add(served.connect()[1]) or len(seen - {*pids.values()}) == 2)
        assert served.process.stderr is not None
        told = [served.process.stderr.readline() for _ in range(2)]
        assert sorted(told) == [f"worker {index} was ended by SIGKILL; it is started again\n" for index in (0, 1)]


@pytest.mark.parametrize(
    ("mode", "code", "sentence"),
    [("fails", 7, ""), ("dies", 1, "the first worker was ended by SIGKILL while it was loading\n")],
)
def test_a_first_worker_that_ends_while_loading_ends_all(mode: str, code: int, sentence: str) -> None:
    with supervised(mode) as served:
        _, told = served.process.communicate(timeout=20)
        assert (served.process.returncode, told) == (code, sentence)


def test_a_later_worker_that_cannot_be_started_does_not_stop_the_first() -> None:
    with supervised("fails-later") as served:
        assert served.process.stderr is not None
        assert "exit code 9; it is started again\n" in served.process.stderr.readline()
        assert "exit code 9; it is started again in 2 seconds\n" in served.process.stderr.readline()
        assert [served.connect()[0] for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_workers(number: signal.Signals) -> None:
    with supervised() as served:
        pids = both(served)
        served.process.send_signal(number)
        # These workers have no handler of SIGTERM, so it ends them: not as they should, and that is told.
        assert served.process.wait(10) == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_a_worker_that_is_still_starting_is_ended_without_further_ado() -> None:
    with supervised("slow") as served:
        assert served.connect()[0] == 0
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(10) == 0


def test_workers_that_do_not_end_are_killed() -> None:
    with supervised("deaf") as served:
        pids = both(served)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(10) == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
