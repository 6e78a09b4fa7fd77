"""One call of a LLaDA of 1.3 billion weights in bfloat16, by `unmask` and by transformers, in turns in one run.

    python -m benchmarks.llada_call [--lengths 32 64 128 256 512 1024] [--depth 16] [--repeats 5] [--profile 128]

Both read the same weights in memory, and all positions of one text. transformers' Llama has bidirectional sdpa
attention without a mask and gives logits of bfloat16; `unmask` gives the negative log-likelihood of a token at each
position, from logits that are summed in float32. Printed are seconds, the ratio (above 1: unmask is faster), and the
share of the machine's bfloat16 matmul peak, which is measured before each length.
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


def make_calls(lm: unmask.LanguageModel, llama: Any, length: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call of each, on the same tokens."""
    tokens = torch.randint(0, lm.vocab.size - 1, (1, length), generator=torch.Generator().manual_seed(0))
    everywhere, t = torch.ones_like(tokens, dtype=torch.bool), torch.full((1, 1), 0.5)
    nll = WeightedNLL.unweighted(tokens[0])

    def ours() -> object:
        with lm.inference_mode():
            return lm.denoiser(tokens, t, everywhere, row_fn=nll)

    def theirs() -> object:
        with torch.inference_mode():
            return llama(input_ids=tokens, use_cache=False).logits

    return ours, theirs


def call_flops(shape: LLaDAShape, length: int) -> float:
    """Of the matrix products of a call: blocks, head and attention."""
    weights = shape.num_parameters - shape.vocab_size * shape.width
    return 2.0 * length * (weights + 2 * shape.depth * length * shape.width)


def _time(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(lm: unmask.LanguageModel, llama: Any, shape: LLaDAShape, length: int, repeats: int) -> str:
    """A line of the table: the fastest of each, and the middle one of the ratios of pairs."""
    ours, theirs = make_calls(lm, llama, length)
    ours(), theirs()
    peak = measure_peak_flops(torch.bfloat16, lm.device, seconds=1.0)
    pairs = [(_time(ours), _time(theirs)) for _ in range(repeats)]
    best_ours, best_theirs = (min(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    shares = [call_flops(shape, length) / seconds / peak for seconds in (best_ours, best_theirs)]
    return (
        f"{length:6} {best_ours:9.2f} s {best_theirs:9.2f} s {ratio:7.2f} {shares[0]:8.0%} {shares[1]:8.0%}"
        f" {peak / 1e9:8.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llada_call", description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", nargs="*", type=int, default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--depth", type=int, default=LLaDAShape.depth)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=int, help="also print where the time of a call of this length goes")
    options = parser.parse_args(arguments)
    retain_freed_memory()
    shape = LLaDAShape(depth=options.depth)
    with tempfile.TemporaryDirectory() as scratch:
        lm = unmask.load(write_llada(Path(scratch), shape), dtype="bfloat16")
    llama = transformers_llama(lm, shape)
    lm.denoiser.prepack()
    print(f"{shape.num_parameters / 1e9:.2f} billion weights, {torch.get_num_threads()} threads")
    print("length      unmask transformers   ratio   unmask  transf.  GFLOP/s (peak)")
    for length in options.lengths:
        print(compare(lm, llama, shape, length, options.repeats), flush=True)
    if options.profile:
        from torch.profiler import profile

        ours, _ = make_calls(lm, llama, options.profile)
        with profile() as recorded:
            ours()
        print(recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=50))


if __name__ == "__main__":
    main()
