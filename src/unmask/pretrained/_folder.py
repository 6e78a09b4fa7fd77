"""The files of a model folder, checked before they are used: kinds, sizes, checksums, names and shapes of tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from unmask.backbones.base import BlockStackConfig
from unmask.backbones.hf import HFBackboneConfig
from unmask.data.chat import CHAT_TEMPLATE_FILE
from unmask.io.atomic import atomic_folder
from unmask.io.checksums import sha256_of_file
from unmask.io.locks import file_lock
from unmask.io.untrusted import read_json_object, require_regular_file
from unmask.model import ModelConfig
from unmask.objectives import MDLM
from unmask.pretrained._config_checks import check_depth, meta_shapes
from unmask.pretrained.formats import _hf as hf
from unmask.pretrained.formats._hf_tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from unmask.pretrained.state_dict import LazyTensor, list_weight_files, read_state_dict, unique_tensors

CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, CARD_FILE = (
    "config.json",
    "model.safetensors",
    "manifest.json",
    "README.md",
)
_MODEL_FILES = {
    CONFIG_FILE,
    WEIGHTS_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    CHAT_TEMPLATE_FILE,
    MANIFEST_FILE,
    CARD_FILE,
}
OBJECTIVE_PREFIX = "objective_parameters."
"""The names of tensors that the objective has learned begin with it; all others are the network's."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_MAX_TEXT_FILE_BYTES = 64 << 20
"""The largest JSON or vocabulary file; the largest published vocabularies have half as many bytes."""


class StoredModel:
    """The files of a model folder: small ones are verified at once, the weights before they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_regular_files(path)
        small_files, self._weight_files = _read_checksums(path)
        _verify_checksums(path, small_files)
        self.config = read_json_object(path / CONFIG_FILE)

    def tensors(self) -> dict[str, LazyTensor]:
        """The tensors, of which only the headers are read."""
        return read_state_dict(self.path)

    def verify_weights(self) -> None:
        """Refuse damaged files of weights: to be called before tensors are read."""
        _verify_checksums(self.path, self._weight_files)

    def check(self, config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> None:
        """Refuse tensors that are not those of a config: of its network, and of what its objective has learned."""
        with torch.device("meta"):
            learned = config.objective.new_parameters(config.vocab)
        of_objective = {} if learned is None else learned.state_dict()
        shapes = {OBJECTIVE_PREFIX + name: tensor.shape for name, tensor in of_objective.items()}
        of_network = {name: tensors[name] for name in tensors.keys() - shapes}
        self.check_shapes(shapes | self.expected_shapes(config, of_network), tensors)

    def expected_shapes(self, config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> dict[str, torch.Size]:
        """The shapes of the network's tensors, without building it; untrusted sizes are checked first."""
        return _expected_shapes(config, tensors, self.path)

    def check_shapes(self, expected: Mapping[str, torch.Size], tensors: Mapping[str, LazyTensor]) -> None:
        """Every tensor must be present, expected, of the right shape and of a floating-point dtype."""
        _check_tensors(expected, tensors, self.path)


def write_folder(
    folder: str | os.PathLike[str],
    write: Callable[[Path], None],
    card: str,
    is_ours: Callable[[Path], bool],
    *,
    overwrite: bool,
) -> Path:
    """Write a model folder with its card and manifest: all of it or, if anything fails, nothing.

    `write` writes the other files. A folder that is not one of ours (`is_ours`), or holds more than a model, is
    never replaced; a card that was edited by hand is kept.
    """
    path = Path(os.path.realpath(folder))  # a link is followed, not replaced
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; choose another folder or pass overwrite=True")
    if path.exists() and not is_ours(path):
        raise ValueError(f"{path} exists and is not a model folder; it is left unchanged")
    foreign = {entry.name for entry in path.iterdir()} - _MODEL_FILES if path.exists() else set()
    if foreign:
        raise ValueError(f"{path} also holds {sorted(foreign)[0]}, which is not part of a model; it is left unchanged")
    with file_lock(path) as lock, atomic_folder(path, lock) as new_folder:
        write(new_folder)
        (new_folder / CARD_FILE).write_text(card, encoding="utf-8")
        _write_checksums(new_folder)
        _keep_edited_card(path, new_folder)
    return path


def _expected_shapes(config: ModelConfig, stored: Mapping[str, LazyTensor], path: Path) -> dict[str, torch.Size]:
    if config.objective.process.is_continuous:
        return _continuous_shapes(config, stored, path)
    if isinstance(config.backbone, BlockStackConfig):
        check_depth(config.backbone.depth, stored, str(path))
        return meta_shapes(config.backbone, config.vocab, stored, str(path))
    if isinstance(config.backbone, HFBackboneConfig):
        return hf.meta_shapes(config.backbone, config.vocab, stored, str(path))
    with torch.device("meta"):
        network = config.backbone.build(config.vocab)
    return {name: tensor.shape for name, tensor in unique_tensors(network.state_dict(keep_vars=True)).items()}


def _continuous_shapes(config: ModelConfig, stored: Mapping[str, LazyTensor], path: Path) -> dict[str, torch.Size]:
    """Those of the network, as of any other, and of the input layers around it."""
    prefix = "backbone."
    inner = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    network = _expected_shapes(replace(config, objective=MDLM()), inner, path)
    with torch.device("meta"):
        whole = unique_tensors(config.build().state_dict(keep_vars=True))
    around = {name: tensor.shape for name, tensor in whole.items() if not name.startswith(prefix)}
    return {**{f"{prefix}{name}": shape for name, shape in network.items()}, **around}


def _write_checksums(folder: Path) -> None:
    """The manifest of all files that are there."""
    sums = {file.name: sha256_of_file(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST_FILE).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)  # safetensors writes for the owner only


def _check_tensors(expected: Mapping[str, torch.Size], stored: Mapping[str, LazyTensor], path: Path) -> None:
    for problem, names in (
        ("lacks the", expected.keys() - stored),
        ("has the unknown", stored.keys() - expected),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (" and others" if len(names) > 3 else "")
            raise ValueError(f"{path / WEIGHTS_FILE} {problem} tensors {listed}; it does not fit its {CONFIG_FILE}")
    for name, tensor in stored.items():
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{path / WEIGHTS_FILE}: {name} has shape {list(tensor.shape)},"
                f" but {CONFIG_FILE} asks for {list(expected[name])}"
            )
        if not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{path / WEIGHTS_FILE}: {name} has the dtype {tensor.dtype}, but weights are floating-point"
            )


def _check_regular_files(path: Path) -> None:
    """Refuse devices, pipes, sockets and oversized text files."""
    for entry in sorted(path.iterdir()):
        if entry.exists() and not entry.is_dir():
            size = require_regular_file(entry).st_size
            if entry.suffix in (".json", ".txt", ".model", ".jinja") and size > _MAX_TEXT_FILE_BYTES:
                raise ValueError(f"{entry} has {size:,} bytes, which is more than any such file needs")


def _read_checksums(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The manifest's sums of small files, and of the files of weights."""
    if not (path / MANIFEST_FILE).exists():
        return {}, {}
    sums = read_json_object(path / MANIFEST_FILE)
    required = {CONFIG_FILE, *list_weight_files(path)}
    if not required <= sums.keys():
        raise ValueError(f"{path / MANIFEST_FILE} is damaged: it does not name {sorted(required - sums.keys())[0]}")
    by_name = {Path(name).name: expected for name, expected in sums.items() if name != CARD_FILE}
    weights = {name: expected for name, expected in by_name.items() if Path(name).suffix in _WEIGHT_SUFFIXES}
    return {name: expected for name, expected in by_name.items() if name not in weights}, weights


def _verify_checksums(path: Path, checksums: Mapping[str, str]) -> None:
    for name, expected in checksums.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path} is incomplete: {name} is missing")
        if sha256_of_file(file) != expected:
            raise ValueError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST_FILE}")


def _keep_edited_card(old_folder: Path, new_folder: Path) -> None:
    """Carry over a card that was written or edited by hand.

    The manifest keeps the sum of the generated card, so that the next save sees the edit too.
    """
    if (old_folder / CARD_FILE).exists() and not _has_generated_card(old_folder):
        shutil.copyfile(old_folder / CARD_FILE, new_folder / CARD_FILE)


def _has_generated_card(folder: Path) -> bool:
    """Whether the card is the one that `save` wrote."""
    try:
        sums = read_json_object(folder / MANIFEST_FILE)
    except ValueError:
        return False
    return sums.get(CARD_FILE) == sha256_of_file(folder / CARD_FILE)
