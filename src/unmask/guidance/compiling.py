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

from unmask.data.tokenizer import Tokenizer
from unmask.guidance.automaton import token_automaton

MEMORY = 2 << 30
"""Bytes of address space, should the bounds of the work itself not hold."""
NICE = 10


def packed(message: Any) -> bytes:
    """A message as it is sent."""
    content = pickle.dumps(message)
    return struct.pack("<Q", len(content)) + content


def main(asked: BinaryIO, answers: BinaryIO) -> None:
    """Answer until nothing more comes."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: Tokenizer | None = None
    while len(size := asked.read(8)) == 8:
        message = pickle.loads(asked.read(*struct.unpack("<Q", size)))
        if tokenizer is None:
            tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(message))
            continue
        try:
            answer: Any = token_automaton(message, tokenizer)
        except ValueError as error:
            answer = str(error)
        except MemoryError:
            answer = (
                f"the pattern {message[:60]!r} takes too much memory; repeat smaller parts, or less often"
            )
        answers.write(packed(answer))
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
