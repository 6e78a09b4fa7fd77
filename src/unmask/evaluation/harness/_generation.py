"""How lm-evaluation-harness asks for answers, and what of an answer it gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unmask.data.tokenizers import BaseTokenizer
from unmask.diffusion.categorical import SamplingParams


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are generated, where the task does not say."""

    sampler: str = "default"
    """The sampler; the default is that of the model's family."""
    steps: int | None = None
    """Denoising steps (per block, where there are blocks); None writes one token per step."""
    block_size: int | None = None
    """Write in blocks of this many tokens from left to right; models with blocks have their own."""
    temperature: float | None = None
    """None takes the task's: 0 unless it samples."""
    top_k: int | None = None
    """Sample from the k most probable tokens only."""
    top_p: float | None = None
    """Sample from the most probable tokens that together reach p only; None takes the task's."""
    max_gen_toks: int = 256
    """Tokens of an answer, where the task does not say."""


@dataclass(frozen=True)
class Question:
    """A request of `generate_until`."""

    number: int
    task: str
    prompt: tuple[int, ...]
    length: int
    params: SamplingParams
    until: tuple[str, ...]
    seed: int


@dataclass
class Usage:
    """What the answers of a task took."""

    answers: int = 0
    tokens: int = 0
    """Tokens of the answers, up to the end of the text."""
    sequence_calls: int = 0
    """Sequences that the network read, summed over its calls."""

    @property
    def tokens_per_call(self) -> float:
        """Tokens for each network call that a sequence took part in."""
        return self.tokens / max(1, self.sequence_calls)


def read_options(
    options: Mapping[str, Any], settings: GenerationSettings
) -> tuple[int, SamplingParams, tuple[str, ...]]:
    """The length, the sampling and the stop strings that a task asks for; the settings' temperature comes first."""
    task_temperature = options.get("temperature") or 0.0
    sampled = bool(options.get("do_sample", task_temperature > 0))
    temperature = (task_temperature or 1.0) if sampled else 0.0
    task_top_p = options.get("top_p") if sampled else None
    params = SamplingParams(
        float(temperature if settings.temperature is None else settings.temperature),
        settings.top_k,
        task_top_p if settings.top_p is None else settings.top_p,
    )
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    length = int(options.get("max_gen_toks", options.get("max_new_tokens", settings.max_gen_toks)))
    if length < 1:
        raise ValueError(f"max_gen_toks must be at least 1; got {length}")
    return length, params, tuple(filter(None, stops))


def cut_answer(text: str, until: Sequence[str], tokenizer: BaseTokenizer) -> str:
    """The text before the first stop string, without special tokens."""
    ends = [place for stop in until if (place := text.find(stop)) >= 0]
    text = text[: min(ends)] if ends else text
    for token in tokenizer.special_tokens:
        text = text.replace(token, "")
    return text


def grouped(questions: Sequence[Question], size: int) -> Iterator[list[Question]]:
    """Batches of at most `size` questions of one task that one sampler answers, the longest prompts first."""
    groups: dict[Any, list[Question]] = {}
    for question in sorted(questions, key=lambda each: -len(each.prompt)):
        groups.setdefault((question.task, question.length, question.params), []).append(question)
    for group in groups.values():
        yield from (group[start : start + size] for start in range(0, len(group), size))
