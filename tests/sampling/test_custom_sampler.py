"""A sampler from outside the package works wherever a sampler is taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tiny_models
from unmask import MDLM, LanguageModel, NextToken
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.sampling import Autoregressive, Blockwise, Sampler, SemiAutoregressive
from unmask.sampling._row_fns import DrawTokens
from unmask.sampling.base import init_tokens
from unmask.sampling.canvas import Canvas
from unmask.types import Tokens

MASK = 4


class RightToLeft(Sampler):
    """Unmasks the last masked position of each sequence, one at a time."""

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        z, mask = init_tokens(denoiser, canvas), denoiser.vocab.mask_id
        uniform = seeded_uniform(canvas.seeds, z.shape[1])
        for position in reversed(range(z.shape[1])):
            rows = (z[:, position] == mask).nonzero()[:, 0]
            if len(rows):
                index = torch.full_like(rows, position)
                t = (z[rows] == mask).float().mean(1, keepdim=True)
                draw = DrawTokens(SamplingParams(), uniform[rows, position], mask)
                tokens = denoiser(z[rows], t, (torch.arange(len(rows)), index), row_fn=draw, sequence_ids=rows)
                z = z.index_put((rows, index), tokens)
                yield z


def test_it_works_in_every_call_of_a_language_model() -> None:
    lm, sampler = LanguageModel(tiny_models.tiny_denoiser(MDLM())), RightToLeft()
    sampled = lm.sample(3, 6, sampler=sampler, seed=2)
    assert sampled.nfe == 6
    assert not (sampled.tokens == MASK).any()
    assert lm.sample(1, 6, sampler=sampler, seed=4).ids == sampled.ids[2:]
    assert lm.infill([[1, MASK], [MASK, 2, MASK]], sampler=sampler).ids[1][1] == 2
    assert len(lm.complete([[1], [2, 3]], 4, sampler=sampler).ids[0]) == 4
    first, *_, last = lm.generate_steps(torch.full((1, 30), MASK), sampler)  # longer than the model reads
    assert (first.tokens == MASK).all()
    assert not (last.tokens == MASK).any()


def test_it_fills_blocks_and_windows() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    for sampler in (Blockwise(4, RightToLeft(), "dual"), SemiAutoregressive(3, 6, RightToLeft())):
        assert sampler.inner is not None
        assert sampler.steps is None
        assert not sampler.may_remask
        assert not (lm.sample(2, 12, sampler=sampler).tokens == MASK).any()


def test_what_is_no_sampler_or_does_not_fit_is_refused_in_one_sentence() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    with pytest.raises(ValueError, match="sampler must be a Sampler"):
        lm.sample(sampler=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fills a canvas as a whole"):
        Blockwise(4, Blockwise(2))
    with pytest.raises(TypeError, match="abstract"):
        Sampler()  # type: ignore[abstract]
    with pytest.raises(ValueError, match="this sampler is for autoregression"):
        lm.sample(length=4, sampler=Autoregressive())
    causal = LanguageModel(tiny_models.tiny_denoiser(NextToken()))
    with pytest.raises(ValueError, match="this sampler is for masked diffusion"):
        causal.sample(length=4, sampler="confidence")
