"""A process that renders chat templates: JSON requests on standard input, JSON answers on standard output.

A template comes with a model, from strangers. jinja2's immutable sandbox keeps it from everything but text; it could
still loop for ever or fill the memory, also inside one call of C code. So it is rendered in a process of its own that
may take so many bytes and seconds (`RENDER_BYTES`, `RENDER_SECONDS`) and is ended by the kernel beyond them. This file
is run by its path, and imports nothing of unmask: it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

RENDER_SECONDS = 5.0
"""Seconds that one conversation may take."""
RENDER_BYTES = 1 << 29
"""Bytes of memory that the process may take."""
MAX_TEXT_CHARS = 1 << 23
"""Characters of a rendered conversation."""


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML and sorts keys; models were trained on neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """A template in the environment of transformers; jinja2 is imported in the process that renders only."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}`, by which transformers finds what an assistant writes: its text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=refuse, strftime_now=strftime_now, dict=_Dict())
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"its line {error.lineno} is not Jinja: {error.message}") from None


def render(source: str, variables: dict[str, Any]) -> str:
    """The text that a template makes of its variables; ValueError with the template's reason if it refuses."""
    try:
        parts, size = [], 0
        for part in _compiled(source).generate(**variables):
            parts.append(part)
            size += len(part)
            if size > MAX_TEXT_CHARS:
                raise ValueError(f"it writes more than {MAX_TEXT_CHARS:,} characters")
        return "".join(parts)
    except MemoryError:
        raise ValueError(f"it takes more than {RENDER_BYTES >> 20} MB of memory") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise
    except Exception as error:  # what a template may raise is anything
        raise ValueError((str(error) or type(error).__name__).splitlines()[0][:300]) from None


def read_message(stream: BinaryIO) -> Any:
    """The next JSON value; None at the end."""
    head = stream.read(8)
    return None if len(head) < 8 else json.loads(stream.read(struct.unpack("<Q", head)[0]))


def write_message(stream: BinaryIO, value: Any) -> None:
    """Write a JSON value with its length."""
    data = json.dumps(value).encode()
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def main() -> None:
    """Answer requests {"source", "variables"} until there are no more."""
    with suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (RENDER_BYTES, RENDER_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that asks
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while (request := read_message(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, RENDER_SECONDS)
        try:
            answer = {"text": render(request["source"], request["variables"])}
        except ValueError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
