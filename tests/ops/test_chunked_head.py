"""The chunked head gives the same values as the whole one, and the gradients of autograd."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.objectives import MDLM
from unmask.ops import chunked_head as head
from unmask.ops.chunked_head import LogitsRowFn, _chunked_head_reference, _ValueAndGrad, chunked_head
from unmask.types import Vocab

ROWS, WIDTH, VOCAB = 37, 6, 11


@pytest.fixture(params=[1, 50, 10_000])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Logits at a time, and as many weights of a gradient in 16 bits."""
    monkeypatch.setattr(head, "_MAX_CHUNK_LOGITS", request.param)
    monkeypatch.setattr(head, "_MAX_CACHED_WEIGHTS", request.param)
    return int(request.param)


def inputs(rows: int = ROWS, *, frozen: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for tensor in tensors:
        tensor.requires_grad_(not frozen or tensor is tensors[0])
    return tensors[0], tensors[1], tensors[2]


class Surprise:
    """A price that differs from line to line."""

    parameters: tuple[Tensor, ...] = ()

    def __call__(self, logits: Tensor, indices: slice) -> Tensor:
        targets = torch.arange(10_000)[indices] % VOCAB
        weights = torch.arange(1.0, 10_001.0, dtype=torch.float64)[indices]
        return weights * F.cross_entropy(logits.double(), targets, reduction="none")

    def value_and_grad(self, logits: Tensor, indices: slice, _grad_output: Tensor | None) -> _ValueAndGrad:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            said = self(leaf, indices)
            (slope,) = torch.autograd.grad(said.sum(), leaf)
        scale = torch.arange(2.0, len(said) + 2.0)
        return _ValueAndGrad(said.detach(), slope / scale[:, None].to(slope), scale)


surprise = Surprise()


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _chunked_head_reference(hidden, weight, bias, surprise)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rates", ["one", "half", "mixed"])
def test_values_and_gradients_are_those_of_autograd(at_once: int, biased: bool, rates: str) -> None:
    ours, theirs = inputs(), inputs()
    rate = {"one": torch.ones(ROWS), "half": torch.full((ROWS,), 0.5), "mixed": torch.rand(ROWS)}[rates]
    said = chunked_head(ours[0], ours[1], ours[2] if biased else None, surprise)
    expected = plain(theirs[0], theirs[1], theirs[2] if biased else None)
    torch.testing.assert_close(said, expected)
    said.backward(rate.double())
    expected.backward(rate.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_second_backward_pass_is_as_right_as_the_first(at_once: int) -> None:
    ours, theirs = inputs(), inputs()
    total, expected = chunked_head(*ours, surprise).sum(), plain(*theirs).sum()
    for loss in (total, expected):
        (3 * loss).backward(retain_graph=True)
        loss.backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_frozen_head_lets_gradients_through(at_once: int) -> None:
    ours, theirs = inputs(frozen=True), inputs(frozen=True)
    chunked_head(*ours, surprise).sum().backward()
    plain(*theirs).sum().backward()
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    assert ours[1].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_closed_form_is_the_gradient_of_a_weighted_nll(at_once: int, dtype: torch.dtype, weighted: bool) -> None:
    x = torch.arange(ROWS) % (VOCAB - 1)
    row_fn = head.WeightedNLL(x, torch.rand(ROWS)) if weighted else head.WeightedNLL.unweighted(x)
    logits_fn = head.LogitsRowFn(MDLM(), torch.zeros(ROWS, 1), Vocab(VOCAB, VOCAB - 1), row_fn)
    results = []
    for function in (chunked_head, _chunked_head_reference):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs()]
        values = function(leaves[0], leaves[1], leaves[2], logits_fn)
        values.sum().backward()
        results.append([values.detach(), *(leaf.grad for leaf in leaves)])
    close = {"atol": 0.1, "rtol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(results[0], results[1], **close)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(at_once: int, rows: int) -> None:
    hidden, weight, bias = inputs(rows)
    said = chunked_head(hidden, weight, bias, surprise)
    assert said.shape == (rows,)
    said.sum().backward()
    assert weight.grad is not None
    assert bool((weight.grad != 0).any()) == (rows > 0)
    with torch.no_grad():
        assert chunked_head(hidden, weight, bias, surprise).shape == (rows,)


def test_no_more_logits_exist_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_MAX_CHUNK_LOGITS", 5 * VOCAB)
    sizes = []

    class Watched(Surprise):
        def value_and_grad(self, logits: Tensor, indices: slice, grad_output: Tensor | None) -> _ValueAndGrad:
            sizes.append(len(logits))
            return super().value_and_grad(logits, indices, grad_output)

    chunked_head(*inputs(), Watched()).sum().backward()
    assert max(sizes) <= 5
    assert sum(sizes) == ROWS


def test_mixed_precision_sums_in_the_weights_precision(at_once: int) -> None:
    ours, theirs = (tuple(tensor.detach().float().requires_grad_() for tensor in inputs()) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        said, expected = chunked_head(*ours, surprise), plain(*theirs)
    said.sum().backward()
    expected.sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, other.grad, rtol=0.03, atol=2.0)  # of sums in the hundreds


@dataclass(frozen=True)
class WeightedMass:
    """sum_v w_v exp(log_x[v]) with learned w."""

    w: Tensor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.w,)

    def with_parameters(self, parameters: tuple[Tensor, ...]) -> WeightedMass:
        return WeightedMass(*parameters)

    def __call__(self, log_x: Tensor, _indices: slice | Tensor) -> Tensor:
        return log_x.exp() @ self.w


@pytest.mark.parametrize("rates", ["equal", "different"])
def test_parameters_of_a_row_function_get_their_gradients(at_once: int, rates: str) -> None:
    """Also if rows have different weights in the backward pass, and the chunks are computed again."""
    weights = torch.ones(ROWS) if rates == "equal" else torch.arange(1.0, ROWS + 1)
    gradients = []
    for function in (chunked_head, _chunked_head_reference):
        w = torch.linspace(0.5, 2.0, VOCAB, dtype=torch.float64).requires_grad_()
        hidden, weight, bias = inputs()
        row_fn = LogitsRowFn(MDLM(), torch.zeros(ROWS, 1), Vocab(VOCAB, 4), WeightedMass(w))
        values = function(hidden, weight, bias, row_fn)
        gradients.append(torch.autograd.grad((3 * weights * values).sum(), [w, hidden, weight, bias]))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)
    assert gradients[0][0].abs().sum() > 0
