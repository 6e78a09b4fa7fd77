"""`unmask chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from unmask.cli._arguments import AllowCodeFlag, InlineLoadOptions, LoadOptions, ModelPath, load_model
from unmask.cli._generate import compute_fastest
from unmask.cli._generation_options import GenerationOptions
from unmask.cli._signature import Inline, Option

if TYPE_CHECKING:
    from unmask.cli._chat_session import ChatSession

_JsonLines = Annotated[bool, Option(name="json", help="Print one line of JSON for each answer.")]

_PROMPT, _MORE = "> ", "... "


def chat(
    model: ModelPath,
    system: str = "",
    length: int = 256,
    options: Annotated[GenerationOptions, Inline()] = GenerationOptions(),  # noqa: B008
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    as_json: _JsonLines = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Chat with an instruct model in the terminal.

    For example:
      unmask chat runs/chat
      echo "Who are you?" | unmask chat runs/chat --system "Be brief." --length 32
      unmask chat runs/chat --json < questions.txt

    Answers emerge in place on a terminal; elsewhere only finished ones are written. Each line is a message; one that
    ends with a backslash goes on in the next line. /help lists the commands. Answer i is drawn with seed + i. What is
    wrong is told, and ends the command unless it is used in a terminal.

    Args:
        model: A folder with a chat template: of unmask or in a published format, or a name on the hub.
        system: A system message, before all others.
        length: The largest number of tokens of an answer.
    """
    from unmask.cli._chat_session import ChatSession

    if options.n != 1:
        raise ValueError("a chat has one answer at a time: leave out --n")
    if length < 1:
        raise ValueError(f"length must be at least 1; got {length}")
    lm = load_model(model, require_tokenizer=True, allow_code=allow_code, options=weights)
    lm.require_chat_template()
    lm.denoiser.prepack()
    compute_fastest(lm, weights)
    session = ChatSession(lm, options, options.build_sampler(lm), length, as_json)
    if system:
        session.set_system(system)
    _converse(session, sys.stdin.isatty())


def _converse(session: ChatSession, interactive: bool) -> None:
    """Answer the messages of standard input until its end, or /exit."""
    if interactive:
        print("/help lists the commands; /exit or Ctrl-D ends.", file=sys.stderr)
    for message in _messages(interactive):
        try:
            session.take(message)
        except EOFError:
            return
        except ValueError as error:
            if not interactive:
                raise
            print(f"unmask: {error}", file=sys.stderr)
        except KeyboardInterrupt:  # while an answer is written: it is given up, the conversation goes on
            if not interactive:
                raise
            print("\ninterrupted", file=sys.stderr)


def _messages(interactive: bool) -> Iterator[str]:
    """Messages of standard input, of one line or of several that end with backslashes; empty ones are skipped."""
    lines: list[str] = []
    for line in _terminal_lines(lines) if interactive else _piped_lines():
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        message = "\n".join([*lines, line])
        lines.clear()
        if message.strip():
            yield message
    if any(lines):
        yield "\n".join(lines)


def _terminal_lines(unfinished: list[str]) -> Iterator[str]:
    """Lines with editing and history."""
    import readline  # noqa: F401  # gives input() both

    while True:
        try:
            yield input(_MORE if unfinished else _PROMPT)
        except EOFError:
            print()
            return


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ValueError(f"line {number} of standard input is not UTF-8 text") from None
