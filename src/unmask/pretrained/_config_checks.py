"""Checks shared by the published formats: values of an untrusted config, names and shapes of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unmask.backbones import BackboneConfig
from unmask.backbones.base import BlockStackConfig
from unmask.backbones.dit import DiTConfig
from unmask.pretrained.state_dict import LazyTensor, unique_tensors
from unmask.types import Vocab


class ConfigReader:
    """Typed access to the `config.json` of a published model; a wrong value is refused with its key and file."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def get_int(self, key: str, default: int | None = None) -> int:
        """An integer above 0; null stands for the default."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.where}: config.json needs {key!r}, an integer above 0; got {value!r}")
        return value

    def get_token_id(self, key: str) -> int:
        """A token id."""
        value = self.config.get(key)
        if type(value) is not int or value < 0:
            raise ValueError(f"{self.where}: config.json needs {key!r}, a token id; got {value!r}")
        return value

    def get_token_ids(self, key: str) -> tuple[int, ...]:
        """A list of token ids."""
        values = self.config.get(key)
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise ValueError(f"{self.where}: config.json needs {key!r}, a list of token ids; got {values!r}")
        return tuple(values)

    def get_bool(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: config.json's {key!r} must be true or false; got {value!r}")
        return value

    def get_float(self, key: str, default: float) -> float:
        """A number."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.where}: config.json's {key!r} must be a number; got {value!r}")
        return float(value)

    def get_depth(self, key: str, weights: Mapping[str, LazyTensor]) -> int:
        """The number of blocks, which cannot be larger than the number of tensors."""
        depth = self.get_int(key)
        check_depth(depth, weights, self.where)
        return depth

    def require(self, **expected: object) -> None:
        """Refuse a config whose value differs from the expected one (or ones, in a tuple); absent keys pass."""
        for key, wanted in expected.items():
            options = wanted if isinstance(wanted, tuple) else (wanted,)
            if key in self.config and self.config[key] not in options:
                supported = " or ".join(repr(option) for option in options)
                raise ValueError(
                    f"{self.where}: config.json has {key} = {self.config[key]!r}, but only {supported} is supported"
                )


def require_dit(backbone: BackboneConfig) -> DiTConfig:
    """The config of a DiT; the formats of diffusion models hold no other network."""
    if not isinstance(backbone, DiTConfig):
        raise ValueError(f"this format holds a DiT only; got a {type(backbone).__name__}")
    return backbone


def check_exportable(backbone: DiTConfig, supported: DiTConfig, kind: str) -> None:
    """Refuse a network that a format cannot hold, and name the settings that would fit."""
    fields = [field.name for field in dataclasses.fields(supported)]
    wanted = {name: getattr(supported, name) for name in fields if getattr(backbone, name) != getattr(supported, name)}
    if wanted:
        settings = " ".join(f"backbone.{name}={_format_setting(value)}" for name, value in wanted.items())
        raise ValueError(
            f"{kind}'s format cannot hold this network because of its {', '.join(wanted)}; train it with"
            f" --set {settings}"
        )


def _format_setting(value: object) -> str:
    """A value in the syntax of `--set`."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def check_depth(depth: int, weights: Mapping[str, LazyTensor], where: str) -> None:
    """Refuse more layers than tensors, before memory is allocated for each layer."""
    if depth > len(weights):
        raise ValueError(
            f"{where}: config.json asks for {depth:,} layers, but the weights have only {len(weights):,} tensors"
        )


class MetaInit(TorchFunctionMode):
    """Networks built in this mode have uninitialized weights on the device `meta`.

    `torch.device("meta")` would also move intermediate computations there, which imports torch's compiler
    and takes longer than all the rest of loading.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("dtype") in (None, torch.float32):
            return func(*args, **{**kwargs, "device": "meta"})
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, Tensor) and target.is_meta and func.__name__ in _INIT_FUNCTIONS:
            return target
        return func(*args, **kwargs)


_INIT_FUNCTIONS = frozenset(
    ("normal_", "uniform_", "kaiming_uniform_", "zeros_", "ones_", "zero_", "fill_", "copy_", "div_")
)


def meta_shapes(
    backbone: BlockStackConfig, vocab: Vocab, weights: Mapping[str, LazyTensor], where: str
) -> dict[str, torch.Size]:
    """The shapes of a network's tensors, from one block of each kind, built without memory.

    A network whose embedding alone is larger than the `weights` is refused before anything is allocated.
    """
    num_weights = sum(tensor.numel() for tensor in weights.values())
    if vocab.size * backbone.width > num_weights:
        raise ValueError(
            f"{where}: config.json asks for {vocab.size:,} tokens of width {backbone.width:,}, but the"
            f" weights are only {num_weights:,} numbers"
        )
    layers: dict[BlockStackConfig, list[int]] = {}
    for index in range(backbone.depth):
        layers.setdefault(backbone.one_block(index), []).append(index)
    expected: dict[str, torch.Size] = {}
    for one_block, indices in layers.items():
        try:
            with MetaInit():
                network = one_block.build(vocab)
        except RuntimeError:  # the number of elements of a tensor does not fit into 64 bits
            raise ValueError(f"{where}: config.json asks for a network that is too large for any memory") from None
        for name, tensor in unique_tensors(network.state_dict(keep_vars=True)).items():
            block = name.removeprefix("layers.0.")
            same = [name] if block == name else [f"layers.{i}.{block}" for i in indices]
            expected |= dict.fromkeys(same, tensor.shape)
    return expected


def rename_tensors(
    weights: Mapping[str, LazyTensor],
    names: Mapping[str, str],
    expected: Mapping[str, torch.Size],
    where: str,
    kind: str,
    ignored: frozenset[str] = frozenset(),
) -> dict[str, LazyTensor]:
    """The tensors under our names; `names` maps theirs to ours.

    All tensors must be present and of the expected shape; no others but the `ignored` are allowed.
    """
    missing, unknown = names.keys() - weights, weights.keys() - names - ignored
    if missing or unknown:
        what = f"lack {sorted(missing)[0]}" if missing else f"have the unknown tensor {sorted(unknown)[0]}"
        raise ValueError(f"the weights in {where} {what}: they are incomplete or not those of {kind}")
    for theirs, ours in names.items():
        if ours in expected and weights[theirs].shape != expected[ours]:
            raise ValueError(
                f"the weights in {where}: {theirs} has shape {list(weights[theirs].shape)}"
                f" but config.json asks for {list(expected[ours])}"
            )
    return {ours: weights[theirs] for theirs, ours in names.items()}
