"""Folders that transformers opens: the same logits, and the same model when it comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer

import unmask
import unmask.hf
from unmask import (
    MDLM,
    SEDD,
    BlockDiffusion,
    DiTConfig,
    GenMD4,
    LanguageModel,
    LlamaBlock,
    ModelConfig,
    NextToken,
    TimeConditioning,
    Tokenizer,
    UniformDiffusion,
    Vocab,
)
from unmask.backbones.base import BackboneConfig
from unmask.backbones.layers import RotaryScaling
from unmask.context import AttentionStages, Context
from unmask.objectives import Objective

GOLDEN = Path(__file__).parents[1] / "golden"
NETWORK = {"width": 32, "depth": 2, "heads": 4, "max_length": 64, "dropout": 0.0}
EUROBERT: dict[str, tuple[DiTConfig, Objective]] = {
    "llama": (DiTConfig(**NETWORK, llama=LlamaBlock(48)), MDLM()),
    "llama, shared keys, tied": (
        DiTConfig(**NETWORK, tie_embeddings=True, rope_theta=500.0, llama=LlamaBlock(48, kv_heads=2)),
        SEDD(),
    ),
    "llama, wide heads, scaled": (
        DiTConfig(**NETWORK, llama=LlamaBlock(48, head_dim=12, rotary_scaling=RotaryScaling(2.0, 1.0, 4.0, 16))),
        MDLM(),
    ),
}
OURS: dict[str, tuple[DiTConfig, Objective]] = {
    "plain": (DiTConfig(**NETWORK), MDLM()),
    "tied, told the time": (DiTConfig(**NETWORK, tie_embeddings=True, time_conditioning=TimeConditioning(8)), MDLM()),
    "blocks": (DiTConfig(**NETWORK, llama=LlamaBlock(48)), BlockDiffusion(block_size=4)),
    "shifted": (DiTConfig(**NETWORK, llama=LlamaBlock(48), shift_logits=True), MDLM()),
    "learned schedules": (DiTConfig(**NETWORK), GenMD4()),
}


def build(backbone: BackboneConfig, objective: Objective) -> LanguageModel:
    torch.manual_seed(0)
    lm = LanguageModel(ModelConfig(Vocab(13, 12), backbone, objective).build().eval())
    for parameter in lm.denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return lm


def expected_logits(lm: LanguageModel, tokens: Tensor, t: float, valid: Tensor | None) -> Tensor:
    backbone, size, length = lm.denoiser.backbone, lm.denoiser.process.block_size, tokens.shape[1]
    stages = size and AttentionStages.block_causal(0, length, size, length, tokens.device)
    time = torch.full((len(tokens), 1), t)
    return backbone.compute_logits(backbone.encode(backbone.embed(tokens), time, None, Context(valid, stages=stages)))


def assert_equal_models(lm: LanguageModel, other: LanguageModel) -> None:
    assert lm.denoiser.config == other.denoiser.config
    weights, others = lm.denoiser.state_dict(), other.denoiser.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("name", [*EUROBERT, *OURS])
@torch.no_grad()
def test_transformers_opens_it(name: str, tmp_path: Path) -> None:
    lm = build(*{**EUROBERT, **OURS}[name])
    unmask.save(lm, tmp_path / "model", upstream_format="transformers")
    network, report = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    assert type(network).__name__ == ("EuroBertForMaskedLM" if name in EUROBERT else "UnmaskForMaskedLM")
    tokens, valid = torch.randint(0, 12, (3, 10)), torch.ones(3, 10, dtype=torch.bool)
    tokens[:, 3:8], valid[2, 7:] = 12, False
    found = network(tokens).logits
    # The linear schedule masks half of the tokens at about t = 1/2.
    torch.testing.assert_close(found, expected_logits(lm, tokens, 0.5 / (1 - 1e-3), None), atol=2e-6, rtol=0)
    if lm.denoiser.process.block_size is None:
        padded = network(tokens, attention_mask=valid.long()).logits
        wanted = expected_logits(lm, tokens, 0.5 / (1 - 1e-3), valid)
        torch.testing.assert_close(padded[valid], wanted[valid], atol=2e-6, rtol=0)
    assert_equal_models(unmask.load(tmp_path / "model"), lm)
    network.save_pretrained(tmp_path / "again")
    assert_equal_models(unmask.load(tmp_path / "again"), lm)


@pytest.mark.parametrize(
    "family", ["sdar_tiny", "llada2_moe_tiny", "fastdllm2_tiny", "mosaicbert_tiny", "dimamba_tiny"]
)
@torch.no_grad()
def test_published_families_too(family: str, tmp_path: Path) -> None:
    lm = unmask.load(GOLDEN / family)
    unmask.save(lm, tmp_path / "model", upstream_format="transformers")
    network = AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(1, 10)[None] % (lm.vocab.mask_id - 1)
    torch.testing.assert_close(network(tokens).logits, expected_logits(lm, tokens, 0.0, None), atol=2e-6, rtol=0)
    assert_equal_models(unmask.load(tmp_path / "model"), lm)


def test_a_loss_has_a_gradient(tmp_path: Path) -> None:
    lm = build(*OURS["plain"])
    network = unmask.hf.UnmaskForMaskedLM.from_pretrained(
        unmask.save(lm, tmp_path / "model", upstream_format="transformers")
    )
    labels = torch.tensor([[-100, 3, -100, 5]])
    out = network(torch.tensor([[1, 12, 2, 12]]), labels=labels, timesteps=torch.tensor([0.5]))
    wanted = out.logits[0, [1, 3]].log_softmax(-1)[[0, 1], [3, 5]].mean()
    torch.testing.assert_close(out.loss, -wanted)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    lm = LanguageModel.from_config(DiTConfig(**NETWORK), MDLM(), Tokenizer.characters("abc "))
    tokenizer = AutoTokenizer.from_pretrained(unmask.save(lm, tmp_path / "model", upstream_format="transformers"))
    assert tokenizer("abc cab")["input_ids"] == lm.tokenizer.encode("abc cab")  # type: ignore[union-attr]
    assert tokenizer.mask_token_id == lm.vocab.mask_id


@pytest.mark.parametrize("objective", [NextToken(), UniformDiffusion()])
def test_only_masked_diffusion_is_a_masked_lm(objective: Objective, tmp_path: Path) -> None:
    lm = build(DiTConfig(**NETWORK, causal=isinstance(objective, NextToken)), objective)
    with pytest.raises(ValueError, match="the format transformers is for other networks or objectives"):
        unmask.save(lm, tmp_path / "model", upstream_format="transformers")
    assert not (tmp_path / "model").exists()


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    folder = unmask.save(build(*EUROBERT["llama"]), tmp_path / "model", upstream_format="transformers")
    config = json.loads((folder / "config.json").read_text())
    (folder / "manifest.json").unlink()
    config["unmask"]["backbone"]["width"] = 48
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight has shape \[13, 32\] but config.json asks for"):
        unmask.load(folder)
