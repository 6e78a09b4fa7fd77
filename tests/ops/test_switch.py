"""One switch turns all fast paths off; plain torch then gives the same values up to rounding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from unmask import MDLM, Ancestral, DiTConfig, LanguageModel, Tokenizer
from unmask.ops import chunked_head, cpu_attention, fast_paths, linear, recompute
from unmask.ops.switch import fast_paths_enabled
from unmask.types import Batch

BACKBONES = {
    "gelu": DiTConfig(width=32, depth=2, heads=2, max_length=24, dropout=0.0),
    "relu2": DiTConfig(width=32, depth=2, heads=2, max_length=24, dropout=0.0, activation="relu2", qk_norm=True),
}


def model(backbone: DiTConfig) -> LanguageModel:
    torch.manual_seed(0)
    lm = LanguageModel.from_config(backbone, MDLM(), Tokenizer.characters("abcdefgh "))
    torch.nn.init.normal_(lm.denoiser.backbone.lm_head.weight, std=0.1)
    return lm


def train(lm: LanguageModel, steps: int) -> list[Tensor]:
    """Losses of a few steps on sequences with padding."""
    denoiser, generator = lm.denoiser.train(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-2)
    tokens = torch.arange(8 * 24).view(8, 24) % 7
    batch = Batch(tokens, valid=torch.arange(24) < torch.tensor([24, 9, 12, 15, 20, 24, 5, 3])[:, None])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = lm.objective.token_nll(denoiser, batch, generator).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    denoiser.eval()
    return losses


def forbid_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a fast path was taken")

    monkeypatch.setattr(chunked_head, "_values_and_grads", forbidden)
    monkeypatch.setattr(chunked_head, "_float32_without_mask", forbidden)
    monkeypatch.setattr(cpu_attention, "_attention_by_heads", forbidden)
    monkeypatch.setattr(linear, "_get_packed", forbidden)
    monkeypatch.setattr(recompute, "saved_tensors_hooks", forbidden)
    for name in ("activations._apply", "packing.PackedTokens.__init__", "packing.SelectedPositions.__init__"):
        monkeypatch.setattr(f"unmask.ops.{name}", forbidden)


@pytest.mark.parametrize("backbone", BACKBONES.values(), ids=list(BACKBONES))
def test_training_sampling_and_scoring_are_the_same_in_plain_torch(
    backbone: DiTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = model(backbone)
    losses = train(fast, steps=4)
    text, score = fast.sample(2, sampler=Ancestral(steps=8), seed=1), fast.score("abc hgf", draws=32)
    with fast_paths(False), monkeypatch.context() as patched:
        forbid_fast_paths(patched)
        plain = model(backbone)
        torch.testing.assert_close(train(plain, steps=4), losses, rtol=1e-4, atol=1e-4)
        assert torch.equal(plain.sample(2, sampler=Ancestral(steps=8), seed=1).tokens, text.tokens)
        assert plain.score("abc hgf", draws=32).nats == pytest.approx(score.nats, rel=1e-4)
    for name, weight in plain.denoiser.named_parameters():
        torch.testing.assert_close(weight, fast.denoiser.get_parameter(name), rtol=0.01, atol=1e-3)


def test_with_fast_paths_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above would fail if the switch did nothing."""
    forbid_fast_paths(monkeypatch)
    with pytest.raises(AssertionError, match="a fast path was taken"):
        train(model(BACKBONES["gelu"]), steps=1)


def test_bfloat16_is_the_same_up_to_its_rounding() -> None:
    lm = model(BACKBONES["gelu"])
    lm.denoiser.to_bf16()
    z, t = torch.full((2, 24), lm.vocab.mask_id), torch.ones(2, 1)
    z[1, :12] = 3
    with torch.inference_mode():
        fast = lm.denoiser(z, t, z == lm.vocab.mask_id)
        with fast_paths(False):
            plain = lm.denoiser(z, t, z == lm.vocab.mask_id)
    torch.testing.assert_close(fast, plain, rtol=0.02, atol=0.02)


def test_the_switch_goes_back_even_after_an_error() -> None:
    before = fast_paths_enabled()
    with fast_paths(not before):
        assert fast_paths_enabled() != before
        with pytest.raises(KeyError), fast_paths(before):
            raise KeyError
        assert fast_paths_enabled() != before
    assert fast_paths_enabled() == before


@pytest.mark.parametrize(("value", "enabled"), [("1", "False"), ("0", "True"), ("", "True")])
def test_the_environment_variable_turns_them_off_too(value: str, enabled: str) -> None:
    program = "from unmask.ops.switch import fast_paths_enabled; print(fast_paths_enabled())"
    env = {**os.environ, "UNMASK_PLAIN": value}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == enabled
