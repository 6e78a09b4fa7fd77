from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmask.backbones.layers import RotaryEmbedding, TimeEmbedding, _apply_rotary


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rotated_products_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(8, theta=100.0)
    q, k = vectors(1, 8, seed=1), vectors(1, 8, seed=2)

    def product(i: int, j: int) -> float:
        return float(
            (
                _apply_rotary(q, rotary.cos_sin(torch.tensor([i])))
                * _apply_rotary(k, rotary.cos_sin(torch.tensor([j])))
            ).sum()
        )

    for i, j in ((0, 3), (3, 0), (7, 7)):
        for shift in (1, 10, 100):
            assert product(i + shift, j + shift) == pytest.approx(product(i, j), abs=1e-4)
    assert product(0, 3) != pytest.approx(product(3, 0), abs=1e-2)  # direction counts
    assert product(0, 3) != pytest.approx(product(0, 4), abs=1e-2)  # and so does distance


def test_rotation_keeps_lengths_and_leaves_position_zero_alone() -> None:
    x = vectors(2, 5, 8)
    turned = _apply_rotary(x, RotaryEmbedding(8, theta=100.0).cos_sin(torch.arange(5)))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, 0], x[:, 0])
    assert not torch.allclose(turned[:, 1], x[:, 1], atol=1e-2)


def test_rotation_turns_pairs_by_position_times_frequency() -> None:
    # Dimensions i and i + d/2 are the plane; for d = 4 and base 100 the frequencies are 1 and 1/10.
    turned = _apply_rotary(
        torch.tensor([[1.0, 1.0, 0.0, 0.0]]), RotaryEmbedding(4, theta=100.0).cos_sin(torch.tensor([3]))
    )
    angle = torch.tensor([3.0, 0.3])
    torch.testing.assert_close(turned[0], torch.cat([angle.cos(), angle.sin()]))


def test_angles_may_start_anywhere() -> None:
    rotary = RotaryEmbedding(8, theta=10_000.0)
    for all_at_once, later in zip(rotary.cos_sin(torch.arange(9)), rotary.cos_sin(torch.arange(6, 9)), strict=True):
        assert torch.equal(all_at_once[6:], later)


def test_rotary_has_nothing_to_save() -> None:
    assert not RotaryEmbedding(8, theta=100.0).state_dict()


def test_angles_stay_exact_in_a_network_of_low_precision() -> None:
    # bfloat16 has 8 bits: position 1000 times a rounded frequency would be off by radians.
    far = torch.arange(1000, 1004)
    exact, low = RotaryEmbedding(32, theta=10_000.0), RotaryEmbedding(32, theta=10_000.0).to(torch.bfloat16)
    for expected, got in zip(exact.cos_sin(far), low.cos_sin(far), strict=True):
        torch.testing.assert_close(got.double(), expected.double(), atol=0.01, rtol=0)


@pytest.mark.parametrize("places", [1, 6])
def test_time_embedding_has_one_vector_for_each_time(places: int) -> None:
    t = torch.rand(3, places, generator=torch.Generator().manual_seed(0))
    embedded = TimeEmbedding(width=8, scale=1000.0)(t)
    assert embedded.shape == (3, places, 8)
    assert len(embedded.flatten(0, 1).unique(dim=0)) == t.numel()


def test_time_embedding_sees_the_scaled_time() -> None:
    torch.manual_seed(0)
    embedding, t = TimeEmbedding(width=8, scale=50.0), torch.tensor([[0.25], [0.26]])
    scaled = TimeEmbedding(width=8, scale=1.0)
    scaled.load_state_dict(embedding.state_dict())
    torch.testing.assert_close(embedding(t), scaled(50 * t))
    assert not torch.allclose(embedding(t), scaled(t), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_time_embedding_works_in_the_precision_of_its_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    embedding, t = TimeEmbedding(width=8, scale=1.0), torch.tensor([[0.25], [0.5]])
    expected = embedding(t)
    got = embedding.to(dtype)(t)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, atol=0.02, rtol=0)
