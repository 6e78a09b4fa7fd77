"""Errors of files and libraries as one sentence, and libraries without their log output."""

from __future__ import annotations

import gzip
import importlib
import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


@contextmanager
def silenced_loggers(*names: str) -> Iterator[None]:
    """Silence loggers of libraries: what went wrong is in the exception."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def os_errors_as_value_error(path: Path, action: Literal["read", "written"]) -> Iterator[None]:
    """Raise operating-system errors as a ValueError: which path cannot be read or written, and why."""
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is not a gzip file that can be read: {error}") from None
    except OSError as error:
        # While a folder is written, the error names a temporary file; while it is read, the damaged one.
        failed = error.filename if action == "read" and error.filename else path
        raise ValueError(f"{failed} cannot be {action}: {error.strerror or error}") from None


def import_optional(module: str, extra: str) -> Any:
    """Import a module of an optional dependency, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise ValueError(f"this needs the package {package}: pip install 'unmask[{extra}]'") from None
