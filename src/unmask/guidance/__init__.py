"""What is asked of a text beyond the model: functions from `Denoise` to `Denoise`, which nest.

`Guidance` holds those that a command or a request can ask for; anything else of the type `Guide` will do,
such as a classifier of one's own: `lambda denoise, tokens, tokenizer: Enumerated(denoise, classifier, 2.0)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from unmask.data.tokenizer import Tokenizer
    from unmask.diffusion.denoise import Denoise
    from unmask.guidance.allowed import Allowed as Allowed
    from unmask.guidance.classifier import ClassifierFree as ClassifierFree
    from unmask.guidance.classifier import Enumerated as Enumerated
    from unmask.guidance.classifier import FirstOrder as FirstOrder
    from unmask.guidance.pattern import Matching as Matching
    from unmask.guidance.pattern import Pattern
    from unmask.types import Tokens

Guide: TypeAlias = "Callable[[Denoise, Tokens, Tokenizer | None], Denoise]"
"""A denoiser around another, for a canvas [B, L] and its tokenizer."""

# Found when they are asked for: a process that only works out patterns does without torch.
_HOME = {
    "Allowed": "allowed",
    "ClassifierFree": "classifier",
    "Enumerated": "classifier",
    "FirstOrder": "classifier",
    "Matching": "pattern",
}


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance by what is visible, patterns that holes must match, tokens never to be
    written.

    One `match` is for all holes; of several, each is for one, and None for a hole that may hold anything.
    """

    scale: float = 0.0
    match: Pattern | tuple[Pattern | None, ...] | None = None
    never: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.scale < float("inf"):
            raise ValueError(f"the scale of guidance must be 0 (none) or above; got {self.scale}")

    def __call__(self, denoise: Denoise, tokens: Tokens, tokenizer: Tokenizer | None) -> Denoise:
        """Those that are asked for, the pattern last: nothing that others do makes a text not match."""
        from unmask.guidance.allowed import Allowed
        from unmask.guidance.classifier import ClassifierFree
        from unmask.guidance.pattern import Matching

        mask = denoise.vocab.mask
        if self.scale:
            denoise = ClassifierFree(denoise, tokens != mask, self.scale)
        if self.never:
            denoise = Allowed.never(denoise, self.never)
        if self.match is not None:
            if tokenizer is None:
                raise ValueError("a pattern is about text, and this model has no tokenizer")
            denoise = Matching(denoise, tokens, self.match, tokenizer)
        return denoise

    def of_holes(self, first: int, last: int, total: int, whole: bool) -> Guidance:
        """The same for a window that has the holes `first` to `last` - 1 of a text, `whole` or in part."""
        if self.match is None:
            return self
        if not whole:
            raise ValueError(
                "a hole that must match a pattern is written as a whole, and a hole here is longer than the"
                " model can read with some text beside it: make it shorter"
            )
        if not isinstance(self.match, tuple):
            return self
        if len(self.match) != total:
            raise ValueError(
                f"a text with {total} holes needs as many patterns, or one; got {len(self.match)}"
            )
        return replace(self, match=self.match[first:last])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = ["Allowed", "ClassifierFree", "Enumerated", "FirstOrder", "Guidance", "Guide", "Matching"]
