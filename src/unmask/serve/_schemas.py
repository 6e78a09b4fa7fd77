"""Schemas of requests; what is wrong by its form alone is rejected here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from unmask.guidance.structure.structure import Structure
from unmask.sampling.blockwise import CACHE_POLICIES
from unmask.serve._compat import Dialect, field_error, normalize_fields
from unmask.serve._sampler_options import SamplerOptions

MAX_STOPS = 64
_SEED_MODULUS = 2**62
_MIN_TOP_P = 1e-9

_Seed = Annotated[
    int,
    Field(ge=-(2**63), lt=2**63, description="Candidate i is sampled with seed + i."),
    AfterValidator(lambda seed: seed % _SEED_MODULUS),
]
_Regex = Annotated[str, Field(max_length=200)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StrictRequest(BaseModel):
    """A request; unknown fields are errors, so that a misspelt option is not ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str | None = Field(None, description="The model's name, as in /v1/models.")

    dialect: ClassVar[Dialect] = Dialect()
    """What else the clients send that the route was made for."""

    @model_validator(mode="before")
    @classmethod
    def _normalize_fields(cls, body: Any) -> Any:
        return normalize_fields(body, cls.model_fields, cls.dialect) if isinstance(body, dict) else body


def none_if(*values: int) -> BeforeValidator:
    """Treat numbers that mean "not given" in other servers as None."""
    return BeforeValidator(lambda value: None if type(value) is int and value in values else value)


class GenerationRequest(StrictRequest, SamplerOptions):
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
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda p: p or _MIN_TOP_P)] | None = Field(
        None,
        description="Sample from the smallest set of this probability; 0 takes the most probable token.",
    )
    top_k: Annotated[int | None, none_if(0, -1)] = Field(
        None, ge=1, description="Sample from this many most probable tokens; 0 or -1 is no limit."
    )
    seed: Annotated[_Seed | None, none_if(-1)] = Field(
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
    def structure_field(self) -> str:
        """The field that says what the text of each hole must match."""
        return "regex" if self.regex else "grammar" if self.response_format is None else "response_format"

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
            raise field_error(self.structure_field, str(error)) from None
        return self


def _check_stops(stop: str | list[str] | None) -> str | list[str] | None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or not all(stops):
        raise field_error("stop", f"stop must be one text or up to {MAX_STOPS} texts, none of them empty")
    return stop


Stops = Annotated[
    str | list[str] | None,
    AfterValidator(_check_stops),
    Field(description="The completion ends before the first of these texts."),
]
"""Texts that end a completion."""


class TextRequest(GenerationRequest):
    """A request for the text after a prompt, or between a prompt and a suffix."""

    stop: Stops = None

    @property
    def stops(self) -> list[str]:
        """Texts that end it."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_alternatives(self) -> int:
        """The number of most probable tokens that are listed."""
        return 0


def check_one_of(usual: str, fields: dict[str, Any]) -> None:
    """Refuse a request with none of these fields, of which `usual` is asked for, or with several."""
    given = [name for name, value in fields.items() if value is not None]
    if not given:
        raise field_error(usual, f"the field {usual} is missing")
    if len(given) > 1:
        raise field_error(given[1], f"{' and '.join(given)} say what is meant twice: send one of them")


def check_lengths(least_field: str, least: int | None, most_field: str, most: int | None) -> None:
    """Refuse a smallest length above the largest."""
    if least is not None and most is not None and least > most:
        raise field_error(least_field, f"{least_field} is above {most_field}: it must be at most {most}")


class CompletionRequest(TextRequest):
    """A completion request of OpenAI's clients; `steps`, `sampler`, `top_k` and others are additions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        "", description="One text or several, as text or as token ids."
    )
    suffix: str | None = Field(None, description="The text after the completion.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="The exact number of tokens to generate; 16 if not given. max_completion_tokens is the same.",
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        description="With `suffix`: the model chooses the number of tokens, from `min_tokens` to `max_tokens`.",
    )
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

    @property
    def num_alternatives(self) -> int:
        return self.logprobs or 0

    @model_validator(mode="after")
    def _check_supported(self) -> CompletionRequest:
        if self.min_tokens and not self.suffix:
            raise field_error(
                "min_tokens", "min_tokens is not supported without a suffix: exactly max_tokens tokens are generated"
            )
        check_lengths("min_tokens", self.min_tokens, "max_tokens", self.max_tokens)
        if self.max_tokens == 0 and self.logprobs is not None:
            raise field_error("logprobs", "logprobs of a prompt are not supported; POST /v1/score scores its tokens")
        return self


class InfillRequest(GenerationRequest):
    """A text with holes to fill."""

    template: str | None = Field(
        None, description="A text with holes: <mask:12> stands for twelve masked tokens, <mask> for one."
    )
    segments: list[str | Annotated[int, Field(ge=1)] | list[TokenId]] | None = Field(
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


_Text = Annotated[str, Field(min_length=1)]


class ScoreRequest(StrictRequest):
    """A text to score, or several."""

    text: _Text | Annotated[list[_Text], Field(min_length=1)] | None = Field(
        None, description="The text to score; or a list of texts, as `texts`."
    )
    texts: Annotated[list[_Text], Field(min_length=1)] | None = Field(
        None, description="Texts to score, each as if alone: the response is then a list."
    )
    draws: int | None = Field(
        None, ge=16, description="Random maskings; 128 if not given. The standard error falls with their square root."
    )
    seed: _Seed = 0
    timeout: float | None = Field(None, ge=1, description="Seconds after which the request is answered with 504.")

    @property
    def listed(self) -> list[str] | None:
        """Several texts; None for a single one."""
        return self.text if isinstance(self.text, list) else self.texts

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        check_one_of("text", {"text": self.text, "texts": self.texts})
        return self


class ClassifyRequest(StrictRequest):
    """Texts to classify; for a classifier of pairs, pairs of texts."""

    texts: Annotated[list[_Text | tuple[_Text, _Text]], Field(min_length=1)] | None = Field(
        None, description="One or more texts, or pairs of texts where the classifier reads pairs."
    )
    input: _Text | Annotated[list[_Text], Field(min_length=1)] | None = Field(
        None, description="One text or several, as vLLM's clients send them: the response is then vLLM's, too."
    )
    too_long: Literal["refuse", "cut"] = Field(
        "refuse", description="What becomes of texts of too many tokens: 400, or they are cut."
    )
    timeout: float | None = Field(None, ge=1, description="Seconds after which the request is answered with 504.")

    @property
    def rows(self) -> Sequence[str | tuple[str, str]]:
        """What is to be classified."""
        return [self.input] if isinstance(self.input, str) else self.input or self.texts or []

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        check_one_of("texts", {"texts": self.texts, "input": self.input})
        return self


class TokenizeRequest(StrictRequest):
    """A text to tokenize."""

    text: str = Field(description="The text to tokenize.")
