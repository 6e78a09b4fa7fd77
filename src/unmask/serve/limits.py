"""Limits on what one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass


class FieldError(ValueError):
    """A field of a request is refused; `param` is the field, `code` the machine-readable reason."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class LimitError(FieldError):
    """A request above a limit."""


@dataclass(frozen=True)
class Limits:
    """Limits per request, listed by /v1/models; a request above one is answered with 4xx and a sentence.

    Tokens are those of the model's tokenizer.
    """

    prompt_tokens: int = 4096
    """Tokens of a prompt, or given tokens of a template."""
    max_tokens: int = 4096
    """Tokens to generate."""
    n: int = 16
    """Candidates."""
    steps: int = 4096
    """Steps of a sampler."""
    alternatives: int = 20
    """Most probable tokens listed with a generated one."""
    texts: int = 64
    """Texts to classify, score or embed."""
    draws: int = 1024
    """Random maskings of a scored text."""
    body_bytes: int = 1_000_000
    """Bytes of a request."""
    timeout: float = 120.0
    """Seconds until a request is answered with 504."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"the limit {name} must be above 0; got {value}")

    def check(self, param: str, value: float, field: str | None = None) -> None:
        """Refuse a value above the limit of that name; `field` is that of the request, if it has another name."""
        limit = getattr(self, param)
        if value > limit:
            raise LimitError(field or param, f"this server allows {param} up to {limit:,}; got {value:,}")

    def resolve(self, param: str, value: int | None, default: int) -> int:
        """The value, which must be within the limit of that name; if None, the default capped at the limit."""
        if value is None:
            return min(default, int(getattr(self, param)))
        self.check(param, value)
        return value

    def check_prompt(self, param: str, num_tokens: int) -> None:
        """Refuse a text of too many tokens."""
        if num_tokens > self.prompt_tokens:
            raise LimitError(
                param, f"this server reads up to {self.prompt_tokens:,} tokens; {param} has {num_tokens:,}"
            )

    def check_context(self, param: str, prompt_tokens: int, new_tokens: int, max_length: int) -> None:
        """Refuse a text that is too long for the model (in OpenAI's words) or for the server.

        `param` is the field with the number of new tokens: max_tokens, or a template.
        """
        total = prompt_tokens + new_tokens
        if total > max_length:
            remedy = "the prompt or max_tokens" if param == "max_tokens" else "the text or its holes"
            raise LimitError(
                param,
                f"This model's maximum context length is {max_length} tokens. However, you requested {total} tokens"
                f" ({prompt_tokens} in the prompt; {new_tokens} for the completion). Please reduce {remedy}.",
                "context_length_exceeded",
            )
        self.check_prompt("prompt" if param == "max_tokens" else param, prompt_tokens)
        if new_tokens > self.max_tokens:
            raise LimitError(param, f"this server generates up to {self.max_tokens:,} tokens; got {new_tokens:,}")
