"""FlexMDM (arXiv 2509.01025): masked diffusion of texts whose length is generated with them.

At the noise p = 1 - alpha(t) a token is missing with probability p, a mask with -p log p, and visible otherwise. Going
back, missing tokens are inserted as masks, and masks are unmasked, each at the rate 1/p. The network sees the text
without its missing tokens, an end mark behind it, and predicts at each place

    mu, the token at a mask,   and   lambda = p exp(l), how many tokens are missing in the gap before the place.

With y tokens missing in a gap of the true text, the KL of the paths of the two jump processes is

    -log p(x) <= E_p E_z (1/p) [ sum over masks of -log mu(x_i) + sum over gaps of (lambda - y - y log lambda) ]

with p uniform. Paths name the gap of every insertion, and so tell which tokens of x were inserted; hence there is
no y log y, which makes the published loss, lambda - y + y log(y/lambda), a weaker bound by a constant. The average of
y + y log p over p is zero: for a token, the integral of 1 + log p. What is left is the loss here,

    E_p E_z [ (1/p) sum over masks of -log mu(x_i) + sum over gaps of (exp(l) - (y/p) l) ]

an equation for mu and lambda of one distribution, whose lengths it includes. It is proved by enumeration in
tests/objectives/test_flexmdm.py.

Where tokens are given, as around a hole, they stay visible, and nothing is missing between two of them. The time of a
place that the network gets is then t if something may be missing before it, and 0 if not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import NoiseLevel, continuous_level
from unmask.diffusion.process import Insertion
from unmask.diffusion.schedule import LogLinear, Schedule
from unmask.diffusion.time_sampling import AnyTimes, PowerTimes, UniformTimes
from unmask.objectives.base import LossSum, Objective, sample_noise
from unmask.ops.chunked_head import to_float32
from unmask.types import Batch, LogX, Queries, Vocab


@dataclass(frozen=True, kw_only=True)
class FlexMDM(Objective):
    """Masks are inserted and unmasked: the model chooses how long a text or a hole is."""

    schedule: Schedule = LogLinear()
    """The schedule alpha(t): P(a token is there, masked or visible, at time t)."""
    times: AnyTimes = PowerTimes(2.0)
    """The distribution that times are drawn from. Uniform ones give the same bound with infinite variance: of few masks
    near t = 0, each has the weight 1/t."""
    hole_share: float = 0.5
    """Share of the rows that are trained as texts with holes: what stands around them is given."""
    longest_hole: int = 32
    """In such rows, holes have 0 to so many tokens, and on average twice as many are given between them."""

    def __post_init__(self) -> None:
        if not 0 <= self.hole_share <= 1:
            raise ValueError(f"hole_share, a share of the rows, must be in [0, 1]; got {self.hole_share}")
        if self.longest_hole < 1:
            raise ValueError(f"longest_hole must be at least 1 token; got {self.longest_hole}")

    @property
    def process(self) -> Insertion:
        return Insertion(self.schedule)

    @property
    def normalized(self) -> bool:
        return True

    @property
    def end_marks(self) -> int:
        return 1

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        """The log-softmax over the clean tokens; in the column of the mask, its logit: l."""
        logits = to_float32(logits)
        mask = torch.arange(logits.shape[-1], device=logits.device) == vocab.mask_id
        return torch.where(mask, logits, logits.masked_fill(mask, -torch.inf).log_softmax(-1))

    def training_loss(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> LossSum:
        """The bound of some rows as a whole, and that of the holes of others given what stands around them."""
        batch = batch.checked(denoiser.vocab)
        host = batch.on_host
        if not self.hole_share:
            whole = _Text(host.loss_mask, _gaps_beside(host))
            return LossSum(self._place_nll(denoiser, batch, whole, generator).nll.sum(), batch.loss_mask.sum())
        holes = sample_noise(denoiser, host, UniformTimes(), generator)
        with_holes = holes.u < self.hole_share
        counted, may_be_missing = self._draw_holes(holes.uniform, host)
        text = _Text(
            torch.where(with_holes, counted, host.loss_mask),
            torch.where(with_holes, may_be_missing, _gaps_beside(host)),
        )
        nll = self._place_nll(denoiser, batch, text, generator).nll
        return LossSum(nll.sum(), text.counted.sum().clamp(min=1))

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        """The cost of a gap is that of the token after it, or of one beside it if that is given or the text ends."""
        batch = batch.checked(denoiser.vocab)
        host = batch.on_host
        nll, owner = self._place_nll(denoiser, batch, _Text(host.loss_mask, _gaps_beside(host)), generator)
        return nll.new_zeros(batch.tokens.shape).index_put(owner, nll, accumulate=True)

    def _place_nll(self, denoiser: DenoiserLike, batch: Batch, text: _Text, generator: torch.Generator) -> _PlaceNLL:
        host, device = batch.on_host, batch.tokens.device
        noise = sample_noise(denoiser, host, self.times, generator)
        level = continuous_level(self.schedule, noise.u)
        z = corrupt(self.process, host, text, level, noise.uniform, denoiser.vocab)
        weight = level.weight * noise.importance  # 1/p, where alpha is linear
        queries = Queries.from_host((z.is_mask | z.is_open).numpy(), device)

        def at_queries(values: Tensor) -> Tensor:
            return queries.gather(values.to(device))

        row_fn = _InsertionNLL(
            at_queries(z.tokens_of(host.tokens)),
            at_queries(z.is_mask * weight),
            at_queries(z.is_open * weight * (1 - level.alpha)),
            at_queries(z.missing * weight),
            denoiser.vocab.mask_id,
        )
        nll = denoiser(
            z.tokens.to(device), z.times(level.t).to(device), queries, z.context(batch.context), row_fn=row_fn
        )
        return _PlaceNLL(nll, (queries[0], at_queries(z.owner)))

    def _draw_holes(self, uniform: Float64[Tensor, "B L"], host: Batch) -> tuple[Tensor, Tensor]:
        """Which tokens [B, L] are in holes, and before which of them, or at the end [B, L + 1], one may be missing.

        Given tokens and holes take turns. A hole without tokens is a gap, too.
        """
        size, length = uniform.shape
        given = (uniform[:, 0::2] * 2 * self.longest_hole).long()
        hidden = (uniform[:, 1::2] * (self.longest_hole + 1)).long()
        turns = min(given.shape[1], hidden.shape[1])
        if turns == 0:  # rows of one token
            return host.loss_mask, _gaps_beside(host)
        given, hidden = given[:, :turns], hidden[:, :turns]
        start = given.cumsum(1) + hidden.cumsum(1) - hidden
        place = torch.arange(length + 1).expand(size, -1).contiguous()
        hole = torch.searchsorted(start, place, right=True) - 1
        begin, count = (values.gather(1, hole.clamp(min=0)) for values in (start, hidden))
        counted = ((hole >= 0) & (place < begin + count))[:, :-1] & host.loss_mask
        begins = (hole >= 0) & (place == begin)
        valid = torch.ones_like(counted) if host.valid is None else host.valid
        begins[:, -1:] |= begins.gather(1, valid.sum(1, keepdim=True))  # the end of a padded text
        return counted, begins | _gaps_beside_tokens(counted, host.valid)


class _PlaceNLL(NamedTuple):
    """The costs of the places of noisy texts, and whose they are."""

    nll: Float[Tensor, " N"]
    owner: tuple[Int[Tensor, " N"], Int[Tensor, " N"]]
    """Sequence and token."""


class _Text(NamedTuple):
    """Which tokens of a batch are generated, and where."""

    counted: Bool[Tensor, "B L"]
    """The tokens that are generated: others are given, or padding."""
    may_be_missing: Bool[Tensor, "B gaps"]
    """Before which tokens, and at the end, [B, L + 1], tokens may be missing."""


class _Noisy(NamedTuple):
    """Texts without their missing tokens, an end mark behind each, on the host; all [B, M]."""

    tokens: Int[Tensor, "B M"]
    valid: Bool[Tensor, "B M"]
    source: Int[Tensor, "B M"]
    """The place of each token in the text; its length for the end mark."""
    is_mask: Bool[Tensor, "B M"]
    """The masks that are to be unmasked, which the end mark is not."""
    is_open: Bool[Tensor, "B M"]
    """Before which places tokens may be missing."""
    missing: Int[Tensor, "B M"]
    """How many are."""
    owner: Int[Tensor, "B M"]
    """The token of the text that has the cost of a place."""

    def tokens_of(self, x: Int[Tensor, "B L"]) -> Int[Tensor, "B M"]:
        """The clean tokens at the places."""
        return x.gather(1, self.source.clamp(max=x.shape[1] - 1))

    def times(self, t: Float64[Tensor, "B 1"]) -> Float64[Tensor, "B M"]:
        """t where tokens may be missing, and 0 where not."""
        return torch.where(self.is_open, t, 0)

    def context(self, of_text: Context) -> Context:
        """The context of the noisy texts."""
        documents = of_text.document_ids
        if documents is not None:
            source = self.source.clamp(max=documents.shape[1] - 1).to(documents.device)
            documents = documents.gather(1, source)
        device = None if of_text.valid is None else of_text.valid.device
        if self.valid.numpy().all():
            return Context(document_ids=documents)
        valid = self.valid if documents is None else self.valid.to(documents.device)
        return Context(valid.to(device), documents, valid_on_host=self.valid.numpy())


def corrupt(
    process: Insertion,
    host: Batch,
    text: _Text,
    level: NoiseLevel,
    uniform: Float64[Tensor, "B L"],
    vocab: Vocab,
) -> _Noisy:
    """z_t ~ q(. | x): the tokens that are there, and masks in the place of those that are not visible."""
    size, length = host.tokens.shape
    there, visible = process.states(level.alpha, uniform)
    valid = torch.ones_like(text.counted) if host.valid is None else host.valid
    kept, masked = valid & (there | ~text.counted), text.counted & there & ~visible
    last = torch.ones(size, 1, dtype=torch.bool)
    kept = torch.cat([kept, last], 1)
    number = kept.sum(1, keepdim=True)
    source = (~kept).long().argsort(dim=1, stable=True)[:, : int(number.numpy().max())]
    is_valid = torch.arange(source.shape[1]) < number
    source = torch.where(is_valid, source, length)
    # Sums up to each token and the end, of which a place has what was added since the place before it.
    absent = torch.cat([text.counted & ~there, ~last], 1)
    gaps = (text.may_be_missing & torch.cat([valid, last], 1)).cumsum(1)
    missing, opened = (
        each.gather(1, source).diff(dim=1, prepend=torch.zeros(size, 1, dtype=torch.int64))
        for each in (absent.cumsum(1), gaps)
    )
    padded = torch.cat([torch.where(masked, vocab.mask_id, host.tokens), torch.full((size, 1), vocab.mask_id)], 1)
    is_mask = torch.cat([masked, ~last], 1).gather(1, source) & is_valid
    counted = torch.cat([text.counted, ~last], 1)
    # Of a gap before a given token or the end: the last token that is missing, or else the one before the gap.
    beside = (counted * torch.arange(length + 1)).cummax(1).values.gather(1, source)
    owner = torch.where(counted.gather(1, source), source, beside)
    return _Noisy(
        tokens=padded.gather(1, source),
        valid=is_valid,
        source=source,
        is_mask=is_mask,
        is_open=(opened > 0) & is_valid,
        missing=missing * is_valid,
        owner=owner,
    )


def _gaps_beside(host: Batch) -> Bool[Tensor, "B gaps"]:
    """Before each token [B, L] and at the end: whether the token before or after is generated."""
    return _gaps_beside_tokens(host.loss_mask, host.valid)


def _gaps_beside_tokens(counted: Bool[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None) -> Bool[Tensor, "B gaps"]:
    none = torch.zeros_like(counted[:, :1])
    beside = torch.cat([counted, none], 1) | torch.cat([none, counted], 1)
    if valid is not None:  # the gap after the last token of a padded text is the one at the end, behind the padding
        index = torch.arange(1, counted.shape[1] + 1)
        last = (valid * index).amax(1, keepdim=True)
        beside[:, -1:] |= torch.cat([none, counted], 1).gather(1, last)
    return beside


@dataclass(frozen=True)
class _InsertionNLL:
    """The row function a (-log mu_x) + b exp(l) - c l."""

    x: Int[Tensor, " N"]
    unmasking: Float64[Tensor, " N"]
    insertion: Float64[Tensor, " N"]
    missing: Float64[Tensor, " N"]
    mask_id: int

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Float[Tensor, " N"]:
        log_rate = log_x[:, self.mask_id]
        unmasking, insertion, missing = (
            values[indices].to(log_x) for values in (self.unmasking, self.insertion, self.missing)
        )
        # Not log_x[x] everywhere: that of the end mark, and of tokens in closed gaps, may be anything.
        nll = torch.where(unmasking > 0, -log_x.gather(-1, self.x[indices, None])[:, 0], 0)
        return unmasking * nll + insertion * log_rate.exp() - missing * log_rate
