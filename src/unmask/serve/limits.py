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
    seconds: float = 120.0
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


def within(param: str, value: int | None, usual: int, most: int) -> int:
    """What was asked for, which must not be above the limit; else what is usual, as far as it is allowed."""
    if value is None:
        return min(usual, most)
    check(param, value, most)
    return value


def check(param: str, value: float, most: float) -> None:
    """Refuse what is above the limit."""
    if value > most:
        raise LimitError(param, f"this server allows {param} up to {most:,}; got {value:,}")


def check_given(param: str, tokens: int, limits: Limits) -> None:
    """Refuse a text of too many tokens."""
    if tokens > limits.prompt_tokens:
        raise LimitError(
            param, f"this server reads up to {limits.prompt_tokens:,} tokens; {param} has {tokens:,}"
        )


def check_length(param: str, given: int, hidden: int, length: int, limits: Limits) -> None:
    """Refuse a text that is too long for the server, or (as OpenAI's clients know it) for the model.

    `param` is the field that says how many tokens are to be written: max_tokens, or a text with holes.
    """
    if given + hidden > length:
        remedy = "the prompt or max_tokens" if param == "max_tokens" else "the text or its holes"
        raise LimitError(
            param,
            f"This model's maximum context length is {length} tokens. However, you requested"
            f" {given + hidden} tokens ({given} in the prompt; {hidden} for the completion)."
            f" Please reduce {remedy}.",
            "context_length_exceeded",
        )
    check_given("prompt" if param == "max_tokens" else param, given, limits)
    if hidden > limits.max_tokens:
        raise LimitError(param, f"this server writes up to {limits.max_tokens:,} tokens; got {hidden:,}")
