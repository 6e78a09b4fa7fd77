"""A command on a file of requests in a process of its own, with small batches, that may kill itself.

    python tests/batches_worker.py KILL_AFTER WHERE ARGUMENTS...

After KILL_AFTER batches of rank 0 (-1: never) the process ends by SIGKILL: before the next one is written
(`between`), in the middle of its line (`within`), or once all answers are written but not yet tidied up (`end`).
`full` is a disk on which no file can have more than 1,500 bytes.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Any

from unmask.batches import AnswerFile
from unmask.cli import _requests, main


def _kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    kill_after, where = int(sys.argv[1]), sys.argv[2]
    sys.argv = ["unmask", *sys.argv[3:]]
    _requests._MAX_BATCH_TOKENS = 64
    count, inner = 0, AnswerFile.append

    def append(self: AnswerFile, batch: int, results: Sequence[Any]) -> None:
        global count
        if self.rank == 0 and count == kill_after:
            if where == "within":
                with self._journal.open("ab") as file:
                    file.write(b'{"batch": 3, "results": [{"text"')
            _kill()
        inner(self, batch, results)
        count += 1

    AnswerFile.append = append  # type: ignore[method-assign]
    if where == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, resource.RLIM_INFINITY))
    if where == "end":
        shutil.rmtree = _kill
    main()
