"""The cost model: its counts are those of real networks and real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.costs import H100, MODELS, Machine, Model, largest_rows, memory, step, traffic
from benchmarks.measure import RandomText
from kept import counted
from unmask import MDLM, DiTConfig
from unmask.backbones import mixing
from unmask.data.loader import Loader, Wrapped
from unmask.model import ModelConfig
from unmask.training.loop import Run, Training
from unmask.types import Vocab
from unmask.world import World

SMALL = Model("small", depth=3, width=64, vocab=512, length=64)


def test_parameters_are_those_of_the_network() -> None:
    """But for norms and biases, which are of no weight."""
    real = DiTConfig(SMALL.width, SMALL.depth, heads=2, length=SMALL.length).build(Vocab(SMALL.vocab, 511))
    count = sum(parameter.numel() for parameter in real.parameters())
    assert SMALL.parameters <= count < 1.02 * SMALL.parameters


def test_flops_are_those_that_are_counted_in_a_step() -> None:
    backbone = DiTConfig(SMALL.width, SMALL.depth, heads=2, length=SMALL.length, dropout=0.0)
    denoise = ModelConfig(Vocab(SMALL.vocab, 511), backbone, MDLM()).build().train()
    text = RandomText.of(1 << 14, SMALL.vocab)
    settings = Training(steps=4, batch_size=32, bf16=False)
    run = Run(denoise, MDLM(), Loader(text, Wrapped(SMALL.length), 32), settings, World())
    torch.manual_seed(0)
    run.step()
    assert run.state.flops_per_token == pytest.approx(SMALL.flops_per_token, rel=0.08)


def test_activations_are_what_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twice the tokens twice as much, so that what does not depend on them falls out."""
    monkeypatch.setattr(mixing, "SHORT", 0)  # only CPUs keep the probabilities of attention
    backbone = DiTConfig(SMALL.width, SMALL.depth, heads=2, length=SMALL.length, dropout=0.0)
    network = backbone.build(Vocab(SMALL.vocab, 511)).train()
    sizes = []
    for rows in (8, 16):
        z = torch.randint(511, (rows, SMALL.length), generator=torch.Generator().manual_seed(0))
        with counted() as kept, torch.autocast("cpu", torch.bfloat16):
            hidden = network.encode(z, torch.full((rows, 1), 0.5))
        sizes.append(kept.beside(network))
        del hidden
    found = (sizes[1] - sizes[0]) / (8 * SMALL.length)
    assert found == pytest.approx(SMALL.activation_bytes_per_token, rel=0.05)


def test_one_rank_does_not_talk_and_many_send_all_but_their_own() -> None:
    assert traffic(SMALL, 1, sharded=False) == 0
    assert traffic(SMALL, 2, sharded=False) == 4 * SMALL.parameters
    assert traffic(SMALL, 10**6, sharded=True) == pytest.approx(12 * SMALL.parameters, rel=1e-5)


def test_shards_take_less_memory_than_replicas() -> None:
    big = MODELS[-1]
    assert memory(big, 64, 1, sharded=True) < memory(big, 64, 1, sharded=False) / 3
    assert largest_rows(big, H100, 64, sharded=False, batch=512) == 0
    assert largest_rows(big, H100, 64, sharded=True, batch=512) >= 1


def test_talk_is_slower_between_nodes() -> None:
    machine = Machine("toy", flops=1e12, near=1e9, far=1e8, node=4, memory=1e12)
    inside, outside = (step(SMALL, machine, ranks, 1, sharded=False) for ranks in (4, 5))
    assert outside.talk > 10 * inside.talk
    assert inside.worst < inside.best
    assert replace(inside, talk=0.0).worst == inside.tokens / inside.compute
