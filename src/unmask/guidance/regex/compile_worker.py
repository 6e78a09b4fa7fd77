"""A process that works out patterns for another: it can be ended at any time, and takes no part of its time.

Over a pipe it gets a tokenizer as JSON and then patterns, and answers each with an automaton or a sentence;
every message is a pickle after its length.
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
from unmask.guidance.regex.token_dfa import token_dfa

_MAX_MEMORY_BYTES = 2 << 30
"""Bytes of address space, should the bounds of the work itself not hold."""
_NICENESS = 10


def encode_message(message: Any) -> bytes:
    """A message as it is sent."""
    content = pickle.dumps(message)
    return struct.pack("<Q", len(content)) + content


def main(requests: BinaryIO, responses: BinaryIO) -> None:
    """Answer until nothing more comes."""
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
            answer: Any = token_dfa(message, tokenizer)
        except ValueError as error:
            answer = str(error)
        except MemoryError:
            answer = f"the pattern {message[:60]!r} takes too much memory; repeat smaller parts, or less often"
        responses.write(encode_message(answer))
        responses.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
