"""Baselines through the trainer, the commands and model folders, which know nothing of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import training_worker as worker
from unmask import MDLM, SSDLM, DiTConfig, LanguageModel, ModelConfig, Objective, Plaid, Vocab, load, save
from unmask.backbones import BackboneConfig
from unmask.backbones.caduceus import CaduceusConfig
from unmask.baselines import BASELINES, GaussianSteps
from unmask.baselines._ssd_denoiser import SSDLMDenoiser
from unmask.cli import main
from unmask.config import from_json, to_json
from unmask.data.loader import Loader, Wrapped
from unmask.distributed import Distributed
from unmask.training._checkpoint import CheckpointStore
from unmask.training.denoising import build_denoising_trainer
from unmask.training.trainer import Trainer

SMALL: dict[str, Objective] = {"ssd-lm": SSDLM(block_size=5, steps=50), "plaid": Plaid(4, 16)}
EVERY = pytest.mark.parametrize("name", SMALL)


def test_every_baseline_is_tried_here() -> None:
    assert SMALL.keys() == BASELINES.keys()
    assert {name: type(objective) for name, objective in SMALL.items()} == dict(BASELINES.items())


NETWORKS: dict[str, BackboneConfig] = {
    "dit": DiTConfig(width=16, depth=1, heads=2, max_length=16, dropout=0.1),
    "caduceus": CaduceusConfig(width=16, depth=1, max_length=16),
}
ON_EVERY_NETWORK = pytest.mark.parametrize("network", NETWORKS)


def trainer(name: str, steps: int, microbatch_size: int | None = None, network: str = "dit") -> Trainer:
    torch.manual_seed(0)
    model = ModelConfig(Vocab(7, 6), NETWORKS[network], SMALL[name]).build()
    config = replace(worker.TRAINING, steps=steps, batch_size=8, microbatch_size=microbatch_size)
    loader = Loader(worker.CycleTokens(), Wrapped(16), config.batch_size)
    return build_denoising_trainer(model, SMALL[name], loader, config)


@EVERY
@ON_EVERY_NETWORK
def test_a_resumed_run_is_the_uninterrupted_one(name: str, network: str, tmp_path: Path) -> None:
    whole, first = trainer(name, 8, network=network), trainer(name, 8, network=network)
    store = CheckpointStore(tmp_path, Distributed())
    losses = [whole.step()["loss"] for _ in range(8)]
    assert [first.step()["loss"] for _ in range(4)] == losses[:4]
    first.save_checkpoint(store)
    again = trainer(name, 8, network=network)
    again.load_checkpoint(store, 4)
    assert [again.step()["loss"] for _ in range(4)] == losses[4:]
    for mine, theirs in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@EVERY
def test_micro_batches_change_nothing_but_rounding(name: str) -> None:
    whole, split = trainer(name, 3), trainer(name, 3, microbatch_size=3)
    whole.model.backbone.config = split.model.backbone.config
    for model in (whole.model, split.model):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    for _ in range(3):
        a, b = whole.step(), split.step()
        assert a["tokens"] == b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@EVERY
@ON_EVERY_NETWORK
def test_every_parameter_is_trained(name: str, network: str) -> None:
    run = trainer(name, 4, network=network)
    before = {key: weight.detach().clone() for key, weight in run.model.named_parameters()}
    for _ in range(4):
        run.step()
    unused = {"backbone.embedding.weight"}  # a baseline may have embeddings of its own
    still = {key for key, weight in run.model.named_parameters() if torch.equal(weight, before[key])}
    assert still <= unused


@pytest.mark.thorough
def test_plaid_on_a_state_space_network_learns_evaluates_and_writes(tmp_path: Path) -> None:
    run = trainer("plaid", 40, network="caduceus")
    curve = [run.step()["loss"] for _ in range(40)]
    assert sum(curve[-10:]) < 0.9 * sum(curve[:10])
    lm = LanguageModel(run.model.eval())
    text = [0, 1, 2, 3, 4, 5, 0, 1]
    score = lm.score([text], draws=64)
    assert 0 < score.nats_per_token < curve[0]
    folder = save(lm, tmp_path / "model")
    again = load(folder)
    assert again.score([text], draws=64).nats == score.nats
    sampler = GaussianSteps(6)
    texts = lm.sample(3, 16, sampler=sampler, seed=1).tokens
    assert texts.shape == (3, 16)
    assert (texts < 6).all()
    assert torch.equal(again.sample(3, 16, sampler=sampler, seed=1).tokens, texts)


@EVERY
def test_settings_are_read_back(name: str) -> None:
    assert from_json(Objective, to_json(SMALL[name])) == SMALL[name]


def run(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["unmask", *words])
        try:
            main()
        except SystemExit as exit_:
            return int(exit_.code or 0)
    return 0


@EVERY
def test_the_commands_know_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat and then it sat there for a long time\n" * 60)
    out = str(tmp_path / "run")
    sizes = ["backbone.width=16", "backbone.depth=1", "backbone.heads=2", "eval_windows=4", "training.bf16=false"]
    train = ["train", "stdlib-tiny", "--objective", name, "--sources", str(tmp_path / "text.txt"), "--tokenizer"]
    train += ["bytes", "--steps", "2", "--batch-size", "8", "--out", out, "--set", *sizes]
    assert run(*train) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    has_bound = SMALL[name].why_no_likelihood is None
    assert any("valid_nats_per_token" in line for line in lines) == has_bound
    assert any("valid_loss" in line for line in lines) != has_bound
    capsys.readouterr()
    assert run("sample", out, "--length", "30", "--steps", "3", "--n", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [len(ids) for ids in told["tokens"]] == [30, 30]
    assert run("eval", out, str(tmp_path / "text.txt"), "--windows", "4", "--replicates", "2") == (
        0 if has_bound else 2
    )
    assert run("score", out, "the cat") == (0 if has_bound else 2)
    printed = capsys.readouterr()
    assert ("nats/token" in printed.out) == has_bound
    assert ("has no likelihood" in printed.err) != has_bound
    assert run("eval-samples", out, "--steps", "2", "--n", "2", "--length", "20") == 0
    model = load(tmp_path / "run")
    assert type(model.objective) is type(SMALL[name])
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert ("lm.score" in card) == has_bound
    assert "infill" not in card
    pytest.importorskip("matplotlib")
    from unmask.report import ReportConfig, write_report

    page = write_report(tmp_path / "run", config=ReportConfig(windows=4, replicates=2, samples=1, steps=2))
    assert ("has no likelihood" in page.read_text()) != has_bound


@EVERY
def test_it_starts_from_the_network_of_another_model(name: str) -> None:
    network, vocab = DiTConfig(width=16, depth=1, heads=2, max_length=16), Vocab(7, 6)
    mdlm = ModelConfig(vocab, network, MDLM()).build()
    first, second = (ModelConfig(vocab, network, SMALL[name]).build() for _ in range(2))
    first.load_initial(mdlm)
    for key, weight in mdlm.backbone.state_dict().items():
        assert torch.equal(weight, first.backbone.state_dict()[key])
    if isinstance(first, SSDLMDenoiser):
        assert torch.equal(first.embed_sum_layer.weight.T, mdlm.backbone.embed(torch.arange(7)[None])[0])
    second.load_initial(first)
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    mdlm.load_initial(second)  # and back


@EVERY
def test_a_folder_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    vocab = Vocab(7, 6)
    model = ModelConfig(vocab, DiTConfig(width=16, depth=1, heads=2, max_length=16), SMALL[name]).build()
    folder = save(LanguageModel(model), tmp_path / "model")
    (folder / "manifest.json").unlink()
    settings = json.loads((folder / "config.json").read_text())
    for part, field, value, sentence in (
        ("backbone", "width", 32, "does not fit|but config.json asks for|asks for 7 tokens"),
        ("backbone", "depth", 10**9, "layers"),
        ("vocab", "size", 10**9, "tokens of width 16"),
        ("objective", "kind", "NoSuchObjective", "has kind 'NoSuchObjective'; known are .*SSDLM, Plaid"),
    ):
        wrong = {**settings, part: {**settings[part], field: value}}
        (folder / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=sentence):
            load(folder)


@EVERY
def test_a_server_refuses_it(name: str) -> None:
    from unmask import Tokenizer
    from unmask.serve.limits import Limits
    from unmask.serve.service import Service

    tokenizer = Tokenizer.bytes()
    vocab = Vocab(tokenizer.vocab_size + 1, tokenizer.vocab_size)
    lm = LanguageModel(
        ModelConfig(vocab, DiTConfig(width=16, depth=1, heads=2, max_length=16), SMALL[name]).build(), tokenizer
    )
    failures: list[Exception] = []
    service = Service("tiny", Limits())
    service.start(lambda: lm, on_failure=failures.append)
    assert service.close(5)
    assert "cannot join" in str(failures[0])
