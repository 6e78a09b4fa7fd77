"""A trace says when each position got its final token, whatever the sampler did on the way."""

from __future__ import annotations

import pytest
import torch

import tiny
from unmask.objectives import MDLM
from unmask.sampling import AnySampler, Remask
from unmask.sampling.canvas import Canvas
from unmask.sampling.remask import Cap
from unmask.sampling.trace import HIDDEN, traced, watched

M = 9


def rows(*lines: list[int]) -> list[torch.Tensor]:
    return [torch.tensor([line]) for line in lines]


def test_the_last_write_counts() -> None:
    start, *frames = rows([7, M, M, M], [7, 1, M, M], [7, 1, 2, M], [7, M, 2, M], [7, 1, 3, M])
    trace = traced(iter(frames), start, M)
    assert trace.step.tolist() == [[0, 4, 4, HIDDEN]]  # given; hidden and written again; changed; still open
    assert trace.tokens.tolist() == [[7, 1, 3, M]]
    assert trace.writes(0, 1) == [(0, M), (1, 1), (3, M), (4, 1)]
    assert trace.writes(0, 0) == [(0, 7)]
    assert trace.steps.tolist() == [4]


def test_watching_tells_the_steps_of_what_is_shown_now() -> None:
    start, *frames = rows([M, M], [1, M], [M, 2])
    assert [step.tolist() for _, step in watched(iter(frames), start, M)] == [[[1, HIDDEN]], [[HIDDEN, 2]]]


def test_nothing_to_write_is_a_trace_of_the_start() -> None:
    trace = traced(iter(()), torch.tensor([[3, M]]), M)
    assert trace.tokens.tolist() == [[3, M]]
    assert trace.step.tolist() == [[0, HIDDEN]]
    assert trace.steps.tolist() == [0]


def test_rows_end_at_their_own_steps() -> None:
    frames = [torch.tensor([[1, M], [1, M]]), torch.tensor([[1, 2], [1, M]]), torch.tensor([[1, 2], [1, 5]])]
    trace = traced(frames, torch.full((2, 2), M), M)
    assert trace.steps.tolist() == [2, 3]
    assert trace.step.tolist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize("sampler", [s for s in tiny.samplers() if tiny.fits(s, MDLM())], ids=repr)
def test_frames_up_to_its_step_rebuild_every_token(sampler: AnySampler) -> None:
    denoise = tiny.denoiser(MDLM())
    start = torch.full((2, tiny.LENGTH), denoise.vocab.mask)
    start[:, 3] = 1
    trace = traced(sampler.run(denoise, Canvas(start, (0, 1))), start, denoise.vocab.mask)
    assert (trace.step[:, 3] == 0).all()
    assert (trace.step.amax(1) == trace.steps).all()
    for row in range(2):
        for position in range(tiny.LENGTH):
            step = int(trace.step[row, position])
            final = int(trace.tokens[row, position])
            assert trace.writes(row, position)[-1] == (step, final)
            assert all(int(frame[row, position]) == final for frame in trace.frames[step:])
            if step:
                assert int(trace.frames[step - 1][row, position]) != final


def test_remasking_is_seen() -> None:
    denoise = tiny.denoiser(MDLM())
    start = torch.full((4, tiny.LENGTH), denoise.vocab.mask)
    canvas = Canvas(start, (0, 1, 2, 3))
    trace = traced(Remask(24, Cap(0.5)).run(denoise, canvas), start, denoise.vocab.mask)
    counts = [len(trace.writes(row, position)) for row in range(4) for position in range(tiny.LENGTH)]
    assert max(counts) > 2
