"""From a text file to a measured model, through the command line, in a folder of one's own."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import unmask
from unmask.backbones.dit import DiTConfig
from unmask.cli import main
from unmask.config import override
from unmask.data.loader import Wrapped
from unmask.distributed import Distributed
from unmask.experiment import Experiment
from unmask.objectives import MDLM
from unmask.recipes import RECIPES
from unmask.run import build_trainer, load_ema_model, prepare_corpus, run_experiment
from unmask.run import train as unmask_train
from unmask.training._checkpoint import CheckpointStore
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW
from unmask.training.run_folder import RunFolder
from unmask.training.trainer import Trainer

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60


def tiny(source: Path) -> Experiment:
    return Experiment(
        sources=(str(source),),
        tokenizer="bytes",
        backbone=DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0),
        layout=Wrapped(16),
        training=TrainingConfig(
            steps=6,
            batch_size=4,
            optimizer=AdamW(lr=1e-2),
            warmup_steps=2,
            bf16=False,
            save_every=3,
            ema_decay=0.5,
        ),
        eval_windows=4,
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT)
    return path


def test_the_same_experiment_goes_on_and_another_is_refused(source: Path, tmp_path: Path) -> None:
    experiment, folder = tiny(source), tmp_path / "run"
    assert run_experiment(experiment, folder, Distributed())
    first = unmask.load(folder / "model").score("the fox").nats
    assert run_experiment(
        replace(experiment, training=replace(experiment.training, keep_checkpoints=3)), folder, Distributed()
    )
    assert unmask.load(folder / "model").score("the fox").nats == first
    longer = replace(experiment, training=replace(experiment.training, warmup_steps=3))
    with pytest.raises(ValueError, match=r"another experiment: training\.warmup_steps was 2 and is now 3"):
        run_experiment(longer, folder, Distributed())
    source.write_text(TEXT + "and runs")
    prepared = (folder / "corpus" / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=r"another experiment: the text of .*fox\.txt has changed since"):
        run_experiment(experiment, folder, Distributed())
    assert (folder / "corpus" / "manifest.json").read_bytes() == prepared  # and nothing is lost
    source.write_text(TEXT)
    assert run_experiment(experiment, folder, Distributed())


def test_a_run_from_before_a_setting_was_there_goes_on(source: Path, tmp_path: Path) -> None:
    experiment, folder = tiny(source), tmp_path / "run"
    assert run_experiment(experiment, folder, Distributed())
    stated = json.loads((folder / "experiment.json").read_text())
    assert stated["prepare"]["source"].pop("encoding") == "utf-8"
    (folder / "experiment.json").write_text(json.dumps(stated))
    assert run_experiment(experiment, folder, Distributed())
    other = override(experiment, "prepare.source.encoding=latin-1")
    with pytest.raises(ValueError, match=r"prepare\.source\.encoding was 'utf-8' and is now 'latin-1'"):
        run_experiment(other, folder, Distributed())


def test_prepare_train_eval_sample(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", lambda: tiny(source))

    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["unmask", *arguments])
        main()
        return capsys.readouterr().out

    corpus = tmp_path / "corpus"
    assert "tokens in" in command("prepare", str(source), "--out", str(corpus), "--tokenizer", "bytes")
    run = tmp_path / "run"
    assert command("train", "tiny", "--out", str(run), "--steps", "4").strip() == str(run / "model")
    found = json.loads(command("eval", str(run / "model"), str(source), "--replicates", "2", "--json"))
    (score,) = found["texts"]
    assert score["bytes"] == len(TEXT)
    assert score["tokens"] == len(TEXT) + 1  # the document's separator is predicted, too
    assert score["standard_error"] > 0
    for options in (
        (),
        (
            "--format",
            "upstream",
        ),
    ):
        exported = Path(command("export", str(run), str(tmp_path / f"out{len(options)}"), *options).strip())
        assert unmask.load(exported).score("the fox").nats == unmask.load(run / "model").score("the fox").nats
    assert command("sample", str(run / "model"), "--length", "8", "--steps", "2")
    assert "stdlib-tiny" in command("recipes")


def test_an_autoregressive_counterpart_is_one_word_away(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", lambda: tiny(source))
    monkeypatch.setattr(sys, "argv", ["unmask", "train", "tiny", "--out", str(tmp_path / "ar"), "--objective", "ar"])
    main()
    assert unmask.load(tmp_path / "ar" / "model").score("the fox").standard_error == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "stdlib-tinny"], "did you mean stdlib-tiny"),
        (["train", "stdlib-tiny", "--steps", "0"], "steps must be at least 1; got 0"),
        (["prepare", "nowhere.txt"], "nowhere.txt"),
        (["prepare", "stdlib", "--shard", "4"], "a shard is written I/N"),
        (["eval", "nowhere", "stdlib"], "nowhere is not a folder"),
    ],
)
def test_bad_input(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["unmask", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_unigram_start_predicts_tokens_as_often_as_they_occur(source: Path, tmp_path: Path) -> None:
    """At once, and with no step taken: the loss of the first step is the text's entropy in bytes."""
    experiment = replace(tiny(source), unigram_bias_init=True, objective=MDLM(exact_mask_counts=True))
    experiment = replace(experiment, training=replace(experiment.training, batch_size=64))  # for a steady mean
    corpus = prepare_corpus(experiment, RunFolder(tmp_path / "run"))
    run = build_trainer(experiment, corpus, Distributed())
    ids = corpus.splits["train"].read(0, corpus.splits["train"].num_tokens)
    counts = np.bincount(ids)[np.bincount(ids) > 0] / len(ids)
    entropy = -(counts * np.log(counts)).sum()
    assert run.step()["loss"] == pytest.approx(entropy, rel=0.05)
    plain = build_trainer(replace(experiment, unigram_bias_init=False), corpus, Distributed())
    assert plain.step()["loss"] == pytest.approx(math.log(256), rel=0.01)


def test_a_held_out_part_shorter_than_a_window_is_measured_as_it_is(source: Path, tmp_path: Path) -> None:
    experiment = tiny(source)
    long = replace(
        experiment, layout=Wrapped(512), backbone=replace(experiment.backbone, max_length=512), eval_windows=3
    )
    assert run_experiment(long, tmp_path / "run", Distributed())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("valid_nats_per_token" in line for line in lines)


@pytest.mark.parametrize("contents", ["", "{}", "[]", '{"sources": ["x"]}'])
def test_a_damaged_experiment_is_named(source: Path, tmp_path: Path, contents: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json").write_text(contents)
    with pytest.raises(ValueError, match=r"experiment\.json (is|must)"):
        run_experiment(tiny(source), tmp_path / "run", Distributed())


def test_bad_settings_do_not_claim_a_folder() -> None:
    for change, sentence in (({"seed": -1}, "seed and warmup_steps"), ({"ema_decay": 2.0}, "moving average")):
        with pytest.raises(ValueError, match=sentence):
            TrainingConfig(**change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eval_windows must be at least 1"):
        Experiment(eval_windows=0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def test_a_finished_run_is_extended_as_if_it_had_been_longer_from_the_start(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a constant learning rate, bit for bit: 20 steps and then 30 are 30 at once."""
    short = override(tiny(source), "training.steps=20", "training.log_every=1")
    long = override(short, "training.steps=30")
    assert run_experiment(short, tmp_path / "extended", Distributed())
    first = weights(tmp_path / "extended")
    capsys.readouterr()
    assert run_experiment(long, tmp_path / "extended", Distributed())
    assert "resumed from step 20\nextended from 20 to 30 steps: from here on" in capsys.readouterr().err
    assert run_experiment(long, tmp_path / "whole", Distributed())
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "extended")[name], weight)
        assert not torch.equal(first[name], weight)
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("extended", "whole")
    ]
    assert [loss for loss in losses[0] if loss] == [loss for loss in losses[1] if loss]
    assert "30 of 30, 4 rows each, extended from 20" in (tmp_path / "extended" / "model" / "README.md").read_text()
    with pytest.raises(ValueError, match=r"is a run of 30 steps, and training\.steps=20 is fewer"):
        run_experiment(short, tmp_path / "extended", Distributed())
    assert run_experiment(long, tmp_path / "extended", Distributed())  # which has finished


def test_sources_are_hashed_once(source: Path, tmp_path: Path) -> None:
    """A new run opens them to hash them and to encode them, a resumed one to hash them."""
    opened: list[str] = []
    watching = True

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and str(arguments[0]) == str(source):
            opened.append(event)

    sys.addaudithook(audit)
    assert run_experiment(tiny(source), tmp_path / "run", Distributed())
    assert len(opened) == 2
    shutil.rmtree(tmp_path / "run" / "step-00000006")
    opened.clear()
    assert run_experiment(tiny(source), tmp_path / "run", Distributed())
    assert len(opened) == 1
    watching = False


def test_exporting_and_loading_an_unfinished_run_build_no_second_trainer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And give the same weights: the live average is that of the last checkpoint."""
    built: list[Trainer] = []
    real = Trainer.__init__

    def noted(self: Trainer, *arguments: object, **options: object) -> None:
        built.append(self)
        real(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "__init__", noted)
    assert run_experiment(tiny(source), tmp_path / "run", Distributed())
    lm, _ = load_ema_model(tmp_path / "run")
    assert len(built) == 1
    exported = unmask.load(tmp_path / "run" / "model").denoiser.state_dict()
    for name, weight in lm.denoiser.state_dict().items():
        assert torch.equal(exported[name], weight)


def test_constructing_a_trainer_measures_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bf16_is_faster", "retain_freed_memory"):
        monkeypatch.setattr(f"unmask.training.loop.{name}", lambda *_: pytest.fail("called by a constructor"))
    experiment = override(tiny(source), "training.bf16=None")
    trainer = build_trainer(experiment, prepare_corpus(experiment, RunFolder(tmp_path / "run")), Distributed())
    assert trainer.state.bf16 is None


def test_a_run_of_another_version_gets_one_sentence(source: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experiment.json").write_text('{"sources": ["x"], "corpus": "abc", "network": {}}')
    for call in (
        lambda: run_experiment(tiny(source), tmp_path / "run", Distributed()),
        lambda: load_ema_model(tmp_path / "run"),
    ):
        with pytest.raises(
            ValueError, match=r"experiment\.json is of another version .* train again in another folder"
        ):
            call()


def test_train_is_one_call(source: Path, tmp_path: Path) -> None:
    """From a recipe and a list of texts; from a model and a path, in a folder, where the same call extends it."""
    lm = unmask_train(tiny(source), ["the quick brown fox\n" * 30, "jumps over the lazy dog\n" * 30], steps=4)
    assert isinstance(lm, unmask.LanguageModel)
    tuned = unmask_train(lm, source, tmp_path / "run", steps=5, batch_size=4, bf16=False)
    longer = unmask_train(lm, source, tmp_path / "run", steps=7, batch_size=4, bf16=False)
    scores = [model.score("the fox").nats for model in (lm, tuned, longer)]
    assert len(set(scores)) == 3
    assert CheckpointStore(tmp_path / "run").latest()[0] == 7
    with pytest.raises(ValueError, match="did you mean stdlib-tiny"):
        unmask_train("stdlib-tinny", ["text"])
