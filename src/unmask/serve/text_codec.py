"""Between text and ids: a request's text as a canvas, and a filled canvas as an answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from unmask.data.tokenizers import REPLACEMENT_CHAR, Tokenizer, token_texts
from unmask.sampling.canvas import Template, parse_template
from unmask.serve.jobs import GeneratedSequence, TokenEvent
from unmask.serve.schemas import Alternative, GeneratedToken, InfillCandidate, InfillSpan, Logprobs


@dataclass(frozen=True)
class MaskedText:
    """Ids with the mask in their holes, which are given as (first position, length)."""

    ids: list[int]
    holes: list[tuple[int, int]]

    @property
    def num_masked(self) -> int:
        """Tokens to be written."""
        return sum(length for _, length in self.holes)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are there already."""
        return len(self.ids) - self.num_masked


@dataclass(frozen=True)
class TextCodec:
    """A tokenizer and the id of the mask."""

    tokenizer: Tokenizer
    mask_id: int

    def encode_template(self, template: Template) -> MaskedText:
        """The canvas of a template."""
        ids: list[int] = []
        holes = []
        for piece in parse_template(template):
            if isinstance(piece, int):
                holes.append((len(ids), piece))
                ids += [self.mask_id] * piece
            else:
                ids += self.tokenizer.encode(piece) if isinstance(piece, str) else self.validate_ids(piece)
        return MaskedText(ids, holes)

    def validate_ids(self, ids: list[int]) -> list[int]:
        """Ids that a client sent, each of which must be a token of the tokenizer's."""
        known = self.tokenizer.vocab_size
        for id_ in ids:
            if not 0 <= id_ < known or id_ == self.mask_id:
                raise ValueError(f"the token {id_} is not one of the tokenizer's 0..{known - 1}")
        return ids

    def completion_canvas(self, prompt: Sequence[int], num_tokens: int, suffix: str) -> MaskedText:
        """A canvas with one hole."""
        after = self.tokenizer.encode(suffix) if suffix else []
        return MaskedText([*prompt, *[self.mask_id] * num_tokens, *after], [(len(prompt), num_tokens)])

    def render_draft(self, ids: Sequence[int]) -> str:
        """What is written so far, as a template: masks are holes again."""
        parts = []
        for hidden, run in itertools.groupby(ids, key=lambda id_: id_ == self.mask_id):
            tokens = list(run)
            parts.append(f"<mask:{len(tokens)}>" if hidden else self.tokenizer.decode(tokens))
        return "".join(parts)

    def decoded_prefix(self, ids: Sequence[int]) -> str:
        """The text up to the first mask, without a character that is not yet whole."""
        known = list(itertools.takewhile(lambda id_: id_ != self.mask_id, ids))
        text = self.tokenizer.decode(known)
        return text if len(known) == len(ids) else text.rstrip(REPLACEMENT_CHAR)

    def decode_token(self, id_: int) -> str:
        """A token by itself."""
        return self.tokenizer.decode([id_])

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text cut into a piece for each id."""
        return token_texts(self.tokenizer.decode, ids)

    def tokenize(self, text: str) -> tuple[list[int], list[str]]:
        """The ids of a text, and its pieces."""
        ids = self.tokenizer.encode(text)
        return ids, self.token_texts(ids)

    def infill_candidate(
        self, sequence: GeneratedSequence, masked_text: MaskedText, index: int, seed: int
    ) -> InfillCandidate:
        """A candidate as it is answered."""
        pieces = self.token_texts(sequence.ids)
        starts = [0, *itertools.accumulate(len(piece) for piece in pieces)]
        spans = []
        for first, length in masked_text.holes:
            places = range(first, first + length)
            start, end = starts[first], starts[first + length]
            tokens = [self._generated_token(sequence, place, pieces[place]) for place in places]
            spans.append(InfillSpan(start=start, end=end, text="".join(pieces)[start:end], tokens=tokens))
        return InfillCandidate(index=index, seed=seed, text="".join(pieces), spans=spans, steps=max(sequence.steps))

    def logprobs(self, sequence: GeneratedSequence, positions: Sequence[int]) -> Logprobs:
        """The tokens at these places, as OpenAI tells of them."""
        pieces = self.token_texts([sequence.ids[place] for place in positions])
        marks = [sequence.events[place] for place in positions]
        return Logprobs(
            tokens=pieces,
            token_logprobs=[None if mark is None else mark.logprob for mark in marks],
            top_logprobs=[
                {each.text: _safe_log(each.probability) for each in self.alternatives(mark)} for mark in marks
            ],
            text_offset=[0, *itertools.accumulate(len(piece) for piece in pieces)][:-1],
        )

    def alternatives(self, event: TokenEvent | None) -> list[Alternative]:
        """What else the network held possible."""
        others = () if event is None else event.alternatives
        return [Alternative(id=id_, text=self.decode_token(id_), probability=p) for id_, p in others]

    def _generated_token(self, sequence: GeneratedSequence, position: int, text: str) -> GeneratedToken:
        mark = sequence.events[position]
        return GeneratedToken(
            id=sequence.ids[position],
            text=text,
            logprob=None if mark is None else mark.logprob,
            step=sequence.steps[position],
            alternatives=self.alternatives(mark),
        )


def _safe_log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -1e9


def truncate_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text up to the first of the stops; None if there is none in it."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(found)] if found else None


def safe_stream_length(text: str, stops: Sequence[str]) -> int:
    """How many characters cannot become part of a stop when more follow."""
    longest = max((len(stop) for stop in stops), default=1)
    return max(0, len(text) - (longest - 1))
