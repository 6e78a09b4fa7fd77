"""Checks of tensors that never wait for a device."""

from __future__ import annotations

import torch
from torch import Tensor


def holds(condition: Tensor, *, unknown: bool = True) -> bool:
    """Whether all booleans are true. Only a CPU is asked; of other devices, which would have to be waited for, the
    answer is `unknown`."""
    if condition.device.type != "cpu":
        return unknown
    try:
        torch._assert_async(condition.all())
    except RuntimeError:
        return False
    return True
