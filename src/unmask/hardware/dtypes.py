"""The types in which weights are kept. This module does not import torch, so that `--help` does not."""

from __future__ import annotations

from typing import Literal, TypeAlias

DtypeName: TypeAlias = Literal["auto", "bfloat16", "float32", "int8", "int4"]
"""`auto` is the type in which the weights were saved."""
