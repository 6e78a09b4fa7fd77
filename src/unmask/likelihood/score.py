"""A bound on -log p, in the usual units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from unmask.data.corpus import TextStats

TIME_BINS = 20
"""Equal bins of the time from t = 0 to 1 in which nats are reported."""


@dataclass(frozen=True, repr=False)
class Score:
    """The nats of one or more texts. Standard errors come from the draws of times and noise."""

    nats: float
    """An unbiased estimate of an upper bound on -log p; for an autoregressive model, -log p itself."""
    variance: float
    """The variance of `nats`."""
    tokens: int
    """The number of tokens that were scored."""
    text_stats: TextStats | None = None
    """Bytes, characters and words of the text; None if ids were scored."""
    nats_by_bin: tuple[float, ...] = ()
    """The nats from each of TIME_BINS bins of the time; empty if the model has no time."""
    variance_by_bin: tuple[float, ...] = ()
    """The variance of each of `nats_by_bin`."""
    per_text: tuple[Score, ...] = field(default=(), repr=False)
    """The score of each text, if there are several."""
    token_nats: tuple[float, ...] = field(default=(), repr=False)
    """The nats of each token, if they were asked for."""

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
        """The standard error of `nats_per_token`."""
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
        """exp(nats / words), where the end of a line counts as a word."""
        return math.exp(min(700.0, self.nats / self._required_text_stats.words))

    @property
    def by_time(self) -> tuple[float, ...]:
        """Nats per token from each bin of the time, from t = 0 to 1; they sum to `nats_per_token`."""
        return tuple(nats / self.tokens for nats in self.nats_by_bin)

    @property
    def by_time_error(self) -> tuple[float, ...]:
        """The standard error of each of `by_time`."""
        return tuple(math.sqrt(variance) / self.tokens for variance in self.variance_by_bin)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON; every error has the unit of the number before it."""
        relative = self.standard_error / self.nats_per_token if self.nats else 0.0
        metrics: dict[str, object] = {
            "tokens": self.tokens,
            "nats_per_token": self.nats_per_token,
            "standard_error": self.standard_error,
            "perplexity": self.perplexity,
            "perplexity_error": self.perplexity * self.standard_error,
        }
        if self.text_stats is not None:
            metrics |= {
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
            metrics |= {"by_time": self.by_time, "by_time_error": self.by_time_error}
        return metrics

    @property
    def _required_text_stats(self) -> TextStats:
        if self.text_stats is None:
            raise ValueError("bits per byte, bits per character and word perplexity need text, but ids were scored")
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
    """The sum of each column; none if a text has none, because its score is exact."""
    if not all(columns):
        return ()
    return tuple(sum(column) for column in zip(*columns, strict=True))
