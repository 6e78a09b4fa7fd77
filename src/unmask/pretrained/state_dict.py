"""The tensors of a model folder, in one file or several. Nothing that is read is executed.

Only headers are read at first. A tensor's numbers are mapped into memory when it is asked for, and let go of as soon
as they are copied: a network is filled tensor by tensor, and never exists twice.
"""

from __future__ import annotations

import json
import mmap
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unmask.io.errors import first_line
from unmask.io.untrusted import MAX_JSON_BYTES, read_json_object, require_regular_file

_SAFETENSORS_FILE, _PICKLE_FILE = "model.safetensors", "pytorch_model.bin"
_INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose shape and type are known, and whose numbers are read when they are asked for."""

    shape: torch.Size
    dtype: torch.dtype
    view: Callable[[], Tensor]
    """The tensor, perhaps in the memory of a file that is mapped."""
    is_mapped: bool = False
    """Whether `view` is memory of a file, and not a copy."""

    @classmethod
    def computed(
        cls, compute: Callable[..., Tensor], *parts: LazyTensor, shape: torch.Size | None = None
    ) -> LazyTensor:
        """compute(*parts), of this shape, or of that of the first part."""
        first = parts[0]
        return cls(shape or first.shape, first.dtype, lambda: compute(*(part.view() for part in parts)))

    @classmethod
    def concatenated(cls, parts: list[LazyTensor]) -> LazyTensor:
        """The parts one after another, along the first dimension."""
        shape = torch.Size([sum(len(part) for part in parts), *parts[0].shape[1:]])
        return cls.computed(lambda *tensors: torch.cat(tensors), *parts, shape=shape)

    def read(self) -> Tensor:
        """The tensor, in memory of its own: files may change while a model is used."""
        tensor = self.view()
        return tensor.clone() if self.is_mapped else tensor

    def numel(self) -> int:
        """How many numbers it has."""
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]


_FileReader = Callable[[Path], dict[str, LazyTensor]]

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


def read_state_dict(folder: Path) -> dict[str, LazyTensor]:
    """All tensors, from safetensors or else from a pickle that holds nothing but tensors.

    Those with infinite or NaN values are refused when they are read.
    """
    tensors = _read_files(folder, {_SAFETENSORS_FILE: _read_safetensors, _PICKLE_FILE: _read_pickle})
    return {name: _finite(tensor, name, folder) for name, tensor in tensors.items()}


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


def _read_files(folder: Path, readers: dict[str, _FileReader]) -> dict[str, LazyTensor]:
    for name, reader in readers.items():
        if (folder / name).exists():
            require_regular_file(folder / name)
            return reader(folder / name)
        if (folder / (name + _INDEX_SUFFIX)).exists():
            return _read_sharded(folder / (name + _INDEX_SUFFIX), reader)
    raise ValueError(f"{folder} is incomplete: {_SAFETENSORS_FILE} is missing")


def _read_sharded(index: Path, reader: _FileReader) -> dict[str, LazyTensor]:
    """The tensors of the files in an index; each file must hold the tensors that the index assigns to it."""
    file_of = _read_weight_map(index)
    tensors: dict[str, LazyTensor] = {}
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


def _finite(tensor: LazyTensor, name: str, folder: Path) -> LazyTensor:
    """The same; its numbers are checked whenever they are read."""

    def view() -> Tensor:
        values = tensor.view()
        if values.is_floating_point() and values.numel() and not _is_finite(values):
            raise ValueError(f"the weights in {folder} are damaged: {name} has infinite or NaN values")
        return values

    return LazyTensor(tensor.shape, tensor.dtype, view, tensor.is_mapped)


def _is_finite(tensor: Tensor) -> bool:
    """In one pass and without memory: the minimum or maximum of non-finite values is not finite."""
    return all(bool(extreme.isfinite()) for extreme in tensor.aminmax())


def _read_safetensors(file: Path) -> dict[str, LazyTensor]:
    """The tensors of the header, which is checked by the safetensors library."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > MAX_JSON_BYTES:
            raise ValueError(
                f"{file} is damaged or not a safetensors file: its header has {length:,} bytes,"
                f" more than {MAX_JSON_BYTES:,}"
            )
        try:
            with safe_open(file, "pt") as opened:
                names = list(opened.keys())
            header = json.loads(handle.read(length))
        except (SafetensorError, OSError, MemoryError, ValueError) as error:
            raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from None
    for name in names:
        kind = header[name]["dtype"]
        if kind not in _SAFETENSORS_DTYPES:
            raise ValueError(f"{file}: {name} has the dtype {kind}; supported are {', '.join(_SAFETENSORS_DTYPES)}")
    return {name: _mapped_tensor(file, 8 + length, header[name]) for name in names}


def _mapped_tensor(file: Path, data_start: int, entry: dict[str, Any]) -> LazyTensor:
    """The tensor of an entry of a safetensors header."""
    shape, dtype = torch.Size(entry["shape"]), _SAFETENSORS_DTYPES[entry["dtype"]]
    first, last = (data_start + offset for offset in entry["data_offsets"])
    return LazyTensor(shape, dtype, partial(_map_file, file, first, last, shape, dtype), is_mapped=True)


def _map_file(file: Path, first: int, last: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Bytes `first` to `last` of a file as a tensor; the mapping lives as long as the tensor."""
    if first == last:
        return torch.empty(shape, dtype=dtype)
    start = first - first % mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as handle:
        if handle.seek(0, 2) < last:
            raise ValueError(f"{file} is damaged: it has become shorter since its header was read")
        mapping = mmap.mmap(handle.fileno(), last - start, access=mmap.ACCESS_COPY, offset=start)
    return torch.frombuffer(mapping, dtype=dtype, offset=first - start).view(shape)


def _read_pickle(file: Path) -> dict[str, LazyTensor]:
    """The tensors of a pickle; only its headers are read before the first of them is asked for."""
    loaded = cache(partial(_load_pickle, file, "cpu"))

    def lazy(name: str, header: Tensor) -> LazyTensor:
        return LazyTensor(header.shape, header.dtype, lambda: loaded()[name], is_mapped=True)

    return {name: lazy(name, header) for name, header in _load_pickle(file, "meta").items()}


def _load_pickle(file: Path, device: str) -> dict[str, Tensor]:
    is_zip = zipfile.is_zipfile(file)  # only very old files are not
    if is_zip:
        _check_unpacked_size(file)
    try:
        state: Any = torch.load(file, map_location=device, weights_only=True, mmap=is_zip)
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
