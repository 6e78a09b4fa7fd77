"""One call of a LLaDA of 1.3 billion weights in bfloat16, by `unmask` and by transformers, in turns in one run.

    python -m benchmarks.llada_call [--lengths 32 64 128 256 512 1024] [--rows 32] [--depth 16] [--repeats 5]

Both have the same weights and read the same tokens. The logits of `--rows` positions are asked for, as when a block is
written (`logits_to_keep` of transformers), or of all with `--rows 0`, as when a text is scored. transformers' Llama has
bidirectional sdpa attention without a mask and gives logits of bfloat16; `unmask` gives the negative log-likelihood of
a token at each position, from logits of float32, for which the head multiplies twice. Printed are seconds, the ratio
(above 1: unmask is faster), and the share of the machine's bfloat16 matmul peak, which is measured before each length;
the second product of our head counts as no work.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unmask
from benchmarks.llada_shape import LLaDAShape, write_llada
from unmask.hardware.flops import measure_peak_flops
from unmask.hardware.memory import retain_freed_memory
from unmask.ops.chunked_head import WeightedNLL


def transformers_llama(lm: unmask.LanguageModel, shape: LLaDAShape) -> Any:
    """Llama of transformers with the weights of `lm`: views of its fused matrices."""
    import transformers

    library: Any = transformers
    config = library.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        network = library.LlamaForCausalLM(config)
    network.load_state_dict(_llama_state(lm, shape.depth), assign=True)
    network.model.rotary_emb = type(network.model.rotary_emb)(config)  # its frequencies are not weights
    for layer in network.model.layers:
        layer.self_attn.is_causal = False
    return network.eval()


def _llama_state(lm: unmask.LanguageModel, depth: int) -> dict[str, Tensor]:
    ours = dict(lm.denoiser.backbone.state_dict())
    state = {"model.embed_tokens.weight": ours["embedding.weight"], "lm_head.weight": ours["lm_head.weight"]}
    state["model.norm.weight"] = ours["norm.weight"].bfloat16()
    for i in range(depth):
        block, theirs = f"layers.{i}.", f"model.layers.{i}."
        qkv, gate_up = ours[f"{block}attention.qkv.weight"].chunk(3), ours[f"{block}mlp.0.weight"].chunk(2)
        for name, tensor in zip("qkv", qkv, strict=True):
            state[f"{theirs}self_attn.{name}_proj.weight"] = tensor
        state[f"{theirs}self_attn.o_proj.weight"] = ours[f"{block}attention.out.weight"]
        for name, tensor in zip(("gate", "up"), gate_up, strict=True):
            state[f"{theirs}mlp.{name}_proj.weight"] = tensor
        state[f"{theirs}mlp.down_proj.weight"] = ours[f"{block}mlp.2.weight"]
        for name, ours_name in (("input", "norm1"), ("post_attention", "norm2")):
            state[f"{theirs}{name}_layernorm.weight"] = ours[f"{block}{ours_name}.weight"].bfloat16()
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in state.items()}


def make_calls(
    lm: unmask.LanguageModel, llama: Any, length: int, rows: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call of each, on the same tokens, for the last positions."""
    tokens = torch.randint(0, lm.vocab.size - 1, (1, length), generator=torch.Generator().manual_seed(0))
    asked, t = torch.arange(length)[None] >= length - rows, torch.full((1, 1), 0.5)
    nll = WeightedNLL.unweighted(tokens[asked])

    def ours() -> object:
        with lm.inference_mode():
            return lm.denoiser(tokens, t, asked, row_fn=nll)

    def theirs() -> object:
        with torch.inference_mode():
            return llama(input_ids=tokens, use_cache=False, logits_to_keep=rows).logits

    return ours, theirs


def call_flops(shape: LLaDAShape, length: int, rows: int) -> float:
    """Of the matrix products of a call: blocks, attention and, for the rows that are asked for, the head."""
    head = shape.vocab_size * shape.width
    blocks = shape.num_parameters - 2 * head
    return 2.0 * length * (blocks + 2 * shape.depth * length * shape.width) + 2.0 * rows * head


def _time(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(lm: unmask.LanguageModel, llama: Any, shape: LLaDAShape, length: int, rows: int, repeats: int) -> str:
    """A line of the table: the fastest of each, and the middle one of the ratios of pairs."""
    rows = min(rows or length, length)
    ours, theirs = make_calls(lm, llama, length, rows)
    ours(), theirs()
    peak = measure_peak_flops(torch.bfloat16, lm.device, seconds=1.0)
    pairs = [(_time(ours), _time(theirs)) for _ in range(repeats)]
    best_ours, best_theirs = (min(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    shares = [call_flops(shape, length, rows) / seconds / peak for seconds in (best_ours, best_theirs)]
    return (
        f"{length:6} {rows:5} {best_ours:9.2f} s {best_theirs:9.2f} s {ratio:7.2f} {shares[0]:8.0%} {shares[1]:8.0%}"
        f" {peak / 1e9:8.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llada_call", description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", nargs="*", type=int, default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--rows", type=int, default=32, help="positions whose logits are asked for; 0: all")
    parser.add_argument("--depth", type=int, default=LLaDAShape.depth)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    retain_freed_memory()
    shape = LLaDAShape(depth=options.depth)
    with tempfile.TemporaryDirectory() as scratch:
        lm = unmask.load(write_llada(Path(scratch), shape), dtype="bfloat16")
    llama = transformers_llama(lm, shape)
    lm.denoiser.prepack()
    print(f"{shape.num_parameters / 1e9:.2f} billion weights, {torch.get_num_threads()} threads")
    print("length  rows      unmask transformers   ratio   unmask  transf.  GFLOP/s (peak)")
    for length in options.lengths:
        print(compare(lm, llama, shape, length, options.rows, options.repeats), flush=True)


if __name__ == "__main__":
    main()
