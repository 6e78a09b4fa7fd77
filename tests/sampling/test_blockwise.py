"""Block by block: with and without caches, for networks that look ahead and for those that do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import tiny_models
import unmask
from unmask import MDLM, BlockDiffusion, SamplingParams
from unmask.context import AttentionStages, Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.diffusion.noise import derive_seed
from unmask.diffusion.process import Masking
from unmask.sampling import Ancestral, Blockwise, Confidence, FirstHitting, RandomOrder, Threshold
from unmask.sampling.blockwise import DualCache, NoCache, PrefixCache, _CachePolicy
from unmask.sampling.canvas import Canvas
from unmask.sampling.denoisers import CountingDenoiser
from unmask.types import Positions, RowFn, Times, Tokens

MASK = 4
GREEDY = SamplingParams(temperature=0)
CACHES = pytest.mark.parametrize("cache", [NoCache(), PrefixCache(), DualCache()], ids=["none", "prefix", "dual"])
TIMED = pytest.mark.parametrize("timed", [False, True], ids=["timeless", "timed"])


def last(sampler: Any, denoiser: DenoiserLike, canvas: Canvas) -> Tokens:
    *_, z = sampler.run(denoiser, canvas)
    return z


def blank(rows: int, length: int = tiny_models.LENGTH, given: int = 0) -> Canvas:
    z = torch.full((rows, length), MASK)
    z[:, :given] = torch.tensor([0, 1, 2, 3, 5, 6])[torch.arange(given) % 6]
    return Canvas(z, tuple(range(rows)))


class FromScratch(DenoiserWrapper):
    """A block diffusion model asked about one block, everything before it being read again every time."""

    def __init__(self, denoiser: DenoiserLike, text: Tokens, block: int) -> None:
        super().__init__(denoiser)
        self.text, self.block = text, block

    @property
    def process(self) -> Masking:
        return Masking()

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        assert sequence_ids is not None
        assert isinstance(positions, tuple)
        first = self.text.shape[1]
        before = self.text[sequence_ids]
        order = AttentionStages.block_causal(0, first + z.shape[1], self.block, first, z.device)
        times = torch.cat([torch.zeros_like(before).to(t), t.expand(-1, z.shape[1])], 1)
        return self.denoiser(
            torch.cat([before, z], 1),
            times,
            (positions[0], positions[1] + first),
            Context(stages=order),
            row_fn=row_fn,
        )


@TIMED
@pytest.mark.parametrize("block", [1, 3, 5, 12])
@pytest.mark.parametrize("given", [0, 4])
def test_the_exact_cache_changes_nothing(block: int, given: int, timed: bool) -> None:
    denoise = tiny_models.tiny_denoiser(BlockDiffusion(block_size=block), time_conditioned=timed)
    canvas, inner = blank(3, given=given), Ancestral(steps=4)
    z = canvas.tokens.clone()
    for number, first in enumerate(range(given // block * block, tiny_models.LENGTH, block)):
        window = slice(first, first + block)
        if not bool((z[:, window] == MASK).any()):
            continue
        seeds = tuple(derive_seed(seed, number) for seed in canvas.seeds)
        z[:, window] = last(inner, FromScratch(denoise, z[:, :first], block), Canvas(z[:, window], seeds))
    assert torch.equal(last(Blockwise(sampler=inner), denoise, canvas), z)


@settings(max_examples=20)
@given(holes=st.lists(st.booleans(), min_size=12, max_size=12), seed=st.integers(0, 99))
def test_a_row_is_written_alike_in_any_company(holes: list[bool], seed: int) -> None:
    """Whatever is given to its neighbours, and wherever their first holes are."""
    canvas = blank(4)
    canvas.tokens[1] = torch.where(torch.tensor(holes), MASK, 1)
    canvas.tokens[2, :7] = 2
    canvas.tokens[3] = 3
    canvas = replace(canvas, seeds=(seed, seed, seed + 1, seed + 2))
    for denoise, sampler in (
        (tiny_models.tiny_denoiser(BlockDiffusion(block_size=5)), Blockwise(sampler=Ancestral(steps=3))),
        (tiny_models.tiny_denoiser(MDLM()), Blockwise(5, Confidence(steps=2), PrefixCache())),
        (tiny_models.tiny_denoiser(MDLM()), Blockwise(5, RandomOrder(steps=2), DualCache())),
    ):
        together = last(sampler, denoise, canvas)
        for row in range(3):
            alone = Canvas(canvas.tokens[row : row + 1], canvas.seeds[row : row + 1])
            if bool((alone.tokens == MASK).any()):
                assert torch.equal(last(sampler, denoise, alone)[0], together[row])
        assert torch.equal(together[3], canvas.tokens[3])


@TIMED
@CACHES
def test_one_block_is_the_sampler_itself(cache: _CachePolicy, timed: bool) -> None:
    """There is nothing to keep: the first pass of a block reads all of it."""
    denoise, inner = tiny_models.tiny_denoiser(MDLM(), time_conditioned=timed), Confidence(steps=1)
    assert torch.equal(last(Blockwise(50, inner, cache), denoise, blank(2)), last(inner, denoise, blank(2)))


@CACHES
def test_blocks_are_written_one_after_the_other(cache: _CachePolicy) -> None:
    denoise = CountingDenoiser(tiny_models.tiny_denoiser(MDLM()))
    frames = list(Blockwise(4, FirstHitting(), cache).run(denoise, blank(2, given=3)))
    for z in frames:
        open_ = (z == MASK).int()
        for block in (3, 7):  # a later block is untouched until this one is done
            if bool(open_[:, block : block + 4].any()):
                assert bool(open_[:, block + 4 :].all())
    assert not bool((frames[-1] == MASK).any())
    assert denoise.nfe == 4 + 4 + 1


def test_a_network_reads_only_what_a_cache_leaves_to_read() -> None:
    class Watched(DenoiserWrapper):
        def __call__(self, z: Tokens, t: Times, positions: Positions, *rest: Any, **options: Any) -> Tensor:
            widths.append(z.shape[1])
            return self.denoiser(z, t, positions, *rest, **options)

    for cache, expected in (
        (NoCache(), [12] * 8),
        (PrefixCache(), [12, 8, 8, 8, 12, 4, 4, 4]),
        (DualCache(), [12, 4, 4, 4, 12, 4, 4, 4]),
    ):
        widths: list[int] = []
        last(Blockwise(4, FirstHitting(), cache), Watched(tiny_models.tiny_denoiser(MDLM())), blank(1, given=4))
        assert widths == expected
    widths = []
    last(
        Blockwise(sampler=FirstHitting()),
        Watched(tiny_models.tiny_denoiser(BlockDiffusion(block_size=4))),
        blank(1, given=5),
    )
    assert widths == [8, 4, 4, 8, 4, 4, 4]  # a finished block is read with the next one's first step


def test_a_network_that_looks_ahead_is_told_the_time_of_the_whole_text() -> None:
    told: list[float] = []

    class Watched(DenoiserWrapper):
        def __call__(self, z: Tokens, t: Times, positions: Positions, *rest: Any, **options: Any) -> Tensor:
            told.append(float(t[positions].unique()))
            return self.denoiser(z, t, positions, *rest, **options)

    last(
        Blockwise(4, FirstHitting()),
        Watched(tiny_models.tiny_denoiser(MDLM(), time_conditioned=True)),
        blank(1, given=4),
    )
    open_ = torch.arange(8, 0, -1).double() / 8
    torch.testing.assert_close(torch.tensor(told).double(), MDLM().schedule.inverse(1 - open_).double())


def test_text_of_any_length_through_a_window_that_forgets() -> None:
    """A block diffusion model goes on beyond its length, and then sees its last `length` tokens."""
    denoise = tiny_models.tiny_denoiser(BlockDiffusion(block_size=4), length=12)
    lengths: list[int] = []

    class Watched(DenoiserWrapper):
        def __call__(self, z: Tokens, t: Times, positions: Positions, context: Context, **options: Any) -> Tensor:
            said = self.denoiser(z, t, positions, context, **options)
            lengths.append(context.cache.cached_length + 4)  # type: ignore[union-attr]
            return said

    z = last(Blockwise(sampler=Ancestral(steps=2)), Watched(denoise), blank(2, length=40))
    assert not bool((z == MASK).any())
    assert max(lengths) == 12
    long = blank(1, length=41, given=37)  # a prompt that is longer than the model
    assert not bool((last(Blockwise(sampler=Ancestral(steps=2)), denoise, long) == MASK).any())


def test_rows_end_with_the_block_that_stops_them() -> None:
    denoise = tiny_models.tiny_denoiser(BlockDiffusion(block_size=3))
    canvas = blank(12, length=12, given=2)
    canvas.tokens[:, 1] = 5  # a stop that was given is none
    free = last(Blockwise(sampler=Ancestral(steps=3)), denoise, canvas)
    counted = CountingDenoiser(denoise)
    stopped = last(Blockwise(sampler=Ancestral(steps=3), end_ids=(5,)), counted, canvas)
    ended = 0
    for row in range(len(free)):
        stops = (free[row, 2:] == 5).nonzero()[:, 0] + 2
        first = int(stops[0]) if len(stops) else 12
        assert torch.equal(stopped[row, :first], free[row, :first])
        assert bool((stopped[row, first:] == 5).all())
        ended += first < 9
    assert 0 < ended < 12
    fewer = CountingDenoiser(denoise)
    last(Blockwise(sampler=Ancestral(steps=3)), fewer, canvas)
    assert counted.num_sequences < fewer.num_sequences


def test_a_size_that_the_model_does_not_have_is_refused() -> None:
    denoise = tiny_models.tiny_denoiser(BlockDiffusion(block_size=4))
    with pytest.raises(ValueError, match="the model writes blocks of 4 tokens; got a size of 5"):
        last(Blockwise(5), denoise, blank(1))
    with pytest.raises(ValueError, match="was trained for block diffusion: use the default sampler"):
        last(Ancestral(), denoise, blank(1))
    with pytest.raises(ValueError, match="a block must have at least 1 token; got 0"):
        Blockwise(0)


@pytest.fixture(scope="module")
def llada(golden: Path) -> tuple[unmask.LanguageModel, dict[str, Tensor]]:
    folder = golden / "llada_tiny"
    return unmask.load(folder), load_file(folder / "expected.safetensors")


def written(lm: unmask.LanguageModel, prompt: Tensor, sampler: Blockwise) -> unmask.Samples:
    return lm.generate(torch.cat([prompt, torch.full((1, 32), lm.vocab.mask_id)], 1), sampler)


@pytest.mark.parametrize(("steps", "block"), [(16, 32), (16, 8), (32, 16), (32, 32)])
def test_the_published_texts_of_llada(
    llada: tuple[unmask.LanguageModel, dict[str, Tensor]], steps: int, block: int
) -> None:
    lm, expected = llada
    sampler = Blockwise(block, Confidence(steps=steps * block // 32, params=GREEDY))
    samples = written(lm, expected["prompt"], sampler)
    assert torch.equal(samples.tokens, expected[f"low_confidence.steps{steps}.block{block}"])
    assert samples.nfe == steps


@CACHES
@pytest.mark.parametrize("threshold", [None, 0.3, 0.6])
def test_the_published_texts_of_fast_dllm(
    llada: tuple[unmask.LanguageModel, dict[str, Tensor]], cache: _CachePolicy, threshold: float | None
) -> None:
    """The same texts. With a cache the published code also calls the network for a block that its first pass
    has already finished, which is left out here."""
    lm, expected = llada
    inner = Confidence(steps=8, params=GREEDY) if threshold is None else Threshold(threshold, params=GREEDY)
    sampler = Blockwise(8, inner, cache)
    samples = written(lm, expected["prompt"], sampler)
    name = f"fast.{type(cache).__name__.removesuffix('Cache').lower().replace('no', 'none')}"
    key = f"{name}.threshold{threshold}.block8"
    assert torch.equal(samples.tokens, expected[key])
    z = torch.cat([expected["prompt"], torch.full((1, 32), lm.vocab.mask_id)], 1)
    holes = [int((frame.tokens == lm.vocab.mask_id).sum()) for frame in lm.generate_steps(z, sampler)]
    at_once = sum(before - after == 8 for before, after in pairwise(holes))
    spared = 0 if isinstance(cache, NoCache) else at_once
    assert samples.nfe == int(expected[f"{key}.calls"]) - spared
