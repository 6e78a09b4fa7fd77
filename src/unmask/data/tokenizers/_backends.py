"""Backends of the `tokenizers` library: bytes, characters, DNA, proteins, trained BPE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from unmask.data.tokenizers._fast_encoders import sample_words

BPE_EOS_TOKEN = "<|endoftext|>"

MIN_BPE_VOCAB_SIZE = 257
"""Every byte, and the end of a document."""

_BPE_WORDS_PER_TOKEN = 32
"""Words of text that a BPE is trained on, per token of its vocabulary; ten times more save 0.1 % of tokens."""

DNA_SPECIAL_TOKENS = ("[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]")
"""The first ids of Caduceus' tokenizer, in order; the bases follow them."""

_AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY" + "BZXUOJ*-"
"""The twenty amino acids; the codes of two, of any, of the two rare ones, of I or L; a stop and a gap."""


def byte_backend() -> tokenizers.Tokenizer:
    """256 tokens; the id of a byte is the byte."""
    vocab = {char: byte for byte, char in enumerate(bytes_to_unicode())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def char_backend(alphabet: Iterable[str]) -> tokenizers.Tokenizer:
    """One token for each different character, in sorted order."""
    vocab = {char: i for i, char in enumerate(sorted(set(alphabet)))}
    if not vocab:
        raise ValueError("an alphabet needs at least one character")
    return _char_level(vocab, unk_token="")


def dna_backend() -> tokenizers.Tokenizer:
    """Caduceus' tokenizer: seven special tokens, A, C, G, T and N; lower case is upper case, anything else [UNK]."""
    vocab = {token: i for i, token in enumerate((*DNA_SPECIAL_TOKENS, *"ACGTN"))}
    backend = _case_insensitive(vocab, unk_token="[UNK]", lowered="ACGTN")
    backend.add_special_tokens(list(DNA_SPECIAL_TOKENS))
    return backend


def protein_backend() -> tokenizers.Tokenizer:
    """The amino acids, B, Z, X, U, O, J, * and -; lower case is upper case, and anything else is X."""
    vocab = {letter: i for i, letter in enumerate(_AMINO_ACIDS)}
    return _case_insensitive(vocab, unk_token="X", lowered=filter(str.isalpha, _AMINO_ACIDS))


def train_bpe_backend(texts: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE of at most `vocab_size` tokens; id 0 ends a document.

    It is trained on a sample of the texts' words, which takes seconds for any amount of text.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise ValueError(f"a BPE vocabulary needs at least {MIN_BPE_VOCAB_SIZE} tokens; got {vocab_size}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BPE_EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(sample_words(texts, _BPE_WORDS_PER_TOKEN * vocab_size), trainer=trainer)
    return backend


def uses_gpt2_pretokenizer(backend: tokenizers.Tokenizer) -> bool:
    """Whether it encodes each of GPT-2's words separately, and always in the same way."""
    split = backend.pre_tokenizer
    return (
        isinstance(split, pre_tokenizers.ByteLevel)
        and split.use_regex
        and not split.add_prefix_space
        and backend.normalizer is None
        and not backend.model.dropout
        and all(token.special for token in backend.get_added_tokens_decoder().values())
    )


def bytes_to_unicode() -> list[str]:
    """The printable character of each byte in byte-level tokenizers: itself, or the next code from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacement = iter(range(256, 512))
    return [chr(byte if byte in printable else next(replacement)) for byte in range(256)]


def _case_insensitive(vocab: dict[str, int], unk_token: str, lowered: Iterable[str]) -> tokenizers.Tokenizer:
    backend = _char_level(vocab, unk_token)
    backend.normalizer = normalizers.Sequence([normalizers.Replace(each.lower(), each) for each in lowered])
    return backend


def _char_level(vocab: dict[str, int], unk_token: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token=unk_token))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend
