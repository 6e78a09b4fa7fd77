"""What autograd keeps for the backward pass, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from unmask.ops import recompute as again


class SavedTensors:
    """Storages that are held, each counted once."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def record(self, packed: Any) -> Any:
        """Count a tensor, or what one is computed again from."""
        for each in [packed] if isinstance(packed, Tensor) else packed.base.inputs:
            if isinstance(each, Tensor):
                self.sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return packed

    def activation_bytes(self, network: nn.Module) -> int:
        """Bytes of all but its weights."""
        weights = {each.untyped_storage().data_ptr() for each in network.parameters()}
        return sum(size for place, size in self.sizes.items() if place not in weights)


@contextmanager
def count_saved_tensors() -> Iterator[SavedTensors]:
    """All that is kept of what is computed here."""
    kept, pack = SavedTensors(), again._SavedTensorHooks.pack
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(again._SavedTensorHooks, "pack", lambda sparing, tensor: kept.record(pack(sparing, tensor)))
        with saved_tensors_hooks(kept.record, lambda tensor: tensor):
            yield kept
