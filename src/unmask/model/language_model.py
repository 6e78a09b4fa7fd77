"""A denoiser with its tokenizer: sample, infill, complete and score text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from unmask.backbones import BackboneConfig
from unmask.data.chat import ChatTemplate
from unmask.data.corpus import TextStats
from unmask.data.tokenizers import BaseTokenizer
from unmask.diffusion.denoiser import DenoiserLike
from unmask.distributed import Distributed
from unmask.guidance import AllowedTokens, BothStrands, Guidance, GuidanceFn
from unmask.hardware.memory import check_memory
from unmask.likelihood.hole_lengths import DEFAULT_DRAWS, HoleLengths, hole_lengths
from unmask.likelihood.requests import ScoreConfig, ScoreRequest, score_requests
from unmask.likelihood.score import Score
from unmask.model._chat import ChatMethods
from unmask.model._seeds import sequence_seeds, validate_seed
from unmask.model._text_encoder import TextEncoder
from unmask.model.denoiser import Denoiser, ModelConfig
from unmask.model.samples import Completions, Samples
from unmask.objectives import Objective
from unmask.sampling.base import Sampler
from unmask.sampling.blockwise import Blockwise
from unmask.sampling.canvas import Canvas, blank_canvas, infill_canvas, prompt_canvas
from unmask.sampling.denoisers import CountingDenoiser, PaddedDenoiser
from unmask.sampling.factory import resolve_sampler
from unmask.sampling.templates import EncodedTemplate, MaskedText, Template
from unmask.sampling.windows import HoleRange, WindowGuidanceFn, sample_ragged
from unmask.types import Tokens, Vocab


def _validate_count(n: int) -> int:
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be at least 1; got {n!r}")
    return n


def _structured(
    guidance: GuidanceFn | None, schema: Mapping[str, Any] | bool | str | None, grammar: str | None
) -> GuidanceFn | None:
    """Guidance with a schema or grammar, if one is given."""
    if schema is None and grammar is None:
        return guidance
    if not isinstance(guidance, Guidance | None):
        raise ValueError("schema and grammar go together with a Guidance only; got another function")
    return replace(guidance or Guidance(), schema=schema, grammar=grammar)


def validate_tokenizer(tokenizer: BaseTokenizer | None, vocab: Vocab) -> None:
    """ValueError if the tokenizer has ids that the model does not have."""
    if tokenizer is not None and tokenizer.vocab_size > vocab.size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model only {vocab.size}: they do not belong together"
        )


class LanguageModel(ChatMethods):
    """A denoiser with its tokenizer: sample, infill and score text."""

    def __init__(
        self,
        denoiser: Denoiser,
        tokenizer: BaseTokenizer | None = None,
        distributed: Distributed = Distributed(),  # noqa: B008
        *,
        both_strands: bool = False,
        plain_text: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        validate_tokenizer(tokenizer, denoiser.vocab)
        self.denoiser = denoiser
        self.both_strands, self.plain_text, self.chat_template = both_strands, plain_text, chat_template
        self.tokenizer = tokenizer
        self.distributed = distributed
        self._encoder = TextEncoder(tokenizer, denoiser.vocab, self.parses_special_tokens)

    def __repr__(self) -> str:
        weight, limit = self.denoiser.backbone.lm_head.weight, self.denoiser.max_length
        parameters = self.denoiser.num_parameters
        length = "any length" if limit is None else f"up to {limit:,} tokens"
        network = ", ".join(map(str, self.denoiser.backbone.describe().values()))
        kind = f"{type(self.objective).__name__}, {network}, {parameters:,} parameters, vocabulary {self.vocab.size:,}"
        return f"LanguageModel({kind}, {length}, {weight.device}, {self.denoiser.weights_dtype}, {self.tokenizer})"

    def distribute(self, distributed: Distributed) -> LanguageModel:
        """The same model with its work split over the ranks; each rank gets the whole result."""
        self.denoiser.to(distributed.device)
        return self._replace(distributed=distributed)

    def with_both_strands(self) -> LanguageModel:
        """The same model of DNA, with predictions that are averaged over both strands, at twice the cost."""
        lm = self._replace(both_strands=True)
        lm.predictor  # noqa: B018  # raises if there are no strands
        return lm

    def with_plain_text(self) -> LanguageModel:
        """The same model for texts of others: special tokens that they spell out are plain text."""
        return self._replace(plain_text=True)

    def with_chat_template(self, chat_template: ChatTemplate | None) -> LanguageModel:
        """The same model with another chat template, which is saved with it."""
        return self._replace(chat_template=chat_template)

    def _replace(self, **changes: Any) -> LanguageModel:
        names = ("distributed", "both_strands", "plain_text", "chat_template")
        kept = {name: getattr(self, name) for name in names}
        return LanguageModel(self.denoiser, self.tokenizer, **{**kept, **changes})

    @property
    def predictor(self) -> DenoiserLike:
        """What samplers and scores ask: the denoiser, or its average over both strands of DNA."""
        if not self.both_strands:
            return self.denoiser
        complement_ids = None if self.tokenizer is None else self.tokenizer.complement_ids
        if complement_ids is None:
            raise ValueError("both strands are those of DNA, and this model's tokenizer knows no complements")
        return BothStrands(self.denoiser, complement_ids)

    @classmethod
    def from_config(cls, backbone: BackboneConfig, objective: Objective, tokenizer: BaseTokenizer) -> LanguageModel:
        """A model with random weights; if the tokenizer has no mask id of its own, it follows the tokenizer's ids."""
        vocab = replace(tokenizer.model_vocab, eos_id=None)
        return cls(ModelConfig(vocab, backbone, objective).build(), tokenizer)

    @property
    def vocab(self) -> Vocab:
        """The ids, and which of them is the mask."""
        return self.denoiser.vocab

    @property
    def objective(self) -> Objective:
        """The objective that the model was trained with."""
        return self.denoiser.objective

    def describe_learned(self) -> dict[str, str]:
        """What the objective has learned beside the network, such as the order of tokens; empty for most."""

        def spell(token_id: int) -> str:
            if self.tokenizer is None or token_id not in self.tokenizer.known_ids:
                return str(token_id)
            return repr(self.tokenizer.decode([token_id]))

        return self.objective.describe_parameters(self.denoiser.objective_parameters, self.vocab, spell)

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
        """`n` texts of `length` tokens (by default, the model's max_length) that begin with the prompt.

        Text i is drawn with seed + i: it is the same whatever `n` is. `guidance`, such as `Guidance(cfg_scale=1.5)`,
        constrains or steers the texts.
        """
        return self.generate(self.blank_canvas(n, length, prompt), sampler, seed, guidance=guidance)

    def infill(
        self,
        template: Template | Tensor | Sequence[Template | Tensor],
        *,
        n: int = 1,
        sampler: Sampler | str | None = None,
        seed: int | Sequence[int] = 0,
        guidance: GuidanceFn | None = None,
        schema: Mapping[str, Any] | bool | str | None = None,
        grammar: str | None = None,
    ) -> Samples:
        """`n` versions of a template, or of each of several templates, with its holes filled.

        A template is text with `<mask:12>` for twelve masked tokens; or a list of pieces: texts, lists of ids, and
        integers, the lengths of holes; or ids, as a tensor or list with the mask id in the holes. `<mask:3..12>`, or
        range(3, 13) as a piece, is a hole of 3 to 12 tokens, and `<mask:*>` one of 0 to 32: the length in each text is
        drawn from `hole_lengths`. A model that inserts tokens (FlexMDM) fills holes whose length begins at 0, and
        draws it together with the text.

        A list without integers is a list of templates. These may differ in length and share network calls; the texts of
        the result are in order, all versions of the first template first. Text i is drawn with seed + i, or with the
        i-th of several seeds, and is the same as alone. With `Guidance(regex="[0-9]+")`, the text of each hole matches
        the pattern; with `schema`, it is JSON of this schema, and with `grammar`, a text of this grammar in GBNF.
        """
        guidance = _structured(guidance, schema, grammar)
        many = isinstance(template, Sequence) and not isinstance(template, str)
        if not many or any(isinstance(piece, int | range) for piece in template):
            template = [cast("Template | Tensor", template)]
        tokens, valid = self.infill_canvas(cast("Sequence[Template | Tensor]", template), n, seed)
        return self.generate(tokens, sampler, seed, valid, guidance)

    def infill_canvas(
        self, templates: Sequence[Template | Tensor], n: int = 1, seed: int | Sequence[int] = 0
    ) -> tuple[Tokens, Tensor | None]:
        """The canvas that `infill` fills, `n` rows for each template, and which positions are text (None: all)."""
        encoded = [self._encoder.encode_template(template) for template in templates]
        self.check_memory(_validate_count(n) * len(encoded), max((each.longest for each in encoded), default=0))
        seeds = sequence_seeds(seed, n * len(encoded))
        parts = [seeds[first : first + n] for first in range(0, len(seeds), n)]
        texts = [text for each, part in zip(encoded, parts, strict=True) for text in self._close(each, part)]
        tokens, valid = infill_canvas([text.ids for text in texts], self.vocab.mask_id)
        return tokens, None if bool(valid.all()) else valid

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        length: int = 128,
        *,
        sampler: Sampler | str | None = None,
        seed: int | Sequence[int] = 0,
        guidance: GuidanceFn | None = None,
        schema: Mapping[str, Any] | bool | str | None = None,
        grammar: str | None = None,
    ) -> Completions:
        """At most `length` tokens after each prompt, up to the end-of-text token if the model has one.

        All prompts share network calls. Completion i is drawn with seed + i, or with the i-th of several seeds, and
        is the same as alone. With `schema`, it is JSON of this schema, and with `grammar`, a text of this grammar in
        GBNF: up to the end-of-text token, or in all its tokens.
        """
        guidance = self._may_end(_structured(guidance, schema, grammar))
        tokens, valid, sampler = self._completion_canvas(prompts, length, sampler)
        masked = valid & (tokens == self.vocab.mask_id)
        samples = self.generate(tokens, sampler, seed, None if bool(valid.all()) else valid, guidance)
        written = masked if samples.valid is None else masked & samples.valid
        return Completions(**vars(samples), completion_mask=written, end_ids=self.end_ids)

    def complete_steps(
        self,
        prompts: Sequence[str | Sequence[int]],
        length: int = 128,
        *,
        sampler: Sampler | str | None = None,
        seed: int | Sequence[int] = 0,
        guidance: GuidanceFn | None = None,
    ) -> Iterator[Completions]:
        """`complete` step by step: the canvas as it is given, then after each step, the finished one last."""
        guidance = self._may_end(guidance)
        tokens, valid, sampler = self._completion_canvas(prompts, length, sampler)
        masked = valid & (tokens == self.vocab.mask_id)
        for samples in self.generate_steps(tokens, sampler, seed, None if bool(valid.all()) else valid, guidance):
            written = masked if samples.valid is None else masked & samples.valid
            yield Completions(**vars(samples), completion_mask=written, end_ids=self.end_ids)

    def _may_end(self, guidance: GuidanceFn | None) -> GuidanceFn | None:
        """The guidance of a completion, which may end before its last token."""
        return replace(guidance, end_ids=self.end_ids) if isinstance(guidance, Guidance) else guidance

    def _completion_canvas(
        self, prompts: Sequence[str | Sequence[int]], length: int, sampler: Sampler | str | None
    ) -> tuple[Tokens, Tensor, Sampler]:
        """`length` masks after each prompt, which positions are text, and the sampler that fills them."""
        if isinstance(prompts, str):
            raise ValueError(f"prompts are a list, as in [{prompts[:20]!r}]; got one text")
        process, encoded = self.denoiser.process, [self._encoder.encode(prompt) for prompt in prompts]
        sampler = resolve_sampler(self.denoiser, sampler)
        if process.has_masks and process.block_size is None and sampler.inner is None:
            # Blocks begin with the completion, so its noise does not depend on the prompt's position in the batch.
            sampler = Blockwise(sampler=sampler, end_ids=self.end_ids)
        if isinstance(length, int):
            self.check_memory(len(encoded), max(map(len, encoded), default=0) + length)
        return *prompt_canvas(encoded, length, self.vocab.mask_id, process.block_size), sampler

    def blank_canvas(self, n: int = 1, length: int | None = None, prompt: str | Sequence[int] = ()) -> Tokens:
        """The canvas [n, length] that `sample` fills: masks after the prompt."""
        length = self.denoiser.max_length if length is None else length
        if length is None:
            raise ValueError("this model has no maximum length; pass length=, the number of tokens")
        self.check_memory(n, length)
        return blank_canvas(n, length, self.vocab.mask_id, self._encoder.encode(prompt))

    def encode(self, text: str | Sequence[int]) -> list[int]:
        """The ids of a prompt or of a text to score; ValueError for the mask token in it. Ids are checked."""
        return self._encoder.encode(text)

    def encode_template(self, template: Template | Tensor, n: int = 1) -> Tokens:
        """The canvas [n, L] that `infill` fills: the template's ids, with masks in its holes, whose length is known."""
        ids = self._encoder.encode_template(template).close(self.vocab.mask_id).ids
        self.check_memory(_validate_count(n), len(ids))
        return torch.tensor([ids] * n)

    def masked_texts(self, template: Template | Tensor, seeds: Sequence[int] = (0,)) -> list[MaskedText]:
        """The ids of a template, with masks in its holes, for each seed: it draws the lengths that are left open."""
        encoded = self._encoder.encode_template(template)
        self.check_memory(len(seeds), encoded.longest)
        return self._close(encoded, seeds)

    def _close(self, template: EncodedTemplate, seeds: Sequence[int]) -> list[MaskedText]:
        mask_id = self.vocab.mask_id
        if self.denoiser.process.inserts_tokens:
            return [template.close(mask_id, template.most_lengths())] * len(seeds)
        if not template.is_open:
            return [template.close(mask_id)] * len(seeds)
        posterior = self._hole_lengths(template)
        return [template.close(mask_id, posterior.draw(seed)) for seed in seeds]

    def hole_lengths(self, template: Template, *, draws: int = DEFAULT_DRAWS, seed: int = 0) -> HoleLengths:
        """How probable each length of the holes is whose length the template leaves open, as in `<mask:3..12>`.

        P(n | text) is proportional to the probability of the given text around a hole of n tokens, whatever these
        are, estimated from `draws` maskings of it.
        """
        encoded = self._encoder.encode_template(template)
        if not encoded.is_open:
            raise ValueError("every hole of this template has a length; leave one open, as in <mask:3..12>")
        return self._hole_lengths(encoded, draws, seed)

    def _hole_lengths(self, template: EncodedTemplate, draws: int = DEFAULT_DRAWS, seed: int = 0) -> HoleLengths:
        with self.inference_mode():
            return hole_lengths(self.predictor, template.pieces, draws, seed)

    @property
    def uses_right_context(self) -> bool:
        """Whether text after a hole influences what is generated in it."""
        return not self.denoiser.process.is_left_to_right

    def check_memory(self, n: int, length: int) -> None:
        """ValueError if `n` texts of `length` tokens do not fit in memory."""
        width = self.denoiser.backbone.lm_head.weight.shape[-1]
        check_memory(n, length, self.denoiser.max_length, width)

    def generate(
        self,
        tokens: Tokens,
        sampler: Sampler | str | None = None,
        seed: int | Sequence[int] = 0,
        valid: Tensor | None = None,
        guidance: GuidanceFn | None = None,
    ) -> Samples:
        """Fill a canvas [n, L] of ids with the mask id in its holes; sequence i is drawn with seed + i, or seed[i].

        Positions that are not `valid` [n, L] are padding, which no token attends to. Texts that are longer than the
        model's max_length are generated in windows around their holes, from left to right.
        """
        ranks, filled, seeds = self.distributed, torch.zeros_like(tokens), sequence_seeds(seed, len(tokens))
        first, count = ranks.shard(len(tokens))
        nfe = num_queries = num_sequence_calls = 0
        if count:
            local = slice(first, first + count)
            local_valid = None if valid is None else valid[local]
            (samples,) = deque(
                self.generate_steps(tokens[local], sampler, seeds[local], local_valid, guidance), maxlen=1
            )
            filled[local], nfe, num_queries = samples.tokens, samples.nfe, samples.num_queries
            num_sequence_calls = samples.num_sequence_calls
        filled = ranks.all_reduce(filled)
        return Samples(
            filled,
            int(ranks.all_reduce_max(nfe)),
            int(ranks.all_reduce_scalars(num_queries)[0]),
            self.tokenizer,
            self._text_of(filled, valid),
            int(ranks.all_reduce_scalars(num_sequence_calls)[0]),
        )

    def generate_steps(
        self,
        tokens: Tokens,
        sampler: Sampler | str | None = None,
        seed: int | Sequence[int] = 0,
        valid: Tensor | None = None,
        guidance: GuidanceFn | None = None,
    ) -> Iterator[Samples]:
        """`generate` step by step: the canvas as it is given, then after each step, the finished one last.

        Tokens that are not written yet are the mask; `nfe` counts the network calls so far.
        """
        sampler, last = resolve_sampler(self.denoiser, sampler), tokens
        canvas = Canvas(tokens.to(self.device), sequence_seeds(seed, len(tokens)))
        counted = CountingDenoiser(self.ban_unknown_tokens(self.predictor))
        on_device = None if valid is None else valid.to(self.device)
        steps = iter(self.run_sampler(counted, canvas, sampler, on_device, guidance))
        z: Tokens | None = canvas.tokens
        while z is not None:
            yield Samples(z, counted.nfe, counted.num_queries, self.tokenizer, valid, counted.num_sequences)
            last = z
            with self.inference_mode():  # not around the yield, where the caller's mode must hold
                z = next(steps, None)
        if self.denoiser.process.inserts_tokens:
            counts = counted.nfe, counted.num_queries
            yield Samples(last, *counts, self.tokenizer, self._text_of(last, valid), counted.num_sequences)

    def _text_of(self, tokens: Tokens, valid: Tensor | None) -> Tensor | None:
        """Which positions of finished texts are text: not the masks that a model which inserts tokens has left."""
        if not self.denoiser.process.inserts_tokens:
            return valid
        written = (tokens != self.vocab.mask_id).to("cpu" if valid is None else valid.device)
        return written if valid is None else written & valid

    def run_sampler(
        self,
        denoiser: DenoiserLike,
        canvas: Canvas,
        sampler: Sampler,
        valid: Tensor | None = None,
        guidance: GuidanceFn | None = None,
    ) -> Iterable[Tokens]:
        """The canvas after each step, with calls of `denoiser`: the model's own, or a wrapper around it."""
        process = denoiser.process
        if guidance is not None and process.is_continuous:
            raise ValueError(f"guidance changes noisy tokens, and {process.title} has none: leave it out")
        if guidance is not None and process.predicts_ratios:
            raise ValueError(f"guidance changes predicted tokens, and {process.title} predict none: leave it out")
        if guidance is not None and process.inserts_tokens:
            raise ValueError(
                "guidance belongs to positions of a text, which move while this model inserts tokens: leave it out"
            )
        if self._needs_ragged(sampler, canvas.tokens.shape[1], valid):
            return self._checked(sample_ragged(denoiser, canvas, sampler, valid, self._window_guidance(guidance)))
        padded: DenoiserLike = denoiser if valid is None else PaddedDenoiser(denoiser, valid)
        guided = padded if guidance is None else guidance(padded, canvas.tokens, self.tokenizer)
        return self._checked(sampler.run(guided, canvas))

    def _checked(self, steps: Iterable[Tokens]) -> Iterator[Tokens]:
        """The same steps; after the last of them, refuse a network whose log-probabilities were NaN."""
        yield from steps
        self.denoiser.raise_if_nonfinite()

    def _needs_ragged(self, sampler: Sampler, length: int, valid: Tensor | None) -> bool:
        """Whether texts are generated apart: too long for one call, or with padding that cannot be in one."""
        process, max_length = self.denoiser.process, self.denoiser.max_length
        if process.block_size is not None:  # its cache takes texts of any length
            return False
        if sampler.any_length:
            return valid is not None
        too_long = max_length is not None and length > max_length
        return too_long or (valid is not None and not process.has_masks)

    def _window_guidance(self, guidance: GuidanceFn | None) -> WindowGuidanceFn:
        """Guidance of a text, applied to one of its windows."""

        def guided(denoiser: DenoiserLike, tokens: Tokens, holes: HoleRange) -> DenoiserLike:
            if guidance is None:
                return denoiser
            of_window = guidance.for_holes(*holes) if isinstance(guidance, Guidance) else guidance
            return of_window(denoiser, tokens, self.tokenizer)

        return guided

    @property
    def parses_special_tokens(self) -> bool:
        """Whether special tokens that are spelled out in a prompt, a template or a scored text are parsed as such.

        True for published networks (transformers, LLaDA, Dream), whose texts need [CLS] or chat tokens. Training data
        and the requests of a server or a file (`with_plain_text`) are plain text, whatever they spell.
        """
        return self.denoiser.backbone.capabilities.parses_special_tokens and not self.plain_text

    def ban_unknown_tokens(self, denoiser: DenoiserLike) -> DenoiserLike:
        """The denoiser, wrapped so that ids without a token, of which padded vocabularies have some, and the ids that
        are only context are never drawn."""
        return denoiser if self._known_tokens is None else AllowedTokens(denoiser, self._known_tokens)

    @cached_property
    def _known_tokens(self) -> Tensor | None:
        """bool [V]: the ids that may be drawn, or None if these are all but the mask."""
        known = torch.full((self.vocab.size,), self.tokenizer is None)
        if self.tokenizer is not None:
            known[sorted(self.tokenizer.known_ids)] = True
        known[list(self.vocab.context_ids)] = False
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
        per_token: bool = False,
    ) -> Score:
        """The bound on -log p(text | prompt) of texts (or id sequences), from `draws` random maskings of each.

        With `precision`, 0.01 for one percent, each is drawn as often as it takes for such an error. A request is
        the sequence of the prompt's ids and the text's ids, encoded apart from each other as `complete` does:
        tokens never span the boundary (a space between words belongs to the text), and no special token is added.
        The prompt is visible and not counted. Without one, as with an empty one, it is -log p(text). A text that is
        longer than the model is scored in windows, each by itself; of a prompt that does not fit before its text,
        the beginning is dropped. Thousands of requests share network calls, and each is scored as if alone:
        request i draws from stream i of `seed`, whatever the others are. With `per_token`, the nats of each token
        are in `token_nats`.
        """
        texts = [texts] if isinstance(texts, str) else texts
        prompts = [prompts] if isinstance(prompts, str) else [""] * len(texts) if prompts is None else prompts
        if len(prompts) != len(texts):
            raise ValueError(
                f"there must be one prompt for each text; got {len(texts)} texts and {len(prompts)} prompts"
            )
        if not len(texts):
            raise ValueError("there are no texts to score")
        validate_seed(seed)
        pairs = enumerate(zip(texts, prompts, strict=True))
        requests = [self.score_request(text, prompt, name=f"text {number}") for number, (text, prompt) in pairs]
        config = ScoreConfig(draws, precision, seed)
        with self.inference_mode():
            return score_requests(
                self.predictor, self.objective, requests, config, self.distributed, per_token=per_token
            )

    def score_request(
        self,
        text: str | Sequence[int],
        prompt: str | Sequence[int] = "",
        seed: int | None = None,
        name: str = "the text",
    ) -> ScoreRequest:
        """A text (`name` in errors) and its prompt as ids, for `score_requests`; perhaps with a seed of its own."""
        ids = self.encode(text)
        if not ids:
            raise ValueError(f"{name} is empty: there is nothing to score")
        if set(ids) <= {*self.vocab.context_ids}:
            raise ValueError(f"{name} has only tokens that are not counted, as N in DNA: nothing is to score")
        before, limit = self.encode(prompt) if len(prompt) else [], self.denoiser.max_length
        if before and limit is not None and len(ids) >= limit:
            raise ValueError(
                f"{name} has {len(ids)} tokens, which leaves no room for its prompt in a model of {limit} tokens"
            )
        self.vocab.validate(torch.tensor([*before, *ids]), clean=True)
        stats = TextStats.from_text(text) if isinstance(text, str) and self.tokenizer else None
        return ScoreRequest(ids, before, stats, seed)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.denoiser.backbone.lm_head.weight.device

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        """No gradients and no dropout; training modes are restored afterwards."""
        training = [module for module in self.denoiser.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            for module in training:
                module.training = True
