"""The tensors of a model folder, in one file or several. Nothing that is read is executed."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from unmask.io.errors import first_line
from unmask.io.untrusted import MAX_JSON_BYTES, read_json_object, require_regular_file

_SAFETENSORS_FILE, _PICKLE_FILE = "model.safetensors", "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"

_FileReader = Callable[[Path], dict[str, Tensor]]

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of published weights, by their names in safetensors."""


def read_state_dict(folder: Path) -> dict[str, Tensor]:
    """All tensors, from safetensors or else from a pickle that holds nothing but tensors."""
    tensors = _read_files(folder, {_SAFETENSORS_FILE: _read_safetensors, _PICKLE_FILE: _read_pickle})
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
            raise ValueError(f"the weights in {folder} are damaged: {name} has infinite or NaN values")
    return tensors


def read_meta_state_dict(folder: Path) -> dict[str, Tensor]:
    """The same tensors on the device `meta`: names, shapes and dtypes from the files' headers."""
    return _read_files(folder, {_SAFETENSORS_FILE: _read_safetensors_header, _PICKLE_FILE: _read_pickle_meta})


def list_weight_files(folder: Path) -> list[str]:
    """The names of the files that hold tensors."""
    for name in (_SAFETENSORS_FILE, _PICKLE_FILE):
        if (folder / (name + _INDEX_SUFFIX)).is_file() and not (folder / name).is_file():
            return [
                name + _INDEX_SUFFIX,
                *sorted(set(_read_weight_map(folder / (name + _INDEX_SUFFIX)).values())),
            ]
        if (folder / name).is_file():
            return [name]
    return []


def unique_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under its first name: a tied head is stored as the embedding."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        tensors.setdefault(id(tensor) if tensor.is_meta else tensor.data_ptr(), (name, tensor.contiguous()))
    return dict(tensors.values())


def _read_files(folder: Path, readers: dict[str, _FileReader]) -> dict[str, Tensor]:
    for name, reader in readers.items():
        if (folder / name).exists():
            require_regular_file(folder / name)
            return reader(folder / name)
        if (folder / (name + _INDEX_SUFFIX)).exists():
            return _read_sharded(folder / (name + _INDEX_SUFFIX), reader)
    raise ValueError(f"{folder} is incomplete: {_SAFETENSORS_FILE} is missing")


def _read_sharded(index: Path, reader: _FileReader) -> dict[str, Tensor]:
    """The tensors of the files in an index; each file must hold the tensors that the index assigns to it."""
    file_of = _read_weight_map(index)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(file_of.values())):
        file = index.parent / name
        if not file.exists():
            raise ValueError(f"{index.parent} is incomplete: {name} is missing, which {index.name} names")
        require_regular_file(file)
        shard = reader(file)
        missing = [tensor for tensor, shard_name in file_of.items() if shard_name == name and tensor not in shard]
        if missing:
            raise ValueError(f"{file} lacks the tensor {sorted(missing)[0]}, which {index.name} lists")
        tensors |= shard
    return tensors


def _read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor; only files in the index's own folder are allowed."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is not an index of weights: it needs 'weight_map', the file of each tensor")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is not a file of its folder")
    if not weight_map:
        raise ValueError(f"{index} names no tensors")
    return weight_map


def _is_finite(tensor: Tensor) -> bool:
    """In one pass and without memory: the minimum or maximum of non-finite values is not finite."""
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from None


def _read_safetensors_header(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
    if length > MAX_JSON_BYTES:
        raise ValueError(
            f"{file} is damaged or not a safetensors file: its header has {length:,} bytes,"
            f" more than {MAX_JSON_BYTES:,}"
        )
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
            header = {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError, MemoryError) as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from None
    for name, (_, kind) in header.items():
        if kind not in _SAFETENSORS_DTYPES:
            raise ValueError(f"{file}: {name} has the dtype {kind}; supported are {', '.join(_SAFETENSORS_DTYPES)}")
    return {
        name: torch.empty(shape, dtype=_SAFETENSORS_DTYPES[kind], device="meta")
        for name, (shape, kind) in header.items()
    }


def _read_pickle(file: Path) -> dict[str, Tensor]:
    return _load_pickle(file, "cpu")


def _read_pickle_meta(file: Path) -> dict[str, Tensor]:
    return _load_pickle(file, "meta")


def _load_pickle(file: Path, device: str) -> dict[str, Tensor]:
    is_zip = zipfile.is_zipfile(file)  # only very old files are not
    if is_zip:
        _check_unpacked_size(file)
    try:
        state: Any = torch.load(file, map_location=device, weights_only=True, mmap=is_zip and device == "meta")
    except Exception as error:  # damaged pickles raise errors of many types
        reason = first_line(error)
        raise ValueError(f"{file} is a pickle that holds more than tensors, or is damaged: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{file} must hold tensors by name, and nothing else")
    return dict(state)


def _check_unpacked_size(file: Path) -> None:
    """Torch does not compress: a file that unpacks to more than its size is a zip bomb."""
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise ValueError(f"{file} is a damaged archive: {error}") from None
    if size > file.stat().st_size:
        raise ValueError(f"{file} would unpack to {size:,} bytes, more than its size: it was not saved by torch")
