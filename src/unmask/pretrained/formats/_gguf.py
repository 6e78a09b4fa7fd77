"""Causal LMs in GGUF files, as llama.cpp reads them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from unmask.backbones.hf import import_transformers
from unmask.data.tokenizers import BaseTokenizer, Tokenizer
from unmask.model import LanguageModel
from unmask.pretrained.formats._hf import check_loading_report, language_model_from_hf, translated_errors


def load_gguf(file: Path, tokenizer: BaseTokenizer | None = None) -> LanguageModel:
    """A causal LM with bidirectional attention from a GGUF file; its weights are dequantized to float32."""
    library = import_transformers()
    if not all(map(find_spec, ("gguf", "accelerate"))):
        raise ValueError("GGUF files need the extra gguf: pip install 'unmask[gguf]'")
    options: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    with translated_errors(str(file)):
        config = library.AutoConfig.from_pretrained(file.parent, **options)
        hf_tokenizer = library.AutoTokenizer.from_pretrained(file.parent, **options)
        network, report = library.AutoModelForCausalLM.from_pretrained(
            file.parent, **options, config=config, dtype=torch.float32, output_loading_info=True
        )
        check_loading_report(report, str(file))
    tokenizer = tokenizer or Tokenizer(hf_tokenizer.backend_tokenizer)
    return language_model_from_hf(network, tokenizer, hf_tokenizer.mask_token_id, {}, str(file))


def find_gguf_file(path: Path) -> Path | None:
    """The path itself if it is a GGUF file, or the only one in a folder without a config.json."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{path} holds {len(files)} .gguf files; name one of them, as in {files[0]}")
    return files[0] if files else None
