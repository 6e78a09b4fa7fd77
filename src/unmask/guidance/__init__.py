"""Guidance and constraints: wrappers around a denoiser, which nest.

`Guidance` has those that commands and requests offer. Any other `GuidanceFn` works too, such as a classifier:
`lambda denoiser, tokens, tokenizer: ExactClassifierGuidance(denoiser, classifier, 2.0)`.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from unmask.data.tokenizers import BaseTokenizer
    from unmask.diffusion.denoiser import DenoiserLike
    from unmask.guidance._both_strands import BothStrands as BothStrands
    from unmask.guidance.allowed_tokens import AllowedTokens as AllowedTokens
    from unmask.guidance.cfg import ClassifierFreeGuidance as ClassifierFreeGuidance
    from unmask.guidance.classifier import ExactClassifierGuidance as ExactClassifierGuidance
    from unmask.guidance.classifier import TaylorClassifierGuidance as TaylorClassifierGuidance
    from unmask.guidance.regex.constraint import Regex
    from unmask.guidance.regex.constraint import RegexConstraint as RegexConstraint
    from unmask.guidance.structure.structure import Structure as Structure
    from unmask.types import Tokens

GuidanceFn: TypeAlias = "Callable[[DenoiserLike, Tokens, BaseTokenizer | None], DenoiserLike]"
"""From a denoiser, a canvas [B, L] and the tokenizer to the guided denoiser."""

# Imported on first use: a process that only compiles patterns does without torch.
_SUBMODULE_OF = {
    "AllowedTokens": "allowed_tokens",
    "BothStrands": "_both_strands",
    "ClassifierFreeGuidance": "cfg",
    "ExactClassifierGuidance": "classifier",
    "TaylorClassifierGuidance": "classifier",
    "RegexConstraint": "regex.constraint",
    "Structure": "structure.structure",
}


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance by the visible text, what the text of holes must match, and banned tokens."""

    cfg_scale: float = 0.0
    """Strength of classifier-free guidance by the visible text: 0 is none."""
    regex: Regex | tuple[Regex | None, ...] | None = None
    """A regular expression or `Structure` that the text of each hole must match; or one per hole, None for any text."""
    banned_tokens: tuple[int, ...] = ()
    """Ids that are never written."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text: one of them may stand after a match, and anything after that, as in completions."""
    schema: InitVar[Mapping[str, Any] | bool | str | None] = None
    """In place of `regex`: a JSON schema."""
    grammar: InitVar[str | None] = None
    """In place of `regex`: a grammar in GBNF."""

    def __post_init__(self, schema: Mapping[str, Any] | bool | str | None, grammar: str | None) -> None:
        if schema is not None or grammar is not None:
            from unmask.guidance.structure.structure import Structure

            object.__setattr__(self, "regex", Structure.choose(self.regex, schema, grammar))
        if not 0 <= self.cfg_scale < float("inf"):
            raise ValueError(f"the scale of guidance must be 0 (none) or above; got {self.cfg_scale}")

    def __call__(self, denoiser: DenoiserLike, tokens: Tokens, tokenizer: BaseTokenizer | None) -> DenoiserLike:
        """The guided denoiser; the pattern is outermost, so that every text matches."""
        from unmask.guidance.allowed_tokens import AllowedTokens
        from unmask.guidance.cfg import ClassifierFreeGuidance
        from unmask.guidance.regex.constraint import RegexConstraint

        mask = denoiser.vocab.mask_id
        if self.cfg_scale:
            denoiser = ClassifierFreeGuidance(denoiser, tokens != mask, self.cfg_scale)
        if self.banned_tokens:
            denoiser = AllowedTokens.ban(denoiser, self.banned_tokens)
        if self.regex is not None:
            if tokenizer is None:
                raise ValueError("a pattern needs a tokenizer, and this model has none")
            denoiser = RegexConstraint(denoiser, tokens, self.regex, tokenizer, self.end_ids)
        return denoiser

    def for_holes(self, start: int, stop: int, num_holes: int, complete: bool) -> Guidance:
        """The same for a window that has the holes `start` to `stop` - 1 of a text, complete or in part."""
        if self.regex is None:
            return self
        if not complete:
            raise ValueError(
                "a hole with a pattern must fit into one window of the model, together with some of the text around it:"
                " make it shorter"
            )
        if not isinstance(self.regex, tuple):
            return self
        if len(self.regex) != num_holes:
            raise ValueError(f"give one pattern, or one per hole ({num_holes}); got {len(self.regex)}")
        return replace(self, regex=self.regex[start:stop])


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUBMODULE_OF[name]}"), name)


__all__ = [
    "AllowedTokens",
    "BothStrands",
    "ClassifierFreeGuidance",
    "ExactClassifierGuidance",
    "Guidance",
    "GuidanceFn",
    "RegexConstraint",
    "Structure",
    "TaylorClassifierGuidance",
]
