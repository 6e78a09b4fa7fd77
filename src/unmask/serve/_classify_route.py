"""POST /v1/classify, of a server with a classifier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI, Request

from unmask.serve._classifier import classification_job
from unmask.serve._generation import await_or_cancel
from unmask.serve._response_schemas import Classification, ClassifyResponse, ClassProbabilities
from unmask.serve._schemas import ClassifyRequest
from unmask.serve.models import ServedModels


def add_classify_route(app: FastAPI, models: ServedModels) -> None:
    """Add the route; vLLM's clients know it as /classify."""

    async def classify(body: ClassifyRequest, request: Request) -> ClassifyResponse:
        """The class of each text with the probabilities of all classes, or its number.

        The texts of all requests share network calls. `input` in place of `texts` is vLLM's: the answer has its `data`.
        """
        service = models.classifier(body.model)
        service.limits.check("texts", len(body.rows))
        served, deadline = service.classifier, service.deadline(body.timeout)
        jobs = await asyncio.to_thread(
            lambda: [classification_job(served, text, i, body.too_long) for i, text in enumerate(body.rows)]
        )
        results = await await_or_cancel(request, service.submit(jobs, deadline))
        data = None if body.input is None else _in_vllms_form(results)
        return ClassifyResponse(model=service.name, results=results, data=data)

    app.post("/v1/classify", tags=["model"])(classify)
    app.post("/classify", include_in_schema=False)(classify)


def _in_vllms_form(results: Sequence[Classification]) -> list[ClassProbabilities] | None:
    """None where numbers are predicted, which this form has no place for."""
    data = []
    for result in results:
        if result.label is None or result.probabilities is None:
            return None
        probs = list(result.probabilities.values())
        data.append(ClassProbabilities(index=result.index, label=result.label, probs=probs, num_classes=len(probs)))
    return data
