"""Attention of whole heads in bfloat16: what torch says in float64, gradients too, however it is divided."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.backbones.layers import Attention, RotaryEmbedding
from unmask.ops import cpu_attention as mixing

BF16 = torch.bfloat16
ROWS, HEADS, WIDTH = 3, 4, 16


def drawn(queries: int = 20, keys: int = 20) -> list[Tensor]:
    """q, k and v as they come out of a layer: heads are not one after another in memory."""
    random = torch.Generator().manual_seed(0)
    lengths = (queries, keys, keys)
    return [torch.randn(ROWS, n, HEADS, WIDTH, generator=random).to(BF16).transpose(1, 2) for n in lengths]


def with_gradients(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = attend(*leaves)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out))]


def assert_near(got: Tensor, exact: Tensor, share: float = 0.01) -> None:
    assert got.shape == exact.shape
    assert float((got.double() - exact).norm()) < share * float(exact.norm())


@pytest.mark.parametrize("short", [0, 4])
@pytest.mark.parametrize("at_once", [1, 1000, 1 << 20])
@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (7, 20), (1, 1)])
def test_values_and_gradients_are_those_of_exact_attention(
    monkeypatch: pytest.MonkeyPatch, short: int, at_once: int, queries: int, keys: int
) -> None:
    monkeypatch.setattr(mixing, "_CHUNK_SCORES", at_once)
    monkeypatch.setattr(mixing, "_KEEP_PROBS_RATIO", short)
    inputs = drawn(queries, keys)
    ours = with_gradients(mixing._attention_by_heads, inputs)
    exact = with_gradients(F.scaled_dot_product_attention, [each.double() for each in inputs])
    for got, expected in zip(ours, exact, strict=True):
        assert got.dtype == BF16
        if keys > 1:  # over one key the softmax is 1: queries and keys have no gradient
            assert_near(got, expected)
    assert_near(ours[0], exact[0])
    with torch.no_grad():
        assert torch.equal(mixing._attention_by_heads(*inputs), ours[0])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("how", ["all", "causal", "masked"])
def test_every_kind_of_attention_is_the_softmax_of_its_scores(dtype: torch.dtype, key_heads: int, how: str) -> None:
    """Written out in float64, whichever kernel is taken."""
    q, k, v = (tensor.to(dtype) for tensor in drawn())
    k, v = k[:, :key_heads], v[:, :key_heads]
    allowed = torch.ones(20, 20, dtype=torch.bool)
    allowed = allowed.tril() if how == "causal" else allowed
    allowed = (torch.arange(20) % 3 > 0)[None].expand(20, 20) if how == "masked" else allowed
    keys, values = (tensor.double().repeat_interleave(HEADS // key_heads, 1) for tensor in (k, v))
    scores = (q.double() @ keys.transpose(2, 3) / WIDTH**0.5).masked_fill(~allowed, -torch.inf)
    mask = allowed[None, None] if how == "masked" else None
    got = mixing.attention(q, k, v, mask, causal=how == "causal")
    assert_near(got, scores.softmax(-1) @ values)
    assert_near(mixing.attention_reference(q, k, v, mask, causal=how == "causal"), scores.softmax(-1) @ values)


@pytest.mark.parametrize("keys", [64, 65])
def test_probabilities_are_kept_for_short_rows_and_where_a_gradient_comes(keys: int) -> None:
    inputs = [each.requires_grad_() for each in drawn(keys, keys)]
    kept = list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()), lambda _: _):
        mixing._attention_by_heads(*inputs)
        with torch.no_grad():
            mixing._attention_by_heads(*inputs)
    *_, probabilities = kept
    assert len(kept) == 4
    assert probabilities == (ROWS * HEADS * keys * keys if keys <= 4 * WIDTH else 0)


def test_many_at_once_by_vmap() -> None:
    inputs = [torch.stack([each, each.flip(0)]) for each in drawn()]
    q, k, v = inputs
    expected = torch.stack([mixing._attention_by_heads(*each) for each in zip(q, k, v, strict=True)])
    assert torch.equal(torch.func.vmap(mixing._attention_by_heads)(q, k, v), expected)
    with_one_v = torch.func.vmap(mixing._attention_by_heads, in_dims=(0, 0, None))(q, k, v[0])
    assert torch.equal(with_one_v[0], expected[0])


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    leaves = [each.requires_grad_() for each in drawn()]
    (slope,) = torch.autograd.grad(mixing._attention_by_heads(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        torch.autograd.grad(slope.sum(), leaves[1])


def test_only_where_it_pays() -> None:
    q, k, _ = drawn()
    assert mixing._is_faster(q, k)
    assert not mixing._is_faster(q.float(), k.float())
    assert not mixing._is_faster(q, k[:, :2])  # keys that serve several heads
    assert not mixing._is_faster(q.to("meta"), k.to("meta"))
    long = torch.empty(1, 1, 4096, 16, dtype=BF16)
    assert not mixing._is_faster(long, long)


@pytest.mark.parametrize(("dtype", "masked", "asked"), [(BF16, False, 1), (BF16, True, 0), (torch.float32, False, 0)])
def test_layers_use_it_in_bfloat16_where_all_see_all(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, masked: bool, asked: int
) -> None:
    calls = []
    monkeypatch.setattr(mixing, "_attention_by_heads", lambda q, k, v: calls.append(q) or v)
    layer, rotary = Attention(32, 4).to(dtype), RotaryEmbedding(8, 100.0)
    seen = torch.ones(1, 1, 1, 12, dtype=torch.bool) if masked else None
    layer(torch.randn(2, 12, 32).to(dtype), rotary.cos_sin(torch.arange(12), dtype), seen)
    assert len(calls) == asked
