"""Losses of the published implementation, reproduced to 1e-4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import unmask
from unmask import D3PM, MDLM, SEDD, Batch, Denoiser
from unmask.diffusion.noise_level import NoiseLevel, continuous_level
from unmask.diffusion.schedule import LogLinear
from unmask.objectives.base import MaskedObjective

MASK = 50


@pytest.fixture(scope="module")
def expected(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "mdlm_tiny" / "expected.safetensors")


@pytest.fixture(scope="module", params=["tc", "notc"])
def variant(request: pytest.FixtureRequest) -> str:
    """With the network told sigma(t), and without time conditioning."""
    return str(request.param)


@pytest.fixture(scope="module")
def network(golden: Path, variant: str, tmp_path_factory: pytest.TempPathFactory) -> Denoiser:
    folder = shutil.copytree(golden / "mdlm_tiny", tmp_path_factory.mktemp("model") / variant)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "time_conditioning": variant == "tc"}))
    return unmask.load(folder).denoiser


def read_through(network: Denoiser, objective: MaskedObjective) -> Denoiser:
    """The same weights, read by another objective."""
    other = unmask.ModelConfig(
        network.vocab, network.config.backbone, objective, network.config.condition_on_sigma
    ).build()
    other.load_state_dict(network.state_dict())
    return other.eval()


class PublishedLinear(LogLinear):
    """alpha = 1 - t, held off its end."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t.clamp(max=1 - 1e-4)


@torch.no_grad()
def charge(objective: MaskedObjective, network: Denoiser, x: Tensor, z: Tensor, moment: NoiseLevel) -> Tensor:
    return objective.weighted_nll(read_through(network, objective), Batch(x), z, moment)


def test_noise(expected: dict[str, Tensor]) -> None:
    process = MDLM(schedule=LogLinear(eps=1e-3)).process
    alpha = process.schedule.alpha(expected["t"])[:, None]
    z = process.corrupt(expected["x0"], alpha, expected["u"], unmask.Vocab(51, MASK))
    assert torch.equal(z, expected["xt"])


def test_nelbo(expected: dict[str, Tensor], network: Denoiser, variant: str) -> None:
    schedule = LogLinear(eps=1e-3)
    t = expected["t"].double()[:, None]
    moment = NoiseLevel(t, schedule.alpha(t), None, schedule.weight(t))
    nats = charge(MDLM(schedule=schedule), network, expected["x0"], expected["xt"], moment)
    torch.testing.assert_close(nats, expected[f"subs.nelbo.{variant}"], atol=1e-4, rtol=1e-5)


def test_the_diffusion_part_of_the_clock_is_the_published_one(expected: dict[str, Tensor]) -> None:
    """Between its completed ends, our moment of u is the published time, noise and weight."""
    schedule = LogLinear(eps=1e-3)
    t = expected["t"].double()[:, None]
    moment = continuous_level(schedule, t * (1 - 1e-3))
    torch.testing.assert_close(moment.t, t)
    torch.testing.assert_close(moment.alpha, schedule.alpha(t))
    torch.testing.assert_close(moment.weight * (1 - 1e-3), 1 / t)


@pytest.mark.parametrize("variant", ["tc"], indirect=True)
def test_score_entropy(expected: dict[str, Tensor], network: Denoiser) -> None:
    schedule = LogLinear(eps=1e-3)
    t = expected["t"].double()[:, None]
    moment = NoiseLevel(t, schedule.alpha(t), None, schedule.weight(t))
    nats = charge(SEDD(schedule=schedule), network, expected["x0"], expected["xt"], moment)
    torch.testing.assert_close(nats, expected["sedd.loss.tc"], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("variant", ["notc"], indirect=True)
@pytest.mark.parametrize("steps", [4, 1000])
@pytest.mark.parametrize(("kind", "name"), [(MDLM, "subs"), (D3PM, "d3pm")], ids=["subs", "d3pm"])
def test_t_steps(expected: dict[str, Tensor], network: Denoiser, kind: type[Any], name: str, steps: int) -> None:
    """The published loss takes alpha = 1 - t with t held below 1 - 1e-4."""
    objective = kind(schedule=PublishedLinear(), steps=steps)
    t = expected[f"d3pm.{steps}.t"].double()[:, None]
    alpha_t, alpha_s = 1 - t.clamp(max=1 - 1e-4), 1 - (t.clamp(max=1 - 1e-4) - 1 / steps)
    jump = objective.process.unmask_prob(alpha_s, alpha_t)
    moment = NoiseLevel(t, alpha_t, jump, steps * jump)
    nats = charge(objective, network, expected["x0"], expected[f"d3pm.{steps}.xt"], moment)
    torch.testing.assert_close(nats, expected[f"{name}.T{steps}.loss"], atol=1e-4, rtol=1e-5)
