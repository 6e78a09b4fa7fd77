"""What all objectives share: noise for a batch, and the loss of masked diffusion.

A reverse step that unmasks a token with probability r costs KL(q(z_s | z_t, x) || p(z_s | z_t)). In terms of
log_x and S = sum(exp(log_x)) it is

    r (-log_x[x])  +  (1 - r) log((1 - r) / (1 - r S))   =   r ( -log_x[x] + penalty(S, r) )

with penalty -> S - 1 as r -> 0. This one formula is the loss of MDLM (S = 1: no penalty), of D3PM (S < 1) and of
SEDD (score entropy, S is free), in T steps and in continuous time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import derive_seed, seeded_uniform
from unmask.diffusion.noise_level import (
    MAX_STEPS,
    NoiseLevel,
    continuous_level,
    discrete_level,
    fixed_count_level,
    rank_uniform,
    validate_steps,
)
from unmask.diffusion.process import BlockMasking, Masking, NoiseProcess, Process
from unmask.diffusion.schedule import LogLinear, Schedule
from unmask.diffusion.time_sampling import AnyTimes, UniformTimes, stratified_uniform
from unmask.ops.chunked_head import WeightedNLL
from unmask.ops.packing import scatter_rows
from unmask.types import Batch, LogX, Queries, RowFn, Vocab


@dataclass(frozen=True)
class LossSum:
    """The loss of some rows of a global batch, as a sum: sums of all micro-batches and ranks add up.

    The trainer minimizes (sum of totals)/(sum of counts).
    """

    total: Tensor
    """The summed loss, a scalar with a gradient."""
    count: Tensor | float
    """What the sum is over: tokens, examples."""
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Further sums by name, the same names in every call; logged as (sum over the global batch)/(sum of counts)."""

    def stack(self, device: torch.device) -> Tensor:
        """[total, count, *metrics] in float64, without gradient: what is summed over micro-batches and ranks."""
        values = (self.total, self.count, *self.metrics.values())
        return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device).detach() for v in values])


class Objective(ABC):
    """A loss, and how a network trained with it turns logits into log-probabilities."""

    @classmethod
    def recommended(cls) -> Self:
        """The settings that `unmask train --objective NAME` takes."""
        return cls()

    @property
    @abstractmethod
    def process(self) -> Process:
        """How text is corrupted; where that is learned, `process_with` is the process of a model."""

    def new_parameters(self, vocab: Vocab) -> nn.Module | None:
        """What is learned beside the network, such as a schedule, before the first step; None where nothing is.

        The model holds it: it is trained, averaged, sharded, saved and moved with the network's weights.
        """
        return None

    def process_with(self, parameters: nn.Module | None) -> Process:
        """The process of a model with these parameters."""
        return self.process

    def describe_parameters(
        self, parameters: nn.Module | None, vocab: Vocab, spell: Callable[[int], str]
    ) -> dict[str, str]:
        """What was learned, for cards and reports; `spell` gives the text of a token id."""
        return {}

    @property
    @abstractmethod
    def normalized(self) -> bool:
        """Whether exp(`log_probs`) sums to one in every row, over all tokens but the mask."""

    @property
    def is_softmax(self) -> bool:
        """Whether `log_probs` is `subs`: a log-softmax over the clean tokens."""
        return False

    @property
    def depends_on_alpha(self) -> bool:
        """Whether `log_probs` depends on alpha, and so on the time."""
        return False

    @property
    def end_marks(self) -> int:
        """Places that the network reads behind those of a text."""
        return 0

    @property
    def why_no_likelihood(self) -> str | None:
        """The reason why the model has no likelihood, as a sentence; None where `bound` is a bound on -log p."""
        return None

    @property
    def bound(self) -> Objective:
        """The objective whose `token_nll` bounds -log p of a network that this one trained: itself, unless its loss is
        no bound. Evaluation uses this one only."""
        return self

    def in_steps(self, steps: int | None) -> Objective | None:
        """The bound for samplers of `steps` steps (None: of infinitely many); None where there is no such bound."""
        return None

    def build_denoiser(self, config: Any) -> Any:
        """The denoiser of a `ModelConfig`, where the network reads something else than tokens; None: the usual one."""
        return None

    def training_loss(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> LossSum:
        """What training minimizes: the nats of all tokens that are not prompt or padding."""
        batch = batch.checked(denoiser.vocab)
        nll = self.token_nll(denoiser, batch, generator)
        return LossSum(nll.sum(), batch.loss_mask.sum())

    @abstractmethod
    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        """log_x [N, V] of logits [N, V]; alpha [N, 1] is P(a token is visible), and 0 at visible positions."""

    @abstractmethod
    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        """Nats [B, L], zero outside the loss mask.

        The expectation of their sum is an upper bound of -log p(x), unless `bound` is another objective.

        The generator must be in the same state on every rank and for every micro-batch of a step: the noise of
        a row then depends only on the step and on the row's index in the global batch.
        """


@dataclass(frozen=True, kw_only=True)
class MaskedObjective(Objective):
    """Masked diffusion in continuous time; subclasses define `log_probs`."""

    schedule: Schedule = LogLinear()
    """The noise schedule alpha(t): P(a token is visible at time t)."""
    times: AnyTimes = UniformTimes()
    """The distribution that training times are drawn from."""
    exact_mask_counts: bool = False
    """Mask exactly k of n tokens, k uniform, instead of each one independently: the same bound with less variance,
    for networks without time conditioning."""

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise ValueError(
                f"a schedule must be one of unmask.diffusion.schedule's, as in Cosine(); got {self.schedule!r}"
            )
        if self.exact_mask_counts and self.depends_on_alpha:
            raise ValueError(
                "exact_mask_counts needs an objective whose parameterization does not depend on alpha: MDLM or SEDD"
            )

    @property
    def process(self) -> Masking | BlockMasking:
        return Masking(self.schedule)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        return self.nll_and_level(denoiser, batch, generator)[0]

    def nll_and_level(
        self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B L"], NoiseLevel]:
        """`token_nll`, and the noise levels that were drawn, [B, 1] or [B, L].

        Noise is drawn and applied on the host, so that the number of masked tokens need not be read from the device.
        """
        batch = batch.checked(denoiser.vocab)
        level, uniform = self.sample_level(denoiser, batch.on_host, generator)
        z = corrupt_batch(self.process, batch.on_host, level.alpha, uniform, denoiser.vocab)
        return self.weighted_nll(denoiser, batch, z, level), level.to(batch.tokens.device)

    def weighted_nll(
        self, denoiser: DenoiserLike, batch: Batch, z: Int[Tensor, "B L"], level: NoiseLevel
    ) -> Float[Tensor, "B L"]:
        """weight (-log x_theta(x | z) + penalty) [B, L] at the masked positions of z, zero elsewhere.

        `z` and `level` are on the host.
        """
        device = batch.tokens.device
        masked = Queries.from_host(((z == denoiser.vocab.mask_id) & batch.on_host.loss_mask).numpy(), device)
        level = level.to(device)
        row_fn = self.row_fn(masked.gather(batch.tokens), level, masked)
        nll = self.query(denoiser, batch, z.to(device), level.t, masked, row_fn)
        return scatter_rows(nll, masked)

    def sample_level(
        self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator
    ) -> tuple[NoiseLevel, Tensor]:
        """A noise level for each sequence, and uniform numbers [B, L]: a token is masked where they are < 1 - alpha."""
        return self.level_of(denoiser, sample_noise(denoiser, batch, self.times, generator), batch.loss_mask)

    def level_of(
        self, denoiser: DenoiserLike, noise: Noise, loss_mask: Bool[Tensor, "B L"]
    ) -> tuple[NoiseLevel, Float[Tensor, "B L"]]:
        """The noise level and the uniform numbers of `noise`."""
        if not self.exact_mask_counts:
            level, uniform = self.noise_level(noise.u), noise.uniform
        elif denoiser.time_independent:
            level = fixed_count_level(self.schedule, noise.u, loss_mask)
            uniform = rank_uniform(noise.uniform, loss_mask)
        else:
            raise ValueError("exact_mask_counts needs a network that is not conditioned on time")
        return level._replace(weight=level.weight * noise.importance), uniform

    def noise_level(self, u: Float64[Tensor, " B #L"]) -> NoiseLevel:
        """The noise level of u in [0, 1)."""
        return continuous_level(self.schedule, u)

    def row_fn(self, x: Tensor, level: NoiseLevel, positions: Queries) -> RowFn:
        """weight (-log_x[x] + penalty(S, r)) for the tokens x [N] at the positions."""
        weighted_nll = WeightedNLL(x, positions.gather(level.weight))
        if self.normalized:
            return weighted_nll
        unmask_prob = None if level.unmask_prob is None else positions.gather(level.unmask_prob)

        def with_penalty(log_x: LogX, indices: slice | Tensor) -> Tensor:
            r = None if unmask_prob is None else unmask_prob[indices]
            penalty = _normalization_penalty(log_x.exp().sum(-1), r)
            return weighted_nll(log_x, indices) + weighted_nll.weight[indices].to(penalty) * penalty

        return with_penalty

    def query(
        self,
        denoiser: DenoiserLike,
        batch: Batch,
        z: Int[Tensor, "B L"],
        t: Float[Tensor, " B #L"],
        positions: Queries,
        row_fn: RowFn,
    ) -> Float[Tensor, " N"]:
        """`row_fn` [N] of the network's prediction at the positions of z."""
        return denoiser(z, t, positions, batch.context, row_fn=row_fn)


@dataclass(frozen=True, kw_only=True)
class SteppedObjective(MaskedObjective):
    """Masked diffusion in continuous time or, if `steps` is set, in T steps.

    The weight of T steps is T (alpha_s - alpha_t)/(1 - alpha_t).
    """

    steps: int | None = None
    """The number of steps T; None for continuous time."""
    carry_over: bool = True
    """Copy visible tokens. If off, the network is also trained to predict the visible tokens of z_0 (samplers
    copy them in any case)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None:
            validate_steps(self.steps)
            if self.exact_mask_counts:
                raise ValueError("exact_mask_counts is for continuous time; leave steps out")

    def in_steps(self, steps: int | None) -> Objective:
        """Infinitely many are MAX_STEPS, which draw like fewer: the bound is then about a millionth of a nat higher."""
        return replace(self, steps=steps or MAX_STEPS, exact_mask_counts=False)

    def noise_level(self, u: Float64[Tensor, " B #L"]) -> NoiseLevel:
        return super().noise_level(u) if self.steps is None else discrete_level(self.schedule, self.steps, u)

    def nll_and_level(
        self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator
    ) -> tuple[Float[Tensor, "B L"], NoiseLevel]:
        batch = batch.checked(denoiser.vocab)
        nll, level = super().nll_and_level(denoiser, batch, generator)
        return (nll if self.carry_over else nll + self._visible_nll(denoiser, batch, generator)), level

    def _visible_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        """-log x_theta(x | z_0) [B, L] at the visible tokens of z_0."""
        host, device = batch.on_host, batch.tokens.device
        u, _, uniform = sample_noise(denoiser, host, self.times, generator)
        t = torch.zeros_like(u)
        z = corrupt_batch(self.process, host, self.schedule.alpha(t), uniform, denoiser.vocab)
        visible = Queries.from_host(((z != denoiser.vocab.mask_id) & host.loss_mask).numpy(), device)
        row_fn = WeightedNLL.unweighted(visible.gather(batch.tokens))
        return scatter_rows(self.query(denoiser, batch, z.to(device), t.to(device), visible, row_fn), visible)


class Noise(NamedTuple):
    """The random numbers of a batch, float64."""

    u: Float64[Tensor, "B num_blocks"]
    """In [0, 1), one per sequence or block, [B, num_blocks]: the noise level."""
    importance: Float64[Tensor, "B num_blocks"]
    """The importance weight of u, 1/density."""
    uniform: Float64[Tensor, "B L"]
    """In [0, 1), one per token, [B, L]: which tokens are corrupted."""


def sample_noise(
    denoiser: DenoiserLike, batch: Batch, times: AnyTimes, generator: torch.Generator, num_blocks: int = 1
) -> Noise:
    """Noise for a batch; ValueError for ids outside the vocabulary, and for the mask id anywhere but on padding."""
    batch.checked(denoiser.vocab)
    draws, seeds = [], []
    for part, part_generator in batch.split_by_noise(generator):
        offset = float(torch.rand((), generator=part_generator, dtype=torch.float64))
        seed = int(torch.randint(2**62, (), generator=part_generator))
        draws.append(stratified_uniform(part, offset, num_blocks))
        seeds += [derive_seed(seed, part.row_offset + row) for row in range(len(part.tokens))]
    u, importance = times.importance_sample(torch.cat(draws))
    uniform = seeded_uniform(seeds, batch.tokens.shape[1])
    device = batch.tokens.device
    return Noise(u.to(device), importance.to(device), uniform.to(device))


def corrupt_batch(
    process: NoiseProcess, batch: Batch, alpha: Float[Tensor, " B #L"], uniform: Float[Tensor, "B L"], vocab: Vocab
) -> Int[Tensor, "B L"]:
    """z_t ~ q(. | x) [B, L] on the tokens of the loss mask; prompts and padding stay."""
    return torch.where(batch.loss_mask, process.corrupt(batch.tokens, alpha, uniform, vocab), batch.tokens)


def _normalization_penalty(mass: Float[Tensor, " N"], unmask_prob: Float[Tensor, " N"] | None) -> Float[Tensor, " N"]:
    """((1 - r)/r) log((1 - r)/(1 - r S)): S - 1 for an infinitesimal step, 0 for a certain one (r = 1)."""
    if unmask_prob is None:
        return mass - 1
    small, certain = unmask_prob < 1e-9, unmask_prob >= 1
    r, mass64 = torch.where(small | certain, 0.5, unmask_prob).double(), mass.double()
    between = (1 - r) / r * (torch.log1p(-r) - torch.log1p(-r * mass64))
    return torch.where(certain, 0, torch.where(small, mass64 - 1, between)).to(mass)
