"""From rows to answers, whole or told step by step."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel

from unmask.data.textsize import TextSize
from unmask.diffusion.process import LeftToRight
from unmask.evaluation.score import CELLS, Score
from unmask.serve.limits import check_length
from unmask.serve.rows import Mark, Row, Step
from unmask.serve.schemas import (
    CompletionAnswer,
    CompletionChoice,
    CompletionRequest,
    Filled,
    InfillAnswer,
    ScoreAnswer,
    ScoredToken,
    TimeShare,
    Usage,
)
from unmask.serve.service import Ended, Service, new_id, revises
from unmask.serve.wording import HoledText, cut, sure_length

Events = AsyncIterator[tuple[int, Any]]
"""What rows tell, with their numbers."""


class Infilling:
    """The answer to a request for infilling."""

    def __init__(self, service: Service, canvas: HoledText, seed: int, n: int) -> None:
        self.service, self.canvas, self.seed, self.n = service, canvas, seed, n
        self.wording, self.id, self.created = service.wording, new_id("infill"), int(time.time())

    def filled(self, row: Row, index: int) -> Filled:
        self.service.metrics.tokens.inc(self.canvas.hidden)
        return self.wording.filled(row, self.canvas, index, self.seed + index)

    def whole(self, results: Sequence[Filled]) -> InfillAnswer:
        return InfillAnswer(
            id=self.id,
            created=self.created,
            model=self.service.name,
            results=list(results),
            usage=_usage(self.canvas.given, self.n * self.canvas.hidden),
        )

    async def told(self, events: Events) -> AsyncIterator[bytes]:
        mask, ids = self.wording.mask, self.canvas.ids
        pieces = self.wording.pieces([id_ for id_ in ids if id_ != mask])
        given = iter(pieces)
        shown = [None if id_ == mask else {"id": id_, "text": next(given)} for id_ in ids]
        start = {"id": self.id, "model": self.service.name, "seed": self.seed, "n": self.n, "tokens": shown}
        yield event("canvas", start)
        results: list[Filled | None] = [None] * self.n
        async for index, news in events:
            if isinstance(news, Step):
                changes = [self._change(mark) for mark in news.marks]
                draft = self.wording.draft(news.ids)
                told = {"index": index, "step": news.number, "draft": draft, "changes": changes}
                yield event("step", told)
            elif isinstance(news, Ended):
                filled = results[index] = self.filled(news.result, index)
                yield event("result", filled)
        yield event("answer", self.whole([result for result in results if result is not None]))

    def _change(self, mark: Mark) -> dict[str, Any]:
        return {
            "position": mark.position,
            "id": mark.id,
            "text": None if mark.id is None else self.wording.token(mark.id),
            "logprob": mark.logprob,
            "alternatives": [each.model_dump() for each in self.wording.alternatives(mark)],
        }


class Completing:
    """The answer to a request for completions: row i completes canvas i // n."""

    def __init__(self, service: Service, asked: CompletionRequest, canvases: Sequence[HoledText]) -> None:
        self.service, self.asked, self.canvases, self.wording = service, asked, canvases, service.wording
        self.id, self.created = new_id("cmpl"), int(time.time())
        self.stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []

    def enough(self, canvas: HoledText, ids: Sequence[int]) -> bool:
        """Whether what follows would be cut off anyway."""
        return bool(self.stops) and cut(self.wording.beginning(_hole(canvas, ids)), self.stops) is not None

    def choice(self, row: Row, index: int) -> CompletionChoice:
        canvas = self.canvases[index // self.asked.n]
        inside = self.wording.beginning(_hole(canvas, row.ids))
        self.service.metrics.tokens.inc(canvas.hidden)
        ended = cut(inside, self.stops)
        text = inside if ended is None else ended
        (first, length), logprobs = canvas.holes[0], None
        if self.asked.logprobs is not None:
            places = [place for place in range(first, first + length) if row.ids[place] != self.wording.mask]
            logprobs = self.wording.logprobs(row, places)
        return CompletionChoice(
            index=index,
            text=self._echo(canvas) + text,
            logprobs=logprobs,
            finish_reason="length" if ended is None else "stop",
        )

    def whole(self, rows: Sequence[Row]) -> CompletionAnswer:
        choices = [self.choice(row, index) for index, row in enumerate(rows)]
        return CompletionAnswer(
            id=self.id, created=self.created, model=self.service.name, choices=choices, usage=self._used()
        )

    def unwritten(self) -> list[Row]:
        """The rows where no token is to be written."""
        rows = [canvas for canvas in self.canvases for _ in range(self.asked.n)]
        return [Row(tuple(row.ids), (None,) * len(row.ids), (0,) * len(row.ids)) for row in rows]

    async def nothing(self) -> Events:
        """The same, as they are told."""
        for index, row in enumerate(self.unwritten()):
            yield index, Ended(row)

    async def told(self, events: Events) -> AsyncIterator[bytes]:
        rows = len(self.canvases) * self.asked.n
        sent = [""] * rows
        settled = not revises(self.service.sampler(self.asked))
        async for index, news in events:
            canvas = self.canvases[index // self.asked.n]
            if isinstance(news, Step):
                text = self.wording.beginning(_hole(canvas, news.ids)) if settled else ""
                text = text[: sure_length(text, self.stops)] if cut(text, self.stops) is None else sent[index]
                whole = self._echo(canvas) + text if text else sent[index]
                yield self._chunk(index, whole[len(sent[index]) :], None, self.wording.draft(news.ids))
                sent[index] = whole
            elif isinstance(news, Ended):
                choice = self.choice(news.result, index)
                rest = choice.text[len(sent[index]) :]
                yield self._chunk(index, rest, choice.finish_reason, self.wording.draft(news.result.ids))
        if (self.asked.stream_options or {}).get("include_usage"):
            last = CompletionAnswer(
                id=self.id, created=self.created, model=self.service.name, choices=[], usage=self._used()
            )
            yield f"data: {last.model_dump_json()}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def _chunk(self, index: int, text: str, reason: str | None, draft: str) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "draft": draft}
        chunk = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.name,
            "choices": [choice],
        }
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()

    def _echo(self, canvas: HoledText) -> str:
        return self.wording.tokenizer.decode(canvas.ids[: canvas.holes[0][0]]) if self.asked.echo else ""

    def _used(self) -> Usage:
        written = self.asked.n * sum(canvas.hidden for canvas in self.canvases)
        return _usage(sum(canvas.given for canvas in self.canvases), written)


def _hole(canvas: HoledText, ids: Sequence[int]) -> Sequence[int]:
    ((first, length),) = canvas.holes
    return ids[first : first + length]


def _usage(given: int, written: int) -> Usage:
    return Usage(prompt_tokens=given, completion_tokens=written, total_tokens=given + written)


def scored(service: Service, text: str, ids: Sequence[int], found: Score) -> ScoreAnswer:
    """The answer to a request for a score."""
    figures: dict[str, Any] = Score(found.nats, found.variance, found.tokens, TextSize.of(text)).figures()
    told = {name: figures[name] for name in ScoreAnswer.model_fields if name in figures and name != "tokens"}
    pieces = zip(ids, service.wording.pieces(ids), found.token_nats, strict=True)
    return ScoreAnswer(
        model=service.name,
        exact=isinstance(service.model.denoise.process, LeftToRight),
        nats=found.nats,
        tokens=[ScoredToken(id=id_, text=piece, nats=nats) for id_, piece, nats in pieces],
        by_time=[
            TimeShare(start=cell / CELLS, end=(cell + 1) / CELLS, nats_per_token=nats, standard_error=error)
            for cell, (nats, error) in enumerate(zip(found.by_time, found.by_time_error, strict=True))
        ],
        **{name: value for name, value in told.items() if name != "by_time"},
    )


def completed(service: Service, asked: CompletionRequest) -> list[HoledText]:
    """A canvas for each prompt."""
    wording = service.wording
    tokens = min(16, service.limits.max_tokens) if asked.max_tokens is None else asked.max_tokens
    canvases = []
    for prompt in _prompts(asked):
        ids = wording.tokenizer.encode(prompt) if isinstance(prompt, str) else wording.given(prompt)
        given = wording.between(ids, 0, asked.suffix or "").given
        check_length("max_tokens", given, tokens, service.length, service.limits)  # it may be any number
        canvases.append(wording.between(ids, tokens, asked.suffix or ""))
    return canvases


def _prompts(asked: CompletionRequest) -> list[str | list[int]]:
    """One text, several texts, one list of ids, or several."""
    if isinstance(asked.prompt, str):
        return [asked.prompt]
    if not asked.prompt:
        raise ValueError("the list of prompts is empty")
    texts = [each for each in asked.prompt if isinstance(each, str | list)]
    return texts or [[each for each in asked.prompt if isinstance(each, int)]]


def event(name: str, data: BaseModel | dict[str, Any]) -> bytes:
    """A server-sent event."""
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
