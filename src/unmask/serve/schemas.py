"""What requests and answers look like; everything that can be refused by its shape is refused here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from unmask.sampling.blockwise import CACHE_POLICIES
from unmask.serve.compat import field_error, normalize_fields

MAX_STOPS = 64
_SEED_MODULUS = 2**62
_MIN_TOP_P = 1e-9

_Seed = Annotated[
    int,
    Field(ge=-(2**63), lt=2**63, description="Row i is drawn with seed + i."),
    AfterValidator(lambda seed: seed % _SEED_MODULUS),
]
_Regex = Annotated[str, Field(max_length=200)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _StrictRequest(BaseModel):
    """Unknown fields are refused: a misspelt option must not be ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="The model's name, as /v1/models tells it.")

    @model_validator(mode="before")
    @classmethod
    def _normalize_fields(cls, body: Any) -> Any:
        return normalize_fields(body, cls.model_fields) if isinstance(body, dict) else body


def _none_if(*values: int) -> BeforeValidator:
    """Numbers by which other servers mean that nothing was given."""
    return BeforeValidator(lambda value: None if type(value) is int and value in values else value)


class GenerationRequest(_StrictRequest):
    """How tokens are written."""

    n: int = Field(1, ge=1, description="How many candidates.")
    steps: int | None = Field(
        None, ge=1, description="Steps of the sampler; more are better and slower. 64 if not given."
    )
    sampler: str = Field(
        "default",
        description="The order in which masked tokens are unmasked, by name; /v1/models lists the names.",
    )
    block_size: int | None = Field(
        None, ge=1, description="Write from left to right in blocks of so many tokens, `steps` each."
    )
    cache: str = Field(
        "none",
        description="What the steps of a block do not read again: what is before it, or all around it.",
        json_schema_extra={"enum": list(CACHE_POLICIES)},
    )
    cfg_scale: float = Field(0.0, ge=0, le=100, description="Classifier-free guidance by the visible text; 0 is none.")
    regex: _Regex | list[_Regex | None] | None = Field(
        None, description="A regular expression that the text of each hole must match, or one for each hole."
    )
    temperature: float = Field(1.0, ge=0, le=100, description="0 takes the most probable token.")
    top_p: Annotated[float, AfterValidator(lambda p: p or _MIN_TOP_P)] | None = Field(
        None, ge=0, le=1, description="Sample from the most probable tokens only; 0 takes the first of them."
    )
    top_k: Annotated[int | None, _none_if(0, -1)] = Field(
        None, ge=1, description="Sample from so many tokens only; 0 or -1 is no limit."
    )
    seed: Annotated[_Seed | None, _none_if(-1)] = Field(
        None, description="Row i is drawn with seed + i; a random one if not given, or if it is -1."
    )
    stream: bool = False
    timeout: float | None = Field(None, ge=1, description="Seconds after which the answer is of no use.")

    @property
    def length_field(self) -> str:
        """The field that says how many tokens are to be written."""
        return "max_tokens"


class CompletionRequest(GenerationRequest):
    """As OpenAI's clients send it; `steps`, `sampler` and `top_k` are additions."""

    prompt: str | list[str] | list[_TokenId] | list[list[_TokenId]] = ""
    suffix: str | None = Field(None, description="What follows the text that is written.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="How many tokens are written: exactly so many; 16 if not given. max_completion_tokens is the same.",
    )
    stop: str | list[str] | None = Field(None, description="The text is cut before the first of these.")
    echo: bool = Field(False, description="Whether the prompt stands before the text.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Most probable tokens to tell of.")
    stream_options: dict[str, Any] | None = Field(
        None, description="With include_usage, a stream ends with the number of tokens."
    )

    @model_validator(mode="after")
    def _check_supported(self) -> CompletionRequest:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise field_error("stop", f"stop is one text or up to {MAX_STOPS}, none of them empty")
        if self.max_tokens == 0 and self.logprobs is not None:
            raise field_error("logprobs", "a prompt has no logprobs here; POST /v1/score has its tokens' nats")
        return self


class InfillRequest(GenerationRequest):
    """A text with holes."""

    template: str | None = Field(
        None, description="Text with <mask:12> for twelve hidden tokens, <mask> for one; any number of holes."
    )
    segments: list[str | Annotated[int, Field(ge=1)] | list[_TokenId]] | None = Field(
        None,
        description="The same as a list: texts, the lengths of holes between them, and lists of ids that are given.",
    )
    alternatives: int = Field(0, ge=0, description="Most probable tokens to tell of at each written one.")

    @property
    def length_field(self) -> str:
        return "segments" if self.template is None else "template"

    @model_validator(mode="after")
    def _check_template_or_segments(self) -> InfillRequest:
        if (self.template is None) == (self.segments is None):
            raise field_error("template", "send either template or segments")
        return self


class ScoreRequest(_StrictRequest):
    """A text to score."""

    text: str = Field(min_length=1)
    draws: int | None = Field(
        None, ge=16, description="Random maskings, 128 if not given; the error falls with their square root."
    )
    seed: _Seed = 0
    timeout: float | None = Field(None, ge=1, description="Seconds after which the answer is of no use.")


class TokenizeRequest(_StrictRequest):
    """A text to cut into tokens."""

    text: str


class Token(BaseModel):
    """A token, and what it adds to the text."""

    id: int
    text: str


class TokenizeResponse(BaseModel):
    """A text in tokens."""

    tokens: list[Token]


class Alternative(BaseModel):
    """A token that might have been written."""

    id: int
    text: str
    probability: float


class GeneratedToken(BaseModel):
    """A token that was written: the model's log-probability of it, and the step that wrote it."""

    id: int
    text: str
    logprob: float | None
    step: int
    alternatives: list[Alternative] = []


class InfillSpan(BaseModel):
    """A filled hole: where it stands in the text, in characters, and its tokens."""

    start: int
    end: int
    text: str
    tokens: list[GeneratedToken]


class InfillCandidate(BaseModel):
    """One candidate."""

    index: int
    seed: int
    text: str
    spans: list[InfillSpan]
    steps: int


class Usage(BaseModel):
    """Tokens that were given and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class InfillResponse(BaseModel):
    """All candidates."""

    id: str
    object: Literal["infill"] = "infill"
    created: int
    model: str
    results: list[InfillCandidate]
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


class CompletionResponse(BaseModel):
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


class TimeBin(BaseModel):
    """What a part of the time contributes to the nats per token."""

    start: float
    end: float
    nats_per_token: float
    standard_error: float


class ScoreResponse(BaseModel):
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
    by_time: list[TimeBin]


class ExampleTemplate(BaseModel):
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
    objective: str
    num_parameters: int
    vocab_size: int
    max_length: int
    samplers: list[str]
    default_sampler: str
    examples: list[ExampleTemplate]
    limits: dict[str, int | float]


class ModelList(BaseModel):
    """There is one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(BaseModel):
    """What was wrong, in one sentence."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """An error as OpenAI's clients read it."""

    error: ErrorBody

    @classmethod
    def make(
        cls, message: str, type_: str = "invalid_request_error", param: str | None = None, code: str | None = None
    ) -> ErrorResponse:
        """An error with these values."""
        return cls(error=ErrorBody(message=message, type=type_, param=param, code=code))
