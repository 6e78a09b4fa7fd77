"""Forward processes q(z_t | x) and their reverse posteriors q(z_s | z_t, x).

For any noise distribution pi: q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) pi), and with
alpha_{t|s} = alpha_t / alpha_s

    q(z_s | z_t, x)  is proportional to
        [alpha_{t|s} z_t + (1 - alpha_{t|s}) (pi^T z_t) 1] * [alpha_s x + (1 - alpha_s) pi].

Masking puts all of pi on the mask; uniform noise spreads it over the clean tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from unmask.diffusion.schedule import LogLinear, Schedule
from unmask.diffusion.token_schedule import TokenPowers
from unmask.types import Vocab


class Process(ABC):
    """How text is corrupted for training, and so in which order it can be generated.

    Code that depends on the process reads these attributes instead of asking for its class.
    """

    title: ClassVar[str]
    """What a model of this process is called in messages: "masked diffusion"."""
    default_sampler: ClassVar[str]
    """The sampler that reverses the process as it is defined: its name in a table, or package.module:Name."""
    is_continuous: ClassVar[bool] = False
    """Whether the noisy text is vectors instead of tokens, which guidance and servers cannot change or join."""
    predicts_ratios: ClassVar[bool] = False
    """Whether a network's rows are the logarithms of p(z with v)/p(z), and not those of the clean token's distribution,
    which guidance changes and servers report."""
    is_left_to_right: ClassVar[bool] = False
    """Whether there is no noise: tokens depend on those before them only, and likelihoods are exact."""
    has_masks: ClassVar[bool] = False
    """Whether corrupted tokens become the mask, so that any masked sampler applies."""
    inserts_tokens: ClassVar[bool] = False
    """Whether corrupted tokens disappear, so that the length of a text, or of a hole, is generated with it."""
    block_size: int | None = None
    """Tokens per block, where blocks are generated from left to right; None where a text is one block."""

    @abstractmethod
    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """P(a token is not corrupted at time t)."""

    @abstractmethod
    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """-log alpha(t), which networks with published weights are conditioned on."""


class NoiseProcess(Process):
    """A process that corrupts each token independently with probability 1 - alpha(t)."""

    schedule: Schedule

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.schedule.alpha(t)

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.schedule.sigma(t)

    @abstractmethod
    def pi(self, vocab: Vocab) -> Float64[Tensor, " V"]:
        """The noise distribution [V]: q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) pi)."""

    @abstractmethod
    def corrupt(
        self, x: Int[Tensor, "B L"], alpha: Float[Tensor, " B #L"], uniform: Float[Tensor, "B L"], vocab: Vocab
    ) -> Int[Tensor, "B L"]:
        """z_t ~ q(. | x) [B, L] from one uniform number per token; alpha is [B, 1] or [B, L]."""


def posterior(
    z: Float[Tensor, "*N V"], x: Float[Tensor, "*N V"], pi: Float[Tensor, " V"], alpha_s: Tensor, alpha_t: Tensor
) -> Float[Tensor, "*N V"]:
    """q(z_s | z_t, x) [..., V] for z_t and x given as distributions [..., V]; `x` may be a prediction."""
    ratio = alpha_t / alpha_s
    forward = ratio * z + (1 - ratio) * (z * pi).sum(-1, keepdim=True)
    joint = forward * (alpha_s * x + (1 - alpha_s) * pi)
    return joint / joint.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Masking(NoiseProcess):
    """Each token becomes the mask, independently, and stays masked: pi = mask."""

    title = "masked diffusion"
    default_sampler = "ancestral"
    has_masks = True

    schedule: Schedule = LogLinear()
    """The probability alpha(t) that a token is not masked."""

    @property
    def inner(self) -> Masking:
        """The process within a block: the whole text is one block."""
        return self

    def pi(self, vocab: Vocab) -> Float64[Tensor, " V"]:
        return torch.nn.functional.one_hot(torch.tensor(vocab.mask_id), vocab.size).double()

    def corrupt(
        self, x: Int[Tensor, "B L"], alpha: Float[Tensor, " B #L"], uniform: Float[Tensor, "B L"], vocab: Vocab
    ) -> Int[Tensor, "B L"]:
        """z_t ~ q(. | x): masked where uniform < 1 - alpha."""
        return torch.where(uniform < 1 - alpha, vocab.mask_id, x)

    @staticmethod
    def unmask_prob(alpha_s: Float[Tensor, "*shape"], alpha_t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """P(z_s = x | z_t = mask) = (alpha_s - alpha_t) / (1 - alpha_t)."""
        return (alpha_s - alpha_t) / (1 - alpha_t).clamp(min=torch.finfo(alpha_t.dtype).tiny)


@dataclass(frozen=True)
class UniformNoise(NoiseProcess):
    """Each token is replaced by a uniformly drawn one: pi = 1/(V - 1) on the clean tokens."""

    title = "uniform noise"
    default_sampler = "uniform-ancestral"

    schedule: Schedule = LogLinear()
    """The probability alpha(t) that a token is not replaced."""

    def pi(self, vocab: Vocab) -> Float64[Tensor, " V"]:
        pi = torch.full((vocab.size,), 1 / (vocab.size - 1), dtype=torch.float64)
        pi[vocab.mask_id] = 0
        return pi

    def corrupt(
        self, x: Int[Tensor, "B L"], alpha: Float[Tensor, " B #L"], uniform: Float[Tensor, "B L"], vocab: Vocab
    ) -> Int[Tensor, "B L"]:
        """z_t ~ q(. | x): where uniform < 1 - alpha, the rest of that uniform picks the clean token."""
        share = (uniform / (1 - alpha)).nan_to_num()
        token = (share * (vocab.size - 1)).long().clamp(max=vocab.size - 2)
        return torch.where(uniform < 1 - alpha, token + (token >= vocab.mask_id), x)


@dataclass(frozen=True)
class UniformRatios(NoiseProcess):
    """The same noise, for networks that estimate how likely noisy texts are: p(z with v)/p(z) at every position."""

    title = "ratios of uniform noise"
    default_sampler = "ratio-ancestral"
    predicts_ratios = True

    schedule: Schedule = LogLinear()
    """The probability alpha(t) that a token is not replaced."""

    @property
    def inner(self) -> UniformNoise:
        """The noise."""
        return UniformNoise(self.schedule)

    def pi(self, vocab: Vocab) -> Float64[Tensor, " V"]:
        return self.inner.pi(vocab)

    def corrupt(
        self, x: Int[Tensor, "B L"], alpha: Float[Tensor, " B #L"], uniform: Float[Tensor, "B L"], vocab: Vocab
    ) -> Int[Tensor, "B L"]:
        return self.inner.corrupt(x, alpha, uniform, vocab)


@dataclass(frozen=True)
class BlockMasking(NoiseProcess):
    """Blocks of `block_size` tokens from left to right; masking within a block, given the clean blocks before it."""

    title = "block diffusion"
    default_sampler = "blockwise"
    has_masks = True

    block_size: int = field()
    """Tokens per block."""
    schedule: Schedule = LogLinear()
    """The probability alpha(t) that a token of a block is not masked."""
    from_prompt: bool = False
    """Whether blocks are counted from the end of the prompt, and not from the beginning of the text."""

    def first_block(self, prompt_length: int) -> tuple[int, int]:
        """Where the first block that is written begins, after a prompt; and how much shorter than the others the first
        block of the text is."""
        if self.from_prompt:
            return prompt_length, -prompt_length % self.block_size
        return prompt_length // self.block_size * self.block_size, 0

    @property
    def inner(self) -> Masking:
        """The process within a block."""
        return Masking(self.schedule)

    def pi(self, vocab: Vocab) -> Float64[Tensor, " V"]:
        return self.inner.pi(vocab)

    def corrupt(
        self, x: Int[Tensor, "B L"], alpha: Float[Tensor, " B #L"], uniform: Float[Tensor, "B L"], vocab: Vocab
    ) -> Int[Tensor, "B L"]:
        return self.inner.corrupt(x, alpha, uniform, vocab)


@dataclass(frozen=True, eq=False)
class PerTokenMasking(Process):
    """Masking with a schedule for each token: a token is masked, and unmasked, at times that depend on what it is.

    So a masked position says something about its token, and only samplers that follow the process as it is defined
    have the model's law: v is unmasked with probability (alpha_v(s) - alpha_v(t))/(1 - alpha_v(t)) exp(log_x[v]).
    """

    title = "masked diffusion with a schedule for each token"
    default_sampler = "ancestral"
    has_masks = True

    read_schedule: Callable[[], TokenPowers] | None = None
    """Reads the schedules, which may be learned; None in the process of an objective, which has no tokens yet."""

    @property
    def schedule(self) -> TokenPowers:
        """The schedules as they are now. (Where weights are sharded, all ranks must read them together.)"""
        if self.read_schedule is None:
            raise ValueError("the schedules of tokens belong to a model: read them from its process, model.process")
        return self.read_schedule()

    @property
    def inner(self) -> PerTokenMasking:
        """The process within a block: the whole text is one block."""
        return self

    def alpha(self, t: Float[Tensor, "*shape"]) -> NoReturn:
        raise ValueError(
            "each token has an alpha of its own, so there is none, and no sigma, to condition a network on"
        )

    def sigma(self, t: Float[Tensor, "*shape"]) -> NoReturn:
        self.alpha(t)


@dataclass(frozen=True)
class Insertion(Process):
    """Tokens become masks and then disappear (FlexMDM): text is generated by inserting masks and unmasking them.

    In a reverse step from t to s, with r = (alpha_s - alpha_t)/(1 - alpha_t), each token that is missing is inserted as
    a mask with probability r, and each mask is unmasked with probability r. So at t a token is

        missing with probability p = 1 - alpha(t),   a mask with -p log p,   visible with 1 - p + p log p.
    """

    title = "masked diffusion that inserts tokens"
    default_sampler = "insertion"
    inserts_tokens = True

    schedule: Schedule = LogLinear()
    """The probability alpha(t) that a token is there, masked or visible."""

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """P(a token is there, masked or visible, at time t)."""
        return self.schedule.alpha(t)

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.schedule.sigma(t)

    @staticmethod
    def states(alpha: Float[Tensor, " B #L"], uniform: Float[Tensor, "B L"]) -> tuple[Tensor, Tensor]:
        """Which tokens are there, and which of them are visible, as booleans [B, L], from one uniform number each."""
        p = 1 - alpha
        there = uniform >= p
        return there, there & (uniform >= p - torch.xlogy(p, p))


@dataclass(frozen=True)
class LeftToRight(Process):
    """No noise: each token depends on those before it, and text is generated from left to right."""

    title = "autoregression"
    default_sampler = "autoregressive"
    is_left_to_right = True

    def alpha(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return torch.ones_like(t)

    def sigma(self, t: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return torch.zeros_like(t)


def shift_right(tokens: Int[Tensor, "B L"], vocab: Vocab) -> Int[Tensor, "B L"]:
    """The input [B, L] from which a causal network predicts `tokens`: one place later, the mask id in front."""
    return torch.cat([torch.full_like(tokens[:, :1], vocab.mask_id), tokens[:, :-1]], dim=1)
