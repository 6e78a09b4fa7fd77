"""The kernels that `benchmarks.few_bits` compares multiply by the same matrix."""

from __future__ import annotations

import torch

from benchmarks.few_bits import errors, products


def test_every_kernel_multiplies_by_the_same_matrix() -> None:
    weight = (torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    found = errors(weight, products(weight))
    assert 0 < found["bfloat16"] < 0.003
    assert all(0.004 < error < 0.011 for name, error in found.items() if name.endswith("int8"))
    assert all(0.06 < error < 0.12 for name, error in found.items() if name.endswith("int4"))
    assert len(found) >= 5
