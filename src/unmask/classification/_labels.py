"""Labels: one of several classes, or a number."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from unmask.config import suggest

_INTEGER = re.compile(r"[+-]?\d+")
_UNLABELLED = ("", "-1")
"""What published test sets have in place of labels that are kept secret."""
_MAX_SHOWN_LABELS = 8


@dataclass(frozen=True)
class Labels:
    """What is predicted: a class of `names`, whose ids are their positions, or, without names, a number.

    Files may have ids in place of names, if no name is a number itself.
    """

    names: tuple[str, ...] = ()
    """The classes; none for a number."""

    @property
    def is_number(self) -> bool:
        """Whether numbers are predicted."""
        return not self.names

    @property
    def num_outputs(self) -> int:
        """The outputs of a classifier: a logit for each class, or the number."""
        return max(1, len(self.names))

    def parse(self, value: Any, where: str) -> float:
        """The id of a class, or the number, that a cell of a table holds."""
        text = _spell(value, where)
        if text in _UNLABELLED and text not in self.names and not (self.is_number and text):
            raise ValueError(f"{where} has no label (it is {text!r}); every row needs one")
        if self.is_number:
            return _parse_number(text, where)
        if text.isdecimal() and int(text) < len(self.names) and not any(map(_INTEGER.fullmatch, self.names)):
            return float(text)  # published sets number their classes
        if text not in self.names:
            known = ", ".join(self.names[:_MAX_SHOWN_LABELS]) + (", ..." if len(self.names) > _MAX_SHOWN_LABELS else "")
            raise ValueError(
                f"{where} has the unknown label {text[:60]!r}{suggest(text, self.names)}; the labels are {known}"
            )
        return float(self.names.index(text))

    def name(self, value: float) -> str | float:
        """What an id of a class, or a number, stands for."""
        return float(value) if self.is_number else self.names[int(value)]


def find_labels(values: Iterable[tuple[str, Any]]) -> Labels:
    """The classes of a training set: of its labels (with where they are), each once, integers by their size."""
    seen: dict[str, str] = {}
    for where, value in values:
        text = _spell(value, where)
        if text == "":
            raise ValueError(f"{where} has no label; every row needs one")
        seen.setdefault(text, where)
    if len(seen) == 1:
        (only,) = seen
        raise ValueError(f"all rows have the label {only!r}: a classifier needs two classes or more")
    are_integers = all(map(_INTEGER.fullmatch, seen))
    if not are_integers and all(_is_number(text) for text in seen):
        example = next(text for text in seen if not _INTEGER.fullmatch(text))
        raise ValueError(f"{seen[example]} has the label {example!r}, a number: say --predict number to learn numbers")
    return Labels(tuple(sorted(seen, key=int if are_integers else str)))


def check_classes(labels: Labels, ids: Sequence[float], what: str) -> None:
    """Refuse training rows that all have one class, or one number."""
    if len(set(ids)) == 1:
        raise ValueError(f"all {len(ids):,} {what} have the label {labels.name(ids[0])!r}: there is nothing to learn")


def _spell(value: Any, where: str) -> str:
    """A label as text: files of different formats spell the same one as 1, "1", 1.0 or true."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if not isinstance(value, str | int | float):
        raise ValueError(f"{where} has {type(value).__name__} as its label, where a text or a number is expected")
    return str(value).strip()


def _parse_number(text: str, where: str) -> float:
    if not _is_number(text):
        raise ValueError(f"{where} has the label {text[:60]!r}, which is not a finite number")
    return float(text)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
