"""The process that renders chat templates, as the rest of the library sees it."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from unmask.data.chat import _render_worker as worker


class _Renderer:
    """One process for all templates, started at first use and again after it was ended; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._of_parents: list[subprocess.Popen[bytes]] = []
        """Processes of the program that this one was forked from, which it must neither use nor end."""

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of a template; ValueError with a reason if it refuses or takes too long."""
        with self._lock:
            process = self._ensure_process()
            try:
                worker.write_message(cast(BinaryIO, process.stdin), {"source": source, "variables": variables})
                answer = worker.read_message(cast(BinaryIO, process.stdout))
            except BrokenPipeError:
                answer = None
            except BaseException:  # else the next request would read this answer
                self.end()
                raise
            if answer is None:
                self.end()
                raise ValueError(
                    f"it takes more than {worker.RENDER_SECONDS:g} seconds, or {worker.RENDER_BYTES >> 20} MB of memory"
                )
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner != os.getpid():
            self._of_parents.append(self._process)
            self._process = None
        if self._process is None:
            command = [sys.executable, "-P", str(Path(worker.__file__))]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._owner = os.getpid()
        return self._process

    def end(self) -> None:
        """End the process, unless it is another program's."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()


_RENDERER = _Renderer()
atexit.register(_RENDERER.end)


def render_template(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a Jinja template makes of its variables, in a process of bounded time and memory."""
    return _RENDERER.render(source, variables)
