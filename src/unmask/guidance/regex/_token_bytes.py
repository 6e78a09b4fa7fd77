"""The bytes that each token adds to a text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from unmask.data.tokenizers import BaseTokenizer, Tokenizer

_NUM_TRIALS = 256
"""Random token sequences that are decoded to verify the bytes of tokens."""


@dataclass(frozen=True)
class _TokenBytes:
    """The bytes of each id, or None for a token without text. Decoding a sequence concatenates them."""

    at_start: tuple[bytes | None, ...]
    """[V]: at the beginning of a text."""
    inside: tuple[bytes | None, ...]
    """[V]: anywhere else."""


@lru_cache(maxsize=8)
def token_bytes(tokenizer: BaseTokenizer) -> _TokenBytes:
    """The bytes of a tokenizer's tokens; ValueError if its decoder does not concatenate tokens.

    Special tokens, such as the end of a document, have no text.
    """
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(
            f"patterns need a tokenizer of the `tokenizers` library, which gives the bytes of each token;"
            f" got a {type(tokenizer).__name__}"
        )
    inner = tokenizer.backend
    special = {id_ for id_, token in inner.get_added_tokens_decoder().items() if token.special}
    names = {id_: name for name, id_ in inner.get_vocab().items() if id_ not in special}
    kinds = _decoder_types(inner.decoder)
    if "ByteLevel" in kinds:
        spelled = {id_: _decode_byte_level(name) for id_, name in names.items()}
        first, inside = spelled, spelled
    else:
        first, inside = _bytes_by_decoding(inner, names)
        if "ByteFallback" in kinds:
            for id_, name in names.items():
                if code := re.fullmatch(r"<0x([89A-F][0-9A-F])>", name):  # bytes below 0x80 are decoded as characters
                    first[id_] = inside[id_] = bytes.fromhex(code[1])
    result = _TokenBytes(
        tuple(first.get(id_) for id_ in range(tokenizer.vocab_size)),
        tuple(inside.get(id_) for id_ in range(tokenizer.vocab_size)),
    )
    _verify(tokenizer, result)
    return result


def _decoder_types(decoder: Any) -> list[str]:
    """The types of a decoder's parts, as in its JSON."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _decode_byte_level(name: str) -> bytes:
    """The bytes of a byte-level token, whose name has one printable character per byte; of other tokens, UTF-8."""
    try:
        return bytes(map(_byte_level_alphabet().__getitem__, name))
    except KeyError:
        return name.encode()


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """The byte of each character of the byte-level alphabet: printable bytes are the character of the same code,
    the others are numbered from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    themselves = {char: ord(char) for char in alphabet if ord(char) < 256}
    rest = sorted(set(range(256)) - set(themselves.values()))
    others = [char for char in alphabet if ord(char) >= 256]
    return themselves | dict(zip(others, rest, strict=True))


def _bytes_by_decoding(inner: Any, names: dict[int, str]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """What the decoder writes for each token alone, and what it appends for it after another token."""
    ids = list(names)
    alone = inner.decode_batch([[id_] for id_ in ids], skip_special_tokens=False)
    before = next((i for i, text in enumerate(alone) if text.isascii() and text.isalnum()), 0)
    after = inner.decode_batch([[ids[before], id_] for id_ in ids], skip_special_tokens=False)
    known = alone[before] if alone else ""
    grown = {i: text[len(known) :].encode() for i, text in zip(ids, after, strict=True)}
    return {i: text.encode() for i, text in zip(ids, alone, strict=True)}, grown


def _verify(tokenizer: Tokenizer, token_bytes: _TokenBytes) -> None:
    """ValueError if random token sequences are decoded to other texts than the concatenated bytes."""
    usable = [
        i for i, (a, b) in enumerate(zip(token_bytes.at_start, token_bytes.inside, strict=True)) if _are_utf8(a, b)
    ]
    if not usable:
        raise ValueError("the tokenizer has no token that is valid UTF-8 by itself, so no pattern can match")
    chosen = np.random.default_rng(0).choice(usable, (_NUM_TRIALS, 8)).tolist()
    for ids, text in zip(chosen, tokenizer.backend.decode_batch(chosen, skip_special_tokens=False), strict=True):
        pieces = [token_bytes.at_start[ids[0]] or b"", *(token_bytes.inside[id_] or b"" for id_ in ids[1:])]
        if b"".join(pieces).decode() != text:
            raise ValueError(
                f"the text of token ids {ids}, {text!r}, is not the concatenation of its tokens' texts, so patterns"
                " cannot be used with this tokenizer"
            )


def _are_utf8(*pieces: bytes | None) -> bool:
    """Whether each of these is valid UTF-8."""
    try:
        return all(piece is not None and piece.decode() is not None for piece in pieces)
    except UnicodeDecodeError:
        return False
