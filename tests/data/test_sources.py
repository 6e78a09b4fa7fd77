from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import os
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unmask.data.readers import ColumnOptions, PromptCompletion, SourceConfig, Sources, read_texts
from unmask.data.readers import _fasta as sequences
from unmask.data.readers import _json_records as jsonrows
from unmask.data.readers import _text as formats
from unmask.data.readers._text import CHUNK_CHARS, TextChunk, chunk_text, split_point

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"real data sets are not at {DATA}")


def texts(*names: Path | str, **options: Any) -> list[str]:
    """Whole documents."""
    found = [""]
    for piece in Sources([str(name) for name in names]).read_documents(SourceConfig(**options)):
        found[-1] += piece.text
        if piece.is_last:
            found.append("")
    assert found.pop() == "", "the last piece must end its document"
    return found


def written(path: Path, contents: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    text = " two\n\nlines, naïve 漢字 \u2028 🙂 \r a\n"
    assert texts(written(tmp_path / "a.txt", text)) == [text]
    assert texts(written(tmp_path / "c.txt", text.replace("\n", "\r\n"))) == [text]
    assert texts(written(tmp_path / "b", b"\xef\xbb\xbf" + text.encode())) == [text]


def test_a_line_is_a_document(tmp_path: Path) -> None:
    file = written(tmp_path / "a.txt", "one\r\n\n  \ntwo \u2028 still two\x0bso\nthree")
    assert texts(file, lines=True) == ["one", "two \u2028 still two\x0bso", "three"]
    assert [piece.source for piece in Sources([str(file)]).read_documents(SourceConfig(lines=True))] == [
        f"{file} line 1",
        f"{file} line 4",
        f"{file} line 5",
    ]


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.jsonl", "a.txt", ".hidden", ".git/config", "empty.txt"):
        contents = "" if name == "empty.txt" else json.dumps({"text": name})
        written(tmp_path / name, contents)
    assert [json.loads(text)["text"] if "{" in text else text for text in texts(tmp_path)] == [
        "a.txt",
        "a/b.jsonl",
        "a/z.txt",
        "b.txt",
    ]


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "one\ntwo", "id": 1}, {"text": ""}, {"text": None}, {"text": "é"}]
    for suffix in (".jsonl", ".ndjson", ".JSONL"):
        file = written(tmp_path / f"a{suffix}", "\n".join(map(json.dumps, rows)) + "\n\n")
        assert texts(file) == ["one\ntwo", "é"]
    assert texts(written(tmp_path / "b.jsonl", '{"body": "b"}'), field="body") == ["b"]


def test_tables(tmp_path: Path) -> None:
    table = 'label,text\n1,"one, ""two""\n\nthree"\n2,four\n'
    assert texts(written(tmp_path / "a.csv", table)) == ['one, "two"\n\nthree', "four"]
    assert texts(tmp_path / "a.csv", column="label") == ["1", "2"]
    assert texts(tmp_path / "a.csv", column="2") == ["text", 'one, "two"\n\nthree', "four"]
    tabs = 'id\ttext\n1\tan "unfinished\n2\t"quote\n'
    assert texts(written(tmp_path / "a.tsv", tabs)) == ['an "unfinished', '"quote']
    long = "x" * 200_000  # the library's own limit is 131072
    assert texts(written(tmp_path / "b.csv", f"text\n{long}\n")) == [long]


def test_fasta(tmp_path: Path) -> None:
    file = ">one of them\nACgt\nnn\r\n\n>two\n; a comment\nAC GT\n>empty\n>last\nttt"
    assert texts(written(tmp_path / "a.fa", file)) == ["ACGTNN", "ACGT", "TTT"]
    origins = [piece.source for piece in Sources([str(tmp_path / "a.fa")]).read_documents(SourceConfig())]
    assert origins == [f"{tmp_path / 'a.fa'} record of line {line}" for line in (1, 5, 9)]


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_where_a_file_is_read_in_blocks_does_not_matter(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta = written(tmp_path / "a.fa", ">one\nAC\nGT\n;c>c\n>two>\n\nACGT>\nA\n>t\nG")
    lines = written(tmp_path / "a.txt", "naïve\r\n\n漢字\n🙂 end")
    whole = written(tmp_path / "b.txt", "\ufeff\ufeffa\r\nb\r\r\nc\r")
    listed = written(tmp_path / "a.json", ' [ {"text": "é\\u00e9"} , "a\\n\\"b", {"text": "c", "n": -12.5e3}\n]\n')
    reads = written(tmp_path / "a.fq", "@r1 x\nACgt\nN\n+r1\n@II\nII\n\n@r2\n\n+\n\n@r3\r\nTT\r\n+\r\n+@\r\n")
    table = written(tmp_path / "a.csv", 'a,text\n1,"é\n2"\n3,x\n')
    expected = ["ACGT", "ACGT>A", "G", "é\n2", "x", "\ufeffa\nb\r\nc\r", "éé", 'a\n"b', "c", "ACGTN", "TT"]
    in_lines = ["naïve", "漢字", "🙂 end"]
    for size in (formats._READ_BYTES, block):
        monkeypatch.setattr(formats, "_READ_BYTES", size)
        assert texts(fasta, table, whole, listed, reads) == expected
        assert texts(lines, lines=True) == in_lines
        for name in ("utf-16", "utf-16-be", "utf-8-sig", "cp1252", "shift_jis"):
            text = "one\r\ntwo" if name == "shift_jis" else "naïve\r\nend"
            assert texts(written(tmp_path / name, text.encode(name)), encoding=name) == [text.replace("\r", "")]


def test_gzip_around_everything(tmp_path: Path) -> None:
    for name, contents in {
        "a.txt": "text",
        "b": "text",
        "c.jsonl": '{"text": "json"}',
        "d.csv": "text\ncsv",
        "e.fa": ">a\nACGT",
    }.items():
        written(tmp_path / f"{name}.gz", gzip.compress(contents.encode()))
    assert texts(tmp_path) == ["text", "text", "json", "csv", "ACGT"]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = ["one", None, "", "é" * 3, *(str(i) for i in range(1000))]
    table = arrow.table({"text": rows, "id": list(range(len(rows)))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    assert texts(tmp_path / "a.parquet") == [row for row in rows if row]
    written(tmp_path / "b.parquet.gz", gzip.compress((tmp_path / "a.parquet").read_bytes()))
    assert texts(tmp_path / "b.parquet.gz") == [row for row in rows if row]
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'body'; it has 'text', 'id'$"):
        texts(tmp_path / "a.parquet", column="body")
    with pytest.raises(ValueError, match=r"a\.parquet row 1 has int in 'id' where a text is expected$"):
        texts(tmp_path / "a.parquet", column="id")
    with pytest.raises(ValueError, match=r"c\.parquet is not a parquet file that can be read: "):
        texts(written(tmp_path / "c.parquet", b"PAR1 or not"))


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `datasets` loads as it would load it from the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    rows = [{"text": "one", "n": 1}, {"text": None, "n": 2}, {"text": "three", "n": 3}]
    written(folder / "train.jsonl", "\n".join(map(json.dumps, rows)))
    written(folder / "validation.jsonl", json.dumps({"text": "held out", "n": 4}))
    return folder


def test_hub_data_sets(data_set: Path) -> None:
    assert texts(f"hub:{data_set}") == ["one", "three"]
    assert texts(f"hub:{data_set}::validation") == ["held out"]
    assert texts(f"hub:{data_set}:default:validation") == ["held out"]
    for name, options, message in (
        (f"hub:{data_set}:nothing", {}, rf"^the data set {data_set} cannot be loaded: .*nothing"),
        (f"hub:{data_set}::test", {}, rf"^the data set {data_set} cannot be loaded: .*test"),
        (f"hub:{data_set}/not-there", {}, r"^the data set .*not-there cannot be loaded: "),
        (f"hub:{data_set}", {"column": "body"}, r"train row 1 has no column 'body'; it has 'text', 'n'$"),
        (f"hub:{data_set}", {"column": "n"}, r"train row 1 has int in 'n' where a text is expected$"),
        ("hub:", {}, r"^a hub data set is named hub:NAME, .*; got hub:$"),
        ("hub:a:b:c:d", {}, r"^a hub data set is named hub:NAME, .*; got hub:a:b:c:d$"),
    ):
        with pytest.raises(ValueError, match=message):
            texts(name, **options)


def test_the_identity_of_a_hub_data_set(data_set: Path) -> None:
    name = f"hub:{data_set}::validation"
    before = Sources([name]).fingerprints[name]
    assert before.startswith(f"hub {data_set} config:None split:validation fingerprint:")
    times = (data_set / "train.jsonl").stat()
    written(data_set / "train.jsonl", (data_set / "train.jsonl").read_text().replace("one", "two"))
    os.utime(data_set / "train.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert Sources([name]).fingerprints[name] != before


@pytest.mark.parametrize(
    ("module", "name", "extra"), [("pyarrow.parquet", "a.parquet", "parquet"), ("datasets", "hub:a", "hub")]
)
def test_a_missing_extra_is_named(
    module: str, name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = module.split(".")[0]
    monkeypatch.setitem(sys.modules, package, None)
    source = name if name.startswith("hub:") else str(written(tmp_path / name, "PAR1"))
    with pytest.raises(ValueError, match=rf"^this needs the package {package}: pip install 'unmask\[{extra}\]'$"):
        texts(source)


def test_the_standard_library() -> None:
    origins = set()
    size = 0
    for piece in Sources(["stdlib"]).read_documents(SourceConfig()):
        origins.add(piece.source)
        size += len(piece.text)
    assert 5e6 < size < 30e6
    assert {"stdlib/this.py", "stdlib/json/decoder.py", "stdlib/idlelib/idle.py"} <= origins
    assert {"stdlib/unittest/case.py", "stdlib/doctest.py"} <= origins
    folders = {folder for name in origins for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    assert len(origins) > 400
    assert Sources(["stdlib"]).fingerprints["stdlib"].startswith("Python 3.")


def test_several_sources_follow_on_one_another(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1", "one"), written(tmp_path / "2", "two")
    assert texts(two, one, two) == ["two", "one", "two"]


BAD = {
    "latin-1": ("a.txt", "caf\xe9".encode("latin-1"), r"a\.txt is not UTF-8: byte 0xe9 at offset 3 "),
    "utf-16": ("a.txt", "text".encode("utf-16"), r"UTF-8: byte 0xff at offset 0 .* --encoding utf-16\)$"),
    "cut": ("a.txt", "x漢".encode()[:-1], r"a\.txt is not UTF-8: byte 0xe6 at offset 1 "),
    "far": (
        "a.txt",
        "é".encode() * (1 << 20) + b"\xff",
        r"a\.txt is not UTF-8: byte 0xff at offset 2097152 does not belong there \(.* --encoding latin-1\)$",
    ),
    "nul": ("a.txt", b"text\0\xff", r"a\.txt is not text: it has a NUL byte at offset 4$"),
    "garbage": ("a.bin", bytes(range(256)) * 8, r"a\.bin is not text: it has a NUL byte at offset 0$"),
    "empty": ("a.txt", b"", r"a\.txt is empty$"),
    "blank": ("a.jsonl", b"\n\n", r"a\.jsonl holds no text$"),
    "bom only": ("a.txt", b"\xef\xbb\xbf", r"a\.txt holds no text$"),
    "json": ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a\.jsonl line 2 is not valid JSON: "),
    "deep json": ("a.jsonl", b"[" * 100_000, r"a\.jsonl line 1 is not valid JSON: "),
    "json list": ("a.jsonl", b"[1]", r"a\.jsonl line 1 must hold a JSON object; got list$"),
    "field": ("a.jsonl", b'\n{"a": 1, "b": 2}', r"a\.jsonl line 2 has no field 'text'; it has 'a', 'b'$"),
    "no text": ("a.jsonl", b'{"text": 3}', r"a\.jsonl line 1 has int in 'text' where a text is expected$"),
    "escaped nul": ("a.jsonl", rb'{"text": "a\u0000"}', r"a\.jsonl line 1 has a NUL character in its text"),
    "surrogate": ("a.jsonl", rb'{"text": "a\ud800"}', r"a\.jsonl line 1 has '\\ud800' in its text, which"),
    "column": ("a.csv", b"a,b\n1,2", r"a\.csv has no column 'text'; its first line has 'a', 'b' \(for a "),
    "quotes": ("a.csv", b'text\n"a"b\n', r"a\.csv line 2 is not a row of a table: "),
    "open quote": ("a.csv", b'text\na\n"b\n', r"a\.csv line 3 is not a row of a table: "),
    "short row": ("a.csv", b"a,text\n1,2\n\n3\n", r"a\.csv line 4 has 1 columns and so no column 2$"),
    "semicolons": ("a.csv", b"a;text\n1;2", r"a\.csv seems to be separated by ';': use --delimiter ';'$"),
    "tabs": ("a.csv", b"a\ttext\n1\t2", r"a\.csv seems to be separated by 'tab': use --delimiter 'tab'$"),
    "object": (
        "a.json",
        b'{"a":\n{"b": 1}}',
        r"a\.json is neither a list of objects or texts, as .* nor JSON",
    ),
    "prose": ("a.json", b"some prose\n", r"a\.json is neither a list of objects or texts, as .* nor JSON l"),
    "numbers": ("a.json", b'["a", 3]', r"a\.json item 2 must hold a JSON object; got int$"),
    "open list": ("a.json", b'["a", "b"', r"a\.json item 2 is not valid JSON: a comma or \] must follow it"),
    "open text": ("a.json", b'["a", "b', r"a\.json item 2 is not valid JSON: Unterminated string"),
    "comma": ("a.json", b'["a",]', r"a\.json item 2 is not valid JSON: "),
    "no comma": (
        "a.json",
        b'["a" "b"]',
        r"a\.json item 1 is not valid JSON: a comma or \] must follow it; got",
    ),
    "two lists": (
        "a.json",
        b'["a"]["b"]',
        r"a\.json is not valid JSON: there is text after the end of its list$",
    ),
    "deep item": ("a.json", b"[" * 100_000, r"a\.json item 1 is not valid JSON: it is nested too deeply$"),
    "item's field": ("a.json", b'[{"a": 1}]', r"a\.json item 1 has no field 'text'; it has 'a'$"),
    "no fastq": ("a.fastq", b"\nACGT\n", r"a\.fastq is not FASTQ: line 2 does not start with '@'$"),
    "no plus": ("a.fq", b"@a\nAC\n", r"a\.fq ends within the record of line 1: it has no line that starts "),
    "next read": (
        "a.fq",
        b"@a\nAC\n@b\n",
        r"a\.fq line 3 starts a record before that of line 1 has its '\+' line",
    ),
    "few qualities": (
        "a.fq",
        b"@a\nACG\n+\nII",
        r"a\.fq ends within the record of line 1: it has 2 qualities",
    ),
    "many qualities": (
        "a.fq",
        b"@a\nA\n+\nIII\n",
        r"a\.fq line 4 has too many qualities: the record of line 1",
    ),
    "fasta": ("a.fa", b"\nACGT\n>x\n", r"a\.fa is not FASTA: line 1 does not start with '>'$"),
    "no gzip": ("a.txt.gz", b"text", r"a\.txt\.gz is not a gzip file that can be read: "),
    "cut gzip": (
        "a.txt.gz",
        gzip.compress(os.urandom(999).hex().encode())[:-90],
        r"a\.txt\.gz is not a gzip file that can be read: ",
    ),
    "gzipped garbage": (
        "a.txt.gz",
        gzip.compress(b"abc\xff"),
        r"a\.txt\.gz is not UTF-8: byte 0xff at offset 3 ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_sentence(case: str, tmp_path: Path) -> None:
    name, contents, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        texts(written(tmp_path / name, contents))
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_delimiter_is_named(tmp_path: Path) -> None:
    for name in ("a.csv", "a.tsv"):
        assert texts(written(tmp_path / name, "id;text\n1;a, b\n"), delimiter=";") == ["a, b"]
    assert texts(written(tmp_path / "b.csv", 'id\ttext\n1\t"a\tb"\n'), delimiter="\t") == ["a\tb"]
    for wrong in ("", ";;", '"', "\n"):
        with pytest.raises(ValueError, match=r"^a delimiter must be one character, such as ; or a tab; got "):
            SourceConfig(delimiter=wrong)


def test_an_encoding_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", "text\ncafé\n".encode("latin-1"))
    assert texts(file, encoding="latin-1") == ["café"]
    for wrong in ("latin-99", "base64", "rot13"):
        with pytest.raises(ValueError, match=f"^there is no encoding '{wrong}'; examples are utf-8, latin-1"):
            SourceConfig(encoding=wrong)
    with pytest.raises(ValueError, match=r"a\.csv is not ascii: byte 0xe9 at offset 8 .* --encoding utf-8\)$"):
        texts(file, encoding="ascii")
    with pytest.raises(ValueError, match=r"b\.txt is not utf-16: byte 0x.. at offset 4 does not belong there"):
        texts(written(tmp_path / "b.txt", "\ufeffx".encode("utf-16-le") + b"\x00\xd8"), encoding="utf-16")
    with pytest.raises(ValueError, match=r"c\.txt is not text: it has a NUL byte at offset 2$"):
        texts(written(tmp_path / "c.txt", "x\0".encode("utf-16-le")), encoding="utf-16-le")


def test_lists_of_json(tmp_path: Path) -> None:
    rows = [{"text": "one\ntwo", "id": 1}, "bare", {"text": None}, {"text": "é"}]
    for number, spaces in enumerate((None, 2)):
        file = written(tmp_path / f"{number}.json", json.dumps(rows, indent=spaces))
        assert texts(file) == ["one\ntwo", "bare", "é"]
    assert texts(written(tmp_path / "b.json", '{"body": "b"}\n{"body": "c"}\n'), field="body") == ["b", "c"]
    written(tmp_path / "b.json.gz", gzip.compress(b'["zipped"]'))
    assert texts(tmp_path / "b.json.gz") == ["zipped"]
    pairs = PromptCompletion("q", "a")
    written(tmp_path / "c.json", '[{"q": "why", "a": "so"}]')
    found = list(Sources([str(tmp_path / "c.json")]).read_documents(SourceConfig(pair_format=pairs)))
    assert [piece.segments for piece in found] == [("why", "so")]
    with pytest.raises(ValueError, match=r"0\.json item 1 has no field 'q'"):
        list(Sources([str(tmp_path / "0.json")]).read_documents(SourceConfig(pair_format=pairs)))
    with pytest.raises(ValueError, match=r"d\.json item 1 is a text where an object with 'q', 'a' is expected$"):
        list(Sources([str(written(tmp_path / "d.json", '["x"]'))]).read_documents(SourceConfig(pair_format=pairs)))


def test_a_list_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = (text for text in chain(["["], repeat('{"text": "' + "x" * 1000 + '"},\n')))
    records = jsonrows._read_json(endless, "endless")
    next(records)
    tracemalloc.start()
    for _ in range(2000):
        assert len(next(records)[1]["text"]) == 1000  # type: ignore[index]
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
    monkeypatch.setattr(jsonrows, "MAX_RECORD_CHARS", 5000)
    for wrong in ('[{"text": "', '["'):
        with pytest.raises(ValueError, match=r"^endless item 1 has more than 5,000 characters$"):
            next(jsonrows._read_json(chain([wrong], repeat("x" * 100)), "endless"))


def test_a_line_of_json_is_not_longer_than_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(formats, "MAX_RECORD_CHARS", 1000)
    monkeypatch.setattr(formats, "_READ_BYTES", 100)
    long = "x" * 2000
    for name, contents in {"a.jsonl": json.dumps({"text": long}), "a.csv": f"text\n{long}"}.items():
        with pytest.raises(ValueError, match=rf"{name} line . has more than 1,000 characters$"):
            texts(written(tmp_path / name, contents))
    assert texts(written(tmp_path / "a.txt", long), lines=True) == [long]


def test_reads(tmp_path: Path) -> None:
    file = "@one x\nACgtN\n+\n@IIII\n@two\nTTT\nTT\n+two\n+++\n@@\n"
    for name in ("a.fastq", "a.fq", "a.FASTQ"):
        assert texts(written(tmp_path / name, file)) == ["ACGTN", "TTTTT"]
    written(tmp_path / "a.fastq.gz", gzip.compress(file.encode()))
    assert texts(tmp_path / "a.fastq.gz") == ["ACGTN", "TTTTT"]
    origins = [piece.source for piece in Sources([str(tmp_path / "a.fq")]).read_documents(SourceConfig())]
    assert origins == [f"{tmp_path / 'a.fq'} record of line {line}" for line in (1, 5)]


def test_column_numbers_start_at_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^columns are counted from 1; got 0 for .*a\.csv$"):
        texts(written(tmp_path / "a.csv", "a\n"), column="0")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^there is no file or folder .*absent \(other sources are stdlib"):
        texts(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"^the folder .* holds no files$"):
        texts(tmp_path)
    with pytest.raises(ValueError, match=r"^/dev/null is neither a file nor a folder$"):
        texts("/dev/null")
    with pytest.raises(ValueError, match=r"cannot be read: File name too long$"):
        texts("x" * 5000)
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for look in (
        lambda: texts(tmp_path),
        lambda: Sources([str(tmp_path)]).fingerprints,
        lambda: Sources([str(tmp_path)]).file_stats(),
    ):
        with pytest.raises(ValueError, match=r"link cannot be read: No such file or directory$"):
            look()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "folder" / "a.txt", "text")
    file.chmod(0)
    with pytest.raises(ValueError, match=r"a\.txt cannot be read: Permission denied$"):
        texts(file)
    file.parent.chmod(0)
    try:
        with pytest.raises(ValueError, match=r"folder cannot be read: Permission denied$"):
            texts(tmp_path)
    finally:
        file.parent.chmod(0o755)


@settings(deadline=None)
@given(st.lists(st.text(alphabet="ab \né漢", max_size=30), max_size=8))
@example(["\n" * 50])
def test_pieces_are_the_document(parts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "CHUNK_CHARS", 16)
        found = list(chunk_text(parts, "here"))
    assert "".join(piece.text for piece in found) == "".join(parts)
    assert all(0 < len(piece.text) <= 16 for piece in found)
    assert [piece.is_last for piece in found] == [False] * (len(found) - 1) + [True] * bool(found)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("abc\ndef\n\nghijkl", 4),  # between two written characters, though a blank line comes later
        ("abc\n\ndef  ghijkl", 5),  # before a written character
        ("abc\n  def ghijkl", 9),  # an indented line does not start anew; a word does
        ("abcdefghijklmnop", 12),
        ("abcdefghijk\nmnop", 12),
        ("abcdefghijkl\nnop", 12),
    ],
)
def test_where_a_text_is_cut(text: str, stop: int) -> None:
    assert split_point(text, 12, 12) == stop


def test_long_documents_are_streamed(tmp_path: Path) -> None:
    """A file of pieces is not read further than the piece that is asked for."""
    base = "ACGTTGCA" * 1000 + "\n"
    long = written(tmp_path / "a.txt", base * 1000)
    record = written(tmp_path / "a.fa", ">a\n" + (base * 1000).replace("\n", ""))  # a genome in one line
    for file in (long, record):
        stream = Sources([str(file)]).read_documents(SourceConfig())
        first = next(stream)
        assert (len(first.text) <= (sequences.BLOCK_BASES if file == record else CHUNK_CHARS), first.is_last) == (
            True,
            False,
        )
        rest = list(stream)
        assert [piece.is_last for piece in rest] == [False] * (len(rest) - 1) + [True]
        assert sum(len(piece.text) for piece in [first, *rest]) >= 8_000_000


def test_a_stream_reads_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        asked = 0

        def read(self, size: int) -> bytes:
            self.asked += size
            return b"word " * (size // 5)

    for read in (formats.read_text, sequences._read_fasta):
        endless: Any = Endless()
        if read is sequences._read_fasta:
            endless.read(0)
            monkeypatch.setattr(sequences, "decode_stream", lambda handle, *_: _headed(handle))
        stream = read(endless, "endless")
        for _ in range(50):
            assert isinstance(next(stream), TextChunk)
        chunk = sequences.BLOCK_BASES if read is sequences._read_fasta else CHUNK_CHARS
        assert endless.asked <= 65 * chunk + 2 * formats._READ_BYTES  # a fifth is white space


def _headed(handle: Any) -> Iterator[str]:
    yield ">head\n"
    while True:
        yield handle.read(formats._READ_BYTES).decode()


def test_identity_is_the_contents(tmp_path: Path) -> None:
    file = written(tmp_path / "x" / "a.txt", "some text")
    before = Sources([str(file)]).fingerprints[str(file)]
    assert before == f"text sha256:{hashlib.sha256(b'some text').hexdigest()}"
    copy = written(tmp_path / "y" / "b", "some text")
    assert Sources([str(copy)]).fingerprints[str(copy)] == before  # wherever it lies
    other = written(tmp_path / "y" / "b.jsonl", "some text")
    assert Sources([str(other)]).fingerprints[str(other)] != before  # but not how it is read
    times = file.stat()
    written(file, "same size")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert Sources([str(file)]).fingerprints[str(file)] != before


def test_identity_of_a_folder(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "one")
    written(tmp_path / "b.txt", "two")

    def look() -> str:
        return Sources([str(tmp_path)]).fingerprints[str(tmp_path)]

    seen = {look()}
    written(tmp_path / ".hidden", "x")
    assert {look()} == seen
    written(tmp_path / "b.txt", "owt")
    seen.add(look())
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    seen.add(look())
    written(tmp_path / "c.txt", "")
    seen.add(look())
    assert len(seen) == 4


def test_the_stamp_notices_a_write(tmp_path: Path) -> None:
    file = written(tmp_path / "a.txt", "text")
    before = Sources([str(file), "stdlib"]).file_stats()
    assert Sources([str(file), "stdlib"]).file_stats() == before
    with file.open("a") as handle:
        handle.write("more")
    assert Sources([str(file), "stdlib"]).file_stats() != before


def test_options_are_plain() -> None:
    config = importlib.import_module("unmask.config")
    options = SourceConfig(lines=True, column="3")
    assert config.from_json(SourceConfig, config.to_json(options)) == options


@needs_data
@pytest.mark.parametrize(
    ("name", "options", "count", "start"),
    [
        ("ag_news/test.csv", {"column": "3"}, 7600, "Unions representing workers at Turner"),
        ("ptb/valid.txt", {"lines": True}, 3370, " consumers may want to move their"),
        ("lm1b/heldout-00000-of-00050.txt", {"lines": True}, 6075, ""),
        ("arxiv/papers.jsonl", {"field": "body"}, 113, ""),
        ("glue/SST-2/dev.tsv", {"column": "sentence"}, 872, "it 's a charming and often affecting journey"),
        ("dna/gue/mouse_0/dev.csv", {"column": "sequence"}, 810, ""),
        ("dna/genomes/ecoli_k12_mg1655.fa.gz", {}, 1, "AGCTTTTCATTCTGACTGCAACGGGCAATATGTCTCTGTGTGGATT"),
        ("wikitext_raw/valid.txt", {}, 1, ""),
    ],
)
def test_real_data(name: str, options: dict[str, Any], count: int, start: str) -> None:
    found = texts(DATA / name, **options)
    assert len(found) == count
    assert found[0].startswith(start)


@needs_data
def test_a_genome() -> None:
    (genome,) = texts(DATA / "dna" / "genomes" / "ecoli_k12_mg1655.fa.gz")
    assert len(genome) == 4_639_675  # of U00096.2
    assert set(genome) == set("ACGT")


def test_the_size_of_text_is_known_where_files_are_text(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("é" * 10)
    (tmp_path / "two").write_text("abc")
    assert Sources([str(tmp_path)]).text_bytes() == 23
    assert Sources([str(tmp_path / "two"), str(tmp_path)]).text_bytes() == 26
    library = Sources(["stdlib"]).text_bytes()
    assert library is not None
    read = sum(len(piece.text.encode()) for piece in Sources(["stdlib"]).read_documents(SourceConfig()))
    assert 0.99 * library < read <= library  # a few files of it are in other encodings
    for name in ("three.txt.gz", "three.jsonl"):
        (tmp_path / name).write_bytes(b"x")
        assert Sources([str(tmp_path / name), str(tmp_path / "two")]).text_bytes() is None
        assert Sources([str(tmp_path)]).text_bytes() is None
        (tmp_path / name).unlink()
    assert Sources(["hub:wikitext"]).text_bytes() is None
    with pytest.raises(ValueError, match="there is no file or folder"):
        Sources([str(tmp_path / "nowhere")]).text_bytes()


@pytest.mark.parametrize(
    ("name", "content", "columns", "expected"),
    [
        ("a.txt", "one\n\ntwo", (("text",),), ["one", "", "two"]),
        ("a.jsonl", '{"text": ""}\n{"text": "b", "title": "t"}\n', (("title", "text"), ("text",)), ["", "t b"]),
        ("a.csv", "title,text\na,\n,b\n", (("body",), ("title", "text")), ["a ", " b"]),
        ("a.csv", "3,t,x\n4,,y\n", (("title", "text"), ("2", "3")), ["t x", " y"]),
    ],
)
def test_rows_of_a_test_set_are_read_with_empty_ones(
    name: str, content: str, columns: ColumnOptions, expected: list[str], tmp_path: Path
) -> None:
    assert list(read_texts(written(tmp_path / name, content), columns)) == expected
