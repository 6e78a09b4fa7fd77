"""Tokenizers: text to ids and back."""

from unmask.data.tokenizers.fast_encoders import TokenIds
from unmask.data.tokenizers.tokenizer import (
    MIN_BPE_VOCAB_SIZE,
    REPLACEMENT_CHAR,
    TOKENIZERS,
    Tokenizer,
    get_tokenizer,
    is_external,
    token_texts,
)
from unmask.data.tokenizers.unknown_stats import UnknownStats

__all__ = [
    "MIN_BPE_VOCAB_SIZE",
    "REPLACEMENT_CHAR",
    "TOKENIZERS",
    "TokenIds",
    "Tokenizer",
    "UnknownStats",
    "get_tokenizer",
    "is_external",
    "token_texts",
]
