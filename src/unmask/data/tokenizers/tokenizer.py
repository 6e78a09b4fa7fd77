"""Text to ids and back: bytes, characters, DNA, proteins, BPE trained on a corpus, and any `tokenizer.json`.

The mask is not the tokenizer's business: the model adds it as one more id, so that no text can contain it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from unmask.data.tokenizers.fast_encoders import ByteEncoder, CharEncoder, TokenIds
from unmask.data.tokenizers.pretokenize import CachedWordEncoder, sample_words
from unmask.data.tokenizers.unknown_stats import IUPAC_CODES, MAX_UNKNOWN_FRACTION, UnknownStats
from unmask.io.hub import UNREACHABLE_MESSAGE, hub_session
from unmask.io.untrusted import read_bytes
from unmask.registry import Family

_MAX_TOKENIZER_BYTES = 64 << 20
"""Bytes of a `tokenizer.json`: the largest that are published have half as many."""
_BPE_EOS_TOKEN = "<|endoftext|>"
REPLACEMENT_CHAR = "\ufffd"
"""What bytes that are no UTF-8 are shown as."""
_EOS_TOKENS = (_BPE_EOS_TOKEN, "<|end_of_text|>", "</s>", "[SEP]", "<eos>")
"""The names that published vocabularies give to the end of a document, the first that is there counts."""

MIN_BPE_VOCAB_SIZE = 257
"""Every byte and the end of a document."""

_BPE_WORDS_PER_TOKEN = 32
"""How many words of text a BPE is trained on for each of its tokens; ten times more save 0.1 % of tokens."""


_AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY" + "BZXUOJ*-"
"""The twenty; those for two of them, for any, the two rare ones and I or L; a stop and a gap."""

_log = logging.getLogger("unmask")


class Tokenizer:
    """A `tokenizers.Tokenizer` that adds and drops nothing, and refuses what it cannot write.

    A special token that is spelled out in a text is text: nothing in a document can fake its end.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # published files often cut and pad to the length their model was trained with
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend = backend

    def __repr__(self) -> str:
        return f"Tokenizer({type(self.backend.model).__name__}, {self.vocab_size:,} ids)"

    @classmethod
    def bytes(cls) -> Tokenizer:
        """256 tokens; the id of a byte is the byte."""
        vocab = {char: byte for byte, char in enumerate(_bytes_to_unicode())}
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        return cls(inner)

    @classmethod
    def characters(cls, alphabet: Iterable[str]) -> Tokenizer:
        """One token for each different character of `alphabet`, in sorted order."""
        vocab = {char: i for i, char in enumerate(sorted(set(alphabet)))}
        if not vocab:
            raise ValueError("an alphabet needs at least one character")
        return cls(_char_level_backend(vocab, unk_token=""))

    @classmethod
    def text8(cls) -> Tokenizer:
        """The letters a to z and the space."""
        return cls.characters("abcdefghijklmnopqrstuvwxyz ")

    @classmethod
    def dna(cls) -> Tokenizer:
        """A, C, G, T and N; lower case is upper case, and anything else is N."""
        inner = _char_level_backend({base: i for i, base in enumerate("ACGTN")}, unk_token="N")
        inner.normalizer = normalizers.Sequence([normalizers.Replace(base.lower(), base) for base in "ACGT"])
        return cls(inner)

    @classmethod
    def protein(cls) -> Tokenizer:
        """The amino acids, B, Z, X, U, O, J, * and -; lower case is upper case, and anything else is X."""
        inner = _char_level_backend({letter: i for i, letter in enumerate(_AMINO_ACIDS)}, unk_token="X")
        letters = [letter for letter in _AMINO_ACIDS if letter.isalpha()]
        inner.normalizer = normalizers.Sequence([normalizers.Replace(each.lower(), each) for each in letters])
        return cls(inner)

    @classmethod
    def train_bpe(cls, texts: Iterator[str], vocab_size: int) -> Tokenizer:
        """Byte-level BPE of at most `size` tokens, the same for the same texts; id 0 ends a document.

        It is trained on a representative choice of the texts' words, which takes seconds for any text.
        """
        if vocab_size < MIN_BPE_VOCAB_SIZE:
            raise ValueError(f"a BPE vocabulary needs at least {MIN_BPE_VOCAB_SIZE} tokens; got {vocab_size}")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_BPE_EOS_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(sample_words(texts, _BPE_WORDS_PER_TOKEN * vocab_size), trainer=trainer)
        return cls(inner)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`."""
        try:
            return cls(tokenizers.Tokenizer.from_buffer(read_bytes(Path(path), _MAX_TOKENIZER_BYTES)))
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
            reason = str(error).strip().split("\n")[0] if online else UNREACHABLE_MESSAGE
            raise ValueError(
                f"the tokenizer {name!r} is neither a folder nor to be had from the hub: {reason}"
            ) from None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; the mask is not included."""
        return max(self.known_ids, default=-1) + 1

    @cached_property
    def eos_id(self) -> int | None:
        """The id that ends a document, if there is one: the byte 0, a newline, or a token made for it."""
        match self._fast_encoder:
            case ByteEncoder():
                return 0
            case CharEncoder():
                newline: int | None = self.backend.token_to_id("\n")
                return newline
            case _:
                ids = (self.backend.token_to_id(name) for name in _EOS_TOKENS)
                return next((id_ for id_ in ids if id_ is not None), None)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The smaller of uint16 and uint32 that holds every id and the mask."""
        return np.dtype(np.uint16 if self.vocab_size < 1 << 16 else np.uint32)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its JSON: two tokenizers with the same digest give the same ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str, allow_unknown: bool = False, *, parse_special_tokens: bool = False) -> list[int]:
        """The text's ids, nothing added.

        Characters that it has no token for are told; if they are many, or nothing can be written in their
        place, the text is refused, for it must be of another alphabet. `allow_unknown` takes it all the same.
        With `specials`, special tokens that are spelled out, such as [CLS], are read as what they stand for.
        """
        marked = parse_special_tokens and any(name in text for name in self.special_tokens)
        inner = self._special_parsing_backend if marked else self.backend
        try:
            encoding = inner.encode(text, add_special_tokens=False)
        except Exception as error:
            raise self._encode_error(text, error) from None
        if not self._covers_all_text and not allow_unknown:
            unknown = self._unknown_stats([text], [encoding])
            if unknown.exceeds_limit:
                raise ValueError(self.unknown_text_message(unknown))
            for note in unknown.describe(self.unk_token):
                _log.warning(note)
        return list(encoding.ids)

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """What special tokens are spelled like."""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def _special_parsing_backend(self) -> tokenizers.Tokenizer:
        inner = tokenizers.Tokenizer.from_str(self.to_json())
        inner.encode_special_tokens = False
        return inner

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of many texts, as `encode` gives them but fast, in arrays of `dtype`."""
        return self.encode_batch_with_stats(texts)[0]

    def encode_batch_with_stats(self, texts: Sequence[str]) -> tuple[list[TokenIds], UnknownStats]:
        """The ids of many texts, however much is unknown in them, and how much that is."""
        try:
            if isinstance(self._fast_encoder, CharEncoder):
                ids, counts = self._fast_encoder.encode_with_counts(texts, self.dtype)
                unknown = UnknownStats.from_counts(sum(map(len, texts)), counts, self._ambiguous_letters)
                if unknown.num_unknown and self.unk_token is None:
                    raise ValueError(self.unknown_text_message(unknown))
                return ids, unknown
            nothing = UnknownStats(sum(map(len, texts)))
            if self._fast_encoder is not None:
                return self._fast_encoder.encode(texts, self.dtype), nothing
            encode = self.backend.encode_batch_fast if self._covers_all_text else self.backend.encode_batch
            encodings = encode(list(texts), add_special_tokens=False)
            ids = [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]
            return ids, nothing if self._covers_all_text else self._unknown_stats(texts, encodings)
        except ValueError:
            raise
        except Exception as error:
            raise self._encode_error("".join(texts), error) from None

    @cached_property
    def unk_token(self) -> str | None:
        """The token that is written for what is unknown, if there is one."""
        if isinstance(self.backend.model, models.Unigram):
            number = json.loads(self.to_json())["model"].get("unk_id")
            return None if number is None else str(self.backend.id_to_token(number))
        name = getattr(self.backend.model, "unk_token", None)
        return str(name) if name and self.backend.token_to_id(name) is not None else None

    def unknown_text_message(self, stats: UnknownStats) -> str:
        """Why a text with so much unknown is not taken."""
        letters = "".join(self.backend.get_vocab())
        known = (
            repr("".join(sorted(letters))) if len(letters) == self.vocab_size < 64 else f"{self.vocab_size:,} tokens"
        )
        lost = (
            f"and would become {self.unk_token}, more than {MAX_UNKNOWN_FRACTION:.0%}"
            if self.unk_token
            else "and cannot be written"
        )
        return (
            f"{stats.format_counts()} {lost}; it has {known}: give it such a text, or take another tokenizer, as"
            " bytes or bpe:4096"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        wanted = [int(id_) for id_ in ids]
        unknown = next((id_ for id_ in wanted if id_ not in self.known_ids), None)
        if unknown is not None:
            raise ValueError(f"the tokenizer has no token {unknown}; its ids are 0..{self.vocab_size - 1}")
        return str(self.backend.decode(wanted, skip_special_tokens=False))

    def to_json(self) -> str:
        """The contents of a `tokenizer.json`."""
        return str(self.backend.to_str(pretty=True))

    @cached_property
    def known_ids(self) -> frozenset[int]:
        """The ids that have a token."""
        return frozenset(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _fast_encoder(self) -> ByteEncoder | CharEncoder | CachedWordEncoder | None:
        """A faster way to the same ids, if there is one; bytes and characters are known by their JSON."""
        if isinstance(self.backend.model, models.BPE):
            if self.vocab_size == 256 and self.digest == Tokenizer.bytes().digest:
                return ByteEncoder()
            return CachedWordEncoder(self.backend) if _uses_gpt2_pretokenizer(self.backend) else None
        vocab = self.backend.get_vocab()
        if not isinstance(self.backend.model, models.WordLevel) or any(len(token) != 1 for token in vocab):
            return None
        for letters in (Tokenizer.dna(), Tokenizer.protein()):
            if self.digest == letters.digest and self.unk_token is not None:
                small = {letter.lower(): id_ for letter, id_ in vocab.items()}
                return CharEncoder(vocab | small, vocab[self.unk_token])
        if self.digest == Tokenizer.characters(vocab).digest:
            return CharEncoder(vocab)
        return None

    @cached_property
    def _covers_all_text(self) -> bool:
        """Whether every character has tokens: because bytes have."""
        if isinstance(self._fast_encoder, ByteEncoder | CachedWordEncoder):
            return True
        vocab = self.backend.get_vocab().keys()
        if getattr(self.backend.model, "byte_fallback", False):
            return vocab >= {f"<0x{byte:02X}>" for byte in range(256)}
        parts = json.loads(self.to_json())
        used = json.dumps([parts["normalizer"], parts["pre_tokenizer"]])
        return '"ByteLevel"' in used and vocab >= set(_bytes_to_unicode())

    @cached_property
    def _ambiguous_letters(self) -> str:
        """Letters that are codes for several of its own."""
        return IUPAC_CODES + IUPAC_CODES.lower() if self.digest == Tokenizer.dna().digest else ""

    def _unknown_stats(self, texts: Sequence[str], encodings: Sequence[tokenizers.Encoding]) -> UnknownStats:
        """What of the texts became the unknown token, or nothing at all (white space aside)."""
        counts: Counter[str] = Counter()
        becomes = self.unk_token or ""
        unknown = self.backend.token_to_id(becomes) if becomes else -1
        # A BPE without an unknown token passes over what it does not know, and no longer says where it was.
        passes_over = isinstance(self.backend.model, models.BPE) and not becomes
        alphabet = set("".join(self.backend.get_vocab())) if passes_over else None
        for text, encoding in zip(texts, encodings, strict=True):
            if not text:
                continue
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            for i in np.flatnonzero(np.array(encoding.ids, np.int64) == unknown).tolist():
                span = text[spans[i, 0] : spans[i, 1]]
                if span.upper() != becomes.upper():  # or else it was written so
                    counts.update(span)
            counts.update(sign for sign in _uncovered_chars(text, spans, alphabet) if not sign.isspace())
        return UnknownStats.from_counts(sum(map(len, texts)), counts, self._ambiguous_letters)

    def _encode_error(self, text: str, error: Exception) -> ValueError:
        """What is wrong with a text that could not be encoded."""
        if isinstance(self.backend.model, models.WordLevel):
            known, split = self.backend.get_vocab(), self.backend.pre_tokenizer
            pieces = [piece for piece, _ in split.pre_tokenize_str(text)] if split is not None else [text]
            missing = Counter(piece for piece in pieces if piece not in known)
            if missing and all(len(token) == 1 for token in known):
                return ValueError(self.unknown_text_message(UnknownStats.from_counts(len(text), missing)))
            if missing:
                return ValueError(f"the word {next(iter(missing))!r} is not in the tokenizer's vocabulary")
        return ValueError(f"the tokenizer cannot encode {text[:40]!r}: {error}")


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of `ids` cut into a piece for each id.

    A tokenizer may write an id differently after others (spaces, halves of characters), so each piece is
    what the text grows by; the first ids of an unfinished character get nothing, and its last one all.
    """
    pieces, context, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        known, grown = decode(ids[context:done]), decode(ids[context:end])
        if grown.endswith(REPLACEMENT_CHAR) and end < len(ids):
            pieces.append("")
            continue
        pieces.append(grown[len(known) :])
        context, done = done, end
    return pieces


TOKENIZERS: Family[Tokenizer] = Family(
    "unmask.data.tokenizers.tokenizer:Tokenizer",
    {
        "bytes": "unmask.data.tokenizers.tokenizer:Tokenizer.bytes",
        "dna": "unmask.data.tokenizers.tokenizer:Tokenizer.dna",
        "protein": "unmask.data.tokenizers.tokenizer:Tokenizer.protein",
        "text8": "unmask.data.tokenizers.tokenizer:Tokenizer.text8",
    },
)
"""Functions that make a tokenizer, by name."""


def is_external(name: str) -> bool:
    """Whether a name is that of a tokenizer from outside the package, package.module:name."""
    module, colon, path = name.partition(":")
    words = [*module.split("."), *path.split(".")]
    return bool(colon) and module not in ("bpe", "hub") and all(map(str.isidentifier, words))


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a name: bytes, dna, protein, text8, a `tokenizer.json` or its folder, hub:NAME."""
    if name in TOKENIZERS:
        named: Tokenizer = TOKENIZERS[name]()
        return named
    if is_external(name):
        raise ValueError(f"the tokenizer {name} is code from outside unmask: pass the Tokenizer that it makes")
    if name.startswith("hub:"):
        return Tokenizer.from_hub(name.removeprefix("hub:"))
    path = Path(name)
    if path.suffix == ".json" or path.is_file():
        return Tokenizer.from_file(path)
    if path.is_dir():
        return Tokenizer.from_file(path / "tokenizer.json")
    close = difflib.get_close_matches(name, TOKENIZERS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"there is no tokenizer {name!r}; known are {', '.join(TOKENIZERS)}, bpe:SIZE, hub:NAME"
        f" and the path of a tokenizer.json{hint}"
    )


def _uncovered_chars(text: str, spans: NDArray[np.int64], alphabet: set[str] | None) -> list[str]:
    """The characters that no token covers or, if there is an `alphabet`, that are not in it."""
    if alphabet is not None:
        return [sign for sign in text if sign not in alphabet]
    covered = np.zeros(len(text) + 1, np.int64)
    np.add.at(covered, spans[:, 0], 1)
    np.add.at(covered, spans[:, 1], -1)
    return [text[i] for i in np.flatnonzero(covered.cumsum()[:-1] == 0).tolist()]


def _uses_gpt2_pretokenizer(backend: tokenizers.Tokenizer) -> bool:
    """Whether it encodes each of GPT-2's words for itself, always in the same way."""
    split = backend.pre_tokenizer
    return (
        isinstance(split, pre_tokenizers.ByteLevel)
        and split.use_regex
        and not split.add_prefix_space
        and backend.normalizer is None
        and not backend.model.dropout
        and all(token.special for token in backend.get_added_tokens_decoder().values())
    )


def _char_level_backend(vocab: dict[str, int], unk_token: str) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=unk_token))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _bytes_to_unicode() -> list[str]:
    """The printable stand-in of each byte in byte-level tokenizers: itself, or the next code from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]
