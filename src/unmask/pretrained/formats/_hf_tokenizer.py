"""Tokenizers of transformers folders: `tokenizer.json` with its `tokenizer_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unmask.backbones.hf import import_transformers
from unmask.data.chat import ChatTemplate
from unmask.data.tokenizers import BaseTokenizer, Tokenizer
from unmask.io.untrusted import read_json_object
from unmask.pretrained.formats._hf import translated_errors
from unmask.types import Vocab

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
"""Where folders of transformers name the tokens that end a text."""
_TOKENIZER_SOURCES = ("vocab.txt", "vocab.json", "*.model", "sentencepiece*")
"""Files from which transformers can build a tokenizer."""
_SPECIAL_TOKENS = {
    "mask_token": ("[MASK]", "<mask>", "<|mask|>", "<|MASK|>", "|<MASK>|", "<|mdm_mask|>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "pad_token": ("[PAD]", "<pad>"),
    "bos_token": ("<s>", "<bos>"),
    "eos_token": ("</s>", "<eos>", "<|endoftext|>"),
}
"""The special tokens of published vocabularies."""


def make_tokenizer_config(
    tokenizer: BaseTokenizer, vocab: Vocab, chat_template: ChatTemplate | None = None
) -> dict[str, Any]:
    """The `tokenizer_config.json` with which transformers reads our `tokenizer.json` unchanged.

    A mask id that follows the tokenizer's ids becomes an added token there. Special tokens that a chat template uses
    are those that it was made for.
    """
    special = {kind: _first_known_token(tokenizer, names) for kind, names in _SPECIAL_TOKENS.items()}
    special["mask_token"] = tokenizer.id_to_token(vocab.mask_id)
    if special["eos_token"] is None and vocab.eos_id is not None:
        special["eos_token"] = tokenizer.id_to_token(vocab.eos_id)
    special["pad_token"] = special["pad_token"] or special["eos_token"]
    added: dict[str, Any] = {}
    if special["mask_token"] is None and vocab.mask_id == len(tokenizer.vocab):
        name = next(name for name in _SPECIAL_TOKENS["mask_token"] if name not in tokenizer.vocab)
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        added = {"added_tokens_decoder": {str(vocab.mask_id): {"content": name, **flags, "special": True}}}
        special["mask_token"] = name
    known = {kind: name for kind, name in special.items() if name is not None}
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**fixed, **added, **_chat_settings(chat_template), **known} | _chat_variables(chat_template, known)


def _chat_variables(chat_template: ChatTemplate | None, known: dict[str, str]) -> dict[str, str]:
    """The special tokens of a chat template; the mask is the model's."""
    variables = {} if chat_template is None else dict(chat_template.variables)
    return {**variables, "mask_token": known["mask_token"]} if "mask_token" in known else variables


def _chat_settings(chat_template: ChatTemplate | None) -> dict[str, Any]:
    """Named templates, where there is one for tools; a single one has a file of its own."""
    if chat_template is None or chat_template.tool_source is None:
        return {}
    named = {"default": chat_template.source, "tool_use": chat_template.tool_source}
    return {"chat_template": [{"name": name, "template": source} for name, source in named.items()]}


def load_hf_tokenizer(folder: Path) -> tuple[BaseTokenizer | None, int | None]:
    """The tokenizer of a folder and the id of its mask token; None where there is none."""
    if (folder / TOKENIZER_FILE).exists():
        tokenizer = Tokenizer.from_file(folder / TOKENIZER_FILE)
        return tokenizer, find_mask_id(folder, tokenizer)
    if not any(any(folder.glob(source)) for source in _TOKENIZER_SOURCES):
        return None, None
    with translated_errors(str(folder)):
        loaded: Any = import_transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return Tokenizer(loaded.backend_tokenizer), loaded.mask_token_id


def find_mask_id(folder: Path, tokenizer: BaseTokenizer) -> int | None:
    """The id of the mask token that the tokenizer's config names, or of a token with a mask's usual name."""
    name = _read_mask_token(folder) or _first_known_token(tokenizer, _SPECIAL_TOKENS["mask_token"])
    return None if name is None else tokenizer.vocab.get(name)


def _read_mask_token(folder: Path) -> str | None:
    """The mask token in the tokenizer's config."""
    for name in (TOKENIZER_CONFIG_FILE, "special_tokens_map.json"):
        try:
            token = read_json_object(folder / name).get("mask_token")
        except ValueError:
            continue
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            return content
    return None


def _first_known_token(tokenizer: BaseTokenizer, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in tokenizer.vocab), None)
