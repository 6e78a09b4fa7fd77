"""The reference in plain torch computes what `unmask` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.baseline import semi_autoregressive_sample
from benchmarks.side_by_side import (
    RandomTokens,
    matched_pair,
)
from examples import mdlm_reference
from examples.mdlm_reference import (
    ModelSize,
    ReferenceMDLM,
    ReferenceTrainer,
    ancestral_sample,
    sample_categorical,
)
from unmask.objectives.base import corrupt_batch
from unmask.types import Batch

SIZE = ModelSize(vocab=13, depth=2, width=32, length=12, heads=2)


def text(rows: int) -> torch.Tensor:
    ids = RandomTokens.generate(rows * SIZE.length, SIZE.vocab).ids
    return torch.from_numpy(ids).view(rows, SIZE.length)


def test_log_x_is_the_same() -> None:
    reference, model = matched_pair(SIZE)
    z = text(3).masked_fill(torch.arange(SIZE.length) % 3 == 0, reference.mask_id)
    rows = z == reference.mask_id
    with torch.no_grad():
        torch.testing.assert_close(reference(z)[rows][:, :-1], model.denoiser(z, torch.full((3, 1), 0.5), rows)[:, :-1])


def test_losses_and_gradients_are_the_same() -> None:
    """For the same times and the same noise."""
    reference, model = matched_pair(SIZE)
    denoise, objective = model.denoiser.train(), model.objective
    x, t = text(4), torch.tensor([0.2, 0.4, 0.7, 0.95])
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = objective.noise_level(t[:, None].double())
    batch = Batch(x)
    z = corrupt_batch(objective.process, batch, moment.alpha, noise, denoise.vocab)
    ours = objective.weighted_nll(denoise, batch, z, moment).mean()
    theirs = reference.loss(x, t, noise)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours.backward()
    theirs.backward()
    head = denoise.backbone.lm_head.weight.grad
    assert head is not None
    published: Any = reference.output_layer.linear.weight.grad
    torch.testing.assert_close(head, published, rtol=1e-3, atol=1e-6)


def test_under_autocast_products_are_in_bfloat16_and_the_loss_is_about_the_same() -> None:
    """As the published code computes it."""
    plain, mixed = matched_pair(SIZE)[0], matched_pair(SIZE, bf16=True)[0]
    x, t = text(4), torch.tensor([0.2, 0.4, 0.7, 0.95])
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        assert plain(x).dtype == torch.float32
        assert mixed(x).dtype == torch.bfloat16
    loss = mixed.loss(x, t, noise)
    torch.testing.assert_close(loss, plain.loss(x, t, noise), rtol=2e-2, atol=0)
    loss.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in mixed.parameters())


def test_sampling_fills_every_hole_and_keeps_the_rest() -> None:
    reference, _ = matched_pair(SIZE)
    x = text(2)
    holes = torch.arange(SIZE.length) % 2 == 0
    filled = ancestral_sample(reference, x.masked_fill(holes, reference.mask_id), steps=5)
    assert bool((filled != reference.mask_id).all())
    assert torch.equal(filled[:, ~holes], x[:, ~holes])
    assert bool((semi_autoregressive_sample(reference, 1, 24, 6, steps=3) != reference.mask_id).all())


@pytest.mark.parametrize("bf16", [False, True])
def test_many_steps_reveal_at_the_right_rate_in_both_precisions(bf16: bool) -> None:
    """Numbers drawn in bfloat16 would reveal hardly anything, and calls be saved for it."""
    reference, _ = matched_pair(SIZE, bf16=bf16)
    begun = ancestral_sample(reference, torch.full((64, SIZE.length), reference.mask_id), steps=500, max_steps=50)
    assert abs(float((begun == reference.mask_id).double().mean()) - 0.9) < 0.04


def test_some_of_the_steps_are_the_first_of_all_and_end_there() -> None:
    reference, _ = matched_pair(SIZE)
    calls: list[int] = []
    reference.register_forward_hook(lambda *_: calls.append(1))
    blank = torch.full((64, SIZE.length), reference.mask_id)
    begun = ancestral_sample(reference, blank, steps=8, max_steps=2)
    assert len(calls) == 2
    assert abs(float((begun == reference.mask_id).double().mean()) - 6 / 8) < 0.07


def test_gumbel_choices_have_the_right_frequencies() -> None:
    torch.manual_seed(0)
    weights = torch.tensor([0.1, 0.2, 0.7]).expand(20_000, 3)
    counts = torch.bincount(sample_categorical(weights), minlength=3) / 20_000
    torch.testing.assert_close(counts, weights[0], atol=0.015, rtol=0)


def test_it_learns() -> None:
    torch.manual_seed(0)
    trainer = ReferenceTrainer(ReferenceMDLM(SIZE), lr=1e-2)
    losses = [trainer.step(torch.ones(8, SIZE.length, dtype=torch.int64)) for _ in range(30)]
    assert sum(losses[-5:]) < 0.2 * sum(losses[:5])


def test_the_program_trains_and_prints_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mdlm_reference, "STEPS", 2)
    mdlm_reference.main()
    loss, *samples = capsys.readouterr().out.splitlines()
    assert loss.startswith("step 2: ")
    assert [len(eval(sample)) for sample in samples] == [32, 32, 32]
