"""Published formats beside MDLM's: block diffusion, LLaDA, Dream. In many files, as pickles, from the hub."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unmask
from unmask import D3PM, MDLM, BlockDiffusion, DiTConfig, LanguageModel, LlamaBlock, ModelConfig, Vocab
from unmask.config import from_json, to_json
from unmask.diffusion.schedule import LogLinear
from unmask.diffusion.time_sampling import ClippedTimes
from unmask.pretrained.formats import FORMATS

SIZES: dict[str, Any] = {"width": 32, "depth": 2, "heads": 4, "max_length": 24, "dropout": 0.0}
LINEAR = MDLM(schedule=LogLinear(eps=0.0))
MODELS = {
    "bd3lm": ModelConfig(Vocab(13, 12), DiTConfig(**SIZES), BlockDiffusion(block_size=4, schedule=LogLinear(eps=0.0))),
    "bd3lm clipped": ModelConfig(
        Vocab(13, 12),
        DiTConfig(**SIZES),
        BlockDiffusion(block_size=4, schedule=LogLinear(eps=0.0), times=ClippedTimes(0.3, 0.8)),
    ),
    "llada": ModelConfig(Vocab(13, 5, 7), DiTConfig(**SIZES, llama=LlamaBlock(40)), LINEAR),
    "llada, shared keys": ModelConfig(
        Vocab(13, 5, 7), DiTConfig(**SIZES, llama=LlamaBlock(40, kv_heads=2), rope_theta=5e5), LINEAR
    ),
    "llada, tied": ModelConfig(Vocab(13, 5), DiTConfig(**SIZES, llama=LlamaBlock(40), tie_embeddings=True), LINEAR),
    "dream": ModelConfig(
        Vocab(13, 5, 7),
        DiTConfig(**SIZES, llama=LlamaBlock(40, kv_heads=1, qkv_bias=True), shift_logits=True),
        LINEAR,
    ),
}
every_model = pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))


def model(config: ModelConfig) -> LanguageModel:
    torch.manual_seed(0)
    denoise = config.build().eval()
    with torch.no_grad():
        for parameter in denoise.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return LanguageModel(denoise)


def said(lm: LanguageModel) -> Tensor:
    z = torch.randint(5, (2, 12), generator=torch.Generator().manual_seed(1))
    z[:, ::3] = lm.vocab.mask_id
    with torch.no_grad():
        return lm.denoiser(z, torch.full((2, 1), 0.5), z == lm.vocab.mask_id)


@every_model
def test_a_round_trip_is_exact(config: ModelConfig, tmp_path: Path) -> None:
    lm = model(config)
    unmask.save(lm, tmp_path / "published", upstream_format=True)
    back = unmask.load(tmp_path / "published")
    assert replace(back.denoiser.config, sampler=None) == config  # a published family comes with a sampler
    assert torch.equal(said(back), said(lm))
    unmask.save(back, tmp_path / "again", upstream_format=True)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("published", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    texts = [(tmp_path / name / "config.json").read_text() for name in ("published", "again")]
    assert texts[0] == texts[1]


@every_model
def test_our_own_format_holds_them_too(config: ModelConfig, tmp_path: Path) -> None:
    lm = model(config)
    unmask.save(lm, tmp_path / "model")
    back = unmask.load(tmp_path / "model")
    assert replace(back.denoiser.config, sampler=None) == config  # a published family comes with a sampler
    assert torch.equal(said(back), said(lm))


@pytest.mark.parametrize("name", ["bd3lm_tiny", "llada_tiny"])
def test_published_folders_are_written_back_as_they_were(golden: Path, name: str, tmp_path: Path) -> None:
    unmask.save(unmask.load(golden / name), tmp_path / "out", upstream_format=True)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (golden / name, tmp_path / "out"))
    assert {key: new.get(key) for key in old if key != "cond_dim"} == {k: v for k, v in old.items() if k != "cond_dim"}
    tensors = [load_file(folder / "model.safetensors") for folder in (golden / name, tmp_path / "out")]
    if name == "llada_tiny":
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    torch.testing.assert_close(said(unmask.load(tmp_path / "out")), said(unmask.load(golden / name)))


def test_a_llada_is_what_transformers_calls_a_llama_without_its_causal_mask(tmp_path: Path) -> None:
    """Every layer, keys shared by heads included, against an implementation that is not ours."""
    transformers = pytest.importorskip("transformers")
    lm = model(MODELS["llada, shared keys"])
    backbone = lm.denoiser.config.backbone
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=13,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": backbone.rope_theta},
            max_position_embeddings=24,
            tie_word_embeddings=False,
        )
    ).eval()
    unmask.save(lm, tmp_path / "llada", upstream_format=True)
    names = {
        "model.transformer.wte": "model.embed_tokens",
        "model.transformer.ln_f": "model.norm",
        "model.transformer.ff_out": "lm_head",
        "model.transformer.blocks": "model.layers",
        "attn_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
        "attn_out": "self_attn.o_proj",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "ff_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "ff_out": "mlp.down_proj",
    }
    weights = {}
    for name, tensor in load_file(tmp_path / "llada" / "model.safetensors").items():
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = tensor
    theirs.load_state_dict(weights)
    z = torch.randint(13, (2, 10), generator=torch.Generator().manual_seed(0))
    everyone = torch.zeros(2, 1, 10, 10)
    with torch.no_grad():
        expected = theirs(z, attention_mask=everyone).logits
        hidden = lm.denoiser.backbone.encode(lm.denoiser.backbone.embed(z), torch.zeros(2, 1))
        logits = lm.denoiser.backbone.compute_logits(hidden.flatten(0, 1)).view(2, 10, 13)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def sharded(folder: Path, suffix: str = "safetensors") -> Path:
    """The same folder with its tensors in three files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "manifest.json").unlink()
    where = {}
    for number in range(3):
        part = {name: weights[name] for place, name in enumerate(sorted(weights)) if place % 3 == number}
        file = f"model-{number + 1:05}-of-00003.{suffix}"
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
        where |= dict.fromkeys(part, file)
    stem = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.fixture
def llada(tmp_path: Path) -> tuple[LanguageModel, Path]:
    lm = model(MODELS["llada"])
    return lm, unmask.save(lm, tmp_path / "llada", upstream_format=True)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_weights_in_many_files(llada: tuple[LanguageModel, Path], suffix: str) -> None:
    lm, folder = llada
    assert torch.equal(said(unmask.load(sharded(folder, suffix))), said(lm))


def test_faults_of_an_index_are_named(llada: tuple[LanguageModel, Path]) -> None:
    folder = sharded(llada[1])
    index = folder / "model.safetensors.index.json"
    stated = json.loads(index.read_text())
    name = next(iter(stated["weight_map"]))

    def refused(text: str, words: str) -> None:
        index.write_text(text)
        with pytest.raises(ValueError, match=words):
            unmask.load(folder)

    refused("{}", "not an index of weights")
    refused('{"weight_map": {}}', "names no tensors")
    refused('{"weight_map": 5}', "not an index of weights")
    refused(json.dumps({"weight_map": {name: "../secret"}}), "not a file of its folder")
    refused(json.dumps({"weight_map": {name: "absent.safetensors"}}), "absent.safetensors is missing")
    file = stated["weight_map"][name]
    refused(json.dumps({"weight_map": {**stated["weight_map"], "ghost": file}}), "lacks the tensor ghost")


def test_a_pickle_of_tensors_is_read_and_any_other_refused(llada: tuple[LanguageModel, Path]) -> None:
    lm, folder = llada
    weights = load_file(folder / "model.safetensors")
    for name in ("model.safetensors", "manifest.json"):
        (folder / name).unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert torch.equal(said(unmask.load(folder)), said(lm))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Mine()))
    with pytest.raises(ValueError, match="holds more than tensors, or is damaged"):
        unmask.load(folder)
    assert not (folder / "executed").exists()
    torch.save({"weights": 5}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold tensors by name"):
        unmask.load(folder)


class Mine:
    """A pickle that would run a command."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_type": "sequential"}, "block_type = 'sequential', but only 'llama' is supported"),
        ({"include_qkv_bias": True}, "include_qkv_bias = True"),
        ({"mask_token_id": None}, "'mask_token_id', a token id; got None"),
        ({"d_model": 0}, "'d_model', an integer above 0; got 0"),
        ({"d_model": 16}, "has shape"),
        ({"n_layers": 3}, "lack model.transformer.blocks.2"),
        ({"n_kv_heads": 3}, "cannot share"),
        ({"weight_tying": True}, "unknown tensor model.transformer.ff_out.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    llada: tuple[LanguageModel, Path], change: dict[str, Any], words: str
) -> None:
    folder = llada[1]
    config = json.loads((folder / "config.json").read_text())
    (folder / "manifest.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=words):
        unmask.load(folder)


def test_models_that_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    for config, words in (
        (replace(MODELS["llada"], objective=MDLM()), "linear schedule only"),
        (
            replace(MODELS["llada"], backbone=DiTConfig(**SIZES, llama=LlamaBlock(40, head_dim=6))),
            "heads that are partly rotated or have a width of their own",
        ),
        (replace(MODELS["bd3lm"], backbone=DiTConfig(**SIZES, qk_norm=True)), "backbone.qk_norm=false"),
    ):
        with pytest.raises(ValueError, match=words):
            unmask.save(model(config), tmp_path / "no", upstream_format=True)
        assert not (tmp_path / "no").exists()


def test_a_model_is_found_by_its_name_on_the_hub(llada: tuple[LanguageModel, Path], tmp_path: Path) -> None:
    """The hub's own library, and a cache such as it leaves behind; there is no network here."""
    lm, folder = llada
    kept = tmp_path / "home" / "hub" / "models--someone--llada-tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots").mkdir()
    folder.rename(kept / "snapshots" / ("0" * 40))
    code = (
        "import sys, torch, unmask\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        lm = unmask.load(name)\n"
        "        print(type(lm.denoiser.objective).__name__, lm.vocab)\n"
        "    except ValueError as error:\n"
        "        print('refused:', error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    asked = [sys.executable, "-c", code, "someone/llada-tiny", "someone/else", "nowhere"]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
    there, other, nowhere = done.stdout.splitlines()
    assert there == f"MDLM {lm.vocab}"
    assert other.startswith("refused: someone/else is neither a folder nor available from the hub")
    assert nowhere.startswith("refused: nowhere is not a folder, nor a name on the hub")


@dataclass(frozen=True)
class _LabFormat:
    """A format from outside the package: our tensors under other names."""

    model_type: str = "lab"

    def can_load(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == self.model_type

    def load_state(
        self, config: dict[str, Any], weights: dict[str, Tensor], where: str
    ) -> tuple[ModelConfig, dict[str, Tensor]]:
        tensors = {name.removeprefix("lab."): tensor for name, tensor in weights.items()}
        return from_json(ModelConfig, config["ours"], where), tensors

    def can_export(self, model: LanguageModel) -> bool:
        return isinstance(model.objective, D3PM)

    def export_state(self, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
        config = {"model_type": self.model_type, "ours": to_json(model.denoiser.config)}
        return config, {f"lab.{name}": tensor for name, tensor in model.denoiser.backbone.state_dict().items()}


def test_a_format_from_outside_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model(ModelConfig(Vocab(13, 12), DiTConfig(**SIZES), D3PM()))
    monkeypatch.setitem(FORMATS, "lab", _LabFormat())
    folder = unmask.save(lm, tmp_path / "lab", upstream_format=True)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "lab"
    assert torch.equal(said(unmask.load(folder)), said(lm))
