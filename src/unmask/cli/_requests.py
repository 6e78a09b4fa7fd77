"""What the lines of a file of requests may say, and how `infill`, `complete` and `score` answer them.

Fields have the names that they have in a request to the server. Those of generation override the options of the
command. Texts are plain text, whatever special tokens they spell.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from unmask.batches import Item, Line
from unmask.cli._generation_options import GenerationOptions, is_grammar
from unmask.cli._score import top_tokens
from unmask.config import from_json, lookup
from unmask.data.tokenizers import token_texts
from unmask.guidance import Guidance
from unmask.guidance.structure.structure import Structure
from unmask.likelihood.requests import ScoreConfig, score_requests
from unmask.likelihood.score import Score
from unmask.model import LanguageModel
from unmask.sampling import SAMPLERS, Sampler
from unmask.sampling.canvas import infill_canvas
from unmask.sampling.templates import MaskedText, Template

_MAX_TEXTS_PER_LINE = 10_000
_MAX_BATCH_TOKENS = 1 << 12
"""More at once are not faster, and more would be lost if the process were killed."""
_MIN_BATCH_TOKENS = 1 << 8
_MAX_CPU_WORK = 1 << 40
"""Tokens times parameters of a network call on a CPU: seconds."""
_SCORED_SHARE = 4
"""A text that is scored is read many times, so that so much fewer tokens are a batch."""
_MAX_SEED = 2**62
_STRUCTURES = ("regex", "response_format", "grammar")
_RequestT = TypeVar("_RequestT")


@dataclass(frozen=True, kw_only=True)
class _GenerationRequest:
    """Options of one line; None is the command's own."""

    id: str | int | None = None
    n: int | None = None
    seed: int | None = None
    steps: int | None = None
    sampler: str | None = None
    block_size: int | None = None
    sub_block_size: int | None = None
    cache: str | None = None
    measure: str | None = None
    threshold: float | None = None
    min_tokens: int | None = None
    edit_threshold: float | None = None
    max_post_steps: int | None = None
    stop_entropy: float | None = None
    stable_steps: int | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    cfg_scale: float | None = None
    regex: str | tuple[str | None, ...] | None = None
    response_format: str | None = None
    """The schema that it has, as JSON."""
    grammar: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class InfillRequest(_GenerationRequest):
    """A text with holes."""

    template: str | None = None
    segments: tuple[str | int | tuple[int, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(_GenerationRequest):
    """A prompt, as text or as ids."""

    prompt: str | tuple[int, ...]
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """A text to score, perhaps after a prompt."""

    id: str | int | None = None
    text: str | tuple[int, ...]
    prompt: str | tuple[int, ...] = ""
    draws: int | None = None
    seed: int | None = None


def _read(request_type: type[_RequestT], line: Line) -> _RequestT:
    """The request of a line; null means not given, as in the server."""
    given = {name: value for name, value in line.fields.items() if value is not None}
    if "response_format" in given and issubclass(request_type, _GenerationRequest):
        given["response_format"] = _schema_text(given["response_format"])
    request: _RequestT = from_json(request_type, given, "the request")
    return request


def _schema_text(response_format: Any) -> str | None:
    """The schema of a response format as JSON; None for any text."""
    if not isinstance(response_format, dict):
        raise ValueError('response_format must be an object, as in {"type": "json_object"}')
    schema = Structure.schema_of_response(response_format)
    return None if schema is None else Structure.json_schema(schema).source


def _line_seed(own: int | None, first: int, line: Line, texts_per_line: int, num_texts: int) -> int:
    """The seed of a line's first text: its own, or as if all lines had `texts_per_line` texts."""
    seed = first + (line.number - 1) * texts_per_line if own is None else own
    if not 0 <= seed < _MAX_SEED - num_texts:
        raise ValueError(f"a seed must be 0 or above and below 2^62; got {seed}")
    return seed


def _line_structure(request: _GenerationRequest) -> dict[str, Any]:
    """The options of what a line's text must match, in place of the command's; nothing if it has none."""
    if all(getattr(request, name) is None for name in _STRUCTURES):
        return {}
    if request.grammar is not None and not is_grammar(request.grammar):  # a file must not make this process read one
        raise ValueError("the grammar must have rules, as in root ::= [0-9]+")
    patterns = (request.regex,) if isinstance(request.regex, str) else request.regex or ()
    return {"regex": patterns, "json_schema": request.response_format, "grammar": request.grammar}


def _refuse_mask(lm: LanguageModel, ids: Sequence[int]) -> None:
    if lm.vocab.mask_id in ids:
        raise ValueError(
            f"the id {lm.vocab.mask_id} is the mask, which is no token of a text: give a hole in its place"
        )


def _batch_tokens(lm: LanguageModel) -> int:
    """Tokens of a batch: fewer for a large network on a CPU, where small batches are as fast."""
    if lm.device.type != "cpu":
        return _MAX_BATCH_TOKENS
    num_parameters = sum(parameter.numel() for parameter in lm.denoiser.parameters())
    return max(min(_MIN_BATCH_TOKENS, _MAX_BATCH_TOKENS), min(_MAX_BATCH_TOKENS, _MAX_CPU_WORK // num_parameters))


class _GenerationTask:
    """What infilling and completing share: a sampler and guidance for each combination of options."""

    def __init__(self, lm: LanguageModel, options: GenerationOptions) -> None:
        if lm.denoiser.process.inserts_tokens:
            raise ValueError(
                "files of requests are for models whose texts keep their length, and this one inserts tokens: give one"
                " text at a time"
            )
        self.lm, self.options, self.max_tokens = lm, options, _batch_tokens(lm)
        self._built: dict[GenerationOptions, tuple[Sampler, Guidance | None]] = {}
        self._build(replace(options, n=1, seed=0))  # an option that is wrong for the model is not the lines' fault

    def _build(self, settings: GenerationOptions) -> tuple[Sampler, Guidance | None]:
        if settings not in self._built:
            self._built[settings] = settings.build_sampler(self.lm), settings.build_guidance()
        return self._built[settings]

    def _settings(self, request: _GenerationRequest, line: Line) -> tuple[GenerationOptions, list[int]]:
        """The options of a line, and the seeds of its texts."""
        names = {field.name for field in fields(_GenerationRequest)} - {"id", "n", "seed", *_STRUCTURES}
        given: dict[str, Any] = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
        if "sampler" in given:  # only names of the table: a file must not make this process import something
            lookup(given["sampler"], dict.fromkeys(("default", *SAMPLERS)), "sampler")
        given |= _line_structure(request)
        settings = replace(self.options, n=1, seed=0, **given)
        self._build(settings)
        n = self.options.n if request.n is None else request.n
        if not 1 <= n <= _MAX_TEXTS_PER_LINE:
            raise ValueError(f"n must be from 1 to {_MAX_TEXTS_PER_LINE:,}; got {n:,}")
        seed = _line_seed(request.seed, self.options.seed, line, self.options.n, n)
        return settings, list(range(seed, seed + n))

    def _decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if self.lm.tokenizer is None else self.lm.tokenizer.decode(ids)


class InfillTask(_GenerationTask):
    """`unmask infill --input`."""

    def parse(self, line: Line) -> list[Item]:
        request = _read(InfillRequest, line)
        settings, seeds = self._settings(request, line)
        template = self._template(request)
        _, guidance = self._build(settings)
        texts = self.lm.masked_texts(template, seeds)
        for ids in {tuple(text.ids) for text in texts}:
            if guidance and guidance.regex and len(ids) <= (self.lm.denoiser.max_length or len(ids)):
                guidance(self.lm.denoiser, torch.tensor([ids]), self.lm.tokenizer)  # raises if nothing can match
        return [
            Item(line.number, index, len(text.ids), text.num_masked, settings, (text, seed))
            for index, (text, seed) in enumerate(zip(texts, seeds, strict=True))
        ]

    def _template(self, request: InfillRequest) -> Template:
        if request.template is not None and request.segments is None:
            return request.template
        if request.template is not None or request.segments is None:
            raise ValueError("the request must have either template or segments")
        for part in request.segments:
            if isinstance(part, tuple):
                _refuse_mask(self.lm, part)
        return tuple(list(part) if isinstance(part, tuple) else part for part in request.segments)

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        sampler, guidance = self._build(items[0].group)
        texts, seeds = zip(*(item.content for item in items), strict=True)
        tokens, valid = infill_canvas([text.ids for text in texts], self.lm.vocab.mask_id)
        samples = self.lm.generate(tokens, sampler, seeds, None if bool(valid.all()) else valid, guidance)
        return [self._result(*each) for each in zip(samples.ids, texts, seeds, strict=True)]

    def _result(self, ids: Sequence[int], masked_text: MaskedText, seed: int) -> dict[str, Any]:
        if self.lm.tokenizer is None:
            return {"seed": seed, "text": self._decode(ids)}
        texts = token_texts(self.lm.tokenizer.decode, ids)
        starts, text = [0, *itertools.accumulate(map(len, texts))], "".join(texts)
        places = [(starts[first], starts[first + length]) for first, length in masked_text.holes]
        spans = [{"start": start, "end": end, "text": text[start:end]} for start, end in places]
        return {"seed": seed, "text": text, "spans": spans}

    def answer(self, line: Line, results: Sequence[Any]) -> dict[str, Any]:
        return {"results": [{"index": index, **result} for index, result in enumerate(results)]}


class CompletionTask(_GenerationTask):
    """`unmask complete --input`."""

    def __init__(self, lm: LanguageModel, options: GenerationOptions, length: int) -> None:
        super().__init__(lm, options)
        self.length = length

    def parse(self, line: Line) -> list[Item]:
        request = _read(CompletionRequest, line)
        settings, seeds = self._settings(request, line)
        num_new = self.length if request.max_tokens is None else request.max_tokens
        if num_new < 1:
            raise ValueError(f"max_tokens must be at least 1; got {num_new}")
        ids = self.lm.encode(request.prompt)
        _refuse_mask(self.lm, ids)
        self.lm.check_memory(1, len(ids) + num_new)
        return [
            Item(line.number, index, len(ids) + num_new, num_new, (settings, num_new), (ids, seed))
            for index, seed in enumerate(seeds)
        ]

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        settings, num_new = items[0].group
        sampler, guidance = self._build(settings)
        prompts, seeds = zip(*(item.content for item in items), strict=True)
        completions = self.lm.complete(prompts, num_new, sampler=sampler, seed=seeds, guidance=guidance)
        return [
            {"seed": seed, "text": self._decode(ids), "finish_reason": "stop" if len(ids) < num_new else "length"}
            for seed, ids in zip(seeds, completions.ids, strict=True)
        ]

    def answer(self, line: Line, results: Sequence[Any]) -> dict[str, Any]:
        return {"choices": [{"index": index, **result} for index, result in enumerate(results)]}


class ScoreTask:
    """`unmask score --input`; with `top`, also the tokens of the most nats."""

    def __init__(self, lm: LanguageModel, config: ScoreConfig, prompt: str, top: int | None) -> None:
        if lm.objective.why_no_likelihood is not None:
            raise ValueError(lm.objective.why_no_likelihood)
        self.lm, self.config, self.prompt, self.top = lm, config, prompt, top
        self.max_tokens = max(1, _batch_tokens(lm) // _SCORED_SHARE)

    def parse(self, line: Line) -> list[Item]:
        request = _read(ScoreRequest, line)
        for ids in (request.text, request.prompt):
            if isinstance(ids, tuple):
                _refuse_mask(self.lm, ids)
        config = self.config if request.draws is None else replace(self.config, draws=request.draws)
        seed = _line_seed(request.seed, self.config.seed, line, 1, 1)
        scored = self.lm.score_request(request.text, request.prompt or self.prompt, seed)
        num_tokens = len(scored.ids)
        return [Item(line.number, 0, len(scored.prompt) + num_tokens, num_tokens, config, scored)]

    def run(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        lm, config = self.lm, items[0].group
        assert isinstance(config, ScoreConfig)
        with lm.inference_mode():
            requests = [item.content for item in items]
            whole = score_requests(lm.predictor, lm.objective, requests, config, per_token=self.top is not None)
        return [
            {"seed": item.content.seed, "nats": score.nats, **_figures(score), **self._top_tokens(item, score)}
            for item, score in zip(items, whole.per_text, strict=True)
        ]

    def _top_tokens(self, item: Item, score: Score) -> dict[str, Any]:
        if self.top is None:
            return {}
        return {"top_tokens": top_tokens(self.lm, item.content.ids, score.token_nats, self.top)}

    def answer(self, line: Line, results: Sequence[Any]) -> dict[str, Any]:
        return dict(results[0])


def _figures(score: Score) -> dict[str, Any]:
    return {name: value for name, value in score.to_dict().items() if not name.startswith("by_time")}
