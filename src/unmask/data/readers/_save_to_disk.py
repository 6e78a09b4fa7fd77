"""Folders written by `save_to_disk` of the package `datasets`: Arrow files, and JSON that names them.

Only the JSON is read here; the Arrow files are read as tables. Nothing in the folder is executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unmask.data.readers._text import format_names

_STATE_FILE, DATASET_DICT_FILE = "state.json", "dataset_dict.json"
_DEFAULT_SPLIT = "train"


def saved_dataset_files(folder: Path, split: str = _DEFAULT_SPLIT) -> list[Path] | None:
    """The Arrow files of a saved dataset, in order; None if the folder is not a saved dataset.

    Of a dataset with splits, the files of `split`; the folder of a split is a dataset itself.
    """
    splits = _read_json_object(folder / DATASET_DICT_FILE).get("splits")
    if isinstance(splits, list):
        if split not in splits:
            raise ValueError(
                f"{folder} has no split {split!r}; it has {format_names(splits)}: name the folder of one of them"
            )
        split_files = saved_dataset_files(folder / split)
        if split_files is None:
            raise ValueError(f"{folder / split} is not a saved data set: it has no {_STATE_FILE} that names its files")
        return split_files
    files = _read_json_object(folder / _STATE_FILE).get("_data_files")
    if not isinstance(files, list):
        return None
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    paths = [_file_in_folder(folder, name) for name in names]
    missing = next((path.name for path in paths if not path.is_file()), None)
    if missing is not None:
        raise ValueError(f"{folder} is incomplete: {missing} is missing")
    if not paths:
        raise ValueError(f"{folder} holds no rows")
    return paths


def _file_in_folder(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != ".arrow":
        raise ValueError(f"{folder / _STATE_FILE} names {name!r}, which is not an Arrow file in its folder")
    return folder / name


def _read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or holds something else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
