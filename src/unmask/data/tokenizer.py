"""Text to ids and back: any `tokenizer.json`, plus two that need no training, bytes and characters.

The mask is not the tokenizer's business: the model adds it as one more id, so that no text can contain it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


class Tokenizer:
    """A `tokenizers.Tokenizer` that adds nothing to the text and refuses what it cannot write."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner

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
        inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=""))
        inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        inner.decoder = decoders.Fuse()
        return cls(inner)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json that can be read: {error}") from None

    @property
    def size(self) -> int:
        """How many ids there are, the mask not included."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The text's ids, nothing added."""
        try:
            return list(self.inner.encode(text, add_special_tokens=False).ids)
        except Exception as error:
            known = self.inner.get_vocab()
            missing = next((char for char in text if char not in known), None)
            if missing is None:
                raise ValueError(f"the tokenizer cannot encode {text[:40]!r}: {error}") from None
            raise ValueError(f"the character {missing!r} is not in the tokenizer's alphabet") from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    def to_json(self) -> str:
        """The contents of a `tokenizer.json`."""
        return str(self.inner.to_str(pretty=True))


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level tokenizers: itself, or the next code from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_in)) for byte in range(256)]
