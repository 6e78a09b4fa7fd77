"""torch.compile, block by block."""

from __future__ import annotations

import os
import shutil

from torch import nn

from unmask.backbones.base import network_blocks


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of the network, in place: names of parameters stay as they are.

    The blocks share one graph (and another for batches with padding) for all batch sizes and lengths: which
    code a step runs does not depend on the steps before it, so a resumed run is bit-identical. The last block is
    not compiled: its shapes follow the masks, so it would be compiled again at every step.
    """
    compiler = os.environ.get("CXX")
    compilers = [compiler] if compiler else ["g++", "clang++", "c++", "cl"]
    if not any(shutil.which(name) for name in compilers):
        raise ValueError(
            f"compile needs a C++ compiler, and there is no {' or '.join(compilers)} here:"
            " install one, name yours in the variable CXX, or train without compile"
        )
    blocks = network_blocks(model)
    if not blocks:
        raise ValueError("compile is for networks made of blocks, and this one has none: train without it")
    for block in blocks[:-1]:
        block.compile(dynamic=True)
