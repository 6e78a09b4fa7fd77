"""Block diffusion: its two ends are MDLM and autoregression, and between them it never looks ahead."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import tiny_models
import unmask
from objectives.test_contract import generator, tokens
from unmask import MDLM, Batch, BlockDiffusion
from unmask.context import AttentionStages, Context
from unmask.diffusion.denoiser import DenoiserWrapper
from unmask.diffusion.time_sampling import ClippedTimes, HistogramTimes, stratified_uniform
from unmask.model import Denoiser
from unmask.objectives.base import Objective
from unmask.objectives.mdlm import subs
from unmask.types import Positions

MASK = 4


def mean(objective: Objective, model: Denoiser, x: torch.Tensor, draws: int, offset: int = 0) -> torch.Tensor:
    """Nats [L] of one text, from so many draws, and their standard error."""
    nats = objective.token_nll(model, Batch(x.expand(draws, -1)), generator(offset))
    return torch.stack([nats.mean(0), nats.std(0) / draws**0.5])


@pytest.mark.parametrize("exact", [False, True], ids=["by coin", "exact counts"])
@pytest.mark.parametrize("timed", [False, True])
def test_one_block_is_mdlm_to_the_last_bit(exact: bool, timed: bool) -> None:
    if exact and timed:
        pytest.skip("exact counts are for networks that are not told the time")
    x = tokens(5)
    for block in (tiny_models.LENGTH, tiny_models.LENGTH + 3):
        blocks, whole = (
            BlockDiffusion(block_size=block, exact_mask_counts=exact),
            MDLM(exact_mask_counts=exact),
        )
        one = blocks.token_nll(tiny_models.tiny_denoiser(blocks, time_conditioned=timed), Batch(x), generator())
        other = whole.token_nll(tiny_models.tiny_denoiser(whole, time_conditioned=timed), Batch(x), generator())
        assert (one > 0).any()
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def autoregressive_nats(model: Denoiser, x: torch.Tensor) -> torch.Tensor:
    """-log p(x_l | x_<l) [L], each token hidden behind the clean ones before it: what one block of one
    asks."""
    nats = []
    for place in range(x.shape[1]):
        z = x[:, : place + 1].clone()
        z[:, place] = MASK
        order = AttentionStages.block_causal(0, place + 1, 1, place, x.device)
        rows = torch.zeros_like(z, dtype=torch.bool)
        rows[:, place] = True
        log_x = model(z, torch.zeros(len(z), 1), rows, Context(stages=order))
        nats.append(-log_x.gather(-1, x[:, place, None])[:, 0])
    return torch.stack(nats, 1)


def test_blocks_of_one_token_are_autoregression_exactly() -> None:
    objective = BlockDiffusion(block_size=1, exact_mask_counts=True)
    model, x = tiny_models.tiny_denoiser(objective), tokens(3)
    expected = autoregressive_nats(model, x)
    for seed in range(3):  # no draw can make a difference
        nats = objective.token_nll(model, Batch(x), generator(seed))
        torch.testing.assert_close(nats, expected, rtol=1e-9, atol=1e-12)
    by_coin = mean(replace(objective, exact_mask_counts=False), model, x[:1], 4000)
    assert ((by_coin[0] - expected[0]).abs() < 5 * by_coin[1] + 1e-9).all()


@given(block=st.integers(1, 5), seed=st.integers(0, 100))
def test_nats_of_a_block_do_not_depend_on_later_ones(block: int, seed: int) -> None:
    objective = BlockDiffusion(block_size=block)
    model, x = tiny_models.tiny_denoiser(objective), tokens(2, seed=seed)
    changed = x.clone()
    changed[:, -1] = (x[:, -1] + 1) % 4
    before, after = (objective.token_nll(model, Batch(text), generator(seed)) for text in (x, changed))
    border = (tiny_models.LENGTH - 1) // block * block
    assert torch.equal(before[:, :border], after[:, :border])


@pytest.mark.parametrize("block", [2, 3, 5])
def test_the_bound_of_a_block_is_that_of_mdlm_given_the_text_before(block: int) -> None:
    """The nats of a block are those of masked diffusion on the block alone, beside a frozen prefix."""
    objective = BlockDiffusion(block_size=block, exact_mask_counts=True)
    model, x = tiny_models.tiny_denoiser(objective), tokens(1)
    first = block
    measured = mean(objective, model, x, 3000)[:, first : first + block]
    expected = torch.zeros(block)
    patterns = torch.cartesian_prod(*[torch.tensor([False, True])] * block).view(-1, block)
    for hidden in patterns[1:]:
        z = x[:, : first + block].clone()
        z[0, first:][hidden] = MASK
        rows = z == MASK
        order = AttentionStages.block_causal(0, first + block, block, first, x.device)
        log_x = model(z, torch.zeros(1, 1), rows, Context(stages=order))
        k = int(hidden.sum())
        chance = 1 / math.comb(block, k)
        nats = -log_x.gather(-1, x[0, first : first + block][hidden][:, None])[:, 0]
        expected[hidden] += (chance / k * nats).float()
    assert ((measured[0] - expected).abs() < 5 * measured[1] + 1e-6).all()


def test_frozen_tokens_and_padding_are_neither_hidden_nor_counted() -> None:
    objective = BlockDiffusion(block_size=3)
    model, x = tiny_models.tiny_denoiser(objective), tokens(2)
    frozen, valid = torch.zeros_like(x, dtype=torch.bool), torch.ones_like(x, dtype=torch.bool)
    frozen[:, :4], valid[:, 10:] = True, False
    batch = Batch(x, valid=valid, prompt_mask=frozen)
    total = sum(objective.token_nll(model, batch, generator(seed)) for seed in range(20))
    assert isinstance(total, torch.Tensor)
    assert (total[:, :4] == 0).all()
    assert (total[:, 10:] == 0).all()
    assert (total[:, 4:10] > 0).all()
    other = x.clone()
    other[:, 10:] = MASK
    same = objective.token_nll(model, Batch(other, valid=valid, prompt_mask=frozen), generator())
    assert torch.equal(same, objective.token_nll(model, batch, generator()))


@given(rows=st.integers(1, 9), parts=st.integers(1, 9), offset=st.floats(0, 1, exclude_max=True))
def test_times_of_a_block_are_stratified_over_the_batch(rows: int, parts: int, offset: float) -> None:
    u = stratified_uniform(Batch(tokens(rows)), offset, parts)
    assert u.shape == (rows, parts)
    gaps = u.sort(0).values.diff(dim=0)
    torch.testing.assert_close(gaps, torch.full_like(gaps, 1 / rows), atol=1e-9, rtol=0)
    assert len({round(float(time), 6) for time in u[0]}) == parts


def test_clipped_times_stay_in_their_part() -> None:
    objective = BlockDiffusion(block_size=4, times=ClippedTimes(0.45, 0.55))
    model, x = tiny_models.tiny_denoiser(objective), tokens(64)
    hidden = objective.token_nll(model, Batch(x), generator()).ne(0).double().mean()
    assert abs(float(hidden) - 0.5) < 0.06


def test_clean_text_has_the_time_of_clean_text() -> None:
    objective, x = BlockDiffusion(block_size=3), tokens(4)

    class Spied(DenoiserWrapper):
        def __call__(self, z: Tensor, t: Tensor, positions: Positions, *rest: Any, **options: Any) -> Tensor:
            assert torch.equal(z[:, tiny_models.LENGTH :], x)
            assert bool((t[:, tiny_models.LENGTH :] == 0).all())
            noisy = t[:, : tiny_models.LENGTH].view(4, -1, 3)
            assert bool((noisy > 0).all())
            assert torch.equal(noisy, noisy[..., :1].expand_as(noisy))
            return self.denoiser(z, t, positions, *rest, **options)

    objective.token_nll(Spied(tiny_models.tiny_denoiser(objective, time_conditioned=True)), Batch(x), generator())


def test_times_that_are_drawn_more_often_weigh_less() -> None:
    plain = BlockDiffusion(block_size=3)
    warped = replace(plain, times=HistogramTimes((1.0, 5.0, 2.0)))
    model, x = tiny_models.tiny_denoiser(plain), tokens(1)
    one, other = mean(plain, model, x, 4000), mean(warped, model, x, 4000)
    assert ((one[0] - other[0]).abs() < 5 * (one[1] ** 2 + other[1] ** 2).sqrt()).all()


def test_the_published_losses(golden: Path) -> None:
    folder = golden / "bd3lm_tiny"
    lm, expected = unmask.load(folder), load_file(folder / "expected.safetensors")
    x, z, t = expected["x0"], expected["xt"], expected["t"]
    assert isinstance(lm.objective, BlockDiffusion)
    order = AttentionStages.two_stream(32, 8, x.device)
    tensors = torch.cat([z, x], 1), torch.cat([t, torch.zeros_like(t)], 1)
    with torch.no_grad():
        states = lm.denoiser.backbone.encode(
            lm.denoiser.backbone.embed(tensors[0]), tensors[1], context=Context(stages=order)
        )[:, :32]
        logits = lm.denoiser.backbone.compute_logits(states.flatten(0, 1)).view(expected["logits"].shape)
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0)
    log_x = subs(logits.flatten(0, 1), lm.vocab).view(*x.shape, -1)
    nats = -log_x.gather(-1, x[..., None])[..., 0] / t
    torch.testing.assert_close(nats.where(z == 40, 0), expected["nelbo"], atol=1e-4, rtol=1e-5)
