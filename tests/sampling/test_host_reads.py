"""Samplers plan on the host: between network calls most of them read nothing back from the device.

Threshold, Factor and EntropyBounded decide from the scores how many tokens they keep, and ReMDM with `Conf` decides
from the probabilities which tokens it remasks: these read one value (a small tensor) per network call. The network
call itself reads one: how many positions of each sequence are queried.
"""

from __future__ import annotations

import pytest
import torch

import tiny_models
from host_reads import host_reads
from unmask import MDLM
from unmask.sampling import SAMPLERS, Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.denoisers import CountingDenoiser
from unmask.sampling.remdm import ReMDM

MASK, LENGTH = 4, 64
READ_ONE = ("threshold", "factor", "entropy-bounded", "remdm conf")
"""Samplers that need to read one value per call."""
AT_START = 8
"""Values that are read once per run: the canvas is validated, and its masked positions are found."""
samplers: dict[str, Sampler] = {
    **{
        name: kind(steps=32) if "steps" in kind.__dataclass_fields__ else kind()  # type: ignore[attr-defined]
        for name, kind in SAMPLERS.items()
    },
    "remdm conf": ReMDM(steps=32, remasking="conf"),
}


class Free(CountingDenoiser):
    """Reads nothing back: uniform log-probabilities."""

    def __call__(self, z, t, positions, context=None, *, row_fn=None, sequence_ids=None):  # type: ignore[no-untyped-def,override]
        self.nfe += 1
        log_x = torch.full((len(positions[0]), self.vocab.size), -1.8)
        log_x[:, MASK] = -torch.inf
        return row_fn(log_x, slice(None))


@pytest.mark.parametrize("name", samplers)
def test_a_sampler_reads_no_more_than_it_must(name: str) -> None:
    canvas = Canvas(torch.full((3, LENGTH), MASK), (0, 1, 2))
    denoiser = Free(tiny_models.tiny_denoiser(MDLM(), length=LENGTH))
    with torch.inference_mode(), host_reads() as reads:
        for _ in samplers[name].run(denoiser, canvas):
            pass
    assert denoiser.nfe >= 20
    assert reads.total <= (name in READ_ONE) * denoiser.nfe + AT_START, reads


@pytest.mark.parametrize("name", samplers)
def test_a_network_call_adds_one_read(name: str) -> None:
    canvas = Canvas(torch.full((3, LENGTH), MASK), (0, 1, 2))
    denoiser = CountingDenoiser(tiny_models.tiny_denoiser(MDLM(), length=LENGTH))
    with torch.inference_mode(), host_reads() as reads:
        for _ in samplers[name].run(denoiser, canvas):
            pass
    assert denoiser.nfe >= 20
    assert reads.total <= (1 + (name in READ_ONE)) * denoiser.nfe + AT_START, reads
