"""Model folders: `config.json`, `model.safetensors`, `tokenizer.json`, a card `README.md` and a
`manifest.json` of SHA-256 sums.

Loading executes nothing from the folder: it reads JSON and safetensors only. The card is documentation:
loading ignores it, and saving never overwrites a card that was edited.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unmask.backbones.dit import DiTConfig
from unmask.backbones.hf import HFBackboneConfig
from unmask.config import from_json, to_json
from unmask.data.tokenizers import BaseTokenizer, Tokenizer, load_tokenizer
from unmask.io.atomic import atomic_folder
from unmask.io.checksums import sha256_of_file
from unmask.io.locks import file_lock
from unmask.io.untrusted import read_json_object, require_regular_file
from unmask.model import LanguageModel, ModelConfig
from unmask.model.language_model import validate_tokenizer
from unmask.pretrained._config_checks import check_depth, meta_shapes
from unmask.pretrained._hub import resolve_hub
from unmask.pretrained.formats import FORMATS, Format, hf
from unmask.pretrained.formats._hf_tokenizer import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    load_hf_tokenizer,
    make_tokenizer_config,
)
from unmask.pretrained.formats.gguf import find_gguf_file, load_gguf
from unmask.pretrained.model_card import CardMetadata, TrainingFacts, model_card
from unmask.pretrained.state_dict import list_weight_files, read_meta_state_dict, read_state_dict, unique_tensors
from unmask.registry import AllowCode

_MODEL_FORMAT = "unmask-2"
_CONFIG_FILE, _WEIGHTS_FILE, _MANIFEST_FILE, _CARD_FILE = (
    "config.json",
    "model.safetensors",
    "manifest.json",
    "README.md",
)
_MODEL_FILES = {_CONFIG_FILE, _WEIGHTS_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, _MANIFEST_FILE, _CARD_FILE}

_GPT2_VOCAB_SIZE = 50_257
"""Tokens of GPT-2's vocabulary."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_MAX_TEXT_FILE_BYTES = 64 << 20
"""The largest JSON or vocabulary file; the largest published vocabularies have half as many bytes."""


def load(
    folder: str | os.PathLike[str],
    tokenizer: BaseTokenizer | None = None,
    *,
    require_tokenizer: bool = False,
    allow_code: AllowCode = False,
) -> LanguageModel:
    """Load a model folder: of unmask, or in a published format (MDLM, BD3LM, LLaDA, Dream).

    Folders of the transformers library (masked LMs, and causal LMs, which get bidirectional attention) and
    GGUF files are loaded too. `folder` may also be a name on the hub, as in `kuleshov-group/mdlm-owt`, or the
    folder of a finished run.

    The `tokenizer` is the given one, else the folder's, else GPT-2's if the model is from the hub and has its
    vocabulary. Without a tokenizer the model takes and returns ids; with `require_tokenizer` it is refused
    before its weights are read.

    A folder whose network, objective or schedule is a class from outside unmask is loaded only with
    `allow_code=True`, which imports that class: allow it only for folders that you trust.
    """
    path = resolve_model_folder(folder)
    gguf_file = find_gguf_file(path)
    if gguf_file is not None:
        return load_gguf(gguf_file, tokenizer)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder, nor a name on the hub; a model folder holds {_CONFIG_FILE} and {_WEIGHTS_FILE}"
        )
    _check_regular_files(path)
    small_files, weight_files = _read_checksums(path)
    _verify_checksums(path, small_files)
    config = read_json_object(path / _CONFIG_FILE)
    if _is_transformers_model(config):
        return _load_transformers(path, config, tokenizer, require_tokenizer, weight_files)
    # Everything that can be checked is checked before weights are read, which takes minutes for large models.
    with torch.device("meta"):
        model_config, headers = _convert_state(config, read_meta_state_dict(path), path, allow_code)
    _check_tensors(_expected_shapes(model_config, headers, path), headers, path)
    tokenizer = tokenizer or _find_tokenizer(path, model_config, not Path(folder).exists(), allow_code)
    _check_has_tokenizer(require_tokenizer, tokenizer, path)
    validate_tokenizer(tokenizer, model_config.vocab)
    _verify_checksums(path, weight_files)
    weights = _convert_state(config, read_state_dict(path), path, allow_code)[1]
    try:
        denoiser = model_config.build()
    except (RuntimeError, MemoryError):
        raise ValueError(f"{path / _CONFIG_FILE} asks for a network that does not fit into memory") from None
    denoiser.backbone.load_state_dict(weights, strict=False)
    return LanguageModel(denoiser.eval(), tokenizer)


def _load_transformers(
    path: Path,
    config: dict[str, Any],
    tokenizer: BaseTokenizer | None,
    require_tokenizer: bool,
    weight_files: Mapping[str, str],
) -> LanguageModel:
    folder_tokenizer = load_hf_tokenizer(path)
    used_tokenizer = tokenizer or folder_tokenizer[0]
    _check_has_tokenizer(require_tokenizer, used_tokenizer, path)
    hf.validate_config(config, read_meta_state_dict(path), used_tokenizer, str(path))
    _verify_checksums(path, weight_files)
    return hf.load(path, config, tokenizer, folder_tokenizer)


def _find_tokenizer(path: Path, config: ModelConfig, from_hub: bool, allow_code: AllowCode) -> BaseTokenizer | None:
    if (path / TOKENIZER_FILE).exists():
        return load_tokenizer(path / TOKENIZER_FILE, allow_code=allow_code)
    if from_hub and config.vocab.size == _GPT2_VOCAB_SIZE + 1:
        return Tokenizer.from_hub("gpt2")  # MDLM and BD3LM are published without their tokenizer
    return None


def _check_has_tokenizer(required: bool, tokenizer: BaseTokenizer | None, path: Path) -> None:
    if required and tokenizer is None:
        raise ValueError(
            f"the model {path.name} has no tokenizer.json, and a server reads and writes text:"
            " put the tokenizer of its training beside the weights"
        )


def _convert_state(
    config: dict[str, Any], weights: dict[str, Tensor], path: Path, allow_code: AllowCode
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and tensors of a model in our format or in a published one."""
    version = config.get("format")
    if version == _MODEL_FORMAT:
        fields = {key: value for key, value in config.items() if key != "format"}
        return from_json(ModelConfig, fields, str(path / _CONFIG_FILE), allow_code=allow_code), weights
    if isinstance(version, str) and version.startswith("unmask-"):
        raise ValueError(
            f"{path} has the format {version}, and this version of unmask reads {_MODEL_FORMAT}: export the model in a"
            " published format with the version that wrote it (`unmask export MODEL OUT --published`), or train it"
            " again"
        )
    return _find_format(config, path).load_state(config, weights, str(path))


def _expected_shapes(config: ModelConfig, stored: Mapping[str, Tensor], path: Path) -> dict[str, torch.Size]:
    """The shapes of the network's tensors, without building it; untrusted sizes are checked first."""
    if isinstance(config.backbone, DiTConfig):
        check_depth(config.backbone.depth, stored, str(path))
        return meta_shapes(config.backbone, config.vocab, stored, str(path))
    if isinstance(config.backbone, HFBackboneConfig):
        return hf.meta_shapes(config.backbone, config.vocab, stored, str(path))
    with torch.device("meta"):
        network = config.backbone.build(config.vocab)
    return {name: tensor.shape for name, tensor in unique_tensors(network.state_dict(keep_vars=True)).items()}


def _is_transformers_model(config: dict[str, Any]) -> bool:
    """Whether the config is neither ours nor that of a published diffusion model, but known to transformers."""
    is_diffusion_format = any(format_.can_load(config) for format_ in FORMATS.values())
    return "format" not in config and "model_type" in config and not is_diffusion_format and hf.can_load(config)


def _find_format(config: dict[str, Any], path: Path) -> Format:
    """The published format of a config."""
    for format_ in FORMATS.values():
        if format_.can_load(config):
            return format_
    known = ", ".join(f'"{model_type}"' for model_type in FORMATS)
    raise ValueError(
        f'{path / _CONFIG_FILE} has an unknown format; known are "format": "{_MODEL_FORMAT}" and the published formats'
        f' with "model_type" {known}; it has "model_type" {config.get("model_type")!r}'
    )


def resolve_model_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, the model of a run's folder, or the local copy of a model on the hub."""
    path = resolve_hub(folder)
    if (path / "experiment.json").exists() and not (path / "model").exists() and not (path / _CONFIG_FILE).exists():
        raise ValueError(
            f"{path} is a run that has no model yet; `unmask export {path} OUT` writes one from its newest checkpoint"
        )
    return path / "model" if (path / "model" / _CONFIG_FILE).exists() and not (path / _CONFIG_FILE).exists() else path


def save(
    model: LanguageModel,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    upstream_format: bool = False,
    facts: TrainingFacts | None = None,
    metadata: CardMetadata | None = None,
) -> Path:
    """Write a model folder: all of it or, if anything fails, nothing.

    `upstream_format`: in the format in which models of its kind are published, for other programs.
    `facts`: how the model was trained, and `metadata`: its license, data and results, for its card.
    `overwrite` keeps a card that was edited by hand; delete that card to get a new one.
    """
    if any(".parametrizations." in name for name, _ in model.denoiser.named_parameters()):
        raise ValueError("LoRA adapters are not merged: call merge_lora() before saving")
    path = Path(os.path.realpath(folder))  # a link is followed, not replaced
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; choose another folder or pass overwrite=True")
    if path.exists() and not _is_model_folder(path):
        raise ValueError(f"{path} exists and is not a model folder; it is left unchanged")
    foreign = {entry.name for entry in path.iterdir()} - _MODEL_FILES if path.exists() else set()
    if foreign:
        raise ValueError(f"{path} also holds {sorted(foreign)[0]}, which is not part of a model; it is left unchanged")
    with file_lock(path) as lock, atomic_folder(path, lock) as new_folder:
        _write_model(model, new_folder, upstream_format)
        (new_folder / _CARD_FILE).write_text(model_card(model, facts, metadata), encoding="utf-8")
        _write_checksums(new_folder)
        _keep_edited_card(path, new_folder)
    return path


def _is_model_folder(path: Path) -> bool:
    """Whether the folder holds a model: many other programs write a config.json."""
    try:
        config = read_json_object(path / _CONFIG_FILE)
    except ValueError:
        return False
    return (
        config.get("format") == _MODEL_FORMAT
        or any(format_.can_load(config) for format_ in FORMATS.values())
        or hf.written_by_unmask(config)
    )


def _write_model(model: LanguageModel, folder: Path, upstream_format: bool) -> None:
    config, weights = _export_upstream(model) if upstream_format else _export_own(model)
    (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
    if model.tokenizer is not None:
        (folder / TOKENIZER_FILE).write_text(model.tokenizer.to_json(), encoding="utf-8")
        if isinstance(model.tokenizer, Tokenizer):  # others cannot be read by transformers
            tokenizer_config = json.dumps(make_tokenizer_config(model.tokenizer, model.vocab), indent=2)
            (folder / TOKENIZER_CONFIG_FILE).write_text(tokenizer_config + "\n", encoding="utf-8")


def _export_own(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"format": _MODEL_FORMAT, **to_json(model.denoiser.config)}
    return config, unique_tensors(model.denoiser.backbone.state_dict())


def _export_upstream(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if hf.can_export(model):
        return hf.export_state(model)
    for format_ in FORMATS.values():
        if format_.can_export(model):
            return format_.export_state(model)
    raise ValueError(
        "the published formats hold MDLM and block diffusion models only; this model's objective is"
        f" {type(model.objective).__name__}"
    )


def _write_checksums(folder: Path) -> None:
    sums = {file.name: sha256_of_file(file) for file in sorted(folder.iterdir())}
    (folder / _MANIFEST_FILE).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
    (folder / _WEIGHTS_FILE).chmod((folder / _CONFIG_FILE).stat().st_mode)  # safetensors writes for the owner only


def _keep_edited_card(old_folder: Path, new_folder: Path) -> None:
    """Carry over a card that was written or edited by hand.

    The manifest keeps the sum of the generated card, so that the next save sees the edit too.
    """
    if (old_folder / _CARD_FILE).exists() and not _has_generated_card(old_folder):
        shutil.copyfile(old_folder / _CARD_FILE, new_folder / _CARD_FILE)


def _has_generated_card(folder: Path) -> bool:
    """Whether the card is the one that `save` wrote."""
    try:
        sums = read_json_object(folder / _MANIFEST_FILE)
    except ValueError:
        return False
    return sums.get(_CARD_FILE) == sha256_of_file(folder / _CARD_FILE)


def _check_tensors(expected: Mapping[str, torch.Size], stored: Mapping[str, Tensor], path: Path) -> None:
    """Every tensor must be present, expected, of the right shape and of a floating-point dtype."""
    for problem, names in (
        ("lacks the", expected.keys() - stored),
        ("has the unknown", stored.keys() - expected),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (" and others" if len(names) > 3 else "")
            raise ValueError(f"{path / _WEIGHTS_FILE} {problem} tensors {listed}; it does not fit its {_CONFIG_FILE}")
    for name, tensor in stored.items():
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{path / _WEIGHTS_FILE}: {name} has shape {list(tensor.shape)},"
                f" but {_CONFIG_FILE} asks for {list(expected[name])}"
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"{path / _WEIGHTS_FILE}: {name} has the dtype {tensor.dtype}, but weights are floating-point"
            )


def _check_regular_files(path: Path) -> None:
    """Refuse devices, pipes, sockets and oversized text files."""
    for entry in sorted(path.iterdir()):
        if entry.exists() and not entry.is_dir():
            size = require_regular_file(entry).st_size
            if entry.suffix in (".json", ".txt", ".model") and size > _MAX_TEXT_FILE_BYTES:
                raise ValueError(f"{entry} has {size:,} bytes, which is more than any such file needs")


def _read_checksums(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The manifest's sums of small files, and of the files of weights."""
    if not (path / _MANIFEST_FILE).exists():
        return {}, {}
    sums = read_json_object(path / _MANIFEST_FILE)
    required = {_CONFIG_FILE, *list_weight_files(path)}
    if not required <= sums.keys():
        raise ValueError(f"{path / _MANIFEST_FILE} is damaged: it does not name {sorted(required - sums.keys())[0]}")
    by_name = {Path(name).name: expected for name, expected in sums.items() if name != _CARD_FILE}
    weights = {name: expected for name, expected in by_name.items() if Path(name).suffix in _WEIGHT_SUFFIXES}
    return {name: expected for name, expected in by_name.items() if name not in weights}, weights


def _verify_checksums(path: Path, checksums: Mapping[str, str]) -> None:
    for name, expected in checksums.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path} is incomplete: {name} is missing")
        if sha256_of_file(file) != expected:
            raise ValueError(f"{file} is damaged: its SHA-256 is not the one in {_MANIFEST_FILE}")
