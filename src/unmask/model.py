"""A backbone read through its objective (`Denoiser`), and that with a tokenizer (`LanguageModel`)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from unmask.backbones.base import Backbone
from unmask.backbones.dit import DiTConfig
from unmask.backbones.head import in_parts
from unmask.backbones.masks import Order
from unmask.config import did_you_mean
from unmask.data.textsize import TextSize
from unmask.data.tokenizer import Tokenizer
from unmask.diffusion.categorical import Choice
from unmask.diffusion.process import BlockMasking, LeftToRight, Masking, Process
from unmask.evaluation.likelihood import score_texts
from unmask.evaluation.score import Score
from unmask.objectives import AnyObjective
from unmask.objectives.reading import Reading
from unmask.sampling import (
    BY_NAME,
    WINDOWED,
    Ancestral,
    AnySampler,
    Autoregressive,
    Blockwise,
    UniformAncestral,
)
from unmask.sampling.base import Counted, Padded
from unmask.sampling.canvas import Canvas, Template, after_prompts, blank, from_template
from unmask.sampling.semi import AnyWindowSampler
from unmask.types import DamagedError, Each, Rows, Times, Tokens, Vocab
from unmask.world import World


@dataclass(frozen=True)
class ModelConfig:
    """All that a folder must say to rebuild a denoiser.

    `tells_sigma`: the network is told -log alpha(t) instead of t, as published weights expect.
    """

    vocab: Vocab
    backbone: DiTConfig
    objective: AnyObjective
    tells_sigma: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.objective, get_args(AnyObjective)):
            raise ValueError(
                f"the objective must be one of unmask's, as in unmask.MDLM(); got {self.objective!r}"
            )

    def build(self) -> Denoiser:
        """A denoiser with fresh weights."""
        return Denoiser(self)


class Denoiser(nn.Module):
    """log_x = objective.read(head(encode(z, t)[rows])): the library's side of the seam `Denoise`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.in_bf16 = False
        self.backbone: Backbone = config.backbone.build(config.vocab)
        if self.backbone.causal != isinstance(self.process, LeftToRight):
            raise ValueError(
                "an autoregressive objective needs a causal backbone, and masked or uniform diffusion one"
                f" that is not; got causal={self.backbone.causal} with {type(config.objective).__name__}"
            )

    @property
    def vocab(self) -> Vocab:
        """Which ids there are and which one is the mask."""
        return self.config.vocab

    @property
    def objective(self) -> AnyObjective:
        """What the model is trained with."""
        return self.config.objective

    @property
    def process(self) -> Process:
        """How text is destroyed."""
        return self.config.objective.process

    @property
    def normalised(self) -> bool:
        """Whether every line of log_x sums to one."""
        return self.config.objective.normalised

    @property
    def timeless(self) -> bool:
        """Whether the answer depends on z alone."""
        return not self.backbone.timed and not self.config.objective.reads_alpha

    @property
    def max_length(self) -> int | None:
        """The longest sequence the network takes."""
        return self.backbone.max_length

    @property
    def shifted(self) -> bool:
        """Whether a token is predicted where the one before it is read."""
        return self.backbone.shifted

    def forward(
        self,
        z: Tokens,
        t: Times,
        rows: Rows,
        *,
        each: Each | None = None,
        which: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        """log_x [N, V], or what `each` says of its lines, at the rows of z [B, L], times t [B, 1 or L]."""
        self._check(z, t, rows, context.get("order"))
        with torch.autocast(z.device.type, torch.bfloat16) if self.in_bf16 else nullcontext():
            hidden = self.backbone.encode(z, self._told(t), rows, **context)
        alpha = self._visible_share(z, t, rows)
        if each is None:
            said = self.objective.read(self.backbone.head(hidden), alpha, self.vocab)
        else:
            head, reading = self.backbone.output, Reading(self.objective, alpha, self.vocab, each)
            said = in_parts(hidden, head.weight, head.bias, reading)
        # In training the loop looks at the loss itself, and skips the step.
        if not self.training and bool(said.isnan().any()):
            raise DamagedError("the network's log-probabilities are NaN; its weights are damaged")
        return said

    def to_bf16(self) -> None:
        """From now on compute hidden states with products of bfloat16 numbers, the logits as before.

        The matrices are rounded once and for all: half the memory, and on machines with such instructions
        about half the time. Sums between layers, norms, the head and the choice of tokens stay in float32.
        """
        self.in_bf16 = True
        for module in self.backbone.modules():
            if isinstance(module, nn.Linear) and module is not self.backbone.output:
                module.weight.data = module.weight.data.bfloat16()

    def _told(self, t: Times) -> Tensor:
        process = self.process
        if self.config.tells_sigma and not isinstance(process, LeftToRight):
            return process.schedule.sigma(t)
        return t

    def _visible_share(self, z: Tokens, t: Times, rows: Rows) -> Tensor:
        """alpha(t) [N, 1] at masked rows; a visible row is read as the decoder of z_0 reads it: 0."""
        process = self.process
        if isinstance(process, LeftToRight):
            return torch.zeros_like(z[rows], dtype=torch.float32)[:, None]
        alpha = process.schedule.alpha(t).expand(z.shape)[rows]
        return torch.where(z[rows] == self.vocab.mask, alpha, 0)[:, None]

    def _check(self, z: Tokens, t: Times, rows: Rows, order: Order | None) -> None:
        if z.ndim != 2:
            raise ValueError(f"tokens must be [B, L]; got shape {list(z.shape)}")
        if isinstance(rows, Tensor) and (rows.shape != z.shape or rows.dtype != torch.bool):
            raise ValueError(
                f"rows must be booleans of the tokens' shape {list(z.shape)};"
                f" got {rows.dtype} {list(rows.shape)}"
            )
        self.vocab.check(z)
        # A token that is read twice, hidden and clean, is one of the text.
        length = z.shape[1] if order is None else order.places
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than the model's {self.max_length}")
        if t.ndim != 2 or t.shape[0] != len(z) or t.shape[1] not in (1, z.shape[1]):
            raise ValueError(
                f"t must be [B, 1] or [B, L] for tokens {list(z.shape)}; got shape {list(t.shape)}"
            )
        if not bool(((t >= 0) & (t <= 1)).all()):
            worst = float(t.flatten()[((t - 0.5).abs().nan_to_num(torch.inf)).argmax()])
            raise ValueError(f"times must be in [0, 1], 0 for data and 1 for all mask; got {worst}")


@dataclass(frozen=True)
class Samples:
    """What a sampler wrote: ids [n, L], how often the network was called, and the texts."""

    tokens: Tokens
    network_calls: int
    head_rows: int
    tokenizer: Tokenizer | None

    @property
    def ids(self) -> list[list[int]]:
        """The ids of each text."""
        rows: list[list[int]] = self.tokens.tolist()
        return rows

    @property
    def texts(self) -> list[str]:
        """The ids as text."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: its samples are ids, in .ids")
        return [self.tokenizer.decode(ids) for ids in self.ids]

    @property
    def text(self) -> str:
        """The first text."""
        return self.texts[0]


@dataclass(frozen=True)
class Completions(Samples):
    """What was written after prompts of different lengths: `written` are its places [n, L]."""

    written: Tensor
    end: int | None

    @property
    def ids(self) -> list[list[int]]:
        """The ids after each prompt, up to the one that ends a text."""
        rows = [row[new].tolist() for row, new in zip(self.tokens, self.written, strict=True)]
        return [row[: row.index(self.end)] if self.end in row else row for row in rows]


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"a seed must be 0 or above and below 2^63; got {seed}")


class LanguageModel:
    """A denoiser with its tokenizer: sample, infill and score text."""

    def __init__(
        self,
        denoise: Denoiser,
        tokenizer: Tokenizer | None = None,
        world: World = World(),  # noqa: B008
    ) -> None:
        if tokenizer is not None and tokenizer.size > denoise.vocab.size:
            raise ValueError(
                f"the tokenizer has {tokenizer.size} ids and the model only {denoise.vocab.size}:"
                " they do not belong together"
            )
        self.denoise = denoise
        self.tokenizer = tokenizer
        self.world = world

    def across(self, world: World) -> LanguageModel:
        """The same model with its work split over the ranks; each of them gets the whole result."""
        return LanguageModel(self.denoise.to(world.device), self.tokenizer, world)

    @classmethod
    def new(cls, backbone: DiTConfig, objective: AnyObjective, tokenizer: Tokenizer) -> LanguageModel:
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

    def sampler(self, name: str, steps: int = 128, choice: Choice | None = None) -> AnySampler:
        """A sampler by its name, "default" for the plain one; those that take no steps leave them out."""
        if name == "default":
            return self.default_sampler(steps, choice)
        if name not in BY_NAME:
            raise ValueError(
                f"there is no sampler {name!r}{did_you_mean(name, BY_NAME)}; there are {', '.join(BY_NAME)}"
            )
        kind: Any = BY_NAME[name]
        counted = {"steps": steps} if "steps" in kind.__dataclass_fields__ else {}
        chosen: AnyWindowSampler = kind(**counted, choice=choice or Choice())
        if isinstance(self.denoise.process, BlockMasking):
            return Blockwise(sampler=chosen, stop=self.vocab.end)
        return chosen

    def sample(
        self,
        n: int = 1,
        length: int | None = None,
        *,
        prompt: str | Sequence[int] = (),
        sampler: AnySampler | None = None,
        seed: int = 0,
    ) -> Samples:
        """`n` texts of `length` tokens (the model's, if not given) that begin with the prompt.

        Row i is drawn with seed + i: it is the same text whatever `n` is.
        """
        return self.fill(self.blank(n, length, prompt), sampler, seed)

    def infill(
        self, template: Template | Tensor, *, n: int = 1, sampler: AnySampler | None = None, seed: int = 0
    ) -> Samples:
        """`n` versions of the template with its holes filled: `<mask:12>` stands for twelve tokens.

        Ids, as a tensor or list with the mask id in its holes, are taken too.
        """
        return self.fill(self.holes(template, n), sampler, seed)

    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        length: int = 128,
        *,
        sampler: AnySampler | None = None,
        seed: int = 0,
    ) -> Completions:
        """At most `length` tokens after each prompt, up to the end of the text if the model knows one.

        All prompts are gone on from together, and each with its own seed, `seed` and those after it: what is
        written is the same as alone.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts are a list, as in [{prompts[:20]!r}]; got one text")
        process, encoded = self.denoise.process, [self._ids(prompt) for prompt in prompts]
        if isinstance(process, Masking) and not isinstance(sampler, Blockwise):
            sampler = sampler or self.default_sampler()
            if isinstance(
                sampler, WINDOWED
            ):  # whose noise then is that of what is written, wherever it begins
                sampler = Blockwise(sampler=sampler, stop=self.vocab.end)
        block = process.block if isinstance(process, BlockMasking) else None
        tokens, valid = after_prompts(encoded, length, self.vocab.mask, block)
        if not bool(valid.all()) and not isinstance(process, Masking | BlockMasking):
            raise ValueError(
                "prompts of different lengths can be gone on from together by masked and block diffusion;"
                f" this model was trained on {type(process).__name__}: give it one prompt at a time"
            )
        written = valid & (tokens == self.vocab.mask)
        filled = self.fill(tokens, sampler, seed, None if bool(valid.all()) else valid)
        return Completions(**vars(filled), written=written, end=self.vocab.end)

    def blank(self, n: int = 1, length: int | None = None, prompt: str | Sequence[int] = ()) -> Tokens:
        """The canvas [n, length] that `sample` fills: masks after the prompt."""
        length = self.denoise.max_length if length is None else length
        if length is None:
            raise ValueError("this model has no longest length; say how many tokens to write with length=")
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
            ids = from_template(template, self._ids, self.vocab.mask)
        if n < 1:
            raise ValueError(f"n must be at least 1; got {n}")
        return torch.tensor([ids] * n)

    def fill(
        self,
        tokens: Tokens,
        sampler: AnySampler | None = None,
        seed: int = 0,
        valid: Tensor | None = None,
    ) -> Samples:
        """Fill a canvas [n, L] of ids with the mask id in its holes; row i is drawn with seed + i.

        Where it is not `valid` [n, L], there is padding, which nobody looks at.
        """
        world, written = self.world, torch.zeros_like(tokens)
        first, count = world.share(len(tokens))
        calls = head_rows = 0
        if count:
            mine = slice(first, first + count)
            text = None if valid is None else valid[mine]
            for frame in self.frames(tokens[mine], sampler, seed + first, text):
                filled = frame
            written[first : first + count] = filled.tokens
            calls, head_rows = filled.network_calls, filled.head_rows
        return Samples(
            world.summed(written), int(world.largest(calls)), int(world.total(head_rows)[0]), self.tokenizer
        )

    def frames(
        self,
        tokens: Tokens,
        sampler: AnySampler | None = None,
        seed: int = 0,
        valid: Tensor | None = None,
    ) -> Iterator[Samples]:
        """Watch `fill`: the canvas as it is given, then after each step, the filled one last.

        The ids of a frame have masks where nothing is written yet; network calls are counted up to it.
        """
        _check_seed(seed)
        if sampler is not None and not isinstance(sampler, get_args(AnySampler)):
            raise ValueError(
                f"sampler must be one of unmask's, as in unmask.Ancestral(steps=64); got {sampler!r}"
            )
        canvas = Canvas(tokens.to(self.device), tuple(seed + row for row in range(len(tokens))))
        counted = Counted(self.denoise)
        asked = counted if valid is None else Padded(counted, valid.to(self.device))
        z: Tokens | None = canvas.tokens
        steps = iter((sampler or self.default_sampler()).run(asked, canvas))
        while z is not None:
            yield Samples(z, counted.calls, counted.head_rows, self.tokenizer)
            with self.inference():  # not around the yield: who watches keeps a mode of their own
                z = next(steps, None)

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
            return self.tokenizer.encode(text)
        if not all(word.isdecimal() for word in text.split()):
            raise ValueError(f"this model has no tokenizer: give token ids (as in '5 17 2'), not {text!r}")
        return self._ids([int(word) for word in text.split()])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.denoise.parameters()).device

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
