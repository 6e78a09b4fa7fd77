"""Exact draws from categorical distributions over large vocabularies.

One float64 uniform number per row and the inverse of the cumulative sum in float64: exact to 2^-53. The cumulative
sum is taken over groups of tokens first, and then within one group only. (Gumbel noise made from float32 uniform
numbers, as in published code, cannot draw tokens rarer than about 1e-7, and makes all rare tokens too rare; see
tests/diffusion/test_categorical.py.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from unmask.config import is_number
from unmask.types import LogX, NonFiniteError

DAMAGED = (
    "the network's log-probabilities are NaN or give no token any probability;"
    " its weights are damaged or its input is out of range"
)
"""What is wrong where no token can be drawn."""

_GROUP_SIZE = 128
"""Tokens per group."""


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from its distribution: temperature, then top-k, then top-p."""

    temperature: float = 1.0
    """Divides the log-probabilities; 0 takes the most probable token, 1 samples the model as it is."""
    top_k: int | None = None
    """Sample from the k most probable tokens only."""
    top_p: float | None = None
    """Sample from the smallest set of most probable tokens that together reach p only."""

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0 <= self.temperature < torch.inf:
            raise ValueError(
                f"temperature must be 0 (the most probable token) or a finite number above; got {self.temperature!r}"
            )
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must keep at least 1 token; got {self.top_k!r}")
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p!r}")

    @classmethod
    def if_given(cls, temperature: float | None, top_k: int | None, top_p: float | None) -> SamplingParams | None:
        """These numbers, if there are any."""
        if temperature is None and top_k is None and top_p is None:
            return None
        return cls(1.0 if temperature is None else temperature, top_k, top_p)

    def probabilities(self, log_x: LogX) -> Float[Tensor, "N V"]:
        """Weights [N, V] to draw from; each row has the same sum as exp(log_x), and is to be summed in float64."""
        if self == SamplingParams():  # exp in float32 has a relative error of 1e-7
            return log_x.exp()
        log_x = log_x.double()
        mass = log_x.exp().sum(-1, keepdim=True)
        if self.temperature == 0:
            best = log_x.argmax(-1, keepdim=True)
            return torch.zeros_like(log_x).scatter_(-1, best, 1.0) * mass
        p = ((log_x - log_x.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is not None and self.top_k < p.shape[-1]:
            values, where = p.topk(self.top_k)
            p = torch.zeros_like(p).scatter_(-1, where, values)
        if self.top_p is not None:
            p = _filter_top_p(p / p.sum(-1, keepdim=True), self.top_p)
        return p / p.sum(-1, keepdim=True) * mass


def _filter_top_p(p: Float[Tensor, "N V"], top_p: float) -> Float[Tensor, "N V"]:
    ordered, where = p.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, where, before < top_p)
    return p.where(kept, 0)


def sample_inverse_cdf(
    weights: Float[Tensor, "N V"], uniform: Float64[Tensor, " N"], *, check: bool = True
) -> Int64[Tensor, " N"]:
    """Indices [N]: i with probability weights[n, i] / sum of weights[n], from one uniform per row.

    A row whose sum is NaN, infinite or 0 raises NonFiniteError; without `check`, which must read a value back
    from the device, its index is -1.
    """
    groups = _group_sums(weights)
    cumulative = groups.cumsum(-1)
    total = cumulative[:, -1:]
    finite = (total > 0) & (total < torch.inf)  # and not NaN
    if check and not bool(finite.all()):
        raise NonFiniteError(DAMAGED)
    group, rest = _search_cdf(cumulative, uniform[:, None] * total)
    tokens = _GROUP_SIZE * group + torch.arange(_GROUP_SIZE, device=group.device)
    last = weights.shape[-1] - 1
    within = weights.gather(-1, tokens.clamp(max=last)).double().masked_fill_(tokens > last, 0)
    token, _ = _search_cdf(within.cumsum(-1), rest)
    return torch.where(finite, _GROUP_SIZE * group + token, -1)[:, 0]


def _group_sums(weights: Float[Tensor, "N V"]) -> Float64[Tensor, "N groups"]:
    """float64 [N, groups]; the last group may be smaller."""
    whole = weights.shape[-1] // _GROUP_SIZE * _GROUP_SIZE
    first, last = weights[:, :whole], weights[:, whole:]
    sums = [torch.unflatten(first, -1, (-1, _GROUP_SIZE))] if whole else []
    sums += [last[:, None]] if whole < weights.shape[-1] else []
    return torch.cat([each.sum(-1, dtype=torch.float64) for each in sums], -1)


def _search_cdf(
    cumulative: Float64[Tensor, "N n"], value: Float64[Tensor, "N 1"]
) -> tuple[Int64[Tensor, "N 1"], Float64[Tensor, "N 1"]]:
    """The first index [N, 1] whose cumulative sum [N, n] is above the value [N, 1], and the value minus the
    sum before it. A value that was rounded up to the last sum is taken as just below it."""
    total = cumulative[:, -1:]
    value = torch.minimum(value, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, value, right=True)
    before = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp(min=0)), 0)
    return index, value - before
