"""What autograd keeps for the backward pass, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from unmask.backbones import again


class Kept:
    """Storages that are held, each counted once."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def hold(self, packed: Any) -> Any:
        """Count a tensor, or what one is computed again from."""
        for each in [packed] if isinstance(packed, Tensor) else packed.of.inputs:
            if isinstance(each, Tensor):
                self.sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return packed

    def beside(self, network: nn.Module) -> int:
        """Bytes of all but its weights."""
        weights = {each.untyped_storage().data_ptr() for each in network.parameters()}
        return sum(size for place, size in self.sizes.items() if place not in weights)


@contextmanager
def counted() -> Iterator[Kept]:
    """All that is kept of what is computed here."""
    kept, pack = Kept(), again._Sparing.pack
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(again._Sparing, "pack", lambda sparing, tensor: kept.hold(pack(sparing, tensor)))
        with saved_tensors_hooks(kept.hold, lambda tensor: tensor):
            yield kept
