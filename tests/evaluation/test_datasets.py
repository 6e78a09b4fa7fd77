from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unmask.data.corpus import PrepareConfig, prepare
from unmask.data.readers import SourceConfig
from unmask.evaluation.datasets import DATASETS, ResolvedDataset, resolve_dataset

DATA = Path(__file__).parents[3] / "shared" / "data"


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def json_rows(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def documents(fetched: ResolvedDataset) -> list[str]:
    with open(fetched.source, encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def fetched_texts(name: str, tmp_path: Path) -> list[str]:
    return documents(resolve_dataset(name, tmp_path / "scratch", tmp_path / "sets"))


@pytest.mark.parametrize(
    ("name", "file", "content", "expected"),
    [
        ("ptb", "ptb.txt", " was n't \n", ["wasn't"]),
        ("ptb", "ptb/test.txt", " was n't \r\n <unk> \n", ["wasn't", "?"]),
        ("ptb", "ptb/ptb.test.txt", "no end", ["no end"]),
        ("ptb", "ptb_test.txt", "a\n", ["a"]),
        ("ptb", "ptb/my-test-set.jsonl", json_rows({"sentence": "a N b"}), ["a 1 b"]),
        ("ptb:validation", "ptb/valid.txt", "a\n", ["a"]),
        ("ptb:validation", "ptb/ptb.valid.txt", "a\n", ["a"]),
        ("ptb:validation", "ptb/validation-00000-of-00001.jsonl", json_rows({"text": "a"}), ["a"]),
        ("ptb:raw", "ptb/test.txt", " was n't \n", ["was n't"]),
        ("ptb:test:raw", "ptb/test.txt", " was n't \n", ["was n't"]),
        ("wikitext", "wikitext_raw/wiki.test.raw", " \n = A = \n", [" = A =\n"]),
        ("wikitext:raw", "wikitext/test.txt", " \n = A = \n", [" = A = \n"]),
        ("wikitext2", "wikitext2/test.tokens", " = A = \n \n a , b \n", [" = A =\n", " a, b\n"]),
        ("wikitext103", "wikitext-103/wiki.test.tokens", " a @-@ b \n", [" a-b\n"]),
        ("wikitext2:raw", "wikitext2/test.txt", " a \r\n", [" a \n"]),
        ("wikitext2", "wikitext2/test.csv", 'text\n" = A = \n"\n""\n', [" = A =\n"]),
        ("lm1b", "lm1b/heldout-00000-of-00050.txt", "So , it is .\n", ["So, it is."]),
        ("lm1b", "lm1b/news.en.heldout-00000-of-00050", "So , it is .\n", ["So, it is."]),
        ("lambada", "lambada/test.txt", "“a” b\n", ['\n"a" b']),
        ("lambada:raw", "lambada_test.jsonl", json_rows({"text": "“a” b"}), ["“a” b"]),
        ("ag_news", "ag_news/test.csv", '"3","Ttl","Its ""text"""\n', ['Ttl Its "text"']),
        ("ag_news", "ag_news/test.csv", '"3","Ttl","a\r\nb"\r\n', ["Ttl a\nb"]),
        ("ag_news", "ag_news/test.csv", "class,title,text\n3,Ttl,Txt\n", ["Ttl Txt"]),
        ("ag_news", "ag_news.csv", "Class Index,Title,Description\n3,Ttl,Txt\n", ["Ttl Txt"]),
        ("ag_news", "ag_news/test.jsonl", json_rows({"text": "Ttl Txt", "label": 3}), ["Ttl Txt"]),
        ("arxiv", "arxiv/papers.jsonl", json_rows({"title": "t", "body": "a @-@ b so ."}), ["a-b so."]),
        ("arxiv:validation", "arxiv/val.jsonl", json_rows({"article": "a ."}), ["a ."]),
        ("pubmed", "scientific_papers/pubmed/test.jsonl", json_rows({"article": "so a . b"}), ["so a. b"]),
    ],
)
def test_a_set_is_found_under_its_usual_names(
    name: str, file: str, content: str, expected: list[str], tmp_path: Path
) -> None:
    written(tmp_path / "sets" / file, content)
    assert fetched_texts(name, tmp_path) == expected


def test_parquet_files_are_read_with_their_empty_rows(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "sets/wikitext2").mkdir(parents=True)
    table = arrow.table({"text": ["", " = A = \n", None, " a , b \n"], "n": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "sets/wikitext2/test-00000-of-00001.parquet")
    found = resolve_dataset("wikitext2", tmp_path / "scratch", tmp_path / "sets")
    assert documents(found) == [" = A =\n", " a, b\n"]
    assert found.num_words == 4 + 3 + 3


def test_the_best_name_is_taken_alone_and_a_pattern_with_all_its_files(tmp_path: Path) -> None:
    for file in ("ptb/test.txt", "ptb/test2.txt", "ptb.txt", "ptb/train.txt", "ptb/valid.txt"):
        written(tmp_path / "sets" / file, f"{file}\n")
    assert fetched_texts("ptb", tmp_path) == ["ptb/test.txt"]
    for number in (1, 0):
        written(tmp_path / f"sets/lm1b/heldout-0000{number}-of-00050", f"shard {number}\n")
    found = resolve_dataset("lm1b", tmp_path / "scratch", tmp_path / "sets")
    assert documents(found) == ["shard 0", "shard 1"]
    assert found.origin == ", ".join(str(tmp_path / f"sets/lm1b/heldout-0000{n}-of-00050") for n in (0, 1))


def test_what_is_told_of_a_set(tmp_path: Path) -> None:
    """Words are those of the rows as they are distributed, with the end of every line, blank ones too."""
    text = " \n = <unk> = \n \n it is n't , he said \n"
    file = written(tmp_path / "sets/wikitext2/test.tokens", text)
    plain, raw = (
        resolve_dataset(name, tmp_path / "scratch", tmp_path / "sets") for name in ("wikitext2", "wikitext2:raw")
    )
    assert plain.num_words == raw.num_words == 9 + 4
    assert plain.fingerprint == raw.fingerprint == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    assert plain.origin == str(file)
    assert plain.per_word
    assert plain.source != raw.source
    assert {name for name, text_set in DATASETS.items() if text_set.per_word} == {
        *("ptb", "wikitext2", "wikitext103", "lm1b")
    }


def test_a_fetched_set_can_be_prepared(tmp_path: Path) -> None:
    written(tmp_path / "sets/ptb.txt", "was n't\n\na\n")
    found = resolve_dataset("ptb", tmp_path / "scratch", tmp_path / "sets")
    corpus = prepare(
        [found.source], tmp_path / "corpus", config=PrepareConfig(found.source_config, validation_fraction=0)
    )
    split = corpus.splits["train"]
    separators = 2  # the tokens are bytes
    assert (split.num_documents, split.num_tokens) == (2, len("wasn't") + len("a") + separators)


def test_other_sources_are_handed_on(tmp_path: Path) -> None:
    file = written(tmp_path / "mine.jsonl", json_rows({"body": "a"}))
    options = SourceConfig(field="body")
    found = resolve_dataset(str(file), tmp_path / "scratch", tmp_path, options)
    assert (found.source, found.source_config, found.origin) == (str(file), options, str(file))
    assert found.fingerprint == f".jsonl sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert (found.num_words, found.per_word) == (None, False)
    assert resolve_dataset("stdlib", tmp_path / "scratch").source == "stdlib"
    assert not (tmp_path / "scratch").exists()


def test_long_rows_and_lines(tmp_path: Path) -> None:
    """Beyond the pieces in which files are read, and the cells that the csv library takes."""
    long = "word " * 100_000
    written(tmp_path / "sets/ptb/test.txt", f"{long}\nb\n")
    assert fetched_texts("ptb", tmp_path) == [long.strip(), "b"]
    table = io.StringIO()
    csv.writer(table).writerow(["1", "t", long])
    written(tmp_path / "sets/ag_news/test.csv", table.getvalue())
    assert fetched_texts("ag_news", tmp_path) == [f"t {long}"]


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        (
            "ptb:tests",
            "ptb.txt",
            "a",
            r"^a dataset is named ptb\[:test\|:validation\]\[:raw\]; got 'ptb:tests'$",
        ),
        ("ptb:raw:test", "ptb.txt", "a", r"^a dataset is named ptb"),
        (
            "ptbb",
            "ptb.txt",
            "a",
            r"^'ptbb' is neither a file or folder nor a dataset; the datasets are ptb, wiki",
        ),
        (
            "ptb:validation",
            "ptb.txt",
            "a",
            r"sets has none of ptb/valid, .* with a suffix of \.txt .*\.parquet$",
        ),
        (
            "lm1b",
            "ptb.txt",
            "a",
            r"has none of lm1b/test, .*, lm1b with .*, nor lm1b/heldout-\*, nor lm1b/news",
        ),
        ("pubmed", "pubmed/test.txt", "a", r"has none of pubmed/test, .*nor with scientific_papers_pubmed, "),
        ("ptb", "ptb.txt", " \n", r"ptb\.txt holds no text$"),
        ("ptb", "ptb.txt", "", r"ptb\.txt is empty$"),
        (
            "ptb",
            "ptb.jsonl",
            '{"sentence": "a"}\n{"x": 1}',
            r"line 2 has no field 'sentence' or 'text'; it has 'x'$",
        ),
        ("ptb", "ptb.jsonl", '{"text": "a"}\n{', r"ptb\.jsonl line 2 is not valid JSON: "),
        ("ptb", "ptb.jsonl", "[]", r"line 1 must hold a JSON object; got list$"),
        ("ptb", "ptb.jsonl", '{"text": 1}', r"ptb\.jsonl line 1 has int in 'text' where a text is expected$"),
        (
            "ptb",
            "ptb.jsonl",
            '{"text": "\\ud800"}',
            r"line 1 has '\\ud800' in its text, which is half a surrogate pair$",
        ),
        (
            "ag_news",
            "ag_news.csv",
            "1,a,b\n1,a\n",
            r"ag_news\.csv line 2 has 2 columns and so no column 3$",
        ),
        (
            "ag_news",
            "ag_news.csv",
            'x,y,z\n1,a,b"\n',
            r"no column 'title' and 'text' or .*; its first line has 'x', 'y', 'z' ",
        ),
        ("ag_news", "ag_news.csv", '1,a,"b', r"ag_news\.csv line 1 is not a row of a table: unexpected end of data$"),
        ("ag_news", "ag_news.parquet", "PAR1", r"ag_news\.parquet is not a parquet file that can be read: "),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(
    name: str, file: str, content: str, message: str, tmp_path: Path
) -> None:
    written(tmp_path / "sets" / file, content)
    with pytest.raises(ValueError, match=message) as raised:
        fetched_texts(name, tmp_path)
    assert "\n" not in str(raised.value)


def test_text_that_is_not_utf8_and_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    for name in ("ptb.txt", "lambada.jsonl"):
        (tmp_path / "sets" / name).write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"ptb\.txt is not UTF-8: byte 0xff"):
        fetched_texts("ptb", tmp_path)
    with pytest.raises(ValueError, match=r"lambada\.jsonl is not UTF-8: byte 0xff"):
        fetched_texts("lambada", tmp_path)
    with pytest.raises(ValueError, match=r"ptb\.txt is not a folder with datasets$"):
        resolve_dataset("ptb", tmp_path, tmp_path / "sets/ptb.txt")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local folder, which `datasets` loads as it would load PTB and WikiText-2 from the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub"
    written(folder / "ptb/test.jsonl", json_rows({"sentence": "was n't"}, {"sentence": "N N N"}))
    written(folder / "ptb/validation.jsonl", json_rows({"sentence": "held out"}))
    written(folder / "wikitext2/test.jsonl", json_rows({"text": ""}, {"text": " a , b \n"}))
    for name in ("ptb", "wikitext2"):
        local = replace(DATASETS[name], hub_id=str(folder / name), config=None, revision=None)
        monkeypatch.setitem(DATASETS, name, local)
    return folder


def test_without_a_folder_sets_come_from_the_hub(hub: Path, tmp_path: Path) -> None:
    found = resolve_dataset("ptb", tmp_path / "scratch")
    assert documents(found) == ["wasn't", "N 1 N"]
    assert (found.num_words, found.origin) == (5 + 2, f"{hub / 'ptb'} test")
    rows = b"was n't\nN N N\n"
    assert found.fingerprint == f"sha256:{hashlib.sha256(rows).hexdigest()}"
    assert documents(resolve_dataset("ptb:validation", tmp_path / "scratch")) == ["held out"]
    wikitext = resolve_dataset("wikitext2", tmp_path / "scratch")
    assert (documents(wikitext), wikitext.num_words) == ([" a, b\n"], 3 + 2)
    with pytest.raises(ValueError, match=r"^the data set .*wikitext2 cannot be loaded: .*validation"):
        resolve_dataset("wikitext2:validation", tmp_path / "scratch")


def test_what_the_hub_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*args: Any, **kwargs: Any) -> list[dict[str, str]]:
        asked.append((*args, kwargs["split"], kwargs["revision"]))
        return [{"text": "a", "sentence": "a", "article": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("unmask.io.hub._is_reachable", lambda: True)
    for name, text_set in DATASETS.items():
        resolve_dataset(f"{name}:{text_set.published_split}", tmp_path)
    converted = "refs/convert/parquet"
    assert asked == [
        ("ptb-text-only/ptb_text_only", "penn_treebank", "validation", converted),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "validation", None),
        ("Salesforce/wikitext", "wikitext-2-v1", "validation", None),
        ("Salesforce/wikitext", "wikitext-103-v1", "validation", None),
        ("billion-word-benchmark/lm1b", "plain_text", "test", converted),
        ("EleutherAI/lambada_openai", "default", "test", None),
        ("fancyzhx/ag_news", None, "test", None),
        ("armanc/scientific_papers", "arxiv", "validation", converted),
        ("armanc/scientific_papers", "pubmed", "validation", converted),
    ]


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"^this needs the package datasets: pip install 'unmask\[hub\]'$"):
        resolve_dataset("ptb", tmp_path)


# Documents and the start of the SHA-256 of all of them, each with a NUL, were computed with the published
# functions and the published loading; words are the known sizes of the sets.
@pytest.mark.skipif(not DATA.is_dir(), reason=f"the public data sets are not at {DATA}")
@pytest.mark.parametrize(
    ("name", "count", "words", "digest"),
    [
        ("ptb", 3761, 82_430, "22dac0c936475ed7"),
        ("ptb:validation", 3370, 73_760, "a365d9396afc36ec"),
        ("wikitext", 2891, 245_569, "5ba9fefda7bc9e4a"),
        ("wikitext:validation", 2461, 217_646, "8f6083e44c0bf556"),
        ("wikitext2", 2891, 245_569, "705809bf66b058a0"),
        ("lm1b", 6075, 159_658, "27bb65b82fad5123"),
        ("lambada", 5153, 385_036, "91d2d3b25e58e703"),
        ("ag_news", 7600, None, "16d5936369df6cbb"),
        ("arxiv", 113, None, "3819e4c3cb54bacb"),
    ],
)
def test_real_sets_become_what_the_published_code_makes_of_them(
    name: str, count: int, words: int | None, digest: str, tmp_path: Path
) -> None:
    found = resolve_dataset(name, tmp_path, DATA)
    texts = documents(found)
    assert len(texts) == count
    assert words in (None, found.num_words)
    assert hashlib.sha256("".join(f"{text}\0" for text in texts).encode()).hexdigest().startswith(digest)
