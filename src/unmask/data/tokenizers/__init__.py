"""Tokenizers: text to ids and back.

`TOKENIZERS` is the table of tokenizers with a name; `get_tokenizer` also finds trained ones by their path, those
of the hub, and those from outside the package.
"""

from __future__ import annotations

import re
from pathlib import Path

from unmask.config import from_json, suggest
from unmask.data.tokenizers._backends import MIN_BPE_VOCAB_SIZE
from unmask.data.tokenizers._fast_encoders import TokenIds
from unmask.data.tokenizers._unknown_stats import UnknownStats
from unmask.data.tokenizers.base import REPLACEMENT_CHAR, BaseTokenizer, token_texts
from unmask.data.tokenizers.tokenizer import MAX_TOKENIZER_BYTES, Tokenizer
from unmask.io.hub import HUB_PREFIX
from unmask.io.untrusted import parse_json, read_bytes
from unmask.registry import AllowCode, Family, build

__all__ = [
    "MIN_BPE_VOCAB_SIZE",
    "REPLACEMENT_CHAR",
    "TOKENIZERS",
    "BaseTokenizer",
    "TokenIds",
    "Tokenizer",
    "UnknownStats",
    "get_tokenizer",
    "is_external",
    "load_tokenizer",
    "token_texts",
]

TOKENIZERS: Family[BaseTokenizer] = Family(
    "unmask.data.tokenizers.base:BaseTokenizer",
    {
        "bytes": "unmask.data.tokenizers.tokenizer:Tokenizer.bytes",
        "dna": "unmask.data.tokenizers.tokenizer:Tokenizer.dna",
        "protein": "unmask.data.tokenizers.tokenizer:Tokenizer.protein",
        "text8": "unmask.data.tokenizers.tokenizer:Tokenizer.text8",
    },
)

_FILE_NAME = "tokenizer.json"
_EXTERNAL_JSON = re.compile(rb'\s*\{\s*"kind"\s*:')
_EXTERNAL_NAME = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")


def get_tokenizer(name: str, *, allow_code: AllowCode = False) -> BaseTokenizer:
    """The tokenizer of a name in `TOKENIZERS`, a `tokenizer.json` or its folder, hub:NAME or package.module:name.

    The last one imports code, so it must be allowed.
    """
    if name in TOKENIZERS:
        named: BaseTokenizer = TOKENIZERS[name]()
        return named
    if is_external(name):
        if allow_code is True or (allow_code and name in allow_code):
            return build(name, TOKENIZERS.base)
        raise ValueError(
            f"the tokenizer {name} is code from outside unmask: pass the tokenizer object, or allow_code=True"
        )
    if name.startswith(HUB_PREFIX):
        return Tokenizer.from_hub(name.removeprefix(HUB_PREFIX))
    path = Path(name)
    if path.suffix == ".json" or path.is_file():
        return load_tokenizer(path, allow_code=allow_code)
    if path.is_dir():
        return load_tokenizer(path / _FILE_NAME, allow_code=allow_code)
    raise ValueError(
        f"there is no tokenizer {name!r}; known are {', '.join(TOKENIZERS)}, bpe:SIZE, hub:NAME, the path of a"
        f" {_FILE_NAME} and package.module:name{suggest(name, TOKENIZERS)}"
    )


def is_external(name: str) -> bool:
    """Whether a name is that of a tokenizer from outside the package, package.module:name."""
    return _EXTERNAL_NAME.fullmatch(name) is not None and not name.startswith(("bpe:", HUB_PREFIX))


def load_tokenizer(path: Path, *, allow_code: AllowCode = False) -> BaseTokenizer:
    """Read a `tokenizer.json`: of the `tokenizers` library or, if `allow_code` allows its class, from elsewhere."""
    try:
        data = read_bytes(path, MAX_TOKENIZER_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} is not a {_FILE_NAME} that can be read: {error}") from None
    if not _EXTERNAL_JSON.match(data):
        return Tokenizer.from_file(path)
    tokenizer: BaseTokenizer = from_json(BaseTokenizer, parse_json(data, str(path)), str(path), allow_code=allow_code)
    return tokenizer
