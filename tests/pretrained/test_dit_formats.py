"""Duo and SEDD, whose networks are MDLM's: golden logits, bounds and scores; round trips; what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unmask
from unmask import LanguageModel
from unmask.diffusion.schedule import Geometric, LogLinear
from unmask.model import ModelConfig
from unmask.objectives import SEDD, UniformDiffusion, UniformSEDD

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("duo_tiny", "sedd_tiny", "sedd_uniform_tiny")


def expected(family: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / family / "expected.safetensors")


def logits(lm: LanguageModel, tokens: Tensor, sigma: Tensor) -> Tensor:
    backbone = lm.denoiser.backbone
    with torch.no_grad():
        return backbone.compute_logits(backbone.features(backbone.embed(tokens), sigma[:, None]))


def log_probs(lm: LanguageModel, tokens: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        return lm.denoiser.dense_log_probs(tokens, t[:, None])


def test_duo() -> None:
    lm, golden = unmask.load(GOLDEN / "duo_tiny"), expected("duo_tiny")
    assert lm.objective == UniformDiffusion(schedule=LogLinear(eps=1e-3), steps=None)
    assert (lm.vocab.size, lm.vocab.mask_id) == (61, 60)
    for name, sigma in (("logits", golden["sigma"]), ("logits.sigma0", 0 * golden["sigma"])):
        torch.testing.assert_close(logits(lm, golden["x"], sigma)[..., :60], golden[name], atol=1e-4, rtol=0)
    backbone = lm.denoiser.backbone
    with torch.no_grad():  # tokens that are mixtures, as Duo's curriculum has them
        mixed = golden["soft"].softmax(-1) @ backbone.embed(torch.arange(60)[None])[0]
        soft = backbone.compute_logits(backbone.features(mixed, golden["sigma"][:, None]))
    torch.testing.assert_close(soft[..., :60], golden["logits.soft"], atol=1e-4, rtol=0)
    log_x = log_probs(lm, golden["x"], golden["t"])
    torch.testing.assert_close(log_x[..., :60], golden["log_x"], atol=1e-4, rtol=0)
    assert (log_x[..., 60] == -torch.inf).all()


def test_duos_bound() -> None:
    """The published loss of each token, without the constant that it leaves out."""
    lm, golden = unmask.load(GOLDEN / "duo_tiny"), expected("duo_tiny")
    objective = lm.objective
    assert isinstance(objective, UniformDiffusion)
    log_x = log_probs(lm, golden["xt"], golden["t"]).flatten(0, 1)
    _, alpha, rate = objective.noise_level(golden["t"].double()[:, None])
    alpha, rate = (each.expand(golden["xt"].shape).flatten() for each in (alpha, rate))
    nats = objective.nats(golden["xt"].flatten(), golden["x0"].flatten(), log_x, alpha, rate, lm.vocab)
    torch.testing.assert_close(nats.float(), golden["nelbo"].flatten(), atol=1e-5, rtol=1e-4)
    assert 0 < objective.prior_kl(lm.vocab) < 0.001


def test_sedd() -> None:
    lm, golden = unmask.load(GOLDEN / "sedd_tiny"), expected("sedd_tiny")
    assert lm.objective == SEDD(schedule=LogLinear(eps=1e-3))
    torch.testing.assert_close(logits(lm, golden["x"], golden["sigma"]), golden["raw"], atol=1e-4, rtol=0)


def test_sedds_scores_and_score_entropy() -> None:
    """log s = log_x - log(e^sigma - 1); at a masked position the score entropy is s_x-weighted as in the paper."""
    lm, golden = unmask.load(GOLDEN / "sedd_tiny"), expected("sedd_tiny")
    ratio = torch.expm1(golden["sigma"].double())[:, None]
    objective = lm.objective
    assert isinstance(objective, SEDD)
    t = objective.schedule.inverse(torch.exp(-golden["sigma"].double()))
    clean, mask = lm.vocab.mask_id, golden["x"] == lm.vocab.mask_id
    log_x = log_probs(lm, golden["x"], t)[..., :clean].double()
    scores = log_x - ratio.log()[..., None]
    torch.testing.assert_close(scores[mask].float(), golden["log_score"][..., :clean][mask], atol=1e-4, rtol=0)
    log_x = log_probs(lm, golden["xt"], t)[..., :clean].double()
    right = log_x.gather(-1, golden["x0"][..., None])[..., 0]
    entropy = (log_x.exp().sum(-1) - right - 1) / ratio
    entropy = torch.where(golden["xt"] == lm.vocab.mask_id, entropy, 0.0)
    torch.testing.assert_close(entropy.float(), golden["score_entropy"], atol=1e-5, rtol=1e-4)


def test_sedd_on_uniform_noise() -> None:
    """Its scores are those of the last layer, and its score entropy is the integrand of uniform diffusion's bound."""
    lm, golden = unmask.load(GOLDEN / "sedd_uniform_tiny"), expected("sedd_uniform_tiny")
    objective, sigma = lm.objective, golden["sigma"]
    assert objective == UniformSEDD(schedule=Geometric(1e-4, 20.0))
    assert (lm.vocab.size, lm.vocab.mask_id) == (61, 60)
    raw = logits(lm, golden["x"], sigma)[..., :60]
    torch.testing.assert_close(raw, golden["raw"], atol=1e-4, rtol=0)
    assert isinstance(objective, UniformSEDD)
    t = objective.schedule.inverse(torch.exp(-sigma.double()))
    pi, alpha = objective.noise.pi(lm.vocab), torch.exp(-sigma.double())[:, None].expand(golden["x"].shape)
    rows = log_probs(lm, golden["x"], t).flatten(0, 1)
    ratios = objective.log_ratios(golden["x"].flatten(), rows.double(), pi, alpha.reshape(-1, 1))
    torch.testing.assert_close(ratios[:, :60].float(), golden["log_score"].flatten(0, 1), atol=1e-4, rtol=0)
    rows = log_probs(lm, golden["xt"], t).flatten(0, 1)
    pair = golden["xt"].flatten(), golden["x0"].flatten()
    nats = objective.nats(*pair, rows, alpha.flatten(), torch.ones_like(alpha).flatten(), lm.vocab).view(4, -1)
    # At little noise the published code takes 1 - V/(e^sigma - 1 + V), of which float32 leaves three digits.
    torch.testing.assert_close(nats[1:].float(), golden["score_entropy"][1:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(nats[:1].float(), golden["score_entropy"][:1], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family: str, tmp_path: Path) -> None:
    """Tensors and settings as they were, and the same network."""
    lm, golden = unmask.load(GOLDEN / family), expected(family)
    unmask.save(lm, tmp_path / "out", upstream_format=True)
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (GOLDEN / family, tmp_path / "out"))
    buffer = {name for name in theirs if name.endswith("inv_freq")}
    assert ours.keys() == theirs.keys() - buffer
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = unmask.load(tmp_path / "out")
    assert again.denoiser.config == lm.denoiser.config
    sigma = golden["sigma"]
    assert torch.equal(logits(again, golden["x"], sigma), logits(lm, golden["x"], sigma))


@pytest.mark.parametrize("family", FAMILIES)
def test_they_write_texts_and_score_them(family: str) -> None:
    lm = unmask.load(GOLDEN / family)
    drawn = lm.sample(2, 8, seed=0).tokens
    assert drawn.shape == (2, 8)
    assert int(drawn.max()) < 60
    score = lm.score(drawn, draws=16)
    assert math.isfinite(score.nats)
    assert score.standard_error > 0


def test_ratios_are_no_predictions_of_clean_tokens() -> None:
    lm = unmask.load(GOLDEN / "sedd_uniform_tiny")
    with pytest.raises(ValueError, match="guidance changes predicted tokens, and ratios of uniform noise predict none"):
        lm.sample(1, 8, guidance=unmask.Guidance(cfg_scale=1.0))
    with pytest.raises(ValueError, match="this sampler is for uniform noise, and the model was trained for ratios of"):
        lm.sample(1, 8, sampler=unmask.UniformAncestral(4))


def test_a_network_that_is_not_told_sigma_is_written_too(tmp_path: Path) -> None:
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=16)
    objective = SEDD(schedule=Geometric(1e-3, 12.0))
    lm = LanguageModel(ModelConfig(unmask.Vocab(9, 8), backbone, objective).build().eval())
    again = unmask.load(unmask.save(lm, tmp_path / "out", upstream_format=True))
    assert again.objective == lm.objective
    tokens, sigma = torch.randint(0, 8, (2, 16)), torch.tensor([0.1, 3.0])
    torch.testing.assert_close(logits(again, tokens, sigma), logits(lm, tokens, 0 * sigma))


@pytest.mark.parametrize("prefix", ["", "backbone."], ids=["once", "twice"])
def test_sdtt_is_mdlm_with_other_names(prefix: str, tmp_path: Path) -> None:
    """The layout as its code writes it: there are no published vectors of it here, and its network is MDLM's."""
    theirs = json.loads((GOLDEN / "mdlm_tiny" / "config.json").read_text())
    names = {"hidden_dim": "hidden_size", "model_length": "length"}
    model = {names.get(key, key): theirs[key] for key in (*names, "cond_dim", "n_blocks", "n_heads", "dropout")}
    config = {"parameterization": {"name": "multi-round-sdtt"}, "model": model, "time_conditioning": True}
    folder = tmp_path / "sdtt"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(GOLDEN / "mdlm_tiny" / "model.safetensors")
    save_file({f"{prefix}{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    lm, mdlm = unmask.load(folder), unmask.load(GOLDEN / "mdlm_tiny")
    assert lm.denoiser.config == mdlm.denoiser.config
    tokens, sigma = torch.randint(0, lm.vocab.mask_id, (2, 8)), torch.zeros(2)
    assert torch.equal(logits(lm, tokens, sigma), logits(mdlm, tokens, sigma))
    again = unmask.load(unmask.save(lm, tmp_path / "out", upstream_format=True))
    torch.testing.assert_close(logits(again, tokens, sigma), logits(lm, tokens, sigma))
    (folder / "config.json").write_text(json.dumps({**config, "model": 3}))
    with pytest.raises(ValueError, match="needs 'model', the settings of SDTT's network; got 3"):
        unmask.load(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"graph": {"type": "roulette"}}, r"\(graph\): config.json has type = 'roulette'"),
        ({"graph": {"type": "uniform"}}, r"\(model\): config.json has scale_by_sigma = True"),
        ({"noise": {"type": "cosine"}}, r"\(noise\): config.json has type = 'cosine'"),
        ({"noise": {"type": "geometric", "sigma_min": "x", "sigma_max": 2}}, "needs sigma_min < sigma_max"),
        ({"model": 3}, "needs 'model', the settings of SEDD's model; got 3"),
        ({"tokens": "many"}, "needs 'tokens', an integer above 0"),
        ({"tokens": 59}, "has shape"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "sedd_tiny", tmp_path / "model")
    config = {**json.loads((folder / "config.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=why):
        unmask.load(folder)
