from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from shapes import check_shapes

check_shapes("unmask")  # the shapes in annotations, at every call

settings.register_profile("house", deadline=None)  # a shared machine's pauses are not failures
settings.load_profile("house")

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests run side by side; more threads than cores would only slow them down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Numbers of published implementations: see the README there."""
    if not GOLDEN.is_dir():
        pytest.skip("a source distribution does not hold tests/golden; the repository does")
    return GOLDEN
