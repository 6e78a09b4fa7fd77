"""Between text and ids: templates to masked ids, and generated ids to parts of a response."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from unmask.data.tokenizers import REPLACEMENT_CHAR, BaseTokenizer, token_texts
from unmask.sampling.templates import EncodedTemplate as EncodedTemplate
from unmask.sampling.templates import MaskedText as MaskedText
from unmask.sampling.templates import Template, encode_template
from unmask.serve._jobs import GeneratedSequence, TokenEvent
from unmask.serve._response_schemas import Alternative, GeneratedToken, InfillCandidate, InfillSpan, Logprobs


@dataclass(frozen=True)
class TextCodec:
    """Conversions with a tokenizer and a mask id."""

    tokenizer: BaseTokenizer
    mask_id: int

    def encode_template(self, template: Template) -> EncodedTemplate:
        """The ids and holes of a template."""
        return encode_template(template, self.encode_prompt)

    def validate_ids(self, ids: list[int]) -> list[int]:
        """Ids of a request; each must be a token of the tokenizer."""
        size = self.tokenizer.vocab_size
        for id_ in ids:
            if not 0 <= id_ < size or id_ == self.mask_id:
                raise ValueError(f"the token {id_} is not one of the tokenizer's 0..{size - 1}")
        return ids

    def encode_prompt(self, prompt: str | list[int]) -> list[int]:
        """The ids of a prompt, which are checked if they are given."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.validate_ids(prompt)

    def render_draft(self, ids: Sequence[int]) -> str:
        """The current text as a template: masks become holes."""
        parts = []
        for masked, run in itertools.groupby(ids, key=lambda id_: id_ == self.mask_id):
            tokens = list(run)
            parts.append(f"<mask:{len(tokens)}>" if masked else self.tokenizer.decode(tokens))
        return "".join(parts)

    def decoded_prefix(self, ids: Sequence[int]) -> str:
        """The text up to the first mask, without an incomplete character at its end."""
        prefix = list(itertools.takewhile(lambda id_: id_ != self.mask_id, ids))
        text = self.tokenizer.decode(prefix)
        return text if len(prefix) == len(ids) else text.rstrip(REPLACEMENT_CHAR)

    def decode_token(self, id_: int) -> str:
        """The text of a single token."""
        return self.tokenizer.decode([id_])

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token within the whole text."""
        return token_texts(self.tokenizer.decode, ids)

    def tokenize(self, text: str) -> tuple[list[int], list[str]]:
        """The ids of a text, and the text of each token."""
        ids = self.tokenizer.encode(text)
        return ids, self.token_texts(ids)

    def infill_candidate(
        self, sequence: GeneratedSequence, masked_text: MaskedText, index: int, seed: int
    ) -> InfillCandidate:
        """A candidate of an infill response."""
        texts = self.token_texts(sequence.ids)
        starts = [0, *itertools.accumulate(map(len, texts))]
        spans = []
        for first, length in masked_text.holes:
            start, end = starts[first], starts[first + length]
            tokens = [self._generated_token(sequence, i, texts[i]) for i in range(first, first + length)]
            spans.append(InfillSpan(start=start, end=end, text="".join(texts)[start:end], tokens=tokens))
        return InfillCandidate(index=index, seed=seed, text="".join(texts), spans=spans, steps=max(sequence.steps))

    def logprobs(self, sequence: GeneratedSequence, positions: Sequence[int]) -> Logprobs:
        """The log-probabilities of these tokens in OpenAI's form."""
        texts = self.token_texts([sequence.ids[position] for position in positions])
        events = [sequence.events[position] for position in positions]
        return Logprobs(
            tokens=texts,
            token_logprobs=[None if event is None else event.logprob for event in events],
            top_logprobs=[
                {each.text: _safe_log(each.probability) for each in self.alternatives(event)} for event in events
            ],
            text_offset=[0, *itertools.accumulate(map(len, texts))][:-1],
        )

    def alternatives(self, event: TokenEvent | None) -> list[Alternative]:
        """The most probable tokens of a position."""
        pairs = () if event is None else event.alternatives
        return [Alternative(id=id_, text=self.decode_token(id_), probability=p) for id_, p in pairs]

    def _generated_token(self, sequence: GeneratedSequence, position: int, text: str) -> GeneratedToken:
        event = sequence.events[position]
        return GeneratedToken(
            id=sequence.ids[position],
            text=text,
            logprob=None if event is None else event.logprob,
            step=sequence.steps[position],
            alternatives=self.alternatives(event),
        )


def _safe_log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -1e9


def truncate_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first stop; None if it contains no stop."""
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    return text[: min(starts)] if starts else None


def safe_stream_length(text: str, stops: Sequence[str]) -> int:
    """How many characters cannot become part of a stop, whatever follows."""
    longest = max((len(stop) for stop in stops), default=1)
    return max(0, len(text) - (longest - 1))


def completion_template(prompt: Sequence[int], length: int | range, suffix: Sequence[int] = ()) -> EncodedTemplate:
    """A prompt, one hole and a suffix."""
    return EncodedTemplate(([*prompt], length, *([[*suffix]] if suffix else [])))
