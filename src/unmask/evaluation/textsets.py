"""The text sets on which models are compared without having seen them: a name becomes a file to prepare.

    NAME[:SPLIT][:raw]     a set of `KNOWN`; SPLIT is `test` (if not given) or `validation`;
                           `raw` leaves the text as it is distributed
    a prepared corpus      its held-out part, or all of it if nothing is held out
    anything else          a source as `unmask.data.sources` takes it, such as a path

`fetch` writes a set's documents as JSON lines and says how to prepare them. A row of a set is a document:
a line of PTB, WikiText and LM1B, a passage of LAMBADA, an article of AG News, a paper.

The zero-shot perplexities of the MDLM paper are per token, of the detokenised text, and by its code of the
splits that `published_split` names. Two things differ here. An empty row (a third of WikiText's) is no
document, where the published code still counts its separator: half a per cent of the tokens. And the paper's
LAMBADA is OpenAI's version (cased, untokenised), which the hub has; the original files are in lower-case
tokens, so a figure from them is another figure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from unmask.data import sources
from unmask.data.corpus import Corpus, is_corpus
from unmask.data.sources import SourceOptions
from unmask.evaluation import detokenize, rows

__all__ = ["KNOWN", "PUBLISHED", "FetchedSet", "TextSet", "fetch"]

TEST, VALIDATION = "test", "validation"
CONVERTED = "refs/convert/parquet"
"""The hub's own branch of sets whose main branch is a script, which `datasets` no longer runs."""

_NAME = re.compile(rf"(?P<known>\w+)(?::(?P<split>{TEST}|{VALIDATION}))?(?P<raw>:raw)?")
_IN_FILE_NAMES = {TEST: ("test",), VALIDATION: ("valid", "validation", "val")}
_TABLES = tuple(rows.TABLES)


@dataclass(frozen=True)
class TextSet:
    """Where a set is found, and how its rows become documents."""

    hub: str
    config: str | None
    folders: tuple[str, ...]
    """Names under which files are looked for, the best first."""
    columns: rows.Columns = (("text",),)
    row: Callable[[str], str] = str
    """A row of a file to a row as the hub has it."""
    detokenize: Callable[[str], str] = str
    published_split: str = VALIDATION
    """The split that the published zero-shot evaluation reads."""
    per_word: bool = False
    """Those who train on the set give perplexity per word, the end of each line being one; zero-shot figures
    are per token."""
    suffixes: tuple[str, ...] = (".txt", ".tokens", ".raw", *_TABLES)
    files: tuple[str, ...] = ()
    """Other file names of the test split."""
    revision: str | None = None

    def find(self, split: str, folder: Path) -> list[Path]:
        """The files of a split: of the first pattern that is there, all that match it."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; text sets were to be found in it")
        for name in self.folders:
            stems = self._stems(name, split)
            patterns = [f"{stem}{suffix}" for stem in stems for suffix in self.suffixes]
            for pattern in [*patterns, *self._others(name, split)]:
                found = sorted(path for path in folder.glob(pattern) if path.is_file())
                if found:
                    return found
        first, *others = self.folders
        stems = self._stems(first, split)
        raise ValueError(
            f"{folder} has none of {', '.join(stems)} with a suffix of {' '.join(self.suffixes)}"
            + "".join(f", nor {pattern}" for pattern in self._others(first, split))
            + (f" (nor with {', '.join(others)} in place of {first})" if others else "")
        )

    def read(self, file: Path) -> Iterator[str]:
        """The text of each row of a file."""
        table = rows.TABLES.get(file.suffix)
        return rows.texts(table(file), self.columns, str(file)) if table else rows.lines(file)

    def _stems(self, name: str, split: str) -> list[str]:
        words = _IN_FILE_NAMES[split]
        exact = [stem for word in words for stem in (f"{name}/{word}", f"{name}?{word}")]
        return [*exact, *(f"{name}/*{word}*" for word in words), *([name] if split == TEST else [])]

    def _others(self, name: str, split: str) -> list[str]:
        return [f"{name}/{file}" for file in self.files] if split == TEST else []


def _with_end(line: str) -> str:
    return line.removesuffix("\n") + "\n"


_wikitext = partial(TextSet, "Salesforce/wikitext", row=_with_end, detokenize=detokenize.WIKITEXT)
_papers = partial(
    TextSet,
    "armanc/scientific_papers",
    columns=(("article",), ("body",), ("text",)),
    detokenize=detokenize.PAPERS,
    suffixes=_TABLES,
    files=("papers.jsonl",),
    revision=CONVERTED,
)

KNOWN: dict[str, TextSet] = {
    "ptb": TextSet(
        "ptb-text-only/ptb_text_only",
        "penn_treebank",
        ("ptb",),
        columns=(("sentence",), ("text",)),
        row=str.strip,
        detokenize=detokenize.PTB,
        per_word=True,
        revision=CONVERTED,
    ),
    # Of WikiText-2 and WikiText-103 the test and validation texts are the same, but for their <unk>s; the raw
    # text has none, and is what the paper takes.
    "wikitext": _wikitext(
        "wikitext-103-raw-v1",
        (
            "wikitext",
            "wikitext_raw",
            "wikitext-103-raw",
            "wikitext103_raw",
            "wikitext-2-raw",
            "wikitext2_raw",
        ),
    ),
    "wikitext2": _wikitext("wikitext-2-v1", ("wikitext2", "wikitext-2"), per_word=True),
    "wikitext103": _wikitext("wikitext-103-v1", ("wikitext103", "wikitext-103"), per_word=True),
    "lm1b": TextSet(
        "billion-word-benchmark/lm1b",
        "plain_text",
        ("lm1b",),
        row=str.strip,
        detokenize=detokenize.LM1B,
        published_split=TEST,
        per_word=True,
        files=("heldout-*", "news.en.heldout-*"),
        revision=CONVERTED,
    ),
    "lambada": TextSet(
        "EleutherAI/lambada_openai",
        "default",
        ("lambada",),
        detokenize=detokenize.LAMBADA,
        published_split=TEST,
    ),
    "ag_news": TextSet(
        "fancyzhx/ag_news",
        None,
        ("ag_news",),
        # The hub's text is title and text together; the original file is class, title, text without header.
        columns=(
            ("title", "text"),
            ("title", "description"),
            ("Title", "Description"),
            ("text",),
            ("2", "3"),
        ),
        published_split=TEST,
        suffixes=_TABLES,
    ),
    "arxiv": _papers("arxiv", ("arxiv", "scientific_papers_arxiv", "scientific_papers/arxiv")),
    "pubmed": _papers("pubmed", ("pubmed", "scientific_papers_pubmed", "scientific_papers/pubmed")),
}

PUBLISHED = tuple(
    f"{name}:{KNOWN[name].published_split}"
    for name in ("ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
)
"""The seven sets of the paper's zero-shot table, with the splits that its code reads."""


@dataclass(frozen=True)
class FetchedSet:
    """A source for `prepare`, with the options it needs, and what is known of it."""

    name: str
    source: str
    options: SourceOptions
    origin: str
    """The files or the data set of the hub that it was made from."""
    identity: str
    """With an equal identity, the text is equal. Of a known set, the SHA-256 of its rows before any change,
    each with a newline: for files of lines what `sha256sum` says of them together."""
    per_word: bool = False
    words: int | None = None
    """Of a known set before detokenising, the end of each row (empty ones too) counted as a word: nats per
    word are nats / words, however the text is cut into tokens."""


def fetch(
    name: str,
    scratch: Path,
    folder: Path | None = None,
    options: SourceOptions = SourceOptions(),  # noqa: B008
) -> FetchedSet:
    """The text called `name`; of a known set the documents are written into the folder `scratch`.

    A known set is looked for in `folder`, or, if there is none, loaded from the hub. `options` are for
    sources that are not known sets. Memory does not grow with the set.
    """
    known = name.split(":")[0]
    if known not in KNOWN:
        return _given(name, options)
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"a text set is named {known}[:{TEST}|:{VALIDATION}][:raw]; got {name!r}")
    text_set, split = KNOWN[known], match["split"] or TEST
    detokenizer = str if match["raw"] else text_set.detokenize
    origin, texts = _rows(text_set, split, folder)
    scratch.mkdir(parents=True, exist_ok=True)
    file = scratch / f"{name.replace(':', '-')}.jsonl"
    words, sha256 = _write(texts, lambda row: detokenizer(text_set.row(row)), file)
    if not file.stat().st_size:
        raise ValueError(f"{origin} holds no text")
    return FetchedSet(name, str(file), SourceOptions(), origin, f"sha256:{sha256}", text_set.per_word, words)


def _given(name: str, options: SourceOptions) -> FetchedSet:
    if name != sources.STDLIB and not name.startswith(sources.HUB) and not Path(name).exists():
        raise ValueError(
            f"{name!r} is neither a file or folder nor a text set; the sets are {', '.join(KNOWN)}"
        )
    if is_corpus(name):
        return FetchedSet(name, name, options, name, f"sha256:{Corpus.open(name, verify=False).digest}")
    return FetchedSet(name, name, options, name, sources.identity([name])[name])


def _rows(text_set: TextSet, split: str, folder: Path | None) -> tuple[str, Iterator[str]]:
    """Where a split is, and the text of each of its rows."""
    if folder is not None:
        files = text_set.find(split, folder)
        return ", ".join(map(str, files)), chain.from_iterable(map(text_set.read, files))
    origin = " ".join(filter(None, (text_set.hub, text_set.config, split)))
    table = rows.hub(text_set.hub, text_set.config, split, text_set.revision)
    return origin, rows.texts(table, text_set.columns, origin)


def _write(texts: Iterable[str], document: Callable[[str], str], file: Path) -> tuple[int, str]:
    """Write the documents of rows as JSON lines; the number of words and the SHA-256 of the rows."""
    words, digest = 0, hashlib.sha256()
    with file.open("w", encoding="utf-8") as out:
        for row in texts:
            digest.update(f"{row}\n".encode())
            words += len(row.split()) + 1
            text = document(row)
            if text.strip():
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return words, digest.hexdigest()
