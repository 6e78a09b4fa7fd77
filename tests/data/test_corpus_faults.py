"""What happens to a corpus when something goes wrong: kills, full disks, damage, races."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unmask.data.corpus import Corpus, PrepareConfig, is_corpus, prepare
from unmask.data.corpus import build as encoding
from unmask.data.readers import PromptCompletion, SourceConfig, Sources
from unmask.data.readers._text import TextChunk
from unmask.io import atomic as folders
from unmask.io import locks

LINES = PrepareConfig(SourceConfig(lines=True))

SLOW = """
import sys, time
from unmask.data.corpus import PrepareConfig, prepare
from unmask.data.corpus import build as encoding

encoding._BATCH_CHARS = 50_000

def told(done):
    print(done, flush=True)
    time.sleep(0.05 if done < 200_000 else 600)

shard = tuple(map(int, sys.argv[3:])) or None
prepare([sys.argv[1]], sys.argv[2], "bytes", PrepareConfig(shard=shard), told)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "source.txt"
    file.write_text("".join(f"line {i} of a longer text\n" for i in range(20_000)))
    return file


def kill_midway(source: Path, out: Path, *shard: int) -> None:
    """Start to prepare in another process, and kill it when about half is written."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(source), str(out), *map(str, shard)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 200_000:
            break
    else:
        pytest.fail(f"it ended too early: {process.communicate()[1]}")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_killed_run_leaves_nothing_under_its_name(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kill_midway(source, out)
    assert not out.exists()
    left = [name for name in names(tmp_path) if name.startswith(".out.tmp-")]
    assert len(left) == 1, "the test would prove nothing if it had not begun to write"
    assert list((tmp_path / left[0]).glob("*.bin"))
    corpus = prepare([str(source)], out, "bytes")
    assert sum(split.text_stats.bytes for split in corpus.splits.values()) == source.stat().st_size
    assert names(tmp_path) == ["out", "source.txt"], "what the killed run left is swept up"


def test_a_killed_run_leaves_the_corpus_that_was_there(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    other = tmp_path / "other.txt"
    other.write_text("another text\n" * 100)
    before = prepare([str(other)], out, "bytes").digest
    kill_midway(source, out)
    assert Corpus.open(out, verify=True).digest == before
    prepare([str(source)], out, "bytes")
    assert Corpus.open(out, verify=True).digest != before
    assert names(tmp_path) == ["other.txt", "out", "source.txt"]


def test_a_killed_part_is_made_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source.write_text(source.read_text() * 2)
    prepare([str(source)], out, "bytes", PrepareConfig(shard=(1, 2)))
    kill_midway(source, out, 0, 2)
    assert not (out / "manifest.json").exists()
    assert not (out / "shard-0-of-2").exists()
    joined = prepare([str(source)], out, "bytes", PrepareConfig(shard=(0, 2)))
    assert joined.folder == out
    assert sum(split.text_stats.bytes for split in joined.splits.values()) == source.stat().st_size
    assert not [name for name in names(out) if name.startswith(".")]


def test_a_live_run_is_waited_for_and_not_swept_up(source: Path, tmp_path: Path) -> None:
    """Several processes that prepare the same folder, as the ranks of a training run do."""
    code = SLOW.replace("else 600", "else 0")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(source), str(tmp_path / "out")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum(bool(out) for out, _ in outputs) == 1, "one prepares, the other finds it done"
    assert Corpus.open(tmp_path / "out", verify=True).splits["train"].num_tokens
    assert names(tmp_path) == ["out", "source.txt"]


def test_a_file_system_without_locks_will_do(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    someone_elses = tmp_path / ".out.tmp-another-run"
    someone_elses.mkdir()
    assert prepare([str(source)], tmp_path / "out", "bytes").splits["train"].num_tokens
    assert someone_elses.exists(), "it may be alive: who knows"


@pytest.mark.parametrize("call", ["fsync", "rename", "write", "manifest"])
def test_a_full_disk_is_told_and_leaves_nothing(
    call: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, attribute = {
        "fsync": (os, "fsync"),
        "rename": (Path, "rename"),
        "write": (encoding.SplitWriter, "flush"),
        "manifest": (encoding.Manifest, "write"),
    }[call]
    out = tmp_path / "out"
    before = prepare([str(source)], out, "bytes", PrepareConfig(validation_fraction=0.5)).digest
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, full)
        with pytest.raises(ValueError, match=r"out cannot be written: No space left on device$"):
            prepare([str(source)], out, "bytes")
    assert names(tmp_path) == ["out", "source.txt"]
    assert Corpus.open(out, verify=True).digest == before


def test_a_disk_that_is_really_full(source: Path, tmp_path: Path) -> None:
    """The kernel refuses to write files beyond a size, in the middle of a shard."""
    pytest.importorskip("resource")
    code = """
import resource, sys
from unmask.data.corpus import build as encoding
from unmask.data.corpus import prepare
encoding._BATCH_CHARS = 50_000
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    prepare([sys.argv[1]], sys.argv[2], "bytes")
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(source), str(tmp_path / "out")],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == f"{tmp_path / 'out'} cannot be written: File too large"
    assert done.stderr == ""
    assert names(tmp_path) == ["source.txt"]


def test_a_folder_that_cannot_be_made(source: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be written: Not a directory$"):
        prepare([str(source)], source / "out", "bytes")


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([str(source)], tmp_path / "out", "bytes", progress=interrupt)
    assert names(tmp_path) == ["source.txt"]


def test_a_source_that_changes_while_it_is_read(source: Path, tmp_path: Path) -> None:
    def append(done: int) -> None:
        with source.open("a") as handle:
            handle.write("one line more\n")

    with pytest.raises(ValueError, match=r"source\.txt changed while it was read; prepare it again$"):
        prepare([str(source)], tmp_path / "out", "bytes", progress=append)
    assert names(tmp_path) == ["source.txt"]


def edit(file: Path, **fields: Any) -> None:
    """Change a manifest."""
    data = json.loads(file.read_text())
    data.update(fields)
    file.write_text(json.dumps(data))


DAMAGE = {
    "no folder": (
        lambda out: os.rename(out, out.with_name("away")),
        r"out is not a folder; `unmask prepare`",
    ),
    "no manifest": (
        lambda out: (out / "manifest.json").unlink(),
        r"out is not a prepared corpus: it has no ",
    ),
    "cut manifest": (
        lambda out: (out / "manifest.json").write_text((out / "manifest.json").read_text()[:100]),
        r"manifest\.json is damaged: .*; prepare it again$",
    ),
    "empty manifest": (
        lambda out: (out / "manifest.json").write_bytes(b""),
        r"manifest\.json is damaged: .*; prepare it again$",
    ),
    "binary manifest": (
        lambda out: (out / "manifest.json").write_bytes(b"\xff\0"),
        r"manifest\.json is damaged: .*; prepare it again$",
    ),
    "other manifest": (
        lambda out: (out / "manifest.json").write_text("[]"),
        r"manifest\.json is not in the format 'unmask-corpus-5' of this version: prepare the corpus again$",
    ),
    "old manifest": (
        lambda out: edit(out / "manifest.json", format="unmask-corpus-0"),
        r"manifest\.json is not in the format 'unmask-corpus-5' of this version: prepare the corpus again$",
    ),
    "no checksum": (
        lambda out: edit(out / "manifest.json", sha256=None),
        r"manifest\.json is damaged: its SHA-256 is not the one that it states; prepare it again$",
    ),
    "unknown field": (lambda out: edit(out / "manifest.json", colour=1), r"has an unknown field 'colour'"),
    "bad dtype": (
        lambda out: edit(out / "manifest.json", dtype="object"),
        r"manifest\.json: dtype must be uint16 or uint32; got 'object'$",
    ),
    "cut shard": (
        lambda out: os.truncate(out / "train-00000.bin", 1000),
        r"train-00000\.bin is damaged: it has 1000 bytes where the manifest says \d+; prepare it again$",
    ),
    "cut ends": (
        lambda out: os.truncate(out / "train.document_ends.bin", 0),
        r"train\.document_ends\.bin is damaged: it has 0 ",
    ),
    "no shard": (
        lambda out: (out / "valid-00000.bin").unlink(),
        r"out is incomplete: valid-00000\.bin is missing; prepare it again$",
    ),
    "no tokenizer": (
        lambda out: (out / "tokenizer.json").unlink(),
        r"out is incomplete: tokenizer\.json is missing; prepare it again$",
    ),
    "other tokenizer": (
        lambda out: (out / "tokenizer.json").write_text((out / "tokenizer.json").read_text() + "\n"),
        r"tokenizer\.json is not the tokenizer this corpus was prepared with; prepare it again$",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_told_in_one_sentence(case: str, source: Path, tmp_path: Path) -> None:
    damage, message = DAMAGE[case]
    prepare([str(source)], tmp_path / "out", "bytes")
    damage(tmp_path / "out")
    with pytest.raises(ValueError, match=message) as error:
        Corpus.open(tmp_path / "out")
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus that has files of every kind."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"{n} and {n} is ", "completion": str(n + n)} for n in range(300)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = PrepareConfig(SourceConfig(pair_format=PromptCompletion()), validation_fraction=0.2)
    return prepare([str(folder / "pairs.jsonl")], folder / "out", "bytes", options)


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_every_flipped_bit_is_noticed_and_its_file_named(pairs: Corpus) -> None:
    """140 of them, in files of ids, borders, prompts, in the tokenizer and in the manifest itself."""
    files = sorted(pairs.folder.iterdir())
    assert {file.name for file in files} >= {
        "valid-00000.bin",
        "train.document_ends.bin",
        "train.prompt_lengths.bin",
    }
    random = np.random.default_rng(0)
    for number in range(140):
        file = files[number % len(files)]
        bit = int(random.integers(8 * file.stat().st_size))
        flip(file, bit)
        with pytest.raises(ValueError, match=rf"{re.escape(str(file))}\b") as error:
            Corpus.open(pairs.folder)
        assert "\n" not in str(error.value)
        flip(file, bit)
    assert Corpus.open(pairs.folder).digest == pairs.digest


def test_only_what_is_read_need_be_verified(pairs: Corpus) -> None:
    flip(pairs.folder / "train-00000.bin", 77)
    corpus = Corpus.open(pairs.folder, verify=False)
    corpus.verify("valid")
    with pytest.raises(ValueError, match=r"train-00000\.bin is damaged: its SHA-256 is not the one in the man"):
        corpus.verify("train")
    flip(pairs.folder / "train-00000.bin", 77)
    corpus.verify()


def test_preparing_again_mends_a_damaged_corpus(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    before = prepare([str(source)], out, "bytes").digest
    flip(out / "train-00000.bin", 1000)
    assert prepare([str(source)], out, "bytes").digest == before
    assert Corpus.open(out).digest == before


def test_a_corpus_with_a_damaged_manifest_is_not_taken_for_a_folder_of_text(source: Path, tmp_path: Path) -> None:
    prepare([str(source)], tmp_path / "out", "bytes")
    assert is_corpus(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text("{")
    assert is_corpus(tmp_path / "out")
    assert not is_corpus(tmp_path)


def test_a_manifest_cannot_point_elsewhere(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(source)], out, "bytes", PrepareConfig(validation_fraction=0))
    for name in ("../source.txt", str(source)):
        data = json.loads((out / "manifest.json").read_text())
        data["splits"][0]["token_files"][0]["file"] = name
        (out / "manifest.json").write_text(json.dumps(data))
        with pytest.raises(ValueError, match=r"source\.txt' lies outside the corpus folder$"):
            Corpus.open(out)


def test_counts_that_contradict_each_other(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(source)], out, "bytes", PrepareConfig(validation_fraction=0))
    data = json.loads((out / "manifest.json").read_text())
    data["splits"][0]["num_tokens"] += 1
    (out / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"the counts of the split 'train' contradict each other"):
        Corpus.open(out)


def test_a_corpus_that_was_replaced_is_not_read_from_its_old_files(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    old = prepare([str(source)], out, "bytes", PrepareConfig(validation_fraction=0)).splits["train"]
    assert bytes(old.read(0, 6).tolist()) == b"line 0"
    source.write_text(source.read_text().replace("line", "LINE"))
    new = prepare([str(source)], out, "bytes", PrepareConfig(validation_fraction=0)).splits["train"]
    assert bytes(new.read(0, 6).tolist()) == b"LINE 0"


def test_a_damaged_part_does_not_join(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for i in range(2):
        prepare([str(source)], out, "bytes", PrepareConfig(LINES.source, shard=(i, 2)))
    os.truncate(out / "shard-1-of-2" / "train-00000.bin", 10)
    with pytest.raises(ValueError, match=r"shard-1-of-2/train-00000\.bin is damaged"):
        Corpus.open(out)
    assert prepare([str(source)], out, "bytes", PrepareConfig(LINES.source, shard=(1, 2))).folder == out


def test_a_join_that_fails_leaves_no_manifest(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    prepare([str(source)], out, "bytes", PrepareConfig(LINES.source, shard=(0, 2)))
    with monkeypatch.context() as patch:
        patch.setattr("unmask.data.corpus._shards._merge_arrays", full)
        with pytest.raises(ValueError, match=r"out cannot be written: No space left on device"):
            prepare([str(source)], out, "bytes", PrepareConfig(LINES.source, shard=(1, 2)))
    assert names(out) == ["shard-0-of-2", "shard-1-of-2"]
    merged = prepare([str(source)], out, "bytes", PrepareConfig(LINES.source, shard=(1, 2)))
    assert (merged.folder, merged.manifest.num_shards) == (out, 2)


def test_a_joined_manifest_never_lists_replaced_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for i in range(2):
        prepare([str(source)], out, "bytes", PrepareConfig(LINES.source, shard=(i, 2)))
    stale = (out / "manifest.json").read_bytes()
    other = PrepareConfig(LINES.source, validation_fraction=0.2, shard=(1, 2))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("unmask.data.corpus._shards._merge_if_complete", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(source)], out, "bytes", other)
    assert not (out / "manifest.json").exists(), "killed between a new part and joining it"
    (out / "manifest.json").write_bytes(stale)  # another machine joined the old parts in that moment
    prepare([str(source)], out, "bytes", other)
    assert not (out / "manifest.json").exists()


def test_a_lock_that_was_given_up_is_not_shared(tmp_path: Path) -> None:
    """Who waits for a lock file that its holder deletes must lock the next one, not the deleted one."""
    pytest.importorskip("fcntl")
    path, lock = tmp_path / "out", tmp_path / ".out.lock"
    seen: list[bool] = []

    def wait() -> None:
        with locks.file_lock(path):
            seen.append(lock.exists())

    with locks.file_lock(path) as alone:
        assert alone
        assert lock.exists()
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.2)
        assert seen == []
    waiting.join(10)
    assert seen == [True]
    assert not lock.exists()


def test_a_fresh_folder_replaces_the_old_one_or_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").touch()
    plain = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: _fail_into(path, plain, self, to))
    with pytest.raises(OSError, match="refused"), folders.atomic_folder(path, locked=True) as fresh:
        (fresh / "new").touch()
    assert names(path) == ["old"]
    assert names(tmp_path) == ["out"]


def _fail_into(path: Path, plain: Any, source: Path, to: Path) -> Any:
    """Refuse to rename the fresh folder, but not to bring the old one back."""
    if to == path and not source.name.endswith("-old"):
        raise OSError("refused")
    return plain(source, to)


@pytest.mark.slow
def test_peak_memory_of_a_large_corpus(tmp_path: Path) -> None:
    """200 MB pass through a process whose memory stops growing after the first 20."""
    resource = pytest.importorskip("resource")
    assert resource
    code = """
import resource, sys
from unmask.data.corpus import prepare
seen = []
def told(done):
    seen.append((done, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
prepare([sys.argv[1]], sys.argv[2], sys.argv[3], progress=told)
early = max(peak for done, peak in seen if done < 20_000_000)
print(seen[-1][0], seen[-1][1] - early)
"""
    source = tmp_path / "large.txt"
    with source.open("w") as handle:
        for i in range(200):
            handle.write("".join(f"{i} {j} the quick brown fox jumps over it\n" for j in range(24_000)))
    for tokenizer in ("bytes", "bpe:1024"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(source), str(tmp_path / "out"), tokenizer],
            check=True,
            capture_output=True,
            text=True,
        )
        size, growth = map(int, done.stdout.split())
        assert size == source.stat().st_size > 190_000_000
        assert growth < 30_000, f"{growth} kB more at the end than after 20 MB"


def test_pieces_that_never_end_their_document_are_ended(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sources, "read_documents", lambda *_: iter([TextChunk("abc", False, "x")]))
    split = prepare([str(source)], tmp_path / "out", "bytes", PrepareConfig(validation_fraction=0)).splits["train"]
    assert split.document_ends.tolist() == [3]
