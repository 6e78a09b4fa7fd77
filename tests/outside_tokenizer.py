"""A tokenizer from outside the package, as a user may write one: codons of DNA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from unmask.data.tokenizers import BaseTokenizer


@dataclass(frozen=True)
class Codons(BaseTokenizer):
    """Three bases a token; one more token ends a document."""

    bases: str = "ACGT"

    @property
    def codons(self) -> list[str]:
        return ["".join(letters) for letters in product(self.bases, repeat=3)]

    @property
    def vocab_size(self) -> int:
        return len(self.codons) + 1

    @property
    def eos_id(self) -> int:
        return len(self.codons)

    def encode(self, text: str, allow_unknown: bool = False, *, parse_special_tokens: bool = False) -> list[int]:
        codons = self.codons
        return [codons.index(text[i : i + 3]) for i in range(0, len(text) - len(text) % 3, 3)]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join([*self.codons, "."][id_] for id_ in ids)


def rna() -> Codons:
    return Codons("ACGU")


def codons() -> Codons:
    return Codons()
