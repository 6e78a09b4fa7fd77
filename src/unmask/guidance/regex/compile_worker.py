"""A worker process that compiles structures for a server: it can be killed at any time, and does not hold its GIL.

It reads a tokenizer as JSON from a pipe, then structures, and answers each with an automaton or an error message.
Every message is a pickle, preceded by its length.
"""

from __future__ import annotations

import os
import pickle
import resource
import struct
import sys
from typing import Any, BinaryIO

import tokenizers

from unmask.data.tokenizers import Tokenizer
from unmask.guidance.regex.token_dfa import TokenDFA

_MAX_MEMORY_BYTES = 2 << 30
"""Limit of the address space, in case the work budgets fail."""
_NICENESS = 10


def encode_message(message: Any) -> bytes:
    """A message in the format of the pipe."""
    content = pickle.dumps(message)
    return struct.pack("<Q", len(content)) + content


def _main(requests: BinaryIO, responses: BinaryIO) -> None:
    """Answer requests until the pipe is closed."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: Tokenizer | None = None
    while len(size := requests.read(8)) == 8:
        message = pickle.loads(requests.read(*struct.unpack("<Q", size)))
        if tokenizer is None:
            tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(message))
            continue
        try:
            answer: Any = TokenDFA.compile(message, tokenizer)
        except ValueError as error:
            answer = str(error)
        except MemoryError:
            answer = f"{message.subject} takes too much memory; use fewer or smaller repeats"
        responses.write(encode_message(answer))
        responses.flush()


if __name__ == "__main__":
    _main(sys.stdin.buffer, sys.stdout.buffer)
