"""Published state-space networks: their logits, their caches, their classifiers; and back, exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import unmask
from unmask import Ancestral, Tokenizer
from unmask.backbones.caduceus import CaduceusConfig
from unmask.context import Context
from unmask.diffusion.process import shift_right
from unmask.model import LanguageModel
from unmask.pretrained.formats import FORMATS
from unmask.types import Batch

NAMES = ["mamba_tiny", "caduceus_ph_tiny", "caduceus_ps_tiny", "dimamba_tiny"]


def copied(golden: Path, name: str, folder: Path, **changes: Any) -> Path:
    """A published folder, with another config."""
    shutil.copytree(golden / name, folder)
    for entry in (folder, *folder.iterdir()):
        entry.chmod(0o755)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "expected.safetensors").unlink()
    (folder / "README.md").unlink()
    return folder


def expected(golden: Path, name: str) -> dict[str, Tensor]:
    return load_file(golden / name / "expected.safetensors")


def encode(lm: LanguageModel, tokens: Tensor, t: Tensor | None = None, **context: Any) -> Tensor:
    backbone = lm.denoiser.backbone
    t = torch.zeros(len(tokens), 1) if t is None else t
    with torch.no_grad():
        return backbone.encode(backbone.embed(tokens), t, None, Context(**context))


def logits(lm: LanguageModel, tokens: Tensor, t: Tensor | None = None, **context: Any) -> Tensor:
    with torch.no_grad():
        return lm.denoiser.backbone.compute_logits(encode(lm, tokens, t, **context))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_mamba_gives_the_published_logits_at_once_and_one_by_one(golden: Path) -> None:
    lm, wanted = unmask.load(golden / "mamba_tiny"), expected(golden, "mamba_tiny")
    tokens = wanted["input_ids"]
    assert_close(encode(lm, tokens), wanted["last_hidden_state"])
    assert_close(logits(lm, tokens), wanted["logits"])
    cache = lm.denoiser.new_cache()
    steps = [logits(lm, tokens[:, [i]], cache=cache.view()) for i in range(tokens.shape[1])]
    assert_close(torch.cat(steps, 1), wanted["logits.stepwise"])
    nll = F.cross_entropy(logits(lm, tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
    assert_close(nll, wanted["nll"])


def test_mamba_of_transformers_is_the_same_network(golden: Path, tmp_path: Path) -> None:
    lm, tokens = unmask.load(golden / "mamba_tiny"), expected(golden, "mamba_tiny")["input_ids"]
    folder = unmask.save(lm, tmp_path / "model", upstream_format=True)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["time_step_rank"]) == ("mamba", 24, 2)
    assert "backbone.embeddings.weight" in load_file(folder / "model.safetensors")
    assert torch.equal(logits(unmask.load(folder), tokens), logits(lm, tokens))
    assert unmask.load(folder).denoiser.config == lm.denoiser.config
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MambaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert_close(logits(lm, tokens), theirs(tokens).logits)


@pytest.mark.parametrize("name", ["caduceus_ph_tiny", "caduceus_ps_tiny"])
def test_caduceus_gives_the_published_logits(golden: Path, name: str) -> None:
    lm, wanted = unmask.load(golden / name), expected(golden, name)
    for ids, values in (("input_ids", "logits"), ("rc_input_ids", "logits.rc")):
        assert_close(logits(lm, wanted[ids]), wanted[values])
    assert lm.vocab.mask_id == 3
    z, x = wanted["diffusion.xt"], wanted["diffusion.x0"]
    log_x = lm.denoiser(z, wanted["diffusion.t"][:, None], torch.ones_like(z, dtype=torch.bool)).view(*z.shape, -1)
    at_x = log_x.gather(-1, x[..., None])[..., 0]
    masked = z == 3
    assert_close(at_x[masked], wanted["diffusion.logp_at_x0"][masked])


def test_hidden_states_and_classifiers_are_the_published_ones(golden: Path) -> None:
    """What a classifier reads of both strands is their mean, for a text and for its reverse complement."""
    lm, wanted = unmask.load(golden / "caduceus_ph_tiny"), expected(golden, "caduceus_ph_tiny")
    tokens = wanted["input_ids"]
    assert_close(encode(lm, tokens), wanted["last_hidden_state"])
    both = [features(lm, wanted[ids]).mean(1) @ wanted["classifier.score"].T for ids in ("input_ids", "rc_input_ids")]
    assert_close(both[0], wanted["classifier.logits.plain"])
    assert_close((both[0] + both[1]) / 2, wanted["classifier.logits.posthoc"])
    lm, wanted = unmask.load(golden / "caduceus_ps_tiny"), expected(golden, "caduceus_ps_tiny")
    score = wanted["classifier.score"]
    backbone = lm.denoiser.config.backbone
    assert isinstance(backbone, CaduceusConfig)
    assert backbone.exchanged_head  # three blocks: the halves come out exchanged
    forward, reverse = encode(lm, wanted["input_ids"]).chunk(2, -1)
    assert_close(torch.cat([reverse.flip(-1), forward], -1), wanted["last_hidden_state"])
    for ids, values in (("input_ids", "classifier.logits"), ("rc_input_ids", "classifier.logits.rc")):
        assert_close(features(lm, wanted[ids]).mean(1) @ score.T, wanted[values])


def features(lm: LanguageModel, tokens: Tensor) -> Tensor:
    backbone = lm.denoiser.backbone
    with torch.no_grad():
        return backbone.features(backbone.embed(tokens), torch.zeros(len(tokens), 1))


def test_the_flag_of_exchanged_halves_is_part_of_the_model(golden: Path, tmp_path: Path) -> None:
    folder, wanted = (
        copied(golden, "caduceus_ps_tiny", tmp_path / "plain", fused_add_norm=False),
        expected(golden, "caduceus_ps_tiny"),
    )
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("norm.weight", "norm.submodule.weight"): tensor for name, tensor in weights.items()}
    renamed = {name.replace("norm_f.weight", "norm_f.submodule.weight"): tensor for name, tensor in renamed.items()}
    save_file(renamed, folder / "model.safetensors")
    lm = unmask.load(folder)
    assert_close(logits(lm, wanted["input_ids"]), wanted["logits.unfused"])
    back = unmask.save(lm, tmp_path / "back", upstream_format=True)
    assert json.loads((back / "config.json").read_text())["fused_add_norm"] is False
    assert load_file(back / "model.safetensors").keys() == renamed.keys()


def test_dimamba_gives_the_published_logits(golden: Path, tmp_path: Path) -> None:
    wanted = expected(golden, "dimamba_tiny")
    z, t = wanted["xt"], wanted["t"][:, None]
    plain = unmask.load(golden / "dimamba_tiny")
    assert plain.denoiser.time_independent
    assert_close(logits(plain, z), wanted["logits.notc"])
    timed = unmask.load(copied(golden, "dimamba_tiny", tmp_path / "timed", time_conditioning=True))
    assert_close(timed.denoiser.process.sigma(t)[:, 0], wanted["sigma"])
    assert_close(logits(timed, z, wanted["sigma"][:, None]), wanted["logits.tc"])
    assert not timed.denoiser.time_independent


@pytest.mark.parametrize("name", NAMES)
def test_published_folders_come_back_exactly(golden: Path, tmp_path: Path, name: str) -> None:
    lm = unmask.load(golden / name)
    weights = load_file(golden / name / "model.safetensors")
    families = [format_ for key, format_ in FORMATS.items() if key != "transformers" and format_.can_export(lm)]
    format_ = FORMATS["mamba_ssm"] if name == "mamba_tiny" else families[0]
    config, tensors = format_.export_state(lm)
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[key], weights[key]) for key in weights)
    assert format_.can_load(config)
    assert format_.load_state(config, tensors, "here")[0] == lm.denoiser.config
    ours = unmask.load(unmask.save(lm, tmp_path / "ours"))
    assert ours.denoiser.config == lm.denoiser.config


def test_tensors_that_are_stored_twice_must_be_the_same(golden: Path, tmp_path: Path) -> None:
    folder = copied(golden, "caduceus_ph_tiny", tmp_path / "twice")
    weights = load_file(folder / "model.safetensors")
    first = "caduceus.backbone.layers.0.mixer.mamba_fwd.in_proj.weight"
    embedding = weights["caduceus.backbone.embeddings.word_embeddings.weight"]
    copies = {first.replace("fwd", "rev"): weights[first].clone(), "lm_head.weight": embedding.clone()}
    save_file(weights | copies, folder / "model.safetensors")
    unmask.load(folder)
    save_file(weights | copies | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight apart from .*word_embeddings\.weight"):
        unmask.load(folder)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("mamba_tiny", {"ssm_cfg": {"layer": "Mamba2"}}, "layer = 'Mamba2', but only 'Mamba1'"),
        ("mamba_tiny", {"ssm_cfg": 3}, "'ssm_cfg' must be an object; got 3"),
        ("mamba_tiny", {"rms_norm": False}, "rms_norm = False"),
        ("mamba_tiny", {"n_layer": 10**9}, "1,000,000,000 layers"),
        ("mamba_tiny", {"d_model": 10**9}, "are only"),
        ("mamba_tiny", {"ssm_cfg": {"d_state": 9}}, "A_log|x_proj"),
        ("caduceus_ph_tiny", {"bidirectional_weight_tie": False}, "bidirectional_weight_tie = False"),
        ("caduceus_ps_tiny", {"complement_map": [1]}, "'complement_map' must map token ids"),
        ("caduceus_ps_tiny", {"complement_map": {"7": 8, "8": 7}}, "is not the complement_map of config.json"),
        ("caduceus_ps_tiny", {"complement_map": None}, "needs the complement of each token id"),
        ("caduceus_ph_tiny", {"context_token_ids": "N"}, "'context_token_ids', a list of token ids; got 'N'"),
        ("caduceus_ph_tiny", {"context_token_ids": [99]}, "the id 99 that is only context must be in the vocabulary"),
        ("dimamba_tiny", {"model": {"type": "dimamba", "temb_strategy": "concat"}}, "temb_strategy = 'concat'"),
    ],
)
def test_what_is_not_supported_is_said(
    golden: Path, tmp_path: Path, name: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        unmask.load(copied(golden, name, tmp_path / "other", **changes))


def test_complements_are_read_by_key_and_not_in_the_order_of_a_file(golden: Path, tmp_path: Path) -> None:
    config = json.loads((golden / "caduceus_ps_tiny" / "config.json").read_text())
    folder = copied(
        golden, "caduceus_ps_tiny", tmp_path / "sorted", complement_map=dict(sorted(config["complement_map"].items()))
    )
    assert unmask.load(folder).denoiser.config == unmask.load(golden / "caduceus_ps_tiny").denoiser.config


A, C, G, T, N = range(7, 12)


@pytest.mark.parametrize("name", ["caduceus_ph_tiny", "caduceus_ps_tiny"])
def test_n_is_read_and_never_predicted(golden: Path, name: str) -> None:
    """As by models of our own tokenizer `dna`: no score counts it, no loss masks it, no sampler writes it."""
    lm = unmask.load(golden / name)
    assert lm.vocab.context_ids == Tokenizer.dna().context_ids
    text = [A, N, C, N, N, G, T, A]
    score = lm.score([text, [A, C]], draws=16)
    assert [each.tokens for each in score.per_text] == [5, 2]
    batch = Batch(torch.tensor([text])).checked(lm.vocab)
    nll = lm.objective.token_nll(lm.denoiser, batch, torch.Generator().manual_seed(0))
    assert not nll[batch.tokens == N].any()
    drawn = lm.sample(8, 24, sampler=Ancestral(8)).tokens
    assert not {*lm.vocab.context_ids} & {*drawn.flatten().tolist()}


def test_the_golden_bound_counts_everything(golden: Path) -> None:
    """That of the published code, at its noise, N and special tokens counted: of a vocabulary without context."""
    for name in ("caduceus_ph_tiny", "caduceus_ps_tiny"):
        lm, wanted = unmask.load(golden / name), expected(golden, name)
        z, x, t = wanted["diffusion.xt"], wanted["diffusion.x0"], wanted["diffusion.t"][:, None]
        masked = z == lm.vocab.mask_id
        with torch.no_grad():
            log_x = lm.denoiser(z, t, masked)
        nll = torch.zeros(z.shape)
        nll[masked] = -log_x.gather(-1, x[masked][:, None])[:, 0]
        assert_close(nll / t, wanted["diffusion.nelbo"])


def test_other_vocabularies_have_the_context_that_is_named(golden: Path, tmp_path: Path) -> None:
    none = {str(token): token for token in range(16)}
    other = unmask.load(copied(golden, "caduceus_ph_tiny", tmp_path / "other", complement_map=none))
    assert other.vocab.context_ids == ()
    named = unmask.load(copied(golden, "caduceus_ph_tiny", tmp_path / "named", context_token_ids=[11, 6]))
    assert named.vocab.context_ids == (11, 6)
    back = unmask.load(unmask.save(named, tmp_path / "back", upstream_format=True))
    assert back.denoiser.config == named.denoiser.config


def test_the_first_token_is_predicted_from_the_mask(golden: Path) -> None:
    lm = unmask.load(golden / "mamba_tiny")
    assert lm.vocab.mask_id == 15
    z = torch.tensor([[1, 2, 3]])
    log_x = lm.denoiser(shift_right(z, lm.vocab), torch.zeros(1, 1), torch.ones_like(z, dtype=torch.bool))
    assert_close(log_x[1:].exp().sum(-1), torch.ones(2))
