"""The output head on N rows in chunks: the logits [N, V] are the largest tensor of a network, and never exist whole.

A row function reduces the log-probabilities of a chunk to one value per row, such as a token's negative
log-likelihood. In training its gradient is computed while the chunk's logits exist. That is the gradient of the
*sum* over the rows, which is what a loss is; if the rows turn out to have different weights in the backward
pass, the chunks are computed a second time. A row function may have parameters of its own, which get gradients too.

The gradient of a negative log-likelihood, where log_x is a log-softmax, has a closed form and is computed in
place: [N, V] is written three times instead of nine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from unmask.ops._quantized import times_weight
from unmask.ops.linear import cast_like_autocast, linear
from unmask.ops.packing import is_expanded_scalar
from unmask.ops.switch import fast_paths_enabled
from unmask.types import LogX, RowFn, Vocab

_MAX_CHUNK_LOGITS = 1 << 24
"""Logits that exist at a time: 64 MB of float32."""

_MAX_CACHED_WEIGHTS = 1 << 21
"""Entries of a 16-bit weight gradient that are added to the 32-bit one while they are in the cache."""

_MAX_CACHED_LOGITS = 1 << 21
"""Logits that are turned into probabilities at a time, so that they stay in the cache."""


class _LogProbs(Protocol):
    """How logits become log-probabilities of the clean token: an objective."""

    @property
    def is_softmax(self) -> bool:
        """Whether `log_probs` is a log-softmax over all tokens but the mask."""
        ...

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        """log_x [N, V] of logits [N, V]; alpha [N, 1] is the probability that a token is not masked."""
        ...


class _LogitsFn(Protocol):
    """One value per row of logits, for a chunk of the rows. It may overwrite the logits."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Tensors other than the logits that the values depend on, and whose gradients are wanted."""
        ...

    def __call__(self, logits: Float[Tensor, "N V"], indices: slice) -> Shaped[Tensor, " N *values"]:
        """Values [n] for logits [n, V], which are the rows `indices` of all rows."""
        ...

    def value_and_grad(
        self, logits: Float[Tensor, "N V"], indices: slice, grad_output: Float[Tensor, " N"] | None
    ) -> _ValueAndGrad:
        """The same values, with their gradients; `grad_output` weights the rows in those of the parameters."""
        ...


class _ValueAndGrad(NamedTuple):
    """Values [n] of n rows, with d values[i] / d logits[i] = scale[i] * grad_logits[i] [V]."""

    values: Float[Tensor, " N"]
    grad_logits: Float[Tensor, "N V"]
    scale: Float[Tensor, " N"]
    grad_parameters: tuple[Tensor, ...] = ()
    """d (sum over i of grad_output[i] values[i]) / d parameter, for each parameter."""


@runtime_checkable
class _ParametricRowFn(Protocol):
    """A row function that is learned: its values depend on tensors beside log_x, which get gradients."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """These tensors."""
        ...

    def with_parameters(self, parameters: tuple[Tensor, ...]) -> RowFn:
        """The same row function of other tensors."""
        ...


def _chunked_head_reference(
    hidden: Float[Tensor, "N width"],
    weight: Float[Tensor, "V width"],
    bias: Float[Tensor, " V"] | None,
    logits_fn: _LogitsFn,
) -> Shaped[Tensor, " N *values"]:
    """logits_fn(hidden weight^T + bias) [N], from all logits at once; sums are of float32, but under autocast."""
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtype = hidden.dtype if autocast else torch.promote_types(hidden.dtype, torch.float32)
    return logits_fn(linear(hidden.to(dtype), weight, bias), slice(0, len(hidden)))


def chunked_head(
    hidden: Float[Tensor, "N width"],
    weight: Float[Tensor, "V width"],
    bias: Float[Tensor, " V"] | None,
    logits_fn: _LogitsFn,
) -> Shaped[Tensor, " N *values"]:
    """`_chunked_head_reference` in chunks of rows.

    Under autocast products are in its type, and their sums in that of the weights. Without
    it sums are of float32, and a head of 16 bits is never copied to float32 (`linear`).
    """
    if not fast_paths_enabled():
        return _chunked_head_reference(hidden, weight, bias, logits_fn)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        apply: Any = _ChunkedHead.apply
        values: Tensor = apply(hidden, weight, bias, logits_fn, *logits_fn.parameters)
        return values
    rows, matrix, offset = _cast_all(hidden, weight, bias)
    chunks = _chunks(hidden, weight)
    exact = not torch.is_autocast_enabled(hidden.device.type)
    return torch.cat([logits_fn(linear(rows[chunk], matrix, offset, float32_sums=exact), chunk) for chunk in chunks])


@dataclass(frozen=True)
class WeightedNLL:
    """The row function -weight * log_x[x], for tokens x [N] and weights [N] of all rows."""

    x: Int[Tensor, " N"]
    """int64 [N]: the clean tokens."""
    weight: Float[Tensor, " N"]
    """[N]: the loss weights."""

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Float[Tensor, " N"]:
        nll = -log_x.gather(-1, self.x[indices, None])[:, 0]
        return self.weight[indices].to(nll) * nll

    @classmethod
    def unweighted(cls, x: Int[Tensor, " N"]) -> WeightedNLL:
        """Every token has weight 1."""
        return cls(x, torch.ones_like(x, dtype=torch.float32))


@dataclass(frozen=True)
class LogitsRowFn:
    """A row function, which takes log_x, as the function of logits that `chunked_head` takes.

    It is row_fn(objective.log_probs(logits, alpha)), with a gradient.
    """

    objective: _LogProbs
    """How logits become log_x."""
    alpha: Float[Tensor, "N 1"]
    """[N, 1]: the probability that a token is not masked."""
    vocab: Vocab
    """The token ids."""
    row_fn: RowFn
    """The function of log_x."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Those of the row function that are learned."""
        return self.row_fn.parameters if isinstance(self.row_fn, _ParametricRowFn) else ()

    def __call__(self, logits: Float[Tensor, "N V"], indices: slice) -> Shaped[Tensor, " N *values"]:
        return self.row_fn(log_probs_inplace(self.objective, logits, self.alpha[indices], self.vocab), indices)

    def value_and_grad(
        self, logits: Float[Tensor, "N V"], indices: slice, grad_output: Float[Tensor, " N"] | None
    ) -> _ValueAndGrad:
        """In closed form for a weighted NLL of a log-softmax; by autograd otherwise."""
        if self.objective.is_softmax and isinstance(self.row_fn, WeightedNLL):
            nll = _nll_and_grad_(logits, self.row_fn.x[indices], self.vocab)
            scale = self.row_fn.weight[indices].to(nll)
            return _ValueAndGrad(scale * nll, logits, scale)
        leaf = logits.detach().requires_grad_()
        leaves = tuple(each.detach().requires_grad_() for each in self.parameters)
        row_fn = self.row_fn.with_parameters(leaves) if isinstance(self.row_fn, _ParametricRowFn) else self.row_fn
        with torch.enable_grad():
            values = replace(self, row_fn=row_fn)(leaf, indices)
        (grad_logits,) = torch.autograd.grad(values, leaf, torch.ones_like(values), retain_graph=bool(leaves))
        weights = torch.ones_like(values) if grad_output is None else grad_output.to(values)
        grads = torch.autograd.grad(values, leaves, weights) if leaves else ()
        return _ValueAndGrad(values.detach(), grad_logits, torch.ones_like(values), grads)


def log_probs_inplace(
    objective: _LogProbs, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab
) -> LogX:
    """objective.log_probs(logits, alpha, vocab), written over the logits where that is possible."""
    if not objective.is_softmax or logits.requires_grad or not fast_paths_enabled():
        return objective.log_probs(logits, alpha, vocab)
    logits32 = _float32_without_mask(logits, vocab)
    return torch.log_softmax(logits32, -1, out=logits32)


def to_float32(logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Logits in float32 at least: 16 bits cannot represent the probabilities of rare tokens."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _nll_and_grad_(logits: Float[Tensor, "N V"], x: Int[Tensor, " N"], vocab: Vocab) -> Float[Tensor, " N"]:
    """-log softmax(logits)[x] [n]; the logits are overwritten by its gradient, softmax(logits) - onehot(x).

    log sum exp(y) = max y - log max softmax(y): one softmax and two maxima cost less than a log-softmax and
    its exponential.
    """
    size = max(1, _MAX_CACHED_LOGITS // logits.shape[1])
    losses = []
    for chunk, token in zip(torch.split(logits, size), torch.split(x[:, None], size), strict=True):
        logits32 = _float32_without_mask(chunk, vocab)
        largest, target = logits32.amax(-1), logits32.gather(-1, token)[:, 0]
        grad = torch.softmax(logits32, -1, out=logits32)
        losses.append(largest - grad.amax(-1).log() - target)
        grad.scatter_add_(-1, token, torch.full_like(token, -1, dtype=grad.dtype))
        if grad.dtype != chunk.dtype:
            chunk.copy_(grad)
    return torch.cat(losses)


def _float32_without_mask(logits: Float[Tensor, "N V"], vocab: Vocab) -> Float[Tensor, "N V"]:
    """Logits of the clean tokens; float32 logits are overwritten."""
    logits32 = to_float32(logits)
    logits32[:, vocab.mask_id] = -torch.inf
    return logits32


def _cast_all(
    hidden: Float[Tensor, "N width"], weight: Float[Tensor, "V width"], bias: Float[Tensor, " V"] | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return (
        cast_like_autocast(hidden),
        cast_like_autocast(weight),
        None if bias is None else cast_like_autocast(bias),
    )


def _chunks(hidden: Float[Tensor, "N width"], weight: Float[Tensor, "V width"]) -> Iterator[slice]:
    """Chunks of equal size, so that the last is not small; one chunk even if there are no rows."""
    rows = len(hidden)
    size = max(1, -(-rows // max(1, -(-rows * len(weight) // _MAX_CHUNK_LOGITS))))
    return (slice(first, min(first + size, rows)) for first in range(0, max(1, rows), size))


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "N width"],
        weight: Float[Tensor, "V width"],
        bias: Float[Tensor, " V"] | None,
        logits_fn: _LogitsFn,
        *_parameters: Tensor,
    ) -> Shaped[Tensor, " N *values"]:
        values, ctx.gradients = _values_and_grads(hidden, weight, bias, logits_fn, None)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.logits_fn = logits_fn
        return values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad_output,) = grad_outputs
        gradients = ctx.gradients
        ctx.gradients = None  # they are scaled in place, so a second backward pass must compute them again
        if gradients is None or not _are_equal(grad_output):
            hidden, weight, bias = ctx.saved_tensors
            _, gradients = _values_and_grads(hidden, weight, bias, ctx.logits_fn, grad_output)
        elif len(grad_output):
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(grad_output[0])
        hidden_weight_bias, of_parameters = gradients[:3], gradients[3:]
        return *hidden_weight_bias, None, *of_parameters


def _are_equal(grad_output: Tensor) -> bool:
    """Whether all rows have the same weight. Only weights that are not expanded from one number are read."""
    if not len(grad_output) or is_expanded_scalar(grad_output):
        return True
    low, high = torch.stack(grad_output.aminmax()).tolist()
    return bool(low == high)


@torch.no_grad()
def _values_and_grads(
    hidden: Float[Tensor, "N width"],
    weight: Float[Tensor, "V width"],
    bias: Float[Tensor, " V"] | None,
    logits_fn: _LogitsFn,
    grad_output: Float[Tensor, " N"] | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Values [N], and the gradients of sum_i grad_output[i] values[i] (weights of 1 if None): of hidden states,
    weight, bias, and the parameters of the row function."""
    values = []
    grad_parameters = [torch.zeros_like(parameter) for parameter in logits_fn.parameters]
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.empty_like(weight) if weight.requires_grad else None
    grad_bias = None if bias is None else torch.zeros_like(bias)
    rows, matrix, offset = _cast_all(hidden, weight, bias)
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in _chunks(hidden, weight):
            inputs = rows[chunk]
            weights = None if grad_output is None else grad_output[chunk]
            value, grad_logits, scale, grads = logits_fn.value_and_grad(linear(inputs, matrix, offset), chunk, weights)
            values.append(value)
            for total, grad in zip(grad_parameters, grads, strict=True):
                total += grad
            scale = (scale if weights is None else scale * weights).to(grad_logits.dtype)[:, None]
            grad_hidden[chunk] = scale * times_weight(grad_logits, matrix)
            if grad_bias is not None:
                grad_bias += (grad_logits.t() @ scale)[:, 0]
            if grad_weight is not None:
                _accumulate_product(grad_weight, grad_logits.t(), scale * inputs, overwrite=chunk.start == 0)
    return torch.cat(values), (grad_hidden, grad_weight, grad_bias, *grad_parameters)


def _accumulate_product(
    total: Float[Tensor, "V width"], a: Float[Tensor, "V N"], b: Float[Tensor, "N width"], overwrite: bool
) -> None:
    """total += a b, or total = a b if it is to be overwritten."""
    if total.dtype != a.dtype:  # products in 16 bits are summed in 32 bits
        size = max(1, _MAX_CACHED_WEIGHTS // total.shape[1])
        for part, rows in zip(torch.split(total, size), torch.split(a, size), strict=True):
            part.copy_(rows @ b) if overwrite else part.add_(rows @ b)
    elif overwrite:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, out=total)
