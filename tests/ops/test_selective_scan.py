"""The selective scan: the published numbers, the sequential reference, and strong decays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from unmask.ops import fast_paths
from unmask.ops import selective_scan as scan


@pytest.fixture(scope="module")
def published(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "mamba_tiny" / "expected.safetensors")


def run_published(case: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """y with skip and gate, [b, d, L] as published, and the last state."""
    dt = F.softplus(case["delta"] + case["delta_bias"][:, None])
    u, dt_last, b, c = (case["u"].mT, dt.mT, case["B"].mT, case["C"].mT)
    y, last = scan.selective_scan(u, dt_last, case["A"], b, c)
    return (y.mT + case["D"][:, None] * case["u"]) * F.silu(case["z"]), last


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("case", ["scan.", "long."])
def test_values_are_the_published_ones(published: dict[str, Tensor], case: str, fast: bool) -> None:
    """`long` has dt A down to -250: quotients of products and sums of logarithms fail there."""
    given_tensors = part(published, case)
    with fast_paths(fast):
        y, last = run_published(given_tensors)
    torch.testing.assert_close(y, given_tensors["y"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, given_tensors["last_state"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fast", [True, False])
def test_gradients_are_the_published_ones(published: dict[str, Tensor], fast: bool) -> None:
    case = part(published, "scan.")
    expected = part(case, "grad.")
    leaves = {name: case[name].clone().requires_grad_() for name in expected}
    with fast_paths(fast):
        y, _ = run_published(case | leaves)
        (y * case["w"]).sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, expected[name], rtol=1e-4, atol=1e-4)


def drawn(
    batch: int, length: int, width: int, states: int, seed: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """u, dt, a, b, c, the first state, and where rows restart."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=dtype)

    dt = F.softplus(3 * normal(batch, length, width))
    sizes = (batch, length, states)
    inputs = [normal(batch, length, width), dt, -normal(width, states).exp(), normal(*sizes), normal(*sizes)]
    restart = torch.rand(batch, length, generator=random) < 0.1
    return [*inputs, normal(batch, width, states), restart]


@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 99)
)
def test_any_chunks_and_blocks_give_what_the_reference_gives(
    batch: int, length: int, width: int, states: int, chunk: int, seed: int
) -> None:
    """Values and gradients in float64, with a first state, restarts, and the last state's own gradient."""
    *tensors, state, restart = drawn(batch, length, width, states, seed)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "_CHUNK_STEPS", chunk)
        patch.setattr(scan, "_CHUNK_STATES", 2 * chunk * width * states)
        for function in (scan.selective_scan, scan.selective_scan_reference):
            leaves = [tensor.clone().requires_grad_() for tensor in (*tensors, state)]
            y, last = function(*leaves[:5], state=leaves[5], restart=restart)
            (y.sin().sum() + last.cos().sum()).backward()
            results.append([y, last, *(leaf.grad for leaf in leaves)])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_a_text_in_pieces_gives_what_it_gives_whole() -> None:
    u, dt, a, b, c, state, _ = drawn(2, 70, 3, 2, 0)
    whole, last = scan.selective_scan(u, dt, a, b, c, state=state)
    outputs = []
    for piece in (slice(0, 1), slice(1, 34), slice(34, 34), slice(34, 70)):
        y, state = scan.selective_scan(u[:, piece], dt[:, piece], a, b[:, piece], c[:, piece], state=state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


def test_a_step_without_time_leaves_the_state_alone() -> None:
    u, dt, a, b, c, state, _ = drawn(2, 40, 3, 2, 1)
    _, last = scan.selective_scan(u, torch.zeros_like(dt), a, b, c, state=state)
    assert torch.equal(last, state)


def test_it_computes_in_float32_whatever_the_inputs_are() -> None:
    *tensors, state, restart = drawn(2, 40, 5, 4, 2, torch.float32)
    u, dt, a, b, c = tensors
    short = [u.bfloat16(), dt, a, b.bfloat16(), c.bfloat16()]
    leaves = [tensor.clone().requires_grad_() for tensor in short]
    with torch.autocast("cpu", torch.bfloat16):
        y, last = scan.selective_scan(*leaves, state=state, restart=restart)
        expected, _ = scan.selective_scan(*(tensor.float() for tensor in short), state=state, restart=restart)
    assert y.dtype == last.dtype == torch.float32
    assert torch.equal(y, expected)
    y.sum().backward()
    assert [leaf.grad.dtype for leaf in leaves if leaf.grad is not None] == [leaf.dtype for leaf in leaves]


def test_only_the_states_between_chunks_are_kept() -> None:
    *tensors, _, _ = drawn(2, 1024, 8, 16, 0, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    kept = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        scan.selective_scan(*leaves)
    addresses = {tensor.data_ptr() for tensor in tensors}
    added = sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in addresses)
    assert 0 < added <= 2 * 1024 * 8 * 16 / 32


def test_second_derivatives_are_refused() -> None:
    *tensors, _, _ = drawn(1, 3, 2, 2, 0)
    leaf = tensors[0].requires_grad_()
    y, _ = scan.selective_scan(leaf, *tensors[1:])
    (slope,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        slope.sum().backward()


def test_the_compiler_takes_it_as_one_operator() -> None:
    *tensors, state, restart = drawn(2, 40, 3, 2, 0)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = [tensor.requires_grad_() for tensor in (*tensors[:2], tensors[2].mT.contiguous(), *tensors[3:])]
    inputs = (*arguments, state.mT.contiguous(), restart)
    torch.library.opcheck(torch.ops.unmask.selective_scan.default, inputs, test_utils=checks)
