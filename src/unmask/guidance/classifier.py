"""Guidance: denoisers around a denoiser, whose log_x they pull towards a condition.

Each is built from a denoiser and is one itself, so that they nest: `Allowed(ClassifierFree(...), ...)`. A
line keeps its mass S: it sums to one afterwards if it did before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from unmask.diffusion.denoise import Around, Denoise
from unmask.guidance.places import asked, first_place, fits, numbers, with_mass_of
from unmask.types import Each, LogX, Rows, Times, Tokens

AT_ONCE = 1 << 20
"""Tokens that a classifier reads at a time."""


class ClassifierFree(Around):
    """log_x = (1 + w) log p(. | given) - w log p(. | given hidden), w being the `scale`.

    `given` [L] or, by the numbers of the sequences, [B, L] are booleans: the condition, such as a prompt or a
    class token, which the mask hides for the second answer. A call reads twice as many sequences, at once.
    """

    def __init__(self, denoise: Denoise, given: Tensor, scale: float) -> None:
        super().__init__(denoise)
        if given.dtype != torch.bool or given.ndim not in (1, 2):
            raise ValueError(
                f"given must be booleans [L] or [B, L]; got {given.dtype} of shape {list(given.shape)}"
            )
        if not 0 <= scale < torch.inf:
            raise ValueError(f"the scale of guidance must be 0 (none) or above; got {scale}")
        self.given, self.scale = given, scale

    def __call__(
        self,
        z: Tokens,
        t: Times,
        rows: Rows,
        *,
        each: Each | None = None,
        which: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        if first_place(context) is not None:
            raise ValueError(
                "classifier-free guidance reads a text with its condition and without it, which have no cache"
                " in common; sample without a cache"
            )
        which = numbers(z, which)
        fits(z, which, None, self.given.shape, "the given places")
        given = self.given.to(z.device)
        given = given if given.ndim == 1 else given[which]
        both = torch.cat([z, z.masked_fill(given, self.vocab.mask)])
        context = {name: _twice(value, len(z)) for name, value in context.items()}
        sequence, place = asked(rows)
        copies = (torch.cat([sequence, sequence + len(z)]), torch.cat([place, place]))
        lines = self.denoise(both, torch.cat([t, t]), copies, which=torch.cat([which, which]), **context)
        log_x = self._guided(*lines.chunk(2))
        return log_x if each is None else each(log_x, slice(None))

    def _guided(self, given: LogX, hidden: LogX) -> LogX:
        # What both exclude, as the mask, stays excluded; what only the second does is left to the first.
        hidden = torch.where(hidden == -torch.inf, given, hidden)
        pulled = given + self.scale * (given - hidden).nan_to_num()
        return with_mass_of(given, pulled)


class Classifier(Protocol):
    """What a noisy text says about the property that is wanted."""

    def __call__(self, z: Tokens) -> Tensor:
        """log p(y | z) [N] for sequences z [N, L], some of whose tokens are masks."""
        ...


class Enumerated(Around):
    """log_x[v] + scale log p(y | z with v in the asked place), for every v.

    Exact, and for small vocabularies: the classifier reads V - 1 sequences for each asked place.
    """

    def __init__(self, denoise: Denoise, classifier: Classifier, scale: float = 1.0) -> None:
        super().__init__(denoise)
        self.classifier, self.scale = classifier, _finite(scale)

    def __call__(
        self,
        z: Tokens,
        t: Times,
        rows: Rows,
        *,
        each: Each | None = None,
        which: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        _whole(context)
        sequence, place = asked(rows)

        def guided(log_x: LogX, part: slice | Tensor) -> Tensor:
            said = self._said(z[sequence[part]], place[part]).to(log_x)
            log_x = with_mass_of(log_x, log_x + self.scale * said)
            return log_x if each is None else each(log_x, part)

        return self.denoise(z, t, rows, each=guided, which=which, **context)

    def _said(self, z: Tokens, place: Tensor) -> Tensor:
        """log p(y | z with v at its place) [n, V] for sequences [n, L]; nothing is said of the mask."""
        words = torch.arange(self.vocab.size, device=z.device)
        words = words[words != self.vocab.mask]
        said = z.new_zeros(len(z), self.vocab.size, dtype=torch.float64)
        at_once = max(1, AT_ONCE // (len(words) * z.shape[1]))
        for first in range(0, len(z), at_once):
            part = slice(first, first + at_once)
            tried = z[part, None].repeat(1, len(words), 1)
            tried[torch.arange(len(tried)), :, place[part]] = words
            said[part, words] = self.classifier(tried.flatten(0, 1)).view(-1, len(words)).double()
        return said


class EmbeddedClassifier(Protocol):
    """A classifier that a gradient can be taken of: it reads embedded tokens."""

    @property
    def embedding(self) -> Tensor:
        """[V, D]: what stands for each token, the mask included."""
        ...

    def __call__(self, embedded: Tensor) -> Tensor:
        """log p(y | z) [B] for the embedded tokens [B, L, D] of noisy sequences."""
        ...


class FirstOrder(Around):
    """log_x[v] + scale g[v], g being the gradient of log p(y | z) with respect to the one-hot
    input of the asked place.

    For large vocabularies: the classifier reads each sequence once, forwards and backwards, whatever V is.
    It is exact where log p(y | z) is linear in the one-hot inputs, and else as good as a tangent.
    """

    def __init__(self, denoise: Denoise, classifier: EmbeddedClassifier, scale: float = 1.0) -> None:
        super().__init__(denoise)
        self.classifier, self.scale = classifier, _finite(scale)
        if len(classifier.embedding) != self.vocab.size:
            raise ValueError(
                f"the classifier embeds {len(classifier.embedding)} tokens and the model has"
                f" {self.vocab.size}: they must share a vocabulary"
            )

    def __call__(
        self,
        z: Tokens,
        t: Times,
        rows: Rows,
        *,
        each: Each | None = None,
        which: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        _whole(context)
        embedding = self.classifier.embedding.detach()
        slope = self._slope(z, embedding)[asked(rows)]  # [N, D]: a one-hot's gradient is its product with E

        def guided(log_x: LogX, part: slice | Tensor) -> Tensor:
            said = slope[part] @ embedding.t()
            log_x = with_mass_of(log_x, log_x + self.scale * said.to(log_x))
            return log_x if each is None else each(log_x, part)

        return self.denoise(z, t, rows, each=guided, which=which, **context)

    def _slope(self, z: Tokens, embedding: Tensor) -> Tensor:
        """d log p(y | z)/d embedded tokens [B, L, D]."""
        with torch.inference_mode(False), torch.enable_grad():
            embedded = embedding[z].clone().requires_grad_()  # a clone, as z may come from inference mode
            (slope,) = torch.autograd.grad(self.classifier(embedded).sum(), embedded)
        return slope


def _finite(scale: float) -> float:
    if not math.isfinite(scale):
        raise ValueError(f"the scale of guidance must be a finite number; got {scale}")
    return scale


def _twice(value: Any, rows: int) -> Any:
    """What a call says of each of its sequences, said of their copies too."""
    return torch.cat([value, value]) if isinstance(value, Tensor) and len(value) == rows else value


def _whole(context: Mapping[str, Any]) -> None:
    if first_place(context) is not None:
        raise ValueError(
            "a classifier must read the whole text, and a sampler with a cache shows a part of it at a time;"
            " sample without one"
        )
