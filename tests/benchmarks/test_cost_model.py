"""The cost model: its counts are those of real networks and real steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.cost_model import MODELS, communication_bytes, max_batch_size, memory_bytes, step_time
from benchmarks.side_by_side import RandomTokens
from saved_tensors import count_saved_tensors
from unmask import MDLM, DiTConfig
from unmask.data.loader import Loader, Wrapped
from unmask.model import ModelConfig
from unmask.ops import cpu_attention as mixing
from unmask.reproduce import H100, Cluster, ModelShape
from unmask.training.config import TrainingConfig
from unmask.training.loss import DenoisingLoss
from unmask.training.trainer import Trainer
from unmask.types import Vocab

SMALL = ModelShape("small", depth=3, width=64, vocab=512, length=64)


def test_parameters_are_those_of_the_network() -> None:
    """But for norms and biases, which are of no weight."""
    real = DiTConfig(SMALL.width, SMALL.depth, heads=2, max_length=SMALL.length).build(Vocab(SMALL.vocab, 511))
    count = sum(parameter.numel() for parameter in real.parameters())
    assert SMALL.parameters <= count < 1.02 * SMALL.parameters


def test_flops_are_those_that_are_counted_in_a_step() -> None:
    backbone = DiTConfig(SMALL.width, SMALL.depth, heads=2, max_length=SMALL.length, dropout=0.0)
    denoise = ModelConfig(Vocab(SMALL.vocab, 511), backbone, MDLM()).build().train()
    text = RandomTokens.generate(1 << 14, SMALL.vocab)
    settings = TrainingConfig(steps=4, batch_size=32, bf16=False)
    run = Trainer(denoise, DenoisingLoss(MDLM()), Loader(text, Wrapped(SMALL.length), 32), settings)
    torch.manual_seed(0)
    run.step()
    assert run.state.flops_per_token == pytest.approx(SMALL.flops_per_token, rel=0.08)


def test_activations_are_what_autograd_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twice the tokens twice as much, so that what does not depend on them falls out."""
    monkeypatch.setattr(mixing, "_KEEP_PROBS_RATIO", 0)  # only CPUs keep the probabilities of attention
    backbone = DiTConfig(SMALL.width, SMALL.depth, heads=2, max_length=SMALL.length, dropout=0.0)
    network = backbone.build(Vocab(SMALL.vocab, 511)).train()
    sizes = []
    for rows in (8, 16):
        z = torch.randint(511, (rows, SMALL.length), generator=torch.Generator().manual_seed(0))
        with count_saved_tensors() as kept, torch.autocast("cpu", torch.bfloat16):
            hidden = network.encode(network.embed(z), torch.full((rows, 1), 0.5))
        sizes.append(kept.activation_bytes(network))
        del hidden
    found = (sizes[1] - sizes[0]) / (8 * SMALL.length)
    assert found == pytest.approx(SMALL.activation_bytes_per_token, rel=0.05)


def test_one_rank_does_not_talk_and_many_send_all_but_their_own() -> None:
    assert communication_bytes(SMALL, 1, sharded=False) == 0
    assert communication_bytes(SMALL, 2, sharded=False) == 4 * SMALL.parameters
    assert communication_bytes(SMALL, 10**6, sharded=True) == pytest.approx(12 * SMALL.parameters, rel=1e-5)


def test_shards_take_less_memory_than_replicas() -> None:
    big = MODELS[-1]
    assert memory_bytes(big, 64, 1, sharded=True) < memory_bytes(big, 64, 1, sharded=False) / 3
    assert max_batch_size(big, H100, 64, sharded=False, global_batch_size=512) == 0
    assert max_batch_size(big, H100, 64, sharded=True, global_batch_size=512) >= 1


def test_talk_is_slower_between_nodes() -> None:
    machine = Cluster(
        "toy",
        flops=1e12,
        intra_node_bandwidth=1e9,
        inter_node_bandwidth=1e8,
        gpus_per_node=4,
        memory_bytes=1e12,
    )
    inside, outside = (step_time(SMALL, machine, ranks, 1, sharded=False) for ranks in (4, 5))
    assert outside.communication_seconds > 10 * inside.communication_seconds
    assert inside.serial_throughput < inside.overlapped_throughput
    assert replace(inside, communication_seconds=0.0).serial_throughput == inside.tokens / inside.compute_seconds
