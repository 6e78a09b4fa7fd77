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
from unmask.data.folders import exclusive, replacing
from unmask.data.tokenizer import Tokenizer
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.model.language import check_tokenizer
from unmask.release import bd3lm, dream, huggingface, llada, mdlm
from unmask.release.card import Facts, Metadata, card
from unmask.release.hub import fetched
from unmask.release.layout import check_depth, shapes
from unmask.release.weights import read_stored, read_weights, weight_files
from unmask.untrusted import check_regular, read_object

FORMAT = "unmask-1"
CONFIG, WEIGHTS, TOKENIZER, MANIFEST = "config.json", "model.safetensors", "tokenizer.json", "manifest.json"
CARD = "README.md"

LAYOUTS = (bd3lm, llada, dream, mdlm)
"""Published layouts: each a module that can `read` and `write` them, and says whether it `writes` a model."""

GPT2 = 50_257
"""Tokens of GPT-2's vocabulary."""

HEAVY = (".safetensors", ".bin")
"""How files of weights end."""
LARGEST_TEXT = 64 << 20
"""Bytes of a file that is no weights: the largest vocabularies have half as many."""

OURS = {CONFIG, WEIGHTS, TOKENIZER, huggingface.TOKENIZER_CONFIG, MANIFEST, CARD}


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
    path = model_folder(folder)
    packed = huggingface.gguf_file(path)
    if packed is not None:
        return huggingface.load_gguf(packed, tokenizer)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder, nor a name on the hub; a model folder holds {CONFIG} and {WEIGHTS}"
        )
    _check_plain(path)
    small, large = _sums(path)
    _verify(path, small)
    config = read_object(path / CONFIG)
    if _is_foreign(config):
        found = huggingface.read_tokenizer(path)
        _require(require_tokenizer, tokenizer or found[0], path)
        huggingface.check_sizes(config, read_stored(path), tokenizer or found[0], str(path))
        _verify(path, large)
        return huggingface.load(path, config, tokenizer, found)
    # All that can be known to be wrong is, before numbers are read: of large models that takes minutes.
    stored = read_stored(path)
    with torch.device("meta"):
        model_config, held = _converted(config, stored, path)
    _compare(_expected(model_config, held, path), held, path)
    if tokenizer is None and (path / TOKENIZER).exists():
        tokenizer = Tokenizer.from_file(path / TOKENIZER)
    elif tokenizer is None and not Path(folder).exists() and model_config.vocab.size == GPT2 + 1:
        tokenizer = Tokenizer.from_hub("gpt2")  # which the authors of MDLM and BD3LM leave to be fetched
    _require(require_tokenizer, tokenizer, path)
    check_tokenizer(tokenizer, model_config.vocab)
    _verify(path, large)
    weights = _converted(config, read_weights(path), path)[1]
    try:
        denoise = model_config.build()
    except (RuntimeError, MemoryError):
        raise ValueError(f"{path / CONFIG} asks for a network that does not fit into memory") from None
    denoise.backbone.load_state_dict(weights, strict=False)
    return LanguageModel(denoise.eval(), tokenizer)


def _require(required: bool, tokenizer: Tokenizer | None, path: Path) -> None:
    if required and tokenizer is None:
        raise ValueError(
            f"the model {path.name} has no tokenizer.json, and a server reads and writes text:"
            " put the tokenizer of its training beside the weights"
        )


def _converted(
    config: dict[str, Any], weights: dict[str, Tensor], path: Path
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Our config and weights of a model in our layout or in a published one."""
    if config.get("format") != FORMAT:
        found: tuple[ModelConfig, dict[str, Tensor]] = _layout(config, path).read(config, weights, str(path))
        return found
    stated = {key: value for key, value in config.items() if key != "format"}
    return from_json(ModelConfig, stated, str(path / CONFIG)), weights


def _expected(config: ModelConfig, held: Mapping[str, Tensor], path: Path) -> dict[str, torch.Size]:
    """The tensors of a network that has no more layers than the file; it is not built."""
    if isinstance(config.backbone, DiTConfig):
        check_depth(config.backbone.depth, held, str(path))
        return shapes(config.backbone, config.vocab, held, str(path))
    return huggingface.shapes(config.backbone, config.vocab, held, str(path))


def _is_foreign(config: dict[str, Any]) -> bool:
    """Whether it is neither ours nor in a layout of diffusion models, but one that transformers knows."""
    known = {each.MODEL_TYPE for each in LAYOUTS}
    kind = config.get("model_type")
    return "format" not in config and kind is not None and kind not in known and huggingface.reads(config)


def _layout(config: dict[str, Any], path: Path) -> Any:
    """The module that reads such a folder."""
    kind = config.get("model_type")
    for layout in LAYOUTS:
        if kind == layout.MODEL_TYPE:
            return layout
    known = ", ".join(f'"{layout.MODEL_TYPE}"' for layout in LAYOUTS)
    raise ValueError(
        f"{path / CONFIG} has a layout that is not known here; known are ours"
        f' ("format": "{FORMAT}") and the published ones with "model_type" {known}; it has {kind!r}'
    )


def model_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, the model in it if it is a run's, or that of a model on the hub."""
    path = fetched(folder)
    if (path / "experiment.json").exists() and not (path / "model").exists() and not (path / CONFIG).exists():
        raise ValueError(
            f"{path} is a run that has no model yet; `unmask export {path} OUT` writes one from its newest"
            " checkpoint"
        )
    return path / "model" if (path / "model" / CONFIG).exists() and not (path / CONFIG).exists() else path


def save(
    model: LanguageModel,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    published: bool = False,
    facts: Facts | None = None,
    metadata: Metadata | None = None,
) -> Path:
    """Write a model folder: all of it or, if anything fails, nothing.

    `published`: in the layout that models of its kind are published in, for programs that read that one.
    `facts`: how the model was trained, and `metadata`: its license, data and results, for its card.
    `overwrite` keeps a card that was edited by hand as it
    is; delete that card first to get a new one.
    """
    if any(".parametrizations." in name for name, _ in model.denoise.named_parameters()):
        raise ValueError("this model has low-rank differences that are not merged yet: merge them, then save")
    path = Path(os.path.realpath(folder))  # a link is followed, not replaced
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; choose another folder or pass overwrite=True")
    if path.exists() and not _is_model(path):
        raise ValueError(f"{path} exists and is not a model folder; it is left as it is")
    foreign = {entry.name for entry in path.iterdir()} - OURS if path.exists() else set()
    if foreign:
        raise ValueError(
            f"{path} also holds {sorted(foreign)[0]}, which is not the model's; it is left as it is"
        )
    with exclusive(path) as alone, replacing(path, alone) as fresh:
        _write(model, fresh, published)
        (fresh / CARD).write_text(card(model, facts, metadata), encoding="utf-8")
        _write_sums(fresh)
        _keep_card(path, fresh)
    return path


def _is_model(path: Path) -> bool:
    """Whether there is a model to replace: many programs have a config.json."""
    try:
        config = read_object(path / CONFIG)
    except ValueError:
        return False
    known = {each.MODEL_TYPE for each in LAYOUTS}
    return config.get("format") == FORMAT or config.get("model_type") in known or huggingface.wrote(config)


def _write(model: LanguageModel, folder: Path, published: bool) -> None:
    if published:
        layouts = (huggingface, *LAYOUTS)
        config, weights = next(layout for layout in layouts if layout.writes(model)).write(model)
    else:
        config, weights = {"format": FORMAT, **to_json(model.denoise.config)}, _weights(model.denoise)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    if model.tokenizer is not None:
        (folder / TOKENIZER).write_text(model.tokenizer.to_json(), encoding="utf-8")
        stated = json.dumps(huggingface.tokenizer_config(model.tokenizer, model.vocab), indent=2)
        (folder / huggingface.TOKENIZER_CONFIG).write_text(stated + "\n", encoding="utf-8")


def _write_sums(folder: Path) -> None:
    sums = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
    (folder / WEIGHTS).chmod((folder / CONFIG).stat().st_mode)  # safetensors writes for the owner only


def _keep_card(old: Path, fresh: Path) -> None:
    """Carry over a card that somebody wrote or edited.

    The manifest goes on stating the sum of the generated card, so the next save knows it is theirs too.
    """
    if (old / CARD).exists() and not _is_generated(old):
        shutil.copyfile(old / CARD, fresh / CARD)


def _is_generated(folder: Path) -> bool:
    """Whether the card is the one that `save` wrote."""
    try:
        sums = read_object(folder / MANIFEST)
    except ValueError:
        return False
    return sums.get(CARD) == _sha256(folder / CARD)


def _weights(denoise: Denoiser) -> dict[str, Tensor]:
    """Each tensor once: a tied head is the embedding."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in denoise.backbone.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    return tensors


def _compare(expected: Mapping[str, torch.Size], held: Mapping[str, Tensor], path: Path) -> None:
    """Every tensor must be there, expected, of the right shape, and of a type that weights have."""
    for problem, names in (("lacks", expected.keys() - held), ("has the unknown", held.keys() - expected)):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (" and others" if len(names) > 3 else "")
            raise ValueError(f"{path / WEIGHTS} {problem} tensors {listed}; it does not fit its {CONFIG}")
    for name, tensor in held.items():
        if tensor.shape != expected[name]:
            raise ValueError(
                f"{path / WEIGHTS}: {name} has shape {list(tensor.shape)}"
                f" where {CONFIG} asks for {list(expected[name])}"
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"{path / WEIGHTS}: {name} has the type {tensor.dtype}, and weights are floating-point"
            )


def _check_plain(path: Path) -> None:
    """Nothing in the folder is a device, a pipe or a socket, whoever is to read it."""
    for entry in sorted(path.iterdir()):
        if entry.exists() and not entry.is_dir():
            size = check_regular(entry).st_size
            if entry.suffix in (".json", ".txt", ".model") and size > LARGEST_TEXT:
                raise ValueError(f"{entry} has {size:,} bytes, which is more than any such file needs")


def _sums(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What the manifest says of small files, and of those that hold weights."""
    if not (path / MANIFEST).exists():
        return {}, {}
    sums = read_object(path / MANIFEST)
    files = {CONFIG, *weight_files(path)}
    if not files <= sums.keys():
        raise ValueError(f"{path / MANIFEST} is damaged: it does not name {sorted(files - sums.keys())[0]}")
    named = {Path(name).name: expected for name, expected in sums.items() if name != CARD}
    large = {name: expected for name, expected in named.items() if Path(name).suffix in HEAVY}
    return {name: expected for name, expected in named.items() if name not in large}, large


def _verify(path: Path, sums: Mapping[str, str]) -> None:
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path} is incomplete: {name} is missing")
        if _sha256(file) != expected:
            raise ValueError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST}")


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
