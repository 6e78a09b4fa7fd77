"""Matrices of 8 or 4 bits: each group of weights in a row has a scale of its own.

    8 bits: w = scale q,         q from -127 to 127
    4 bits: w = scale q + least, q from 0 to 15

Products expand a few rows at a time, while they are in the cache, and multiply them as any others
(`unmask.ops.linear`). That is exact for these weights, needs no kernel, and works on every device. With 32 rows of
input or more it is also faster on a CPU than torch's own kernels for such weights (docs/decisions/0031).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

Bits: TypeAlias = Literal[8, 4]

DEFAULT_GROUP_SIZE = 64
"""Weights that share a scale: 4.5 bits for each weight of 4, 8.25 for each of 8."""
_MAX_CACHED_WEIGHTS = 1 << 22
"""Weights that are expanded at a time, so that they stay in the cache."""
_MAX_ROUNDED_WEIGHTS = 1 << 22
"""Weights that are rounded at a time, in float32."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [outputs, width] of few bits; its rows are expanded when they are needed."""

    codes: Shaped[Tensor, "outputs bytes"]
    """int8 [outputs, width]; or uint8 [outputs, width/2], the first half of a group in the low four bits."""
    scale: Float[Tensor, "outputs groups"]
    """bfloat16."""
    least: Float[Tensor, "outputs groups"] | None = None
    """bfloat16: the smallest weight of each group of 4 bits; None for 8 bits."""

    @property
    def shape(self) -> torch.Size:
        """[outputs, width]."""
        outputs, size = self.codes.shape
        return torch.Size([outputs, size if self.least is None else 2 * size])

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def tensors(self) -> list[Tensor]:
        """Codes, scales and offsets."""
        return [each for each in (self.codes, self.scale, self.least) if each is not None]

    def __getitem__(self, rows: slice) -> QuantizedMatrix:
        least = None if self.least is None else self.least[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], least=least)

    def to(self, dtype: torch.dtype) -> Float[Tensor, "outputs width"]:
        """The weights as numbers."""
        (outputs, width), groups = self.shape, self.scale.shape[1]
        weights = torch.empty(outputs, groups, width // groups, dtype=dtype, device=self.device)
        scale = self.scale[..., None].to(dtype)
        if self.least is None:
            weights.copy_(self.codes.view(outputs, groups, -1))
            return weights.mul_(scale).view(outputs, width)
        codes = self.codes.view(outputs, groups, -1)
        half = codes.shape[-1]
        weights[..., :half].copy_(codes & 15)
        weights[..., half:].copy_(codes >> 4)
        return weights.mul_(scale).add_(self.least[..., None].to(dtype)).view(outputs, width)  # addcmul is slower


Weight: TypeAlias = Tensor | QuantizedMatrix
"""A matrix, in whatever it is stored."""


def group_size_for(width: int, wanted: int, bits: Bits) -> int | None:
    """The largest group, up to the wanted size, that divides a row evenly; None if 4 bits cannot: a byte holds two."""
    step = 2 if bits == 4 else 1
    sizes = (size for size in range(min(wanted, width), 0, -1) if width % size == 0 and size % step == 0)
    return next(sizes, None)


def quantized_nbytes(shape: torch.Size, bits: Bits, group_size: int) -> int | None:
    """Bytes of a matrix of this shape; None if it cannot be divided into groups."""
    outputs, width = shape
    size = group_size_for(width, group_size, bits)
    return None if size is None else outputs * (width * bits // 8 + 2 * (width // size) * (1 if bits == 8 else 2))


def quantize(weight: Float[Tensor, "outputs width"], bits: Bits, group_size: int) -> QuantizedMatrix:
    """The nearest matrix of few bits: scales are rounded first, so that codes make up for their rounding."""
    outputs, width = weight.shape
    encode, dtype = (_encode_8, torch.int8) if bits == 8 else (_encode_4, torch.uint8)
    codes = torch.empty(outputs, width * bits // 8, dtype=dtype, device=weight.device)
    scale, least = (weight.new_empty(outputs, width // group_size, dtype=torch.bfloat16) for _ in range(2))
    size = max(1, _MAX_ROUNDED_WEIGHTS // width)
    for rows in (slice(first, first + size) for first in range(0, outputs, size)):
        groups = weight[rows].detach().float().view(-1, width // group_size, group_size)
        codes[rows], scale[rows], least[rows] = encode(groups)
    return QuantizedMatrix(codes, scale, None if bits == 8 else least)


def _encode_8(groups: Float[Tensor, "rows groups size"]) -> tuple[Tensor, Tensor, Tensor]:
    scale = _positive(groups.abs().amax(-1) / 127)
    codes = (groups / scale[..., None].float()).round_().clamp_(-127, 127)
    return codes.to(torch.int8).flatten(1), scale, torch.zeros_like(scale)


def _encode_4(groups: Float[Tensor, "rows groups size"]) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(-1), groups.amax(-1)
    least, scale = low.bfloat16(), _positive((high - low) / 15)
    codes = ((groups - least[..., None].float()) / scale[..., None].float()).round_().clamp_(0, 15)
    low_half, high_half = codes.to(torch.int8).view(torch.uint8).chunk(2, dim=-1)
    return (low_half | high_half << 4).flatten(1), scale, least


def _positive(scale: Tensor) -> Tensor:
    """In bfloat16; where all weights of a group are the same, any scale will do."""
    rounded = scale.bfloat16()
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def times_weight(y: Float[Tensor, "*rows outputs"], weight: Weight) -> Float[Tensor, "*rows width"]:
    """y weight in the type of y: the gradient of a linear layer's input."""
    if isinstance(weight, Tensor) and weight.dtype == y.dtype:
        return y @ weight
    total = y.new_zeros(*y.shape[:-1], weight.shape[1])
    for rows in row_slices(weight):
        total += y[..., rows] @ weight[rows].to(y.dtype)
    return total


def row_slices(weight: Weight) -> Iterator[slice]:
    """Rows that are expanded at a time."""
    outputs, width = weight.shape
    size = max(1, _MAX_CACHED_WEIGHTS // width)
    return (slice(first, min(first + size, outputs)) for first in range(0, outputs, size))
