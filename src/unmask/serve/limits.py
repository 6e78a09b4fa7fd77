"""How much one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Shown by /v1/models; a request beyond one of them gets 4xx and a sentence.

    Tokens are counted as the model's tokenizer does.
    """

    prompt_tokens: int = 4096
    """Tokens that are given."""
    max_tokens: int = 4096
    """Tokens that are written."""
    n: int = 16
    """Candidates."""
    steps: int = 4096
    """Steps of a sampler."""
    alternatives: int = 20
    """Tokens told of beside the one that was written."""
    draws: int = 1024
    """Random maskings of a text that is scored."""
    body_bytes: int = 1_000_000
    """Bytes of a request."""
    timeout: float = 120.0
    """Seconds until the answer, after which it is 504."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"the limit {name} must be above 0; got {value}")


class LimitError(ValueError):
    """A request that asks for too much; `param` is the field that does, `code` what programs look for."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


def checked_or_default(param: str, value: int | None, default: int, limit: int) -> int:
    """What was asked for, which must not be above the limit; else what is usual, as far as it is allowed."""
    if value is None:
        return min(default, limit)
    check_limit(param, value, limit)
    return value


def check_limit(param: str, value: float, limit: float) -> None:
    """Refuse what is above the limit."""
    if value > limit:
        raise LimitError(param, f"this server allows {param} up to {limit:,}; got {value:,}")


def check_prompt_tokens(param: str, num_tokens: int, limits: Limits) -> None:
    """Refuse a text of too many tokens."""
    if num_tokens > limits.prompt_tokens:
        raise LimitError(param, f"this server reads up to {limits.prompt_tokens:,} tokens; {param} has {num_tokens:,}")


def check_context_length(param: str, prompt_tokens: int, new_tokens: int, max_length: int, limits: Limits) -> None:
    """Refuse a text that is too long for the server, or (as OpenAI's clients know it) for the model.

    `param` is the field that says how many tokens are to be written: max_tokens, or a text with holes.
    """
    if prompt_tokens + new_tokens > max_length:
        remedy = "the prompt or max_tokens" if param == "max_tokens" else "the text or its holes"
        raise LimitError(
            param,
            f"This model's maximum context length is {max_length} tokens. However, you requested"
            f" {prompt_tokens + new_tokens} tokens ({prompt_tokens} in the prompt; {new_tokens} for the completion)."
            f" Please reduce {remedy}.",
            "context_length_exceeded",
        )
    check_prompt_tokens("prompt" if param == "max_tokens" else param, prompt_tokens, limits)
    if new_tokens > limits.max_tokens:
        raise LimitError(param, f"this server writes up to {limits.max_tokens:,} tokens; got {new_tokens:,}")
