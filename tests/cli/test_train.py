"""What the command line makes of its words; that training works is shown in tests/test_experiment.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.cli._prepare import _parse_shard
from unmask.config import from_json, to_json
from unmask.diffusion.schedule import Cosine
from unmask.experiment import Experiment
from unmask.objectives import MDLM, SEDD, NextToken
from unmask.recipes import RECIPES
from unmask.training.optim import Muon

Command = Callable[..., Any]
TINY = RECIPES["stdlib-tiny"]()


def shown(command: Command, *arguments: str) -> Experiment:
    done = command("train", *arguments, "--print-config")
    assert (done.code, done.err) == (0, "")
    experiment: Experiment = from_json(Experiment, json.loads(done.out))
    return experiment


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_shown(recipe: str, command: Command) -> None:
    assert shown(command, recipe) == RECIPES[recipe]()


def test_showing_trains_nothing(command: Command, tmp_path: Path) -> None:
    shown(command, "stdlib-tiny", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_flags_and_settings_change_the_recipe(command: Command) -> None:
    flags = (
        "--steps",
        "7",
        "--batch-size",
        "3",
        "--seed",
        "5",
        "--sources",
        "a, b",
        "c",
        "--tokenizer",
        "17",
    )
    settings = (
        "--set",
        "training.optimizer=Muon",
        "training.optimizer.lr=0.002",
        "--set",
        "objective.schedule=Cosine",
        "training.steps=9",
    )
    assert shown(command, "stdlib-tiny", *flags, *settings) == replace(
        TINY,
        sources=("a, b", "c"),
        tokenizer="17",
        objective=replace(TINY.objective, schedule=Cosine()),
        training=replace(TINY.training, steps=9, batch_size=3, seed=5, optimizer=Muon(lr=0.002)),
    )


def test_an_objective_brings_the_attention_it_needs(command: Command) -> None:
    experiment = shown(command, "stdlib-tiny", "--objective", "ar")
    assert experiment.objective == NextToken()
    assert experiment.backbone.causal


def test_a_file_stands_for_a_recipe(command: Command, tmp_path: Path) -> None:
    """As a run leaves it: with the digest of its corpus, and without what does not matter."""
    experiment = replace(TINY, objective=SEDD(), training=replace(TINY.training, seed=4))
    stated = {**to_json(experiment), "corpus_sha256": "1234"}
    file = tmp_path / "experiment.json"
    file.write_text(json.dumps(stated))
    assert shown(command, str(file)) == experiment
    assert shown(command, str(file), "--objective", "mdlm").objective == MDLM()
    stated["training"].pop("keep_checkpoints")
    file.write_text(json.dumps(stated))
    assert shown(command, str(file)) == experiment


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[1", "is not valid JSON: "),
        ("[1]", "must be Experiment; got [1]"),
        ('{"backbone": {"widht": 3}}', ".backbone has an unknown field 'widht'"),
    ],
)
def test_a_bad_file_is_refused_by_name(contents: str | None, sentence: str, command: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    if contents is not None:
        file.write_text(contents)
    done = command("train", str(file))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"unmask: {file}")
    assert sentence in done.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["stdlib-tinny"], "there is no recipe 'stdlib-tinny' (did you mean stdlib-tiny?); there are "),
        (["stdlib-tiny", "--set", "training.max_grad_nrm=1"], "(did you mean max_grad_norm?)"),
        (
            ["stdlib-tiny", "--set", "training.max_grad_norm=x"],
            "training.max_grad_norm must be float; got 'x'",
        ),
        (["stdlib-tiny", "--set", "training.optimizer=Moun"], "(did you mean Muon?)"),
        (
            ["stdlib-tiny", "--set", "layout.length=999"],
            "rows of 999 tokens are longer than the model's maximum of 128",
        ),
        (["stdlib-tiny", "--steps", "0"], "steps must be at least 1; got 0"),
    ],
)
def test_bad_settings_are_one_sentence(arguments: list[str], sentence: str, command: Command) -> None:
    done = command("train", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert sentence in done.err


def test_a_run_that_a_signal_stopped_exits_with_3(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for finished, code in ((False, 3), (True, 0)):
        monkeypatch.setattr("unmask.run.run_experiment", lambda *_, finished=finished, **__: finished)
        assert command("train", "stdlib-tiny", "--out", str(tmp_path)).code == code


def test_preparing_tells_how_far_it_is(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("unmask.cli._progress._SHOW_AFTER_SECONDS", 0.0)
    (tmp_path / "text").write_text("some text\n" * 100)
    request = ("prepare", str(tmp_path / "text"), "--tokenizer", "bytes", "--out", str(tmp_path / "corpus"))
    done = command(*request)
    assert done.code == 0
    assert done.err == "preparing: 1.0 of 1.0 kB, about 0 s left\n"
    assert command(*request).err == ""  # there was nothing left to do


def test_a_part_of_a_corpus_is_a_part_of_the_way(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("unmask.cli._progress._SHOW_AFTER_SECONDS", 0.0)
    (tmp_path / "text").write_text("some text\n" * 100)
    options = ("--tokenizer", "bytes", "--out", str(tmp_path / "corpus"), "--lines", "--shard", "1/2")
    assert "of 500 bytes" in command("prepare", str(tmp_path / "text"), *options).err


def test_shards_are_written_as_fractions() -> None:
    assert _parse_shard("3/4") == (3, 4)
    assert _parse_shard(None) is None
    for wrong in ("3", "3/", "-1/4", "a/b", "1/2/3"):
        with pytest.raises(ValueError, match="a shard is written I/N"):
            _parse_shard(wrong)


@pytest.mark.parametrize("name", ["taken", "taken.onnx"])
def test_export_replaces_nothing(tmp_path: Path, command: Command, name: str) -> None:
    (tmp_path / name).write_text("mine")
    result = command("export", str(tmp_path / "model"), str(tmp_path / name))
    assert result.code == 2
    assert "exists already; choose another name" in result.err
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model.pt"])
def test_export_writes_no_other_files(tmp_path: Path, command: Command, folder: str, name: str) -> None:
    result = command("export", folder, str(tmp_path / name))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "files are not supported; name a new folder, or a file that ends in .onnx" in result.err
    assert not (tmp_path / name).exists()


SMALL = "training.steps=2 training.batch_size=2 layout.length=16 backbone.width=16 backbone.heads=2"
PLAIN = "backbone.local_init=None backbone.activation=gelu backbone.rope_theta=10000"
LLADA = (
    'backbone.llama={"intermediate_size":32} backbone.activation=gelu backbone.local_init=None objective.schedule.eps=0'
    " unigram_bias_init=false"
)


@pytest.mark.parametrize(
    ("settings", "where", "kind"), [(PLAIN, "help", "mdlm"), (LLADA, "docs", "llada")], ids=["mdlm", "llada"]
)
def test_what_is_said_to_be_published_is(
    settings: str, where: str, kind: str, tmp_path: Path, command: Command
) -> None:
    """The settings that the help and the docs give make models that `--format upstream` writes, with all facts."""
    said = command("export", "--help").out if where == "help" else Path("docs/methods.md").read_text()
    assert all(
        setting in said.replace('"intermediate_size": 512', '"intermediate_size":32') for setting in settings.split()
    )
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    run, out = str(tmp_path / "run"), tmp_path / "out"
    source = ["--sources", str(tmp_path / "text.txt"), "--tokenizer", "bytes"]
    changes = ["--set", *SMALL.split(), "backbone.max_length=16", *settings.split()]
    made = command("train", "stdlib-tiny", *source, "--out", run, *changes)
    assert made.code == 0, made.err
    done = command("export", run, str(out), "--format", "upstream", "--license", "MIT", "--language", "en")
    assert done.code == 0, done.err
    assert json.loads((out / "config.json").read_text())["model_type"] == kind
    card = (out / "README.md").read_text()
    assert 'license: "mit"' in card
    assert "language:\n- en\n" in card
    assert "nats_per_token" in card
    assert unmask.load(out).sample(length=4, sampler=unmask.Ancestral(2)).text


def test_a_license_is_an_identifier(tmp_path: Path, command: Command, folder: str) -> None:
    result = command("export", folder, str(tmp_path / "m"), "--license", "do what you want")
    assert result.code == 2
    assert "a license must be an identifier such as apache-2.0" in result.err
    assert not (tmp_path / "m").exists()


def prepared(command: Command, folder: Path, name: str, contents: str | bytes, *options: str) -> Any:
    """What `prepare` says of a file."""
    (folder / name).write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return command("prepare", str(folder / name), "--out", str(folder / "out"), *options)


def test_english_is_not_dna(command: Command, tmp_path: Path) -> None:
    text = "to be, or not to be, that is the question\n" * 100
    done = prepared(command, tmp_path, "a.txt", text, "--tokenizer", "dna")
    assert done.code == 2
    assert done.err.startswith(f"unmask: {tmp_path}/a.txt: 2,500 of 4,200 characters are unknown to the tokenizer")
    assert "(' ' 900, 'o' 500, 'e' 400, " in done.err
    assert "would become [UNK], more than 5%; it has 'ACGNT'" in done.err
    assert "--allow-unknown" in done.err
    assert not (tmp_path / "out").exists()
    done = prepared(command, tmp_path, "a.txt", text, "--tokenizer", "dna", "--allow-unknown")
    assert done.code == 0
    assert "note: 2,500 of 4,200 characters are unknown to the tokenizer (' ' 900, " in done.out
    done = prepared(command, tmp_path, "a.fa", ">a\n" + "ACGTN" * 100 + "RRYX", "--tokenizer", "dna")
    assert "note: 1 of 504 characters is unknown to the tokenizer ('X' 1) and becomes [UNK]\n" in done.out
    assert "note: 3 of 504 characters are codes for several bases" in done.out


def test_reads_and_proteins_are_prepared(command: Command, tmp_path: Path) -> None:
    reads = "".join(f"@read {i}\nACGTACGT\n+\nIIIIIIII\n" for i in range(40))
    done = prepared(command, tmp_path, "a.fastq", reads, "--tokenizer", "dna")
    assert "train: 342 tokens in 38 documents" in done.out
    assert "note" not in done.out
    assert "held-out text: 2 documents, 18 tokens, 5.00% of the text (5.00% asked for)" in done.out
    done = prepared(command, tmp_path, "a.faa", ">a\nMKVLAAGIV*\n", "--tokenizer", "protein")
    assert "vocabulary: 29 with the mask" in done.out


def test_a_tokenizer_that_changes_text_is_told(command: Command, tmp_path: Path) -> None:
    done = prepared(command, tmp_path, "a.txt", "acgt" * 50, "--tokenizer", "dna")
    assert "the tokenizer does not keep the text as it is: 'acgtacgtacgtacgt' comes back as 'ACGTACGT" in done.out


def test_encodings_and_delimiters(command: Command, tmp_path: Path) -> None:
    table = "id;text\r\n" + "1;café\r\n" * 30
    tell = ("--tokenizer", "bytes", "--delimiter", ";")
    done = prepared(command, tmp_path, "a.csv", table.encode("latin-1"), *tell)
    assert done.code == 2
    assert "a.csv is not UTF-8: byte 0xe9 at offset 14 " in done.err
    assert "--encoding latin-1" in done.err
    done = prepared(command, tmp_path, "a.csv", table.encode("latin-1"), *tell, "--encoding", "latin-1")
    assert done.code == 0
    assert "145 bytes" in done.out  # 29 rows, é has two
    tabs = table.replace(";", "\t").encode("utf-16")
    done = prepared(command, tmp_path, "a.csv", tabs, *tell[:3], "tab", "--encoding", "utf-16")
    assert done.code == 0


def test_pairs_are_held_out_and_cut_as_told(command: Command, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 10}", "completion": "a" * (40 if i % 3 == 0 else 4)} for i in range(300)]
    contents = "".join(json.dumps(row) + "\n" for row in rows)
    pairs = ("--tokenizer", "bytes", "--prompt", "prompt", "--completion", "completion")
    done = prepared(command, tmp_path, "a.jsonl", contents, *pairs)
    assert "held-out text: 15 documents" in done.out
    assert "pairs: half have at most 7 tokens, the longest has 43; training cuts those that are longer" in done.out
    done = command(
        *("train", "stdlib-tiny", "--sources", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "run")),
        *(
            "--tokenizer",
            "bytes",
            "--steps",
            "1",
            "--batch-size",
            "4",
            "--set",
            "prepare.source.pair_format=PromptCompletion",
        ),
        *(
            "--set",
            'layout={"kind": "PromptCompletionRows", "length": 16}',
            "backbone.width=32",
            "backbone.depth=1",
        ),
        *("--set", "backbone.heads=2", "backbone.max_length=16"),
    )
    assert "held-out text: 15 documents" in done.err
    assert "note: rows have 16 tokens (layout.length): of 285 pairs, 95 lose the end of the completion" in done.err


def test_a_mixture_of_experts_is_a_setting(command: Command, tmp_path: Path) -> None:
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    small = ("backbone.width=32", "backbone.depth=1", "backbone.heads=2", "eval_windows=8")
    plain = ("backbone.local_init=None", "backbone.activation=gelu", "unigram_bias_init=false")
    experts = ("backbone.llama.experts=Experts", "backbone.llama.experts.count=4", "backbone.llama.experts.per_token=2")
    sizes = ("backbone.llama.intermediate_size=48", "backbone.llama.experts.intermediate_size=16")
    settings = ("--set", *small, *plain, "backbone.llama=LlamaBlock", *experts, *sizes)
    run = tmp_path / "run"
    done = command(
        "train", "stdlib-tiny", "--sources", str(tmp_path / "fox.txt"), "--steps", "2", "--out", str(run), *settings
    )
    assert done.code == 0, done.err
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("aux_loss", 0) > 0 for line in logged)
    assert "2 of 4 experts for each token" in (run / "model" / "README.md").read_text()
    refused = command("train", "stdlib-tiny", *settings, "backbone.llama.experts.per_token=5")
    assert (refused.code, "a token passes from 1 to 4 experts; got 5" in refused.err) == (2, True)
