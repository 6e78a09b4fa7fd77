"""Pairs of a prompt and a completion: read from tables, kept in a corpus, never cut."""

from __future__ import annotations

import csv
import json
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.config import from_json, override, to_json
from unmask.data.chat import ChatTemplate, load_chat_template, parse_messages
from unmask.data.corpus import Corpus, PrepareConfig, Split, prepare
from unmask.data.corpus import _splits as holdout
from unmask.data.corpus import build as encoding
from unmask.data.corpus._splits import assign_splits
from unmask.data.readers import AnyPairFormat, ChatRecord, PromptCompletion, SourceConfig, Sources
from unmask.data.readers import _text as formats
from unmask.data.readers._text import CHUNK_CHARS, TextChunk
from unmask.data.tokenizers import Tokenizer

ROWS = [(f"What is {i} + {i}?", f"It is {2 * i}, naïvely." + " Yes!" * (i % 5)) for i in range(200)]
PAIRS = PrepareConfig(SourceConfig(pair_format=PromptCompletion()))


def written(file: Path, text: str) -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def as_json_lines(file: Path, rows: list[tuple[str, str]]) -> Path:
    return written(file, "".join(json.dumps({"prompt": p, "completion": a, "n": 1}) + "\n" for p, a in rows))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return as_json_lines(tmp_path / "source.jsonl", ROWS)


def found(file: Path | str, pairs: AnyPairFormat) -> list[tuple[str, ...]]:
    pieces = list(Sources([str(file)]).read_documents(SourceConfig(pair_format=pairs)))
    assert all(piece.is_last for piece in pieces)
    return [piece.segments for piece in pieces]


def decoded(corpus: Corpus, split: Split) -> list[tuple[str, str]]:
    """Its pairs as text, cut where the corpus says that the prompt ends."""
    assert split.prompt_lengths is not None
    pairs = []
    for (start, stop), border in zip(pairwise([0, *split.document_ends]), split.prompt_lengths.tolist(), strict=True):
        ids = split.read(start, stop).tolist()
        assert ids.pop() == corpus.eos_id
        pairs.append((corpus.tokenizer.decode(ids[:border]), corpus.tokenizer.decode(ids[border:])))
    return pairs


def test_json_lines_and_tables(tmp_path: Path) -> None:
    rows = [("one, two", 'say "three"'), ("a\nb", "c")]
    assert found(as_json_lines(tmp_path / "a.jsonl", rows), PromptCompletion()) == rows
    with (tmp_path / "a.csv").open("w", newline="") as handle:
        csv.writer(handle).writerows([("completion", "id", "prompt"), *((a, 1, p) for p, a in rows)])
    assert found(tmp_path / "a.csv", PromptCompletion()) == rows
    written(tmp_path / "b.csv", "1,x,y\n\n2,z,w\n")
    assert found(tmp_path / "b.csv", PromptCompletion("3", "2")) == [("y", "x"), ("w", "z")]
    written(tmp_path / "a.tsv", 'q\ta\n"x\ty\n')
    assert found(tmp_path / "a.tsv", PromptCompletion("q", "a")) == [('"x', "y")]


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chats = [[{"role": "user", "content": p}, {"role": "assistant", "content": a}] for p, a in ROWS]
    columns = {"completion": [a for _, a in ROWS], "prompt": [p for p, _ in ROWS], "messages": chats}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet", row_group_size=70)
    assert found(tmp_path / "a.parquet", PromptCompletion()) == ROWS
    assert found(tmp_path / "a.parquet", ChatRecord()) == [(f"user:\n{p}\n\nassistant:\n", a) for p, a in ROWS]
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'body'; it has 'completion', 'prompt', 'messa"):
        found(tmp_path / "a.parquet", PromptCompletion(completion="body"))
    columns["completion"][150] = ""
    parquet.write_table(arrow.table(columns), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet row 151 has no text in 'completion'; a pair needs"):
        found(tmp_path / "b.parquet", PromptCompletion())


def test_hub_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    as_json_lines(tmp_path / "set" / "train.jsonl", ROWS[:3])
    assert found(f"hub:{tmp_path / 'set'}", PromptCompletion()) == ROWS[:3]
    with pytest.raises(ValueError, match=r"train row 1 has no column 'reply'; it has 'prompt', 'completion', 'n'$"):
        found(f"hub:{tmp_path / 'set'}", PromptCompletion(completion="reply"))


def test_a_chat_is_a_pair_for_each_answer(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "Nobody.\n"},
    ]
    first = "system:\nBe brief.\n\nuser:\nHello?\n\nassistant:\n"
    prompt = f"{first}Hi.\n\nuser:\nWho are you?\n\nassistant:\n"
    file = written(tmp_path / "a.jsonl", json.dumps({"messages": messages}))
    pairs = [(first, "Hi."), (prompt, "Nobody.\n")]
    assert found(file, ChatRecord()) == pairs
    with (tmp_path / "a.csv").open("w", newline="") as handle:
        csv.writer(handle).writerows([("talk",), (json.dumps(messages),)])
    assert found(tmp_path / "a.csv", ChatRecord("talk")) == pairs


GOLDEN_CHAT = Path(__file__).parents[1] / "golden" / "chat_tiny"
CALLED = [
    {"role": "user", "content": "Rain<|im_end|>?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w", "arguments": {"c": "<|mask|>"}}}]},
    {"role": "tool", "content": "yes"},
    {"role": "assistant", "content": "It rains."},
]


def test_the_models_template_writes_the_pairs(tmp_path: Path) -> None:
    """Control tokens are the template's alone, also in tools and calls; an answer is learned with its end."""
    tokenizer = Tokenizer.from_file(GOLDEN_CHAT / "tokenizer.json")
    template = load_chat_template(GOLDEN_CHAT, tokenizer)
    tools = [{"type": "function", "function": {"name": "w", "parameters": {}}}]
    file = written(tmp_path / "a.jsonl", json.dumps({"messages": CALLED, "tools": tools}))
    config = PrepareConfig(SourceConfig(pair_format=ChatRecord(tools="tools", template=template)), 0.0)
    corpus = prepare([str(file)], tmp_path / "out", str(GOLDEN_CHAT / "tokenizer.json"), config)
    split = corpus.splits["train"]
    assert split.prompt_lengths is not None
    assert template is not None
    ends, eos = split.document_ends.tolist(), corpus.eos_id
    for (start, stop), border, answer in zip(pairwise([0, *ends]), split.prompt_lengths.tolist(), (1, 3), strict=True):
        ids = split.read(start, stop).tolist()
        messages = parse_messages(CALLED)[:answer]
        assert ids[:border] == template.encode(tokenizer, messages, tools=tools, add_generation_prompt=True)
        completion = ids[border:]
        assert completion[-1] == eos
        assert completion.count(tokenizer.vocab["<|im_end|>"]) == 1
        assert tokenizer.vocab["<|mask|>"] not in ids
    assert tokenizer.decode(completion) == "It rains.<|im_end|>\n<|endoftext|>"
    assert Corpus.open(tmp_path / "out", verify=True).manifest.prepare == config


P, C = PromptCompletion(), ChatRecord()
GOOD = '{"prompt": "p", "completion": "a"}\n'
USER, REPLY = '{"role": "user", "content": "x"}', '{"role": "assistant", "content": "y"}'
BAD: dict[str, tuple[AnyPairFormat, str, str, str]] = {
    "no prompt": (P, "a.jsonl", GOOD + GOOD.replace('"p"', '" "'), "line 2 has no text in 'prompt'; a "),
    "no completion": (
        P,
        "a.jsonl",
        "\n" + GOOD.replace('"a"', "null"),
        "line 2 has no text in 'completion'; a ",
    ),
    "field": (P, "a.jsonl", GOOD + '{"prompt": "p"}', r"line 2 has no field 'completion'; it has 'prompt'$"),
    "number": (P, "a.jsonl", GOOD.replace('"p"', "1"), "line 1 has int in 'prompt' where a text is expe"),
    "cell": (
        P,
        "a.csv",
        "prompt,completion\np,a\np,\n",
        "line 3 has no text in 'completion'; a pair needs a",
    ),
    "short": (P, "a.csv", "x,prompt,completion\n\n1,p\n", r"line 3 has 2 columns and so no column 3$"),
    "column": (PromptCompletion("q"), "a.tsv", "prompt\tanswer\n", "has no column 'q'; its first line has "),
    "column 0": (
        PromptCompletion("0", "1"),
        "a.tsv",
        "a\tb\n",
        r"^columns are counted from 1; got 0 for .*a\.t",
    ),
    "text": (
        P,
        "a.txt",
        "prompt",
        r"a\.txt has no columns to take pairs from; pairs come from \.json, \.jsonl, ",
    ),
    "fasta": (C, "a.fa", ">x\nA", r"a\.fa has no columns to take pairs from; "),
    "no list": (C, "a.jsonl", '{"messages": 3}', "line 1 has int in 'messages' where a list of messages"),
    "no JSON": (C, "a.csv", "messages\nhello\n", "line 2 is not valid JSON in 'messages': "),
    "one": (C, "a.jsonl", f'{{"messages": [{REPLY}]}}', "line 1 begins with a message from 'assistant'; a pair"),
    "none": (C, "a.jsonl", f'{{"messages": [{USER}]}}', "line 1 has no message from 'assistant', and so nothing"),
    "message": (C, "a.jsonl", f'{{"messages": [{USER}, "y"]}}', "line 1 message 2 must be an object with "),
    "role": (C, "a.jsonl", '{"messages": [{"content": "x"}]}', "line 1 message 1 has the role 'None'; there are"),
    "content": (C, "a.jsonl", '{"messages": [{"role": "user"}]}', "line 1 message 1 has no text in 'content'"),
    "order": (
        C,
        "a.jsonl",
        f'{{"messages": [{USER}, {{"role": "tool", "content": "x"}}]}}',
        "line 1 message 2 is a tool's and follows no call of a tool: roles are out of order",
    ),
    "template": (
        ChatRecord(template=ChatTemplate("{{ raise_exception('users only') }}")),
        "a.jsonl",
        f'{{"messages": [{USER}, {REPLY}]}}',
        "line 1 message 2: the chat template refuses these messages: users only",
    ),
    "unstable": (
        ChatRecord(template=ChatTemplate("{{ messages | length }}")),
        "a.jsonl",
        f'{{"messages": [{USER}, {REPLY}]}}',
        "message 2: the chat template writes other text before an answer that is there",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_sentence(case: str, tmp_path: Path) -> None:
    pairs, name, contents, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        found(written(tmp_path / name, contents), pairs)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_has_no_columns_or_ends_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^stdlib has no columns to take pairs from; "):
        found("stdlib", PromptCompletion())
    with pytest.raises(
        ValueError, match=r"^the tokenizer protein has no end-of-text token, which prompt-completion pairs need$"
    ):
        prepare([str(source)], tmp_path / "out", "protein", PAIRS)
    with pytest.raises(ValueError, match=r"^prompt and completion must be two columns; got 'a' for both$"):
        PromptCompletion("a", "a")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_pairs_come_back(source: Path, tmp_path: Path, tokenizer: str) -> None:
    corpus = prepare([str(source)], tmp_path / "out", tokenizer, PAIRS)
    corpus = Corpus.open(corpus.folder, verify=True)
    kept, held_out = (decoded(corpus, corpus.splits[name]) for name in ("train", "valid"))
    assert sorted(kept + held_out) == sorted(ROWS)
    assert kept == [row for row in ROWS if row not in held_out]
    size = sum(len((prompt + completion).encode()) for prompt, completion in ROWS)
    assert sum(split.text_stats.bytes for split in corpus.splits.values()) == size
    for split in corpus.splits.values():  # prompt and completion are encoded each for itself
        assert split.prompt_lengths is not None
        first = decoded(corpus, split)[0][0]
        assert split.read(0, int(split.prompt_lengths[0])).tolist() == corpus.tokenizer.encode(first)


def test_the_digest_knows_the_border_and_the_border_is_checked(tmp_path: Path) -> None:
    one = as_json_lines(tmp_path / "one.jsonl", [("ab", "c"), ("d", "e")])
    two = as_json_lines(tmp_path / "two.jsonl", [("a", "bc"), ("d", "e")])
    options = PrepareConfig(PAIRS.source, validation_fraction=0)
    first, second = (prepare([str(file)], tmp_path / file.stem, "bytes", options) for file in (one, two))
    tokens = [corpus.splits["train"].read(0, 6).tolist() for corpus in (first, second)]
    assert tokens[0] == tokens[1]
    assert first.digest != second.digest
    np.array([1, 2], "<i8").tofile(first.folder / "train.prompt_lengths.bin")
    with pytest.raises(ValueError, match=r"train\.prompt_lengths\.bin is damaged: its SHA-256 is not the one"):
        Corpus.open(first.folder, verify=True)
    (first.folder / "train.prompt_lengths.bin").unlink()
    with pytest.raises(ValueError, match=r"is incomplete: train\.prompt_lengths\.bin is missing; prepare it again$"):
        Corpus.open(first.folder)
    assert Corpus.open(prepare([str(one)], first.folder, "bytes", options).folder, verify=True)


def test_the_digest_of_a_corpus_does_not_change_with_the_format(tmp_path: Path) -> None:
    text = written(tmp_path / "a.txt", "".join(f"line {i}\n" for i in range(1000)))
    corpus = prepare([str(text)], tmp_path / "out", "bytes", PrepareConfig(validation_fraction=0.2))
    assert corpus.splits["train"].prompt_lengths is None
    assert corpus.digest == "12391b273dff857468203fe8d87a4f35b574064eef8dcd4a87bc114274c16ec2"


def test_preparing_again_is_free_and_what_changes_is_made_again(source: Path, tmp_path: Path) -> None:
    corpus = prepare([str(source)], tmp_path / "out", "bytes", PAIRS)
    time = (corpus.folder / "manifest.json").stat().st_mtime_ns
    again = prepare([str(source)], tmp_path / "out", "bytes", PAIRS)
    assert (again.folder / "manifest.json").stat().st_mtime_ns == time
    swapped = PrepareConfig(SourceConfig(pair_format=PromptCompletion("completion", "prompt")))
    other = prepare([str(source)], tmp_path / "out", "bytes", swapped)
    assert other.digest != corpus.digest
    assert {pair[::-1] for split in other.splits.values() for pair in decoded(other, split)} == set(ROWS)


def test_a_bad_pair_leaves_what_was_there(source: Path, tmp_path: Path) -> None:
    before = prepare([str(source)], tmp_path / "out", "bytes", PAIRS).digest
    as_json_lines(source, [*ROWS, ("x", "")])
    with pytest.raises(ValueError, match=r"source\.jsonl line 201 has no text in 'completion'"):
        prepare([str(source)], tmp_path / "out", "bytes", PAIRS)
    assert Corpus.open(tmp_path / "out", verify=True).digest == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "source.jsonl"]


@pytest.mark.parametrize("n", [2, 3])
def test_parts_join_to_the_whole(source: Path, tmp_path: Path, n: int) -> None:
    whole = prepare([str(source)], tmp_path / "whole", "bytes", PAIRS)
    for i in range(n):
        joined = prepare([str(source)], tmp_path / "out", "bytes", PrepareConfig(PAIRS.source, shard=(i, n)))
    assert joined.manifest.num_shards == n
    for name, split in Corpus.open(tmp_path / "out", verify=True).splits.items():
        assert sorted(decoded(joined, split)) == sorted(decoded(whole, whole.splits[name]))


def test_options_are_json_and_can_be_changed() -> None:
    options = PrepareConfig(SourceConfig(pair_format=ChatRecord("talk")))
    assert from_json(PrepareConfig, to_json(options)) == options
    assert override(PrepareConfig(), "source.pair_format=ChatRecord", "source.pair_format.messages=talk") == options


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(2, 300) | st.integers(CHUNK_CHARS, 4 * CHUNK_CHARS), min_size=1, max_size=9),
    validation_fraction=st.floats(0.001, 0.5),
)
def test_a_pair_is_on_one_side_of_the_hold_out(sizes: list[int], validation_fraction: float) -> None:
    pairs = [TextChunk("x" * size, True, str(i), 1) for i, size in enumerate(sizes)]
    placed = list(assign_splits(pairs, validation_fraction))
    assert [each.chunk for each in placed] == pairs
    assert not all(each.held_out for each in placed)
    assert any(each.held_out for each in placed) == (len(pairs) > 1)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_READ_BYTES", 20_000)
    monkeypatch.setattr(encoding, "_BATCH_CHARS", 20_000)
    monkeypatch.setattr(holdout, "_LOOKAHEAD_CHARS", 20_000)
    peaks = []
    for count in (1_000, 4_000):  # 0.2 and 0.9 MB
        rows = [(f"{i} " + "x" * 90, "y" * 100) for i in range(count)]
        source = as_json_lines(tmp_path / f"{count}.jsonl", rows)
        del rows
        tracemalloc.start()
        prepare([str(source)], tmp_path / str(count), "bytes", PAIRS)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1e5


def test_a_letter_the_tokenizer_lacks_is_told_with_its_line(tmp_path: Path) -> None:
    file = as_json_lines(tmp_path / "a.jsonl", [("ab c", "d"), ("ab", "D")])
    with pytest.raises(ValueError, match=r"a\.jsonl line 2: 1 of 3 characters is unknown to the tokenizer \('D' 1\)"):
        prepare([str(file)], tmp_path / "out", str(letters(tmp_path)), PAIRS)


def letters(folder: Path) -> Path:
    """A tokenizer of a few letters and a newline, which ends its texts."""
    return written(folder / "letters.json", Tokenizer.characters("abcd \n").to_json())
