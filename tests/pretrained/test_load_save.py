from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import unmask
from unmask import MDLM, DiTConfig, LanguageModel, ModelConfig, TimeConditioning, Tokenizer, Vocab
from unmask.backbones.dit import LocalInit
from unmask.diffusion import SCHEDULES
from unmask.diffusion.schedule import IntegratedRate, LogLinear
from unmask.diffusion.time_sampling import HistogramTimes
from unmask.objectives import D3PM, OBJECTIVES, NextToken, Objective
from unmask.pretrained import load_save as folder_module

PLAIN = DiTConfig(width=16, depth=2, heads=2, max_length=12, dropout=0.1)
CAUSAL = replace(PLAIN, causal=True)
TIMED = replace(PLAIN, time_conditioning=TimeConditioning(width=8, scale=7.0))
CHARACTERS = Tokenizer.characters("abcdef ")
FILES = [
    "README.md",
    "config.json",
    "manifest.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]

# New members of the unions are tested without a line here. A network told sigma feels its schedule.
MODELS: dict[str, tuple[DiTConfig, Objective, bool]] = {
    "tied": (replace(PLAIN, tie_embeddings=True), MDLM(), False),
    "timed": (TIMED, MDLM(), False),
    "qk_norm": (replace(PLAIN, qk_norm=True), MDLM(), False),
    "all options": (replace(TIMED, tie_embeddings=True, qk_norm=True, rope_theta=50.0), MDLM(), False),
    "causal with all options": (replace(CAUSAL, tie_embeddings=True, qk_norm=True), NextToken(), False),
    **{kind.__name__: (CAUSAL if kind is NextToken else PLAIN, kind(), False) for kind in OBJECTIVES.values()},
    **{
        kind.__name__: (TIMED, MDLM(schedule=kind()), True) for kind in SCHEDULES.values() if kind is not IntegratedRate
    },
    "no default values": (
        TIMED,
        D3PM(schedule=LogLinear(eps=0.25), times=HistogramTimes((1.0, 3.5)), steps=7, carry_over=True),
        True,
    ),
}


def model(
    backbone: DiTConfig = PLAIN,
    objective: Objective | None = None,
    condition_on_sigma: bool = False,
    tokenizer: Tokenizer | None = CHARACTERS,
    seed: int = 0,
) -> LanguageModel:
    """Weights moved off their start, where whole tensors are zero and could be lost unnoticed."""
    torch.manual_seed(seed)
    size = 8 if tokenizer is None else tokenizer.vocab_size + 1
    config = ModelConfig(Vocab(size, size - 1), backbone, objective or MDLM(), condition_on_sigma)
    denoise = config.build()
    with torch.no_grad():
        for parameter in denoise.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return LanguageModel(denoise.eval(), tokenizer)


def log_x(lm: LanguageModel) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    z = torch.randint(lm.vocab.size, (2, 12), generator=generator)
    with torch.no_grad():
        out: Tensor = lm.denoiser(z, torch.tensor([[0.3], [0.8]]), torch.ones(2, 12, dtype=torch.bool))
    assert not bool(out.isnan().any())
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("parts", MODELS.values(), ids=list(MODELS))
def test_a_model_comes_back_bit_for_bit(parts: tuple[DiTConfig, Objective, bool], tmp_path: Path) -> None:
    saved = model(*parts)
    loaded = unmask.load(unmask.save(saved, tmp_path / "m"))
    assert loaded.denoiser.config == saved.denoiser.config
    assert torch.equal(log_x(loaded), log_x(saved))
    assert not loaded.denoiser.training
    # What another seed says differs, so the equality above is not one of two constants.
    assert not torch.equal(log_x(model(*parts, seed=1)), log_x(saved))


@pytest.mark.parametrize("tokenizer", [Tokenizer.bytes(), CHARACTERS], ids=["bytes", "characters"])
def test_a_tokenizer_comes_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    saved = model(tokenizer=tokenizer)
    loaded = unmask.load(unmask.save(saved, tmp_path / "m"))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.vocab_size == tokenizer.vocab_size
    assert loaded.tokenizer.encode("fade a cab") == tokenizer.encode("fade a cab")
    assert loaded.sample(n=2, seed=3).texts == saved.sample(n=2, seed=3).texts
    assert torch.equal(log_x(loaded), log_x(saved))


def test_a_model_needs_no_tokenizer(tmp_path: Path) -> None:
    saved = model(tokenizer=None)
    folder = unmask.save(saved, tmp_path / "m")
    assert sorted(contents(folder)) == [name for name in FILES if "tokenizer" not in name]
    loaded = unmask.load(folder)
    assert loaded.tokenizer is None
    assert torch.equal(log_x(loaded), log_x(saved))


def test_a_folder_holds_six_files_and_true_sums(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    assert folder == tmp_path / "m"
    files = contents(folder)
    assert sorted(files) == FILES
    sums = json.loads(files.pop("manifest.json"))
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    assert json.loads(files["config.json"])["format"] == "unmask-2"


def test_a_tied_tensor_is_written_once_and_tied_again(tmp_path: Path) -> None:
    folder = unmask.save(model(replace(PLAIN, tie_embeddings=True)), tmp_path / "m")
    names = load_file(folder / "model.safetensors").keys()
    assert "embedding.weight" in names
    assert "lm_head.weight" not in names
    backbone: Any = unmask.load(folder).denoiser.backbone
    assert backbone.lm_head.weight is backbone.embedding.weight


def test_folders_above_are_made_and_strings_are_paths(tmp_path: Path) -> None:
    unmask.save(model(), f"{tmp_path}/a/b/m")
    assert torch.equal(log_x(unmask.load(f"{tmp_path}/a/b/m")), log_x(model()))


def test_saving_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    lm = model()
    lm.denoiser.train()
    unmask.save(lm, tmp_path / "m")
    assert lm.denoiser.training
    assert torch.equal(log_x(LanguageModel(lm.denoiser.eval())), log_x(model()))


def test_a_folder_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    before = contents(folder)
    with pytest.raises(ValueError, match=r"/m exists already; .*overwrite=True"):
        unmask.save(model(seed=1), folder)
    assert contents(folder) == before


def test_overwriting_replaces_all_of_the_old_model(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    new = model(tokenizer=None, seed=1)
    unmask.save(new, folder, overwrite=True)
    assert "tokenizer.json" not in contents(folder)
    assert torch.equal(log_x(unmask.load(folder)), log_x(new))
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("config", [None, '{"name": "my web server"}', "not JSON"])
def test_a_folder_that_holds_no_model_is_left_alone(tmp_path: Path, config: str | None) -> None:
    # Many programs have a config.json: that name alone does not make a folder ours to delete.
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    if config is not None:
        (other / "config.json").write_text(config)
    before = contents(other)
    with pytest.raises(ValueError, match="not a model folder"):
        unmask.save(model(), other, overwrite=True)
    assert contents(other) == before
    assert list(tmp_path.iterdir()) == [other]


def test_a_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_text("not a folder")
    with pytest.raises(ValueError, match="not a model folder"):
        unmask.save(model(), file, overwrite=True)
    assert file.read_text() == "not a folder"


def unwritable() -> LanguageModel:
    """Its schedule is a Python function, which no JSON can hold."""
    return model(objective=MDLM(schedule=IntegratedRate(beta=lambda t: 1 / (1 - t))), seed=1)


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written to a config file"):
        unmask.save(unwritable(), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_model(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    before = contents(folder)
    with pytest.raises(ValueError, match="cannot be written to a config file"):
        unmask.save(unwritable(), folder, overwrite=True)
    assert contents(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    folder = tmp_path / "m"
    if overwrite:
        unmask.save(model(), folder)
    before = contents(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(folder_module, "save_file", full)  # by now the config is written already
    with pytest.raises(OSError, match="no space left"):
        unmask.save(model(seed=1), folder, overwrite=overwrite)
    assert contents(tmp_path) == before
    assert folder.exists() == overwrite


def test_an_exchange_that_fails_half_way_brings_the_old_model_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    before = contents(tmp_path)
    rename, failures = Path.rename, iter([True])

    def fails_once(self: Path, target: Path) -> Path:
        if Path(target) == folder and next(failures, False):
            raise OSError("the new folder cannot take the old one's place")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_once)
    with pytest.raises(OSError, match="cannot take the old one's place"):
        unmask.save(model(seed=1), folder, overwrite=True)
    assert contents(tmp_path) == before


def test_a_model_is_overwritten_through_a_link(tmp_path: Path) -> None:
    unmask.save(model(), tmp_path / "step-1000")
    latest = tmp_path / "latest"
    latest.symlink_to("step-1000")
    unmask.save(model(seed=1), latest, overwrite=True)
    assert torch.equal(log_x(unmask.load(latest)), log_x(model(seed=1)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1000"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_nothing_in_a_folder_is_executed(tmp_path: Path, name: str) -> None:
    folder, proof = unmask.save(model(), tmp_path / "m"), tmp_path / "proof"
    (folder / "manifest.json").unlink()
    (folder / "model.safetensors").unlink()
    bomb = f"cos\nmkdir\n(S'{proof}'\ntR.".encode()  # a pickle that calls os.mkdir when it is read
    (folder / name).write_bytes(bomb)
    expected = "a pickle that holds more than tensors" if name.endswith("bin") else "not a safetensors"
    with pytest.raises(ValueError, match=expected):
        unmask.load(folder)
    assert not proof.exists()
    pickle.loads(bomb)
    assert proof.is_dir()  # the bomb was a real one


def test_a_folder_may_lack_its_manifest(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    (folder / "manifest.json").unlink()
    assert torch.equal(log_x(unmask.load(folder)), log_x(model()))


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("manifest.json", "README.md")])
def test_any_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        unmask.load(folder)


def test_people_may_change_the_card(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    card = folder / "README.md"
    card.write_text("my own words")
    assert torch.equal(log_x(unmask.load(folder)), log_x(model()))
    card.unlink()
    assert torch.equal(log_x(unmask.load(folder)), log_x(model()))


def test_a_folder_from_before_there_were_cards_is_read(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    (folder / "README.md").unlink()
    sums = json.loads((folder / "manifest.json").read_text())
    del sums["README.md"]
    (folder / "manifest.json").write_text(json.dumps(sums))
    assert torch.equal(log_x(unmask.load(folder)), log_x(model()))


def test_overwriting_renews_a_generated_card(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m", facts={"steps": "one thousand"})
    assert "one thousand" in (folder / "README.md").read_text()
    unmask.save(model(), folder, overwrite=True, facts={"steps": "two thousand"})
    assert "two thousand" in (folder / "README.md").read_text()


@pytest.mark.parametrize("manifest", ["true", "missing", "without the card", "damaged"])
def test_overwriting_keeps_a_card_that_people_wrote(tmp_path: Path, manifest: str) -> None:
    folder = unmask.save(model(), tmp_path / "m")
    (folder / "README.md").write_bytes(b"my own words\r\n\xff")
    if manifest == "missing":
        (folder / "manifest.json").unlink()
    elif manifest != "true":
        (folder / "manifest.json").write_text("{}" if manifest == "without the card" else "{")
    for seed in (1, 2):  # what was kept once is kept again
        unmask.save(model(seed=seed), folder, overwrite=True)
        assert (folder / "README.md").read_bytes() == b"my own words\r\n\xff"
        assert torch.equal(log_x(unmask.load(folder)), log_x(model(seed=seed)))
    (folder / "README.md").unlink()
    unmask.save(model(), folder, overwrite=True)
    assert "library_name: unmask" in (folder / "README.md").read_text()


def test_the_published_format_has_a_card_too(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "m", upstream_format=True, facts={"steps": "one thousand"})
    assert sorted(contents(folder)) == FILES
    assert "| steps | one thousand |" in (folder / "README.md").read_text()


def test_loading_imports_no_compiler(tmp_path: Path) -> None:
    """Which drawing on the device `meta` does, and which takes longer than all the rest."""
    torch.manual_seed(0)
    backbone = unmask.DiTConfig(width=32, depth=2, heads=2, max_length=16, local_init=LocalInit())
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.characters("abc"))
    unmask.save(lm, tmp_path / "model")
    program = "import sys, unmask; unmask.load(sys.argv[1]); print('torch._dynamo' in sys.modules)"
    asked = [sys.executable, "-c", program, str(tmp_path / "model")]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_missing_tokenizer_is_told_before_weights_are_read(tmp_path: Path) -> None:
    folder = unmask.save(LanguageModel(ModelConfig(Vocab(8, 7), PLAIN, MDLM()).build()), tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        unmask.load(folder, require_tokenizer=True)
    with pytest.raises(ValueError, match="damaged"):
        unmask.load(folder)


def test_a_folder_of_the_old_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = unmask.save(model(), tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "format": "unmask-1"}))
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has the format unmask-1, .* reads unmask-2: export .* or train it again$"):
        unmask.load(folder)
