"""POST /v1/embeddings: a vector for each text, from the hidden states of the network.

The vector is the mean of the features of all tokens (`Backbone.features`: what the head that predicts tokens reads,
after the last block and its normalization, or before the layers that only predictions need), for the text without
noise, divided by its Euclidean length.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from fastapi import FastAPI, Request
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator
from torch import Tensor

from unmask.classification import pool
from unmask.context import Context
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.model import LanguageModel
from unmask.serve._compat import field_error
from unmask.serve._engine import Job
from unmask.serve._generation import await_or_cancel
from unmask.serve._schemas import StrictRequest, TokenId
from unmask.serve._step_batching import call_network
from unmask.serve.limits import LimitError
from unmask.serve.models import ServedModels
from unmask.serve.service import Service
from unmask.types import NonFiniteError, Positions, RowFn, Times, Tokens

_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[TokenId], Field(min_length=1)]


class EmbeddingsRequest(StrictRequest):
    """Texts to embed, as OpenAI's clients send them."""

    input: _Text | Annotated[list[_Text] | list[_Ids], Field(min_length=1)] | _Ids = Field(
        description="One text or several, as text or as token ids."
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Whether an embedding is a list of numbers, or its float32 bytes in base64."
    )
    dimensions: int | None = Field(None, description="Not supported: vectors have the width of the network.")
    timeout: float | None = Field(None, ge=1, description="Seconds after which the request is answered with 504.")

    @model_validator(mode="after")
    def _check_dimensions(self) -> EmbeddingsRequest:
        if self.dimensions is not None:
            raise field_error(
                "dimensions",
                "dimensions is not supported: no part of these vectors stands for the whole, so leave it out",
            )
        return self

    @property
    def texts(self) -> Sequence[str | list[int]]:
        """The texts, one by one."""
        if isinstance(self.input, str):
            return [self.input]
        texts = [each for each in self.input if isinstance(each, str | list)]
        return texts or [[each for each in self.input if isinstance(each, int)]]


class Embedding(BaseModel):
    """The vector of a text."""

    object: Literal["embedding"] = "embedding"
    index: int = Field(description="The place of the text in the request.")
    embedding: list[float] | str = Field(description="The vector, of length 1.")


class EmbeddingsUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int = Field(description="Tokens of all texts.")
    total_tokens: int = Field(description="The same.")


class EmbeddingsResponse(BaseModel):
    """The vectors of all texts, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding] = Field(description="One for each text.")
    model: str = Field(description="The model's name.")
    usage: EmbeddingsUsage = Field(description="Token counts.")


def add_embeddings_route(app: FastAPI, models: ServedModels) -> None:
    """Add the route."""

    @app.post("/v1/embeddings", tags=["model"])
    async def embeddings(body: EmbeddingsRequest, request: Request) -> EmbeddingsResponse:
        """A vector for each text: the mean of its tokens' hidden states, of length 1.

        The texts of all requests share network calls.
        """
        service = models.language_model(body.model)
        vectors, num_tokens = await embed(service, body.texts, body.timeout, request)
        as_text = body.encoding_format == "base64"
        data = [Embedding(index=i, embedding=_encoded(vector, as_text)) for i, vector in enumerate(vectors)]
        usage = EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return EmbeddingsResponse(data=data, model=service.name, usage=usage)


async def embed(
    service: Service, texts: Sequence[str | list[int]], timeout: float | None, request: Request
) -> tuple[list[NDArray[np.float64]], int]:
    """The vectors of texts, and their number of tokens."""
    service.limits.check("texts", len(texts), "input")
    deadline = service.deadline(timeout)
    encode = service.codec.encode_prompt
    rows = await asyncio.to_thread(lambda: [encode(text) for text in texts])
    for ids in rows:
        _check_length(service, len(ids))
    network = _PooledFeatures(service.model)
    handle = service.submit([_embedding_job(network, ids) for ids in rows], deadline)
    return await await_or_cancel(request, handle), sum(map(len, rows))


def _check_length(service: Service, num_tokens: int) -> None:
    if num_tokens == 0:
        raise ValueError("a text has no tokens, and so no embedding")
    service.limits.check_prompt("input", num_tokens)
    if num_tokens > service.max_length:
        raise LimitError(
            "input",
            f"This model's maximum context length is {service.max_length} tokens. However, a text has {num_tokens}"
            " tokens. Please shorten it.",
            "context_length_exceeded",
        )


class _PooledFeatures(DenoiserWrapper):
    """The network of a model as one whose answer, to one query for each text, is the mean of the text's features."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model.denoiser)
        self.device, self._features = model.device, model.denoiser.features

    def __eq__(self, other: object) -> bool:
        """Calls of equal networks are shared."""
        return isinstance(other, _PooledFeatures) and self.denoiser is other.denoiser

    def __hash__(self) -> int:
        return id(self.denoiser)

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        hidden = self._features(z, context)
        return pool(hidden.to(torch.promote_types(hidden.dtype, torch.float32)), context.valid, "mean")


def _embedding_job(network: _PooledFeatures, ids: Sequence[int]) -> Job:
    """A job whose result is the vector of a text."""

    def job(_denoiser: DenoiserLike, _emit: Callable[[Any], None]) -> NDArray[np.float64]:
        tokens = torch.tensor([ids], device=network.device)
        first = torch.zeros_like(tokens, dtype=torch.bool)
        first[:, 0] = True
        vector = call_network(network, tokens, first)[0].double()
        if not (bool(vector.isfinite().all()) and bool(vector.any())):
            raise NonFiniteError("the hidden states are not finite, or all 0: the weights are damaged")
        found: NDArray[np.float64] = (vector / vector.norm()).cpu().numpy()
        return found

    return job


def _encoded(vector: NDArray[np.float64], as_text: bool) -> list[float] | str:
    if as_text:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
