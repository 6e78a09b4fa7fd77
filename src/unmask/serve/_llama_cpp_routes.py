"""POST /infill and /completion, and GET /props, as clients of llama.cpp's server know them: llama.vim, llama.vscode."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request

from unmask import __version__
from unmask.serve._completions import CompletedText, CompletionRun
from unmask.serve._generation import STREAM_RESPONSE, sse_response
from unmask.serve._llama_cpp_schemas import LlamaCppRequest
from unmask.serve.models import ServedModels
from unmask.serve.service import Service


def add_llama_cpp_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes."""

    async def infill(body: LlamaCppRequest, request: Request) -> Any:
        """Fill the hole between `input_prefix` + `prompt` and `input_suffix`, compatible with llama.cpp's clients.

        The model chooses how many tokens the hole has. Of a text that is too long, what is far from the hole is not
        read. With `stream`, text is sent in order, as soon as neither it nor anything before it can change.
        """
        service = models.language_model(body.model)
        responder = _Responder(body, service.deadline(body.timeout))
        await responder.start(service, request)
        return sse_response(responder.stream()) if body.stream else await responder.response(request)

    async def completion(body: LlamaCppRequest, request: Request) -> Any:
        """Continue `prompt`, compatible with llama.cpp's clients; the same as `/infill`."""
        return await infill(body, request)

    app.post("/infill", tags=["llama.cpp"], name="llama_cpp_infill", responses=STREAM_RESPONSE)(infill)
    app.post("/completion", tags=["llama.cpp"], name="llama_cpp_completion", responses=STREAM_RESPONSE)(completion)

    @app.get("/props", tags=["llama.cpp"])
    async def props(model: str | None = None) -> dict[str, Any]:
        """The model, as llama.cpp's clients ask for it."""
        service = models.language_model(model)
        template = service.model.chat_template
        return {
            "default_generation_settings": {"id": 0, "n_ctx": service.max_length, "is_processing": False},
            "total_slots": service.max_batch,
            "model_alias": service.name,
            "model_path": service.name,
            "chat_template": "" if template is None else template.source,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"unmask {__version__}",
        }


class _Responder:
    """Builds the response in llama.cpp's form."""

    run: CompletionRun

    def __init__(self, request: LlamaCppRequest, deadline: float) -> None:
        self.request, self.deadline = request, deadline
        self._arrived = time.perf_counter()

    async def start(self, service: Service, http: Request) -> None:
        """Find the length of the hole, and queue what is to be generated."""
        template, self.is_cut = await asyncio.to_thread(self.request.gap.fitting_template, service)
        self.run = await CompletionRun.start(service, self.request, [template], self.deadline, http)
        self._started = time.perf_counter()

    async def response(self, http: Request) -> dict[str, Any]:
        """The whole response."""
        (completed,) = await self.run.results(http)
        return _selected(self._whole(completed, completed.text), self.request.response_fields)

    async def stream(self) -> AsyncIterator[bytes]:
        """The response in parts; the last one has everything but the text that was sent before."""
        sent = self.run.texts[0].holes[0][0]
        async for part in self.run.parts():
            if part.completed is not None:
                yield _event(_selected(self._whole(part.completed, part.text), self.request.response_fields))
            elif part.text:
                yield _event({"index": 0, "content": part.text, "tokens": [], "stop": False, "tokens_evaluated": sent})

    def _whole(self, completed: CompletedText, content: str) -> dict[str, Any]:
        run, request = self.run, self.request
        evaluated, written = run.texts[0].num_prompt_tokens, run.written(completed)
        probabilities = {"completion_probabilities": _probabilities(run, completed)} if request.n_probs else {}
        return {
            "index": 0,
            "content": content,
            "tokens": [completed.sequence.ids[place] for place in written] if request.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": run.service.name,
            "tokens_predicted": len(written),
            "tokens_evaluated": evaluated,
            "generation_settings": self._settings(),
            "prompt": run.codec.tokenizer.decode(run.prompt_ids(0)),
            "has_new_line": "\n" in completed.text,
            "truncated": self.is_cut,
            "stop_type": "eos" if completed.has_ended else "limit" if completed.stop is None else "word",
            "stopping_word": completed.stop or "",
            "tokens_cached": 0,
            "timings": self._timings(evaluated, len(written)),
            **probabilities,
        }

    def _settings(self) -> dict[str, Any]:
        request, names = self.request, ("n_predict", "temperature", "top_k", "top_p", "n_probs", "stream", "grammar")
        settings = {name: getattr(request, name) for name in (*names, "min_tokens", "steps", "sampler")}
        return {"n_ctx": self.run.service.max_length, "seed": self.run.seed, "stop": request.stops, **settings}

    def _timings(self, evaluated: int, predicted: int) -> dict[str, Any]:
        """The prompt's time is that in which the length of the hole was found."""
        times = {"prompt": self._started - self._arrived, "predicted": time.perf_counter() - self._started}
        timings: dict[str, Any] = {"cache_n": 0}
        for name, count in (("prompt", evaluated), ("predicted", predicted)):
            seconds = max(times[name], 1e-6)
            timings[f"{name}_n"] = count
            timings[f"{name}_ms"] = 1000 * seconds
            timings[f"{name}_per_token_ms"] = 1000 * seconds / max(count, 1)
            timings[f"{name}_per_second"] = count / seconds
        return timings


def _probabilities(run: CompletionRun, completed: CompletedText) -> list[dict[str, Any]]:
    """The log-probability of each token, and its alternatives."""
    positions = run.written(completed)
    listed = run.codec.logprobs(completed.sequence, positions)
    entries = []
    for i, text in enumerate(listed.tokens):
        alternatives = run.codec.alternatives(completed.sequence.events[positions[i]])
        logprobs = listed.top_logprobs[i]
        top = [_token(each.id, each.text, logprobs[each.text]) for each in alternatives]
        entries.append(
            {**_token(completed.sequence.ids[positions[i]], text, listed.token_logprobs[i]), "top_logprobs": top}
        )
    return entries


def _token(id_: int, text: str, logprob: float | None) -> dict[str, Any]:
    return {"id": id_, "token": text, "bytes": list(text.encode()), "logprob": logprob}


def _selected(response: dict[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """The fields that are wanted, those of other objects by their path; ones that do not exist are left out."""
    if fields is None:
        return response
    selected = {}
    for path in fields:
        value: Any = response
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            selected[path] = value
    return selected


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
