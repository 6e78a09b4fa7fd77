"""One copy of a network's weights for several processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

_SMALLEST = 4096
"""Bytes of the smallest tensor that is shared: a page."""
_ALIGNMENT = 64
"""Where tensors begin: at multiples of what vector instructions read fastest."""


def share_weights(network: nn.Module, file: Path) -> int:
    """Put the weights into a file that all processes map into their memory; the first one writes it. Returns its bytes.

    What a process changes of them it changes for itself. ValueError if the weights are not those in the file.
    """
    tensors = _shareable(network)
    if not file.exists():
        _write(list(tensors.values()), file)
    with file.open("rb") as handle:
        mapping = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    offset = 0
    for name, tensor in tensors.items():
        offset = _aligned(offset)
        if offset + tensor.nbytes > len(mapping):
            raise _changed(name)
        shared = torch.frombuffer(mapping, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
        if not torch.equal(shared, tensor):
            raise _changed(name)
        tensor.data = shared
        offset += tensor.nbytes
    return offset


def _shareable(network: nn.Module) -> dict[str, Tensor]:
    """Tensors in the memory of the processor, in their usual layout; a tied one once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _tensors(network):
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.is_contiguous()
        if plain and tensor.nbytes >= _SMALLEST:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters()
    yield from network.named_buffers()


def _write(tensors: list[Tensor], file: Path) -> None:
    """Write the tensors one after another; the file appears when it is complete."""
    part = file.with_suffix(".part")
    with part.open("wb") as handle:
        for tensor in tensors:
            handle.write(b"\0" * (_aligned(handle.tell()) - handle.tell()))
            tensor.detach().view(-1).view(torch.uint8).numpy().tofile(handle)
    os.replace(part, file)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _changed(name: str) -> ValueError:
    return ValueError(f"the model's weights ({name}) have changed since the server was started: start the server again")
