"""A bound on -log p and the units that people know it in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from unmask.data.corpus import TextStats

TIME_BINS = 20
"""Equal parts of the time from t = 0 to 1 by which nats are told apart."""


@dataclass(frozen=True, repr=False)
class Score:
    """Nats of some text, and of each of its parts; `standard_error` is of `nats_per_token`.

    `nats` is an unbiased estimate of an upper bound on -log p (exact, with no error, for an
    autoregressive model). `size` is None where there was no text but ids. `cells` are the nats that came
    from each of the TIME_BINS equal parts of the time, if the model has a time. `token_nats`, known where a
    single text was scored, are each token's share of the nats.
    """

    nats: float
    variance: float
    tokens: int
    text_stats: TextStats | None = None
    nats_by_bin: tuple[float, ...] = ()
    variance_by_bin: tuple[float, ...] = ()
    per_text: tuple[Score, ...] = field(default=(), repr=False)
    token_nats: tuple[float, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        parts = [f"{self.nats_per_token:.4g} ± {self.standard_error:.2g} nats/token"]
        parts.append(f"perplexity {self.perplexity:.4g}")
        if self.text_stats is not None:
            parts.append(f"{self.bits_per_byte:.4g} bits/byte")
        return f"Score({', '.join(parts)}, {self.tokens:,} tokens)"

    @property
    def nats_per_token(self) -> float:
        """The bound, per token."""
        return self.nats / self.tokens

    @property
    def standard_error(self) -> float:
        """Of `nats_per_token`, from the draws of times and masks."""
        return math.sqrt(self.variance) / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(min(700.0, self.nats_per_token))

    @property
    def bits_per_byte(self) -> float:
        """nats / (bytes log 2)."""
        return self.nats / (self._required_text_stats.bytes * math.log(2))

    @property
    def bits_per_character(self) -> float:
        """nats / (characters log 2)."""
        return self.nats / (self._required_text_stats.characters * math.log(2))

    @property
    def word_perplexity(self) -> float:
        """exp(nats / words), an end of line counted as a word."""
        return math.exp(min(700.0, self.nats / self._required_text_stats.words))

    @property
    def by_time(self) -> tuple[float, ...]:
        """Nats per token from each part of the time, from t = 0 to 1; they sum to `nats_per_token`."""
        return tuple(nats / self.tokens for nats in self.nats_by_bin)

    @property
    def by_time_error(self) -> tuple[float, ...]:
        """The standard error of each of `by_time`."""
        return tuple(math.sqrt(variance) / self.tokens for variance in self.variance_by_bin)

    def to_dict(self) -> dict[str, object]:
        """All of it under the names that programs read; errors are in the unit of what they follow."""
        relative = self.standard_error / self.nats_per_token if self.nats else 0.0
        found: dict[str, object] = {
            "tokens": self.tokens,
            "nats_per_token": self.nats_per_token,
            "standard_error": self.standard_error,
            "perplexity": self.perplexity,
            "perplexity_error": self.perplexity * self.standard_error,
        }
        if self.text_stats is not None:
            found |= {
                "bytes": self.text_stats.bytes,
                "characters": self.text_stats.characters,
                "words": self.text_stats.words,
                "bits_per_byte": self.bits_per_byte,
                "bits_per_byte_error": self.bits_per_byte * relative,
                "bits_per_character": self.bits_per_character,
                "bits_per_character_error": self.bits_per_character * relative,
                "word_perplexity": self.word_perplexity,
                "word_perplexity_error": self.word_perplexity * math.sqrt(self.variance) / self.text_stats.words,
            }
        if self.nats_by_bin:
            found |= {"by_time": self.by_time, "by_time_error": self.by_time_error}
        return found

    @property
    def _required_text_stats(self) -> TextStats:
        if self.text_stats is None:
            raise ValueError("bits per byte, bits per character and nats per word need text; ids were scored")
        return self.text_stats


def combine_scores(scores: Sequence[Score]) -> Score:
    """The score of all texts together."""
    sizes = [score.text_stats for score in scores]
    return Score(
        nats=sum(score.nats for score in scores),
        variance=sum(score.variance for score in scores),
        tokens=sum(score.tokens for score in scores),
        text_stats=None if None in sizes else sum(filter(None, sizes), TextStats()),
        nats_by_bin=_sum_columns([score.nats_by_bin for score in scores]),
        variance_by_bin=_sum_columns([score.variance_by_bin for score in scores]),
        per_text=tuple(scores),
        token_nats=tuple(nats for score in scores for nats in score.token_nats),
    )


def _sum_columns(columns: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sum(column) for column in zip(*columns, strict=True))
