"""Folders of `datasets.Dataset.save_to_disk`, and Arrow files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unmask.data.readers import ChatRecord, PromptCompletion, SourceConfig, Sources
from unmask.io import errors

arrow = pytest.importorskip("pyarrow")
ROWS = [{"text": f"row {i}", "prompt": f"p{i}", "completion": f"a{i}"} for i in range(10)]


def texts(name: Path | str, **options: Any) -> list[str]:
    return [piece.text for piece in Sources([str(name)]).read_documents(SourceConfig(**options))]


def write_stream(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.Table.from_pylist(rows)
    with file.open("wb") as handle, arrow.ipc.new_stream(handle, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """As the package writes it; the files' order is that of state.json, not that of their names."""
    folder = tmp_path / "saved"
    write_stream(folder / "b.arrow", ROWS[:6])
    write_stream(folder / "a.arrow", ROWS[6:])
    write_stream(folder / "cache-1.arrow", [{"text": "of no interest"}])
    state = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_data_set(saved: Path) -> None:
    assert texts(saved) == [row["text"] for row in ROWS]
    assert texts(saved, column="completion") == [row["completion"] for row in ROWS]
    assert texts(saved, pair_format=PromptCompletion()) == [row["prompt"] + row["completion"] for row in ROWS]
    assert texts(f"hub:{saved}") == texts(saved)
    assert Sources([str(saved)]).fingerprints[str(saved)].startswith("folder sha256:")


def test_splits(saved: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.mkdir()
    saved.rename(both / "train")
    write_stream(both / "test" / "data.arrow", ROWS[:2])
    (both / "test" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(texts(both)) == len(texts(both / "train")) == 10
    assert texts(both / "test") == texts(f"hub:{both}::test") == ["row 0", "row 1"]
    (both / "dataset_dict.json").write_text('{"splits": ["test", "validation"]}')
    with pytest.raises(ValueError, match=r"both has no split 'train'; it has 'test', 'validation': name the f"):
        texts(both)
    with pytest.raises(ValueError, match=r"validation is not a saved data set"):
        texts(f"hub:{both}::validation")


def test_as_the_package_writes_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    chats = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{i}"}] for i in range(3)]
    rows = datasets.Dataset.from_dict({"text": ["x", "y", "z"], "messages": chats})
    rows.filter(lambda row: row["text"] != "y").save_to_disk(tmp_path / "one", num_shards=2)
    assert texts(tmp_path / "one") == ["x", "z"]
    assert texts(tmp_path / "one", pair_format=ChatRecord()) == ["user:\nq\n\nassistant:\n" + a for a in ("a0", "a2")]
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "two")
    assert texts(tmp_path / "two") == ["x", "y", "z"]
    assert texts(tmp_path / "two" / "test") == ["y"]


def test_arrow_files(tmp_path: Path) -> None:
    write_stream(tmp_path / "a.arrow", ROWS)
    table = arrow.Table.from_pylist(ROWS)
    with arrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, arrow.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=4)
    for name in ("a.arrow", "b.arrow"):
        assert texts(tmp_path / name) == [row["text"] for row in ROWS]
        with pytest.raises(ValueError, match=rf"{name} has no column 'body'; it has 'text', 'prompt', 'completion'$"):
            texts(tmp_path / name, column="body")


@pytest.mark.parametrize("wrong", ["../a.arrow", "/etc/passwd", "a.txt", None, 3])
def test_a_saved_data_set_names_its_own_files_only(saved: Path, wrong: object) -> None:
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": wrong}]}))
    with pytest.raises(ValueError, match=r"state\.json names .*, which is not an Arrow file in its folder$"):
        texts(saved)


def test_what_is_wrong_is_told_in_one_sentence(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "a.arrow").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"a\.arrow is not an Arrow file that can be read: [^\n]+$"):
        texts(saved)
    (saved / "a.arrow").unlink()
    with pytest.raises(ValueError, match=r"saved is incomplete: a\.arrow is missing$"):
        texts(saved)
    (saved / "state.json").write_text('{"_data_files": []}')
    with pytest.raises(ValueError, match=r"saved holds no rows$"):
        texts(saved)

    def missing(name: str) -> object:
        raise ImportError(name)

    (saved / "state.json").write_text('{"_data_files": [{"filename": "b.arrow"}]}')
    monkeypatch.setattr(errors.importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"^this needs the package pyarrow: pip install 'unmask\[parquet\]'$"):
        texts(saved)
