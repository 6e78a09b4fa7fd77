"""A trace says when each position got its final token, whatever the sampler did on the way."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from unmask.objectives import MDLM
from unmask.sampling import ReMDM, Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.remdm import Cap
from unmask.sampling.trace import _MASKED, record_trace, track_steps

M = 9


def rows(*lines: list[int]) -> list[torch.Tensor]:
    return [torch.tensor([line]) for line in lines]


def test_the_last_write_counts() -> None:
    start, *frames = rows([7, M, M, M], [7, 1, M, M], [7, 1, 2, M], [7, M, 2, M], [7, 1, 3, M])
    trace = record_trace(iter(frames), start, M)
    assert trace.written_step.tolist() == [[0, 4, 4, _MASKED]]  # given; hidden and written again; changed; still open
    assert trace.tokens.tolist() == [[7, 1, 3, M]]
    assert trace.history(0, 1) == [(0, M), (1, 1), (3, M), (4, 1)]
    assert trace.history(0, 0) == [(0, 7)]
    assert trace.last_step.tolist() == [4]


def test_watching_tells_the_steps_of_what_is_shown_now() -> None:
    start, *frames = rows([M, M], [1, M], [M, 2])
    assert [step.written_step.tolist() for step in track_steps(iter(frames), start, M)] == [
        [[1, _MASKED]],
        [[_MASKED, 2]],
    ]


def test_nothing_to_write_is_a_trace_of_the_start() -> None:
    trace = record_trace(iter(()), torch.tensor([[3, M]]), M)
    assert trace.tokens.tolist() == [[3, M]]
    assert trace.written_step.tolist() == [[0, _MASKED]]
    assert trace.last_step.tolist() == [0]


def test_rows_end_at_their_own_steps() -> None:
    frames = [torch.tensor([[1, M], [1, M]]), torch.tensor([[1, 2], [1, M]]), torch.tensor([[1, 2], [1, 5]])]
    trace = record_trace(frames, torch.full((2, 2), M), M)
    assert trace.last_step.tolist() == [2, 3]
    assert trace.written_step.tolist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize(
    "sampler", [s for s in tiny_models.all_samplers() if tiny_models.is_compatible(s, MDLM())], ids=repr
)
def test_frames_up_to_its_step_rebuild_every_token(sampler: Sampler) -> None:
    denoise = tiny_models.tiny_denoiser(MDLM())
    start = torch.full((2, tiny_models.LENGTH), denoise.vocab.mask_id)
    start[:, 3] = 1
    trace = record_trace(sampler.run(denoise, Canvas(start, (0, 1))), start, denoise.vocab.mask_id)
    assert (trace.written_step[:, 3] == 0).all()
    assert (trace.written_step.amax(1) == trace.last_step).all()
    for row in range(2):
        for position in range(tiny_models.LENGTH):
            step = int(trace.written_step[row, position])
            final = int(trace.tokens[row, position])
            assert trace.history(row, position)[-1] == (step, final)
            assert all(int(frame[row, position]) == final for frame in trace.canvases[step:])
            if step:
                assert int(trace.canvases[step - 1][row, position]) != final


def test_remasking_is_seen() -> None:
    denoise = tiny_models.tiny_denoiser(MDLM())
    start = torch.full((4, tiny_models.LENGTH), denoise.vocab.mask_id)
    canvas = Canvas(start, (0, 1, 2, 3))
    trace = record_trace(ReMDM(24, Cap(0.5)).run(denoise, canvas), start, denoise.vocab.mask_id)
    counts = [len(trace.history(row, position)) for row in range(4) for position in range(tiny_models.LENGTH)]
    assert max(counts) > 2
