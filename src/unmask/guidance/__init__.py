"""What is asked of a text beyond the model: functions from `Denoise` to `Denoise`, which nest.

`Guidance` holds those that a command or a request can ask for; anything else of the type `Guide` will do,
such as a classifier of one's own:
`lambda denoiser, tokens, tokenizer: ExactClassifierGuidance(denoiser, classifier, 2.0)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from unmask.data.tokenizers import BaseTokenizer
    from unmask.diffusion.denoiser import DenoiserLike
    from unmask.guidance.allowed_tokens import AllowedTokens as AllowedTokens
    from unmask.guidance.classifier import ClassifierFreeGuidance as ClassifierFreeGuidance
    from unmask.guidance.classifier import ExactClassifierGuidance as ExactClassifierGuidance
    from unmask.guidance.classifier import TaylorClassifierGuidance as TaylorClassifierGuidance
    from unmask.guidance.regex.constraint import Regex
    from unmask.guidance.regex.constraint import RegexConstraint as RegexConstraint
    from unmask.types import Tokens

GuidanceFn: TypeAlias = "Callable[[DenoiserLike, Tokens, BaseTokenizer | None], DenoiserLike]"
"""A denoiser around another, for a canvas [B, L] and its tokenizer."""

# Found when they are asked for: a process that only works out patterns does without torch.
_SUBMODULE_OF = {
    "AllowedTokens": "allowed_tokens",
    "ClassifierFreeGuidance": "classifier",
    "ExactClassifierGuidance": "classifier",
    "TaylorClassifierGuidance": "classifier",
    "RegexConstraint": "regex.constraint",
}


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance by what is visible, patterns that holes must match, tokens never to be
    written.

    One `match` is for all holes; of several, each is for one, and None for a hole that may hold anything.
    """

    cfg_scale: float = 0.0
    regex: Regex | tuple[Regex | None, ...] | None = None
    banned_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.cfg_scale < float("inf"):
            raise ValueError(f"the scale of guidance must be 0 (none) or above; got {self.cfg_scale}")

    def __call__(self, denoiser: DenoiserLike, tokens: Tokens, tokenizer: BaseTokenizer | None) -> DenoiserLike:
        """Those that are asked for, the pattern last: nothing that others do makes a text not match."""
        from unmask.guidance.allowed_tokens import AllowedTokens
        from unmask.guidance.classifier import ClassifierFreeGuidance
        from unmask.guidance.regex.constraint import RegexConstraint

        mask = denoiser.vocab.mask_id
        if self.cfg_scale:
            denoiser = ClassifierFreeGuidance(denoiser, tokens != mask, self.cfg_scale)
        if self.banned_tokens:
            denoiser = AllowedTokens.ban(denoiser, self.banned_tokens)
        if self.regex is not None:
            if tokenizer is None:
                raise ValueError("a pattern is about text, and this model has no tokenizer")
            denoiser = RegexConstraint(denoiser, tokens, self.regex, tokenizer)
        return denoiser

    def for_holes(self, start: int, stop: int, num_holes: int, complete: bool) -> Guidance:
        """The same for a window that has the holes `first` to `last` - 1 of a text, `whole` or in part."""
        if self.regex is None:
            return self
        if not complete:
            raise ValueError(
                "a hole that must match a pattern is written as a whole, and a hole here is longer than the"
                " model can read with some text beside it: make it shorter"
            )
        if not isinstance(self.regex, tuple):
            return self
        if len(self.regex) != num_holes:
            raise ValueError(f"a text with {num_holes} holes needs as many patterns, or one; got {len(self.regex)}")
        return replace(self, regex=self.regex[start:stop])


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUBMODULE_OF[name]}"), name)


__all__ = [
    "AllowedTokens",
    "ClassifierFreeGuidance",
    "ExactClassifierGuidance",
    "Guidance",
    "GuidanceFn",
    "RegexConstraint",
    "TaylorClassifierGuidance",
]
