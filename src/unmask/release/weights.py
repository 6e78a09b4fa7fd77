"""The tensors of a model folder, in one file or in many. Nothing that is read is ever executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors, from safetensors or, if there are none, from a pickle that holds nothing but tensors."""
    for name, reader in ((SAFE, _safe), (PICKLED, _pickled)):
        if (folder / name).is_file():
            return reader(folder / name)
        if (folder / (name + INDEX)).is_file():
            return _sharded(folder / (name + INDEX), reader)
    raise ValueError(f"{folder} is incomplete: {SAFE} is missing")


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold tensors."""
    for name in (SAFE, PICKLED):
        if (folder / (name + INDEX)).is_file() and not (folder / name).is_file():
            return [name + INDEX, *sorted(set(_map(folder / (name + INDEX)).values()))]
        if (folder / name).is_file():
            return [name]
    return []


def _sharded(index: Path, reader: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of the files that an index names, each of which must hold what it is said to."""
    where = _map(index)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(where.values())):
        file = index.parent / name
        if not file.is_file():
            raise ValueError(f"{index.parent} is incomplete: {name} is missing, which {index.name} names")
        held = reader(file)
        absent = [tensor for tensor, place in where.items() if place == name and tensor not in held]
        if absent:
            raise ValueError(f"{file} lacks the tensor {sorted(absent)[0]}, which {index.name} says it holds")
        tensors |= held
    return tensors


def _map(index: Path) -> dict[str, str]:
    """Which file holds which tensor; files are in the folder itself, whatever a stranger's index says."""
    try:
        stated: Any = json.loads(index.read_text(encoding="utf-8"))
        where = dict(stated["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of weights: {type(error).__name__} {error}") from None
    for name in where.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is not a file of its folder")
    if not where:
        raise ValueError(f"{index} names no tensors")
    return where


def _safe(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from None


def _pickled(file: Path) -> dict[str, Tensor]:
    try:
        held: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind: the reader of pickles trips over damage in many ways
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise ValueError(
            f"{file} is a pickle that holds more than tensors, or is damaged: {reason}"
        ) from None
    if not isinstance(held, dict) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        raise ValueError(f"{file} must hold tensors by name, and nothing else")
    return dict(held)
