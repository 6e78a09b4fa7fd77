"""Schemas of requests and responses; what is wrong by its form alone is rejected here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from unmask.guidance.structure.structure import Structure
from unmask.sampling.blockwise import CACHE_POLICIES
from unmask.serve._compat import field_error, normalize_fields

MAX_STOPS = 64
_SEED_MODULUS = 2**62
_MIN_TOP_P = 1e-9

_Seed = Annotated[
    int,
    Field(ge=-(2**63), lt=2**63, description="Candidate i is sampled with seed + i."),
    AfterValidator(lambda seed: seed % _SEED_MODULUS),
]
_Regex = Annotated[str, Field(max_length=200)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _StrictRequest(BaseModel):
    """A request; unknown fields are errors, so that a misspelt option is not ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="The model's name, as in /v1/models.")

    @model_validator(mode="before")
    @classmethod
    def _normalize_fields(cls, body: Any) -> Any:
        return normalize_fields(body, cls.model_fields) if isinstance(body, dict) else body


def _none_if(*values: int) -> BeforeValidator:
    """Treat numbers that mean "not given" in other servers as None."""
    return BeforeValidator(lambda value: None if type(value) is int and value in values else value)


class GenerationRequest(_StrictRequest):
    """Options of all requests that generate tokens."""

    n: int = Field(1, ge=1, description="The number of candidates.")
    steps: int | None = Field(
        None,
        ge=1,
        description="Denoising steps of the sampler; more are slower and usually better. If not given, those that the"
        " model comes with, or 64.",
    )
    sampler: str = Field(
        "default",
        description="The order in which masked tokens are unmasked, by name; /v1/models lists the names.",
    )
    block_size: int | None = Field(
        None, ge=1, description="Generate from left to right in blocks of this many tokens, with `steps` steps each."
    )
    sub_block_size: int | None = Field(
        None, ge=1, description="Fill a block in parts of this many tokens, from left to right, `steps` steps each."
    )
    cache: str = Field(
        "none",
        description="KV cache within a block (approximate): of the tokens before it, or of all tokens around it.",
        json_schema_extra={"enum": list(CACHE_POLICIES)},
    )
    cfg_scale: float = Field(
        0.0, ge=0, le=100, description="Scale of classifier-free guidance by the given tokens; 0 is none."
    )
    regex: _Regex | list[_Regex | None] | None = Field(
        None, description="A regular expression that the text of each hole must match, or one for each hole."
    )
    response_format: dict[str, Any] | None = Field(
        None,
        description='What the text of each hole must be: {"type": "json_object"}, or {"type": "json_schema",'
        ' "json_schema": {"schema": ...}}.',
    )
    grammar: str | None = Field(
        None, description="A grammar in GBNF, the format of llama.cpp, that the text of each hole must match."
    )
    temperature: float = Field(
        1.0,
        ge=0,
        le=100,
        description="Sampling temperature; 0 takes the most probable token. If none of `temperature`, `top_p` and"
        " `top_k` is given, a model that comes with a sampler keeps its own.",
    )
    top_p: Annotated[float, AfterValidator(lambda p: p or _MIN_TOP_P)] | None = Field(
        None,
        ge=0,
        le=1,
        description="Sample from the smallest set of this probability; 0 takes the most probable token.",
    )
    top_k: Annotated[int | None, _none_if(0, -1)] = Field(
        None, ge=1, description="Sample from this many most probable tokens; 0 or -1 is no limit."
    )
    seed: Annotated[_Seed | None, _none_if(-1)] = Field(
        None, description="Candidate i is sampled with seed + i; random if not given, or -1."
    )
    stream: bool = Field(False, description="Whether to send server-sent events while the text is generated.")
    timeout: float | None = Field(None, ge=1, description="Seconds after which the request is answered with 504.")

    @property
    def length_field(self) -> str:
        """The field with the number of tokens to generate."""
        return "max_tokens"

    @property
    def may_end(self) -> bool:
        """Whether the text may end before its last token."""
        return False

    @property
    def structure(self) -> Structure | tuple[Structure | None, ...] | None:
        """What the text of each hole must match, or that of one after the other."""
        schema = None if self.response_format is None else Structure.schema_of_response(self.response_format)
        regex: Structure | tuple[Structure | None, ...] | None = None
        if isinstance(self.regex, list):
            regex = tuple(None if pattern is None else Structure.regex(pattern) for pattern in self.regex)
        elif self.regex:
            regex = Structure.regex(self.regex)
        return Structure.choose(regex, schema, self.grammar)

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        try:
            _ = self.structure
        except ValueError as error:
            raise field_error("grammar" if self.response_format is None else "response_format", str(error)) from None
        return self


class CompletionRequest(GenerationRequest):
    """A completion request of OpenAI's clients; `steps`, `sampler`, `top_k` and others are additions."""

    prompt: str | list[str] | list[_TokenId] | list[list[_TokenId]] = Field(
        "", description="One text or several, as text or as token ids."
    )
    suffix: str | None = Field(None, description="The text after the completion.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="The exact number of tokens to generate; 16 if not given. max_completion_tokens is the same.",
    )
    stop: str | list[str] | None = Field(None, description="The completion ends before the first of these texts.")
    echo: bool = Field(False, description="Whether the response starts with the prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="The number of most probable tokens to list with log-probabilities."
    )
    stream_options: dict[str, Any] | None = Field(
        None, description="With include_usage, a stream ends with the token counts."
    )

    @property
    def may_end(self) -> bool:
        return not self.suffix

    @model_validator(mode="after")
    def _check_supported(self) -> CompletionRequest:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise field_error("stop", f"stop must be one text or up to {MAX_STOPS} texts, none of them empty")
        if self.max_tokens == 0 and self.logprobs is not None:
            raise field_error("logprobs", "logprobs of a prompt are not supported; POST /v1/score scores its tokens")
        return self


class InfillRequest(GenerationRequest):
    """A text with holes to fill."""

    template: str | None = Field(
        None, description="A text with holes: <mask:12> stands for twelve masked tokens, <mask> for one."
    )
    segments: list[str | Annotated[int, Field(ge=1)] | list[_TokenId]] | None = Field(
        None,
        description="The template as a list of texts, numbers of masked tokens, and lists of given token ids.",
    )
    alternatives: int = Field(0, ge=0, description="The number of most probable tokens to list at each generated one.")

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

    text: str = Field(min_length=1, description="The text to score.")
    draws: int | None = Field(
        None, ge=16, description="Random maskings; 128 if not given. The standard error falls with their square root."
    )
    seed: _Seed = 0
    timeout: float | None = Field(None, ge=1, description="Seconds after which the request is answered with 504.")


_Text = Annotated[str, Field(min_length=1)]


class ClassifyRequest(_StrictRequest):
    """Texts to classify; for a classifier of pairs, pairs of texts."""

    texts: list[_Text | tuple[_Text, _Text]] = Field(
        min_length=1, description="One or more texts, or pairs of texts where the classifier reads pairs."
    )
    too_long: Literal["refuse", "cut"] = Field(
        "refuse", description="What becomes of texts of too many tokens: 400, or they are cut."
    )
    timeout: float | None = Field(None, ge=1, description="Seconds after which the request is answered with 504.")


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


class TokenizeRequest(_StrictRequest):
    """A text to tokenize."""

    text: str = Field(description="The text to tokenize.")


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
    examples: list[ExampleTemplate] = Field(description="Templates to try.")
    limits: dict[str, int | float] = Field(description="The limits of the server, by name.")
    labels: list[str] | None = Field(
        default=None, description="The classes of a classifier; empty where it predicts numbers."
    )
    columns: list[str] | None = Field(default=None, description="What a classifier calls its texts: one or two names.")


class ModelList(BaseModel):
    """The served models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard] = Field(description="The models.")


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
