"""How long a hole is, if the text does not say: the posterior of lengths, given all that stands around the holes.

A model of masked tokens gives the given tokens x a probability p_n(x) in a text whose hole has n tokens, none of which
is looked at. With equal prior probabilities

    P(n | x) = p_n(x) / sum over all n' of p_n'(x)

It compares the probability of the same tokens under every length, which the probabilities of what is filled in, of
different numbers of tokens, are not. -log p_n(x) is bounded as that of any text,

    -log p_n(x) <= E over maskings of k of the m given tokens of  m/k * sum over masked i of -log p(x_i | visible)

with k uniform in 1..m, which is an equation where the model's conditionals are those of one distribution. All lengths
share the maskings, so that their differences are known much better than each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Masking
from unmask.likelihood._estimate import device_of, seeded_generator
from unmask.ops.chunked_head import WeightedNLL

DEFAULT_DRAWS = 64
"""Maskings of the given tokens."""
MAX_COMBINATIONS = 256
"""Lengths of all open holes together that are compared."""
_MAX_ROWS_TOKENS = 1 << 14
"""Tokens of a network call."""
_FIRST_DRAWS = 16
"""Maskings after which lengths that are far behind are left out."""
_FAR_BEHIND = 8.0
"""Nats, beyond five standard errors, that a length may be behind the best one."""


@dataclass(frozen=True)
class HoleLengths:
    """The posterior of the lengths of a text's open holes, the most probable first."""

    lengths: tuple[tuple[int, ...], ...]
    """The length of each open hole, for each of the combinations."""
    probabilities: tuple[float, ...]
    """Of each combination; they sum to one."""
    standard_errors: tuple[float, ...]
    """Of the log-probability of each relative to the first, from the random maskings: 0 if all were summed."""

    def where(self, possible: Sequence[Collection[int]]) -> HoleLengths:
        """The posterior, given that the length of each open hole is one of these."""
        kept = [
            number
            for number, lengths in enumerate(self.lengths)
            if all(length in among for length, among in zip(lengths, possible, strict=True))
        ]
        total = sum(self.probabilities[number] for number in kept)
        if not total:
            raise ValueError("of the lengths that are probable here, none can match the pattern; give another range")
        return HoleLengths(
            tuple(self.lengths[number] for number in kept),
            tuple(self.probabilities[number] / total for number in kept),
            tuple(self.standard_errors[number] for number in kept),
        )

    def draw(self, seed: int) -> tuple[int, ...]:
        """Lengths with these probabilities."""
        u = float(torch.rand((), generator=seeded_generator(seed), dtype=torch.float64))
        total = itertools.accumulate(self.probabilities)
        return next((each for each, sum_ in zip(self.lengths, total, strict=True) if u < sum_), self.lengths[0])


def hole_lengths(
    denoiser: DenoiserLike,
    pieces: Sequence[list[int] | int | range],
    draws: int = DEFAULT_DRAWS,
    seed: int = 0,
) -> HoleLengths:
    """The posterior of the lengths of the holes that are a range in `pieces`; others are ids, and lengths of holes.

    Where a text ends with a hole, the end-of-text token of the model stands behind it.
    """
    check_open_holes(denoiser)
    if draws < 1:
        raise ValueError(f"draws must be at least 1; got {draws}")
    mask_id = denoiser.vocab.mask_id
    texts = list(_texts(denoiser, [[mask_id] * piece if isinstance(piece, int) else piece for piece in pieces]))
    maskings, weight, is_exact = _draw_maskings(texts[0].num_given, draws, seed)
    first = len(maskings) if is_exact else min(_FIRST_DRAWS, len(maskings))
    nats = _nats(denoiser, texts, maskings[:first]) * weight[:first]
    kept = list(range(len(texts)))
    if first < len(maskings):
        gap, error = _behind_best(nats)
        kept = (gap <= _FAR_BEHIND + 5 * error).nonzero()[:, 0].tolist()
        rest = _nats(denoiser, [texts[index] for index in kept], maskings[first:]) * weight[first:]
        nats = torch.cat([nats[kept], rest], 1)
    gap, error = _behind_best(nats)
    probability = torch.softmax(-gap, 0)
    order = probability.argsort(descending=True, stable=True).tolist()
    return HoleLengths(
        tuple(texts[kept[index]].lengths for index in order),
        tuple(float(probability[index]) for index in order),
        tuple(0.0 if is_exact else float(error[index]) for index in order),
    )


def check_open_holes(denoiser: DenoiserLike, remedy: str = "give the number of tokens, as in <mask:12>") -> None:
    """ValueError with this remedy if the lengths of holes cannot be told by this model."""
    process = denoiser.process
    if process.inserts_tokens:
        raise ValueError("this model draws the length of a hole with its text, and has no posterior of it: fill it")
    if not isinstance(process, Masking) or not denoiser.normalized:
        raise ValueError(
            f"the length of a hole is found by models of masked tokens that read both sides of it, and this one is"
            f" {process.title}: {remedy}"
        )


@dataclass(frozen=True)
class _Text:
    """A text whose open holes have these lengths."""

    lengths: tuple[int, ...]
    ids: list[int]
    given: list[int]
    """The positions of the given tokens."""

    @property
    def num_given(self) -> int:
        return len(self.given)


def _texts(denoiser: DenoiserLike, pieces: Sequence[Sequence[int] | range]) -> Iterator[_Text]:
    """All combinations of lengths; far from the holes, what does not fit into the model is left out in all of them."""
    vocab, ranges = denoiser.vocab, [piece for piece in pieces if isinstance(piece, range)]
    combinations = math.prod(map(len, ranges))
    if combinations > MAX_COMBINATIONS:
        raise ValueError(
            f"the open holes could have {combinations:,} combinations of lengths, and at most {MAX_COMBINATIONS} are"
            " compared: give narrower ranges, as in <mask:3..12>"
        )
    if isinstance(pieces[-1], range):
        if vocab.eos_id is None:
            raise ValueError(
                "nothing follows the last hole, and this model knows no end of text: how long it is cannot be told;"
                " give the number of tokens, as in <mask:12>"
            )
        pieces = [*pieces, [vocab.eos_id]]
    pieces = _trimmed(pieces, denoiser.max_length)
    uncounted = {vocab.mask_id, *vocab.context_ids}
    if not any(token not in uncounted for piece in pieces if not isinstance(piece, range) for token in piece):
        raise ValueError("no text is given around the holes from which their lengths could be told")
    for lengths in itertools.product(*ranges):
        left, ids = iter(lengths), list[int]()
        for piece in pieces:
            ids += [vocab.mask_id] * next(left) if isinstance(piece, range) else piece
        yield _Text(lengths, ids, [place for place, token in enumerate(ids) if token not in uncounted])


def _trimmed(pieces: Sequence[Sequence[int] | range], limit: int | None) -> list[Sequence[int] | range]:
    """The pieces without as much of both ends as the longest combination is longer than the model."""
    cut = list(pieces)
    size = sum(piece[-1] if isinstance(piece, range) else len(piece) for piece in pieces)
    excess = 0 if limit is None else max(0, size - limit)
    if not excess:
        return cut
    inner = [number for number, piece in enumerate(pieces) if isinstance(piece, range)]
    before, after = sum(map(len, cut[: inner[0]])), sum(map(len, cut[inner[-1] + 1 :]))
    from_left = min(before, max(excess - after, round(excess * before / max(before + after, 1))))
    from_right = excess - from_left
    if from_right > after:
        raise ValueError(
            f"the holes and what stands between them have up to {size - before - after} tokens, more than the model's"
            f" {limit}: give narrower ranges"
        )
    left = [token for piece in cut[: inner[0]] for token in piece][from_left:]
    right = [token for piece in cut[inner[-1] + 1 :] for token in piece]
    return [left, *cut[inner[0] : inner[-1] + 1], right[: len(right) - from_right]]


def _draw_maskings(m: int, draws: int, seed: int) -> tuple[Bool[Tensor, "D m"], Float64[Tensor, " D"], bool]:
    """Maskings of m tokens and their weights, whose weighted mean of nats is the bound: all of them if that is fewer.

    The number k of masked tokens is stratified over the draws.
    """
    if 2**m - 1 <= draws:
        number = torch.arange(1, 2**m)
        masked = (number[:, None] >> torch.arange(m)) & 1 == 1
        counts = masked.sum(1).tolist()
        weight = torch.tensor([(2**m - 1) / (k * math.comb(m, k)) for k in counts], dtype=torch.float64)
        return masked, weight, True
    generator = seeded_generator(seed)
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    u = (torch.arange(draws, dtype=torch.float64) + offset) / draws
    u = u[torch.randperm(draws, generator=generator)]
    k = (u * m).floor().long().clamp(max=m - 1) + 1
    rank = torch.rand(draws, m, generator=generator, dtype=torch.float64).argsort(1).argsort(1)
    return rank < k[:, None], m / k.double(), False


@torch.no_grad()
def _nats(denoiser: DenoiserLike, texts: Sequence[_Text], maskings: Bool[Tensor, "D m"]) -> Float64[Tensor, "texts D"]:
    """The summed -log p of the masked tokens of every text under every masking."""
    rows = [_nats_of_text(denoiser, text, maskings) for text in texts]
    return torch.stack(rows)


def _nats_of_text(denoiser: DenoiserLike, text: _Text, maskings: Bool[Tensor, "D m"]) -> Float64[Tensor, " D"]:
    process, mask_id, total = denoiser.process, denoiser.vocab.mask_id, list[Tensor]()
    assert isinstance(process, Masking)
    device = device_of(denoiser)
    for part in torch.split(maskings, max(1, _MAX_ROWS_TOKENS // len(text.ids))):
        tokens = torch.tensor(text.ids).expand(len(part), -1)
        asked = torch.zeros_like(tokens, dtype=torch.bool)
        asked[:, torch.tensor(text.given)] = part
        z = tokens.masked_fill(asked, mask_id)
        t = process.schedule.inverse(1 - (z == mask_id).double().mean(1, keepdim=True))
        row_fn = WeightedNLL.unweighted(tokens[asked].to(device))
        nll = denoiser(z.to(device), t.to(device), asked.to(device), row_fn=row_fn).double().cpu()
        total.append(torch.zeros(len(part), dtype=torch.float64).index_add(0, asked.nonzero()[:, 0], nll))
    return torch.cat(total)


def _behind_best(nats: Float64[Tensor, "texts D"]) -> tuple[Float64[Tensor, " texts"], Float64[Tensor, " texts"]]:
    """The nats that each text is behind the best one, and the standard errors of these differences."""
    mean = nats.mean(1)
    difference = nats - nats[mean.argmin()]
    draws = nats.shape[1]
    error = difference.std(1) / math.sqrt(draws) if draws > 1 else torch.zeros_like(mean)
    return difference.mean(1), error
