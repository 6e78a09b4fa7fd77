"""Model folders: `config.json`, `model.safetensors`, `tokenizer.json`, a card `README.md` and a
`manifest.json` of SHA-256 sums.

Reading executes nothing from the folder: JSON and safetensors only. The card is for people, who may change
or delete it: a model is read whatever its card says, and a card that people wrote is never overwritten.
"""

from __future__ import annotations

import hashlib
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
from unmask.config import from_json, to_json
from unmask.data.tokenizers import Tokenizer
from unmask.io.atomic import atomic_folder
from unmask.io.locks import file_lock
from unmask.io.untrusted import read_json_object, require_regular_file
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.model.language_model import validate_tokenizer
from unmask.pretrained.config_checks import check_depth, meta_shapes
from unmask.pretrained.formats import bd3lm, dream, llada, mdlm
from unmask.pretrained.formats import hf as huggingface
from unmask.pretrained.hub import resolve_hub
from unmask.pretrained.model_card import CardMetadata, TrainingFacts, model_card
from unmask.pretrained.state_dict import list_weight_files, read_meta_state_dict, read_state_dict

_MODEL_FORMAT = "unmask-2"
_CONFIG_FILE, _WEIGHTS_FILE, _TOKENIZER_FILE, _MANIFEST_FILE = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "manifest.json",
)
_CARD_FILE = "README.md"

_FORMATS = (bd3lm, llada, dream, mdlm)
"""Published layouts: each a module that can `read` and `write` them, and says whether it `writes` a model."""

_GPT2_VOCAB_SIZE = 50_257
"""Tokens of GPT-2's vocabulary."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin")
"""How files of weights end."""
_MAX_TEXT_FILE_BYTES = 64 << 20
"""Bytes of a file that is no weights: the largest vocabularies have half as many."""

_MODEL_FILES = {
    _CONFIG_FILE,
    _WEIGHTS_FILE,
    _TOKENIZER_FILE,
    huggingface.TOKENIZER_CONFIG_FILE,
    _MANIFEST_FILE,
    _CARD_FILE,
}


def load(
    folder: str | os.PathLike[str], tokenizer: Tokenizer | None = None, *, require_tokenizer: bool = False
) -> LanguageModel:
    """Read a model folder of ours or in a published layout (MDLM, BD3LM, LLaDA, Dream), ready to use.

    Folders of the transformers library (masked LMs; causal LMs, whose attention is opened) and GGUF files are
    read too.

    A name on the hub will do, as in `kuleshov-group/mdlm-owt`, and so will the folder of a finished run. The
    `tokenizer` is the one that is given, the folder's own, or that of GPT-2 if the model is from the hub
    and its vocabulary is; without any, the model takes and gives ids, or, if one is required, is refused
    before its weights are read.
    """
    path = resolve_model_folder(folder)
    packed = huggingface.find_gguf_file(path)
    if packed is not None:
        return huggingface.load_gguf(packed, tokenizer)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder, nor a name on the hub; a model folder holds {_CONFIG_FILE} and {_WEIGHTS_FILE}"
        )
    _check_regular_files(path)
    small, large = _read_checksums(path)
    _verify_checksums(path, small)
    config = read_json_object(path / _CONFIG_FILE)
    if _is_transformers_model(config):
        found = huggingface.load_tokenizer(path)
        _require_tokenizer(require_tokenizer, tokenizer or found[0], path)
        huggingface.validate_config(config, read_meta_state_dict(path), tokenizer or found[0], str(path))
        _verify_checksums(path, large)
        return huggingface.load(path, config, tokenizer, found)
    # All that can be known to be wrong is, before numbers are read: of large models that takes minutes.
    stored = read_meta_state_dict(path)
    with torch.device("meta"):
        model_config, held = _convert_state(config, stored, path)
    _check_tensors(_expected_shapes(model_config, held, path), held, path)
    if tokenizer is None and (path / _TOKENIZER_FILE).exists():
        tokenizer = Tokenizer.from_file(path / _TOKENIZER_FILE)
    elif tokenizer is None and not Path(folder).exists() and model_config.vocab.size == _GPT2_VOCAB_SIZE + 1:
        tokenizer = Tokenizer.from_hub("gpt2")  # which the authors of MDLM and BD3LM leave to be fetched
    _require_tokenizer(require_tokenizer, tokenizer, path)
    validate_tokenizer(tokenizer, model_config.vocab)
    _verify_checksums(path, large)
    weights = _convert_state(config, read_state_dict(path), path)[1]
    try:
        denoise = model_config.build()
    except (RuntimeError, MemoryError):
        raise ValueError(f"{path / _CONFIG_FILE} asks for a network that does not fit into memory") from None
    denoise.backbone.load_state_dict(weights, strict=False)
    return LanguageModel(denoise.eval(), tokenizer)


def _require_tokenizer(required: bool, tokenizer: Tokenizer | None, path: Path) -> None:
    if required and tokenizer is None:
        raise ValueError(
            f"the model {path.name} has no tokenizer.json, and a server reads and writes text:"
            " put the tokenizer of its training beside the weights"
        )


def _convert_state(
    config: dict[str, Any], weights: dict[str, Tensor], path: Path
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and weights of a model in our layout or in a published one."""
    if config.get("format") != _MODEL_FORMAT:
        found: tuple[ModelConfig, dict[str, Tensor]] = _find_format(config, path).load_state(config, weights, str(path))
        return found
    stated = {key: value for key, value in config.items() if key != "format"}
    return from_json(ModelConfig, stated, str(path / _CONFIG_FILE)), weights


def _expected_shapes(config: ModelConfig, stored: Mapping[str, Tensor], path: Path) -> dict[str, torch.Size]:
    """The tensors of a network that has no more layers than the file; it is not built."""
    if isinstance(config.backbone, DiTConfig):
        check_depth(config.backbone.depth, stored, str(path))
        return meta_shapes(config.backbone, config.vocab, stored, str(path))
    return huggingface.meta_shapes(config.backbone, config.vocab, stored, str(path))


def _is_transformers_model(config: dict[str, Any]) -> bool:
    """Whether it is neither ours nor in a layout of diffusion models, but one that transformers knows."""
    known = {each.MODEL_TYPE for each in _FORMATS}
    kind = config.get("model_type")
    return "format" not in config and kind is not None and kind not in known and huggingface.can_load(config)


def _find_format(config: dict[str, Any], path: Path) -> Any:
    """The module that reads such a folder."""
    kind = config.get("model_type")
    for layout in _FORMATS:
        if kind == layout.MODEL_TYPE:
            return layout
    known = ", ".join(f'"{layout.MODEL_TYPE}"' for layout in _FORMATS)
    raise ValueError(
        f"{path / _CONFIG_FILE} has a layout that is not known here; known are ours"
        f' ("format": "{_MODEL_FORMAT}") and the published ones with "model_type" {known}; it has {kind!r}'
    )


def resolve_model_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, the model in it if it is a run's, or that of a model on the hub."""
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

    `published`: in the layout that models of its kind are published in, for programs that read that one.
    `facts`: how the model was trained, and `metadata`: its license, data and results, for its card.
    `overwrite` keeps a card that was edited by hand as it
    is; delete that card first to get a new one.
    """
    if any(".parametrizations." in name for name, _ in model.denoiser.named_parameters()):
        raise ValueError("this model has low-rank differences that are not merged yet: merge them, then save")
    path = Path(os.path.realpath(folder))  # a link is followed, not replaced
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; choose another folder or pass overwrite=True")
    if path.exists() and not _is_model_folder(path):
        raise ValueError(f"{path} exists and is not a model folder; it is left as it is")
    foreign = {entry.name for entry in path.iterdir()} - _MODEL_FILES if path.exists() else set()
    if foreign:
        raise ValueError(f"{path} also holds {sorted(foreign)[0]}, which is not the model's; it is left as it is")
    with file_lock(path) as alone, atomic_folder(path, alone) as fresh:
        _write_model(model, fresh, upstream_format)
        (fresh / _CARD_FILE).write_text(model_card(model, facts, metadata), encoding="utf-8")
        _write_checksums(fresh)
        _keep_edited_card(path, fresh)
    return path


def _is_model_folder(path: Path) -> bool:
    """Whether there is a model to replace: many programs have a config.json."""
    try:
        config = read_json_object(path / _CONFIG_FILE)
    except ValueError:
        return False
    known = {each.MODEL_TYPE for each in _FORMATS}
    return (
        config.get("format") == _MODEL_FORMAT
        or config.get("model_type") in known
        or huggingface.written_by_unmask(config)
    )


def _write_model(model: LanguageModel, folder: Path, upstream_format: bool) -> None:
    if upstream_format:
        layouts = (huggingface, *_FORMATS)
        config, weights = next(layout for layout in layouts if layout.can_export(model)).export_state(model)
    else:
        config, weights = (
            {"format": _MODEL_FORMAT, **to_json(model.denoiser.config)},
            _unique_tensors(model.denoiser),
        )
    (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
    if model.tokenizer is not None:
        (folder / _TOKENIZER_FILE).write_text(model.tokenizer.to_json(), encoding="utf-8")
        stated = json.dumps(huggingface.make_tokenizer_config(model.tokenizer, model.vocab), indent=2)
        (folder / huggingface.TOKENIZER_CONFIG_FILE).write_text(stated + "\n", encoding="utf-8")


def _write_checksums(folder: Path) -> None:
    sums = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    (folder / _MANIFEST_FILE).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
    (folder / _WEIGHTS_FILE).chmod((folder / _CONFIG_FILE).stat().st_mode)  # safetensors writes for the owner only


def _keep_edited_card(old: Path, fresh: Path) -> None:
    """Carry over a card that somebody wrote or edited.

    The manifest goes on stating the sum of the generated card, so the next save knows it is theirs too.
    """
    if (old / _CARD_FILE).exists() and not _has_generated_card(old):
        shutil.copyfile(old / _CARD_FILE, fresh / _CARD_FILE)


def _has_generated_card(folder: Path) -> bool:
    """Whether the card is the one that `save` wrote."""
    try:
        sums = read_json_object(folder / _MANIFEST_FILE)
    except ValueError:
        return False
    return sums.get(_CARD_FILE) == _sha256(folder / _CARD_FILE)


def _unique_tensors(denoiser: Denoiser) -> dict[str, Tensor]:
    """Each tensor once: a tied head is the embedding."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in denoiser.backbone.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    return tensors


def _check_tensors(expected: Mapping[str, torch.Size], stored: Mapping[str, Tensor], path: Path) -> None:
    """Every tensor must be there, expected, of the right shape, and of a type that weights have."""
    for problem, names in (
        ("lacks", expected.keys() - stored),
        ("has the unknown", stored.keys() - expected),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (" and others" if len(names) > 3 else "")
            raise ValueError(f"{path / _WEIGHTS_FILE} {problem} tensors {listed}; it does not fit its {_CONFIG_FILE}")
    for name, tensor in stored.items():
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{path / _WEIGHTS_FILE}: {name} has shape {list(tensor.shape)}"
                f" where {_CONFIG_FILE} asks for {list(expected[name])}"
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"{path / _WEIGHTS_FILE}: {name} has the type {tensor.dtype}, and weights are floating-point"
            )


def _check_regular_files(path: Path) -> None:
    """Nothing in the folder is a device, a pipe or a socket, whoever is to read it."""
    for entry in sorted(path.iterdir()):
        if entry.exists() and not entry.is_dir():
            size = require_regular_file(entry).st_size
            if entry.suffix in (".json", ".txt", ".model") and size > _MAX_TEXT_FILE_BYTES:
                raise ValueError(f"{entry} has {size:,} bytes, which is more than any such file needs")


def _read_checksums(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What the manifest says of small files, and of those that hold weights."""
    if not (path / _MANIFEST_FILE).exists():
        return {}, {}
    sums = read_json_object(path / _MANIFEST_FILE)
    files = {_CONFIG_FILE, *list_weight_files(path)}
    if not files <= sums.keys():
        raise ValueError(f"{path / _MANIFEST_FILE} is damaged: it does not name {sorted(files - sums.keys())[0]}")
    named = {Path(name).name: expected for name, expected in sums.items() if name != _CARD_FILE}
    large = {name: expected for name, expected in named.items() if Path(name).suffix in _WEIGHT_SUFFIXES}
    return {name: expected for name, expected in named.items() if name not in large}, large


def _verify_checksums(path: Path, checksums: Mapping[str, str]) -> None:
    for name, expected in checksums.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path} is incomplete: {name} is missing")
        if _sha256(file) != expected:
            raise ValueError(f"{file} is damaged: its SHA-256 is not the one in {_MANIFEST_FILE}")


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
