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

from unmask.data.hub import UNREACHABLE, lookup
from unmask.data.lookup import ByteLookup, CharacterLookup, Ids
from unmask.data.unknown import IUPAC, MOST, Unknown
from unmask.data.words import WordLookup, representative
from unmask.untrusted import read_bytes

LARGEST = 64 << 20
"""Bytes of a `tokenizer.json`: the largest that are published have half as many."""
END_OF_TEXT = "<|endoftext|>"
BROKEN = "\ufffd"
"""What bytes that are no UTF-8 are shown as."""
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "[SEP]", "<eos>")
"""The names that published vocabularies give to the end of a document, the first that is there counts."""

SMALLEST_BPE = 257
"""Every byte and the end of a document."""

WORDS_PER_TOKEN = 32
"""How many words of text a BPE is trained on for each of its tokens; ten times more save 0.1 % of tokens."""


AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY" + "BZXUOJ*-"
"""The twenty; those for two of them, for any, the two rare ones and I or L; a stop and a gap."""

log = logging.getLogger("unmask")


class Tokenizer:
    """A `tokenizers.Tokenizer` that adds and drops nothing, and refuses what it cannot write.

    A special token that is spelled out in a text is text: nothing in a document can fake its end.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # published files often cut and pad to the length their model was trained with
        inner.no_padding()
        inner.encode_special_tokens = True
        self.inner = inner

    def __repr__(self) -> str:
        return f"Tokenizer({type(self.inner.model).__name__}, {self.size:,} ids)"

    @classmethod
    def bytes(cls) -> Tokenizer:
        """256 tokens; the id of a byte is the byte."""
        vocab = {char: byte for byte, char in enumerate(_byte_characters())}
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
        return cls(_one_character_each(vocab, unknown=""))

    @classmethod
    def dna(cls) -> Tokenizer:
        """A, C, G, T and N; lower case is upper case, and anything else is N."""
        inner = _one_character_each({base: i for i, base in enumerate("ACGTN")}, unknown="N")
        inner.normalizer = normalizers.Sequence([normalizers.Replace(base.lower(), base) for base in "ACGT"])
        return cls(inner)

    @classmethod
    def protein(cls) -> Tokenizer:
        """The amino acids, B, Z, X, U, O, J, * and -; lower case is upper case, and anything else is X."""
        inner = _one_character_each({letter: i for i, letter in enumerate(AMINO_ACIDS)}, unknown="X")
        letters = [letter for letter in AMINO_ACIDS if letter.isalpha()]
        inner.normalizer = normalizers.Sequence([normalizers.Replace(each.lower(), each) for each in letters])
        return cls(inner)

    @classmethod
    def train_bpe(cls, texts: Iterator[str], size: int) -> Tokenizer:
        """Byte-level BPE of at most `size` tokens, the same for the same texts; id 0 ends a document.

        It is trained on a representative choice of the texts' words, which takes seconds for any text.
        """
        if size < SMALLEST_BPE:
            raise ValueError(f"a BPE vocabulary needs at least {SMALLEST_BPE} tokens; got {size}")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(representative(texts, WORDS_PER_TOKEN * size), trainer=trainer)
        return cls(inner)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`."""
        try:
            return cls(tokenizers.Tokenizer.from_buffer(read_bytes(Path(path), LARGEST)))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json that can be read: {error}") from None

    @classmethod
    def from_hub(cls, name: str) -> Tokenizer:
        """The `tokenizer.json` of a model on the hub, or of a local folder."""
        if Path(name).is_dir():
            return cls.from_file(Path(name) / "tokenizer.json")
        try:
            with lookup(name) as online:
                return cls(tokenizers.Tokenizer.from_pretrained(name))
        except Exception as error:
            reason = str(error).strip().split("\n")[0] if online else UNREACHABLE
            raise ValueError(
                f"the tokenizer {name!r} is neither a folder nor to be had from the hub: {reason}"
            ) from None

    @cached_property
    def size(self) -> int:
        """One more than the largest id; the mask is not included."""
        return max(self.known, default=-1) + 1

    @cached_property
    def separator(self) -> int | None:
        """The id that ends a document, if there is one: the byte 0, a newline, or a token made for it."""
        match self._lookup:
            case ByteLookup():
                return 0
            case CharacterLookup():
                newline: int | None = self.inner.token_to_id("\n")
                return newline
            case _:
                ids = (self.inner.token_to_id(name) for name in SEPARATORS)
                return next((id_ for id_ in ids if id_ is not None), None)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The smaller of uint16 and uint32 that holds every id and the mask."""
        return np.dtype(np.uint16 if self.size < 1 << 16 else np.uint32)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its JSON: two tokenizers with the same digest give the same ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str, allow_unknown: bool = False, *, specials: bool = False) -> list[int]:
        """The text's ids, nothing added.

        Characters that it has no token for are told; if they are many, or nothing can be written in their
        place, the text is refused, for it must be of another alphabet. `allow_unknown` takes it all the same.
        With `specials`, special tokens that are spelled out, such as [CLS], are read as what they stand for.
        """
        marked = specials and any(name in text for name in self.specials)
        inner = self._reading_specials if marked else self.inner
        try:
            encoding = inner.encode(text, add_special_tokens=False)
        except Exception as error:
            raise self._refusal(text, error) from None
        if not self._keeps_all and not allow_unknown:
            unknown = self._unknown([text], [encoding])
            if unknown.is_much:
                raise ValueError(self.refused(unknown))
            for note in unknown.notes(self.becomes):
                log.warning(note)
        return list(encoding.ids)

    @cached_property
    def specials(self) -> frozenset[str]:
        """What special tokens are spelled like."""
        added = self.inner.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def _reading_specials(self) -> tokenizers.Tokenizer:
        inner = tokenizers.Tokenizer.from_str(self.to_json())
        inner.encode_special_tokens = False
        return inner

    def encode_array(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of many texts, as `encode` gives them but fast, in arrays of `dtype`."""
        return self.encode_counted(texts)[0]

    def encode_counted(self, texts: Sequence[str]) -> tuple[list[Ids], Unknown]:
        """The ids of many texts, however much is unknown in them, and how much that is."""
        try:
            if isinstance(self._lookup, CharacterLookup):
                ids, counts = self._lookup.encode_counted(texts, self.dtype)
                unknown = Unknown.of(sum(map(len, texts)), counts, self._ambiguous)
                if unknown.unknown and self.becomes is None:
                    raise ValueError(self.refused(unknown))
                return ids, unknown
            nothing = Unknown(sum(map(len, texts)))
            if self._lookup is not None:
                return self._lookup.encode(texts, self.dtype), nothing
            encode = self.inner.encode_batch_fast if self._keeps_all else self.inner.encode_batch
            encodings = encode(list(texts), add_special_tokens=False)
            ids = [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]
            return ids, nothing if self._keeps_all else self._unknown(texts, encodings)
        except ValueError:
            raise
        except Exception as error:
            raise self._refusal("".join(texts), error) from None

    @cached_property
    def becomes(self) -> str | None:
        """The token that is written for what is unknown, if there is one."""
        if isinstance(self.inner.model, models.Unigram):
            number = json.loads(self.to_json())["model"].get("unk_id")
            return None if number is None else str(self.inner.id_to_token(number))
        name = getattr(self.inner.model, "unk_token", None)
        return str(name) if name and self.inner.token_to_id(name) is not None else None

    def refused(self, unknown: Unknown) -> str:
        """Why a text with so much unknown is not taken."""
        letters = "".join(self.inner.get_vocab())
        known = repr("".join(sorted(letters))) if len(letters) == self.size < 64 else f"{self.size:,} tokens"
        lost = (
            f"and would become {self.becomes}, more than {MOST:.0%}"
            if self.becomes
            else "and cannot be written"
        )
        return (
            f"{unknown.counted()} {lost}; it has {known}: give it such a text, or take another tokenizer, as"
            " bytes or bpe:4096"
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        wanted = [int(id_) for id_ in ids]
        unknown = next((id_ for id_ in wanted if id_ not in self.known), None)
        if unknown is not None:
            raise ValueError(f"the tokenizer has no token {unknown}; its ids are 0..{self.size - 1}")
        return str(self.inner.decode(wanted, skip_special_tokens=False))

    def to_json(self) -> str:
        """The contents of a `tokenizer.json`."""
        return str(self.inner.to_str(pretty=True))

    @cached_property
    def known(self) -> frozenset[int]:
        """The ids that have a token."""
        return frozenset(self.inner.get_vocab(with_added_tokens=True).values())

    @cached_property
    def _lookup(self) -> ByteLookup | CharacterLookup | WordLookup | None:
        """A faster way to the same ids, if there is one; bytes and characters are known by their JSON."""
        if isinstance(self.inner.model, models.BPE):
            if self.size == 256 and self.digest == Tokenizer.bytes().digest:
                return ByteLookup()
            return WordLookup(self.inner) if _goes_by_words(self.inner) else None
        vocab = self.inner.get_vocab()
        if not isinstance(self.inner.model, models.WordLevel) or any(len(token) != 1 for token in vocab):
            return None
        for letters in (Tokenizer.dna(), Tokenizer.protein()):
            if self.digest == letters.digest and self.becomes is not None:
                small = {letter.lower(): id_ for letter, id_ in vocab.items()}
                return CharacterLookup(vocab | small, vocab[self.becomes])
        if self.digest == Tokenizer.characters(vocab).digest:
            return CharacterLookup(vocab)
        return None

    @cached_property
    def _keeps_all(self) -> bool:
        """Whether every character has tokens: because bytes have."""
        if isinstance(self._lookup, ByteLookup | WordLookup):
            return True
        vocab = self.inner.get_vocab().keys()
        if getattr(self.inner.model, "byte_fallback", False):
            return vocab >= {f"<0x{byte:02X}>" for byte in range(256)}
        parts = json.loads(self.to_json())
        used = json.dumps([parts["normalizer"], parts["pre_tokenizer"]])
        return '"ByteLevel"' in used and vocab >= set(_byte_characters())

    @cached_property
    def _ambiguous(self) -> str:
        """Letters that are codes for several of its own."""
        return IUPAC + IUPAC.lower() if self.digest == Tokenizer.dna().digest else ""

    def _unknown(self, texts: Sequence[str], encodings: Sequence[tokenizers.Encoding]) -> Unknown:
        """What of the texts became the unknown token, or nothing at all (white space aside)."""
        counts: Counter[str] = Counter()
        becomes = self.becomes or ""
        unknown = self.inner.token_to_id(becomes) if becomes else -1
        # A BPE without an unknown token passes over what it does not know, and no longer says where it was.
        passes_over = isinstance(self.inner.model, models.BPE) and not becomes
        alphabet = set("".join(self.inner.get_vocab())) if passes_over else None
        for text, encoding in zip(texts, encodings, strict=True):
            if not text:
                continue
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            for i in np.flatnonzero(np.array(encoding.ids, np.int64) == unknown).tolist():
                span = text[spans[i, 0] : spans[i, 1]]
                if span.upper() != becomes.upper():  # or else it was written so
                    counts.update(span)
            counts.update(sign for sign in _left_out(text, spans, alphabet) if not sign.isspace())
        return Unknown.of(sum(map(len, texts)), counts, self._ambiguous)

    def _refusal(self, text: str, error: Exception) -> ValueError:
        """What is wrong with a text that could not be encoded."""
        if isinstance(self.inner.model, models.WordLevel):
            known, split = self.inner.get_vocab(), self.inner.pre_tokenizer
            pieces = [piece for piece, _ in split.pre_tokenize_str(text)] if split is not None else [text]
            missing = Counter(piece for piece in pieces if piece not in known)
            if missing and all(len(token) == 1 for token in known):
                return ValueError(self.refused(Unknown.of(len(text), missing)))
            if missing:
                return ValueError(f"the word {next(iter(missing))!r} is not in the tokenizer's vocabulary")
        return ValueError(f"the tokenizer cannot encode {text[:40]!r}: {error}")


def split_text(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of `ids` cut into a piece for each id.

    A tokenizer may write an id differently after others (spaces, halves of characters), so each piece is
    what the text grows by; the first ids of an unfinished character get nothing, and its last one all.
    """
    pieces, context, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        known, grown = decode(ids[context:done]), decode(ids[context:end])
        if grown.endswith(BROKEN) and end < len(ids):
            pieces.append("")
            continue
        pieces.append(grown[len(known) :])
        context, done = done, end
    return pieces


def named(name: str) -> Tokenizer:
    """The tokenizer of a name: bytes, dna, protein, text8, a `tokenizer.json` or its folder, hub:NAME."""
    ready: dict[str, Callable[[], Tokenizer]] = {
        "bytes": Tokenizer.bytes,
        "dna": Tokenizer.dna,
        "protein": Tokenizer.protein,
        "text8": lambda: Tokenizer.characters("abcdefghijklmnopqrstuvwxyz "),
    }
    if name in ready:
        return ready[name]()
    if name.startswith("hub:"):
        return Tokenizer.from_hub(name.removeprefix("hub:"))
    path = Path(name)
    if path.suffix == ".json" or path.is_file():
        return Tokenizer.from_file(path)
    if path.is_dir():
        return Tokenizer.from_file(path / "tokenizer.json")
    close = difflib.get_close_matches(name, ready, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"there is no tokenizer {name!r}; known are {', '.join(ready)}, bpe:SIZE, hub:NAME"
        f" and the path of a tokenizer.json{hint}"
    )


def _left_out(text: str, spans: NDArray[np.int64], alphabet: set[str] | None) -> list[str]:
    """The characters that no token covers or, if there is an `alphabet`, that are not in it."""
    if alphabet is not None:
        return [sign for sign in text if sign not in alphabet]
    covered = np.zeros(len(text) + 1, np.int64)
    np.add.at(covered, spans[:, 0], 1)
    np.add.at(covered, spans[:, 1], -1)
    return [text[i] for i in np.flatnonzero(covered.cumsum()[:-1] == 0).tolist()]


def _goes_by_words(inner: tokenizers.Tokenizer) -> bool:
    """Whether it encodes each of GPT-2's words for itself, always in the same way."""
    split = inner.pre_tokenizer
    return (
        isinstance(split, pre_tokenizers.ByteLevel)
        and split.use_regex
        and not split.add_prefix_space
        and inner.normalizer is None
        and not inner.model.dropout
        and all(token.special for token in inner.get_added_tokens_decoder().values())
    )


def _one_character_each(vocab: dict[str, int], unknown: str) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=unknown))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level tokenizers: itself, or the next code from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]
