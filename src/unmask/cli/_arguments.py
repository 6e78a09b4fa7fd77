"""What commands share: types of arguments, loading models, and writing results."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from unmask.cli._signature import Inline, Option, Positional
from unmask.hardware.dtypes import DtypeName
from unmask.registry import build, resolve

if TYPE_CHECKING:
    from unmask.data.tokenizers import BaseTokenizer
    from unmask.distributed import Distributed
    from unmask.model import LanguageModel

_T = TypeVar("_T")

ModelPath = Annotated[Path, Positional()]
ModelPaths = Annotated[tuple[Path, ...], Positional()]
TextArg = Annotated[str, Positional()]
TextArgs = Annotated[tuple[str, ...], Positional()]
RecipeArg = Annotated[str, Positional(), Option(completions="unmask.recipes:RECIPES")]
Count = Annotated[int, Option(aliases=("--count",))]
"""The alias is for torchrun, which takes --n for an abbreviation of its own options."""
JsonFlag = Annotated[bool, Option(name="json", help="Print one JSON object instead of text.")]

ResultsPath = Annotated[
    Path | None, Option(help="Also write a JSON file: figures, command, versions, seed, data hashes.")
]


@dataclass(frozen=True)
class FileOptions:
    """Requests in a file in place of texts on the command line."""

    input: Path | None = None
    """Answer the requests of this file, one JSON object per line; - reads standard input."""
    output: Path = Path("-")
    """Where the answers go, one JSON object for each line of --input, in its order; the same command goes on after an
    interruption. By default - for standard output, which cannot be gone on with."""
    restart: bool = False
    """Begin anew where --output has answers already, complete or not."""

    def refuse_unused(self) -> None:
        """ValueError if options of files are given without a file."""
        if self.output != FileOptions.output or self.restart:
            raise ValueError("--output and --restart are for the requests of a file: name one with --input")

    def refuse_others(self, **given: object) -> None:
        """ValueError if something else is given that a file of requests replaces, by the name of the option."""
        for name, value in given.items():
            if value:
                shown = name.upper() if name.isupper() else f"--{name.replace('_', '-')}"
                raise ValueError(f"{shown} cannot be combined with --input, whose lines say what is asked for")


InlineFileOptions = Annotated[FileOptions, Inline()]

AllowCodeFlag = Annotated[
    bool,
    Option(help="Import the classes from outside unmask that a folder names; only for folders that you trust."),
]


@dataclass(frozen=True)
class LoadOptions:
    """How the weights of a model are kept."""

    dtype: DtypeName = "auto"
    """Type of the weights; auto: as they were saved, computed in what is measured to be fastest."""
    group_size: int | None = None
    """For int8 and int4: weights that share a scale; 64 by default, fewer are more exact and take more memory."""
    shard_weights: bool = False
    """Under torchrun: each process keeps a part of the weights, for models that do not fit into the memory of one."""


InlineLoadOptions = Annotated[LoadOptions, Inline()]

BothStrandsFlag = Annotated[bool, Option(help="For DNA: average predictions over both strands, at twice the cost.")]


def load_model(
    folder: Path,
    require_tokenizer: bool = False,
    allow_code: bool = False,
    options: LoadOptions = LoadOptions(),  # noqa: B008
    distributed: Distributed | None = None,
) -> LanguageModel:
    """The model in a folder, its work split over the ranks. torch is imported here, so that --help does not need it."""
    from unmask.distributed import Distributed
    from unmask.ops.linear import DEFAULT_GROUP_SIZE
    from unmask.pretrained import load

    allow_imports(allow_code)
    if options.group_size is not None and options.dtype not in ("int8", "int4"):
        raise ValueError(f"--group-size is for --dtype int8 and int4, not {options.dtype}; drop it")
    ranks = distributed or Distributed()
    lm = load(
        folder,
        require_tokenizer=require_tokenizer,
        allow_code=allow_code,
        dtype=options.dtype,
        group_size=DEFAULT_GROUP_SIZE if options.group_size is None else options.group_size,
        distributed=ranks,
        shard_weights=options.shard_weights,
    )
    return lm if options.shard_weights and ranks.world_size > 1 else lm.distribute(ranks)


@contextmanager
def load_distributed(
    folder: Path,
    allow_code: bool = False,
    both_strands: bool = False,
    options: LoadOptions = LoadOptions(),  # noqa: B008
    require_tokenizer: bool = False,
) -> Iterator[tuple[LanguageModel, bool]]:
    """The model, its work split over the processes of `torchrun`; and whether this process prints."""
    from unmask.distributed import init_distributed

    with init_distributed() as distributed:
        lm = load_model(folder, require_tokenizer, allow_code, options, distributed)
        lm.denoiser.prepack()
        yield lm.with_both_strands() if both_strands else lm, distributed.is_main


def allow_imports(allow: bool = True) -> None:
    """If code is allowed, make the current folder importable, as `python -m` does."""
    if allow and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def import_typed(name: str, base: type[Any]) -> Any:
    """The object package.module:name that the user typed: a class, an instance or a function of the family."""
    allow_imports()
    return resolve(name, base)


def build_typed(name: str, base: type[_T]) -> _T:
    """The instance that package.module:name is or returns."""
    allow_imports()
    return build(name, base)


def import_tokenizer(name: str) -> str | BaseTokenizer:
    """A tokenizer that is typed as package.module:name; any other name stays a name."""
    from unmask.data.tokenizers import TOKENIZERS, is_external

    return build_typed(name, TOKENIZERS.base) if is_external(name) else name


def model_fingerprint(folder: Path) -> dict[str, str]:
    """The folder of a model, and the SHA-256 of its weights."""
    from unmask.pretrained import resolve_model_folder
    from unmask.pretrained.state_dict import list_weight_files

    digest, resolved = hashlib.sha256(), resolve_model_folder(folder)
    for name in list_weight_files(resolved):
        with (resolved / name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {"folder": str(folder), "sha256": digest.hexdigest()}


def write_results(
    results: dict[str, Any],
    seed: int,
    data: Mapping[str, str],
    model: Mapping[str, str],
    out: Path | None,
    as_json: bool,
) -> bool:
    """Write results and their provenance to the file `out` and, if `as_json`, to stdout; returns `as_json`."""
    from unmask.io.atomic import write_json
    from unmask.provenance import collect_provenance

    whole = {**results, "provenance": collect_provenance(seed, data, model)}
    if as_json:
        print_json(whole)
    if out is not None:
        write_json(out, whole)
    return as_json


def validate_output(out: Path | None) -> None:
    """ValueError if `out` cannot be written: before the work, not after it."""
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"{out} is a folder; --out must name a file")
    nearest = next(parent for parent in out.absolute().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{out} cannot be written: {nearest} is not a writable folder")


def warn_if_imprecise(name: str, relative_error: float, target: float | None) -> None:
    """Warn if the relative standard error is well above the requested one."""
    if target is not None and relative_error > 1.5 * target:
        print(
            f"unmask: {name} has a standard error of {relative_error:.2%} not the {target:.2%} requested",
            file=sys.stderr,
        )


def read_stdin() -> str:
    """All of standard input, as one text."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input must be UTF-8 text; byte {error.start} is not") from None


def warn_literal_masks(context: str, texts: Sequence[str]) -> None:
    """Warn about <mask> in a text where it does not mark a hole."""
    from unmask.sampling.templates import HOLE_PATTERN

    found = next(filter(None, map(HOLE_PATTERN.search, texts)), None)
    if found:
        print(
            f"unmask: {found[0]} in {context} is taken literally; `unmask infill` fills holes",
            file=sys.stderr,
        )


def print_json(value: dict[str, Any]) -> None:
    """Print an object as one line of JSON."""
    print(json.dumps(value, ensure_ascii=False))
