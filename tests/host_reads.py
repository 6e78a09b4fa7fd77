"""Count the values that a piece of code reads back from the device.

On an accelerator each of them waits for all work that was queued before it. They are counted as operators,
so the counts on a CPU are those on an accelerator. What does not count, because nothing is waited for:

* what a generator of the CPU has drawn, which is on the host already;
* `numpy()`: it exists for tensors of the host only, and others must be copied by `cpu()` first, which counts;
* `_assert_async`, by which `unmask.ops.checks.holds` asks a CPU, and no other device, whether a condition holds;
* work of other threads, such as the one that prepares batches on the host.

    with host_reads() as reads:
        step()
    assert reads.total <= 2, reads
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    torch.ops.aten._local_scalar_dense.default: "item",  # item(), int(), float(), bool()
    torch.ops.aten.is_nonzero.default: "bool",
    torch.ops.aten.equal.default: "equal",
    torch.ops.aten.nonzero.default: "nonzero",
    torch.ops.aten.masked_select.default: "masked_select",
    torch.ops.aten._unique2.default: "unique",
    torch.ops.aten.unique_consecutive.default: "unique",
    torch.ops.aten.repeat_interleave.Tensor: "repeat_interleave",
}
_INDEXING = {
    torch.ops.aten.index.Tensor: "index by booleans",
    torch.ops.aten.index_put.default: "index_put by booleans",
    torch.ops.aten.index_put_.default: "index_put by booleans",
    torch.ops.aten._index_put_impl_.default: "index_put by booleans",
}


class HostReads(TorchDispatchMode):
    """A count of host reads by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.kinds.total()

    def __repr__(self) -> str:
        return f"{self.total} host reads: {dict(self.kinds)}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS and not getattr(args[0], "drawn_on_host", False):
            self.kinds[_READS[func]] += 1
        elif func in _INDEXING and _has_boolean_index(func, args):
            self.kinds[_INDEXING[func]] += 1
        result = func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            result.drawn_on_host = True
        return result


def _has_boolean_index(func: Any, args: Any) -> bool:
    # A boolean index writes one value without a read: index_put becomes masked_fill.
    booleans = [index for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
    if func is torch.ops.aten.index.Tensor or not booleans:
        return bool(booleans)
    return not (len(booleans) == 1 and args[2].numel() == 1)


@contextmanager
def host_reads() -> Iterator[HostReads]:
    """Count the host reads of what runs inside, in this thread; `tolist` and `cpu` count as one each."""
    mode, thread = HostReads(), threading.get_ident()

    def counted(name: str) -> Any:
        original = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            mode.kinds[name] += threading.get_ident() == thread
            return original(tensor, *args, **kwargs)

        return original, call

    replaced = {name: counted(name) for name in ("tolist", "cpu")}
    try:
        for name, (_, call) in replaced.items():
            setattr(Tensor, name, call)
        with mode:
            yield mode
    finally:
        for name, (original, _) in replaced.items():
            setattr(Tensor, name, original)
