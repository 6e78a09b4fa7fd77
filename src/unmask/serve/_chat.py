"""Chat: from a conversation to a canvas, and from sequences to answers, complete or streamed."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unmask.data.chat import ToolCall, parse_messages, parse_tools, tool_format
from unmask.serve._chat_schemas import (
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    FunctionCall,
    TokenLogprob,
    ToolCallMessage,
    TopLogprob,
)
from unmask.serve._jobs import GeneratedSequence, StepEvent
from unmask.serve._response_schemas import Usage
from unmask.serve._responses import EventStream, response_id, usage
from unmask.serve._text_codec import MaskedText, completion_template, safe_stream_length, truncate_at_stop
from unmask.serve.service import Finished, Service

_DEFAULT_MAX_TOKENS = 256
_UNKNOWN_LOGPROB = -9999.0
"""OpenAI's number for a log-probability that cannot be given."""


@dataclass(frozen=True)
class AnswerPart:
    """What a step adds to an answer; or, at its end, what is left of its text, and the whole candidate."""

    index: int
    text: str
    step: StepEvent | None = None
    choice: ChatChoice | None = None
    num_tokens: int = 0
    """Of the whole answer, at its end."""


class ChatResponder:
    """Builds the canvas of a chat request, and the response to it. Renders the template: not for the event loop."""

    def __init__(self, service: Service, request: ChatRequest, seed: int) -> None:
        self.service, self.request, self.seed, self.codec = service, request, seed, service.codec
        model = service.model
        template = model.require_chat_template()
        self.form = tool_format(template)
        self.names = [function["name"] for function in request.chosen_functions]
        if request.tools and not template.takes_tools:
            raise ValueError("the chat template of this model has no place for tools: leave them out")
        messages = parse_messages(request.messages, "the conversation")
        if (messages[-1]["role"] == "assistant") != request.continue_final_message:
            wanted = "an assistant's, to be continued" if request.continue_final_message else "a user's or a tool's"
            raise ValueError(f"the last message must be {wanted}; it is from {messages[-1]['role']!r}")
        tools = None if request.tool_choice == "none" else parse_tools(request.tools)
        options = {"add_generation_prompt": not request.continue_final_message}
        options |= {"continue_final_message": request.continue_final_message}
        prompt = model.encode_chat(messages, tools=tools, **options, **(request.chat_template_kwargs or {}))
        self.masked_text = self._masked_text(prompt)
        self.end_ids = model.end_ids
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        ends_in_text = template.turn_end and not template.end_ids(self.codec.tokenizer)
        self.stops = [*stops, template.turn_end] if ends_in_text else stops
        self.id, self.created = response_id("chatcmpl"), int(time.time())

    def _masked_text(self, prompt: list[int]) -> MaskedText:
        limits, room = self.service.limits, self.service.max_length - len(prompt)
        num_tokens = self.request.max_tokens
        if num_tokens is None:
            num_tokens = max(1, min(_DEFAULT_MAX_TOKENS, limits.max_tokens, room))
        # Checked before the masks are allocated: max_tokens may be any number.
        limits.check_context("max_tokens", len(prompt), num_tokens, self.service.max_length)
        return completion_template(prompt, num_tokens).close(self.codec.mask_id)

    def hit_stop(self, masked_text: MaskedText, ids: Sequence[int]) -> bool:
        """Whether the answer has ended, so that the rest would be cut off."""
        answer, has_ended = self._answer_ids(ids)
        return has_ended or truncate_at_stop(self.codec.decoded_prefix(answer), self.stops) is not None

    def _answer_ids(self, ids: Sequence[int]) -> tuple[list[int], bool]:
        """The ids of the answer up to its end, and whether it has one with no mask before it."""
        hole = list(ids[self.masked_text.holes[0][0] :])
        before = list(itertools.takewhile(lambda id_: id_ not in self.end_ids, hole))
        has_ended = len(before) < len(hole) and self.codec.mask_id not in before
        return (before, True) if has_ended else (hole, False)

    def choice(self, sequence: GeneratedSequence, index: int) -> ChatChoice:
        """A candidate of the response."""
        ids, has_ended = self._answer_ids(sequence.ids)
        text = self.codec.decoded_prefix(ids)
        truncated = truncate_at_stop(text, self.stops)
        content, calls = self._parse(text if truncated is None else truncated)
        self.service.metrics.generated_tokens.inc(len(ids))
        reason: Literal["stop", "length", "tool_calls"] = "stop" if has_ended or truncated is not None else "length"
        message = ChatMessage(content=content or None if calls else content, tool_calls=_call_messages(calls) or None)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(sequence, len(ids)) if self.request.logprobs else None,
            finish_reason="tool_calls" if calls else reason,
        )

    def _parse(self, text: str) -> tuple[str, list[ToolCall]]:
        if self.form is None or not self.names:
            return text, []
        content, calls = self.form.parse(text, self.names)
        return content, calls if self.request.parallel_tool_calls else calls[:1]

    def _logprobs(self, sequence: GeneratedSequence, length: int) -> ChatLogprobs:
        first = self.masked_text.holes[0][0]
        written = [i for i in range(first, first + length) if sequence.ids[i] != self.codec.mask_id]
        texts = self.codec.token_texts([sequence.ids[i] for i in written])
        entries = []
        for position, text in zip(written, texts, strict=True):
            event = sequence.events[position]
            top = [_top_logprob(each.text, _log(each.probability)) for each in self.codec.alternatives(event)]
            known = _UNKNOWN_LOGPROB if event is None or event.logprob is None else event.logprob
            entries.append(TokenLogprob(**vars(_top_logprob(text, known)), top_logprobs=top))
        return ChatLogprobs(content=entries)

    def _usage(self, lengths: Sequence[int]) -> Usage:
        return usage(self.masked_text.num_prompt_tokens, sum(lengths))

    def _length(self, sequence: GeneratedSequence) -> int:
        """The tokens of an answer, with the one that ends it."""
        ids, has_ended = self._answer_ids(sequence.ids)
        return sum(id_ != self.codec.mask_id for id_ in ids) + has_ended

    def response(self, sequences: Sequence[GeneratedSequence]) -> ChatResponse:
        """The whole response."""
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            choices=[self.choice(sequence, index) for index, sequence in enumerate(sequences)],
            usage=self._usage([self._length(sequence) for sequence in sequences]),
            seed=self.seed,
        )

    async def stream(self, events: EventStream) -> AsyncIterator[bytes]:
        """The response in chunks: finished text in order, then calls; drafts in between for those who ask."""
        lengths = [0] * self.request.n
        for index in range(self.request.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for part in self.parts(events):
            if part.step is not None and self.request.stream_drafts:
                yield self._draft(part.index, part.step)
            if part.text:
                yield self._chunk(part.index, {"content": part.text})
            if part.choice is not None:
                lengths[part.index] = part.num_tokens
                for chunk in self._last_chunks(part.choice):
                    yield chunk
        if (self.request.stream_options or {}).get("include_usage"):
            yield self._event([], usage=self._usage(lengths).model_dump())
        yield b"data: [DONE]\n\n"

    async def parts(self, events: EventStream) -> AsyncIterator[AnswerPart]:
        """The answers step by step, in no dialect: finished text in order, then the whole candidate."""
        sent = [""] * self.request.n
        is_final = not self.service.sampler(self.request).may_remask
        async for index, event in events:
            if isinstance(event, StepEvent):
                text = self._streamable_text(event.ids)[len(sent[index]) :] if is_final else ""
                sent[index] += text
                yield AnswerPart(index, text, step=event)
            elif isinstance(event, Finished):
                choice = self.choice(event.result, index)
                rest = (choice.message.content or "")[len(sent[index]) :]
                yield AnswerPart(index, rest, choice=choice, num_tokens=self._length(event.result))

    def _last_chunks(self, choice: ChatChoice) -> list[bytes]:
        """The calls, the log-probabilities, and the reason of the end."""
        chunks = []
        for number, call in enumerate(choice.message.tool_calls or []):
            chunks.append(self._chunk(choice.index, {"tool_calls": [{"index": number, **call.model_dump()}]}))
        logprobs = None if choice.logprobs is None else choice.logprobs.model_dump()
        return [*chunks, self._chunk(choice.index, {}, choice.finish_reason, logprobs)]

    def _streamable_text(self, ids: Sequence[int]) -> str:
        """The text up to the first mask, as far as it cannot become part of a stop or of a call."""
        text = self.codec.decoded_prefix(self._answer_ids(ids)[0])
        text = text if (cut := truncate_at_stop(text, self.stops)) is None else cut
        if self.form is None or not self.names:
            return text[: safe_stream_length(text, self.stops)]
        before = text.split(self.form.begin)[0].rstrip()  # white space before a call is no part of the answer
        return before[: safe_stream_length(before, [*self.stops, self.form.begin])]

    def _draft(self, index: int, event: StepEvent) -> bytes:
        text = self.codec.render_draft(self._answer_ids(event.ids)[0])
        return self._event([], draft={"index": index, "step": event.step, "text": text})

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        return self._event([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.service.name}
        chunk = {**head, "choices": choices, "seed": self.seed, **more}
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


def _call_messages(calls: Sequence[ToolCall]) -> list[ToolCallMessage]:
    return [
        ToolCallMessage(id=response_id("call"), function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in calls
    ]


def _top_logprob(text: str, logprob: float) -> TopLogprob:
    return TopLogprob(token=text, logprob=logprob, bytes=list(text.encode()))


def _log(probability: float) -> float:
    return max(math.log(probability), _UNKNOWN_LOGPROB) if probability > 0 else _UNKNOWN_LOGPROB
