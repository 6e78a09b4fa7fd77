"""The Hugging Face hub: repository names, and failing fast if it cannot be reached.

The libraries that download from it retry for half a minute and log each attempt. So a connection is tried
first, for a few seconds; if it fails, the libraries are switched to their caches.
"""

from __future__ import annotations

import importlib
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

from unmask.io.errors import silenced_loggers

HUB_PREFIX = "hub:"
REPO_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONNECT_TIMEOUT_SECONDS = 3.0
UNREACHABLE_MESSAGE = "the hub cannot be reached from here, and nothing of that name was fetched before"

_NOISY_LOGGERS = ("huggingface_hub", "datasets", "transformers", "fsspec", "httpx")
_OFFLINE_FLAGS = (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE"))


def parse_repo_id(source: str) -> str | None:
    """The hub name in `hub:NAME` or `ORG/NAME`; None if `source` is a local path.

    It is a local path if its first part is a folder, or `runs`, the default folder of models.
    """
    if source.startswith(HUB_PREFIX):
        return source.removeprefix(HUB_PREFIX)
    first = source.partition("/")[0]
    local = Path(source).exists() or first == "runs" or Path(first).is_dir()
    return source if REPO_ID_PATTERN.fullmatch(source) and not local else None


@contextmanager
def hub_session(name: str) -> Iterator[bool]:
    """Silence the hub's libraries, and switch them offline if the hub is unreachable; yields whether it is reachable.

    A local path counts as reachable.
    """
    online = Path(name).exists() or _is_reachable()
    before = os.environ.get("HF_HUB_OFFLINE")
    modules = [(sys.modules[name], flag) for name, flag in _OFFLINE_FLAGS if name in sys.modules]
    old_values = [getattr(module, flag) for module, flag in modules]
    if not online:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        for module, flag in modules:
            setattr(module, flag, True)
    try:
        with silenced_loggers(*_NOISY_LOGGERS):
            yield online
    finally:
        if not online:
            _restore_offline_flags(before, modules, old_values)


def _restore_offline_flags(
    old_env: str | None, modules: list[tuple[ModuleType, str]], old_values: list[object]
) -> None:
    """Also resets modules that were imported while offline."""
    os.environ.pop("HF_HUB_OFFLINE")
    if old_env is not None:
        os.environ["HF_HUB_OFFLINE"] = old_env
    for (module, flag), value in zip(modules, old_values, strict=True):
        setattr(module, flag, value)
    restored = [module for module, _ in modules]
    for name, flag in _OFFLINE_FLAGS:
        if name in sys.modules and sys.modules[name] not in restored:
            setattr(importlib.import_module(name), flag, old_env not in (None, "", "0"))


def _is_reachable() -> bool:
    """Whether the hub accepts a connection within a few seconds; a proxy is trusted."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return True
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    if time.monotonic() < _retry_after.get(endpoint.netloc, 0):
        return False
    connected: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((endpoint.hostname or "", port), timeout=_CONNECT_TIMEOUT_SECONDS).close()
        except OSError:
            return
        connected.append(True)

    thread = Thread(target=connect, daemon=True)  # name resolution has no timeout of its own
    thread.start()
    thread.join(_CONNECT_TIMEOUT_SECONDS)
    if not connected:
        _retry_after[endpoint.netloc] = time.monotonic() + 10 * _CONNECT_TIMEOUT_SECONDS
    return bool(connected)


_retry_after: dict[str, float] = {}
"""Until when an unreachable endpoint is not tried again, so that several datasets do not wait several times."""
