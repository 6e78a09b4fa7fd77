"""One copy of weights for several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unmask import MDLM, DiTConfig, LanguageModel, Tokenizer
from unmask.serve._shared_weights import share_weights


def network(seed: int = 0, width: int = 64, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        backbone = DiTConfig(width=width, depth=2, heads=2, max_length=32)
        lm = LanguageModel.from_config(backbone, MDLM(), Tokenizer.bytes())
        torch.nn.init.normal_(lm.denoiser.backbone.lm_head.weight)
    return lm.denoiser.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stay_the_same_and_are_those_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    file = tmp_path / "0.weights"
    expected = {name: value.clone() for name, value in network(dtype=dtype).state_dict().items()}
    sizes = []
    for _ in range(2):  # the one that writes the file, and one that finds it
        one = network(dtype=dtype)
        sizes.append(share_weights(one, file))
        for name, value in one.state_dict().items():
            assert torch.equal(value, expected[name]), name
    whole = sum(value.nbytes for value in expected.values())
    assert sizes[0] == sizes[1] == file.stat().st_size > 0.8 * whole


def test_what_one_changes_is_its_own(tmp_path: Path) -> None:
    one, other = network(), network()
    for each in (one, other):
        share_weights(each, tmp_path / "0.weights")
    first, second = (max(each.parameters(), key=lambda weight: weight.numel()) for each in (one, other))
    with torch.no_grad():
        first.zero_()
    assert second.abs().sum() > 0
    share_weights(network(), tmp_path / "0.weights")  # which is as it was


@pytest.mark.parametrize("changed", [network(seed=1), network(width=128)], ids=["other numbers", "other shapes"])
def test_other_weights_are_refused(tmp_path: Path, changed: torch.nn.Module) -> None:
    share_weights(network(), tmp_path / "0.weights")
    with pytest.raises(ValueError, match="have changed since the server was started: start the server again"):
        share_weights(changed, tmp_path / "0.weights")
