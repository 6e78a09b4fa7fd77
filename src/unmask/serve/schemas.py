"""What requests and answers look like; everything that can be refused by its shape is refused here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from unmask.sampling import BY_NAME
from unmask.sampling.blockwise import CACHES

Seed = Annotated[int, Field(ge=0, lt=2**62, description="Row i is drawn with seed + i.")]
Pattern = Annotated[str, Field(max_length=200)]
Id = Annotated[int, Field(ge=0, lt=2**31)]


class Request(BaseModel):
    """Unknown fields are refused: a misspelt option must not be ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="The model's name, as /v1/models tells it.")


class Writing(Request):
    """How tokens are written."""

    n: int = Field(1, ge=1, description="How many candidates.")
    steps: int | None = Field(
        None, ge=1, description="Steps of the sampler; more are better and slower. 64 if not given."
    )
    sampler: str = Field(
        "default",
        description="In which order holes are filled.",
        json_schema_extra={"enum": ["default", *BY_NAME]},
    )
    block: int | None = Field(
        None, ge=1, description="Write from left to right in blocks of so many tokens, `steps` each."
    )
    cache: str = Field(
        "none",
        description="What the steps of a block do not read again: what is before it, or all around it.",
        json_schema_extra={"enum": list(CACHES)},
    )
    guidance: float = Field(
        0.0, ge=0, le=100, description="Classifier-free guidance by the visible text; 0 is none."
    )
    match: Pattern | list[Pattern | None] | None = Field(
        None, description="A regular expression that the text of each hole must match, or one for each hole."
    )
    temperature: float = Field(1.0, ge=0, le=100, description="0 takes the most probable token.")
    top_p: float | None = Field(None, gt=0, le=1, description="Sample from the most probable tokens only.")
    top_k: int | None = Field(None, ge=1, description="Sample from so many tokens only.")
    seed: Seed | None = Field(None, description="Row i is drawn with seed + i; a random one if not given.")
    stream: bool = False
    timeout: float | None = Field(None, ge=1, description="Seconds after which the answer is of no use.")


class CompletionRequest(Writing):
    """As OpenAI's clients send it; `steps`, `sampler` and `top_k` are additions."""

    prompt: str | list[str] | list[Id] | list[list[Id]] = ""
    suffix: str | None = Field(None, description="What follows the text that is written.")
    max_tokens: int | None = Field(
        None, ge=1, description="How many tokens are written: exactly so many; 16 if not given."
    )
    stop: str | list[str] | None = Field(None, description="The text is cut before the first of these.")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20, description="Most probable tokens to tell of.")
    user: str | None = None
    best_of: Literal[1] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _only_what_is_done(self) -> CompletionRequest:
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: leave it out")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > 4 or not all(stops):
            raise ValueError("stop is one text or up to four, none of them empty")
        return self


class InfillRequest(Writing):
    """A text with holes."""

    template: str | None = Field(
        None, description="Text with <mask:12> for twelve hidden tokens, <mask> for one; any number of holes."
    )
    segments: list[str | Annotated[int, Field(ge=1)] | list[Id]] | None = Field(
        None,
        description="The same as a list: texts, the lengths of holes between them, and lists of ids that are"
        " given.",
    )
    alternatives: int = Field(0, ge=0, description="Most probable tokens to tell of at each written one.")

    @model_validator(mode="after")
    def _one_of_both(self) -> InfillRequest:
        if (self.template is None) == (self.segments is None):
            raise ValueError("give either template or segments")
        return self


class ScoreRequest(Request):
    """A text to score."""

    text: str = Field(min_length=1)
    draws: int | None = Field(
        None, ge=16, description="Random maskings, 128 if not given; the error falls with their square root."
    )
    seed: Seed = 0
    timeout: float | None = Field(None, ge=1, description="Seconds after which the answer is of no use.")


class TokensRequest(Request):
    """A text to cut into tokens."""

    text: str


class Token(BaseModel):
    """A token, and what it adds to the text."""

    id: int
    text: str


class TokensAnswer(BaseModel):
    """A text in tokens."""

    tokens: list[Token]


class Alternative(BaseModel):
    """A token that might have been written."""

    id: int
    text: str
    probability: float


class WrittenToken(BaseModel):
    """A token that was written: the model's log-probability of it, and the step that wrote it."""

    id: int
    text: str
    logprob: float | None
    step: int
    alternatives: list[Alternative] = []


class Span(BaseModel):
    """A filled hole: where it stands in the text, in characters, and its tokens."""

    start: int
    end: int
    text: str
    tokens: list[WrittenToken]


class Filled(BaseModel):
    """One candidate."""

    index: int
    seed: int
    text: str
    spans: list[Span]
    steps: int


class Usage(BaseModel):
    """Tokens that were given and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class InfillAnswer(BaseModel):
    """All candidates."""

    id: str
    object: Literal["infill"] = "infill"
    created: int
    model: str
    results: list[Filled]
    usage: Usage


class Logprobs(BaseModel):
    """As OpenAI tells it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One candidate."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(BaseModel):
    """All candidates."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ScoredToken(BaseModel):
    """A token and its share of the bound."""

    id: int
    text: str
    nats: float


class TimeShare(BaseModel):
    """What a part of the time contributes to the nats per token."""

    start: float
    end: float
    nats_per_token: float
    standard_error: float


class ScoreAnswer(BaseModel):
    """A bound on -log p (exact for an autoregressive model), with its standard errors."""

    object: Literal["score"] = "score"
    model: str
    exact: bool
    nats: float
    nats_per_token: float
    standard_error: float
    perplexity: float
    perplexity_error: float
    bits_per_byte: float
    bits_per_byte_error: float
    tokens: list[ScoredToken]
    by_time: list[TimeShare]


class Example(BaseModel):
    """A template of the kind of text that the model was trained on, within its length, and its whole text."""

    name: str
    template: str
    text: str


class ModelCard(BaseModel):
    """A model and what it may be asked; `default_sampler` is what the sampler "default" stands for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "unmask"
    kind: str
    parameters: int
    vocabulary: int
    length: int
    samplers: list[str]
    default_sampler: str
    examples: list[Example]
    limits: dict[str, int | float]


class ModelList(BaseModel):
    """There is one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Problem(BaseModel):
    """What was wrong, in one sentence."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """As OpenAI's clients read it."""

    error: Problem
