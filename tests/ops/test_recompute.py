"""Values computed again for the backward pass instead of being kept."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.ops.recompute import recompute_scope, recomputed

WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Counted:
    """A function that knows how often it was called, and what it gave last."""

    def __init__(self) -> None:
        self.calls, self.last = 0, lambda: torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = x.exp() + 1
        self.last = weakref.ref(y)  # type: ignore[assignment]
        return y


def some() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_a_value_is_not_kept_but_computed_again() -> None:
    counted, x, weight = Counted(), some(), WEIGHT.clone().requires_grad_()
    with recompute_scope():
        y = recomputed(counted, x) @ weight
    assert counted.last() is None
    y.sum().backward()
    assert counted.calls == 2
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, (x.exp() + 1).sum(0)[:, None].expand(4, 4))


def test_backward_may_be_called_twice() -> None:
    counted, weight = Counted(), WEIGHT.clone().requires_grad_()
    with recompute_scope():
        y = (recomputed(counted, some()) @ weight).sum()
    y.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    y.backward()
    assert torch.equal(weight.grad, 2 * once)
    assert counted.calls == 3


@pytest.mark.parametrize("seen", [lambda y: y[1:], lambda y: y.t().contiguous().t(), lambda y: y.view(2, 6)])
def test_views_of_it_are_found_in_it(seen: object) -> None:
    grads = []
    for spared in (True, False):
        weight = torch.full((), 2.0, requires_grad=True)
        if spared:
            with recompute_scope():
                y = seen(recomputed(Counted(), some())) * weight  # type: ignore[operator]
        else:
            y = seen(Counted()(some())) * weight  # type: ignore[operator]
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        grads.append(weight.grad)
    assert torch.equal(*grads)


def test_what_was_changed_since_is_kept_as_it_is() -> None:
    counted, weight = Counted(), WEIGHT.clone().requires_grad_()
    x = some()
    with recompute_scope():
        y = recomputed(counted, x)
        y.mul_(3)
        (y @ weight).sum().backward()
    assert counted.calls == 1
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 3 * (x.exp() + 1).sum(0)[:, None].expand(4, 4))


def test_inputs_changed_since_are_found() -> None:
    x = some() * 1
    with recompute_scope():
        out = recomputed(lambda x: x + 1, x) @ WEIGHT.clone().requires_grad_()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


def test_a_view_of_an_input_is_as_good() -> None:
    x = some()
    with recompute_scope():
        y = recomputed(lambda x: x[1:], x)
        out = (y * y).sum() + (x * x).sum()
    out.backward()
    assert x.grad is not None
    expected = 2 * x.detach() + torch.cat([torch.zeros(1, 4), 2 * x.detach()[1:]])
    torch.testing.assert_close(x.grad, expected)


def test_places_taken_again_are_not_confused() -> None:
    """Values live as long as the context, so that nothing else can stand where they stand."""
    x, weight = some(), WEIGHT.clone().requires_grad_()
    outs = []
    for number in range(20):
        with recompute_scope():
            y = recomputed(lambda x, number=number: x * number, x)
            outs.append(y @ weight)
            del y
            outs.append((x + number) @ weight)
    torch.stack(outs).sum().backward()
    assert weight.grad is not None
    total = sum(number * x + x + number for number in range(20))
    assert isinstance(total, Tensor)
    torch.testing.assert_close(weight.grad, total.detach().sum(0)[:, None].expand(4, 4))


def test_without_it_nothing_is_computed_again() -> None:
    counted, weight = Counted(), WEIGHT.clone().requires_grad_()
    (recomputed(counted, some()) @ weight).sum().backward()
    with torch.no_grad(), recompute_scope():
        recomputed(counted, some())
    assert counted.calls == 2


def test_autocast_is_what_it_was() -> None:
    grads = []
    for spared in (True, False):
        weight, x = WEIGHT.clone().requires_grad_(), some()
        with torch.autocast("cpu", torch.bfloat16):
            if spared:
                with recompute_scope():
                    y = F.linear(recomputed(lambda x: F.linear(x, torch.eye(4)), x), weight)
            else:
                y = F.linear(F.linear(x, torch.eye(4)), weight)
        y.float().sum().backward()
        grads += [weight.grad, x.grad]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[3])
