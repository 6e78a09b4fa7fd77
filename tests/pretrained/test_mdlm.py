from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unmask
from unmask import DiTConfig, LanguageModel, Vocab
from unmask.diffusion.schedule import LogLinear
from unmask.types import Times, Tokens

CONFIG = {
    "model_type": "mdlm",
    "vocab_size": 9,
    "model_length": 10,
    "hidden_dim": 16,
    "cond_dim": 12,
    "n_blocks": 2,
    "n_heads": 2,
    "dropout": 0.0,
    "time_conditioning": False,
}
timed_or_not = pytest.mark.parametrize("timed", [True, False], ids=["timed", "folded"])


def published_weights() -> dict[str, Tensor]:
    """Random weights under the published names; norms about one."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    width, cond, size = 16, 12, 9
    weights = {
        "vocab_embed.embedding": 5 * random(size, width),
        "sigma_map.mlp.0.weight": random(cond, 256),
        "sigma_map.mlp.0.bias": random(cond),
        "sigma_map.mlp.2.weight": random(cond, cond),
        "sigma_map.mlp.2.bias": random(cond),
        "rotary_emb.inv_freq": random(4),
        "output_layer.norm_final.weight": 1 + random(width),
        "output_layer.adaLN_modulation.weight": random(2 * width, cond),
        "output_layer.adaLN_modulation.bias": random(2 * width),
        "output_layer.linear.weight": random(size, width),
        "output_layer.linear.bias": random(size),
    }
    for i in range(2):
        weights |= {
            f"blocks.{i}.norm1.weight": 1 + random(width),
            f"blocks.{i}.attn_qkv.weight": random(3 * width, width),
            f"blocks.{i}.attn_out.weight": random(width, width),
            f"blocks.{i}.norm2.weight": 1 + random(width),
            f"blocks.{i}.mlp.0.weight": random(4 * width, width),
            f"blocks.{i}.mlp.0.bias": random(4 * width),
            f"blocks.{i}.mlp.2.weight": random(width, 4 * width),
            f"blocks.{i}.mlp.2.bias": random(width),
            f"blocks.{i}.adaLN_modulation.weight": random(6 * width, cond),
            f"blocks.{i}.adaLN_modulation.bias": random(6 * width),
        }
    return {f"backbone.{name}": tensor for name, tensor in weights.items()}


def published(folder: Path, weights: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """A folder in the published format; a config key given as ... is left out."""
    folder.mkdir(exist_ok=True)
    stated = {key: value for key, value in {**CONFIG, **config}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(published_weights() if weights is None else weights, folder / "model.safetensors")
    return folder


def logits(lm: LanguageModel, z: Tokens, told: Times) -> Tensor:
    with torch.no_grad():
        network = lm.denoiser.backbone
        return network.lm_head(network.encode(network.embed(z), told))


def log_x(lm: LanguageModel, z: Tokens, t: Times) -> Tensor:
    with torch.no_grad():
        out: Tensor = lm.denoiser(z, t, z == lm.vocab.mask_id)
    return out


def some_tokens(lm: LanguageModel) -> Tokens:
    """Half of them masked."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randint(lm.vocab.size - 1, (3, lm.denoiser.max_length or 10), generator=generator)
    return z.masked_fill(torch.rand(z.shape, generator=generator) < 0.5, lm.vocab.mask_id)


def parameters(net: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.fixture(scope="module")
def expected(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "mdlm_tiny" / "expected.safetensors")


@pytest.fixture(scope="module")
def models(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    """The golden model as published (tc), and the same weights without time conditioning (notc)."""
    without = tmp_path_factory.mktemp("golden") / "notc"
    without.mkdir()
    shutil.copyfile(golden / "mdlm_tiny" / "model.safetensors", without / "model.safetensors")
    config = json.loads((golden / "mdlm_tiny" / "config.json").read_text())
    (without / "config.json").write_text(json.dumps({**config, "time_conditioning": False}))
    return {"tc": unmask.load(golden / "mdlm_tiny"), "notc": unmask.load(without)}


@pytest.mark.parametrize("kind", ["tc", "notc"])
def test_logits_are_those_of_the_published_code(
    models: dict[str, LanguageModel], expected: dict[str, Tensor], kind: str
) -> None:
    sigma = LogLinear(eps=1e-3).sigma(expected["t"])[:, None]
    got = logits(models[kind], expected["xt"], sigma)
    torch.testing.assert_close(got, expected[f"logits.{kind}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["tc", "notc"])
def test_predictions_are_those_of_the_published_code(
    models: dict[str, LanguageModel], expected: dict[str, Tensor], kind: str
) -> None:
    # Through the seam: t is turned into the sigma that the network is told, and SUBS is applied.
    z, x = expected["xt"], expected["x0"]
    rows = z == models[kind].vocab.mask_id
    assert rows.any()
    got = log_x(models[kind], z, expected["t"][:, None]).gather(-1, x[rows][:, None])[:, 0]
    torch.testing.assert_close(got, expected[f"subs.logp_at_x0.{kind}"][rows], atol=1e-4, rtol=0)


def test_the_golden_mask_is_the_last_id(models: dict[str, LanguageModel]) -> None:
    for lm in models.values():
        assert lm.vocab == Vocab(size=51, mask_id=50)


def test_the_folded_golden_model_is_a_plain_network(models: dict[str, LanguageModel]) -> None:
    net = models["notc"].denoiser.backbone
    assert not [name for name, _ in net.named_parameters() if "modulation" in name or "time" in name]
    plain = DiTConfig(width=64, depth=3, heads=4, max_length=24, dropout=0.0)
    assert parameters(net) == parameters(plain.build(Vocab(51, 50)))
    assert parameters(models["tc"].denoiser.backbone) > parameters(net)


def test_folding_is_exact(tmp_path: Path) -> None:
    folded = unmask.load(published(tmp_path / "folded"))
    timed = unmask.load(published(tmp_path / "timed", time_conditioning=True))
    assert timed.denoiser.backbone.capabilities.time_conditioned
    assert not folded.denoiser.backbone.capabilities.time_conditioned
    z, zero = some_tokens(folded), torch.zeros(3, 1)
    torch.testing.assert_close(logits(folded, z, zero), logits(timed, z, zero), atol=1e-5, rtol=0)
    # Told another time the modulated network says something else: the fold had something to fold.
    assert not torch.allclose(logits(timed, z, zero + 2), logits(timed, z, zero), atol=1e-2)


def test_a_folded_model_is_a_plain_network(tmp_path: Path) -> None:
    net = unmask.load(published(tmp_path)).denoiser.backbone
    plain = DiTConfig(width=16, depth=2, heads=2, max_length=10, dropout=0.0).build(Vocab(9, 8))
    assert {name: p.shape for name, p in net.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()
    }


def test_time_conditioning_is_off_unless_stated(tmp_path: Path) -> None:
    assert not unmask.load(published(tmp_path, time_conditioning=...)).denoiser.backbone.capabilities.time_conditioned


def test_a_timed_model_is_told_sigma(tmp_path: Path) -> None:
    lm = unmask.load(published(tmp_path, time_conditioning=True))
    z, t = some_tokens(lm), torch.tensor([[0.1], [0.5], [0.9]])
    told = logits(lm, z, -torch.log(1 - 0.999 * t))[z == lm.vocab.mask_id]
    told[:, lm.vocab.mask_id] = -torch.inf
    torch.testing.assert_close(log_x(lm, z, t), told.log_softmax(-1), atol=1e-5, rtol=0)


@timed_or_not
def test_ids_go_in_and_come_out_without_a_tokenizer(tmp_path: Path, timed: bool) -> None:
    lm = unmask.load(published(tmp_path, time_conditioning=timed))
    mask = lm.vocab.mask_id
    samples = lm.sample(n=3, length=7, prompt=[1, 2], seed=5)
    assert samples.tokens.shape == (3, 7)
    assert samples.tokens[:, :2].tolist() == [[1, 2]] * 3
    assert not bool((samples.tokens == mask).any())
    with pytest.raises(ValueError, match=r"no tokenizer: its samples are ids, in \.ids"):
        _ = samples.texts
    filled = lm.infill(torch.tensor([3, mask, mask, 4]), n=2).tokens
    assert filled[:, [0, 3]].tolist() == [[3, 4]] * 2
    assert not bool((filled == mask).any())
    score = lm.score([[1, 2, 3], [4, 5]], draws=16)
    assert (score.tokens, score.text_stats, len(score.per_text)) == (5, None, 2)
    assert 0 < score.nats_per_token < 100


@pytest.mark.parametrize(
    "call",
    [
        lambda lm: lm.sample(prompt="text"),
        lambda lm: lm.infill("text <mask:2>"),
        lambda lm: lm.score(["text"]),
    ],
    ids=["sample", "infill", "score"],
)
def test_text_without_a_tokenizer_is_refused(tmp_path: Path, call: Callable[[LanguageModel], object]) -> None:
    with pytest.raises(ValueError, match="no tokenizer: give token ids"):
        call(unmask.load(published(tmp_path)))


@timed_or_not
def test_a_published_model_is_saved_in_our_format(tmp_path: Path, timed: bool) -> None:
    lm = unmask.load(published(tmp_path / "theirs", time_conditioning=timed))
    again = unmask.load(unmask.save(lm, tmp_path / "ours"))
    assert again.denoiser.config == lm.denoiser.config
    z, t = some_tokens(lm), torch.tensor([[0.1], [0.5], [0.9]])
    assert torch.equal(log_x(again, z, t), log_x(lm, z, t))


def test_names_may_lack_their_prefix(tmp_path: Path) -> None:
    bare = {name.removeprefix("backbone."): tensor for name, tensor in published_weights().items()}
    lm, full = unmask.load(published(tmp_path / "bare", bare)), unmask.load(published(tmp_path / "full"))
    z, t = some_tokens(lm), torch.full((3, 1), 0.5)
    torch.testing.assert_close(log_x(lm, z, t), log_x(full, z, t), atol=1e-5, rtol=0)


@timed_or_not
def test_weights_of_half_precision_are_read(tmp_path: Path, timed: bool) -> None:
    half = {name: tensor.bfloat16() for name, tensor in published_weights().items()}
    rounded = {name: tensor.float() for name, tensor in half.items()}
    lm = unmask.load(published(tmp_path / "half", half, time_conditioning=timed))
    same = unmask.load(published(tmp_path / "float", rounded, time_conditioning=timed))
    z, t = some_tokens(lm), torch.full((3, 1), 0.5)
    torch.testing.assert_close(log_x(lm, z, t), log_x(same, z, t), atol=1e-5, rtol=0)


def test_code_in_a_published_folder_is_not_run(tmp_path: Path) -> None:
    folder = published(tmp_path / "m", auto_map={"AutoModelForMaskedLM": "modeling_mdlm.MDLM"})
    proof = tmp_path / "proof"
    (folder / "modeling_mdlm.py").write_text(f"open({str(proof)!r}, 'w').close()\nclass MDLM: pass\n")
    assert unmask.load(folder).vocab.mask_id == 8
    assert not proof.exists()


TENSORS = [
    "vocab_embed.embedding",
    "sigma_map.mlp.0.weight",
    "sigma_map.mlp.2.bias",
    "blocks.1.norm1.weight",
    "blocks.0.attn_qkv.weight",
    "blocks.1.attn_out.weight",
    "blocks.1.mlp.2.bias",
    "blocks.0.adaLN_modulation.weight",
    "output_layer.adaLN_modulation.bias",
    "output_layer.linear.weight",
]


@timed_or_not
@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, timed: bool) -> None:
    weights = published_weights()
    del weights[f"backbone.{name}"]
    with pytest.raises(ValueError, match=f"lack.*{name}"):
        unmask.load(published(tmp_path, weights, time_conditioning=timed))


@timed_or_not
@pytest.mark.parametrize("rows", [1, 3])  # folding multiplies: a single row would broadcast unnoticed
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path, name: str, rows: int, timed: bool) -> None:
    weights = published_weights()
    shape = [rows, *weights[f"backbone.{name}"].shape[1:]]
    weights[f"backbone.{name}"] = torch.zeros(shape)
    # The name must be the one in the file, where the reader will look.
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        unmask.load(published(tmp_path, weights, time_conditioning=timed))
    assert str(shape) in str(caught.value)


@timed_or_not
def test_an_unknown_tensor_is_named(tmp_path: Path, timed: bool) -> None:
    weights = {**published_weights(), "backbone.blocks.0.mystery.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unknown.*blocks\.0\.mystery\.weight"):
        unmask.load(published(tmp_path, weights, time_conditioning=timed))


@pytest.mark.parametrize(("blocks", "problem"), [(1, "unknown"), (3, "lack")])
def test_a_wrong_number_of_blocks_is_noticed(tmp_path: Path, blocks: int, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"{problem}.*blocks\.{min(blocks, 2)}\."):
        unmask.load(published(tmp_path, n_blocks=blocks))


@pytest.mark.parametrize("value", [..., None, "16", 16.0, True, 0, -2], ids=str)
@pytest.mark.parametrize("key", ["vocab_size", "model_length", "hidden_dim", "cond_dim", "n_blocks", "n_heads"])
def test_sizes_must_be_whole_numbers(tmp_path: Path, key: str, value: object) -> None:
    shown = "None" if value is ... else repr(value)
    with pytest.raises(ValueError, match=f"'{key}', an integer above 0; got {shown}"):
        unmask.load(published(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("dropout", "much"), ("dropout", None), ("dropout", 1.5), ("time_conditioning", "false")],
)
def test_other_settings_must_be_of_their_type(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key) as caught:
        unmask.load(published(tmp_path, **{key: value}))
    assert str(value) in str(caught.value)
