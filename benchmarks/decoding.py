"""Decoding of LLaDA-like models: the cost of a network call, and the gain of caches and parallel decoding.

    python -m benchmarks.decoding calls
    python -m benchmarks.decoding caches runs/mdlm text8/test.txt --reference-model runs/ar --block-model runs/block

`calls` compares with the same network in transformers, in turns, in one run. `caches` generates block by block
with a trained model, and measures network calls, time, the accuracy of infilling (masked characters in the middle of
real text that are restored), and the nats that an autoregressive reference model needs for continuations of real
prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import unmask
from benchmarks.side_by_side import time_alternating
from unmask import (
    Blockwise,
    Confidence,
    DiTConfig,
    Factor,
    LanguageModel,
    LlamaBlock,
    SamplingParams,
    Threshold,
    Vocab,
)
from unmask.diffusion.process import BlockMasking
from unmask.diffusion.schedule import LogLinear
from unmask.sampling import Sampler
from unmask.sampling.blockwise import CACHE_POLICIES

VOCAB, WIDTH, DEPTH, HEADS, HIDDEN = 32_000, 512, 8, 8, 1376
SAMPLERS: dict[str, Callable[[int, SamplingParams], Sampler]] = {
    "one a step": lambda block, choice: Confidence(steps=block, params=choice),
    "four a step": lambda block, choice: Confidence(steps=block // 4, params=choice),
    "threshold 0.9": lambda _, choice: Threshold(0.9, choice),
    "factor 1": lambda _, choice: Factor(1.0, choice),
}


def forward_times(repeats: int) -> list[dict[str, object]]:
    """Seconds per call of a bidirectional Llama network, in `unmask` and in transformers."""
    return [
        line
        for kv_heads in (HEADS, HEADS // 4)
        for line in _compare_forward(kv_heads, *matched_networks(kv_heads), repeats)
    ]


def matched_networks(kv_heads: int) -> tuple[Any, Any]:
    """The same network in `unmask` and in transformers."""
    import transformers

    config = DiTConfig(
        width=WIDTH,
        depth=DEPTH,
        heads=HEADS,
        max_length=1024,
        dropout=0.0,
        llama=LlamaBlock(HIDDEN, kv_heads=None if kv_heads == HEADS else kv_heads),
    )
    objective = unmask.MDLM(schedule=LogLinear(eps=0.0))
    ours = unmask.ModelConfig(Vocab(VOCAB, VOCAB - 1), config, objective).build()
    sizes: Any = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
    )
    sizes.use_cache = False
    network: Any = transformers.LlamaForCausalLM
    return network(sizes).eval(), ours.eval()


@torch.inference_mode()
def _compare_forward(kv_heads: int, theirs: Any, ours: Any, repeats: int) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for rows, length, queried in ((1, 256, 256), (4, 256, 256), (1, 256, 32), (4, 256, 32)):
        where = (torch.arange(length) < queried).expand(rows, -1)
        z = torch.randint(VOCAB - 1, (rows, length)).masked_fill(where, VOCAB - 1)
        everyone, t = torch.zeros(rows, 1, length, length), torch.ones(rows, 1)
        slow, fast = time_alternating(
            partial(_log_probabilities, theirs, z, everyone, torch.arange(queried)),
            partial(ours, z, t, where),
            repeats,
        )
        ratios = [a / b for a, b in zip(slow, fast, strict=True)]
        middle = [statistics.median(values) for values in (slow, fast, ratios)]
        found.append(
            {
                "kv_heads": kv_heads,
                "rows": rows,
                "length": length,
                "queried": queried,
                "transformers": middle[0],
                "unmask": middle[1],
                "ratios": ratios,
            }
        )
        print(
            f"{rows} x {length} tokens, {kv_heads} of {HEADS} keys, queried at {queried} positions:"
            f" transformers {middle[0]:.3f} s, unmask {middle[1]:.3f} s,"
            f" {middle[2]:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return found


def _log_probabilities(network: Any, z: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    log_x: Tensor = network(z, attention_mask=mask, logits_to_keep=places).logits.log_softmax(-1)
    return log_x


def windows(lm: LanguageModel, text: str, count: int) -> Tensor:
    """Windows of the model's length, spread evenly over a text."""
    assert lm.tokenizer is not None
    assert lm.denoiser.max_length is not None
    length = lm.denoiser.max_length
    ids = torch.tensor(lm.tokenizer.encode(text[: 40 * count * length]))
    starts = torch.linspace(0, len(ids) - length, count).long()
    return torch.stack([ids[start : start + length] for start in starts])


def generate_timed(lm: LanguageModel, z: Tensor, sampler: Blockwise) -> tuple[Tensor, int, float]:
    """The generated text, network calls and seconds, of all sequences together."""
    begin = time.perf_counter()
    samples = lm.generate(z, sampler)
    return samples.tokens, samples.nfe, time.perf_counter() - begin


def compare_caches(
    lm: LanguageModel, reference_model: LanguageModel, text: str, count: int, block_size: int, name: str
) -> list[dict[str, object]]:
    """Every cache with every sampler, on the same windows."""
    real, many = windows(lm, text, count), windows(lm, text, 4 * count)
    length, mask = real.shape[1], lm.vocab.mask_id
    causal = isinstance(lm.denoiser.process, BlockMasking)
    hole, begin = slice(length // 2, length // 2 + block_size), length // 2
    kinds = ["exact"] if causal else list(CACHE_POLICIES)
    found: list[dict[str, object]] = []
    for cache in kinds:
        for way, build in SAMPLERS.items():
            kept = CACHE_POLICIES["none" if causal else cache]
            greedy = Blockwise(None if causal else block_size, build(block_size, SamplingParams(temperature=0)), kept)
            warm = Blockwise(None if causal else block_size, build(block_size, SamplingParams()), kept)
            hidden = many.clone()
            hidden[:, hole] = mask
            if causal:
                hidden = hidden[:, : hole.stop]  # it does not look ahead
            filled, _, _ = generate_timed(lm, hidden, greedy)
            right = (filled[:, hole] == many[:, hole]).double().mean(1)
            blank = real.clone()
            blank[:, begin:] = mask
            written, called, seconds = generate_timed(lm, blank, warm)
            line = {
                "model": name,
                "cache": cache,
                "way": way,
                "calls": called,
                "seconds": seconds,
                "tokens_per_second": count * (length - begin) / seconds,
                "accuracy": float(right.mean()),
                "accuracy_error": float(right.std() / len(right) ** 0.5),
                **reference_nll(reference_model, written, begin),
            }
            found.append(line)
            print(
                f"{name:6} {cache:6} {way:13} {called:4} calls {seconds:6.1f} s"
                f" {line['tokens_per_second']:6.0f} tokens/s  restored {100 * line['accuracy']:.1f}"
                f" ± {100 * line['accuracy_error']:.1f} %"
                f"  reference {line['reference_nats']:.3f} ± {line['reference_error']:.3f} nats,"
                f" entropy {line['entropy']:.2f}"
            )
    print(f"real text: reference {reference_nll(reference_model, real, begin)['reference_nats']:.3f} nats")
    return found


def reference_nll(reference_model: LanguageModel, tokens: Tensor, prompt_length: int) -> dict[str, Any]:
    """Nats per token of generated text, given its prompt; and the entropy of its tokens, which falls
    when text repeats itself."""
    per_row = []
    for ids in tokens.tolist():
        nats = reference_model.score([ids]).nats - reference_model.score([ids[:prompt_length]]).nats
        per_row.append(nats / (len(ids) - prompt_length))
    each = torch.tensor(per_row, dtype=torch.float64)
    share = torch.bincount(tokens[:, prompt_length:].flatten()).double()
    share = share[share > 0] / share.sum()
    return {
        "reference_nats": float(each.mean()),
        "reference_error": float(each.std() / len(each) ** 0.5),
        "entropy": float(-(share * share.log()).sum()),
    }


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["calls", "caches"])
    parser.add_argument("model", nargs="?", help="a masked diffusion model")
    parser.add_argument("text", nargs="?", help="a text that it has not seen")
    parser.add_argument("--reference-model", help="an autoregressive model of the same tokens")
    parser.add_argument("--block-model", help="a block diffusion model of the same tokens")
    parser.add_argument(
        "--num-samples", type=int, default=4, help="texts to write; four times as many have a hole filled"
    )
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("runs/family.json"))
    args = parser.parse_args()
    if args.what == "calls":
        results = forward_times(args.repeats)
    else:
        if not (args.model and args.text and args.reference_model):
            parser.error("caches needs a model, a text and --reference-model")
        text, reference = Path(args.text).read_text(encoding="utf-8"), unmask.load(args.reference_model)
        models = {"MDLM": args.model, **({"block": args.block_model} if args.block_model else {})}
        results = []
        for name, folder in models.items():
            results += compare_caches(unmask.load(folder), reference, text, args.num_samples, args.block_size, name)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
