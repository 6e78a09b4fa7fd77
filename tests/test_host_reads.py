from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from host_reads import host_reads

X, FLAGS = torch.arange(6.0), torch.tensor([True, False, True, False, True, False])


def put(x: Tensor, value: Any) -> None:
    x[FLAGS] = value


def elsewhere(read: Callable[[], object]) -> None:
    thread = Thread(target=read)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "read",
    [
        lambda: X.sum().item(),
        lambda: int(X.sum()),
        lambda: bool(FLAGS.any()),
        lambda: float(X[0]),
        lambda: X.tolist(),
        lambda: X[1:2].tolist(),
        lambda: X.sum().tolist(),
        lambda: X.cpu(),
        lambda: X.cpu().numpy(),
        lambda: FLAGS.nonzero(),
        lambda: FLAGS.nonzero(as_tuple=True),
        lambda: X[FLAGS],
        lambda: put(X.clone(), torch.zeros(3)),
        lambda: torch.equal(X, X),
        lambda: X.unique(),
        lambda: X.masked_select(FLAGS),
        lambda: int(torch.rand(3, generator=torch.Generator()).argmax()),
    ],
)
def test_every_way_to_read_a_value_counts_once(read: Callable[[], object]) -> None:
    with host_reads() as reads:
        read()
    assert reads.total == 1, reads


@pytest.mark.parametrize(
    "compute",
    [
        lambda: X.sum() + X.max(),
        lambda: X[torch.tensor([1, 3])],
        lambda: torch.where(FLAGS, X, 0),
        lambda: X.masked_fill(FLAGS, 0),
        lambda: put(X.clone(), 0.0),
        lambda: X.topk(2).indices.clone(),
        lambda: len(X) + X.shape[0],
        lambda: torch.cat([X, X]).cumsum(0),
        lambda: X.numpy(),
        lambda: torch._assert_async(FLAGS.any()),
        lambda: elsewhere(X.tolist),
        lambda: elsewhere(X.sum().item),
        lambda: float(torch.rand((), generator=torch.Generator())),
        lambda: int(torch.randint(9, (), generator=torch.Generator())),
    ],
)
def test_what_stays_on_the_device_does_not_count(compute: Callable[[], object]) -> None:
    with host_reads() as reads:
        compute()
    assert reads.total == 0, reads


def test_afterwards_nothing_is_counted() -> None:
    with host_reads() as reads:
        pass
    X.sum().item(), X.tolist()
    assert reads.total == 0
