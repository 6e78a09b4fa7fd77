"""Programs in processes of their own that need not import torch first: they are forks of one that has.

A process of the standard library's fork server is as good as a new one for what programs do to files and to each
other, and can be killed; it has its own memory, environment, arguments and exit code. Ranks get the variables that
torchrun would give them; torchrun itself is tried by tests/test_launcher.py and tests/test_docs.py.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from types import MappingProxyType

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch.distributed.checkpoint", "torch.distributed.fsdp", "unmask.cli", "unmask.evaluation.evaluate", "unmask.run"]
)


def run_program(
    program: Path | str,
    *arguments: object,
    ranks: int = 1,
    timeout: float = 300,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """`python FILE.py ARGUMENTS` or `python -m MODULE ARGUMENTS`, on ranks that are ended as soon as one fails."""
    words = [str(program), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as scratch:
        files = [(Path(scratch, f"out-{rank}"), Path(scratch, f"err-{rank}")) for rank in range(ranks)]
        port = _free_port() if ranks > 1 else 0
        processes = [
            _SERVER.Process(
                target=_become, args=(words, {**environment, **_variables(rank, ranks, port)}, *files[rank])
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        code, end = 0, time.monotonic() + timeout
        running = {process.sentinel: process for process in processes}
        while running and code == 0:
            ended = wait(list(running), timeout=max(0.0, end - time.monotonic()))
            codes = [running.pop(each).exitcode for each in list(running) if each in ended]
            code = next((each for each in codes if each), 0) if ended else 124
        for process in running.values():
            process.kill()
        for process in processes:
            process.join()
        out, err = ("".join(file.read_text() for file in each if file.exists()) for each in zip(*files, strict=True))
    return subprocess.CompletedProcess(words, code, out, err)


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _become(words: list[str], variables: Mapping[str, str], out: Path, err: Path) -> None:
    os.environ.update(variables)
    for number, file in ((1, out), (2, err)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = words
    try:
        run = runpy.run_path if words[0].endswith(".py") else runpy.run_module
        run(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a fork would leave without
