"""Schemas of responses."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class Classification(BaseModel):
    """What a text was found to be."""

    index: int = Field(description="The place of the text in the request.")
    label: str | None = Field(default=None, description="The most probable class; null where numbers are predicted.")
    probabilities: dict[str, float] | None = Field(default=None, description="The probability of each class.")
    value: float | None = Field(default=None, description="The number; null where classes are predicted.")
    cut: bool = Field(default=False, description="Whether the text had too many tokens, and was cut.")


class ClassifyResponse(BaseModel):
    """The classes or numbers of all texts, in their order."""

    object: Literal["classification"] = "classification"
    model: str = Field(description="The classifier's name.")
    results: list[Classification] = Field(description="One for each text.")
    data: list[ClassProbabilities] | None = Field(
        default=None, description="The same in vLLM's form, if the texts were sent as `input`."
    )


class ClassProbabilities(BaseModel):
    """What a text was found to be, in vLLM's form."""

    index: int = Field(description="The place of the text in the request.")
    label: str = Field(description="The most probable class.")
    probs: list[float] = Field(description="The probability of each class, in the order of the classes.")
    num_classes: int = Field(description="The number of classes.")


class Token(BaseModel):
    """A token and its text."""

    id: int = Field(description="The token id.")
    text: str = Field(description="The text of the token.")


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    tokens: list[Token] = Field(description="The tokens, in order.")


class Alternative(BaseModel):
    """A probable token of a position."""

    id: int = Field(description="The token id.")
    text: str = Field(description="The text of the token.")
    probability: float = Field(description="Its probability under the model.")


class GeneratedToken(BaseModel):
    """A generated token: its log-probability under the model, and the step in which it was generated."""

    id: int = Field(description="The token id.")
    text: str = Field(description="The text of the token.")
    logprob: float | None = Field(
        description="Its log-probability under the model, without temperature; null if it is not known."
    )
    step: int = Field(description="The step in which it was unmasked, from 1.")
    alternatives: list[Alternative] = Field(
        default_factory=list, description="The most probable tokens of the position, if `alternatives` were requested."
    )


class InfillSpan(BaseModel):
    """A filled hole: its start and end in the text, in characters, and its tokens."""

    start: int = Field(description="The first character of the hole in the text.")
    end: int = Field(description="The character after the hole.")
    text: str = Field(description="The text of the hole.")
    tokens: list[GeneratedToken] = Field(description="The tokens of the hole.")


class InfillCandidate(BaseModel):
    """One candidate."""

    index: int = Field(description="The number of the candidate, from 0.")
    seed: int = Field(description="The seed it was sampled with.")
    text: str = Field(description="The whole text.")
    spans: list[InfillSpan] = Field(description="The filled holes, in order.")
    steps: int = Field(description="The number of steps that it took.")


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int = Field(description="Given tokens.")
    completion_tokens: int = Field(description="Generated tokens.")
    total_tokens: int = Field(description="The sum of both.")


class InfillResponse(BaseModel):
    """All candidates."""

    id: str = Field(description="The id of the response.")
    object: Literal["infill"] = "infill"
    created: int = Field(description="The time of the response, in seconds since 1970.")
    model: str = Field(description="The model's name.")
    results: list[InfillCandidate] = Field(description="The candidates.")
    usage: Usage = Field(description="Token counts of all candidates.")


class Logprobs(BaseModel):
    """Log-probabilities in OpenAI's form."""

    tokens: list[str] = Field(description="The text of each token.")
    token_logprobs: list[float | None] = Field(description="The log-probability of each token.")
    top_logprobs: list[dict[str, float]] = Field(
        description="The most probable tokens of each position, with log-probabilities."
    )
    text_offset: list[int] = Field(description="The first character of each token in the text.")


class CompletionChoice(BaseModel):
    """One candidate."""

    index: int = Field(description="The number of the candidate, from 0.")
    text: str = Field(description="The completion.")
    logprobs: Logprobs | None = Field(None, description="Log-probabilities, if they were requested.")
    finish_reason: Literal["stop", "length"] | None = Field(
        description="`stop` if a stop text or the model's end of text ended the completion, else `length`; null while"
        " streaming."
    )


class CompletionResponse(BaseModel):
    """All candidates."""

    id: str = Field(description="The id of the response.")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="The time of the response, in seconds since 1970.")
    model: str = Field(description="The model's name.")
    choices: list[CompletionChoice] = Field(description="The candidates of all prompts, in order.")
    usage: Usage | None = Field(None, description="Token counts of all candidates; null in the parts of a stream.")


class ScoredToken(BaseModel):
    """A token and its contribution to the bound, in nats."""

    id: int = Field(description="The token id.")
    text: str = Field(description="The text of the token.")
    nats: float = Field(description="Its contribution to the bound, in nats.")


class TimeBin(BaseModel):
    """The contribution of an interval of diffusion time to the nats per token."""

    start: float = Field(description="The beginning of the interval.")
    end: float = Field(description="The end of the interval.")
    nats_per_token: float = Field(description="Its contribution to the nats per token.")
    standard_error: float = Field(description="The standard error of the contribution.")


class ScoreResponse(BaseModel):
    """A bound on -log p (exact for an autoregressive model), with its standard errors."""

    object: Literal["score"] = "score"
    model: str = Field(description="The model's name.")
    exact: bool = Field(description="Whether the likelihood is exact (autoregressive models) instead of a bound.")
    nats: float = Field(description="The bound on -log p of the text, in nats.")
    nats_per_token: float = Field(description="The bound divided by the number of tokens.")
    standard_error: float = Field(description="The standard error of the nats per token.")
    perplexity: float = Field(description="exp(nats per token).")
    perplexity_error: float = Field(description="The standard error of the perplexity.")
    bits_per_byte: float = Field(description="Bits per byte of UTF-8.")
    bits_per_byte_error: float = Field(description="The standard error of the bits per byte.")
    tokens: list[ScoredToken] = Field(description="The contribution of each token.")
    by_time: list[TimeBin] = Field(description="The contribution of each interval of diffusion time.")


class ScoreList(BaseModel):
    """The scores of several texts."""

    object: Literal["list"] = "list"
    model: str = Field(description="The model's name.")
    results: list[ScoreResponse] = Field(description="One for each text, in order.")


class ExampleTemplate(BaseModel):
    """A template that fits the model's tokenizer and length, and the complete text."""

    name: str = Field(description="What the example shows.")
    template: str = Field(description="The template.")
    text: str = Field(description="The complete text.")


class ModelCard(BaseModel):
    """A model, its samplers and limits."""

    id: str = Field(description="The model's name.")
    object: Literal["model"] = "model"
    created: int = Field(description="The time at which the server started, in seconds since 1970.")
    owned_by: str = Field(default="unmask", description="The server.")
    objective: str = Field(description="The training objective.")
    num_parameters: int = Field(description="The number of parameters.")
    vocab_size: int = Field(description="The number of token ids, the mask included.")
    max_length: int = Field(description="The longest text, in tokens.")
    samplers: list[str] = Field(description="The names of samplers that fit the model.")
    default_sampler: str = Field(description="The sampler that the name `default` stands for.")
    defaults: dict[str, int | float] = Field(
        default_factory=dict,
        description="Options that the sampler which the model comes with, or its blocks, decide if a request does not.",
    )
    caches: list[str] = Field(default_factory=list, description="The values of `cache` that fit the model.")
    chat: bool = Field(default=False, description="Whether it has a chat template, and so answers conversations.")
    examples: list[ExampleTemplate] = Field(description="Templates to try.")
    limits: dict[str, int | float] = Field(description="The limits of the server, by name.")
    labels: list[str] | None = Field(
        default=None, description="The classes of a classifier; empty where it predicts numbers."
    )
    columns: list[str] | None = Field(default=None, description="What a classifier calls its texts: one or two names.")


class ModelList(BaseModel):
    """The served models, the first of which answers requests that name none."""

    object: Literal["list"] = "list"
    data: list[ModelCard] = Field(description="The models.")


class ServerState(BaseModel):
    """What a server and its models are at."""

    status: Literal["alive", "ready"] = Field(description="The answer to what was asked.")
    models: dict[str, str] = Field(description="Each model's state: loading, ready, stuck, failed or stopped.")


class ErrorBody(BaseModel):
    """An error, described in one sentence."""

    message: str = Field(description="What was wrong, and what would be right.")
    type: str = Field(description="The type of the error, as in OpenAI's API.")
    param: str | None = Field(None, description="The field that caused the error, if it was one.")
    code: str | None = Field(None, description="A code for programs, if there is one.")


class ErrorResponse(BaseModel):
    """An error as OpenAI's clients read it."""

    error: ErrorBody = Field(description="The error.")

    @classmethod
    def make(
        cls, message: str, type_: str = "invalid_request_error", param: str | None = None, code: str | None = None
    ) -> ErrorResponse:
        """An error with these values."""
        return cls(error=ErrorBody(message=message, type=type_, param=param, code=code))

    def for_path(self, path: str) -> ErrorResponse | OllamaErrorResponse:
        """The error in the words of the route's clients."""
        return OllamaErrorResponse(error=self.error.message) if path.startswith("/api/") else self


class OllamaErrorResponse(BaseModel):
    """An error as Ollama's clients read it."""

    error: str = Field(description="What was wrong, and what would be right.")


ERROR_STATUSES = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
"""The statuses of errors."""
