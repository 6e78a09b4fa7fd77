"""A denoiser with its tokenizer: sample, infill, complete and score text."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unmask.backbones import BackboneConfig
from unmask.backbones.dit import DiTConfig
from unmask.config import lookup
from unmask.data.corpus import TextStats
from unmask.data.tokenizers import Tokenizer
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import BlockMasking, LeftToRight, Masking
from unmask.distributed import Distributed
from unmask.guidance import AllowedTokens, Guidance, GuidanceFn
from unmask.hardware.memory import check_memory
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, score_requests
from unmask.likelihood.score import Score
from unmask.model.denoiser import Denoiser, ModelConfig
from unmask.model.samples import Completions, Samples
from unmask.objectives import Objective
from unmask.sampling import (
    SAMPLERS,
    Ancestral,
    Autoregressive,
    Blockwise,
    Sampler,
    SemiAutoregressive,
    UniformAncestral,
)
from unmask.sampling.base import CountingDenoiser, PaddedDenoiser
from unmask.sampling.blockwise import CACHE_POLICIES
from unmask.sampling.canvas import Canvas, Template, blank_canvas, encode_template, prompt_canvas
from unmask.sampling.semi_autoregressive import fills_window
from unmask.sampling.windows import HoleRange, WindowGuidanceFn, sample_ragged
from unmask.types import Tokens, Vocab


def _validate_seed(seed: int) -> None:
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"a seed must be 0 or above and below 2^63; got {seed}")


def _samplers_with_option(option: str) -> str:
    """The names of the samplers that have an option."""
    return " or ".join(name for name, kind in SAMPLERS.items() if option in kind.__dataclass_fields__) or "none"


def validate_tokenizer(tokenizer: Tokenizer | None, vocab: Vocab) -> None:
    """Refuse a tokenizer with ids that the model has not."""
    if tokenizer is not None and tokenizer.vocab_size > vocab.size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model only {vocab.size}: they do not belong together"
        )


class LanguageModel:
    """A denoiser with its tokenizer: sample, infill and score text."""

    def __init__(
        self,
        denoiser: Denoiser,
        tokenizer: Tokenizer | None = None,
        distributed: Distributed = Distributed(),  # noqa: B008
    ) -> None:
        validate_tokenizer(tokenizer, denoiser.vocab)
        self.denoiser = denoiser
        self.tokenizer = tokenizer
        self.distributed = distributed

    def __repr__(self) -> str:
        weight, limit = self.denoiser.backbone.lm_head.weight, self.denoiser.max_length
        parameters = sum(parameter.numel() for parameter in self.denoiser.parameters())
        length = "any length" if limit is None else f"up to {limit:,} tokens"
        kind = f"{type(self.objective).__name__}, {parameters:,} parameters, vocabulary {self.vocab.size:,}"
        kept = str(weight.dtype).removeprefix("torch.")
        return f"LanguageModel({kind}, {length}, {weight.device}, {kept}, {self.tokenizer})"

    def distribute(self, distributed: Distributed) -> LanguageModel:
        """The same model with its work split over the ranks; each of them gets the whole result."""
        return LanguageModel(self.denoiser.to(distributed.device), self.tokenizer, distributed)

    @classmethod
    def from_config(cls, backbone: BackboneConfig, objective: Objective, tokenizer: Tokenizer) -> LanguageModel:
        """A model with fresh weights; the mask is one more id after the tokenizer's."""
        vocab = Vocab(size=tokenizer.vocab_size + 1, mask_id=tokenizer.vocab_size)
        return cls(ModelConfig(vocab, backbone, objective).build(), tokenizer)

    @property
    def vocab(self) -> Vocab:
        """Which ids there are and which one is the mask."""
        return self.denoiser.vocab

    @property
    def objective(self) -> Objective:
        """What the model is trained with."""
        return self.denoiser.objective

    def default_sampler(self, steps: int = 128, params: SamplingParams | None = None) -> Sampler:
        """The plain sampler of the model's process; `steps` are those of a block, where text has blocks."""
        params, process = params or SamplingParams(), self.denoiser.process
        if isinstance(process, LeftToRight):
            return Autoregressive(params)
        if isinstance(process, BlockMasking):
            return Blockwise(sampler=Ancestral(steps, params), eos_id=self.vocab.eos_id)
        kind = Ancestral if isinstance(process, Masking) else UniformAncestral
        return kind(steps, params)

    def make_sampler(
        self,
        name: str,
        steps: int = 128,
        params: SamplingParams | None = None,
        *,
        block_size: int | None = None,
        cache: str = "none",
        **options: Any,
    ) -> Sampler:
        """A sampler by its name, "default" for the plain one; those that take no steps leave them out.

        With `block`, text is written from left to right in blocks of so many tokens, the steps being those of
        a block, and `cache` names what is kept meanwhile: none, prefix or dual. `options` are the sampler's
        own.
        """
        kept, causal = lookup(cache, CACHE_POLICIES, "cache"), isinstance(self.denoiser.process, BlockMasking)
        if cache != "none" and (causal or block_size is None):
            why = "this model has an exact one" if causal else "say how long a block is"
            raise ValueError(f"a {cache} cache is for masked diffusion that is written in blocks: {why}")
        if name == "default" and block_size is None:
            for option in options:
                raise ValueError(f"{option} is for {_samplers_with_option(option)}: name that sampler, too")
            return self.default_sampler(steps, params)
        kind: Any = lookup(name if name != "default" else "confidence", SAMPLERS, "sampler")
        counted = {"steps": steps} if "steps" in kind.__dataclass_fields__ else {}
        unknown = [option for option in options if option not in kind.__dataclass_fields__]
        if unknown:
            raise ValueError(
                f"the sampler {name!r} has no {unknown[0]}, which is for {_samplers_with_option(unknown[0])}"
            )
        chosen: Sampler = kind(**counted, **options, params=params or SamplingParams())
        if block_size is None and not causal:
            return chosen
        return Blockwise(block_size, chosen, kept, self.vocab.eos_id)

    def sample(
        self,
        n: int = 1,
        length: int | None = None,
        *,
        prompt: str | Sequence[int] = (),
        sampler: Sampler | str | None = None,
        seed: int = 0,
        guidance: GuidanceFn | None = None,
    ) -> Samples:
        """`n` texts of `length` tokens (the model's, if not given) that begin with the prompt.

        Row i is drawn with seed + i: it is the same text whatever `n` is. A `guide` such as
        `Guidance(cfg_scale=1.5)` says what is asked of the texts beyond the model.
        """
        return self.generate(self.blank_canvas(n, length, prompt), sampler, seed, guidance=guidance)

    def infill(
        self,
        template: Template | Tensor,
        *,
        n: int = 1,
        sampler: Sampler | str | None = None,
        seed: int = 0,
        guidance: GuidanceFn | None = None,
    ) -> Samples:
        """`n` versions of the template with its holes filled: `<mask:12>` stands for twelve tokens.

        Ids, as a tensor or list with the mask id in its holes, are taken too. With
        `Guidance(regex="[0-9]+")` as a guide, the text of each hole matches the pattern.
        """
        return self.generate(self.encode_template(template, n), sampler, seed, guidance=guidance)

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        length: int = 128,
        *,
        sampler: Sampler | str | None = None,
        seed: int = 0,
        guidance: GuidanceFn | None = None,
    ) -> Completions:
        """At most `length` tokens after each prompt, up to the end of the text if the model knows one.

        All prompts are gone on from together, and each with its own seed, `seed` and those after it: what is
        written is the same as alone.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts are a list, as in [{prompts[:20]!r}]; got one text")
        process, encoded = self.denoiser.process, [self._encode(prompt) for prompt in prompts]
        sampler = self._resolve_sampler(sampler)
        if isinstance(process, Masking) and fills_window(sampler):
            # Whose noise then is that of what is written, wherever it begins.
            sampler = Blockwise(sampler=sampler, eos_id=self.vocab.eos_id)
        block = process.block_size if isinstance(process, BlockMasking) else None
        if isinstance(length, int):
            self.check_memory(len(encoded), max(map(len, encoded), default=0) + length)
        tokens, valid = prompt_canvas(encoded, length, self.vocab.mask_id, block)
        written = valid & (tokens == self.vocab.mask_id)
        filled = self.generate(tokens, sampler, seed, None if bool(valid.all()) else valid, guidance)
        return Completions(**vars(filled), completion_mask=written, eos_id=self.vocab.eos_id)

    def blank_canvas(self, n: int = 1, length: int | None = None, prompt: str | Sequence[int] = ()) -> Tokens:
        """The canvas [n, length] that `sample` fills: masks after the prompt."""
        length = self.denoiser.max_length if length is None else length
        if length is None:
            raise ValueError("this model has no longest length; say how many tokens to write with length=")
        self.check_memory(n, length)
        return blank_canvas(n, length, self.vocab.mask_id, self._encode(prompt))

    def encode_template(self, template: Template | Tensor, n: int = 1) -> Tokens:
        """The canvas [n, L] that `infill` fills: the template's ids, with masks in its holes."""
        if isinstance(template, list) and all(isinstance(piece, int) for piece in template):
            template = torch.tensor(self._encode(template))
        if isinstance(template, Tensor):
            if template.numel() != template.shape[-1]:
                raise ValueError(f"a template is one row of ids; got shape {list(template.shape)}")
            ids = template.flatten().tolist()
            if self.vocab.mask_id not in ids:
                raise ValueError(f"the template has no hole: put the mask id {self.vocab.mask_id} where one is")
        else:
            if isinstance(template, str) and self.tokenizer is not None and self.parses_special_tokens:
                spelled = self.tokenizer.backend.id_to_token(self.vocab.mask_id)
                template = template.replace(spelled, "<mask>") if spelled else template  # as in [MASK]
            ids = encode_template(template, self._encode, self.vocab.mask_id)
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n must be at least 1; got {n!r}")
        self.check_memory(n, len(ids))
        return torch.tensor([ids] * n)

    @property
    def uses_right_context(self) -> bool:
        """Whether what follows a hole matters for what is written into it."""
        return not isinstance(self.denoiser.process, LeftToRight)

    def check_memory(self, n: int, length: int) -> None:
        """Refuse so many texts of so many tokens if they cannot be held in memory."""
        width = self.denoiser.backbone.lm_head.weight.shape[-1]
        check_memory(n, length, self.denoiser.max_length, width)

    def generate(
        self,
        tokens: Tokens,
        sampler: Sampler | str | None = None,
        seed: int = 0,
        valid: Tensor | None = None,
        guidance: GuidanceFn | None = None,
    ) -> Samples:
        """Fill a canvas [n, L] of ids with the mask id in its holes; row i is drawn with seed + i.

        Where it is not `valid` [n, L], there is padding, which nobody looks at. Texts longer than the model
        reads at once are written in windows around their holes, from left to right.
        """
        world, written = self.distributed, torch.zeros_like(tokens)
        first, count = world.shard(len(tokens))
        calls = head_rows = 0
        if count:
            mine = slice(first, first + count)
            text = None if valid is None else valid[mine]
            for frame in self.generate_steps(tokens[mine], sampler, seed + first, text, guidance):
                filled = frame
            written[first : first + count] = filled.tokens
            calls, head_rows = filled.nfe, filled.num_queries
        return Samples(
            world.all_reduce(written),
            int(world.all_reduce_max(calls)),
            int(world.all_reduce_scalars(head_rows)[0]),
            self.tokenizer,
        )

    def generate_steps(
        self,
        tokens: Tokens,
        sampler: Sampler | str | None = None,
        seed: int = 0,
        valid: Tensor | None = None,
        guidance: GuidanceFn | None = None,
    ) -> Iterator[Samples]:
        """Watch `fill`: the canvas as it is given, then after each step, the filled one last.

        The ids of a frame have masks where nothing is written yet; network calls are counted up to it.
        """
        _validate_seed(seed)
        sampler = self._resolve_sampler(sampler)
        canvas = Canvas(tokens.to(self.device), tuple(seed + row for row in range(len(tokens))))
        counted = CountingDenoiser(self.ban_unknown_tokens(self.denoiser))
        valid = None if valid is None else valid.to(self.device)
        steps = iter(self.run_sampler(counted, canvas, sampler, valid, guidance))
        z: Tokens | None = canvas.tokens
        while z is not None:
            yield Samples(z, counted.nfe, counted.num_queries, self.tokenizer)
            with self.inference_mode():  # not around the yield: who watches keeps a mode of their own
                z = next(steps, None)

    def run_sampler(
        self,
        denoiser: DenoiserLike,
        canvas: Canvas,
        sampler: Sampler,
        valid: Tensor | None = None,
        guidance: GuidanceFn | None = None,
    ) -> Iterable[Tokens]:
        """The canvas after each step, with calls of `denoiser`: the model's own, or a wrapper around it."""
        if self._needs_ragged(sampler, canvas.tokens.shape[1], valid):
            return sample_ragged(denoiser, canvas, sampler, valid, self._window_guidance(guidance))
        padded: DenoiserLike = denoiser if valid is None else PaddedDenoiser(denoiser, valid)
        guided = padded if guidance is None else guidance(padded, canvas.tokens, self.tokenizer)
        return sampler.run(guided, canvas)

    def _resolve_sampler(self, sampler: Sampler | str | None) -> Sampler:
        """The sampler that was given, as an object or by its name; or the plain one."""
        if isinstance(sampler, str):
            return self.make_sampler(sampler)
        if sampler is not None and not isinstance(sampler, Sampler):
            raise ValueError(f"sampler must be a Sampler, as in unmask.Ancestral(steps=64); got {sampler!r}")
        return sampler or self.default_sampler()

    def _needs_ragged(self, sampler: Sampler, length: int, valid: Tensor | None) -> bool:
        """Whether texts are written apart: too long for one call, or with padding that cannot be in one."""
        process, longest = self.denoiser.process, self.denoiser.max_length
        if isinstance(process, BlockMasking):  # which keeps what it has read of any length
            return False
        if isinstance(sampler, SemiAutoregressive):
            return valid is not None
        padded = valid is not None and not isinstance(process, Masking)
        return padded or (longest is not None and length > longest)

    def _window_guidance(self, guidance: GuidanceFn | None) -> WindowGuidanceFn:
        """What is asked of a text, asked of a window."""

        def look(denoiser: DenoiserLike, tokens: Tokens, holes: HoleRange) -> DenoiserLike:
            if guidance is None:
                return denoiser
            mine = guidance.for_holes(*holes) if isinstance(guidance, Guidance) else guidance
            return mine(denoiser, tokens, self.tokenizer)

        return look

    @property
    def parses_special_tokens(self) -> bool:
        """Whether special tokens spelled out in a prompt, a template or a scored text are read as such.

        Those of networks of others (transformers, LLaDA, Dream) are: their texts need [CLS] or chat marks.
        What is trained on, and what a server is sent, is text whatever it spells.
        """
        backbone = self.denoiser.config.backbone
        return not isinstance(backbone, DiTConfig) or backbone.llama is not None

    def ban_unknown_tokens(self, denoiser: DenoiserLike) -> DenoiserLike:
        """The denoiser as samplers are to ask it: ids that the tokenizer has no token for are never drawn.

        Published vocabularies are padded. A model whose ids are all known is asked as it is.
        """
        return denoiser if self._known_tokens is None else AllowedTokens(denoiser, self._known_tokens)

    @cached_property
    def _known_tokens(self) -> Tensor | None:
        """Booleans [V]: the ids that the tokenizer knows, or None where those are all but the mask."""
        if self.tokenizer is None:
            return None
        known = torch.zeros(self.vocab.size, dtype=torch.bool)
        known[sorted(self.tokenizer.known_ids)] = True
        known[self.vocab.mask_id] = True
        if bool(known.all()):
            return None
        known[self.vocab.mask_id] = False
        return known if bool(known.any()) else None

    def score(
        self,
        texts: str | Sequence[str | Sequence[int]],
        prompts: str | Sequence[str | Sequence[int]] | None = None,
        *,
        draws: int = 64,
        precision: float | None = None,
        seed: int = 0,
    ) -> Score:
        """The bound on -log p(text | prompt) of texts (or id sequences), from `draws` random maskings of each.

        With `precision`, 0.01 for one percent, each is drawn as often as it takes for such an error. A request is
        the sequence of the prompt's ids and the text's ids, encoded apart from each other as `complete` does:
        tokens never span the boundary (a space between words belongs to the text), and no special token is added.
        The prompt is visible and not counted. Without one, as with an empty one, it is -log p(text). A text that is
        longer than the model is scored in windows, each by itself; of a prompt that does not fit before its text,
        the beginning is dropped. Thousands of requests share network calls, and each is scored as if alone:
        request i draws from stream i of `seed`, whatever the others are.
        """
        texts = [texts] if isinstance(texts, str) else texts
        prompts = [prompts] if isinstance(prompts, str) else [""] * len(texts) if prompts is None else prompts
        if len(prompts) != len(texts):
            raise ValueError(f"every text needs a prompt of its own; got {len(texts)} texts and {len(prompts)} prompts")
        if not len(texts):
            raise ValueError("there are no texts to score")
        _validate_seed(seed)
        pairs = enumerate(zip(texts, prompts, strict=True))
        requests = [self._score_request(number, text, prompt) for number, (text, prompt) in pairs]
        config = ScoreConfig(draws, precision, seed)
        with self.inference_mode():
            return score_requests(self.denoiser, self.objective, requests, config, self.distributed)

    def _score_request(self, number: int, text: str | Sequence[int], prompt: str | Sequence[int]) -> ScoreRequest:
        ids = self._encode(text)
        if not ids:
            raise ValueError(f"text {number} is empty: there is nothing to score")
        before = self._encode(prompt) if len(prompt) else []
        self.vocab.validate(torch.tensor([*before, *ids]), clean=True)
        return ScoreRequest(
            ids, before, TextStats.from_text(text) if isinstance(text, str) and self.tokenizer else None
        )

    def _encode(self, text: str | Sequence[int]) -> list[int]:
        if not isinstance(text, str):
            try:
                ids = [operator.index(i) for i in text]
            except TypeError:
                raise ValueError(f"token ids must be integers in a list; got {text!r}") from None
            for i in ids:
                if not 0 <= i < self.vocab.size:
                    raise ValueError(f"token id {i} is outside the vocabulary 0..{self.vocab.size - 1}")
            return ids
        if self.tokenizer is not None:
            ids = self.tokenizer.encode(text, parse_special_tokens=self.parses_special_tokens)
            if self.vocab.mask_id in ids:
                spelled = self.tokenizer.backend.id_to_token(self.vocab.mask_id)
                raise ValueError(
                    f"{text[:40]!r} spells the mask token {spelled}, which is written over; `infill` fills holes"
                )
            return ids
        if not all(word.isdecimal() for word in text.split()):
            raise ValueError(f"this model has no tokenizer: give token ids (as in '5 17 2'), not {text!r}")
        return self._encode([int(word) for word in text.split()])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.denoiser.backbone.lm_head.weight.device

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """No gradients and no dropout, and afterwards all as it was."""
        awake = [module for module in self.denoiser.modules() if module.training]
        for module in awake:
            module.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            for module in awake:
                module.training = True
