"""A denoiser with its tokenizer: sample, infill, complete and score text."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from unmask.backbones import AnyBackbone
from unmask.backbones.dit import DiTConfig
from unmask.config import known
from unmask.data.textsize import TextSize
from unmask.data.tokenizer import Tokenizer
from unmask.diffusion.categorical import Choice
from unmask.diffusion.denoise import Denoise
from unmask.diffusion.process import BlockMasking, LeftToRight, Masking
from unmask.evaluation.likelihood import score_texts
from unmask.evaluation.score import Score
from unmask.guidance import Allowed, Guidance, Guide
from unmask.model.denoiser import Denoiser, ModelConfig
from unmask.model.room import check_room
from unmask.model.samples import Completions, Samples
from unmask.objectives import AnyObjective
from unmask.sampling import (
    BY_NAME,
    WINDOWED,
    Ancestral,
    AnySampler,
    Autoregressive,
    Blockwise,
    SemiAutoregressive,
    UniformAncestral,
)
from unmask.sampling.base import Counted, Padded
from unmask.sampling.blockwise import CACHES
from unmask.sampling.canvas import Canvas, Template, after_prompts, blank, from_template
from unmask.sampling.semi import AnyWindowSampler
from unmask.sampling.windows import Holes, Look, row_by_row
from unmask.types import Tokens, Vocab
from unmask.world import World


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"a seed must be 0 or above and below 2^63; got {seed}")


def _having(option: str) -> str:
    """The names of the samplers that have an option."""
    return (
        " or ".join(name for name, kind in BY_NAME.items() if option in kind.__dataclass_fields__) or "none"
    )


def check_tokenizer(tokenizer: Tokenizer | None, vocab: Vocab) -> None:
    """Refuse a tokenizer with ids that the model has not."""
    if tokenizer is not None and tokenizer.size > vocab.size:
        raise ValueError(
            f"the tokenizer has {tokenizer.size} ids and the model only {vocab.size}:"
            " they do not belong together"
        )


class LanguageModel:
    """A denoiser with its tokenizer: sample, infill and score text."""

    def __init__(
        self,
        denoise: Denoiser,
        tokenizer: Tokenizer | None = None,
        world: World = World(),  # noqa: B008
    ) -> None:
        check_tokenizer(tokenizer, denoise.vocab)
        self.denoise = denoise
        self.tokenizer = tokenizer
        self.world = world

    def __repr__(self) -> str:
        weight, limit = self.denoise.backbone.output.weight, self.denoise.max_length
        parameters = sum(parameter.numel() for parameter in self.denoise.parameters())
        length = "any length" if limit is None else f"up to {limit:,} tokens"
        kind = f"{type(self.objective).__name__}, {parameters:,} parameters, vocabulary {self.vocab.size:,}"
        kept = str(weight.dtype).removeprefix("torch.")
        return f"LanguageModel({kind}, {length}, {weight.device}, {kept}, {self.tokenizer})"

    def across(self, world: World) -> LanguageModel:
        """The same model with its work split over the ranks; each of them gets the whole result."""
        return LanguageModel(self.denoise.to(world.device), self.tokenizer, world)

    @classmethod
    def new(cls, backbone: AnyBackbone, objective: AnyObjective, tokenizer: Tokenizer) -> LanguageModel:
        """A model with fresh weights; the mask is one more id after the tokenizer's."""
        vocab = Vocab(size=tokenizer.size + 1, mask=tokenizer.size)
        return cls(ModelConfig(vocab, backbone, objective).build(), tokenizer)

    @property
    def vocab(self) -> Vocab:
        """Which ids there are and which one is the mask."""
        return self.denoise.vocab

    @property
    def objective(self) -> AnyObjective:
        """What the model is trained with."""
        return self.denoise.objective

    def default_sampler(self, steps: int = 128, choice: Choice | None = None) -> AnySampler:
        """The plain sampler of the model's process; `steps` are those of a block, where text has blocks."""
        choice, process = choice or Choice(), self.denoise.process
        if isinstance(process, LeftToRight):
            return Autoregressive(choice)
        if isinstance(process, BlockMasking):
            return Blockwise(sampler=Ancestral(steps, choice), stop=self.vocab.end)
        kind = Ancestral if isinstance(process, Masking) else UniformAncestral
        return kind(steps, choice)

    def sampler(
        self,
        name: str,
        steps: int = 128,
        choice: Choice | None = None,
        *,
        block: int | None = None,
        cache: str = "none",
        **options: Any,
    ) -> AnySampler:
        """A sampler by its name, "default" for the plain one; those that take no steps leave them out.

        With `block`, text is written from left to right in blocks of so many tokens, the steps being those of
        a block, and `cache` names what is kept meanwhile: none, prefix or dual. `options` are the sampler's
        own.
        """
        kept, causal = known(cache, CACHES, "cache"), isinstance(self.denoise.process, BlockMasking)
        if cache != "none" and (causal or block is None):
            why = "this model has an exact one" if causal else "say how long a block is"
            raise ValueError(f"a {cache} cache is for masked diffusion that is written in blocks: {why}")
        if name == "default" and block is None:
            for option in options:
                raise ValueError(f"{option} is for {_having(option)}: name that sampler, too")
            return self.default_sampler(steps, choice)
        kind: Any = known(name if name != "default" else "confidence", BY_NAME, "sampler")
        counted = {"steps": steps} if "steps" in kind.__dataclass_fields__ else {}
        unknown = [option for option in options if option not in kind.__dataclass_fields__]
        if unknown:
            raise ValueError(f"the sampler {name!r} has no {unknown[0]}, which is for {_having(unknown[0])}")
        chosen: AnyWindowSampler = kind(**counted, **options, choice=choice or Choice())
        if block is None and not causal:
            return chosen
        return Blockwise(block, chosen, kept, self.vocab.end)

    def sample(
        self,
        n: int = 1,
        length: int | None = None,
        *,
        prompt: str | Sequence[int] = (),
        sampler: AnySampler | str | None = None,
        seed: int = 0,
        guide: Guide | None = None,
    ) -> Samples:
        """`n` texts of `length` tokens (the model's, if not given) that begin with the prompt.

        Row i is drawn with seed + i: it is the same text whatever `n` is. A `guide` such as
        `Guidance(scale=1.5)` says what is asked of the texts beyond the model.
        """
        return self.fill(self.blank(n, length, prompt), sampler, seed, guide=guide)

    def infill(
        self,
        template: Template | Tensor,
        *,
        n: int = 1,
        sampler: AnySampler | str | None = None,
        seed: int = 0,
        guide: Guide | None = None,
    ) -> Samples:
        """`n` versions of the template with its holes filled: `<mask:12>` stands for twelve tokens.

        Ids, as a tensor or list with the mask id in its holes, are taken too. With
        `Guidance(match="[0-9]+")` as a guide, the text of each hole matches the pattern.
        """
        return self.fill(self.holes(template, n), sampler, seed, guide=guide)

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        length: int = 128,
        *,
        sampler: AnySampler | str | None = None,
        seed: int = 0,
        guide: Guide | None = None,
    ) -> Completions:
        """At most `length` tokens after each prompt, up to the end of the text if the model knows one.

        All prompts are gone on from together, and each with its own seed, `seed` and those after it: what is
        written is the same as alone.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts are a list, as in [{prompts[:20]!r}]; got one text")
        process, encoded = self.denoise.process, [self._ids(prompt) for prompt in prompts]
        sampler = self._chosen(sampler)
        if isinstance(process, Masking) and isinstance(sampler, WINDOWED):
            # Whose noise then is that of what is written, wherever it begins.
            sampler = Blockwise(sampler=sampler, stop=self.vocab.end)
        block = process.block if isinstance(process, BlockMasking) else None
        if isinstance(length, int):
            self.check_room(len(encoded), max(map(len, encoded), default=0) + length)
        tokens, valid = after_prompts(encoded, length, self.vocab.mask, block)
        written = valid & (tokens == self.vocab.mask)
        filled = self.fill(tokens, sampler, seed, None if bool(valid.all()) else valid, guide)
        return Completions(**vars(filled), written=written, end=self.vocab.end)

    def blank(self, n: int = 1, length: int | None = None, prompt: str | Sequence[int] = ()) -> Tokens:
        """The canvas [n, length] that `sample` fills: masks after the prompt."""
        length = self.denoise.max_length if length is None else length
        if length is None:
            raise ValueError("this model has no longest length; say how many tokens to write with length=")
        self.check_room(n, length)
        return blank(n, length, self.vocab.mask, self._ids(prompt))

    def holes(self, template: Template | Tensor, n: int = 1) -> Tokens:
        """The canvas [n, L] that `infill` fills: the template's ids, with masks in its holes."""
        if isinstance(template, list) and all(isinstance(piece, int) for piece in template):
            template = torch.tensor(self._ids(template))
        if isinstance(template, Tensor):
            if template.numel() != template.shape[-1]:
                raise ValueError(f"a template is one row of ids; got shape {list(template.shape)}")
            ids = template.flatten().tolist()
            if self.vocab.mask not in ids:
                raise ValueError(f"the template has no hole: put the mask id {self.vocab.mask} where one is")
        else:
            if isinstance(template, str) and self.tokenizer is not None and self.reads_specials:
                spelled = self.tokenizer.inner.id_to_token(self.vocab.mask)
                template = template.replace(spelled, "<mask>") if spelled else template  # as in [MASK]
            ids = from_template(template, self._ids, self.vocab.mask)
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"n must be at least 1; got {n!r}")
        self.check_room(n, len(ids))
        return torch.tensor([ids] * n)

    @property
    def sees_ahead(self) -> bool:
        """Whether what follows a hole matters for what is written into it."""
        return not isinstance(self.denoise.process, LeftToRight)

    def check_room(self, rows: int, length: int) -> None:
        """Refuse so many texts of so many tokens if they cannot be held in memory."""
        width = self.denoise.backbone.output.weight.shape[-1]
        check_room(rows, length, self.denoise.max_length, width)

    def fill(
        self,
        tokens: Tokens,
        sampler: AnySampler | str | None = None,
        seed: int = 0,
        valid: Tensor | None = None,
        guide: Guide | None = None,
    ) -> Samples:
        """Fill a canvas [n, L] of ids with the mask id in its holes; row i is drawn with seed + i.

        Where it is not `valid` [n, L], there is padding, which nobody looks at. Texts longer than the model
        reads at once are written in windows around their holes, from left to right.
        """
        world, written = self.world, torch.zeros_like(tokens)
        first, count = world.share(len(tokens))
        calls = head_rows = 0
        if count:
            mine = slice(first, first + count)
            text = None if valid is None else valid[mine]
            for frame in self.frames(tokens[mine], sampler, seed + first, text, guide):
                filled = frame
            written[first : first + count] = filled.tokens
            calls, head_rows = filled.network_calls, filled.head_rows
        return Samples(
            world.summed(written), int(world.largest(calls)), int(world.total(head_rows)[0]), self.tokenizer
        )

    def frames(
        self,
        tokens: Tokens,
        sampler: AnySampler | str | None = None,
        seed: int = 0,
        valid: Tensor | None = None,
        guide: Guide | None = None,
    ) -> Iterator[Samples]:
        """Watch `fill`: the canvas as it is given, then after each step, the filled one last.

        The ids of a frame have masks where nothing is written yet; network calls are counted up to it.
        """
        _check_seed(seed)
        sampler = self._chosen(sampler)
        canvas = Canvas(tokens.to(self.device), tuple(seed + row for row in range(len(tokens))))
        counted = Counted(self.writable(self.denoise))
        valid = None if valid is None else valid.to(self.device)
        if self._row_by_row(sampler, tokens.shape[1], valid):
            steps = iter(row_by_row(counted, canvas, sampler, valid, self._look(guide)))
        else:
            asked: Denoise = counted if valid is None else Padded(counted, valid)
            if guide is not None:
                asked = guide(asked, canvas.tokens, self.tokenizer)
            steps = iter(sampler.run(asked, canvas))
        z: Tokens | None = canvas.tokens
        while z is not None:
            yield Samples(z, counted.calls, counted.head_rows, self.tokenizer)
            with self.inference():  # not around the yield: who watches keeps a mode of their own
                z = next(steps, None)

    def _chosen(self, sampler: AnySampler | str | None) -> AnySampler:
        """The sampler that was given, as an object or by its name; or the plain one."""
        if isinstance(sampler, str):
            return self.sampler(sampler)
        if sampler is not None and not isinstance(sampler, get_args(AnySampler)):
            raise ValueError(
                f"sampler must be one of unmask's, as in unmask.Ancestral(steps=64); got {sampler!r}"
            )
        return sampler or self.default_sampler()

    def _row_by_row(self, sampler: AnySampler, length: int, valid: Tensor | None) -> bool:
        """Whether texts are written apart: too long for one call, or with padding that cannot be in one."""
        process, longest = self.denoise.process, self.denoise.max_length
        if isinstance(process, BlockMasking):  # which keeps what it has read of any length
            return False
        if isinstance(sampler, SemiAutoregressive):
            return valid is not None
        padded = valid is not None and not isinstance(process, Masking)
        return padded or (longest is not None and length > longest)

    def _look(self, guide: Guide | None) -> Look:
        """What is asked of a text, asked of a window."""

        def look(denoise: Denoise, tokens: Tokens, holes: Holes) -> Denoise:
            if guide is None:
                return denoise
            mine = guide.of_holes(*holes) if isinstance(guide, Guidance) else guide
            return mine(denoise, tokens, self.tokenizer)

        return look

    @property
    def reads_specials(self) -> bool:
        """Whether special tokens spelled out in a prompt, a template or a scored text are read as such.

        Those of networks of others (transformers, LLaDA, Dream) are: their texts need [CLS] or chat marks.
        What is trained on, and what a server is sent, is text whatever it spells.
        """
        backbone = self.denoise.config.backbone
        return not isinstance(backbone, DiTConfig) or backbone.llama is not None

    def writable(self, denoise: Denoise) -> Denoise:
        """The denoiser as samplers are to ask it: ids that the tokenizer has no token for are never drawn.

        Published vocabularies are padded. A model whose ids are all known is asked as it is.
        """
        return denoise if self._known is None else Allowed(denoise, self._known)

    @cached_property
    def _known(self) -> Tensor | None:
        """Booleans [V]: the ids that the tokenizer knows, or None where those are all but the mask."""
        if self.tokenizer is None:
            return None
        known = torch.zeros(self.vocab.size, dtype=torch.bool)
        known[sorted(self.tokenizer.known)] = True
        known[self.vocab.mask] = True
        if bool(known.all()):
            return None
        known[self.vocab.mask] = False
        return known if bool(known.any()) else None

    def score(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        draws: int = 64,
        precision: float | None = None,
        seed: int = 0,
    ) -> Score:
        """The bound on -log p of the texts (or id sequences), from `draws` random maskings of each.

        With `precision`, 0.01 for one percent, each is masked as often as it takes for such an error.
        """
        texts = [texts] if isinstance(texts, str) else texts
        _check_seed(seed)
        sized = []
        for number, text in enumerate(texts):
            ids = self._ids(text)
            if not ids:
                raise ValueError(f"text {number} is empty: there is nothing to score")
            self.vocab.check(torch.tensor(ids), data=True)
            sized.append((ids, TextSize.of(text) if isinstance(text, str) and self.tokenizer else None))
        if not sized:
            raise ValueError("there are no texts to score")
        with self.inference():
            return score_texts(self.denoise, self.objective, sized, draws, seed, precision, self.world)

    def _ids(self, text: str | Sequence[int]) -> list[int]:
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
            ids = self.tokenizer.encode(text, specials=self.reads_specials)
            if self.vocab.mask in ids:
                spelled = self.tokenizer.inner.id_to_token(self.vocab.mask)
                raise ValueError(
                    f"{text[:40]!r} spells the mask token {spelled}, which is written over; `infill` fills"
                    " holes"
                )
            return ids
        if not all(word.isdecimal() for word in text.split()):
            raise ValueError(f"this model has no tokenizer: give token ids (as in '5 17 2'), not {text!r}")
        return self._ids([int(word) for word in text.split()])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.denoise.backbone.output.weight.device

    @contextmanager
    def inference(self) -> Iterator[None]:
        """No gradients and no dropout, and afterwards all as it was."""
        awake = [module for module in self.denoise.modules() if module.training]
        for module in awake:
            module.training = False
        try:
            with torch.inference_mode():
                yield
        finally:
            for module in awake:
                module.training = True
