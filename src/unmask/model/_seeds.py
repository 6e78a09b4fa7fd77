"""Seeds of the sequences of a call."""

from __future__ import annotations

from collections.abc import Sequence


def validate_seed(seed: int) -> None:
    """ValueError unless it is a number that seeds can be."""
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"a seed must be 0 or above and below 2^63; got {seed}")


def sequence_seeds(seed: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The seed of each of `count` sequences: consecutive ones from `seed` on, or those that are given."""
    if not isinstance(seed, Sequence):
        validate_seed(seed)
        return tuple(range(seed, seed + count))
    if len(seed) != count:
        raise ValueError(f"there must be one seed, or one for each of {count} texts; got {len(seed)}")
    for each in seed:
        validate_seed(each)
    return tuple(seed)
