"""What Ollama's clients send."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from unmask.serve._chat_schemas import ChatRequest
from unmask.serve._compat import Dialect, field_error
from unmask.serve._fim import Gap
from unmask.serve._schemas import GenerationRequest, StrictRequest, TextRequest, check_lengths, none_if

IGNORED_BY_OLLAMA = (
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_thread",
    "num_gpu",
    "num_gqa",
    "main_gpu",
    "low_vram",
    "numa",
    "use_mmap",
    "use_mlock",
    "vocab_only",
    "f16_kv",
    "logits_all",
    "embedding_only",
    "repeat_last_n",
    "penalize_newline",
    "mirostat_tau",
    "mirostat_eta",
    "truncate",
    "shift",
    "verbose",
)
"""Fields and options of Ollama's clients that are accepted and ignored."""

_DIALECT = Dialect(
    IGNORED_BY_OLLAMA,
    {"images": ([],), "context": ([],), "think": (False,), "template": ("",), "logprobs": (False,)},
    {"num_predict": "max_tokens"},
    ("format", "system"),
)
_CHAT_DIALECT = Dialect(IGNORED_BY_OLLAMA, {"think": (False,)}, {"num_predict": "max_tokens"}, ("format",))

_MaxTokens = Annotated[int | None, none_if(0, -1, -2)]
_Options = Annotated[
    dict[str, Any] | None,
    Field(description="Options of the model: `temperature`, `top_k`, `top_p`, `seed`, `stop`, `num_predict` and ours."),
]
_Format = Annotated[
    str | dict[str, Any] | None, Field(description="What the answer must be: `json`, or a JSON schema.")
]


def _flattened(body: Any) -> Any:
    """The body with its options as fields of their own, which they are here, and its format as `response_format`."""
    if not isinstance(body, dict):
        return body
    options, format_ = body.get("options"), body.get("format")
    if isinstance(options, dict):
        twice = next((name for name in options if name in body), None)
        if twice is not None:
            raise field_error(str(twice)[:40], f"{str(twice)[:40]} is given twice: in options, and beside them")
        body = {**body, **options}
    if isinstance(format_, str) and format_ not in ("", "json"):
        raise field_error("format", "format must be json, or a JSON schema")
    if format_ == "json":
        body = {**body, "response_format": {"type": "json_object"}}
    elif isinstance(format_, dict):
        body = {**body, "response_format": {"type": "json_schema", "json_schema": {"schema": format_}}}
    return body


class OllamaGenerateRequest(TextRequest):
    """A request of Ollama's clients; options may also be fields of their own, and `steps` and others are additions."""

    dialect = _DIALECT

    n: int = Field(1, ge=1, le=1, description="One completion.")
    prompt: str = Field("", description="The text to continue; for a model that chats, the user's message.")
    suffix: str = Field("", description="The text after the completion.")
    system: str | None = Field(None, description="For a model that chats: the system's message.")
    raw: bool = Field(False, description="Whether `prompt` is continued as it is, without the chat template.")
    format: _Format = None
    options: _Options = None
    max_tokens: _MaxTokens = Field(
        None,
        ge=1,
        description="The most; before `suffix` 32 at most, unless `min_tokens` is given. num_predict is the same.",
    )
    min_tokens: int | None = Field(None, ge=0, description="The fewest tokens in front of `suffix`; 0 if not given.")
    stream: bool = Field(True, description="Whether to send lines of JSON while the text is generated.")

    @property
    def may_end(self) -> bool:
        return not self.suffix

    @property
    def gap(self) -> Gap:
        """The text with its hole."""
        return Gap(self.prompt, self.suffix, self.min_tokens, self.max_tokens)

    def as_chat(self) -> ChatRequest:
        """The prompt as a conversation."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        names = self.model_fields_set & {*GenerationRequest.model_fields, "stop", "max_tokens"}
        given = {name: getattr(self, name) for name in names - {"model", "stream"}}
        messages = [*system, {"role": "user", "content": self.prompt}]
        return ChatRequest(messages=messages, stream=self.stream, **given)

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, body: Any) -> Any:
        return _flattened(body)

    @model_validator(mode="after")
    def _check_lengths(self) -> OllamaGenerateRequest:
        check_lengths("min_tokens", self.min_tokens, "max_tokens", self.max_tokens)
        return self


class OllamaChatRequest(ChatRequest):
    """A chat request of Ollama's clients; options may also be fields of their own."""

    dialect = _CHAT_DIALECT

    n: int = Field(1, ge=1, le=1, description="One answer.")
    messages: list[dict[str, Any]] = Field(description="The conversation.")
    format: _Format = None
    options: _Options = None
    max_tokens: _MaxTokens = Field(None, ge=1, description="The most tokens of the answer. num_predict is the same.")
    stream: bool = Field(True, description="Whether to send lines of JSON while the text is generated.")

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, body: Any) -> Any:
        return _flattened(body)

    @model_validator(mode="after")
    def _check_images(self) -> OllamaChatRequest:
        if any(message.get("images") for message in self.messages):
            raise field_error("messages", "images are not read here: send text only")
        return self


class OllamaShowRequest(StrictRequest):
    """A question about a model."""

    dialect = Dialect(IGNORED_BY_OLLAMA, aliases={"name": "model"})


class OllamaEmbedRequest(StrictRequest):
    """Texts to embed, as Ollama's clients send them."""

    dialect = Dialect((*IGNORED_BY_OLLAMA, "options"), {"dimensions": (0,)})

    input: str | list[str] = Field(description="One text or several.")
    timeout: float | None = Field(None, ge=1, description="Seconds after which the request is answered with 504.")
