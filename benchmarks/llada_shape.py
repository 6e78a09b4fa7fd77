"""Folders in LLaDA's published layout with random weights, in shards, so that writing needs little memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from unmask.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class LLaDAShape:
    """The sizes of a LLaDA; the default has 1.3 billion weights."""

    width: int = 2048
    depth: int = 16
    heads: int = 32
    intermediate_size: int = 5632
    vocab_size: int = 126_464
    max_length: int = 4096

    @property
    def num_parameters(self) -> int:
        """Of embedding, head, blocks and norms."""
        block = 4 * self.width**2 + 3 * self.width * self.intermediate_size + 2 * self.width
        return 2 * self.vocab_size * self.width + self.depth * block + self.width

    def config(self) -> dict[str, object]:
        """`config.json`."""
        return {
            "model_type": "llada",
            "architectures": ["LLaDAModelLM"],
            "block_type": "llama",
            "activation_type": "silu",
            "layer_norm_type": "rms",
            "include_bias": False,
            "d_model": self.width,
            "n_layers": self.depth,
            "n_heads": self.heads,
            "n_kv_heads": self.heads,
            "mlp_hidden_size": self.intermediate_size,
            "max_sequence_length": self.max_length,
            "embedding_size": self.vocab_size,
            "vocab_size": self.vocab_size,
            "weight_tying": False,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "mask_token_id": self.vocab_size - 1,
            "eos_token_id": None,
        }

    def shards(self, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """The tensors: embedding, head and last norm, then those of each block."""
        outer = {"wte": (self.vocab_size, self.width), "ff_out": (self.vocab_size, self.width)}
        tensors = {f"{name}.weight": _random(shape, seed, dtype) for seed, (name, shape) in enumerate(outer.items())}
        yield {f"model.transformer.{name}": each for name, each in tensors.items()} | {
            "model.transformer.ln_f.weight": torch.ones(self.width, dtype=dtype)
        }
        square, up = (self.width, self.width), (self.intermediate_size, self.width)
        shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), square)
        shapes |= {"ff_proj": up, "up_proj": up, "ff_out": up[::-1]}
        for i in range(self.depth):
            block = f"model.transformer.blocks.{i}"
            norms = {f"{block}.{name}.weight": torch.ones(self.width, dtype=dtype) for name in ("attn_norm", "ff_norm")}
            matrices = {
                f"{block}.{name}.weight": _random(shape, 100 * i + number, dtype)
                for number, (name, shape) in enumerate(shapes.items(), start=2)
            }
            yield norms | matrices


def _random(shape: tuple[int, int], seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers with the standard deviation 0.02, of which each million is the same in another order."""
    count = shape[0] * shape[1]
    numbers = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)
    return torch.cat([numbers.roll(7919 * part) for part in range(-(-count // len(numbers)))])[:count].view(shape)


def write_llada(folder: Path, shape: LLaDAShape = LLaDAShape(), dtype: torch.dtype = torch.bfloat16) -> Path:  # noqa: B008
    """A folder that `unmask.load` reads; its tokenizer is that of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for number, tensors in enumerate(shape.shards(dtype)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    (folder / "tokenizer.json").write_text(Tokenizer.bytes().to_json(), encoding="utf-8")
    return folder
