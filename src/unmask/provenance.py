"""Provenance of a result: what is recorded with it so that others can reproduce it."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_LIBRARIES = ("unmask", "torch", "numpy", "tokenizers", "transformers")


def collect_provenance(seed: int, data: Mapping[str, str], model: Mapping[str, str] | None = None) -> dict[str, object]:
    """The command, time, library versions, machine, seed, and the digests of data and model, for JSON."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": f"{platform.system()} {platform.machine()}",
        "seed": seed,
        "data": dict(data),
        **({} if model is None else {"model": dict(model)}),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
