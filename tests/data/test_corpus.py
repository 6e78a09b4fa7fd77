from __future__ import annotations

import dataclasses
import json
import os
import pickle
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from unmask.config import from_json, to_json
from unmask.data.corpus import Corpus, PrepareConfig, Split, prepare, stale_reasons
from unmask.data.corpus import _token_files as shards
from unmask.data.corpus import build as encoding
from unmask.data.readers import SourceConfig, Sources
from unmask.data.readers import _text as formats
from unmask.data.readers import sources as source_module
from unmask.data.readers._text import TextChunk
from unmask.data.tokenizers import Tokenizer
from unmask.data.tokenizers._unknown_stats import UnknownStats
from unmask.types import Vocab

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"real data sets are not at {DATA}")

LINES = PrepareConfig(SourceConfig(lines=True))
ALL = PrepareConfig(validation_fraction=0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Four hundred lines of different length, some beyond ASCII."""
    file = tmp_path / "source.txt"
    lines = [f"line {i}: {'naïve ' * (i % 7)}end" for i in range(400)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def decoded(corpus: Corpus, split: Split) -> list[str]:
    """Its documents as text."""
    ends = [0, *split.document_ends.tolist()]
    found = []
    for start, stop in pairwise(ends):
        ids = split.read(start, stop).tolist()
        if corpus.eos_id is not None and ids[-1] == corpus.eos_id:
            ids.pop()
        found.append(corpus.tokenizer.decode(ids))
    return found


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_documents_come_back(source: Path, tmp_path: Path, tokenizer: str) -> None:
    corpus = prepare([str(source)], tmp_path / "out", tokenizer, LINES)
    train, valid = corpus.splits["train"], corpus.splits["valid"]
    lines = source.read_text(encoding="utf-8").splitlines()
    kept, held_out = decoded(corpus, train), decoded(corpus, valid)
    assert sorted(kept + held_out) == sorted(lines)
    assert kept == [line for line in lines if line not in held_out]
    for split in (train, valid):
        assert split.num_documents == len(split.document_ends)
        assert split.num_tokens == split.document_ends[-1]
        assert split.text_stats.bytes == sum(len(line.encode()) for line in decoded(corpus, split))
        last = [split.read(end - 1, end).item() for end in split.document_ends.tolist()]
        assert set(last) == {corpus.eos_id} == {0}
    assert valid.text_stats.bytes / (train.text_stats.bytes + valid.text_stats.bytes) == pytest.approx(0.05, abs=0.02)
    assert corpus.vocab == Vocab(size=corpus.tokenizer.vocab_size + 1, mask_id=corpus.tokenizer.vocab_size, eos_id=0)


def test_what_is_in_the_folder(source: Path, tmp_path: Path) -> None:
    corpus = prepare([str(source)], tmp_path / "out", "bytes", LINES)
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train-00000.bin",
        "train.document_ends.bin",
        "valid-00000.bin",
        "valid.document_ends.bin",
    ]
    raw = np.fromfile(tmp_path / "out" / "train-00000.bin", "<u2")
    assert raw.tolist() == corpus.splits["train"].read(0, corpus.splits["train"].num_tokens).tolist()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["format"] == "unmask-corpus-5"
    assert manifest["sources"][0]["fingerprint"].startswith("text sha256:")
    assert (manifest["dtype"], manifest["tokenizer"]["vocab_size"]) == ("uint16", 256)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source.txt"], "nothing is left over"
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "out" / "manifest.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_without_a_separator_documents_abut(tmp_path: Path) -> None:
    (tmp_path / "a.fa").write_text(">1\nACD\n>2\nXx?\n>3\nE\n")
    corpus = prepare(
        [str(tmp_path / "a.fa")], tmp_path / "out", "protein", dataclasses.replace(ALL, allow_unknown=True)
    )
    train = corpus.splits["train"]
    assert corpus.eos_id is None
    assert train.read(0, train.num_tokens).tolist() == [0, 1, 2, 22, 22, 22, 3]
    assert train.document_ends.tolist() == [3, 6, 7]
    assert list(corpus.splits) == ["train"]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 1, "</s>": 70_000}, unk_token="a"))
    (tmp_path / "t.json").write_text(Tokenizer(inner).to_json())
    (tmp_path / "a.txt").write_text("a")
    corpus = prepare([str(tmp_path / "a.txt")], tmp_path / "out", str(tmp_path / "t.json"), ALL)
    assert corpus.manifest.dtype == "uint32"
    assert corpus.splits["train"].read(0, 2).tolist() == [1, 70_000]
    assert corpus.vocab.mask_id == 70_001


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_reading_across_shards(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    text = data.draw(st.binary(min_size=1, max_size=40)).hex()
    (folder / "a.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MAX_TOKEN_FILE_BYTES", data.draw(st.integers(1, 10)) * 2)
        corpus = prepare([str(folder / "a.txt")], folder / "out", "bytes", ALL)
    split = Corpus.open(corpus.folder, verify=True).splits["train"]
    start = data.draw(st.integers(0, split.num_tokens))
    stop = data.draw(st.integers(start, split.num_tokens))
    ids = split.read(start, stop)
    assert ids.dtype == np.int64
    assert ids.tolist() == [*text.encode(), 0][start:stop]


def test_reading_beyond_the_end_is_refused(source: Path, tmp_path: Path) -> None:
    split = prepare([str(source)], tmp_path / "out", "bytes", ALL).splits["train"]
    for start, stop in ((-1, 1), (2, 1), (0, split.num_tokens + 1)):
        with pytest.raises(ValueError, match=rf"^tokens {start}\.\.{stop} are not within the split's 0\.\."):
            split.read(start, stop)


def test_more_shards_than_a_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(shards, "_MAX_TOKEN_FILE_BYTES", 2)
    (tmp_path / "a.txt").write_text("x" * 600)
    split = prepare([str(tmp_path / "a.txt")], tmp_path / "out", "bytes", ALL).splits["train"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, limits[1]))
    try:
        assert split.read(0, 601).tolist() == [ord("x")] * 600 + [0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_split_can_be_sent_to_another_process(source: Path, tmp_path: Path) -> None:
    split = prepare([str(source)], tmp_path / "out", "bytes", ALL).splits["train"]
    expected = split.read(10, 20)
    sent = pickle.dumps(split)
    assert len(sent) < 2000, "the ids themselves stay on disk"
    assert pickle.loads(sent).read(10, 20).tolist() == expected.tolist()


def test_a_stretch_of_a_long_document_ends_without_separator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK_CHARS", 1024)
    text = "".join(f"{i:07d}\n" for i in range(8000))
    (tmp_path / "a.txt").write_text(text)
    corpus = prepare([str(tmp_path / "a.txt")], tmp_path / "out", "bytes")
    train, valid = corpus.splits["train"], corpus.splits["valid"]
    parts = decoded(corpus, train) + decoded(corpus, valid)
    assert len(parts) > 6
    assert "".join(sorted(parts)) == text  # zero-padded numbers sort as they stood
    assert sum(train.read(0, train.num_tokens) == 0) + sum(valid.read(0, valid.num_tokens) == 0) == 1
    for part in decoded(corpus, train):
        assert [int(number) for number in part.split()] == list(range(int(part[:7]), int(part[:7]) + len(part) // 8))


def test_rerunning_is_free(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tokenizer in ("bytes", "bpe:300"):
        out = tmp_path / tokenizer
        first = prepare([str(source)], out, tokenizer, LINES)
        before = contents(out)
        with monkeypatch.context() as patch:
            patch.setattr(Sources, "read_documents", None)
            again = prepare([str(source)], out, tokenizer, LINES)
        assert contents(out) == before
        assert again.digest == first.digest


def test_sources_are_hashed_once_however_often_they_are_asked_about(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []
    whole = source_module.sha256_of_files
    monkeypatch.setattr(source_module, "sha256_of_files", lambda *args: hashed.append(args) or whole(*args))
    sources = Sources([str(source)])
    prepare(sources, tmp_path / "out", "bytes", LINES)
    prepare(sources, tmp_path / "out", "bytes", LINES)
    assert stale_reasons(sources, tmp_path / "out", "bytes", LINES) == []
    assert stale_reasons(sources, tmp_path / "out", "dna", LINES) == ["the tokenizer or the config"]
    assert len(hashed) == 1
    source.write_text("other text")
    assert stale_reasons(Sources([str(source)]), tmp_path / "out", "bytes", LINES) == [f"the text of {source}"]
    with pytest.raises(ValueError, match=r"changed while it was read; prepare it again$"):
        prepare(sources, tmp_path / "new", "bytes", LINES)


def test_rerunning_needs_no_right_to_write(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare([str(source)], tmp_path / "out", "bytes", LINES)
    monkeypatch.setattr("unmask.data.corpus.prepare_corpus.file_lock", None)
    prepare([str(source)], tmp_path / "out", "bytes", LINES)


def test_the_same_request_gives_the_same_files(source: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    digests = {prepare([str(source)], folder, "bpe:300", LINES).digest for folder in folders}
    one, two = ({name: data for name, (data, _) in contents(folder).items()} for folder in folders)
    assert one == two
    assert len(digests) == 1


def test_anything_different_is_prepared_anew(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    copy = tmp_path / "copy.txt"
    copy.write_bytes(source.read_bytes())
    seen: dict[str, str] = {}

    def changed(what: str, *names: Path, tokenizer: str = "bytes", options: PrepareConfig = LINES) -> None:
        corpus = prepare([str(name) for name in names], out, tokenizer, options)
        assert corpus.digest not in seen, f"{what} gave the corpus of {seen.get(corpus.digest)}"
        assert Corpus.open(out, verify=True).digest == corpus.digest
        seen[corpus.digest] = what

    changed("first", source)
    assert prepare([str(copy)], out, "bytes", LINES).digest in seen, "the same text under another name"
    changed("tokenizer", source, tokenizer="bpe:300")
    changed("size of the tokenizer", source, tokenizer="bpe:310")
    changed("twice", source, copy)
    changed("documents", source, options=PrepareConfig())
    changed("share", source, options=PrepareConfig(SourceConfig(lines=True), validation_fraction=0.2))
    times = source.stat()
    source.write_text(source.read_text(encoding="utf-8").replace("line 7", "LINE 7"), encoding="utf-8")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed("text, with the same size and time", source)
    changed("tokenizer of the changed text", source, tokenizer="bpe:300")


def test_two_tokenizers_never_share_ids(source: Path, tmp_path: Path) -> None:
    """A tokenizer.json whose contents change under the same name is another tokenizer."""
    file = tmp_path / "tokenizer.json"
    text = source.read_text(encoding="utf-8")
    digests = set()
    for alphabet in (text, text + "z", text):
        file.write_text(Tokenizer.characters(alphabet).to_json(), encoding="utf-8")
        corpus = prepare([str(source)], tmp_path / "out", str(file), LINES)
        assert corpus.tokenizer.vocab_size == len(set(alphabet))
        assert "".join(decoded(corpus, corpus.splits["train"])).isprintable()
        digests.add(corpus.digest)
    assert len(digests) == 2


def test_a_damaged_corpus_is_prepared_anew(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare([str(source)], out, "bytes", LINES)
    for name in ("train-00000.bin", "valid.document_ends.bin", "manifest.json", "tokenizer.json"):
        (out / name).write_bytes((out / name).read_bytes()[:-10])
        assert prepare([str(source)], out, "bytes", LINES).digest == first.digest
        assert Corpus.open(out, verify=True).digest == first.digest


def test_nothing_else_is_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    prepare([str(source)], out, "bytes", LINES)  # an empty folder is no loss
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"out holds thesis\.txt, which is not of a corpus; choose another"):
        prepare([str(source)], out, "dna", LINES)
    assert (out / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ValueError, match=r"source\.txt is a file; choose another folder$"):
        prepare([str(source)], source, "bytes", LINES)


def test_a_link_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big-disk")
    prepare([str(source)], tmp_path / "out", "bytes", LINES)
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "big-disk" / "manifest.json").exists()


def test_progress_counts_bytes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_BATCH_CHARS", 1000)
    told: list[int] = []
    corpus = prepare([str(source)], tmp_path / "out", "bytes", LINES, told.append)
    assert len(told) > 5
    assert told == sorted(told)
    assert told[-1] == sum(split.text_stats.bytes for split in corpus.splits.values())


@pytest.mark.parametrize(
    ("sources", "tokenizer", "message"),
    [
        ([], "bytes", r"^a corpus needs at least one source, for instance stdlib$"),
        (["source.txt"], "bpe", r"^a BPE tokenizer is named bpe:SIZE with SIZE >= 257; got 'bpe'$"),
        (["source.txt"], "bpe:12", r"^a BPE tokenizer is named bpe:SIZE with SIZE >= 257; got 'bpe:12'$"),
        (["source.txt"], "bpe:4k", r"^a BPE tokenizer is named bpe:SIZE "),
        (["source.txt"], "byte", r"^there is no tokenizer 'byte'"),
        (
            ["source.txt"],
            "text8",
            r"source\.txt line 1: 2 of 11 characters are unknown to the tokenizer \('0' 1, ':' 1\) and cann",
        ),
        (["absent.txt"], "bytes", r"^there is no file or folder .*absent\.txt"),
    ],
)
def test_bad_requests(sources: list[str], tokenizer: str, message: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepare([str(tmp_path / name) for name in sources], tmp_path / "out", tokenizer, LINES)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source.txt"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"validation_fraction": 1.0}, r"^validation_fraction must be in \[0, 1\); got 1\.0$"),
        ({"validation_fraction": -0.1}, r"^validation_fraction must be in \[0, 1\); got -0\.1$"),
        ({"shard": (2, 2)}, r"^a shard \(i, n\) needs 0 <= i < n; got \(2, 2\)$"),
    ],
)
def test_bad_options(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrepareConfig(**fields)


def test_options_are_plain() -> None:
    options = PrepareConfig(SourceConfig(lines=True), 0.1, (1, 3))
    assert from_json(PrepareConfig, to_json(options)) == options


def test_a_corpus_with_the_mask_id_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_mask(self: Tokenizer, texts: list[str]) -> tuple[list[Any], UnknownStats]:
        return [np.full(len(text), self.vocab_size, self.dtype) for text in texts], UnknownStats()

    monkeypatch.setattr(Tokenizer, "encode_batch_with_stats", with_mask)
    monkeypatch.setattr(encoding, "_round_trip_difference", lambda *_: None)
    with pytest.raises(ValueError, match=r"^the corpus contains the mask id 256, which marks masked tokens"):
        prepare([str(source)], tmp_path / "out", "bytes", LINES)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The quick brown fox jumps over the lazy dog.\n" * 5800

    def generated(count: int) -> Iterator[TextChunk]:
        for i in range(count):
            yield TextChunk(f"{i} {text}", i % 50 == 49 or i == count - 1, "generated")

    peaks = []
    for count in (60, 180):  # 16 and 47 MB that never exist as a whole
        monkeypatch.setattr(Sources, "read_documents", lambda self, config, count=count: generated(count))
        tracemalloc.start()
        prepare([str(source)], tmp_path / f"{count}", "bytes", PrepareConfig(validation_fraction=0.01))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2e6
    assert peaks[1] < 60e6


def test_a_sample_is_even_and_bounded() -> None:
    texts = [f"{i:05d}" for i in range(20_000)]
    for budget in (5_000, 20_000, 10**6):
        kept = encoding._subsample(iter(texts), budget)
        assert kept == sorted(kept)
        assert min(budget, 100_000) / 2.2 <= sum(map(len, kept)) <= budget
        places = np.array([int(text) for text in kept])
        assert np.histogram(places, 10, (0, 20_000))[0].max() <= len(kept) / 10 * 1.15 + 2
    assert encoding._subsample(iter(["x" * 100]), 10) == ["x" * 100]


def test_a_tokenizer_is_not_trained_on_what_is_held_out(tmp_path: Path) -> None:
    lines = [f"common words {i}" for i in range(1000)]
    lines[12] = "zyzzyva " * 30  # the first document that is held out
    (tmp_path / "a.txt").write_text("\n".join(lines))
    corpus = prepare([str(tmp_path / "a.txt")], tmp_path / "out", "bpe:300", LINES)
    assert any("zyzzyva" in text for text in decoded(corpus, corpus.splits["valid"]))
    tokens = [corpus.tokenizer.decode([i]) for i in range(corpus.tokenizer.vocab_size)]
    assert " words" in tokens
    assert not any("zy" in token for token in tokens)


def parts_of(source: Path, out: Path, n: int, tokenizer: str = "bytes", **fields: Any) -> list[Corpus]:
    options = [PrepareConfig(SourceConfig(lines=True), shard=(i, n), **fields) for i in range(n)]
    return [prepare([str(source)], out, tokenizer, each) for each in options]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_parts_join(source: Path, tmp_path: Path, tokenizer: str) -> None:
    whole = prepare([str(source)], tmp_path / "whole", tokenizer, LINES)
    out = tmp_path / "out"
    parts = parts_of(source, out, 3, tokenizer)
    assert [corpus.folder.name for corpus in parts] == ["shard-0-of-3", "shard-1-of-3", "out"]
    joined = Corpus.open(out, verify=True)
    assert joined.tokenizer.digest == whole.tokenizer.digest
    for name, split in whole.splits.items():
        assert sorted(decoded(joined, joined.splits[name])) == sorted(decoded(whole, split))
        assert joined.splits[name].num_tokens == split.num_tokens
        assert joined.splits[name].text_stats.bytes == split.text_stats.bytes
        assert joined.splits[name].num_documents == split.num_documents
    before = contents(out)
    assert [corpus.folder for corpus in parts_of(source, out, 3, tokenizer)] == [out] * 3
    assert prepare([str(source)], out, tokenizer, LINES).digest == joined.digest
    assert contents(out) == before, "re-running is free"


def test_more_parts_than_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    joined = parts_of(tmp_path / "a.txt", tmp_path / "out", 4, validation_fraction=0)[-1]
    assert decoded(joined, joined.splits["train"]) == ["one", "two"]


def test_shards_are_not_merged_while_one_is_missing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prepare([str(source)], out, "bytes", PrepareConfig(shard=(1, 3))).folder.name == "shard-1-of-3"
    with pytest.raises(ValueError, match=r"out is not a prepared corpus: it has no manifest\.json$"):
        Corpus.open(out)


def test_parts_of_different_corpora_do_not_join(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts_of(source, out, 2)
    assert (out / "manifest.json").exists()
    for tokenizer, options in (
        ("bpe:300", PrepareConfig(SourceConfig(lines=True), shard=(1, 2))),
        ("bytes", PrepareConfig(shard=(1, 2))),
    ):
        assert prepare([str(source)], out, tokenizer, options).folder.name == "shard-1-of-2"
        assert not (out / "manifest.json").exists(), "no manifest may list files that were replaced"
    source.write_text("other text\nand more\n")
    changed = parts_of(source, out, 2)
    assert [corpus.folder.name for corpus in changed] == ["shard-0-of-2", "out"]
    both = [text for split in changed[1].splits.values() for text in decoded(changed[1], split)]
    assert "".join(sorted(both)).replace("\n", "") == "and moreother text"


def test_parts_and_whole_corpora_do_not_mix(source: Path, tmp_path: Path) -> None:
    prepare([str(source)], tmp_path / "whole", "bytes", LINES)
    with pytest.raises(ValueError, match=r"whole holds a corpus that was not prepared in shards; remove it or"):
        parts_of(source, tmp_path / "whole", 2)
    parts_of(source, tmp_path / "parts", 2)
    with pytest.raises(ValueError, match=r"parts holds a corpus in shards; remove it or choose another folder$"):
        prepare([str(source)], tmp_path / "parts", "dna", LINES)
    with pytest.raises(ValueError, match=r"parts holds 2 shards, not 3; remove them or choose another folder$"):
        parts_of(source, tmp_path / "parts", 3)
    assert Corpus.open(tmp_path / "parts", verify=True).splits["train"].num_tokens


@needs_data
def test_a_real_genome(tmp_path: Path) -> None:
    genome = DATA / "dna" / "genomes" / "ecoli_k12_mg1655.fa.gz"
    corpus = prepare([str(genome)], tmp_path / "out", "dna")
    train, valid = corpus.splits["train"], corpus.splits["valid"]
    assert train.num_tokens + valid.num_tokens == 4_639_675 + 1  # with the [SEP] after the last base
    assert train.text_stats.bytes + valid.text_stats.bytes == 4_639_675
    assert 0.04 < valid.num_tokens / 4_639_675 < 0.12
    assert corpus.tokenizer.decode(train.read(0, 20).tolist()) == "AGCTTTTCATTCTGACTGCA"


@needs_data
@pytest.mark.parametrize("name", ["wikitext_raw/valid.txt", "tinyshakespeare/input.txt"])
def test_cutting_a_document_does_not_change_its_tokens(name: str, tmp_path: Path) -> None:
    text = (DATA / name).read_text(encoding="utf-8")
    corpus = prepare([str(DATA / name)], tmp_path / "out", "bpe:1024", ALL)
    train = corpus.splits["train"]
    ids = train.read(0, train.num_tokens).tolist()
    assert corpus.tokenizer.decode(ids[:-1]) == text
    assert ids == [*corpus.tokenizer.encode(text), corpus.eos_id]
    assert train.document_ends.tolist() == [train.num_tokens]
