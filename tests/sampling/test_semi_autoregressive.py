"""Text longer than the model, window by window."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import tiny_models
from unmask import MDLM
from unmask.sampling import Ancestral, Confidence, SemiAutoregressive
from unmask.sampling.canvas import Canvas
from unmask.sampling.denoisers import CountingDenoiser

MASK = 4


@pytest.mark.parametrize("length", [5, 12, 13, 40])
@pytest.mark.parametrize(("stride", "window"), [(4, 12), (11, None), (1, 2)])
def test_any_length_is_written(length: int, stride: int, window: int | None) -> None:
    sampler = SemiAutoregressive(stride, window, Ancestral(steps=3))
    tokens = torch.full((3, length), MASK)
    tokens[:, length // 2] = 1
    *_, z = sampler.run(tiny_models.tiny_denoiser(MDLM()), Canvas(tokens, (0, 1, 2)))
    assert z.shape == (3, length)
    assert not (z == MASK).any()
    assert (z[:, length // 2] == 1).all()


def test_windows_keep_their_overlap_and_slide_by_the_stride() -> None:
    seen: list[Tensor] = []

    class Watched(CountingDenoiser):
        def __call__(self, z: Tensor, t: Tensor, positions: Tensor, *rest: object, **options: object) -> Tensor:  # type: ignore[override]
            seen.append(z[0])
            return super().__call__(z, t, positions, *rest, **options)

    sampler = SemiAutoregressive(stride=5, window=8, sampler=Ancestral(steps=1))
    *_, z = sampler.run(Watched(tiny_models.tiny_denoiser(MDLM())), Canvas(torch.full((1, 20), MASK), (0,)))
    text = z[0].tolist()
    starts, written = [0, 5, 10, 12], 0
    assert len(seen) == len(starts)
    for first, window in zip(starts, seen, strict=True):
        known = text[first:written] if written else []
        assert window.tolist() == known + [MASK] * (8 - len(known))
        written = first + 8


def test_windows_have_noise_of_their_own() -> None:
    """A stride as long as the fresh part must not repeat the first window's draws."""
    sampler = SemiAutoregressive(stride=8, window=9, sampler=Ancestral(steps=9))
    *_, z = sampler.run(tiny_models.tiny_denoiser(MDLM()), Canvas(torch.full((20, 33), MASK), tuple(range(20))))
    parts = [z[:, first : first + 8] for first in (1, 9, 17, 25)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(parts, 2))


def test_a_canvas_that_fits_is_sampled_as_without_windows() -> None:
    inner = Confidence(steps=4)
    canvas = Canvas(torch.full((2, 12), MASK), (5, 6))
    *_, plain = inner.run(tiny_models.tiny_denoiser(MDLM()), canvas)
    *_, slid = SemiAutoregressive(4, sampler=inner).run(tiny_models.tiny_denoiser(MDLM()), canvas)
    assert torch.equal(plain, slid)
