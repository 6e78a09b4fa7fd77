"""Completions in no dialect: the texts between a prompt and an end or a suffix, whole or part by part.

The routes of OpenAI, llama.cpp, Ollama and Mistral say in their own words what is found here.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fastapi import Request

from unmask.serve._generation import await_or_cancel, check_templates, close_templates, random_seed, submit_generation
from unmask.serve._jobs import GeneratedSequence, StepEvent
from unmask.serve._response_schemas import Usage
from unmask.serve._responses import EventStream, usage
from unmask.serve._schemas import TextRequest
from unmask.serve._text_codec import EncodedTemplate, MaskedText, safe_stream_length, truncate_at_stop
from unmask.serve.service import Finished, RequestHandle, Service


@dataclass(frozen=True)
class CompletedText:
    """A finished completion."""

    index: int
    text: str
    """Up to its end."""
    first: int
    """The position of its first token in the sequence."""
    ids: tuple[int, ...]
    """Its tokens up to one that ends texts; those of a stop text, and after it, are among them."""
    sequence: GeneratedSequence
    stop: str | None
    """The stop text that ended it."""
    has_ended: bool
    """Whether a token that ends texts ended it, or the model chose fewer tokens than there could be."""

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """`stop` if it ended before its last token."""
        return "stop" if self.has_ended or self.stop is not None else "length"


@dataclass(frozen=True)
class TextPart:
    """What a step adds to a completion."""

    index: int
    text: str
    """The text that follows what was sent before, and cannot change any more."""
    ids: Sequence[int]
    """Of the whole sequence after the step."""
    completed: CompletedText | None = None
    """In the last part."""


class CompletionRun:
    """The completions of one or several prompts; sequence i completes prompt i // n."""

    def __init__(
        self,
        service: Service,
        request: TextRequest,
        templates: Sequence[EncodedTemplate],
        texts: Sequence[MaskedText],
        seed: int,
    ) -> None:
        self.service, self.request, self.texts, self.seed = service, request, texts, seed
        self.codec, self.stops = service.codec, request.stops
        self._chose_end = [len(text.ids) < templates[index // request.n].longest for index, text in enumerate(texts)]
        self._handle: RequestHandle | None = None

    @classmethod
    async def start(
        cls,
        service: Service,
        request: TextRequest,
        templates: Sequence[EncodedTemplate],
        deadline: float,
        http: Request,
    ) -> CompletionRun:
        """Close the templates, and queue what is to be generated."""
        seed = random_seed() if request.seed is None else request.seed
        check_templates(service, request, templates)
        guidance = await service.guidance(request, deadline)
        texts = await close_templates(service, request, templates, seed, deadline, http, guidance)
        run = cls(service, request, templates, texts, seed)
        if any(text.num_masked for text in texts):
            run._handle = submit_generation(
                service, request, texts, seed, request.num_alternatives, deadline, guidance, run._hit_stop
            )
        return run

    async def results(self, http: Request) -> list[CompletedText]:
        """All completions."""
        found = self._empty_sequences() if self._handle is None else await await_or_cancel(http, self._handle)
        return [self._completed(sequence, index) for index, sequence in enumerate(found)]

    async def parts(self) -> AsyncIterator[TextPart]:
        """The completions step by step, in the order in which their sequences proceed."""
        sent = [""] * len(self.texts)
        is_final = not self.service.sampler(self.request).may_remask
        async for index, event in self._empty_events() if self._handle is None else self._handle.events():
            if isinstance(event, StepEvent):
                text = self._streamable_text(index, event.ids, sent[index]) if is_final else sent[index]
                yield TextPart(index, text[len(sent[index]) :], event.ids)
                sent[index] = text
            elif isinstance(event, Finished):
                completed = self._completed(event.result, index)
                yield TextPart(index, completed.text[len(sent[index]) :], event.result.ids, completed)

    def usage(self) -> Usage:
        """Given tokens of all prompts, and generated ones of all completions."""
        given = sum(text.num_prompt_tokens for text in self.texts[:: self.request.n])
        return usage(given, sum(text.num_masked for text in self.texts))

    def written(self, completed: CompletedText) -> list[int]:
        """The positions of a completion's tokens: what a stop made superfluous may not be written."""
        positions = range(completed.first, completed.first + len(completed.ids))
        return [place for place in positions if completed.sequence.ids[place] != self.codec.mask_id]

    def prompt_ids(self, index: int) -> list[int]:
        """The tokens before a completion."""
        text = self.texts[index]
        return text.ids[: text.holes[0][0]]

    def _hit_stop(self, masked_text: MaskedText, ids: Sequence[int]) -> bool:
        """Whether the generated text has ended or contains a stop, so that the rest would be cut off."""
        generated, has_ended = self._generated_ids(masked_text, ids)
        if has_ended or not self.stops:
            return has_ended
        return truncate_at_stop(self.codec.decoded_prefix(generated), self.stops) is not None

    def _generated_ids(self, masked_text: MaskedText, ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """The ids of the completion up to a token that ends a text, and whether there is one with no mask before it.

        In front of a suffix the text goes on, and such a token is one as any other.
        """
        ((first, length),) = masked_text.holes
        hole = ids[first : first + length]
        if not self.request.may_end:
            return hole, False
        ends = self.service.model.end_ids
        before = list(itertools.takewhile(lambda id_: id_ not in ends, hole))
        has_ended = len(before) < len(hole) and self.codec.mask_id not in before
        return (before, True) if has_ended else (hole, False)

    def _completed(self, sequence: GeneratedSequence, index: int) -> CompletedText:
        masked_text = self.texts[index]
        ids, has_ended = self._generated_ids(masked_text, sequence.ids)
        generated = self.codec.decoded_prefix(ids)
        self.service.metrics.generated_tokens.inc(masked_text.num_masked)
        truncated = truncate_at_stop(generated, self.stops)
        text = generated if truncated is None else truncated
        stop = None if truncated is None else next(stop for stop in self.stops if generated.startswith(stop, len(text)))
        has_ended = has_ended or self._chose_end[index]
        return CompletedText(index, text, masked_text.holes[0][0], tuple(ids), sequence, stop, has_ended)

    def _streamable_text(self, index: int, ids: Sequence[int], sent: str) -> str:
        """The text up to the first mask, as far as it cannot become part of a stop; at least what was sent."""
        text = self.codec.decoded_prefix(self._generated_ids(self.texts[index], ids)[0])
        if truncate_at_stop(text, self.stops) is not None:
            return sent
        return text[: safe_stream_length(text, self.stops)] or sent

    def _empty_sequences(self) -> list[GeneratedSequence]:
        """The results where nothing is to be generated."""
        return [GeneratedSequence(tuple(t.ids), (None,) * len(t.ids), (0,) * len(t.ids)) for t in self.texts]

    async def _empty_events(self) -> EventStream:
        for index, sequence in enumerate(self._empty_sequences()):
            yield index, Finished(sequence)
