"""Regions of FASTA files: names, BED files, what is held out, and what is refused."""

from __future__ import annotations

import gzip
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.data.corpus import Corpus, PrepareConfig, prepare, stale_reasons
from unmask.data.readers import SourceConfig, Sources
from unmask.data.readers import _fasta as fasta
from unmask.data.readers._regions import Interval, _without, parse_region

DATA = Path(__file__).parents[3] / "shared" / "data"
LETTERS = np.random.default_rng(0).choice(list("ACGT"), 3000)
CHR1, CHR2 = "".join(LETTERS[:2000]), "".join(LETTERS[2000:])
HLA = "HLA-A*01:01"


@pytest.fixture
def genome(tmp_path: Path) -> str:
    """Contigs chr1 (2,000 bases), chr2 (1,000) and one with colons in its name (8), in lines of 60."""
    contigs = {"chr1 the first": CHR1.lower(), "chr2": CHR2, HLA: "ACGTNNAC"}
    lines = [f">{name}\n" + "\n".join(s[i : i + 60] for i in range(0, len(s), 60)) for name, s in contigs.items()]
    with gzip.open(tmp_path / "genome.fa.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    return str(tmp_path / "genome.fa.gz")


def documents(*names: str, held_out: tuple[str, ...] = (), config: SourceConfig = SourceConfig()) -> list[str]:  # noqa: B008
    texts, text = [], ""
    for chunk in Sources(names).read_documents(config, Sources(held_out) if held_out else None):
        text += chunk.text
        if chunk.is_last:
            texts.append(text)
            text = ""
    return texts


def test_regions_count_from_one_with_both_ends(genome: str) -> None:
    assert documents(f"{genome}:chr2") == [CHR2]
    assert documents(f"{genome}:chr1:1-1") == [CHR1[0]]
    assert documents(f"{genome}:chr1:1,001-2,000", f"{genome}:chr2:7-") == [CHR1[1000:], CHR2[6:]]
    assert documents(f"{genome}:{HLA}", f"{genome}:{HLA}:2-3") == ["ACGTNNAC", "CG"]
    (chunk,) = Sources([f"{genome}:chr1:11-20"]).read_documents(SourceConfig())
    assert chunk.source == f"{genome} chr1:11-20"


def test_bed_files_count_from_zero_without_the_end(genome: str, tmp_path: Path) -> None:
    bed = tmp_path / "some.bed"
    bed.write_text("# comment\ntrack name=x\n\nchr2\t10\t20\ttrain\nchr1 0 5 valid\nchr1 1990 2000 train\n")
    expected = {"train": [CHR1[1990:], CHR2[10:20]], "valid": [CHR1[:5]]}
    assert documents(f"{genome}:{bed}") == [CHR1[:5], *expected["train"]]
    for label, texts in expected.items():
        assert documents(f"{genome}:{bed}:{label}") == texts
    extended = SourceConfig(interval_bases=100)
    assert documents(f"{genome}:{bed}:train", config=extended) == [CHR1[1900:], CHR2[10:110]]  # moved back inside
    assert documents(f"{genome}:{bed}:train", config=SourceConfig(interval_bases=1500)) == [CHR1[500:], CHR2]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_region_is_a_slice(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("regions")
    letters = data.draw(st.text("ACGTN", min_size=1, max_size=50))
    width = data.draw(st.integers(1, 60))
    lines = "\n".join(letters[i : i + width] for i in range(0, len(letters), width))
    (folder / "a.fa").write_text(f">other\nAC\n>c x\n{lines}\n>last\nT\n")
    start = data.draw(st.integers(0, len(letters) - 1))
    stop = data.draw(st.integers(start + 1, len(letters)))
    name = f"{folder}/a.fa:c:{start + 1:,}-{stop:,}"
    assert documents(name) == [letters[start:stop]]
    kept = [part for part in (letters[:start], letters[stop:]) if part]
    if len(kept) or stop - start < len(letters):
        assert documents(f"{folder}/a.fa", held_out=(name,)) == ["AC", *kept, "T"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=5), st.integers(0, 20), st.integers(1, 20))
def test_what_is_left_without_intervals(cut: list[tuple[int, int]], start: int, size: int) -> None:
    intervals = [(first, first + length) for first, length in cut]
    left = [i for first, last in _without(start, start + size, intervals) for i in range(first, last)]
    assert left == [i for i in range(start, start + size) if not any(a <= i < b for a, b in intervals)]


@given(st.text(min_size=1, max_size=8).filter(lambda s: "\n" not in s), st.integers(1, 10**9), st.integers(0, 10**6))
def test_a_region_is_read_back(contig: str, first: int, more: int) -> None:
    assert parse_region(f"{contig}:{first:,}-{first + more}") == Interval(contig, first - 1, first + more)


def test_named_regions_are_held_out_and_not_learned(genome: str, tmp_path: Path) -> None:
    config = PrepareConfig(valid_sources=(f"{genome}:chr1:501-700", f"{genome}:chr2:1-10"))
    corpus = prepare([genome], tmp_path / "out", "dna", config)
    assert texts_of(corpus, "valid") == [CHR1[500:700], CHR2[:10]]
    assert texts_of(corpus, "train") == [CHR1[:500], CHR1[700:], CHR2[10:], "ACGTNNAC"]
    assert f"({genome}:chr1:501-700, {genome}:chr2:1-10)" in corpus.describe()[0]
    assert stale_reasons([genome], tmp_path / "out", "dna", config) == []
    other = replace(config, valid_sources=(f"{genome}:chr1:501-701",))
    assert stale_reasons([genome], tmp_path / "out", "dna", other)


def test_named_files_are_held_out_of_any_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    config = PrepareConfig(valid_sources=(str(tmp_path / "b.txt"),), validation_fraction=0.5)
    corpus = prepare([str(tmp_path / "a.txt")], tmp_path / "out", "bytes", config)
    assert (texts_of(corpus, "train"), texts_of(corpus, "valid")) == (["text a"], ["text b"])
    with pytest.raises(ValueError, match=r"b\.txt is among the text to learn and among that to hold out"):
        prepare([str(tmp_path)], tmp_path / "other", "bytes", config)


def texts_of(corpus: Corpus, name: str) -> list[str]:
    split = corpus.splits[name]
    ends = [0, *split.document_ends.tolist()]
    ids = [split.read(start, stop).tolist() for start, stop in pairwise(ends)]
    return [corpus.tokenizer.decode([i for i in document if i != corpus.eos_id]) for document in ids]


def test_whole_megabases_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a contig, at multiples of the block's size, and not windows next to what is learned."""
    monkeypatch.setattr(fasta, "BLOCK_BASES", 100)
    (tmp_path / "a.fa").write_text(f">chr1\n{CHR1}\n")
    corpus = prepare([str(tmp_path / "a.fa")], tmp_path / "out", "dna", PrepareConfig(validation_fraction=0.1))
    held_out = texts_of(corpus, "valid")
    assert [(len(text), CHR1.index(text) % 100) for text in held_out] == [(100, 0)] * 2
    assert sorted(texts_of(corpus, "train") + held_out, key=CHR1.index) != held_out


BAD = {
    "contig": ("chr3", r"has no contig 'chr3'; the nearest are 'chr1', 'chr2'$|'chr2', 'chr1'$"),
    "far contig": ("Wolbachia", r"has no contig 'Wolbachia'; it has 'chr1', 'chr2', 'HLA-A\*01:01'$"),
    "end": ("chr2:990-1,001", r"^chr2:990-1,001 ends beyond .*genome\.fa\.gz: its contig chr2 has 1,000 bases$"),
    "start": ("chr2:1001-", r"^chr2:1,001- ends beyond .*: its contig chr2 has 1,000 bases$"),
    "zero": ("chr2:0-5", r"^a region is CONTIG:FIRST-LAST with 1 <= FIRST <= LAST; got 'chr2:0-5'$"),
    "backwards": ("chr2:7-5", r"FIRST <= LAST; got 'chr2:7-5'$"),
    "nothing": ("", r"a region is written .*:CONTIG or .*; got "),
    "no bed": ("none.bed", r"there is no file or folder none\.bed"),
}


@pytest.mark.parametrize(("region", "sentence"), BAD.values(), ids=list(BAD))
def test_a_region_that_is_not_there_is_refused(region: str, sentence: str, genome: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        documents(f"{genome}:{region}")


@pytest.mark.parametrize(
    ("contents", "label", "sentence"),
    [
        ("chr1\t5\n", "", r"some\.bed line 1 is not BED: it needs a contig, a start and a larger end.*got 'chr1\\t5'$"),
        ("chr1 5 5\n", "", r"line 1 is not BED"),
        ("chr1 -1 5\n", "", r"line 1 is not BED"),
        ("# nothing\n", "", r"some\.bed has no intervals$"),
        ("", "", r"some\.bed is empty$"),
        (
            "chr1 1 5 train\nchr1 1 5 test\n",
            ":valid",
            r"no interval 'valid' in its fourth column, but 'test', 'train'$",
        ),
        ("chr9 1 5\n", "", r"has no contig 'chr9'"),
        ("chr1 1 2001\n", "", r"^chr1:2-2,001 ends beyond"),
    ],
    ids=["columns", "empty", "negative", "no-lines", "no-bytes", "label", "contig", "end"],
)
def test_a_bed_file_that_does_not_fit_is_refused(
    contents: str, label: str, sentence: str, genome: str, tmp_path: Path
) -> None:
    (tmp_path / "some.bed").write_text(contents)
    with pytest.raises(ValueError, match=sentence):
        documents(f"{genome}:{tmp_path}/some.bed{label}")


def test_a_bed_file_alone_and_files_that_are_not_fasta_are_refused(tmp_path: Path) -> None:
    (tmp_path / "some.bed").write_text("chr1 1 5\n")
    with pytest.raises(ValueError, match=r"some\.bed names regions of a FASTA file: write genome\.fa:"):
        documents(f"{tmp_path}/some.bed")
    (tmp_path / "a.fa").write_text("ACGT\n")
    with pytest.raises(ValueError, match=r"a\.fa is not FASTA: line 1 does not start with '>'"):
        documents(f"{tmp_path}/a.fa:chr1")
    (tmp_path / "b.fa").write_text("")
    with pytest.raises(ValueError, match=r"b\.fa is empty"):
        documents(f"{tmp_path}/b.fa:chr1")
    with pytest.raises(ValueError, match=r"there is no file or folder .*none\.fa"):
        documents(f"{tmp_path}/none.fa:chr1")
    with pytest.raises(ValueError, match=r"interval_bases must be at least 1; got 0"):
        SourceConfig(interval_bases=0)


@pytest.mark.skipif(not (DATA / "dna").exists(), reason="needs genomes in ../shared/data")
def test_a_region_of_chromosome_x() -> None:
    genome = DATA / "dna" / "genomes" / "human_chrX_20Mb.fa.gz"
    with gzip.open(genome, "rt") as file:
        name = file.readline()[1:].split()[0]
    (text,) = documents(f"{genome}:{name}:2,000,001-2,010,000")
    assert len(text) == 10_000
    assert set(text) <= set("ACGTN")
