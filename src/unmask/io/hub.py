"""The hub: what looks like a name there, and an end at once where it cannot be reached.

The libraries that fetch from it try again for half a minute, and say so on the terminal. Whether anybody
answers is asked first, once and for a few seconds; if nobody does, they look into their caches only.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import ModuleType
from urllib.parse import urlsplit

HUB_PREFIX = "hub:"
REPO_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONNECT_TIMEOUT_SECONDS = 3.0
UNREACHABLE_MESSAGE = "the hub cannot be reached from here, and nothing of that name was fetched before"

_NOISY_LOGGERS = ("huggingface_hub", "datasets", "transformers", "fsspec", "httpx")
_OFFLINE_FLAGS = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))


def parse_repo_id(source: str) -> str | None:
    """The name on the hub that a text stands for, `hub:NAME` or `ORG/NAME`; None if it is a place here.

    A name whose first part is a folder here, or `runs`, where this project puts its models, is a place.
    """
    if source.startswith(HUB_PREFIX):
        return source.removeprefix(HUB_PREFIX)
    first = source.partition("/")[0]
    local = Path(source).exists() or first == "runs" or Path(first).is_dir()
    return source if REPO_ID_PATTERN.fullmatch(source) and not local else None


@contextmanager
def hub_session(name: str) -> Iterator[bool]:
    """While a library looks something up: quiet, and offline if the hub does not answer; whether it does.

    What is here need not be looked for.
    """
    online = Path(name).exists() or is_reachable()
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    before = os.environ.get("HF_HUB_OFFLINE")
    known = [(sys.modules[name], switch) for name, switch in _OFFLINE_FLAGS if name in sys.modules]
    were = [getattr(module, switch) for module, switch in known]
    if not online:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported from now on
        for module, switch in known:
            setattr(module, switch, True)
    try:
        yield online
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not online:
            _restore_offline_flags(before, known, were)


def _restore_offline_flags(
    old_env: str | None, modules: list[tuple[ModuleType, str]], old_values: list[object]
) -> None:
    """What was imported offline must not stay so."""
    os.environ.pop("HF_HUB_OFFLINE")
    if old_env is not None:
        os.environ["HF_HUB_OFFLINE"] = old_env
    for (module, switch), value in zip(modules, old_values, strict=True):
        setattr(module, switch, value)
    touched = [module for module, _ in modules]
    for name, switch in _OFFLINE_FLAGS:
        if name in sys.modules and sys.modules[name] not in touched:
            setattr(importlib.import_module(name), switch, old_env not in (None, "", "0"))


def is_reachable() -> bool:
    """Whether the hub, or the proxy before it, takes a connection within a few seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    place = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return True  # who has set one up knows
    port = place.port or (80 if place.scheme == "http" else 443)
    if time.monotonic() < _retry_after.get(place.netloc, 0):
        return False
    answers: list[bool] = []

    def ask() -> None:
        try:
            socket.create_connection((place.hostname or "", port), timeout=_CONNECT_TIMEOUT_SECONDS).close()
        except OSError:
            return
        answers.append(True)

    asking = Thread(target=ask, daemon=True)  # names are looked up without a time limit
    asking.start()
    asking.join(_CONNECT_TIMEOUT_SECONDS)
    if not answers:
        _retry_after[place.netloc] = time.monotonic() + 10 * _CONNECT_TIMEOUT_SECONDS
    return bool(answers)


_retry_after: dict[str, float] = {}
"""Until when a place is not asked again: the paper's table has seven sets."""
