"""Targets, states and losses of the published programs for SDTT and DCD."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unmask import MDLM, Batch, UniformDiffusion, Vocab
from unmask.diffusion.process import Masking, Process
from unmask.distillation import DCD, SDTT
from unmask.distillation.dcd import coupled, prob_kept
from unmask.distillation.sdtt import _alpha
from unmask.objectives import Objective
from unmask.types import RowFn


@dataclass
class NeighbourTable:
    """logits at l = W[0][z_l] + W[1][z_(l - 1)] + W[2][z_(l + 1)], nothing outside the text; the mask is last."""

    table: Tensor  # [3, V, V], or one fewer where the published network has no mask
    objective: Objective
    vocab: Vocab
    times: list[Tensor] = field(default_factory=list)
    normalized: bool = True

    @property
    def process(self) -> Process:
        return self.objective.process

    def __call__(self, z: Tensor, t: Tensor, positions: Any, *rest: Any, row_fn: RowFn | None = None) -> Tensor:
        self.times.append(t)
        logits = self.table[0][z].clone()
        logits[:, 1:] += self.table[1][z[:, :-1]]
        logits[:, :-1] += self.table[2][z[:, 1:]]
        missing = self.vocab.size - logits.shape[-1]
        logits = torch.nn.functional.pad(logits, (0, missing))
        log_x = self.objective.log_probs(logits[tuple(positions)], torch.zeros(len(positions[0]), 1), self.vocab)
        return log_x if row_fn is None else row_fn(log_x, slice(None))


@pytest.fixture(scope="module")
def sdtt(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "sdtt_targets" / "expected.safetensors")


@pytest.fixture(scope="module")
def dcd(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "dcd_targets" / "expected.safetensors")


MASK = 8
PUBLISHED = SDTT(sampling_steps=16, published_times=True)
ROUND = 1
VOCAB = Vocab(9, MASK)


def tables(expected: dict[str, Tensor]) -> tuple[NeighbourTable, NeighbourTable]:
    return tuple(NeighbourTable(expected[f"{who}.table"], MDLM(), VOCAB) for who in ("student", "teacher"))  # type: ignore[return-value]


def replay(expected: dict[str, Tensor], method: SDTT) -> list[Tensor]:
    """Uniform numbers with which our draws are the published ones: the first for when, the second for what.

    When: below or above the probability that a position is still masked after the first step. What: the middle of the
    drawn token's part of the cumulative distribution.
    """
    before, after = expected["states"][0], expected["states"][1]
    revealed = (before == MASK) & (after != MASK)
    p = expected["teacher.logp"][0].double().exp()
    p[..., MASK] = 0
    token = after.clamp(max=MASK - 1)[..., None]
    middle = (p.cumsum(-1).gather(-1, token) - p.gather(-1, token) / 2)[..., 0] / p.sum(-1)
    return [torch.where(revealed, 0.9999999, 0.0).double(), middle]


def test_the_published_times_and_step(sdtt: dict[str, Tensor], golden: Path) -> None:
    config = json.loads((golden / "sdtt_targets" / "config.json").read_text())
    assert PUBLISHED.step_size(config["round"]) == pytest.approx(config["dt"], rel=1e-12)
    t = sdtt["t"].double()[:, None]
    torch.testing.assert_close(torch.cat(PUBLISHED.times(t, ROUND), 1).T.float(), sdtt["times"])
    even = SDTT(sampling_steps=16)
    torch.testing.assert_close(
        torch.cat(even.times(t, ROUND), 1).T.float(), sdtt["times.ideal"].clamp(min=0), atol=1e-5, rtol=1e-5
    )


def test_the_published_rule_draws_the_published_states_at_our_rates(sdtt: dict[str, Tensor]) -> None:
    """argmax of q/(-log u), with q our step's probabilities of each token and of staying masked."""
    process = MDLM().process
    assert isinstance(process, Masking)
    for i, time in enumerate(PUBLISHED.times(sdtt["t"].double()[:, None], ROUND)):
        alpha_t, alpha_s = (_alpha(process.schedule, each) for each in (time, time - PUBLISHED.step_size(ROUND)))
        r = process.unmask_prob(alpha_s, alpha_t)[..., None]
        q = r * sdtt["teacher.logp"][i].double().exp()
        q[..., MASK] = (1 - r)[..., 0]
        drawn = (q / (1e-10 - (sdtt["uniforms"][i].double() + 1e-10).log())).argmax(-1)
        before = sdtt["states"][i]
        assert torch.equal(torch.where(before == MASK, drawn, before), sdtt["states"][i + 1])


def test_sdtt_targets_are_the_published_ones(sdtt: dict[str, Tensor]) -> None:
    _, teacher = tables(sdtt)
    masked = sdtt["xt"] == MASK
    t = sdtt["t"].double()[:, None]
    targets = PUBLISHED.targets(teacher, Batch(sdtt["x0"]), sdtt["xt"], t, ROUND, replay(sdtt, PUBLISHED))
    clean = torch.arange(9) != MASK
    torch.testing.assert_close(targets[:, clean].float(), sdtt["target"][masked][:, clean], atol=1e-5, rtol=1e-5)
    assert (targets[:, MASK] == -torch.inf).all()


@pytest.mark.parametrize(("forward", "name"), [(False, "loss.kl-bwd"), (True, "loss.kl-fwd")])
def test_sdtt_losses_are_the_published_ones(sdtt: dict[str, Tensor], forward: bool, name: str) -> None:
    student, teacher = tables(sdtt)
    method = SDTT(sampling_steps=16, published_times=True, forward_kl=forward)
    t, uniforms = sdtt["t"].double()[:, None], replay(sdtt, method)
    divergence = method.divergence(student, teacher, Batch(sdtt["x0"]), sdtt["xt"], t, ROUND, uniforms)
    torch.testing.assert_close(divergence.mean().float(), sdtt[name], atol=1e-5, rtol=1e-5)


DCD_ROUND = 2
DUO_VOCAB = Vocab(9, MASK)


def duo(dcd: dict[str, Tensor], golden: Path, **changes: Any) -> DCD:
    config = json.loads((golden / "dcd_targets" / "config.json").read_text())
    method = DCD(
        sampling_steps=config["T"],
        steps_per_round=config["update_teacher_every"],
        gamma_min=config["gamma_min"],
        gamma_max=config["gamma_max"],
        **changes,
    )
    assert method.rounds(config["global_step"] + 1) - 1 == DCD_ROUND
    assert method.step_size(DCD_ROUND) == config["dt"]
    return method


def uniforms_of(dcd: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Our two uniform numbers for the published Gaussians: when x is overtaken, and by which token."""
    x, eps = dcd["x0"][..., None], dcd["eps"].double()
    others = eps.scatter(-1, x, -torch.inf)
    largest, token = others.max(-1)
    distance = largest - eps.gather(-1, x)[..., 0]
    uniform = 1 - prob_kept(distance, 8)
    index = token - (token > dcd["x0"]).long()  # among the seven others
    return uniform, (index.double() + 0.5) / 7


def test_dcd_alphas_are_the_published_ones(dcd: dict[str, Tensor], golden: Path) -> None:
    method = duo(dcd, golden)
    t = (dcd["t"].double()[:, None] + method.step_size(DCD_ROUND)).clamp(max=1)
    for name, time in (("t", t), ("s", t - method.step_size(DCD_ROUND))):
        alpha = method.alpha(time, 8)[:, 0]
        torch.testing.assert_close(alpha.float(), dcd[f"alpha_{name}"], atol=2e-6, rtol=1e-5)


def test_dcd_states_are_the_published_ones(dcd: dict[str, Tensor]) -> None:
    """Two numbers a token give what the Gaussians of the whole vocabulary give, at both times."""
    uniform, other = uniforms_of(dcd)
    for name in ("t", "s"):
        z = coupled(dcd["x0"], dcd[f"alpha_{name}"].double()[:, None], uniform, other, DUO_VOCAB)
        assert torch.equal(z, dcd[f"z_{name}"])
    assert (dcd["z_t"] != dcd["z_s"]).any()
    assert (dcd["z_s"] != dcd["x0"]).any()


@pytest.mark.parametrize(("forward", "name"), [(False, "loss.kl-bwd"), (True, "loss.kl-fwd")])
def test_dcd_losses_are_the_published_ones(dcd: dict[str, Tensor], golden: Path, forward: bool, name: str) -> None:
    method = duo(dcd, golden, forward_kl=forward)
    student, teacher = (
        NeighbourTable(dcd[f"{who}.table"], UniformDiffusion(), DUO_VOCAB) for who in ("student", "teacher")
    )
    uniform, other = uniforms_of(dcd)
    t = dcd["t"].double()[:, None]
    divergence = method.divergence(student, teacher, Batch(dcd["x0"]), t, DCD_ROUND, uniform, other)
    torch.testing.assert_close(divergence.view(4, 24).float(), dcd[name], atol=1e-4, rtol=1e-4)
    for table, which in ((student, "t"), (teacher, "s")):
        assert isinstance(table.process.alpha(table.times[0]), Tensor)
        torch.testing.assert_close(
            table.process.alpha(table.times[0])[:, 0].float(), dcd[f"alpha_{which}"], atol=2e-6, rtol=1e-5
        )
