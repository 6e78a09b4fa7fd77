"""State-space networks: the layers of Mamba, in one direction or both, and what such networks share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unmask.backbones._embedding import Embedding
from unmask.backbones._recurrent_cache import RecurrentCacheView
from unmask.backbones.base import Backbone, Capabilities
from unmask.backbones.block import modulated_norm
from unmask.backbones.state_space import SSMConfig, StateSpace
from unmask.context import Context
from unmask.ops.linear import Linear, cast_like_autocast
from unmask.ops.recompute import recompute_scope, recomputed
from unmask.ops.selective_scan import selective_scan
from unmask.types import Positions, Times, Tokens, Vocab


@dataclass(frozen=True)
class SequenceLayout:
    """Where a recurrence must not pass on what it read: over padding, and from one document to the next."""

    valid: Tensor | None = None
    """bool [B, n]: False on padding."""
    document_ids: Tensor | None = None
    """int64 [B, k + n]: the documents of the call's tokens, and of the k tokens before them that were read before."""
    num_before: int = 0
    """k."""

    @classmethod
    def of(cls, context: Context, h: Tensor, kernel_size: int) -> SequenceLayout:
        """The layout of a call with embeddings h [B, n, width]."""
        start = 0 if context.cache is None else context.cache.start
        merged = None if context.cache is None else context.cache.valid_on_host
        if merged is not None:  # calls that are merged have neither padding of their own nor documents
            return cls(torch.from_numpy(merged).to(h.device))
        before, valid, documents = min(start, kernel_size - 1), context.valid, context.document_ids
        length = h.shape[1]
        return cls(
            None if valid is None else valid[:, start : start + length],
            None if documents is None else documents[:, start - before : start + length],
            0 if documents is None else before,
        )

    def flipped(self) -> SequenceLayout:
        """The same for tokens in reverse order."""
        valid, documents = (None if x is None else x.flip(1) for x in (self.valid, self.document_ids))
        return SequenceLayout(valid, documents)

    def doubled(self) -> SequenceLayout:
        """Of all sequences, followed by the same sequences in reverse order."""
        flipped = self.flipped()
        pairs = ((self.valid, flipped.valid), (self.document_ids, flipped.document_ids))
        valid, documents = (None if x is None or y is None else torch.cat([x, y]) for x, y in pairs)
        return SequenceLayout(valid, documents)

    def without_padding(self, u: Tensor) -> Tensor:
        """u [B, n, D] with zeros on padding, as before the first token of a text."""
        return u if self.valid is None else u * self.valid[..., None]

    def restart(self) -> Tensor | None:
        """bool [B, n]: whether a token begins a document; None if no token does but a text's first."""
        if self.document_ids is None:
            return None
        changed = self.document_ids[:, 1:] != self.document_ids[:, :-1]
        return F.pad(changed, (1, 0))[:, self.num_before :]

    def same_document(self, offset: int) -> Tensor | None:
        """bool [B, n, 1]: whether the token `offset` places before is of the same document; None if all are."""
        if self.document_ids is None or offset == 0:
            return None
        earlier = F.pad(self.document_ids, (offset, 0), value=-1)[:, self.num_before : -offset]
        return (earlier == self.document_ids[:, self.num_before :])[..., None]


class SelectiveSSM(nn.Module):
    """One direction of a block: y = scan(v) + D v with v = silu(conv(u)); dt, B and C of the scan depend on v.

    Names and shapes of parameters are those of the published code.
    """

    def __init__(self, width: int, dt_rank: int, config: StateSpace) -> None:
        super().__init__()
        self.dt_rank = dt_rank
        self.conv1d = nn.Conv1d(width, width, config.kernel_size, groups=width)
        self.x_proj = Linear(width, dt_rank + 2 * config.state_size, bias=False)
        self.dt_proj = nn.Linear(dt_rank, width)
        self.A_log = nn.Parameter(torch.empty(width, config.state_size))
        self.D = nn.Parameter(torch.ones(width))
        self._init_weights(config)

    @torch.no_grad()
    def _init_weights(self, config: StateSpace) -> None:
        """A = -1 ... -N in every channel; softplus(dt's bias) is uniform in its logarithm."""
        self.A_log.copy_(torch.arange(1, config.state_size + 1).log())
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        dt = (low + (high - low) * torch.rand(len(self.D))).exp().clamp(min=1e-4)
        self.dt_proj.bias.copy_(dt + (-torch.expm1(-dt)).log())

    def forward(
        self, u: Tensor, layout: SequenceLayout, cache: RecurrentCacheView | None = None, layer_index: int = 0
    ) -> Tensor:
        """y [B, n, width] of u [B, n, width], which is zero on padding."""
        window, state = (None, None) if cache is None else cache.read(layer_index)
        taps = self.conv1d.kernel_size[0]
        before = u.new_zeros(u.shape[0], taps - 1, u.shape[2]) if window is None else window.to(u.dtype)
        around = torch.cat([before, u], 1)
        v = F.silu(self._convolve(around, layout))
        r, b, c = self.x_proj(v).split([self.dt_rank, *2 * (self.A_log.shape[1],)], -1)
        dt = F.softplus(_upcast(F.linear(r, self.dt_proj.weight)) + _upcast(self.dt_proj.bias))
        if layout.valid is not None:
            dt = dt * layout.valid[..., None]  # without time nothing is forgotten, and nothing read
        a = -_upcast(self.A_log).exp()
        y, state = selective_scan(v, dt, a, b, c, state=state, restart=layout.restart())
        if cache is not None:
            cache.write(layer_index, cache.window(around, taps - 1), state)
        return y + self.D * v

    def _convolve(self, around: Tensor, layout: SequenceLayout) -> Tensor:
        """bias + sum over i of weight_i u_(l - K + 1 + i), over `around` with K - 1 tokens before the first."""
        weight, bias = self.conv1d.weight[:, 0], self.conv1d.bias
        taps = weight.shape[1]
        length = around.shape[1] - taps + 1
        assert bias is not None
        v: Tensor = bias.to(around.dtype)
        for tap in range(taps):
            part, same = around[:, tap : tap + length], layout.same_document(taps - 1 - tap)
            part = part if same is None else part * same
            v = torch.addcmul(v, part, weight[:, tap].to(around.dtype))
        return v


class MambaMixer(nn.Module):
    """W_out (y silu(g)) with (u, g) = W_in x and y = ssm(u).

    In both directions, y = ssm(u) + reversed(ssm'(reversed u)): the published networks have the same W_in and W_out
    for both. With `multiply`, the outputs of the directions are multiplied instead.
    """

    def __init__(self, config: SSMConfig, *, bidirectional: bool, multiply: bool = False) -> None:
        super().__init__()
        sizes = config.state_space
        inner, rank = sizes.expand * config.width, sizes.dt_rank or -(-config.width // 16)
        self.multiply = multiply
        self.in_proj = Linear(config.width, 2 * inner, bias=False)
        self.ssm = SelectiveSSM(inner, rank, sizes)
        self.reverse_ssm = SelectiveSSM(inner, rank, sizes) if bidirectional else None
        self.out_proj = Linear(inner, config.width, bias=False)
        with torch.no_grad():
            self.out_proj.weight.div_(config.depth**0.5)

    def forward(
        self, x: Tensor, layout: SequenceLayout, cache: RecurrentCacheView | None = None, layer_index: int = 0
    ) -> Tensor:
        """x [B, n, width]."""
        u, gate = self.in_proj(x).chunk(2, dim=-1)
        u = layout.without_padding(u)
        y = self.ssm(u, layout, cache, layer_index)
        if self.reverse_ssm is None:
            return self._project(y, gate)
        reverse = self.reverse_ssm(u.flip(1), layout.flipped()).flip(1)
        if self.multiply:
            return self._project(y, gate) * self._project(reverse, gate)
        return self._project(y + reverse, gate)

    def _project(self, y: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = self.out_proj(recomputed(_gated, y, gate))
        return out


class MambaBlock(nn.Module):
    """x + mixer(norm(x)); with time conditioning x + gate mixer(norm(x) (1 + scale) + shift)."""

    def __init__(self, config: SSMConfig, mixer: MambaMixer, time_width: int | None = None, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mixer = mixer
        self.dropout = nn.Dropout(dropout)
        self.modulation = None if time_width is None else zero_linear(time_width, 3 * config.width)

    def forward(
        self,
        x: Tensor,
        layout: SequenceLayout,
        time_emb: Tensor | None = None,
        cache: RecurrentCacheView | None = None,
        layer_index: int = 0,
    ) -> Tensor:
        """x [B, n, width]."""
        shift = scale = gate = None
        if self.modulation is not None and time_emb is not None:
            shift, scale, gate = self.modulation(time_emb).chunk(3, dim=-1)
        normed = recomputed(modulated_norm, self.norm, x, shift, scale)
        mixed: Tensor = self.dropout(self.mixer(normed, layout, cache, layer_index))
        return x + (mixed if gate is None else gate * mixed)


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts at zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class SSMBackbone(Backbone):
    """A network of Mamba blocks with RMSNorm before the head."""

    def __init__(self, config: SSMConfig, vocab: Vocab, blocks: Sequence[MambaBlock]) -> None:
        super().__init__()
        self.embedding = Embedding(vocab.size, config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self._kernel_size = config.state_space.kernel_size

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def undecayed_parameters(self) -> Sequence[nn.Parameter]:
        """The embedding, and the logarithms of A: weight decay would pull all decays of the state together."""
        logs = [module.A_log for module in self.modules() if isinstance(module, SelectiveSSM)]
        return [*self.embedding.parameters(), *logs]

    def embed(self, tokens: Tokens) -> Tensor:
        embeddings: Tensor = self.embedding(tokens)
        return embeddings

    def encode(self, h: Tensor, t: Times, positions: Positions | None = None, context: Context = Context()) -> Tensor:
        layout = SequenceLayout.of(context, h, self._kernel_size)
        x = self.run_blocks(h, layout, None, context)
        hidden: Tensor = self.norm(select_rows(x, positions))
        return hidden

    def run_blocks(
        self, x: Tensor, layout: SequenceLayout, time_emb: Tensor | None = None, context: Context = Context()
    ) -> Tensor:
        """The output of the last block [B, n, width]."""
        cache = context.cache
        if cache is not None and not isinstance(cache, RecurrentCacheView):
            raise ValueError(
                f"this network caches a recurrent state, and was given a {type(cache).__name__}:"
                " take a cache from its own new_cache()"
            )
        for index, block in enumerate(self.layers):
            x = self._run_block(block, x, layout, time_emb, cache, index)
        if cache is not None:
            cache.advance(x.shape[1])
        return x

    def _run_block(self, block: nn.Module, *inputs: object) -> Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(block, *inputs, use_reentrant=False)
            return out
        with recompute_scope():
            out = block(*inputs)
            return out


def select_rows(x: Tensor, positions: Positions | None) -> Tensor:
    """x [B, L, width] at the queried positions [N, width]; all of it without them."""
    if positions is None:
        return x
    return x[positions if isinstance(positions, Tensor) else tuple(positions)]


def describe_blocks(config: SSMConfig, kind: str) -> dict[str, Any]:
    """What cards and reports say."""
    state = config.state_space.state_size
    return {"network": f"{config.depth} {kind} of width {config.width} with {state} states a channel"}


def _gated(y: Tensor, gate: Tensor) -> Tensor:
    return cast_like_autocast(y * F.silu(gate))


def _upcast(x: Tensor) -> Tensor:
    """x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
