"""Mixtures of experts against their definition, written as loops; their auxiliary losses; training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask.backbones.dit import DiTConfig, LlamaBlock
from unmask.backbones.moe import Experts, MixtureOfExperts
from unmask.types import Vocab

SOFTMAX = Experts(6, 2, 10)
SIGMOID = Experts(
    12,
    3,
    8,
    shared_intermediate_size=5,
    scoring="sigmoid",
    normalize=True,
    scale=2.5,
    selection_bias=True,
    groups=4,
    groups_per_token=2,
    balance_loss=0.0,
)


def build(config: Experts, width: int = 16, seed: int = 0) -> MixtureOfExperts:
    torch.manual_seed(seed)
    mixture = MixtureOfExperts(width, config)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    if mixture.router.expert_bias is not None:
        mixture.router.expert_bias.normal_(std=0.3)
    return mixture.double()


def by_definition(mixture: MixtureOfExperts, token: Tensor) -> Tensor:
    """The output for one token, expert by expert."""
    config, weight = mixture.config, mixture.router.gate.weight
    logits = (weight.float() @ token.float()).double()
    scores = logits.softmax(0) if config.scoring == "softmax" else logits.sigmoid()
    choice = scores.detach().clone()
    if mixture.router.expert_bias is not None:
        choice += mixture.router.expert_bias
    size = config.count // config.groups
    groups = [sum(sorted(choice[g * size : (g + 1) * size].tolist())[-2:]) for g in range(config.groups)]
    kept = sorted(range(config.groups), key=lambda g: groups[g])[-config.groups_per_token :]
    allowed = [expert for g in kept for expert in range(g * size, (g + 1) * size)]
    chosen = sorted(allowed, key=lambda expert: float(choice[expert]))[-config.per_token :]
    weights = scores[chosen]
    if config.normalize:
        weights = weights / weights.sum()
    out = sum(
        config.scale * w * mixture.experts[expert](token[None])[0] for w, expert in zip(weights, chosen, strict=True)
    )
    return out if mixture.shared_expert is None else out + mixture.shared_expert(token[None])[0]


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_a_mixture_is_the_weighted_sum_of_a_tokens_experts(config: Experts, seed: int) -> None:
    mixture = build(config, seed=seed)
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    expected = torch.stack([by_definition(mixture, token) for token in x.view(-1, 16)]).view(3, 4, 16)
    torch.testing.assert_close(mixture(x), expected, atol=1e-5, rtol=1e-5)  # scores are float32
    with torch.no_grad():  # experts without tokens are not asked then
        torch.testing.assert_close(mixture(x[:1, :1]), expected[:1, :1], atol=1e-5, rtol=1e-5)


def test_every_parameter_has_a_gradient_that_is_that_of_the_definition() -> None:
    mixture, x = build(SOFTMAX), torch.randn(5, 16, dtype=torch.float64)
    mixture(x).square().sum().backward()
    gradients = [parameter.grad for parameter in mixture.parameters()]
    assert all(gradient is not None for gradient in gradients)
    mixture.zero_grad()
    torch.stack([by_definition(mixture, token) for token in x]).square().sum().backward()
    for ours, parameter in zip(gradients, mixture.parameters(), strict=True):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def balance_loss(mixture: MixtureOfExperts) -> float:
    assert mixture.aux_loss is not None
    return mixture.aux_loss.item()


def test_the_balance_loss_is_its_coefficient_if_all_experts_are_equal_and_more_if_not() -> None:
    mixture, x = build(replace(SOFTMAX, z_loss=0.0)), torch.randn(400, 16, dtype=torch.float64)
    torch.nn.init.zeros_(mixture.router.gate.weight)
    mixture(x)
    assert balance_loss(mixture) == pytest.approx(0.01)
    with torch.no_grad():
        mixture.router.gate.weight[0] = 3 * x.mean(0)
        mixture.router.gate.weight[:2] += 1
    mixture(x + 1)
    assert balance_loss(mixture) > 0.015
    with torch.no_grad():
        mixture(x)
    assert mixture.aux_loss is None


def test_no_tokens_are_fine() -> None:
    """The last block computes masked positions only, and there may be none."""
    mixture = build(SOFTMAX)
    out = mixture(torch.zeros(0, 16, dtype=torch.float64))
    assert out.shape == (0, 16)
    assert balance_loss(mixture) == 0
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in mixture.experts.parameters())


def test_training_on_the_balance_loss_alone_spreads_tokens_over_experts() -> None:
    mixture, x = build(replace(SOFTMAX, balance_loss=1.0)), torch.randn(300, 16, dtype=torch.float64)
    with torch.no_grad():
        mixture.router.gate.weight[:2] += 0.5
    x = x + 0.5
    optimizer = torch.optim.Adam(mixture.router.parameters(), 0.02)

    def largest_share() -> float:
        chosen, _, _ = mixture.router(x)
        return float(chosen.flatten().bincount(minlength=6).max() / chosen.numel())

    before = largest_share()
    for _ in range(60):
        optimizer.zero_grad()
        mixture(x)
        assert mixture.aux_loss is not None
        mixture.aux_loss.backward()
        optimizer.step()
    assert largest_share() < 0.25 < 0.4 < before


def test_a_network_with_experts_adds_the_mean_of_its_blocks() -> None:
    config = DiTConfig(16, 3, 2, 32, 0.0, llama=LlamaBlock(24, experts=replace(SOFTMAX, dense_layers=(1,))))
    network = config.build(Vocab(9, 8))
    assert [isinstance(block.mlp, MixtureOfExperts) for block in network.layers] == [True, False, True]
    network.encode(network.embed(torch.randint(0, 8, (2, 5))), torch.zeros(2, 1))
    losses = [block.mlp.aux_loss for block in network.layers if isinstance(block.mlp, MixtureOfExperts)]
    torch.testing.assert_close(network.aux_loss(), torch.stack(losses).mean())
    assert "2 of 6 experts" in network.describe()["network"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"count": 0}, "from 1 to 16,384 experts"),
        ({"per_token": 7}, "from 1 to 6 experts"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size"),
        ({"scoring": "tanh"}, "softmax or sigmoid"),
        ({"groups": 4}, "equally large parts"),
        ({"groups": 3, "groups_per_token": 4}, "from 1 to 3"),
        ({"groups": 6, "groups_per_token": 1}, "fewer than 2 experts"),
        ({"balance_loss": -1.0}, "must not be negative"),
    ],
)
def test_bad_mixtures_are_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(SOFTMAX, **change)  # type: ignore[arg-type]
