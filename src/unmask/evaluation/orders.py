"""The likelihood of text in an order: exact where the order follows from predictions, bracketed where it is random.

The bound of `unmask eval` is the mean of -log p(x | order) over all orders. A sampler writes in one order, or in few,
and what a text costs there is another number: the chain rule from left to right, or with the surest position first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

import torch
from jaxtyping import Float64
from torch import Tensor

from unmask.config import lookup
from unmask.data.corpus import Split
from unmask.data.loader import Loader, RowLayout
from unmask.evaluation._text_stats import window_text_stats
from unmask.likelihood.score import Score
from unmask.model import LanguageModel
from unmask.sampling import Blockwise, Confidence, RandomOrder, Sampler
from unmask.sampling.denoisers import CountingDenoiser
from unmask.sampling.law import LawBounds, law_bounds, text_nats
from unmask.types import ProgressFn

_BATCH_SIZE = 40
"""Windows in a network call."""
_DEFAULT_BLOCK_SIZE = 32
_WINDOW_BITS = 32
"""The seed of draw d of window w is the seed + 2^32 d + w."""
_MEASURES: dict[str, str | None] = {
    "left-to-right": None,
    "confidence": "best-probability",
    "margin": "margin",
    "entropy": "entropy",
    "blocks": "best-probability",
    "random": None,
}
_RULES = {
    "left-to-right": "from left to right",
    "confidence": "the position with the most probable token first",
    "margin": "the position with the largest margin between its two best tokens first",
    "entropy": "the position with the lowest entropy first",
    "blocks": "the position with the most probable token first",
    "random": "in random order",
}
ORDERS = tuple(_MEASURES)
"""The names of orders. All but `random` are rules; `blocks` is confidence in blocks from left to right."""


@dataclass(frozen=True)
class OrderConfig:
    """In which order, and of how much of a text, the likelihood is computed."""

    order: str
    """A name of `ORDERS`."""
    windows: int | None = None
    """So many windows, spread evenly over the text; None for all of them."""
    block_size: int | None = None
    """The order holds within blocks of this many tokens, which come from left to right; None: the model's own blocks,
    or the whole text (32 for the order `blocks`)."""
    tokens_per_step: int = 1
    """Tokens that are written at once: the law of parallel decoding."""
    draws: int = 8
    """Orders that are drawn of each text, where they are random."""
    seed: int = 0
    """The seed of random orders, and of the noise that decides between equals."""

    def __post_init__(self) -> None:
        lookup(self.order, _MEASURES, "order")
        for name in ("windows", "block_size", "tokens_per_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if self.draws < 4:
            raise ValueError(f"draws must be at least 4 orders, half of which bound the others; got {self.draws}")

    def resolve_block_size(self, model_block: int | None) -> int | None:
        """Tokens of a block; None where the whole text is one."""
        if model_block is not None and self.block_size not in (None, model_block):
            raise ValueError(f"the model writes blocks of {model_block} tokens; leave out a size of {self.block_size}")
        if self.order == "left-to-right":
            return model_block
        return model_block or self.block_size or (_DEFAULT_BLOCK_SIZE if self.order == "blocks" else None)

    def sampler(self, model_block: int | None, length: int) -> Sampler:
        """The sampler that writes `length` tokens in this order."""
        size, measure = self.resolve_block_size(model_block), _MEASURES[self.order]
        if self.order == "left-to-right":
            return Blockwise(size, Confidence(1, "best-probability"), sub_block_size=self.tokens_per_step)
        steps = math.ceil(min(size or length, length) / self.tokens_per_step)
        return Blockwise(size, RandomOrder(steps) if measure is None else Confidence(steps, measure))

    def describe(self, model_block: int | None) -> str:
        """What the figure is, in words."""
        size = self.resolve_block_size(model_block)
        blocks = "" if size is None else f", in blocks of {size} from left to right"
        at_once = "" if self.tokens_per_step == 1 else f", {self.tokens_per_step} at once"
        kind = f"importance-weighted bound on -log p, {self.draws} orders" if self.order == "random" else "exact -log p"
        return f"{kind}: {_RULES[self.order]}{blocks}{at_once}"


@dataclass(frozen=True)
class OrderScore:
    """What a text costs in an order."""

    order: str
    """Its name."""
    definition: str
    """What the figure is, in words."""
    score: Score
    """Exact, with no error; or, in random orders, the importance-weighted bound."""
    bounds: LawBounds | None
    """In random orders: bounds from both sides; None for a rule."""
    draws: int
    """Orders that were drawn of each text; 1 for a rule."""
    nfe: int
    """Network calls, of several texts each."""

    @property
    def lower(self) -> float | None:
        """Nats per token that the text costs at least."""
        return None if self.bounds is None else self.bounds.lower / self.score.tokens

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        facts = {"order": self.order, "definition": self.definition, "draws": self.draws, "nfe": self.nfe}
        bounds = {} if self.bounds is None else {"bounds": asdict(self.bounds)}
        return {**facts, **self.score.to_dict(), **bounds}


def evaluate_order(
    lm: LanguageModel,
    text: Split,
    layout: RowLayout,
    config: OrderConfig,
    progress: ProgressFn | None = None,
) -> OrderScore:
    """The likelihood of a text's windows in an order; `progress` is called with the number of windows that are done."""
    process = lm.denoiser.process
    if not process.has_masks:
        raise ValueError(
            f"orders are those of masked diffusion, and this model's process is {process.title}: leave --order out"
        )
    loader = Loader(text, layout, _BATCH_SIZE)
    with lm.inference_mode():
        stats = window_text_stats(lm.tokenizer, text, loader, config.windows)
        evaluation = _Evaluation(lm, config, list(_groups(lm, loader, config.windows)))
        nats = evaluation.nats(progress)
    tokens, calls, definition = evaluation.tokens, evaluation.nfe, config.describe(process.block_size)
    if config.order != "random":
        exact = Score(float(nats.sum()), 0.0, tokens, stats)
        return OrderScore(config.order, definition, exact, None, 1, calls)
    bounds = law_bounds(nats)
    weighted = Score(bounds.upper, bounds.upper_variance, tokens, stats)
    return OrderScore(config.order, definition, weighted, bounds, config.draws, calls)


@dataclass(frozen=True)
class OwnNats:
    """What samples cost under the law of the sampler that wrote them, in nats per token: its entropy, on average."""

    at_least: float
    """The mean of -log p(x | noise) with the noise of the draw, which is a sample of p(noise | x)."""
    at_most: float
    """With other noise. Where no noise decides the order, both are -log p(x) itself."""
    error: float | None
    """The standard error of `at_most` over samples; None for one sample."""


def own_nats(lm: LanguageModel, sampler: Sampler, tokens: Tensor, seed: int) -> OwnNats | None:
    """What samples [n, L] that were drawn with seeds `seed`, seed + 1, ... cost under the sampler's own law; None where
    that is not known."""
    longest = lm.denoiser.max_length
    in_windows = longest is not None and tokens.shape[1] > longest and lm.denoiser.process.block_size is None
    if sampler.order_follows == "tokens" or sampler.any_length or in_windows or not lm.denoiser.normalized:
        return None
    denoiser, n = lm.ban_unknown_tokens(lm.predictor), len(tokens)
    with lm.inference_mode():
        own = text_nats(denoiser, sampler, tokens.to(lm.device), range(seed, seed + n)).mean(1).cpu()
        other = own
        if sampler.order_follows == "noise":
            first = seed + (1 << _WINDOW_BITS)
            other = text_nats(denoiser, sampler, tokens.to(lm.device), range(first, first + n)).mean(1).cpu()
    error = float(other.std()) / math.sqrt(n) if n > 1 else None
    return OwnNats(float(own.mean()), float(other.mean()), error)


@dataclass(frozen=True)
class _Group:
    """Windows of equal length: their tokens, and which of them are counted."""

    first: int
    """The number of the first window."""
    tokens: Tensor
    counted: Tensor


def _groups(lm: LanguageModel, loader: Loader, windows: int | None) -> Iterator[_Group]:
    """All windows, neighbours of equal length together."""
    available = loader.num_sequential_rows
    count = available if windows is None else min(windows, available)
    for start in range(0, count, _BATCH_SIZE):
        batch = loader.sequential_batch(start, _BATCH_SIZE, num_windows=count).checked(lm.vocab)
        valid = torch.ones_like(batch.loss_mask) if batch.valid is None else batch.valid
        rows = [
            (start + number, tokens[is_text], counted[is_text])
            for number, (tokens, counted, is_text) in enumerate(zip(batch.tokens, batch.loss_mask, valid, strict=True))
        ]
        for _, same in groupby(rows, key=lambda row: len(row[1])):
            numbers, tokens, counted = zip(*same, strict=True)
            yield _Group(numbers[0], torch.stack(tokens), torch.stack(counted))


class _Evaluation:
    """The nats of all windows, which the ranks divide."""

    def __init__(self, lm: LanguageModel, config: OrderConfig, groups: Sequence[_Group]) -> None:
        self.lm, self.config, self.groups = lm, config, groups
        self.tokens = sum(int(group.counted.sum()) for group in groups)
        if not self.tokens:
            raise ValueError("there is nothing to score: all tokens of the text are only context, as N is in DNA")
        self.nfe = 0

    def nats(self, progress: ProgressFn | None) -> Float64[Tensor, "draws parts"]:
        """-log p(part | order) of each drawn order, the parts being blocks; of a rule, the one order."""
        draws = self.config.draws if self.config.order == "random" else 1
        ranks, parts, done = self.lm.distributed, [self._num_parts(group) for group in self.groups], 0
        table, ends = torch.zeros(draws, sum(parts), dtype=torch.float64), torch.tensor(parts).cumsum(0).tolist()
        for number in range(ranks.rank, len(self.groups), ranks.world_size):
            group = self.groups[number]
            for draw in range(draws):
                table[draw, ends[number] - parts[number] : ends[number]] = self._draw(group, draw)
                done += len(group.tokens) * ranks.world_size
                if progress is not None:
                    progress(done)
        self.nfe = int(ranks.all_reduce_scalars(self.nfe)[0])
        return ranks.all_reduce(table)

    def _num_parts(self, group: _Group) -> int:
        return len(group.tokens) * math.ceil(group.tokens.shape[1] / self._part_size(group))

    def _part_size(self, group: _Group) -> int:
        return self.config.resolve_block_size(self.lm.denoiser.process.block_size) or group.tokens.shape[1]

    def _draw(self, group: _Group, draw: int) -> Float64[Tensor, " parts"]:
        """The nats of the blocks of all windows of a group in one order each."""
        lm, length = self.lm, group.tokens.shape[1]
        sampler = self.config.sampler(lm.denoiser.process.block_size, length)
        first = self.config.seed + (draw << _WINDOW_BITS) + group.first
        denoiser = CountingDenoiser(lm.ban_unknown_tokens(lm.predictor))
        nats = text_nats(
            denoiser,
            sampler,
            group.tokens.to(lm.device),
            range(first, first + len(group.tokens)),
            group.counted.to(lm.device),
        ).cpu()
        lm.denoiser.raise_if_nonfinite()
        self.nfe += denoiser.nfe
        size = self._part_size(group)
        padded = torch.nn.functional.pad(nats, (0, -length % size))
        return padded.view(len(nats), -1, size).sum(-1).flatten()
