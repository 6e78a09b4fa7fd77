"""Small models with random weights, one for each objective, and samplers that fit them."""

from __future__ import annotations

from functools import cache
from typing import Any

import tokenizers
import torch
from tokenizers import models

from unmask import DiTConfig, ModelConfig, TimeConditioning, Tokenizer, Vocab, objectives
from unmask.diffusion.process import PerTokenMasking
from unmask.model import Denoiser
from unmask.objectives import NextToken, Objective
from unmask.sampling import (
    PROCESS_SAMPLERS,
    SAMPLERS,
    Ancestral,
    Blockwise,
    Confidence,
    FirstHitting,
    ReMDM,
    Sampler,
    SemiAutoregressive,
)
from unmask.sampling.blockwise import DualCache, NoCache, PrefixCache
from unmask.sampling.confidence import Entropy, Margin
from unmask.sampling.denoisers import CountingDenoiser as CountingDenoiser
from unmask.sampling.remdm import Cap, Conf, Loop

OBJECTIVES: list[type[Objective]] = list(objectives.OBJECTIVES.values())
LENGTH = 12


def words_of(vocab: list[str], decoder: Any) -> Tokenizer:
    """A tokenizer of these words."""
    inner = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocab)}, unk_token=vocab[0]))
    inner.decoder = decoder
    return Tokenizer(inner)


@cache
def tiny_denoiser(
    objective: Objective,
    size: int = 7,
    mask: int = 4,
    time_conditioned: bool = False,
    length: int = LENGTH,
) -> Denoiser:
    """In float64, so that a row alone and a row in a batch differ by far less than any probability."""
    backbone = DiTConfig(
        width=16,
        depth=2,
        heads=2,
        max_length=length + objective.end_marks,
        dropout=0.0,
        causal=isinstance(objective, NextToken),
        time_conditioning=TimeConditioning(width=8) if time_conditioned else None,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = ModelConfig(Vocab(size, mask), backbone, objective).build().double().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        if objective.process.inserts_tokens:
            model.backbone.lm_head.bias[mask] += 6  # some tokens in every text
    return model.requires_grad_(False)


def all_samplers() -> list[Sampler]:
    """Every member of the tables with its defaults, and the options that are code of their own."""
    members: list[Sampler] = [
        kind(steps=6) if "steps" in kind.__dataclass_fields__ else kind()
        for kind in (*SAMPLERS.values(), *PROCESS_SAMPLERS.values())
        if kind is not SemiAutoregressive
    ]
    return [
        *members,
        Ancestral(steps=3),
        Confidence(steps=3, measure=Margin()),
        Confidence(steps=5, measure=Entropy()),
        ReMDM(steps=9, remasking=Cap(0.2)),
        ReMDM(steps=9, remasking=Conf(), loop=Loop()),
        SemiAutoregressive(stride=3, window=5, sampler=Ancestral(steps=4)),
        Blockwise(sampler=Ancestral(steps=3)),
        Blockwise(sampler=ReMDM(steps=5, remasking=Cap(0.2))),
        *(
            Blockwise(block_size=5, sampler=Ancestral(steps=4), cache=cache)
            for cache in (NoCache(), PrefixCache(), DualCache())
        ),
    ]


def is_compatible(sampler: Sampler, objective: Objective) -> bool:
    """Whether the sampler restores what the objective's process destroys."""
    if not isinstance(objective.process, sampler.processes):
        return False
    if isinstance(objective.process, PerTokenMasking) and sampler.inner is not None:
        in_blocks = isinstance(sampler, Blockwise) and sampler.block_size is not None
        return isinstance(sampler.inner, Ancestral) and not in_blocks
    if isinstance(sampler, Blockwise) and sampler.block_size is not None:
        return objective.process.block_size is None
    return objective.normalized or not isinstance(sampler, FirstHitting)
