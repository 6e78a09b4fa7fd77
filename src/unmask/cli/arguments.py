"""What commands share: the types of their arguments, and what becomes of them."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unmask.cli.signature import Option, Positional

if TYPE_CHECKING:
    from unmask.model import LanguageModel

Model = Annotated[Path, Positional()]
Text = Annotated[str, Positional()]
Texts = Annotated[tuple[str, ...], Positional()]
Recipe = Annotated[str, Positional(), Option(words="unmask.recipes:RECIPES")]
Number = Annotated[int, Option(aliases=("--count",))]
"""torchrun takes --n for an option of its own, cut short; hence the other name."""
Json = Annotated[bool, Option(name="json", help="Print one JSON object instead of text.")]

Out = Annotated[
    Path | None, Option(help="Also write a JSON file: figures, command, versions, seed, data hashes.")
]


def load_model(folder: Path, require_tokenizer: bool = False) -> LanguageModel:
    """The model in a folder; torch is imported now, and not for the sake of help."""
    from unmask.release import load

    return load(folder, require_tokenizer=require_tokenizer)


@contextmanager
def shared_model(folder: Path) -> Iterator[tuple[LanguageModel, bool]]:
    """The model, its work split over the processes of `torchrun`; and whether this one speaks for all."""
    from unmask.world import world

    with world() as where:
        yield load_model(folder).across(where), where.first


def model_digest(folder: Path) -> dict[str, str]:
    """What tells the model apart: its place, and the SHA-256 of its weights."""
    from unmask.release import model_folder
    from unmask.release.weights import weight_files

    digest, place = hashlib.sha256(), model_folder(folder)
    for name in weight_files(place):
        with (place / name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {"folder": str(folder), "sha256": digest.hexdigest()}


def publish(
    figures: dict[str, Any],
    seed: int,
    data: Mapping[str, str],
    model: Mapping[str, str],
    out: Path | None,
    as_json: bool,
) -> bool:
    """Write figures and what made them to the file `out` and, if `as_json`, to stdout; whether to stdout."""
    from unmask.provenance import made_by

    whole = {**figures, "made_by": made_by(seed, data, model)}
    if as_json:
        print_json(whole)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = out.with_name(f".{out.name}.writing")
        try:
            fresh.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(fresh, out)
        finally:
            fresh.unlink(missing_ok=True)
    return as_json


def check_out(out: Path | None) -> None:
    """Refuse a place that cannot be written before hours of work, not after."""
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"{out} is a folder; --out names the file that figures are written to")
    nearest = next(parent for parent in out.absolute().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{out} cannot be written: {nearest} is not a folder that may be written to")


def check_precision(name: str, reached: float, asked: float | None) -> None:
    """Say it if the error (as a share) is well above what was asked for."""
    if asked is not None and reached > 1.5 * asked:
        print(
            f"unmask: {name} has a standard error of {reached:.2%} and not the {asked:.2%} asked for",
            file=sys.stderr,
        )


def stdin_text() -> str:
    """All of standard input, as one text."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input must be UTF-8 text; byte {error.start} is not") from None


def hint_at_holes(what: str, texts: Sequence[str]) -> None:
    """Say it if somebody writes a hole where it is none."""
    from unmask.sampling.canvas import HOLE

    found = next(filter(None, map(HOLE.search, texts)), None)
    if found:
        print(
            f"unmask: {found[0]} in {what} is taken literally; `unmask infill` fills holes", file=sys.stderr
        )


def print_json(value: dict[str, Any]) -> None:
    """One object on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False))
