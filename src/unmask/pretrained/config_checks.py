"""What reading a published layout takes: values of a config that strangers wrote, tensors under other
names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unmask.backbones import AnyBackbone
from unmask.backbones.dit import DiTConfig
from unmask.pretrained.state_dict import unique_tensors
from unmask.types import Vocab

Default = TypeVar("Default")


def get_int(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A whole number above 0."""
    value = config.get(key, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: config.json needs {key!r}, a whole number above 0; got {value!r}")
    return value


def get_token_id(config: Mapping[str, Any], key: str, where: str) -> int:
    """A token id."""
    value = config.get(key)
    if type(value) is not int or value < 0:
        raise ValueError(f"{where}: config.json needs {key!r}, a token id; got {value!r}")
    return value


def get_bool(config: Mapping[str, Any], key: str, where: str, default: bool) -> bool:
    """True or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: config.json's {key!r} must be true or false; got {value!r}")
    return value


def get_float(config: Mapping[str, Any], key: str, where: str, default: float) -> float:
    """Any number."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: config.json's {key!r} must be a number; got {value!r}")
    return float(value)


def require(config: Mapping[str, Any], where: str, **expected: object) -> None:
    """Refuse a config whose network is another one than ours; what it does not say is as expected."""
    for key, wanted in expected.items():
        options = wanted if isinstance(wanted, tuple) else (wanted,)
        if key in config and config[key] not in options:
            raise ValueError(
                f"{where}: config.json has {key} = {config[key]!r}, and only"
                f" {' or '.join(repr(option) for option in options)} is known here"
            )


def require_dit(backbone: AnyBackbone) -> DiTConfig:
    """The config of a network of ours: layouts of diffusion models hold no others."""
    if not isinstance(backbone, DiTConfig):
        raise ValueError(f"this layout holds networks of unmask's only; got a {type(backbone).__name__}")
    return backbone


def check_exportable(backbone: DiTConfig, supported: DiTConfig, kind: str) -> None:
    """Refuse a network that a layout cannot hold, saying which settings would fit."""
    fields = [field.name for field in dataclasses.fields(supported)]
    wanted = {name: getattr(supported, name) for name in fields if getattr(backbone, name) != getattr(supported, name)}
    if wanted:
        settings = " ".join(f"backbone.{name}={_format_setting(value)}" for name, value in wanted.items())
        raise ValueError(
            f"this network does not fit into {kind}'s layout, for its {', '.join(wanted)}; one that is"
            f" trained with --set {settings} would"
        )


def _format_setting(value: object) -> str:
    """As `--set` reads it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def get_depth(config: Mapping[str, Any], key: str, where: str, weights: Mapping[str, Tensor]) -> int:
    """How many blocks a network has: not more than there are tensors."""
    depth = get_int(config, key, where)
    check_depth(depth, weights, where)
    return depth


def check_depth(depth: int, weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse more layers than there are tensors, before anything is made for each of them."""
    if depth > len(weights):
        raise ValueError(
            f"{where}: config.json asks for {depth:,} layers, and the weights are {len(weights):,} tensors"
        )


class _MetaInit(TorchFunctionMode):
    """Networks built here have weights on the device `meta`, without numbers, which nobody draws.

    Under `torch.device("meta")` all that is computed on the way is there too, and that imports torch's
    compiler, which takes longer than all the rest of loading.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (torch.empty, torch.zeros):
            return func(*args, **{**named, "device": "meta"})
        filled = args[0] if args else named.get("tensor")
        if isinstance(filled, Tensor) and filled.is_meta and func.__name__ in _INIT_FUNCTIONS:
            return filled
        return func(*args, **named)


_INIT_FUNCTIONS = frozenset(("normal_", "uniform_", "kaiming_uniform_", "zeros_", "ones_", "zero_", "fill_", "copy_"))


def meta_shapes(backbone: DiTConfig, vocab: Vocab, weights: Mapping[str, Tensor], where: str) -> dict[str, torch.Size]:
    """The tensors of a network, without the memory and the time for them: its blocks are all alike.

    A network whose embedding alone has more numbers than the `weights` is refused before anything is made.
    """
    held = sum(tensor.numel() for tensor in weights.values())
    if vocab.size * backbone.width > held:
        raise ValueError(
            f"{where}: config.json asks for {vocab.size:,} tokens of width {backbone.width:,}, and the"
            f" weights are {held:,} numbers"
        )
    try:
        with _MetaInit():
            network = replace(backbone, depth=1).build(vocab)
    except RuntimeError:  # the number of elements of a tensor does not fit into 64 bits
        raise ValueError(f"{where}: config.json asks for a network that no memory can hold") from None
    expected: dict[str, torch.Size] = {}
    for name, tensor in unique_tensors(network.state_dict(keep_vars=True)).items():
        block = name.removeprefix("blocks.0.")
        same = [name] if block == name else [f"blocks.{i}.{block}" for i in range(backbone.depth)]
        expected |= dict.fromkeys(same, tensor.shape)
    return expected


def rename_tensors(
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
    expected: Mapping[str, torch.Size],
    where: str,
    kind: str,
    ignored: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """The tensors under our names, all of which must be there and of the expected shape; `names` theirs to
    ours."""
    missing, unknown = names.keys() - weights, weights.keys() - names - ignored
    if missing or unknown:
        what = f"lack {sorted(missing)[0]}" if missing else f"have the unknown tensor {sorted(unknown)[0]}"
        raise ValueError(f"the weights in {where} {what}: they are incomplete or not {kind}'s")
    for theirs, ours in names.items():
        if ours in expected and weights[theirs].shape != expected[ours]:
            raise ValueError(
                f"the weights in {where}: {theirs} has shape {list(weights[theirs].shape)}"
                f" where config.json asks for {list(expected[ours])}"
            )
    return {ours: weights[theirs] for theirs, ours in names.items()}
