"""What every network must offer, and what everything else does with it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny_models
from backbones.test_hf import denoiser as hf_denoiser
from host_reads import host_reads
from unmask import MDLM, BlockDiffusion, Blockwise, Confidence, LanguageModel, ReMDM, Sampler
from unmask.backbones.base import Backbone, Capabilities, network_blocks
from unmask.sampling.canvas import Canvas
from unmask.training._muon import MuonOptimizer
from unmask.training.optim import Muon


class Complete(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(5, 4), nn.Linear(4, 5)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def encode(self, h: Tensor, t: Tensor, positions: Any = None, context: Any = None) -> Tensor:
        return h if positions is None else h[positions]

    def blocks(self) -> list[nn.Module]:
        return []

    def describe(self) -> dict[str, Any]:
        return {"network": "none"}


@pytest.mark.parametrize("missing", ["capabilities", "embed", "encode", "blocks", "describe"])
def test_a_network_that_lacks_a_member_cannot_be_built(missing: str) -> None:
    incomplete = type("Incomplete", (Complete,), {missing: getattr(Backbone, missing)})
    with pytest.raises(TypeError, match=f"abstract class Incomplete.*{missing}"):
        incomplete()
    assert Complete().aux_loss() is None


def test_a_network_without_a_head_cannot_be_built() -> None:
    class Headless(Complete):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(TypeError, match=r"Headless must set self\.lm_head"):
        Headless()


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_blocks_of_transformers_are_found(name: str) -> None:
    model = hf_denoiser(name).float().requires_grad_(True)
    assert len(network_blocks(model)) == 2
    muon, _ = Muon().build(model)
    assert isinstance(muon, MuonOptimizer)
    assert len(muon.param_groups[0]["params"]) >= 8


def test_layers_wrapped_by_peft_train_and_sample() -> None:
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(tiny_models.tiny_denoiser(MDLM())).float()
    config = peft.LoraConfig(r=2, target_modules=["qkv", "out", "mlp.0", "mlp.2"], init_lora_weights=False)
    z = torch.full((2, 8), 4)
    before = model(z, torch.ones(2, 1), z == 4)
    model.backbone.layers = peft.inject_adapter_in_model(config, model.backbone.layers)
    after = model(z, torch.ones(2, 1), z == 4)
    assert not torch.allclose(before, after)
    model.train()
    model(z, torch.ones(2, 1), z == 4)[:, 0].sum().backward()
    adapters = [p for n, p in model.named_parameters() if "lora_" in n]
    assert adapters
    assert all(p.grad is not None for p in adapters)


@pytest.mark.parametrize("sampler", [Confidence(4), Blockwise(4, Confidence(2), "prefix")], ids=["plain", "cached"])
def test_texts_of_layers_wrapped_by_peft_are_those_of_the_merged_weights(sampler: Sampler) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = copy.deepcopy(tiny_models.tiny_denoiser(MDLM()))
    config = peft.LoraConfig(r=2, target_modules=["qkv", "out", "mlp.0", "mlp.2"], init_lora_weights=False)
    plain = LanguageModel(copy.deepcopy(model)).sample(n=4, sampler=sampler, seed=3).ids
    model.backbone.layers = peft.inject_adapter_in_model(config, model.backbone.layers)
    wrapped = LanguageModel(model).sample(n=4, sampler=sampler, seed=3).ids
    layers = [layer for layer in model.modules() if isinstance(layer, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 8
    for layer in layers:
        layer.merge()
    assert LanguageModel(model).sample(n=4, sampler=sampler, seed=3).ids == wrapped
    unwrapped = copy.deepcopy(tiny_models.tiny_denoiser(MDLM()))
    merged = {name.replace(".base_layer", ""): weight for name, weight in model.state_dict().items()}
    unwrapped.load_state_dict({name: weight for name, weight in merged.items() if "lora_" not in name})
    assert LanguageModel(unwrapped).sample(n=4, sampler=sampler, seed=3).ids == wrapped
    assert wrapped != plain


def test_a_cache_is_not_started_by_some_of_the_sequences() -> None:
    model = tiny_models.tiny_denoiser(BlockDiffusion(block_size=4))
    canvas = Canvas(torch.full((3, 12), 4), (0, 1, 2))
    *_, together = Blockwise(sampler=ReMDM(5)).run(model, canvas)
    for row in range(3):
        *_, alone = Blockwise(sampler=ReMDM(5)).run(model, Canvas(canvas.tokens[:1], (row,)))
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("training", [False, True])
def test_a_network_call_reads_one_value_back(training: bool) -> None:
    model = copy.deepcopy(tiny_models.tiny_denoiser(MDLM())).train(training)
    z = torch.full((3, 8), 4)
    z[0, :3] = 1
    with host_reads() as reads, torch.set_grad_enabled(training):
        model(z, torch.ones(3, 1), z == 4)
    assert reads.total <= 1, reads
