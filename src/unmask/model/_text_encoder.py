"""From texts and templates to ids."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from unmask.data.tokenizers import BaseTokenizer
from unmask.sampling.templates import EncodedTemplate, Template, encode_template
from unmask.types import Vocab


class TextEncoder:
    """Encodes texts, ids and templates for a model."""

    def __init__(self, tokenizer: BaseTokenizer | None, vocab: Vocab, parse_special_tokens: bool) -> None:
        self.tokenizer, self.vocab, self.parse_special_tokens = tokenizer, vocab, parse_special_tokens

    def encode(self, text: str | Sequence[int]) -> list[int]:
        """The ids of a text; ids, and texts of ids where there is no tokenizer, are checked."""
        if not isinstance(text, str):
            try:
                ids = [operator.index(i) for i in text]
            except TypeError:
                raise ValueError(f"token ids must be integers in a list; got {text!r}") from None
            for i in ids:
                if not 0 <= i < self.vocab.size:
                    raise ValueError(f"token id {i} is outside the vocabulary 0..{self.vocab.size - 1}")
            return ids
        if self.tokenizer is not None:
            ids = self.tokenizer.encode(text, parse_special_tokens=self.parse_special_tokens)
            if self.vocab.mask_id in ids:
                spelled = self.tokenizer.id_to_token(self.vocab.mask_id)
                raise ValueError(
                    f"{text[:40]!r} contains the mask token {spelled}, which would be overwritten;"
                    " use `infill` to fill holes"
                )
            return ids
        if not all(word.isdecimal() for word in text.split()):
            raise ValueError(f"this model has no tokenizer: give token ids (as in '5 17 2'), not {text!r}")
        return self.encode([int(word) for word in text.split()])

    def encode_template(self, template: Template | Tensor) -> EncodedTemplate:
        """The ids of a template and the lengths of its holes; ValueError unless it has a hole."""
        if isinstance(template, list) and all(isinstance(piece, int) for piece in template):
            template = torch.tensor(self.encode(template))
        if not isinstance(template, Tensor):
            if isinstance(template, str) and self.tokenizer is not None and self.parse_special_tokens:
                spelled = self.tokenizer.id_to_token(self.vocab.mask_id)
                template = template.replace(spelled, "<mask>") if spelled else template  # as in [MASK]
            return encode_template(template, self.encode)
        if template.numel() != template.shape[-1]:
            raise ValueError(f"a template is one row of ids; got shape {list(template.shape)}")
        ids: list[int] = template.flatten().tolist()
        if self.vocab.mask_id not in ids:
            raise ValueError(f"the template has no hole: put the mask id {self.vocab.mask_id} where one is")
        runs = [(is_hole, list(run)) for is_hole, run in itertools.groupby(ids, self.vocab.mask_id.__eq__)]
        return EncodedTemplate(tuple(len(run) if is_hole else run for is_hole, run in runs))
