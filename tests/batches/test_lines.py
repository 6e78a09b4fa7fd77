"""Files of requests: a bad line has a number and a sentence, and the others are read."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from unmask.batches import _lines as lines
from unmask.batches import read_requests


def test_bad_lines_do_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MAX_LINE_BYTES", 400)
    deep = b'{"a":' * 66 + b"1" + b"}" * 66
    content = b"\n".join(
        [
            b'\xef\xbb\xbf{"n": 1}\r',
            b"",
            b"[1]",
            b"{'n': 2}",
            b'{"n": "\xff"}',
            deep,
            b'{"n": "' + b"x" * 3000 + b'"}',
            b'{"n": "\\ud83d\\ude00"}',
            b'{"n": "\\ud83d"}',
            b'{"n": 3}',
        ]
    )
    file = tmp_path / "requests.jsonl"
    file.write_bytes(content)
    read = read_requests(file)
    assert read.sha256 == hashlib.sha256(content).hexdigest()
    good = {line.number: line.fields for line in read.lines if line.error is None}
    assert good == {1: {"n": 1}, 8: {"n": "😀"}, 10: {"n": 3}}
    bad = {line.number: line.error or "" for line in read.lines if line.error is not None}
    for number, told in {
        3: "must hold a JSON object; got list",
        4: "is not valid JSON: Expecting property name",
        5: "can't decode byte 0xff",
        6: "nested too deeply",
        7: "more than 400 bytes",
        9: "half a surrogate pair",
    }.items():
        assert told in bad.pop(number)
    assert bad == {}


def test_gzipped_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    assert [line.fields for line in read_requests(tmp_path / "requests.jsonl.gz").lines] == [{"text": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", b"", "is empty: it must have a request on each line"),
        ("a.jsonl", b" \n\n", "is empty"),
        ("a.jsonl", b'{"n": 1}\n\x00\x01', "is not a text file of JSON lines: line 2 has a NUL byte"),
        ("a.csv", b"text\nabc\n", "must hold requests as JSON lines"),
        ("a.jsonl.gz", b"no gzip", "is not a gzip file"),
    ],
)
def test_files_that_are_none(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=told):
        read_requests(tmp_path / name)


def test_files_that_are_not_there_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_requests(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_requests(tmp_path)
    monkeypatch.setattr(lines, "_MAX_FILE_BYTES", 10)
    (tmp_path / "large.jsonl").write_text('{"n": 1}\n' * 3)
    with pytest.raises(ValueError, match="more than 10 bytes: divide it"):
        read_requests(tmp_path / "large.jsonl")
