from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shapes import CHECKED, ShapeError
from unmask.diffusion.categorical import sample_inverse_cdf
from unmask.diffusion.process import Masking
from unmask.types import Vocab

WRONG = "sample_inverse_cdf(torch.ones(2, 5), torch.zeros(1, dtype=torch.float64))"
"""One uniform number for two rows, which torch would broadcast."""


def test_a_wrong_shape_is_caught() -> None:
    with pytest.raises(ShapeError, match=r"uniform of sample_inverse_cdf is torch.float64 \[1\]"):
        sample_inverse_cdf(torch.ones(2, 5), torch.zeros(1, dtype=torch.float64))


def test_a_wrong_dtype_is_caught() -> None:
    with pytest.raises(ShapeError, match=r"uniform of sample_inverse_cdf is torch.float32 \[2\]"):
        sample_inverse_cdf(torch.ones(2, 5), torch.zeros(2))


def test_one_time_per_sequence_stands_for_all_of_its_tokens() -> None:
    x, uniform, vocab = torch.zeros(2, 3, dtype=torch.int64), torch.rand(2, 3), Vocab(5, 4)
    for columns in (1, 3):
        assert Masking().corrupt(x, torch.ones(2, columns), uniform, vocab).equal(x)
    with pytest.raises(ShapeError, match=r"alpha of Masking.corrupt"):
        Masking().corrupt(x, torch.ones(2, 2), uniform, vocab)


def test_nothing_is_checked_outside_the_tests() -> None:
    code = f"import torch; from unmask.diffusion.categorical import sample_inverse_cdf; print({WRONG}.tolist())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[0, 0]"


def test_the_mathematical_core_is_checked() -> None:
    import unmask.likelihood._estimate
    import unmask.model.denoiser
    import unmask.sampling.ancestral
    import unmask.sampling.confidence  # noqa: F401

    parts = {name.split(".")[1] for name in CHECKED}
    assert parts >= {"diffusion", "objectives", "ops", "sampling", "likelihood", "model", "backbones"}
    assert len(CHECKED) >= 100
