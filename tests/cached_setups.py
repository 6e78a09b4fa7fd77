"""Small networks of every kind of cache with a sampler that uses it; samplers whose calls are answered one by one."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unmask import MDLM, BlockDiffusion, DiTConfig, MambaConfig, ModelConfig, NextToken, TimeConditioning, Vocab
from unmask.backbones import BackboneConfig
from unmask.backbones.dit import LlamaBlock, LocalInit
from unmask.backbones.hf import HFBackboneConfig
from unmask.backbones.mosaic_bert import MosaicBERTConfig
from unmask.backbones.state_space import StateSpace
from unmask.diffusion.denoiser import DenoiserLike
from unmask.model import Denoiser
from unmask.objectives import Objective
from unmask.sampling import Ancestral, Autoregressive, Blockwise, Confidence, Sampler
from unmask.sampling.canvas import Canvas
from unmask.serve._step_batching import ForwardCall, SamplerCoroutine, run_batch

VOCAB = Vocab(7, 4)
LENGTH = 40
DIT: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "max_length": LENGTH, "dropout": 0.0}
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2} | {
    "intermediate_size": 32,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
}
WINDOWED = LLAMA | {"model_type": "mistral", "sliding_window": 6}
IN_BLOCKS = Blockwise(sampler=Ancestral(steps=3))
SETUPS: dict[str, tuple[BackboneConfig, Objective, Sampler]] = {
    "next token": (DiTConfig(**DIT, causal=True), NextToken(), Autoregressive()),
    "next token, Llama": (
        DiTConfig(**DIT, causal=True, llama=LlamaBlock(24, kv_heads=1)),
        NextToken(),
        Autoregressive(),
    ),
    "recurrent": (MambaConfig(width=12, depth=2, state_space=StateSpace(state_size=3)), NextToken(), Autoregressive()),
    "blocks": (DiTConfig(**DIT), BlockDiffusion(block_size=4), IN_BLOCKS),
    "blocks, timed": (DiTConfig(**DIT, time_conditioning=TimeConditioning(8)), BlockDiffusion(block_size=4), IN_BLOCKS),
    "blocks, local": (DiTConfig(**DIT, local_init=LocalInit(kernel_size=5)), BlockDiffusion(block_size=4), IN_BLOCKS),
    "blocks, shifted": (DiTConfig(**DIT, shift_logits=True), BlockDiffusion(block_size=4), IN_BLOCKS),
    "blocks, from the prompt": (DiTConfig(**DIT), BlockDiffusion(block_size=4, from_prompt=True), IN_BLOCKS),
    "blocks, transformers": (HFBackboneConfig(json.dumps(LLAMA), 1.0), BlockDiffusion(block_size=4), IN_BLOCKS),
    "blocks, sliding": (HFBackboneConfig(json.dumps(WINDOWED), 0.5), BlockDiffusion(block_size=4), IN_BLOCKS),
    "prefix": (DiTConfig(**DIT), MDLM(), Blockwise(5, Confidence(steps=2), "prefix")),
    "dual": (DiTConfig(**DIT), MDLM(), Blockwise(5, Confidence(steps=2), "dual")),
    "dual, ALiBi": (
        MosaicBERTConfig(width=16, depth=2, heads=2, intermediate_size=24, max_length=LENGTH, dropout=0.0),
        MDLM(),
        Blockwise(5, Confidence(steps=2), "dual"),
    ),
    "dual, transformers": (HFBackboneConfig(json.dumps(LLAMA), 1.0), MDLM(), Blockwise(5, Confidence(steps=2), "dual")),
}


@cache
def network(name: str) -> Denoiser:
    """In float64, so that a row alone and a row in a batch differ by far less than any probability."""
    backbone, objective, _ = SETUPS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(VOCAB, backbone, objective).build().double().eval()
        for key, parameter in model.named_parameters():
            if "A_log" not in key and "dt_proj.bias" not in key and "norm" not in key:
                torch.nn.init.normal_(parameter, std=0.4)
    return model.requires_grad_(False)


def canvas(prompt: int, holes: int, seed: int) -> Canvas:
    random_ids = torch.randint(4, (1, prompt), generator=torch.Generator().manual_seed(seed))
    return Canvas(torch.cat([random_ids, torch.full((1, holes), VOCAB.mask_id)], 1), (seed,))


class Conversation:
    """A sampler that waits for its calls to be answered, and what it was told."""

    def __init__(self, name: str, text: Canvas) -> None:
        self.heard: list[Tensor] = []
        self.tokens = text.tokens

        def work(denoiser: DenoiserLike) -> None:
            for tokens in SETUPS[name][2].run(denoiser, text):
                self.tokens = tokens

        self.coroutine = SamplerCoroutine(work, network(name))

    def call(self) -> ForwardCall:
        assert self.coroutine.pending_call is not None
        return self.coroutine.pending_call

    def answer(self, output: Tensor) -> None:
        self.heard.append(output)
        self.coroutine.send(output)


def alone(name: str, text: Canvas) -> Conversation:
    talk = Conversation(name, text)
    talk.coroutine.start()
    while not talk.coroutine.finished:
        talk.answer(run_batch(network(name), [talk.call()])[0])
    return talk
