"""What the texts of requests must match, compiled in a separate process so that other requests continue."""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from unmask.data.tokenizers import BaseTokenizer
from unmask.guidance.regex.compile_worker import encode_message
from unmask.guidance.regex.token_dfa import TOKEN_DFA_CACHE, TokenDFA
from unmask.guidance.structure.structure import Structure
from unmask.serve._engine import DeadlineError, InternalError, QueueFullError

_MAX_WAITING = 64


class StructureCompiler:
    """Compiles structures to token DFAs of one tokenizer, one at a time, with a cache.

    A second thread would block the engine's thread through Python's GIL, so a process of lower priority
    compiles. It is started at the first structure, and killed when a request's deadline passes.
    """

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self.tokenizer = tokenizer
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def compile(self, structure: Structure, deadline: float) -> TokenDFA:
        """The DFA of a structure; ValueError if it is not valid, DeadlineError if it takes too long."""
        cached = TOKEN_DFA_CACHE.get((structure, self.tokenizer))
        if cached is not None:
            return cached
        if self._waiting >= _MAX_WAITING:
            raise QueueFullError(retry_after=5)
        self._waiting += 1
        try:
            async with asyncio.timeout(deadline - time.monotonic()), self._lock:
                return TOKEN_DFA_CACHE.get((structure, self.tokenizer)) or await self._request(structure)
        except TimeoutError:
            raise DeadlineError(f"the deadline has passed while {structure.name} was being compiled") from None
        finally:
            self._waiting -= 1

    async def _request(self, structure: Structure) -> TokenDFA:
        try:
            process = await self._ensure_process()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(encode_message(structure))
            await process.stdin.drain()
            (size,) = struct.unpack("<Q", await process.stdout.readexactly(8))
            answer = pickle.loads(await process.stdout.readexactly(size))
        except (OSError, asyncio.IncompleteReadError):
            await self.close()
            raise InternalError(f"{structure.name} could not be compiled") from None
        except BaseException:  # otherwise the next request would read this answer
            await self.close()
            raise
        if isinstance(answer, str):
            raise ValueError(answer)
        assert isinstance(answer, TokenDFA)
        TOKEN_DFA_CACHE.put((structure, self.tokenizer), answer, answer.num_bytes)
        return answer

    async def _ensure_process(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "unmask.guidance.regex.compile_worker",
                stdin=PIPE,
                stdout=PIPE,
                env={**os.environ, **one_thread},
            )
            assert self._process.stdin is not None
            self._process.stdin.write(encode_message(self.tokenizer.to_json()))
        return self._process

    async def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
