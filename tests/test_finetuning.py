"""Going on from a model: with other text, with prompts and answers, by differences of low rank."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import unmask
from test_experiment import TEXT, tiny
from unmask.backbones.mosaic_bert import MosaicBERTConfig
from unmask.data.corpus import Corpus, PrepareConfig
from unmask.data.loader import PromptCompletionRows, Wrapped
from unmask.data.readers import PromptCompletion, SourceConfig
from unmask.distributed import Distributed
from unmask.experiment import Experiment
from unmask.hardware.dtypes import DtypeName
from unmask.objectives import MDLM, MLM, BlockDiffusion
from unmask.run import build_trainer, load_ema_model, prepare_corpus, run_experiment
from unmask.training.lora import LoRA
from unmask.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has read about a fox."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "fox.txt").write_text(TEXT)
    experiment = tiny(folder / "fox.txt")
    long = replace(experiment.training, steps=60, save_every=60, eval_every=60)
    run_experiment(replace(experiment, training=long), folder / "run", Distributed())
    return folder / "run" / "model"


@pytest.fixture
def cats(base: Path, tmp_path: Path) -> Experiment:
    (tmp_path / "cats.txt").write_text("a cat sat on the mat and ate the rat\n" * 60)
    return replace(tiny(tmp_path / "cats.txt"), init_from=str(base), tokenizer="no such tokenizer")


def test_a_run_begins_where_the_model_ended(base: Path, cats: Experiment, tmp_path: Path) -> None:
    corpus = prepare_corpus(cats, RunFolder(tmp_path / "run"))
    old, run = unmask.load(base), build_trainer(cats, corpus, Distributed())
    assert old.tokenizer is not None
    assert corpus.tokenizer.digest == old.tokenizer.digest
    for name, weight in old.denoiser.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], weight)
    assert run_experiment(cats, tmp_path / "run", Distributed())
    text = "a cat sat on the mat"
    new = unmask.load(tmp_path / "run")
    assert new.denoiser.config.backbone == old.denoiser.config.backbone
    assert new.score(text).nats < old.score(text).nats


def test_the_first_model_is_not_needed_any_more(base: Path, cats: Experiment, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(base, gone)
    experiment = replace(cats, init_from=str(gone))
    assert run_experiment(experiment, tmp_path / "run", Distributed())
    expected = unmask.load(tmp_path / "run").score("a cat").nats
    shutil.rmtree(gone)
    lm, _ = load_ema_model(tmp_path / "run")
    assert lm.score("a cat").nats == expected


def test_another_objective_on_the_same_weights(base: Path, cats: Experiment, tmp_path: Path) -> None:
    experiment = replace(cats, objective=BlockDiffusion(block_size=4))
    assert run_experiment(experiment, tmp_path / "run", Distributed())
    lm = unmask.load(tmp_path / "run")
    assert isinstance(lm.objective, BlockDiffusion)
    assert len(lm.complete(["a cat", "the"], 20).texts) == 2


def test_a_bert_is_fine_tuned_with_the_loss_of_mdlm(cats: Experiment, tmp_path: Path) -> None:
    """As in Table 4 of the paper: MLM first, then MDLM from the same weights, which lowers the bound."""
    bert = MosaicBERTConfig(width=32, depth=1, heads=2, intermediate_size=48, max_length=16)
    training = replace(cats.training, batch_size=16, steps=60, save_every=60, eval_every=60)
    short = replace(training, steps=10)
    mlm = replace(cats, init_from=None, tokenizer="bytes", backbone=bert, objective=MLM(), training=short)
    assert run_experiment(mlm, tmp_path / "mlm", Distributed())
    first = unmask.load(tmp_path / "mlm")
    mdlm = replace(cats, init_from=str(tmp_path / "mlm"), training=training)
    run = build_trainer(mdlm, prepare_corpus(mdlm, RunFolder(tmp_path / "mdlm")), Distributed())
    for name, weight in first.denoiser.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], weight)
    assert run_experiment(mdlm, tmp_path / "mdlm", Distributed())
    second = unmask.load(tmp_path / "mdlm")
    assert (type(first.objective), type(second.objective)) == (MLM, MDLM)
    assert second.denoiser.config.backbone == first.denoiser.config.backbone == bert
    text = "a cat sat on the mat and ate the rat\n"
    before, after = first.score(text, draws=128), second.score(text, draws=128)
    assert after.nats_per_token + 4 * (before.standard_error + after.standard_error) < before.nats_per_token


def test_differences_of_low_rank(base: Path, cats: Experiment, tmp_path: Path) -> None:
    experiment = replace(cats, lora=LoRA(rank=2))
    run = build_trainer(experiment, prepare_corpus(experiment, RunFolder(tmp_path / "run")), Distributed())
    trainable = sum(weight.numel() for weight in run.model.parameters() if weight.requires_grad)
    assert trainable < 0.15 * sum(weight.numel() for weight in run.model.parameters())
    assert run_experiment(experiment, tmp_path / "run", Distributed())
    old, new = unmask.load(base), unmask.load(tmp_path / "run")
    assert new.denoiser.state_dict().keys() == old.denoiser.state_dict().keys()
    for name, weight in old.denoiser.state_dict().items():
        difference = new.denoiser.state_dict()[name] - weight
        if "attention" in name or ("mlp" in name and name.endswith("weight")):
            assert torch.linalg.matrix_rank(difference, atol=1e-5) <= 2
        else:
            assert not difference.any()
    assert new.score("a cat sat on the mat").nats < old.score("a cat sat on the mat").nats
    unmerged = unmask.LanguageModel(run.model)
    with pytest.raises(ValueError, match="not merged"):
        unmask.save(unmerged, tmp_path / "unmerged")
    with pytest.raises(ValueError, match="merge them first"):
        run.model.to_bf16()


@pytest.mark.parametrize("family", ["llada_moe_tiny", "llada2_moe_tiny"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "lora"])
def test_published_mixtures_of_experts_are_fine_tuned(family: str, lora: LoRA | None, tmp_path: Path) -> None:
    """Balance losses are logged; adapters change experts, and leave the choice of them alone."""
    golden = Path(__file__).parent / "golden" / family
    (tmp_path / "numbers.txt").write_text("\n".join(" ".join(str(n % 7) for n in range(40)) for _ in range(20)))
    old = unmask.load(golden)
    experiment = replace(
        tiny(tmp_path / "numbers.txt"),
        init_from=str(golden),
        objective=old.objective,
        layout=Wrapped(16),
        lora=lora,
        training=replace(tiny(tmp_path).training, steps=10, log_every=1, save_every=10),
    )
    assert run_experiment(experiment, tmp_path / "run", Distributed())
    new = unmask.load(tmp_path / "run")
    assert new.denoiser.own_sampler == old.denoiser.own_sampler
    text = " ".join(str(n % 7) for n in range(16))
    assert new.score(text).nats < old.score(text).nats
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("aux_loss" in line for line in logged) == (family == "llada_moe_tiny")
    changed = {
        name
        for name, weight in old.denoiser.state_dict().items()
        if not torch.equal(weight, new.denoiser.state_dict()[name])
    }
    assert any(".experts." in name for name in changed)
    assert any("router.gate" in name for name in changed) == (lora is None)
    assert not any("expert_bias" in name for name in changed)
    upstream = "lladamoe" if family == "llada_moe_tiny" else "llada2_moe"
    again = unmask.load(unmask.save(new, tmp_path / "out", upstream_format=upstream))
    assert again.score(text).nats == new.score(text).nats


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_differences_of_frozen_weights_with_few_bits(
    base: Path, cats: Experiment, tmp_path: Path, dtype: DtypeName
) -> None:
    """Frozen weights stay as they are, adapters learn, and merging rounds once."""
    experiment = replace(cats, lora=LoRA(rank=4, dtype=dtype))
    run = build_trainer(experiment, prepare_corpus(experiment, RunFolder(tmp_path / "run")), Distributed())
    kept = unmask.load(base, dtype=dtype).denoiser.backbone.state_dict()
    before = {name: tensor.clone() for name, tensor in run.model.named_parameters() if not tensor.requires_grad}
    frozen = {name.replace(".base.", ".").removeprefix("backbone."): tensor for name, tensor in before.items()}
    assert all(torch.equal(tensor, kept[name]) for name, tensor in frozen.items())
    assert {name for name, tensor in kept.items() if tensor.dtype != torch.float32} <= frozen.keys()
    learned = {name: tensor.clone() for name, tensor in run.model.named_parameters() if tensor.requires_grad}
    assert all(".difference." in name for name in learned)
    run.step()
    now = dict(run.model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert all(not torch.equal(now[name], tensor) for name, tensor in learned.items() if name.endswith(".b"))
    with pytest.raises(ValueError, match="not merged"):
        unmask.save(unmask.LanguageModel(run.model), tmp_path / "unmerged")
    assert run_experiment(experiment, tmp_path / "run", Distributed())
    text, old, new = "a cat sat on the mat", unmask.load(base, dtype=dtype), unmask.load(tmp_path / "run")
    assert new.denoiser.backbone.blocks()[0].attention.qkv.weight.dtype == torch.bfloat16  # merged
    assert new.denoiser.backbone.state_dict().keys() == unmask.load(base).denoiser.backbone.state_dict().keys()
    assert new.score(text).nats < old.score(text).nats
    again, _ = load_ema_model(tmp_path / "run")
    assert again.score(text).nats == new.score(text).nats


def test_prompts_and_answers(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{n % 7} is ", "completion": "odd" if n % 7 % 2 else "even"} for n in range(200)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    experiment = tiny(file)
    experiment = replace(
        experiment,
        init_from=str(base),
        prepare=PrepareConfig(source=SourceConfig(pair_format=PromptCompletion())),
        layout=PromptCompletionRows(16),
        training=replace(experiment.training, steps=80, batch_size=16, save_every=80),
    )
    assert run_experiment(experiment, tmp_path / "run", Distributed())
    lm, corpus = unmask.load(tmp_path / "run"), Corpus.open(tmp_path / "run" / "corpus")
    assert lm.vocab.eos_id == corpus.eos_id == 0
    found = lm.complete(["1 is ", "4 is ", "3 is "], 8, sampler=unmask.Confidence(8, params=unmask.SamplingParams(0)))
    assert all(set(text) <= set("oddevn") for text in found.texts)
    assert all(len(ids) < 8 for ids in found.ids)  # it has learned to stop


@pytest.mark.parametrize("low_rank", [None, LoRA(rank=2)], ids=["whole", "low rank"])
@pytest.mark.parametrize("opening", [None, 0.5], ids=["at once", "step by step"])
def test_a_causal_network_of_another_library_is_opened(
    tmp_path: Path, low_rank: LoRA | None, opening: float | None
) -> None:
    from backbones.test_hf import config

    tokenizer = unmask.Tokenizer.bytes()
    vocab = unmask.Vocab(257, 256)
    torch.manual_seed(0)
    network = unmask.ModelConfig(vocab, config("llama"), MDLM()).build()
    unmask.save(unmask.LanguageModel(network, tokenizer), tmp_path / "llama", upstream_format=True)
    (tmp_path / "cats.txt").write_text("a cat sat on the mat and ate the rat\n" * 60)
    experiment = tiny(tmp_path / "cats.txt")
    training = replace(experiment.training, steps=30, attention_annealing=opening, save_every=30)
    experiment = replace(experiment, init_from=str(tmp_path / "llama"), lora=low_rank, training=training)
    run = build_trainer(experiment, prepare_corpus(experiment, RunFolder(tmp_path / "run")), Distributed())
    run.step()
    assert run.model.backbone.future_visibility == (1.0 if opening is None else 0.0)
    assert run_experiment(experiment, tmp_path / "run", Distributed())
    old, new = (unmask.load(tmp_path / name) for name in ("llama", "run"))
    assert new.denoiser.shift_logits
    assert new.denoiser.backbone.future_visibility == 1.0
    text = "a cat sat on the mat"
    assert new.score(text).nats < old.score(text).nats
    unmask.save(new, tmp_path / "back", upstream_format=True)
    assert unmask.load(tmp_path / "back").score(text).nats == new.score(text).nats


def test_what_does_not_fit_is_refused(base: Path, cats: Experiment, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name the model to start from as init_from"):
        replace(cats, init_from=None, tokenizer="bytes", lora=LoRA())
    with pytest.raises(ValueError, match="unigram_bias_init is for new models"):
        replace(cats, unigram_bias_init=True)
    wide = replace(cats, layout=replace(cats.layout, length=32))
    with pytest.raises(ValueError, match="rows of 32 tokens are longer than the 16"):
        run_experiment(wide, tmp_path / "wide", Distributed())
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        run_experiment(replace(cats, init_from="nowhere"), tmp_path / "nowhere", Distributed())
    lm = unmask.load(base)
    unmask.save(unmask.LanguageModel(lm.denoiser), tmp_path / "mute")
    with pytest.raises(ValueError, match="has no tokenizer to read text with"):
        run_experiment(replace(cats, init_from=str(tmp_path / "mute")), tmp_path / "run", Distributed())
    assert isinstance(cats.objective, MDLM)
