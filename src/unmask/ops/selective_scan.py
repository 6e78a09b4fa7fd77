"""The selective scan: the linear recurrence inside a Mamba block, whose decay and input depend on the token.

Time is cut into chunks. For a chunk the decays and inputs of all its steps are computed at once, then each step is
a single multiply-add of the whole state, which is contiguous in memory, and the outputs of all its steps are again
one product. Nothing is divided and no logarithm is summed, so a decay may be as strong as it likes. Between the
passes only the states between chunks are kept; the backward pass computes those inside a chunk again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unmask.ops.switch import fast_paths_enabled

_CHUNK_STEPS = 32
"""Steps of a chunk: every chunk keeps one state for the backward pass."""

_CHUNK_STATES = 1 << 19
"""Entries of the states that are computed at a time, so that they stay in the cache; as many rows as that allows."""


def selective_scan_reference(
    u: Float[Tensor, "B L D"],
    dt: Float[Tensor, "B L D"],
    a: Float[Tensor, "D N"],
    b: Float[Tensor, "B L N"],
    c: Float[Tensor, "B L N"],
    *,
    state: Float[Tensor, "B D N"] | None = None,
    restart: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B D N"]]:
    """y_l = <s_l, c_l> with s_l = exp(dt_l a) s_(l-1) + dt_l u_l b_l, and the last state s_L.

    Before the first step the state is `state`, or zero. Where `restart` is true, s_(l-1) counts as zero. A step with
    dt = 0 leaves the state as it is. All of it is computed in float32 at least.
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    with torch.autocast(u.device.type, enabled=False):
        u, dt, a, b, c = (tensor.to(dtype) for tensor in (u, dt, a, b, c))
        decay = torch.exp(torch.einsum("bld,dn->bdln", dt, a))
        if restart is not None:
            decay = decay * ~restart[:, None, :, None]
        inputs = torch.einsum("bld,bln->bdln", dt * u, b)
        s = u.new_zeros(len(u), *a.shape) if state is None else state.to(dtype)
        outputs = []
        for decay_l, input_l, c_l in zip(decay.unbind(2), inputs.unbind(2), c.unbind(1), strict=True):
            s = decay_l * s + input_l
            outputs.append(torch.einsum("bdn,bn->bd", s, c_l))
        return torch.stack(outputs, 1), s


def selective_scan(
    u: Float[Tensor, "B L D"],
    dt: Float[Tensor, "B L D"],
    a: Float[Tensor, "D N"],
    b: Float[Tensor, "B L N"],
    c: Float[Tensor, "B L N"],
    *,
    state: Float[Tensor, "B D N"] | None = None,
    restart: Bool[Tensor, "B L"] | None = None,
) -> tuple[Float[Tensor, "B L D"], Float[Tensor, "B D N"]]:
    """`selective_scan_reference` chunk by chunk, with one pass over the state for each step."""
    if not fast_paths_enabled():
        return selective_scan_reference(u, dt, a, b, c, state=state, restart=restart)
    if state is None:
        state = torch.zeros(u.shape[0], *a.shape, dtype=torch.promote_types(u.dtype, torch.float32), device=u.device)
    inputs = (u, dt, a.mT, b, c, state.mT, restart)
    if torch.compiler.is_exporting():
        return _exported_scan(*inputs)
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(_requires_grad(x) for x in inputs)):
        y, last, _ = _scan_op(*inputs)
    else:
        y, last, _ = _forward(*inputs, keep_starts=False)
    return y, last.mT


def _exported_scan(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, restart: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan as a loop that graphs of any length can hold, such as `Scan` of ONNX."""
    from torch._higher_order_ops.scan import scan

    keep = torch.ones_like(u[:, :, :1]) if restart is None else (~restart[:, :, None]).to(u)

    def step(s: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        dt_l, x_l, b_l, c_l, keep_l = inputs
        s = torch.exp(dt_l[:, None] * a) * keep_l[:, None] * s + x_l[:, None] * b_l[..., None]
        return s, (s * c_l[..., None]).sum(1)

    last, y = scan(step, state, tuple(x.transpose(0, 1) for x in (dt, dt * u, b, c, keep)))
    return y.transpose(0, 1), last.mT


def _requires_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


# An operator of its own: the compiler would otherwise unroll its loop over the steps.
@torch.library.custom_op("unmask::selective_scan", mutates_args=())
def _scan_op(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, restart: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states before each chunk [chunks, B, N, D]; a [N, D] and states [B, N, D]."""
    return _forward(u, dt, a, b, c, state, restart, keep_starts=True)


@torch.library.custom_op("unmask::selective_scan_backward", mutates_args=())
def _scan_backward_op(
    u: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    restart: Tensor | None,
    starts: Tensor,
    grad_y: Tensor,
    grad_last: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of u, dt, a, b, c and the first state."""
    return _backward(_Steps.of(u, dt, a, b, c, restart), starts, grad_y, grad_last)


@_scan_op.register_fake
def _scan_shapes(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, state = inputs[0], inputs[5]
    dtype, chunks = torch.promote_types(u.dtype, torch.float32), -(-u.shape[1] // _CHUNK_STEPS)
    y = u.new_empty(u.shape[1], u.shape[0], u.shape[2], dtype=dtype).transpose(0, 1)
    return y, state.new_empty(state.shape, dtype=dtype), state.new_empty(chunks, *state.shape, dtype=dtype)


@_scan_backward_op.register_fake
def _scan_backward_shapes(*inputs: Tensor) -> tuple[Tensor, ...]:
    u, dt, a, b, c, _, starts, _, grad_last = inputs
    u, dt, b, c = (starts.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1) for x in (u, dt, b, c))
    return u, dt, starts.new_empty(a.shape), b, c, torch.empty_like(grad_last)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    u, dt, a, b, c, state, restart = inputs
    ctx.set_materialize_grads(False)  # nobody needs that of the states before the chunks
    ctx.save_for_backward(u, dt, a, b, c, restart, output[2])
    ctx.dtypes = [tensor.dtype for tensor in (u, dt, a, b, c, state)]


def _compute_gradients(ctx: Any, grad_y: Tensor | None, grad_last: Tensor | None, _: Tensor | None) -> Any:
    u, dt, a, b, c, restart, starts = ctx.saved_tensors
    grad_y = starts.new_zeros(u.shape) if grad_y is None else grad_y
    grad_last = starts.new_zeros(starts.shape[1:]) if grad_last is None else grad_last
    gradients = _scan_backward_op(u, dt, a, b, c, restart, starts, grad_y, grad_last)
    return *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)), None


_scan_op.register_autograd(_compute_gradients, setup_context=_save_inputs)


@dataclass(frozen=True)
class _Steps:
    """What a scan is given, time first."""

    u: Float[Tensor, "L B D"]
    dt: Float[Tensor, "L B D"]
    a: Float[Tensor, "N D"]
    b: Float[Tensor, "L B N"]
    c: Float[Tensor, "L B N"]
    restart: Bool[Tensor, "L B"] | None

    @classmethod
    def of(cls, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, restart: Tensor | None) -> _Steps:
        """From tensors whose first dimension is the batch."""
        dtype = torch.promote_types(u.dtype, torch.float32)
        u, dt, b, c = (tensor.transpose(0, 1) for tensor in (u, dt, b, c))
        return cls(u, dt, a.to(dtype).contiguous(), b, c, None if restart is None else restart.t())

    def part(self, steps: slice, rows: slice) -> _Steps:
        """Some steps of some rows, in the type of `a`."""
        u, dt, b, c = (tensor[steps, rows].to(self.a.dtype) for tensor in (self.u, self.dt, self.b, self.c))
        return _Steps(u, dt, self.a, b, c, None if self.restart is None else self.restart[steps, rows])

    def blocks(self) -> Iterator[slice]:
        """Blocks of rows that are computed one after another."""
        length, batch = self.u.shape[:2]
        size = max(1, _CHUNK_STATES // (min(_CHUNK_STEPS, max(1, length)) * self.a.numel()))
        return (slice(first, min(first + size, batch)) for first in range(0, batch, size))

    def chunks(self) -> list[slice]:
        """Chunks of steps."""
        length = len(self.u)
        return [slice(first, min(first + _CHUNK_STEPS, length)) for first in range(0, length, _CHUNK_STEPS)]


class _Workspace:
    """Decays and states of one chunk at a time."""

    def __init__(self, steps: _Steps, rows: slice) -> None:
        shape = (min(_CHUNK_STEPS, len(steps.u)), rows.stop - rows.start, *steps.a.shape)
        self.decay, self.states = steps.a.new_empty(shape), steps.a.new_empty(shape[0] + 1, *shape[1:])
        self.decay_at, self.state_at = self.decay.unbind(), self.states.unbind()
        self.log2_base = steps.a / math.log(2)

    def run(self, part: _Steps, state: Float[Tensor, "B N D"]) -> Float[Tensor, "T B N D"]:
        """The states before and after each step, of which the first is `state`."""
        length, before = len(part.u), self.state_at[0].copy_(state)  # first: it may be the last of these states
        decay, inputs = self.decay[:length], self.states[1 : length + 1]
        # Powers of two: torch's exp2 takes a third of the time of its exp on AMD's CPUs.
        torch.mul(part.dt[:, :, None], self.log2_base, out=decay).exp2_()
        if part.restart is not None:
            decay.masked_fill_(part.restart[:, :, None, None], 0)
        torch.mul((part.dt * part.u)[:, :, None], part.b[..., None], out=inputs)
        for decay_at, state_at in zip(self.decay_at[:length], self.state_at[1:], strict=False):
            before = state_at.addcmul_(decay_at, before)
        return self.states[: length + 1]


@torch.no_grad()
def _forward(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, restart: Tensor | None, *, keep_starts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs [B, L, D], the last state, and the states before each chunk [chunks, B, N, D], if they are kept."""
    steps = _Steps.of(u, dt, a, b, c, restart)
    y, last = steps.a.new_empty(steps.u.shape), state.to(steps.a.dtype, copy=True)
    starts = steps.a.new_empty(len(steps.chunks()) if keep_starts else 0, *state.shape)
    for rows in steps.blocks():
        with torch.autocast(u.device.type, enabled=False):
            last[rows] = _forward_block(steps, rows, last[rows], y, starts)
    return y.transpose(0, 1), last, starts


def _forward_block(steps: _Steps, rows: slice, s: Tensor, y: Tensor, starts: Tensor) -> Tensor:
    """Write y and, if there is room, `starts` of a block of rows; its last state."""
    work = _Workspace(steps, rows)
    for number, chunk in enumerate(steps.chunks()):
        part = steps.part(chunk, rows)
        if len(starts):
            starts[number, rows] = s
        states = work.run(part, s)
        y[chunk, rows] = _contract_states(part.c, states[1:])
        s = states[-1]
    return s


class _Gradients:
    """Gradients of what a scan was given, time first."""

    def __init__(self, steps: _Steps, starts: Tensor) -> None:
        self.u, self.dt = (steps.a.new_empty(steps.u.shape) for _ in range(2))
        self.b, self.c = (steps.a.new_empty(steps.b.shape) for _ in range(2))
        self.a, self.state = torch.zeros_like(steps.a), starts.new_empty(starts.shape[1:])

    def in_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Those of u, dt, a, b, c and the first state, the batch first."""
        u, dt, b, c = (gradient.transpose(0, 1) for gradient in (self.u, self.dt, self.b, self.c))
        return u, dt, self.a, b, c, self.state


@torch.no_grad()
def _backward(
    steps: _Steps, starts: Tensor, grad_y: Tensor, grad_last: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of u, dt, a, b, c and the first state."""
    gradients = _Gradients(steps, starts)
    for rows in steps.blocks():
        gradients.state[rows] = _backward_block(steps, rows, starts, grad_y.transpose(0, 1), grad_last[rows], gradients)
    return gradients.in_order()


def _backward_block(
    steps: _Steps, rows: slice, starts: Tensor, grad_y: Tensor, carry: Tensor, gradients: _Gradients
) -> Tensor:
    """Write the gradients of a block of rows; that of its first state.

    With g_l the gradient of s_l: g_l = c_l grad_y_l + exp(dt_(l+1) a) g_(l+1), and that of dt_l a is
    h_l = g_l exp(dt_l a) s_(l-1).
    """
    work = _Workspace(steps, rows)
    buffer = torch.empty_like(work.decay)
    for number, chunk in reversed(list(enumerate(steps.chunks()))):
        part, here = steps.part(chunk, rows), (chunk, rows)
        states, slope = work.run(part, starts[number, rows]), grad_y[here]
        g, decay = buffer[: len(slope)], work.decay[: len(slope)]
        gradients.c[here] = _contract_channels(states[1:], slope)
        torch.mul(slope[:, :, None], part.c[..., None], out=g)
        carry = _run_backward(g, decay, carry)
        grad_input = _contract_states(part.b, g)
        gradients.b[here] = _contract_channels(g, part.dt * part.u)
        gradients.u[here] = grad_input * part.dt
        h = decay.mul_(states[:-1]).mul_(g)
        gradients.dt[here] = torch.mul(h, part.a, out=g).sum(2).addcmul_(grad_input, part.u)
        gradients.a += h.mul_(part.dt[:, :, None]).sum((0, 1))
    return carry


def _run_backward(
    g: Float[Tensor, "L B N D"], decay: Float[Tensor, "L B N D"], carry: Float[Tensor, "B N D"]
) -> Float[Tensor, "B N D"]:
    """g_l += exp(dt_(l+1) a) g_(l+1) from the last step to the first; what is passed on to the step before."""
    g_at, decay_at = g.unbind(), decay.unbind()
    after = g_at[-1].add_(carry)
    for step in range(len(g) - 2, -1, -1):
        after = g_at[step].addcmul_(decay_at[step + 1], after)
    return decay_at[0] * after


def _contract_states(weight: Float[Tensor, "L B N"], states: Float[Tensor, "L B N D"]) -> Float[Tensor, "L B D"]:
    """sum_n weight_n states_n."""
    return torch.matmul(weight[:, :, None], states)[:, :, 0]


def _contract_channels(states: Float[Tensor, "L B N D"], weight: Float[Tensor, "L B D"]) -> Float[Tensor, "L B N"]:
    """sum_d states_d weight_d; the other order of the product takes eight times as long."""
    return torch.matmul(weight[:, :, None], states.mT)[:, :, 0]
