"""Fill in the middle, as editors ask for it: how long the hole is, and what around it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unmask.likelihood.hole_lengths import check_open_holes
from unmask.sampling.templates import ANY_LENGTH
from unmask.serve._text_codec import EncodedTemplate, completion_template
from unmask.serve.service import Service

_DEFAULT_MAX_TOKENS = 256
"""Tokens after a prompt without a suffix, if the request does not say."""


@dataclass(frozen=True)
class Gap:
    """A text with a hole that may end before `most` tokens, and has at least `least`.

    In front of a suffix, the model chooses the length: up to 32 tokens, unless `least` is given. Without one, there is
    room for `most` tokens, which an end of the text may leave empty.
    """

    prefix: str
    suffix: str = ""
    least: int | None = None
    most: int | None = None
    most_field: str = "max_tokens"
    """What the request calls `most`."""

    def template(self, service: Service) -> EncodedTemplate:
        """The text, of which nothing is left out. Encodes: not for the event loop."""
        left, right = self._encoded(service)
        return completion_template(left, self._hole(service, len(left)), right)

    def fitting_template(self, service: Service) -> tuple[EncodedTemplate, bool]:
        """The text, of which only so much is read as the model has room for, and whether something is left out.

        The hole has half the room at most. A quarter of the rest, or what the prefix leaves, is for the suffix.
        """
        left, right = self._encoded(service)
        hole, limits = self._hole(service, 0), service.limits
        longest = min(_longest(hole), max(1, service.max_length // 2), limits.max_tokens)
        hole = longest if isinstance(hole, int) or hole[0] >= longest else range(hole[0], longest + 1)
        room = max(0, min(service.max_length - longest, limits.prompt_tokens))
        kept_right = right[: min(len(right), max(room // 4, room - len(left)))]
        kept_left = left[max(0, len(left) - (room - len(kept_right))) :]
        is_cut = len(kept_left) + len(kept_right) < len(left) + len(right)
        return completion_template(kept_left, hole, kept_right), is_cut

    def _encoded(self, service: Service) -> tuple[list[int], list[int]]:
        encode = service.codec.tokenizer.encode
        return encode(self.prefix) if self.prefix else [], encode(self.suffix) if self.suffix else []

    def _hole(self, service: Service, num_before: int) -> int | range:
        """The length of the hole, or those from which the model chooses."""
        if self.most == 0:
            return 0
        if not self.suffix:
            room = max(1, min(service.max_length - num_before, service.limits.max_tokens))
            return min(_DEFAULT_MAX_TOKENS, room) if self.most is None else self.most
        if not service.model.uses_right_context:
            raise ValueError(
                "this model writes from left to right and does not see what follows a hole: leave the suffix out"
            )
        usual = ANY_LENGTH[-1]
        if self.least is None:
            lengths = range(min(usual, usual if self.most is None else self.most) + 1)
        else:
            lengths = range(self.least, max(self.least, usual if self.most is None else self.most) + 1)
        if lengths.stop - lengths.start == 1:  # there may be too many for len()
            return lengths[0]
        check_open_holes(service.model.denoiser, f"send min_tokens and {self.most_field}, which are then the same")
        return lengths


def _longest(hole: int | Sequence[int]) -> int:
    return hole if isinstance(hole, int) else hole[-1]
