"""Folders that `save_to_disk` of the package `datasets` wrote: Arrow files, and JSON that names them.

Only their JSON is read here; the Arrow files are tables as any other. Nothing in the folder is executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unmask.data.formats import listed

STATE, SPLITS = "state.json", "dataset_dict.json"
TRAIN = "train"


def saved_files(folder: Path, split: str = TRAIN) -> list[Path] | None:
    """The Arrow files of a saved data set in their order; None if the folder is not one.

    Of one with splits, those of `split` are taken; the folder of a split is a data set by itself.
    """
    splits = _read(folder / SPLITS).get("splits")
    if isinstance(splits, list):
        if split not in splits:
            raise ValueError(
                f"{folder} has no split {split!r}; it has {listed(splits)}: name the folder of one of them"
            )
        found = saved_files(folder / split)
        if found is None:
            raise ValueError(
                f"{folder / split} is not a saved data set: it has no {STATE} that names its files"
            )
        return found
    files = _read(folder / STATE).get("_data_files")
    if not isinstance(files, list):
        return None
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    paths = [_inside(folder, name) for name in names]
    missing = next((path.name for path in paths if not path.is_file()), None)
    if missing is not None:
        raise ValueError(f"{folder} is incomplete: {missing} is missing")
    if not paths:
        raise ValueError(f"{folder} holds no rows")
    return paths


def _inside(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != ".arrow":
        raise ValueError(f"{folder / STATE} names {name!r}, which is not an Arrow file in its folder")
    return folder / name


def _read(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it is not there or something else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
