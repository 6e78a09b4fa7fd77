"""POST /v1/score."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request

from unmask.serve._generation import await_or_cancel
from unmask.serve._jobs import scoring_job
from unmask.serve._response_schemas import ScoreList, ScoreResponse
from unmask.serve._responses import score_response
from unmask.serve._schemas import ScoreRequest
from unmask.serve.models import ServedModels


def add_score_route(app: FastAPI, models: ServedModels) -> None:
    """Add the route."""

    @app.post("/v1/score", tags=["model"])
    async def score(body: ScoreRequest, request: Request) -> ScoreResponse | ScoreList:
        """A bound on the negative log-likelihood of a text in nats, with standard errors, by token and by time.

        Several texts, as a list, share network calls with one another and with those of other requests; each has the
        score that it has alone with this seed.
        """
        service = models.language_model(body.model)
        texts = [str(body.text)] if body.listed is None else body.listed
        service.limits.check("texts", len(texts))
        draws = service.limits.resolve("draws", body.draws, 128)
        encode = service.codec.tokenizer.encode
        rows = await asyncio.to_thread(lambda: [encode(text) for text in texts])
        for ids in rows:
            service.limits.check_prompt("text" if body.texts is None else "texts", len(ids))
        deadline = service.deadline(body.timeout)
        handle = service.submit([scoring_job(service.model, ids, draws, body.seed) for ids in rows], deadline)
        found = zip(texts, rows, await await_or_cancel(request, handle), strict=True)
        results = [score_response(service, text, ids, result) for text, ids, result in found]
        return results[0] if body.listed is None else ScoreList(model=service.name, results=results)
