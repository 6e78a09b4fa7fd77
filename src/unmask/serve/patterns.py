"""Patterns of requests, worked out in a process of their own: whatever one asks for, others go on."""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from unmask.data.tokenizer import Tokenizer
from unmask.guidance.automaton import AUTOMATA, TokenAutomaton
from unmask.guidance.compiling import packed
from unmask.serve.engine import BusyError, InternalError, LateError

MOST_WAITING = 64


class PatternCompiler:
    """Patterns over one tokenizer, one after the other; those that were used last are kept.

    Python would hold up the engine's thread at every operation, if a second thread worked out automata: so
    a process does, of lower priority, which is started at the first pattern and ended with the deadline of
    what it is about.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._process: Process | None = None
        self._free = asyncio.Lock()
        self._waiting = 0

    async def compiled(self, pattern: str, deadline: float) -> TokenAutomaton:
        """The automaton of a pattern; ValueError with a sentence if it has none, LateError if it is not
        found in time."""
        found = AUTOMATA.get((pattern, self.tokenizer))
        if found is not None:
            return found
        if self._waiting >= MOST_WAITING:
            raise BusyError(retry_after=5)
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._free:
                return AUTOMATA.get((pattern, self.tokenizer)) or await self._ask(pattern)
        except TimeoutError:
            raise LateError("the deadline has passed while the pattern was being worked out") from None
        finally:
            self._waiting -= 1

    async def _ask(self, pattern: str) -> TokenAutomaton:
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(packed(pattern))
            await process.stdin.drain()
            (size,) = struct.unpack("<Q", await process.stdout.readexactly(8))
            answer = pickle.loads(await process.stdout.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            await self.close()
            raise InternalError("the pattern could not be worked out") from None
        except BaseException:  # nobody waits for its answer any more, and the next one would get it
            await self.close()
            raise
        if isinstance(answer, str):
            raise ValueError(answer)
        assert isinstance(answer, TokenAutomaton)
        AUTOMATA.put((pattern, self.tokenizer), answer, answer.size)
        return answer

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            alone = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "unmask.guidance.compiling",
                stdin=PIPE,
                stdout=PIPE,
                env={**os.environ, **alone},
            )
            assert self._process.stdin is not None
            self._process.stdin.write(packed(self.tokenizer.inner.to_str()))
        return self._process

    async def close(self) -> None:
        """End the process, whatever it is about."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
