"""MosaicBERT against the published implementation, its folder, padding, and training with MDLM and MLM."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import unmask
from unmask.backbones.mosaic_bert import MosaicBERT, MosaicBERTConfig, _alibi_slopes
from unmask.context import Context
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.objectives import MDLM, MLM, BlockDiffusion, NextToken, Objective
from unmask.pretrained import load, save
from unmask.types import Batch, Vocab

GOLDEN = Path(__file__).parents[1] / "golden" / "mosaicbert_tiny"
TINY = MosaicBERTConfig(width=24, depth=2, heads=3, intermediate_size=20, max_length=16, dropout=0.0)
VOCAB = Vocab(size=7, mask_id=4)


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


@pytest.fixture(scope="module")
def published() -> LanguageModel:
    return load(GOLDEN)


def network(lm: LanguageModel) -> MosaicBERT:
    backbone = lm.denoiser.backbone
    assert isinstance(backbone, MosaicBERT)
    return backbone


def tiny(objective: Objective = MDLM(), backbone: MosaicBERTConfig = TINY) -> Denoiser:  # noqa: B008
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(VOCAB, backbone, objective).build().double().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@torch.no_grad()
def test_hidden_states_and_logits_are_the_published_ones(
    published: LanguageModel, golden: dict[str, torch.Tensor]
) -> None:
    backbone, valid = network(published), golden["attention_mask"].bool()
    h, t = backbone.embed(golden["input_ids"]), torch.zeros(3, 1)
    context = Context(valid=valid, segment_ids=golden["token_type_ids"])
    hidden = backbone.features(h, t, context)
    torch.testing.assert_close(hidden[valid], golden["hidden"][valid], rtol=0, atol=1e-5)
    at_valid = backbone.encode(h, t, valid, context)
    logits = backbone.compute_logits(at_valid)
    torch.testing.assert_close(logits, golden["logits"][valid], rtol=1e-5, atol=1e-5)
    everywhere = backbone.compute_logits(backbone.encode(h, t, None, context))
    torch.testing.assert_close(everywhere[valid], logits, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_classifier_on_the_hidden_states_is_the_published_one(
    published: LanguageModel, golden: dict[str, torch.Tensor]
) -> None:
    backbone, valid = network(published), golden["attention_mask"].bool()
    context = Context(valid=valid, segment_ids=golden["token_type_ids"])
    first = backbone.features(backbone.embed(golden["input_ids"]), torch.zeros(3, 1), context)[:, 0]
    weights = {name.removeprefix("classifier."): tensor for name, tensor in golden.items()}
    pooled = (first @ weights["bert.pooler.dense.weight"].T + weights["bert.pooler.dense.bias"]).tanh()
    logits = pooled @ weights["classifier.weight"].T + weights["classifier.bias"]
    torch.testing.assert_close(logits, golden["classifier.logits"], rtol=0, atol=1e-5)


def test_alibi_is_the_published_one(published: LanguageModel, golden: dict[str, torch.Tensor]) -> None:
    from unmask.backbones.attention_mask import attention_layout

    layout = attention_layout(14, torch.device("cpu"), causal=False)
    bias = network(published)._attention_bias(layout)[0]
    torch.testing.assert_close(bias, golden["alibi"], rtol=0, atol=1e-6)
    assert _alibi_slopes(8) == [2.0 ** -(i + 1) for i in range(8)]
    assert _alibi_slopes(12) == [2.0 ** -(i + 1) for i in range(8)] + [2.0 ** -(i + 0.5) for i in range(4)]


def test_the_published_folder_comes_back_exactly(published: LanguageModel, tmp_path: Path) -> None:
    save(published, tmp_path / "out", upstream_format=True)
    theirs, ours = load_file(GOLDEN / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (GOLDEN, tmp_path / "out"))
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    assert [before[key] for key in sizes] == [after[key] for key in sizes]
    again = load(tmp_path / "out")
    assert again.denoiser.config == published.denoiser.config
    with_mlm = LanguageModel(tiny(MLM(fraction=0.15)).float())
    save(with_mlm, tmp_path / "mlm", upstream_format=True)
    assert load(tmp_path / "mlm").denoiser.config == with_mlm.denoiser.config


def test_our_own_folder_comes_back_exactly(tmp_path: Path) -> None:
    lm = LanguageModel(tiny().float())
    save(lm, tmp_path / "own")
    again = load(tmp_path / "own")
    assert again.denoiser.config == lm.denoiser.config
    state = again.denoiser.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in lm.denoiser.state_dict().items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_act": "relu"}, r"config\.json has hidden_act = 'relu', but only 'gelu' is supported"),
        ({"num_hidden_layers": 3}, r"lack bert\.encoder\.layer\.2\."),
        ({"num_hidden_layers": 10**9}, r"asks for 1,000,000,000 layers"),
        ({"num_attention_heads": 5}, r"width must be a multiple of heads"),
        ({"intermediate_size": 47}, r"gated_layers\.weight has shape \[96, 36\] but config\.json asks for \[94, 36\]"),
        ({"mask_token_id": 61}, r"the mask id 61 is outside the vocabulary"),
        ({"mask_token_id": "x"}, r"needs 'mask_token_id', a token id"),
        ({"vocab_size": 40}, r"word_embeddings\.weight has shape \[61, 36\]"),
    ],
    ids=["activation", "layers", "many-layers", "heads", "width", "mask", "mask-name", "vocabulary"],
)
def test_a_folder_that_does_not_fit_is_refused(change: dict[str, object], sentence: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "m")
    (tmp_path / "m").chmod(0o755)
    file = tmp_path / "m" / "config.json"
    file.chmod(0o644)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path / "m")


def test_padded_embeddings_and_berts_mask_are_known(tmp_path: Path) -> None:
    weights = load_file(GOLDEN / "model.safetensors")
    for name, rows in (("bert.embeddings.word_embeddings.weight", 30_528), ("cls.predictions.decoder.bias", 30_528)):
        weights[name] = torch.zeros(rows, *weights[name].shape[1:])
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((GOLDEN / "config.json").read_text()) | {"vocab_size": 30_522}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).vocab == Vocab(size=30_528, mask_id=103)


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    """On the right, on the left, and whatever the padding holds."""
    model, x = tiny(), torch.tensor([[0, 4, 1, 4, 2], [4, 3, 3, 4, 4]])
    t = torch.full((2, 1), 0.5, dtype=torch.float64)
    alone = model(x, t, x == 4)
    for left, right, filler in ((0, 4, 0), (3, 0, 6), (2, 3, 4)):
        padded = torch.nn.functional.pad(x, (left, right), value=filler)
        valid = torch.zeros_like(padded, dtype=torch.bool)
        valid[:, left : left + 5] = True
        together = model(padded, t, (padded == 4) & valid, Context(valid=valid))
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_documents_do_not_see_each_other() -> None:
    model, x = tiny(), torch.tensor([[0, 4, 1, 4, 2, 3]])
    t, documents = torch.full((1, 1), 0.5, dtype=torch.float64), torch.tensor([[0, 0, 0, 1, 1, 1]])
    both = model(x, t, x == 4, Context(document_ids=documents))
    apart = torch.cat([model(part, t, part == 4) for part in x.split(3, 1)])
    torch.testing.assert_close(both, apart, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_cache_and_blocks_give_what_the_whole_pass_gives() -> None:
    causal = tiny(NextToken(), replace(TINY, causal=True))
    x = torch.tensor([[4, 0, 1, 6, 2, 3]])
    t = torch.zeros(1, 1, dtype=torch.float64)
    whole = causal(x, t, torch.ones_like(x, dtype=torch.bool))
    cache = causal.new_cache()
    steps = [
        causal(x[:, i : i + 1], t, torch.ones(1, 1, dtype=torch.bool), Context(cache=cache.view())) for i in range(6)
    ]
    torch.testing.assert_close(torch.cat(steps), whole, rtol=1e-12, atol=1e-12)
    blocks = LanguageModel(tiny(BlockDiffusion(block_size=4)))
    assert blocks.sample(n=2, length=8, seed=1).tokens.shape == (2, 8)


@pytest.mark.parametrize("objective", [MDLM(), MLM()], ids=["mdlm", "mlm"])
def test_it_learns(objective: Objective) -> None:
    """[CLS]-like first tokens are masked and counted as all others (A.2 of the paper's fine-tuning)."""
    torch.manual_seed(0)
    model = ModelConfig(VOCAB, TINY, objective).build().train()
    batch = Batch(torch.tensor([0, 1, 2, 3, 5, 6])[:, None].expand(-1, 8).repeat(4, 1))  # a row has one token, 8 times
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        nats = objective.token_nll(model, batch, torch.Generator().manual_seed(step))
        if step == 0:
            assert (nats > 0).any(0).all()  # every position is counted
        loss = nats.sum() / batch.tokens.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny()
        model.backbone.gradient_checkpointing = checkpointing
        MDLM().token_nll(
            model, Batch(torch.tensor([[0, 1, 2, 3, 5]])), torch.Generator().manual_seed(0)
        ).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"heads": 5}, r"^width must be a multiple of heads, at most 1024; got 24, 5$"),
        ({"depth": 0}, r"^depth must be at least 1; got 0$"),
        ({"max_length": 0}, r"^max_length must be at least 1; got 0$"),
        ({"dropout": 1.0}, r"^dropout must be in \[0, 1\); got 1\.0$"),
        ({"norm_eps": 0.0}, r"^norm_eps must be above 0 and below 1; got 0\.0$"),
    ],
)
def test_impossible_sizes_are_refused(settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(TINY, **settings)  # type: ignore[arg-type]


def test_it_is_public() -> None:
    assert unmask.MosaicBERTConfig is MosaicBERTConfig
    assert MosaicBERTConfig().build(Vocab(8, 7)).describe()["network"].startswith("MosaicBERT, 12 layers")
