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
from unmask.data.columns import PromptAnswer
from unmask.data.corpus import Corpus, PrepareOptions
from unmask.data.loader import Pairs
from unmask.data.sources import SourceOptions
from unmask.experiment import Experiment, averaged_model, begin, carry_out, prepare_corpus
from unmask.objectives import MDLM, BlockDiffusion
from unmask.training.lowrank import LowRank
from unmask.world import World


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has read about a fox."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "fox.txt").write_text(TEXT)
    experiment = tiny(folder / "fox.txt")
    long = replace(experiment.training, steps=60, save_every=60, evaluate_every=60)
    carry_out(replace(experiment, training=long), folder / "run", World())
    return folder / "run" / "model"


@pytest.fixture
def cats(base: Path, tmp_path: Path) -> Experiment:
    (tmp_path / "cats.txt").write_text("a cat sat on the mat and ate the rat\n" * 60)
    return replace(tiny(tmp_path / "cats.txt"), start=str(base), tokenizer="no such tokenizer")


def test_a_run_begins_where_the_model_ended(base: Path, cats: Experiment, tmp_path: Path) -> None:
    corpus = prepare_corpus(cats, tmp_path / "run", World())
    old, run = unmask.load(base), begin(cats, corpus, World())
    assert old.tokenizer is not None
    assert corpus.tokenizer.digest == old.tokenizer.digest
    for name, weight in old.denoise.state_dict().items():
        assert torch.equal(run.denoise.state_dict()[name], weight)
    assert carry_out(cats, tmp_path / "run", World())
    text = "a cat sat on the mat"
    new = unmask.load(tmp_path / "run")
    assert new.denoise.config.backbone == old.denoise.config.backbone
    assert new.score(text).nats < old.score(text).nats


def test_the_first_model_is_not_needed_any_more(base: Path, cats: Experiment, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(base, gone)
    experiment = replace(cats, start=str(gone))
    assert carry_out(experiment, tmp_path / "run", World())
    expected = unmask.load(tmp_path / "run").score("a cat").nats
    shutil.rmtree(gone)
    lm, _ = averaged_model(tmp_path / "run")
    assert lm.score("a cat").nats == expected


def test_another_objective_on_the_same_weights(base: Path, cats: Experiment, tmp_path: Path) -> None:
    experiment = replace(cats, objective=BlockDiffusion(block=4))
    assert carry_out(experiment, tmp_path / "run", World())
    lm = unmask.load(tmp_path / "run")
    assert isinstance(lm.objective, BlockDiffusion)
    assert len(lm.complete(["a cat", "the"], 20).texts) == 2


def test_differences_of_low_rank(base: Path, cats: Experiment, tmp_path: Path) -> None:
    experiment = replace(cats, low_rank=LowRank(rank=2))
    run = begin(experiment, prepare_corpus(experiment, tmp_path / "run", World()), World())
    trainable = sum(weight.numel() for weight in run.denoise.parameters() if weight.requires_grad)
    assert trainable < 0.15 * sum(weight.numel() for weight in run.denoise.parameters())
    assert carry_out(experiment, tmp_path / "run", World())
    old, new = unmask.load(base), unmask.load(tmp_path / "run")
    assert new.denoise.state_dict().keys() == old.denoise.state_dict().keys()
    for name, weight in old.denoise.state_dict().items():
        difference = new.denoise.state_dict()[name] - weight
        if "attention" in name or ("mlp" in name and name.endswith("weight")):
            assert torch.linalg.matrix_rank(difference, atol=1e-5) <= 2
        else:
            assert not difference.any()
    assert new.score("a cat sat on the mat").nats < old.score("a cat sat on the mat").nats
    unmerged = unmask.LanguageModel(run.denoise)
    with pytest.raises(ValueError, match="not merged yet"):
        unmask.save(unmerged, tmp_path / "unmerged")
    with pytest.raises(ValueError, match="not merged yet"):
        run.denoise.to_bf16()


def test_prompts_and_answers(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{n % 7} is ", "answer": "odd" if n % 7 % 2 else "even"} for n in range(200)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    experiment = tiny(file)
    experiment = replace(
        experiment,
        start=str(base),
        options=PrepareOptions(source=SourceOptions(pairs=PromptAnswer())),
        layout=Pairs(16),
        training=replace(experiment.training, steps=80, batch_size=16, save_every=80),
    )
    assert carry_out(experiment, tmp_path / "run", World())
    lm, corpus = unmask.load(tmp_path / "run"), Corpus.open(tmp_path / "run" / "corpus")
    assert lm.vocab.end == corpus.separator == 0
    found = lm.complete(["1 is ", "4 is ", "3 is "], 8, sampler=unmask.Confidence(8, choice=unmask.Choice(0)))
    assert all(set(text) <= set("oddevn") for text in found.texts)
    assert all(len(ids) < 8 for ids in found.ids)  # it has learned to stop


@pytest.mark.parametrize("low_rank", [None, LowRank(rank=2)], ids=["whole", "low rank"])
@pytest.mark.parametrize("opening", [None, 0.5], ids=["at once", "step by step"])
def test_a_causal_network_of_another_library_is_opened(
    tmp_path: Path, low_rank: LowRank | None, opening: float | None
) -> None:
    from backbones.test_huggingface import config

    tokenizer = unmask.Tokenizer.bytes()
    vocab = unmask.Vocab(257, 256)
    torch.manual_seed(0)
    network = unmask.ModelConfig(vocab, config("llama"), MDLM()).build()
    unmask.save(unmask.LanguageModel(network, tokenizer), tmp_path / "llama", published=True)
    (tmp_path / "cats.txt").write_text("a cat sat on the mat and ate the rat\n" * 60)
    experiment = tiny(tmp_path / "cats.txt")
    training = replace(experiment.training, steps=30, opening=opening, save_every=30)
    experiment = replace(experiment, start=str(tmp_path / "llama"), low_rank=low_rank, training=training)
    run = begin(experiment, prepare_corpus(experiment, tmp_path / "run", World()), World())
    run.step()
    assert run.denoise.backbone.opened == (1.0 if opening is None else 0.0)
    assert carry_out(experiment, tmp_path / "run", World())
    old, new = (unmask.load(tmp_path / name) for name in ("llama", "run"))
    assert new.denoise.shifted
    assert new.denoise.backbone.opened == 1.0
    text = "a cat sat on the mat"
    assert new.score(text).nats < old.score(text).nats
    unmask.save(new, tmp_path / "back", published=True)
    assert unmask.load(tmp_path / "back").score(text).nats == new.score(text).nats


def test_what_does_not_fit_is_refused(base: Path, cats: Experiment, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name one as start"):
        replace(cats, start=None, tokenizer="bytes", low_rank=LowRank())
    with pytest.raises(ValueError, match="leave out unigram_start"):
        replace(cats, unigram_start=True)
    wide = replace(cats, layout=replace(cats.layout, length=32))
    with pytest.raises(ValueError, match="rows of 32 tokens are longer than the 16"):
        carry_out(wide, tmp_path / "wide", World())
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        carry_out(replace(cats, start="nowhere"), tmp_path / "nowhere", World())
    lm = unmask.load(base)
    unmask.save(unmask.LanguageModel(lm.denoise), tmp_path / "mute")
    with pytest.raises(ValueError, match="has no tokenizer to read text with"):
        carry_out(replace(cats, start=str(tmp_path / "mute")), tmp_path / "run", World())
    assert isinstance(cats.objective, MDLM)
