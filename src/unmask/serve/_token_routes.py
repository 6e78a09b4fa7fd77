"""Texts to tokens and back: /v1/tokenize and /v1/detokenize, and the routes of llama.cpp and vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field, model_validator

from unmask.data.chat import parse_messages, parse_tools
from unmask.serve._compat import Dialect
from unmask.serve._response_schemas import Token, TokenizeResponse
from unmask.serve._schemas import StrictRequest, TokenId, TokenizeRequest, check_one_of
from unmask.serve.models import ServedModels
from unmask.serve.service import Service


class AnyTokenizeRequest(StrictRequest):
    """A text to tokenize: llama.cpp's clients send `content`, and vLLM's `prompt` or `messages`.

    Special tokens are neither added to a text nor read from it here, as nowhere in this server.
    """

    dialect = Dialect(ignored=("add_special", "parse_special", "add_special_tokens"))

    content: str | None = Field(None, description="The text; the response is llama.cpp's.")
    with_pieces: bool = Field(False, description="With `content`: whether the response has the texts of the tokens.")
    prompt: str | None = Field(None, description="The text; the response is vLLM's.")
    messages: list[dict[str, Any]] | None = Field(
        None, min_length=1, description="A conversation, of which the tokens in the chat template are wanted."
    )
    tools: list[dict[str, Any]] | None = Field(None, description="With `messages`: functions that may be called.")
    add_generation_prompt: bool = Field(True, description="With `messages`: whether an answer begins after them.")
    continue_final_message: bool = Field(False, description="With `messages`: whether the last one is continued.")
    return_token_strs: bool = Field(
        False, description="With `prompt` or `messages`: whether the response has the texts of the tokens."
    )

    @model_validator(mode="after")
    def _check_text(self) -> AnyTokenizeRequest:
        check_one_of("content", {"content": self.content, "prompt": self.prompt, "messages": self.messages})
        return self


class DetokenizeRequest(StrictRequest):
    """Tokens whose text is wanted."""

    tokens: list[TokenId] = Field(description="The token ids.")


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    text: str = Field(description="The text.")


def add_token_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes."""

    @app.post("/v1/tokenize", tags=["model"])
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """The tokens of a text, for example to know how long a hole must be."""
        service = models.choose(body.model)
        ids, texts = await asyncio.to_thread(service.codec.tokenize, body.text)
        return TokenizeResponse(tokens=[Token(id=id_, text=text) for id_, text in zip(ids, texts, strict=True)])

    @app.post("/v1/detokenize", tags=["model"])
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of tokens."""
        service = models.choose(body.model)
        return DetokenizeResponse(text=await asyncio.to_thread(_decode, service, body.tokens))

    @app.post("/tokenize", tags=["llama.cpp"])
    async def tokenize_as_others(body: AnyTokenizeRequest) -> dict[str, Any]:
        """The tokens of a text, as in llama.cpp (`content`) and vLLM (`prompt` or `messages`)."""
        service = models.choose(body.model)
        ids = await _ids(service, body)
        if body.content is not None:
            return {"tokens": await asyncio.to_thread(_pieces, service, ids) if body.with_pieces else ids}
        texts = await asyncio.to_thread(service.codec.token_texts, ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.max_length, "tokens": ids, "token_strs": texts}

    @app.post("/detokenize", tags=["llama.cpp"])
    async def detokenize_as_others(body: DetokenizeRequest) -> dict[str, str]:
        """The text of tokens: `content` is llama.cpp's word, and `prompt` vLLM's."""
        service = models.choose(body.model)
        text = await asyncio.to_thread(_decode, service, body.tokens)
        return {"content": text, "prompt": text}


async def _ids(service: Service, body: AnyTokenizeRequest) -> list[int]:
    if body.messages is None:
        text = body.content if body.content is not None else body.prompt
        return await asyncio.to_thread(service.codec.tokenizer.encode, str(text))
    if service.classifies:
        raise ValueError("a classifier has no conversations: send content or prompt")
    messages, tools = parse_messages(body.messages), parse_tools(body.tools)
    options = {"add_generation_prompt": body.add_generation_prompt and not body.continue_final_message}
    options |= {"continue_final_message": body.continue_final_message}
    return await service.renderings.run(
        lambda: service.model.encode_chat(messages, tools=tools, **options), service.deadline(None)
    )


def _pieces(service: Service, ids: Sequence[int]) -> list[dict[str, Any]]:
    return [{"id": id_, "piece": text} for id_, text in zip(ids, service.codec.token_texts(ids), strict=True)]


def _decode(service: Service, ids: list[int]) -> str:
    return service.codec.tokenizer.decode(service.codec.validate_ids(ids))
