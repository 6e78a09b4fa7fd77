"""Weights of 8 and 4 bits beside bfloat16: one layer by every kernel there is, and a call of a LLaDA of 1.3 billion.

    python -m benchmarks.few_bits [--rows 8 32 128 512 1024] [--lengths 32 64 128 256 512 1024] [--depth 16]

The layer is 2,048 x 10,944. `unmask` expands a slice of the weights and multiplies it; `_weight_int8pack_mm` and
`_weight_int4pack_mm_for_cpu` are torch's own kernels, and torchao's weight-only int8 is measured if it is installed.
Printed are milliseconds, the fastest of the repeats in turns, and the error of the output relative to its size, against
float32. A call asks for the logits of the last 32 positions, as `benchmarks.llada_call` does; no `--lengths` leaves it
out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unmask
from benchmarks.llada_shape import LLaDAShape, write_llada
from unmask.hardware.dtypes import DtypeName
from unmask.hardware.memory import retain_freed_memory
from unmask.ops.chunked_head import WeightedNLL
from unmask.ops.linear import DEFAULT_GROUP_SIZE, QuantizedLinear

_WIDTH, _OUTPUTS = 2048, 10_944
_DTYPES: tuple[DtypeName, ...] = ("bfloat16", "int8", "int4")
_Product = Callable[[Tensor], Tensor]


def products(weight: Tensor) -> dict[str, _Product]:
    """x weight^T by each kernel, for a weight [outputs, width] of bfloat16."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    found: dict[str, _Product] = {"bfloat16": layer}
    for bits in (8, 4):
        rounded = QuantizedLinear.from_linear(layer, bits, DEFAULT_GROUP_SIZE)
        assert rounded is not None
        found[f"int{bits}"] = rounded
    found |= {"torch int8": _torch_int8(weight), "torch int4": _torch_int4(weight)}
    if find_spec("torchao"):
        found["torchao int8"] = _torchao_int8(weight)
    return found


def _torch_int8(weight: Tensor) -> _Product:
    scale = weight.float().abs().amax(1) / 127
    codes, scale = (weight.float() / scale[:, None]).round().to(torch.int8), scale.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x, codes, scale)


def _torch_int4(weight: Tensor) -> _Product:
    groups = weight.float().view(len(weight), -1, DEFAULT_GROUP_SIZE)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.view(weight.shape), 1)
    both = torch.stack([scale, low + 8 * scale], -1).transpose(0, 1).contiguous().bfloat16()  # codes count from 8
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, DEFAULT_GROUP_SIZE, both)


def _torchao_int8(weight: Tensor) -> _Product:
    from torchao import quantization  # type: ignore[import-not-found, unused-ignore]

    layer = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
    layer[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def in_turns(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The fastest seconds of each."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats + 1):  # the first one warms up
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


@torch.inference_mode()
def compare_products(all_rows: Sequence[int], repeats: int) -> None:
    """Print milliseconds of a layer for each number of rows, and the errors of its output."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(_OUTPUTS, _WIDTH, generator=generator) * 0.02).bfloat16()
    kernels = products(weight)
    print(f"{'rows':>6}" + "".join(f"{name:>14}" for name in kernels))
    for rows in all_rows:
        x = torch.randn(rows, _WIDTH, generator=generator).bfloat16()
        best = in_turns({name: partial(kernel, x) for name, kernel in kernels.items()}, repeats)
        print(f"{rows:6}" + "".join(f"{1e3 * seconds:11.1f} ms" for seconds in best.values()), flush=True)
    print(f"{'error':>6}" + "".join(f"{error:14.2%}" for error in errors(weight, kernels).values()))


@torch.inference_mode()
def errors(weight: Tensor, kernels: Mapping[str, _Product]) -> dict[str, float]:
    """Of the outputs of random inputs, relative to their size."""
    x = torch.randn(128, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.float() @ weight.float().T
    return {name: float((kernel(x).float() - exact).norm() / exact.norm()) for name, kernel in kernels.items()}


def _call(lm: unmask.LanguageModel, inputs: tuple[Tensor, Tensor, Tensor], row_fn: WeightedNLL) -> None:
    with lm.inference_mode():
        lm.denoiser(*inputs, row_fn=row_fn)


def compare_calls(lengths: Sequence[int], depth: int, repeats: int) -> None:
    """Print seconds of a call of a LLaDA for each length, in every dtype."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_llada(Path(scratch), LLaDAShape(depth=depth))
        models: dict[str, unmask.LanguageModel] = {dtype: unmask.load(folder, dtype=dtype) for dtype in _DTYPES}
    for lm in models.values():
        lm.denoiser.to_bf16()
        lm.denoiser.prepack()
    print(f"{'tokens':>6}" + "".join(f"{name:>14}" for name in models))
    for length in lengths:
        tokens = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(0))
        asked, t = torch.arange(length)[None] >= length - 32, torch.full((1, 1), 0.5)
        nll = WeightedNLL.unweighted(tokens[asked])

        calls = {name: partial(_call, lm, (tokens, t, asked), nll) for name, lm in models.items()}
        best = in_turns(calls, repeats)
        print(f"{length:6}" + "".join(f"{seconds:12.2f} s" for seconds in best.values()), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.few_bits", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", type=int, default=[8, 32, 128, 512, 1024])
    parser.add_argument("--lengths", nargs="*", type=int, default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--depth", type=int, default=LLaDAShape.depth)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    retain_freed_memory()
    compare_products(options.rows, options.repeats)
    if options.lengths:
        compare_calls(options.lengths, options.depth, options.repeats)


if __name__ == "__main__":
    main()
