"""Tokenizers of the `tokenizers` library: bytes, characters, DNA, proteins, trained BPE, any `tokenizer.json`."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models

from unmask.data.tokenizers import _backends as backends
from unmask.data.tokenizers._fast_encoders import ByteEncoder, CachedWordEncoder, CharEncoder, TokenIds
from unmask.data.tokenizers._unknown_stats import IUPAC_CODES, UnknownStats
from unmask.data.tokenizers.base import BaseTokenizer
from unmask.io.errors import first_line
from unmask.io.hub import UNREACHABLE_MESSAGE, hub_session
from unmask.io.untrusted import read_bytes

MAX_TOKENIZER_BYTES = 64 << 20
"""The largest `tokenizer.json` that is read: twice the largest published one."""

_EOS_TOKENS = (backends.BPE_EOS_TOKEN, "<|end_of_text|>", "</s>", "[SEP]", "<eos>")
"""How published vocabularies spell the end of a document; the first one that is in the vocabulary counts."""

_MASK_TOKENS = ("[MASK]", "<mask>", "<|mask|>")
"""How published vocabularies spell the mask."""

_COMPLEMENTS = dict(zip("ACGTRYSWKMBDHVN", "TGCAYRSWMKVHDBN", strict=True))
"""The complement of each base, and of each IUPAC code of several bases."""

_DNA_SIZE_MULTIPLE = 8
"""The number of ids of a model with Caduceus' tokenizer is a multiple of this; the last ones have no token."""

_log = logging.getLogger("unmask")


class Tokenizer(BaseTokenizer):
    """A `tokenizers.Tokenizer` that adds and drops nothing, and raises if it cannot encode a text.

    A special token that is spelled out in a text is text: nothing in a document can fake its end.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # published files often truncate and pad to the length of their model
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend = backend

    def __repr__(self) -> str:
        return f"Tokenizer({type(self.backend.model).__name__}, {self.vocab_size:,} ids)"

    @classmethod
    def bytes(cls) -> Tokenizer:
        """256 tokens; the id of a byte is the byte."""
        return cls(backends.byte_backend())

    @classmethod
    def characters(cls, alphabet: Iterable[str]) -> Tokenizer:
        """One token for each different character of `alphabet`, in sorted order."""
        return cls(backends.char_backend(alphabet))

    @classmethod
    def text8(cls) -> Tokenizer:
        """The letters a to z and the space."""
        return cls.characters("abcdefghijklmnopqrstuvwxyz ")

    @classmethod
    def dna(cls) -> Tokenizer:
        """Caduceus' tokenizer: special tokens, A, C, G, T and N; lower case is upper case, anything else [UNK]."""
        return cls(backends.dna_backend())

    @classmethod
    def protein(cls) -> Tokenizer:
        """The amino acids, B, Z, X, U, O, J, * and -; lower case is upper case, and anything else is X."""
        return cls(backends.protein_backend())

    @classmethod
    def train_bpe(cls, texts: Iterator[str], vocab_size: int) -> Tokenizer:
        """Byte-level BPE of at most `vocab_size` tokens, the same for the same texts; id 0 ends a document."""
        return cls(backends.train_bpe_backend(texts, vocab_size))

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`."""
        try:
            return cls(tokenizers.Tokenizer.from_buffer(read_bytes(Path(path), MAX_TOKENIZER_BYTES)))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json that can be read: {error}") from None

    @classmethod
    def from_hub(cls, name: str) -> Tokenizer:
        """The `tokenizer.json` of a model on the hub, or of a local folder."""
        if Path(name).is_dir():
            return cls.from_file(Path(name) / "tokenizer.json")
        try:
            with hub_session(name) as online:
                return cls(tokenizers.Tokenizer.from_pretrained(name))
        except Exception as error:
            reason = first_line(error) if online else UNREACHABLE_MESSAGE
            raise ValueError(
                f"the tokenizer {name!r} is neither a folder nor available from the hub: {reason}"
            ) from None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.known_ids, default=-1) + 1

    @cached_property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one: byte 0, a newline, or an EOS token."""
        if isinstance(self._fast_encoder, ByteEncoder):
            return 0
        names = (*_EOS_TOKENS, "\n") if isinstance(self._fast_encoder, CharEncoder) else _EOS_TOKENS
        ids = (self.backend.token_to_id(name) for name in names)
        return next((id_ for id_ in ids if id_ is not None), None)

    @cached_property
    def mask_id(self) -> int | None:
        """The id of a special token [MASK], <mask> or <|mask|>."""
        return next((self.vocab[name] for name in _MASK_TOKENS if name in self.special_tokens), None)

    @cached_property
    def context_ids(self) -> tuple[int, ...]:
        """In DNA: N and other codes of several bases, and special tokens that no text has."""
        if self.complement_ids is None:
            return ()
        predicted = {
            *"ACGT",
            self.unk_token,
            *(self.id_to_token(i) for i in (self.mask_id, self.eos_id) if i is not None),
        }
        return tuple(sorted(id_ for token, id_ in self.vocab.items() if token not in predicted))

    @cached_property
    def complement_ids(self) -> tuple[int, ...] | None:
        """That of DNA, which is recognized by its alphabet: A, C, G, T, and at most codes of several bases."""
        letters = {token: id_ for token, id_ in self.vocab.items() if token not in self.special_tokens}
        if not isinstance(self.backend.model, models.WordLevel) or not set("ACGT") <= letters.keys() <= set(
            _COMPLEMENTS
        ):
            return None
        padded = -(-self.vocab_size // _DNA_SIZE_MULTIPLE) * _DNA_SIZE_MULTIPLE
        size = self.vocab_size + 1 if self.mask_id is None else padded
        complement = {id_: letters.get(_COMPLEMENTS[letter], id_) for letter, id_ in letters.items()}
        return tuple(complement.get(id_, id_) for id_ in range(size))

    @cached_property
    def unk_token(self) -> str | None:
        if isinstance(self.backend.model, models.Unigram):
            unk_id = json.loads(self.to_json())["model"].get("unk_id")
            return None if unk_id is None else str(self.backend.id_to_token(unk_id))
        name = getattr(self.backend.model, "unk_token", None)
        return str(name) if name and self.backend.token_to_id(name) is not None else None

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        return frozenset(token.content for token in self.backend.get_added_tokens_decoder().values())

    @cached_property
    def known_ids(self) -> frozenset[int]:
        return frozenset(self.vocab.values())

    @cached_property
    def vocab(self) -> dict[str, int]:
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def id_to_token(self, id_: int) -> str | None:
        token: str | None = self.backend.id_to_token(id_)
        return token

    def to_json(self) -> str:
        return str(self.backend.to_str(pretty=True))

    def encode(self, text: str, allow_unknown: bool = False, *, parse_special_tokens: bool = False) -> list[int]:
        """The text's ids, nothing added.

        Unknown characters are logged; if there are many, or if the tokenizer has no unknown token, the text
        raises, for it must have another alphabet. `allow_unknown` accepts it all the same.
        """
        has_special = parse_special_tokens and any(name in text for name in self.special_tokens)
        backend = self._special_parsing_backend if has_special else self.backend
        try:
            encoding = backend.encode(text, add_special_tokens=False)
        except Exception as error:
            raise self._encode_error(text, error) from None
        if not self._covers_all_text and not allow_unknown:
            unknown = self._count_unknown([text], [encoding])
            if unknown.exceeds_limit:
                raise ValueError(self.unknown_text_message(unknown))
            for note in unknown.describe(self.unk_token):
                _log.warning(note)
        return list(encoding.ids)

    def encode_batch_with_stats(self, texts: Sequence[str]) -> tuple[list[TokenIds], UnknownStats]:
        try:
            if isinstance(self._fast_encoder, CharEncoder):
                return self._encode_chars(self._fast_encoder, texts)
            none_unknown = UnknownStats(sum(map(len, texts)))
            if self._fast_encoder is not None:
                return self._fast_encoder.encode(texts, self.dtype), none_unknown
            encode = self.backend.encode_batch_fast if self._covers_all_text else self.backend.encode_batch
            encodings = encode(list(texts), add_special_tokens=False)
            ids = [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]
            return ids, none_unknown if self._covers_all_text else self._count_unknown(texts, encodings)
        except ValueError:
            raise
        except Exception as error:
            raise self._encode_error("".join(texts), error) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
        id_list = [int(id_) for id_ in ids]
        unknown = next((id_ for id_ in id_list if id_ not in self.known_ids), None)
        if unknown is not None:
            raise ValueError(f"the tokenizer has no token {unknown}; its ids are 0..{self.vocab_size - 1}")
        return str(self.backend.decode(id_list, skip_special_tokens=False))

    @cached_property
    def _special_parsing_backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.to_json())
        backend.encode_special_tokens = False
        return backend

    @cached_property
    def _fast_encoder(self) -> ByteEncoder | CharEncoder | CachedWordEncoder | None:
        """A faster encoder with the same ids, if there is one; bytes and characters are recognized by their JSON."""
        if isinstance(self.backend.model, models.BPE):
            if self.vocab_size == 256 and self.digest == Tokenizer.bytes().digest:
                return ByteEncoder()
            return CachedWordEncoder(self.backend) if backends.uses_gpt2_pretokenizer(self.backend) else None
        vocab = self.backend.get_vocab()
        if not isinstance(self.backend.model, models.WordLevel):
            return None
        for preset in (Tokenizer.dna(), Tokenizer.protein()):
            if self.digest == preset.digest and self.unk_token is not None:
                letters = {token: id_ for token, id_ in vocab.items() if len(token) == 1}
                lower = {letter.lower(): id_ for letter, id_ in letters.items()}
                return CharEncoder(letters | lower, vocab[self.unk_token])
        if any(len(token) != 1 for token in vocab):
            return None
        return CharEncoder(vocab) if self.digest == Tokenizer.characters(vocab).digest else None

    @cached_property
    def _covers_all_text(self) -> bool:
        """Whether every character has tokens, because every byte has one."""
        if isinstance(self._fast_encoder, ByteEncoder | CachedWordEncoder):
            return True
        vocab = self.backend.get_vocab().keys()
        if getattr(self.backend.model, "byte_fallback", False):
            return vocab >= {f"<0x{byte:02X}>" for byte in range(256)}
        parts = json.loads(self.to_json())
        used = json.dumps([parts["normalizer"], parts["pre_tokenizer"]])
        return '"ByteLevel"' in used and vocab >= set(backends.bytes_to_unicode())

    @cached_property
    def _ambiguous_letters(self) -> str:
        """Letters that are codes of several bases."""
        return IUPAC_CODES + IUPAC_CODES.lower() if self.digest == Tokenizer.dna().digest else ""

    def _encode_chars(self, encoder: CharEncoder, texts: Sequence[str]) -> tuple[list[TokenIds], UnknownStats]:
        ids, counts = encoder.encode_with_counts(texts, self.dtype)
        unknown = UnknownStats.from_counts(sum(map(len, texts)), counts, self._ambiguous_letters)
        if unknown.num_unknown and self.unk_token is None:
            raise ValueError(self.unknown_text_message(unknown))
        return ids, unknown

    def _count_unknown(self, texts: Sequence[str], encodings: Sequence[tokenizers.Encoding]) -> UnknownStats:
        """Count the characters that became the unknown token, or no token at all (white space aside)."""
        counts: Counter[str] = Counter()
        unk_token = self.unk_token or ""
        unk_id = self.backend.token_to_id(unk_token) if unk_token else -1
        # A BPE without an unknown token drops unknown characters, and its offsets do not show where.
        drops_unknown = isinstance(self.backend.model, models.BPE) and not unk_token
        alphabet = set("".join(self.backend.get_vocab())) if drops_unknown else None
        for text, encoding in zip(texts, encodings, strict=True):
            if not text:
                continue
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            for i in np.flatnonzero(np.array(encoding.ids, np.int64) == unk_id).tolist():
                span = text[spans[i, 0] : spans[i, 1]]
                if span.upper() != unk_token.upper():  # otherwise the text spells the unknown token
                    counts.update(span)
            counts.update(char for char in _uncovered_chars(text, spans, alphabet) if not char.isspace())
        return UnknownStats.from_counts(sum(map(len, texts)), counts, self._ambiguous_letters)

    def _encode_error(self, text: str, error: Exception) -> ValueError:
        """Why a text could not be encoded."""
        if isinstance(self.backend.model, models.WordLevel):
            vocab, split = self.backend.get_vocab(), self.backend.pre_tokenizer
            words = [word for word, _ in split.pre_tokenize_str(text)] if split is not None else [text]
            missing = Counter(word for word in words if word not in vocab)
            if missing and all(len(token) == 1 for token in vocab):
                return ValueError(self.unknown_text_message(UnknownStats.from_counts(len(text), missing)))
            if missing:
                return ValueError(f"the word {next(iter(missing))!r} is not in the tokenizer's vocabulary")
        return ValueError(f"the tokenizer cannot encode {text[:40]!r}: {error}")


def _uncovered_chars(text: str, spans: NDArray[np.int64], alphabet: set[str] | None) -> list[str]:
    """The characters that no token covers or, with an `alphabet`, that are not in it."""
    if alphabet is not None:
        return [char for char in text if char not in alphabet]
    covered = np.zeros(len(text) + 1, np.int64)
    np.add.at(covered, spans[:, 0], 1)
    np.add.at(covered, spans[:, 1], -1)
    return [text[i] for i in np.flatnonzero(covered.cumsum()[:-1] == 0).tolist()]
