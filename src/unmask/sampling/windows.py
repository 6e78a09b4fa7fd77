"""Texts longer than the model: windows from left to right, each with the filled text before it as context.

Every window is filled by a sampler that sees nothing else, with a seed of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import derive_seed
from unmask.sampling._unmasking import IntArray, to_device
from unmask.sampling.base import Sampler, init_tokens
from unmask.sampling.canvas import Canvas
from unmask.types import Tokens


class HoleRange(NamedTuple):
    """The holes of a window: `start` to `stop` - 1 of the `num_holes` of the text, and whether they are complete."""

    start: int
    stop: int
    num_holes: int
    complete: bool


WindowGuidanceFn: TypeAlias = Callable[[DenoiserLike, Tokens, HoleRange], DenoiserLike]
"""From a denoiser, the current tokens of a window and its holes to the denoiser of that window."""


def strided_windows(length: int, window: int, stride: int) -> list[slice]:
    """Windows that are `stride` tokens apart; the last one ends where the text ends."""
    firsts = [*range(0, length - window, stride), max(0, length - window)]
    return [slice(first, min(first + window, length)) for first in firsts]


def _windows_around_holes(masked: Sequence[bool], window: int, *, bidirectional: bool = True) -> list[slice]:
    """Windows that contain all holes of a text in turn, each with as much text on both sides as fits.

    Holes that are close to each other share a window. A hole that leaves no room for context is filled in parts, and a
    text that is masked up to its end in windows that are half a window apart. A model that is not `bidirectional` gets
    all its context before the holes. No window contains a part of a hole that it does not fill.
    """
    holes = _masked_runs(masked)
    if not holes:
        return []
    if len(holes) == 1 and holes[0][1] == len(masked):
        return strided_windows(len(masked), window, max(1, window // 2))
    windows = []
    while holes:
        begin, end = holes.pop(0)
        if end - begin > window - window // 4:
            cut = begin + window - min(begin, window // 2)
            if cut < end:
                holes.insert(0, (cut, end))
                end = cut
        while holes and holes[0][0] > end and holes[0][1] - begin <= window // 2:
            end = holes.pop(0)[1]
        spare = window - (end - begin)
        room = (holes[0][0] if holes else len(masked)) - end if bidirectional else 0
        before = min(begin, spare - min(spare // 2, room))
        windows.append(slice(begin - before, end + min(room, spare - before)))
    return windows


def _masked_runs(is_masked: Sequence[bool]) -> list[tuple[int, int]]:
    """The first position of each hole, and the one after its last."""
    places = [
        [place for place, _ in run] for masked, run in groupby(enumerate(is_masked), lambda each: each[1]) if masked
    ]
    return [(run[0], run[-1] + 1) for run in places]


def _holes_in_window(holes: Sequence[tuple[int, int]], window: slice) -> HoleRange:
    """The holes that overlap a window."""
    within = [i for i, (begin, end) in enumerate(holes) if begin < window.stop and end > window.start]
    first, last = (within[0], within[-1] + 1) if within else (0, 0)
    whole = all(begin >= window.start and end <= window.stop for begin, end in holes[first:last])
    return HoleRange(first, last, len(holes), whole)


def sample_windows(
    denoiser: DenoiserLike,
    canvas: Canvas,
    sampler: Sampler,
    windows: Sequence[slice],
    window_guidance: WindowGuidanceFn | None = None,
) -> Iterator[Tokens]:
    """Yield the canvas after each step of each window.

    A sequence in which a sampler with an end-of-text token has written it is filled with it to its end.
    """
    z = init_tokens(denoiser, canvas, any_length=True)
    mask, ends = denoiser.vocab.mask_id, torch.tensor(sampler.end_ids, device=z.device)
    given, masked = z != mask, canvas.host_mask(mask)
    holes = _masked_runs(masked[0].tolist())  # sequences with guidance per window have the same holes
    sequences = np.arange(len(z))
    for number, inside in enumerate(windows):
        if not masked[sequences, inside].any():
            continue
        rows = to_device(sequences, z.device)
        part = Canvas(
            z[rows, inside],
            tuple(derive_seed(canvas.seeds[row], number) for row in sequences),
            masked[sequences, inside],
        )
        view = (
            denoiser
            if window_guidance is None
            else window_guidance(denoiser, part.tokens, _holes_in_window(holes, inside))
        )
        for written in sampler.run(view, part):
            z = z.clone()
            z[rows, inside] = written
            yield z
        masked[sequences, inside] = False
        if not sampler.end_ids:
            continue
        is_end = (torch.isin(z, ends) & ~given)[rows]
        ended = is_end[:, inside].any(1).cpu().numpy()
        if ended.any():
            z, rows = z.clone(), to_device(sequences[ended], z.device)
            first_end = z[rows].gather(1, is_end[to_device(ended, z.device)].int().argmax(1, keepdim=True))
            z[rows] = torch.where(z[rows] == mask, first_end, z[rows])
            yield z
            sequences = sequences[~ended]


def sample_ragged(
    denoiser: DenoiserLike,
    canvas: Canvas,
    sampler: Sampler,
    valid: Tensor | None,
    window_guidance: WindowGuidanceFn,
) -> Iterator[Tokens]:
    """Texts of any length and with padding, each filled as if it were alone.

    Texts that begin, end and have their holes at the same positions share calls. They are filled as a whole if they
    fit the model or the sampler has windows of its own, and in windows around their holes otherwise.
    """
    z, longest = init_tokens(denoiser, canvas, any_length=True), denoiser.max_length
    masked = canvas.host_mask(denoiser.vocab.mask_id)
    ahead = not denoiser.process.is_left_to_right
    for first, last, sequences in _group_by_mask(masked, None if valid is None else valid.cpu().numpy()):
        rows, hidden = to_device(sequences, z.device), masked[sequences[0], first:last].tolist()
        seeds = tuple(canvas.seeds[row] for row in sequences)
        text = Canvas(z[rows, first:last], seeds, masked[sequences, first:last])
        if longest is None or last - first <= longest or sampler.any_length:
            whole = _holes_in_window(_masked_runs(hidden), slice(0, last - first))
            steps = sampler.run(window_guidance(denoiser, text.tokens, whole), text)
        else:
            steps = sample_windows(
                denoiser,
                text,
                sampler,
                _windows_around_holes(hidden, longest, bidirectional=ahead),
                window_guidance,
            )
        for written in steps:
            z = z.clone()
            z[rows, first:last] = written
            yield z


def _group_by_mask(masked: NDArray[np.bool_], valid: NDArray[np.bool_] | None) -> Iterator[tuple[int, int, IntArray]]:
    """Sequences with the same text range and masked positions: start, stop, sequence ids."""
    valid = np.ones_like(masked) if valid is None else valid
    groups: dict[bytes, list[int]] = {}
    for row, kind in enumerate(np.concatenate([masked & valid, valid], 1)):
        groups.setdefault(kind.tobytes(), []).append(row)
    for rows in groups.values():
        places = np.flatnonzero(valid[rows[0]])
        yield int(places[0]), int(places[-1]) + 1, np.array(rows)
