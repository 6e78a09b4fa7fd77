"""Networks filled with stored tensors: one at a time, in the type in which they are kept.

A network is built without memory. Each tensor is read, converted or quantized, and takes its place before the next is
read: loading needs the memory of the weights, and that of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from unmask.backbones.base import BlockStackConfig
from unmask.distributed import Distributed
from unmask.hardware.dtypes import DtypeName
from unmask.hardware.memory import require_memory
from unmask.hardware.precision import bf16_is_faster
from unmask.model import Denoiser, ModelConfig
from unmask.ops.linear import DEFAULT_GROUP_SIZE, Bits, Linear, QuantizedLinear
from unmask.pretrained._config_checks import MetaInit
from unmask.pretrained._folder import OBJECTIVE_PREFIX
from unmask.pretrained.state_dict import LazyTensor

_MIN_BF16_PARAMETERS = 10_000_000
"""Smaller models compute in float32: measuring takes 0.2 s, more than bfloat16 would save."""
_BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WeightStorage:
    """How the weights of a network are kept, and computed with."""

    dtype: DtypeName = "auto"
    """auto: as they were saved. int8 and int4: the matrices of the blocks, by groups; all others as they were saved."""
    group_size: int = DEFAULT_GROUP_SIZE
    """Weights that share a scale, for int8 and int4."""

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DtypeName):
            raise ValueError(f"dtype must be one of {', '.join(get_args(DtypeName))}; got {self.dtype!r}")
        if type(self.group_size) is not int or not 2 <= self.group_size <= 1 << 16:
            raise ValueError(f"group_size must be from 2 to {1 << 16:,}; got {self.group_size!r}")

    @property
    def bits(self) -> Bits | None:
        """Of a quantized weight; None without quantization."""
        return _BITS.get(self.dtype)

    def dtype_of(self, module: nn.Module, saved: torch.dtype) -> torch.dtype:
        """The type of a tensor of a module: only matrices that are read as such may have 16 bits."""
        if self.dtype == "float32" or not (isinstance(module, Linear) or _is_embedding(module)):
            return torch.float32
        return torch.bfloat16 if self.dtype == "bfloat16" else saved if saved in _NARROW else torch.float32

    def apply(self, denoiser: Denoiser, distributed: Distributed, saved: Iterable[torch.dtype] = ()) -> None:
        """Convert a network that is in float32 as a whole, such as one of another library."""
        if self.bits is not None:
            denoiser.quantize(self.bits, self.group_size)
        if self.computes_in_bf16(denoiser, distributed, saved):
            denoiser.to_bf16()

    def computes_in_bf16(self, denoiser: Denoiser, distributed: Distributed, saved: Iterable[torch.dtype]) -> bool:
        """Whether a network is computed in bfloat16: if that is asked for; or if it is faster, and some of the weights
        are kept, or were saved, in 16 bits or less. Weights of float32 stay exact."""
        if self.dtype in ("bfloat16", "float32"):
            return self.dtype == "bfloat16"
        is_rounded = self.bits is not None or any(dtype in _NARROW for dtype in saved)
        return is_rounded and prefers_bf16(denoiser, distributed)


def prefers_bf16(denoiser: Denoiser, distributed: Distributed) -> bool:
    """Whether the network is large, and bfloat16 is measured to be faster here.

    Rank 0 measures for all, so that texts do not depend on the rank that generates them.
    """
    large = denoiser.num_parameters >= _MIN_BF16_PARAMETERS
    return large and distributed.any_rank(distributed.is_main and bf16_is_faster(distributed.device, seconds=0.2))


@dataclass(frozen=True)
class NetworkBuilder:
    """Fills the network of a config with stored tensors, all of which fit it."""

    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    storage: WeightStorage
    distributed: Distributed
    where: str
    """The folder, for errors."""
    shard_weights: bool
    """Each rank keeps a part of every tensor, and gathers a block when it is computed (FSDP)."""

    def build(self) -> Denoiser:
        """The network; refused if it does not fit into memory."""
        backbone, process = self.config.backbone, self.config.objective.process
        if isinstance(backbone, BlockStackConfig) and not process.is_continuous:
            return self._build_by_tensors()
        return self._build_whole()

    def _build_by_tensors(self) -> Denoiser:
        storage = self.storage
        with MetaInit():
            denoiser = self.config.build()
        self._check_memory(denoiser)
        use_bf16 = storage.computes_in_bf16(denoiser, self.distributed, self._saved_dtypes())
        places = _Places(denoiser)
        quantizable = set() if storage.bits is None else set(denoiser.quantizable_layers())
        for module, names in _stages(denoiser, {_full_name(name): name for name in self.tensors}):
            for full_name, name in names.items():
                places.put(full_name, self.tensors[name], storage)
                layer = full_name.removesuffix(".weight")
                if storage.bits is not None and layer in quantizable and layer != full_name:
                    denoiser.quantize_layer(layer, storage.bits, storage.group_size)
            if use_bf16:
                denoiser.to_bf16(module)
            if self.shard_weights and self.distributed.world_size > 1:
                _shard(module)
        return denoiser

    def _build_whole(self) -> Denoiser:
        """A network whose parts are not known: it is built in float32, filled, and then converted."""
        if self.shard_weights:
            raise ValueError(
                f"the network of {self.where} cannot be split over processes: leave out the splitting of weights"
            )
        require_float32_memory(self.where, self.tensors, self.distributed)
        denoiser = self.config.build()
        weights = {name: tensor.view() for name, tensor in self.tensors.items()}
        learned = {name: weights.pop(name) for name in list(weights) if name.startswith(OBJECTIVE_PREFIX)}
        denoiser.stored_module.load_state_dict(weights, strict=False)
        denoiser.load_state_dict(learned, strict=False)
        self.storage.apply(denoiser, self.distributed, self._saved_dtypes())
        return denoiser

    def _saved_dtypes(self) -> Iterator[torch.dtype]:
        return (tensor.dtype for tensor in self.tensors.values())

    def _check_memory(self, denoiser: Denoiser) -> None:
        """Refuse weights that do not fit, with the types in which they would."""
        ranks = self.distributed.world_size if self.shard_weights else 1
        sizes = {
            name: _nbytes(denoiser, self.tensors, WeightStorage(name, self.storage.group_size)) // ranks
            for name in get_args(DtypeName)
        }
        require_memory(self.where, sizes, self.storage.dtype, self.distributed.device)


def require_float32_memory(where: str, tensors: Mapping[str, LazyTensor], distributed: Distributed) -> None:
    """Refuse a network that is read in float32 as a whole, and does not fit so."""
    size = sum(tensor.numel() for tensor in tensors.values()) * torch.float32.itemsize
    require_memory(where, {"float32": size}, "float32", distributed.device)


def _full_name(name: str) -> str:
    """A stored tensor's name in the denoiser."""
    return name if name.startswith(OBJECTIVE_PREFIX) else f"backbone.{name}"


def _is_embedding(module: nn.Module) -> bool:
    """Whether it is a table of ours, whose vectors may have another type."""
    return isinstance(module, nn.Embedding) and hasattr(module, "output_dtype")


class _Places:
    """Where each tensor of an empty network belongs: a tied one has several places."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        state = denoiser.state_dict(keep_vars=True)
        self.same: dict[int, list[str]] = {}
        for name, tensor in state.items():
            self.same.setdefault(id(tensor), []).append(name)
        self.tensors = state

    def put(self, name: str, tensor: LazyTensor, storage: WeightStorage) -> None:
        """Read a tensor, and put it in all its places."""
        old, values = self.tensors[name], tensor.read()
        for index, place in enumerate(self.same[id(old)]):
            path, _, attribute = place.rpartition(".")
            module = self.denoiser.get_submodule(path)
            if index == 0:
                values = values.to(storage.dtype_of(module, values.dtype))
                new: Tensor = nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values
            setattr(module, attribute, new)
            if _is_embedding(module):
                setattr(module, "output_dtype", torch.float32)  # noqa: B010


def _stages(denoiser: Denoiser, names: Mapping[str, str]) -> Iterator[tuple[nn.Module, dict[str, str]]]:
    """The blocks with the names of their tensors, and at last the network with all others."""
    blocks, rest = denoiser.blocks(), dict(names)
    prefixes = {module: f"{path}." for path, module in denoiser.named_modules() if module in blocks}
    for block, prefix in prefixes.items():
        inside = [name for name in rest if name.startswith(prefix)]
        yield block, {name: rest.pop(name) for name in inside}
    yield denoiser, rest


def _shard(module: nn.Module) -> None:
    """Keep this rank's part only; the whole is gathered for each call, and let go of after it.

    Such a network is not trained, so that its tensors may differ in type.
    """
    from torch.distributed.fsdp import fully_shard

    fully_shard(module.requires_grad_(False), reshard_after_forward=True)


def _nbytes(denoiser: Denoiser, tensors: Mapping[str, LazyTensor], storage: WeightStorage) -> int:
    """Bytes of the weights as they will be kept."""
    quantizable = {} if storage.bits is None else denoiser.quantizable_layers()
    total = 0
    for name, tensor in tensors.items():
        path, _, attribute = _full_name(name).rpartition(".")
        size = None
        if storage.bits is not None and path in quantizable and attribute == "weight":
            size = QuantizedLinear.nbytes_of(tensor.shape, storage.bits, storage.group_size)
        kept = storage.dtype_of(denoiser.get_submodule(path), tensor.dtype)
        total += tensor.numel() * kept.itemsize if size is None else size
    return total
