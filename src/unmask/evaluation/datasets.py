"""Datasets for zero-shot evaluation: a name becomes a file to prepare.

    NAME[:SPLIT][:raw]     a dataset of `DATASETS`; SPLIT is `test` (if not given) or `validation`;
                           `raw` leaves the text as it is distributed
    a prepared corpus      its validation split, or all of it if nothing was held out
    anything else          a source as `unmask.data.readers.Sources` takes it, such as a path

`resolve_dataset` writes the documents as JSON lines and returns how to prepare them. A row of a dataset is a document:
a line of PTB, WikiText and LM1B, a passage of LAMBADA, an article of AG News, a paper.

The zero-shot perplexities of the MDLM paper are per token of the detokenized text, on the splits in
`published_split`. Two things differ here. An empty row (a third of WikiText's) is not a document, while the published
code still counts its separator: half a percent of the tokens. And the paper's LAMBADA is OpenAI's version (cased, not
tokenized), as on the hub; the original files are lower-case tokens, so their perplexity is not comparable.
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
from typing import TYPE_CHECKING

from unmask.data.corpus import Corpus, is_corpus
from unmask.data.readers import ColumnOptions, HubDataset, SourceConfig, Sources, read_texts
from unmask.evaluation import _detokenize as detokenize
from unmask.registry import AllowCode

if TYPE_CHECKING:  # names and files need no torch
    from unmask.data.loader import RowLayout
    from unmask.likelihood.corpus import EvalConfig
    from unmask.model import LanguageModel

__all__ = ["DATASETS", "MDLM_ZERO_SHOT", "ResolvedDataset", "resolve_dataset"]

_TEST, _VALIDATION = "test", "validation"
_PARQUET_REVISION = "refs/convert/parquet"
"""The hub's branch for datasets whose main branch is a script, which `datasets` no longer runs."""

_NAME_PATTERN = re.compile(rf"(?P<known>\w+)(?::(?P<split>{_TEST}|{_VALIDATION}))?(?P<raw>:raw)?")
_SPLIT_FILE_NAMES = {_TEST: ("test",), _VALIDATION: ("valid", "validation", "val")}
_TABLE_SUFFIXES = (".jsonl", ".csv", ".parquet")


@dataclass(frozen=True)
class _EvalDataset:
    """Where a dataset is found, and how its rows become documents."""

    hub_id: str
    """Its id on the hub."""
    config: str | None
    """Its configuration on the hub."""
    folder_names: tuple[str, ...]
    """Names of local files or folders, the preferred one first."""
    columns: ColumnOptions = (("text",),)
    """The columns of the text, alternatives in order of preference."""
    row_transform: Callable[[str], str] = str
    """Turns a row of a local file into a row as on the hub."""
    detokenize: Callable[[str], str] = str
    """Turns a row of tokens into plain text."""
    published_split: str = _VALIDATION
    """The split of the published zero-shot evaluation."""
    per_word: bool = False
    """Whether models that were trained on the dataset report perplexity per word, each end of a line being one."""
    suffixes: tuple[str, ...] = (".txt", ".tokens", ".raw", *_TABLE_SUFFIXES)
    """Suffixes of local files."""
    file_patterns: tuple[str, ...] = ()
    """Other names of local files of the test split."""
    revision: str | None = None
    """The branch or commit on the hub."""

    def find_files(self, split: str, folder: Path) -> list[Path]:
        """The files of a split: all that match the first pattern that any file matches."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder with datasets")
        for name in self.folder_names:
            stems = self._file_stems(name, split)
            patterns = [f"{stem}{suffix}" for stem in stems for suffix in self.suffixes]
            for pattern in [*patterns, *self._extra_patterns(name, split)]:
                files = sorted(path for path in folder.glob(pattern) if path.is_file())
                if files:
                    return files
        first, *others = self.folder_names
        stems = self._file_stems(first, split)
        raise ValueError(
            f"{folder} has none of {', '.join(stems)} with a suffix of {' '.join(self.suffixes)}"
            + "".join(f", nor {pattern}" for pattern in self._extra_patterns(first, split))
            + (f" (nor with {', '.join(others)} in place of {first})" if others else "")
        )

    def read_rows(self, file: Path) -> Iterator[str]:
        """The text of each row of a file."""
        return read_texts(file, self.columns)

    def _file_stems(self, name: str, split: str) -> list[str]:
        words = _SPLIT_FILE_NAMES[split]
        exact = [stem for word in words for stem in (f"{name}/{word}", f"{name}?{word}")]
        return [*exact, *(f"{name}/*{word}*" for word in words), *([name] if split == _TEST else [])]

    def _extra_patterns(self, name: str, split: str) -> list[str]:
        return [f"{name}/{file}" for file in self.file_patterns] if split == _TEST else []


def _ensure_newline(line: str) -> str:
    return line.removesuffix("\n") + "\n"


_wikitext = partial(_EvalDataset, "Salesforce/wikitext", row_transform=_ensure_newline, detokenize=detokenize.WIKITEXT)
_papers = partial(
    _EvalDataset,
    "armanc/scientific_papers",
    columns=(("article",), ("body",), ("text",)),
    detokenize=detokenize.SCIENTIFIC_PAPERS,
    suffixes=_TABLE_SUFFIXES,
    file_patterns=("papers.jsonl",),
    revision=_PARQUET_REVISION,
)

DATASETS: dict[str, _EvalDataset] = {
    "ptb": _EvalDataset(
        "ptb-text-only/ptb_text_only",
        "penn_treebank",
        ("ptb",),
        columns=(("sentence",), ("text",)),
        row_transform=str.strip,
        detokenize=detokenize.PTB,
        per_word=True,
        revision=_PARQUET_REVISION,
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
    "lm1b": _EvalDataset(
        "billion-word-benchmark/lm1b",
        "plain_text",
        ("lm1b",),
        row_transform=str.strip,
        detokenize=detokenize.LM1B,
        published_split=_TEST,
        per_word=True,
        file_patterns=("heldout-*", "news.en.heldout-*"),
        revision=_PARQUET_REVISION,
    ),
    "lambada": _EvalDataset(
        "EleutherAI/lambada_openai",
        "default",
        ("lambada",),
        detokenize=detokenize.LAMBADA,
        published_split=_TEST,
    ),
    "ag_news": _EvalDataset(
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
        published_split=_TEST,
        suffixes=_TABLE_SUFFIXES,
    ),
    "arxiv": _papers("arxiv", ("arxiv", "scientific_papers_arxiv", "scientific_papers/arxiv")),
    "pubmed": _papers("pubmed", ("pubmed", "scientific_papers_pubmed", "scientific_papers/pubmed")),
}

MDLM_ZERO_SHOT = tuple(
    f"{name}:{DATASETS[name].published_split}"
    for name in ("ptb", "wikitext", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
)
"""The seven datasets of the paper's zero-shot table, with the splits that its code reads."""


@dataclass(frozen=True)
class ResolvedDataset:
    """A dataset as a source for `prepare`."""

    name: str
    source: str
    source_config: SourceConfig
    origin: str
    """The files, or the dataset on the hub, that it was made from."""
    fingerprint: str
    """Equal for equal texts. For a named dataset, the SHA-256 of its unchanged rows, each with a newline: for text
    files, what `sha256sum` computes of all of them together."""
    per_word: bool = False
    num_words: int | None = None
    """The words of a named dataset before detokenization; the end of each row (also of an empty one) counts as a word.
    Nats per word are nats / words, whatever the tokenizer."""
    recipe: str | None = None
    """Which rows of a named dataset are scored, and what was done to them."""

    def describe_recipe(self, lm: LanguageModel, corpus: Corpus, layout: RowLayout, config: EvalConfig) -> str:
        """How it is scored, in one line: its rows, what separates them, the windows, and how often they are read."""
        separator = "nothing between documents"
        if corpus.eos_id is not None and lm.tokenizer is not None:
            spelled = lm.tokenizer.id_to_token(corpus.eos_id)
            separator = f"{spelled!r} after each document, which counts as a token"
        some = "" if config.windows is None else f", {config.windows:,} of them, spread evenly"
        passes = f"{'' if config.precision is None else 'at least '}{config.replicates} passes of other masks"
        if lm.denoiser.process.is_left_to_right:
            passes = "one pass, exact"
        return "; ".join(filter(None, (self.recipe, separator, f"{layout.summary}{some}", passes)))


def resolve_dataset(
    name: str,
    scratch: Path,
    folder: Path | None = None,
    source_config: SourceConfig = SourceConfig(),  # noqa: B008
    *,
    allow_code: AllowCode = False,
) -> ResolvedDataset:
    """The dataset called `name`; the documents of a named dataset are written to the folder `scratch`.

    A named dataset is read from local files in `folder`, or from the hub without one. `source_config` is for sources
    that are not named datasets, `allow_code` for the tokenizer of a corpus folder. Memory does not grow with the
    dataset.
    """
    known = name.split(":")[0]
    if known not in DATASETS:
        return _resolve_source(name, source_config, allow_code)
    match = _NAME_PATTERN.fullmatch(name)
    if match is None:
        raise ValueError(f"a dataset is named {known}[:{_TEST}|:{_VALIDATION}][:raw]; got {name!r}")
    dataset, split = DATASETS[known], match["split"] or _TEST
    detokenizer = str if match["raw"] else dataset.detokenize
    origin, texts = _dataset_rows(dataset, split, folder)
    scratch.mkdir(parents=True, exist_ok=True)
    file = scratch / f"{name.replace(':', '-')}.jsonl"
    words, sha256 = _write_documents(texts, lambda row: detokenizer(dataset.row_transform(row)), file)
    if not file.stat().st_size:
        raise ValueError(f"{origin} holds no text")
    return ResolvedDataset(
        name,
        str(file),
        SourceConfig(),
        origin,
        f"sha256:{sha256}",
        dataset.per_word,
        words,
        f"the {split} split, {_describe_rows(detokenizer)}; empty rows are left out",
    )


def _describe_rows(detokenizer: Callable[[str], str]) -> str:
    if isinstance(detokenizer, detokenize.Detokenizer):
        return f"detokenized by the {len(detokenizer.rules)} rules of SEDD and MDLM ({detokenizer.name})"
    return "as it is distributed"


def _resolve_source(name: str, source_config: SourceConfig, allow_code: AllowCode) -> ResolvedDataset:
    if not Sources.exists(name):
        raise ValueError(f"{name!r} is neither a file or folder nor a dataset; the datasets are {', '.join(DATASETS)}")
    if is_corpus(name):
        corpus = Corpus.open(name, verify=False, allow_code=allow_code)
        return ResolvedDataset(name, name, source_config, name, f"sha256:{corpus.digest}")
    return ResolvedDataset(name, name, source_config, name, Sources([name]).fingerprints[name])


def _dataset_rows(dataset: _EvalDataset, split: str, folder: Path | None) -> tuple[str, Iterator[str]]:
    """The origin of a split, and the text of each of its rows."""
    if folder is not None:
        files = dataset.find_files(split, folder)
        return ", ".join(map(str, files)), chain.from_iterable(map(dataset.read_rows, files))
    origin = " ".join(filter(None, (dataset.hub_id, dataset.config, split)))
    hub_dataset = HubDataset(dataset.hub_id, dataset.config, split, dataset.revision)
    return origin, hub_dataset.read_texts(dataset.columns)


def _write_documents(texts: Iterable[str], document: Callable[[str], str], file: Path) -> tuple[int, str]:
    """Write the documents of rows as JSON lines; returns the number of words and the SHA-256 of the rows."""
    words, digest = 0, hashlib.sha256()
    with file.open("w", encoding="utf-8") as out:
        for row in texts:
            digest.update(f"{row}\n".encode())
            words += len(row.split()) + 1
            text = document(row)
            if text.strip():
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return words, digest.hexdigest()
