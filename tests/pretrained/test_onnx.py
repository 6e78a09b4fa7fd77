from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from safetensors.torch import load_file, save_file

import unmask
from unmask import (
    D3PM,
    MDLM,
    SEDD,
    DiTConfig,
    LanguageModel,
    ModelConfig,
    NextToken,
    SamplingParams,
    TimeConditioning,
    UniformDiffusion,
    Vocab,
)
from unmask.backbones.dit import LocalInit
from unmask.config import from_json
from unmask.diffusion.schedule import Geometric, IntegratedRate
from unmask.objectives import BlockDiffusion, Objective
from unmask.pretrained import export_onnx
from unmask.pretrained import onnx_export as onnx_module

LENGTH = 12
PLAIN = DiTConfig(width=16, depth=1, heads=2, max_length=LENGTH)
TIMED = replace(PLAIN, time_conditioning=TimeConditioning(width=8, scale=10.0))
CAUSAL = replace(PLAIN, causal=True)
MASK = 4


def model(
    backbone: DiTConfig = PLAIN, objective: Objective | None = None, condition_on_sigma: bool = False
) -> LanguageModel:
    """Large weights, so that tokens and times make a difference; the mask is not the last id."""
    torch.manual_seed(0)
    denoise = ModelConfig(Vocab(9, MASK), backbone, objective or MDLM(), condition_on_sigma).build()
    with torch.no_grad():
        for parameter in denoise.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return LanguageModel(denoise.eval())


def session(file: Path) -> Any:
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


def assert_agrees(graph: Any, lm: LanguageModel) -> None:
    """At every position, for batches and lengths that the exporter has not seen."""
    names = [inputs.name for inputs in graph.get_inputs()]
    assert names == (["tokens"] if lm.denoiser.time_independent else ["tokens", "t"])
    longest = lm.denoiser.max_length
    assert longest is not None
    generator = torch.Generator().manual_seed(1)
    for batch in (1, 2, 5):
        for length in sorted({1, min(2, longest), min(7, longest), longest}):
            z = torch.randint(lm.vocab.size, (batch, length), generator=generator)
            t = torch.rand(batch, 1, generator=generator)
            given = {"tokens": z.numpy(), "t": t.numpy()}
            (got,) = graph.run(["log_x"], {name: given[name] for name in names})
            with torch.no_grad():
                expected = lm.denoiser(z, t, torch.ones_like(z, dtype=torch.bool))
            assert got.dtype == np.float32
            assert got.shape == (batch, length, lm.vocab.size)
            assert (got[..., lm.vocab.mask_id] == -np.inf).all()
            torch.testing.assert_close(
                torch.tensor(got).flatten(0, 1), expected.float(), atol=1e-4, rtol=0, check_stride=False
            )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_onnx(model(), tmp_path_factory.mktemp("onnx") / "deep" / "er" / "plain.onnx")


@pytest.fixture(scope="module")
def graph(exported: Path) -> Any:
    return session(exported)


def test_a_graph_says_what_the_model_says(graph: Any, exported: Path) -> None:
    assert_agrees(graph, model())
    assert "Gelu" in {node.op_type for node in onnx.load(exported).graph.node}  # for others to be fast with


def test_time_is_an_input_where_it_matters_and_the_exporter_is_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda self, record: said.append(record.getMessage()))
    lm = model(replace(TIMED, tie_embeddings=True, qk_norm=True), D3PM())
    file = export_onnx(lm, tmp_path / "m.onnx")
    assert capfd.readouterr() == ("", "")
    assert [line for line in said if "torchvision" in line] == []
    assert_agrees(session(file), lm)


ALL: dict[str, tuple[DiTConfig, Objective | None, bool]] = {
    "two layers": (replace(PLAIN, depth=2), None, False),
    "timed": (TIMED, None, False),
    "told sigma": (
        replace(PLAIN, time_conditioning=TimeConditioning(width=8, scale=1.0)),
        MDLM(schedule=Geometric()),
        True,
    ),
    "tied": (replace(PLAIN, tie_embeddings=True), None, False),
    "qk_norm": (replace(PLAIN, qk_norm=True), None, False),
    "local start": (replace(PLAIN, local_init=LocalInit(kernel_size=3), rope_theta=100.0), None, False),
    "D3PM": (PLAIN, D3PM(), False),
    "SEDD": (PLAIN, SEDD(), False),
    "timed SEDD": (TIMED, SEDD(), False),
    "uniform": (TIMED, UniformDiffusion(), False),
    "autoregressive": (CAUSAL, NextToken(), False),
    "one token": (replace(PLAIN, max_length=1), None, False),
    "two tokens": (replace(TIMED, max_length=2), D3PM(), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", ALL.values(), ids=list(ALL))
def test_every_kind_of_model_is_exported(parts: tuple[DiTConfig, Objective | None, bool], tmp_path: Path) -> None:
    lm = model(*parts)
    assert_agrees(session(export_onnx(lm, tmp_path / "m.onnx")), lm)


@pytest.mark.slow
def test_an_autoregressive_network_of_a_recipe_is_exported(tmp_path: Path) -> None:
    """Its options, and more than one layer, as `--objective ar` makes it of stdlib-tiny."""
    lm = model(replace(CAUSAL, depth=2, activation="relu2", rope_theta=100.0), NextToken())
    assert_agrees(session(export_onnx(lm, tmp_path / "ar.onnx")), lm)


def test_a_graph_can_be_quantised(exported: Path, tmp_path: Path) -> None:
    assert not onnx.load(exported).graph.value_info  # whose shapes quantisers trip over
    quantize_dynamic(exported, tmp_path / "int8.onnx")
    given = {"tokens": np.full((2, 5), MASK)}
    names = [each.name for each in session(exported).get_inputs()]
    if "t" in names:
        given["t"] = np.full((2, 1), 0.5, dtype=np.float32)
    whole, small = (np.exp(session(file).run(None, given)[0]) for file in (exported, tmp_path / "int8.onnx"))
    assert np.abs(whole - small).max() < 0.2


def test_what_torch_cannot_export_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        print("graph():\n" * 40)
        raise RuntimeError("step 1/3\nNext steps:\n")

    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(ValueError, match=r"^torch cannot export this network to ONNX: step 1/3") as said:
        export_onnx(model(), tmp_path / "m.onnx")
    assert "\n" not in str(said.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("timed", [False, True])
def test_a_published_model_is_exported(tmp_path: Path, timed: bool) -> None:
    torch.manual_seed(0)
    lm = LanguageModel(ModelConfig(Vocab(9, 8), PLAIN, MDLM()).build())
    folder = unmask.save(lm, tmp_path / "published", upstream_format=True)
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "time_conditioning": timed}))
    weights = load_file(folder / "model.safetensors")
    random = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(random, folder / "model.safetensors")
    loaded = unmask.load(folder)
    assert loaded.denoiser.time_independent == (not timed)
    assert_agrees(session(export_onnx(loaded, tmp_path / "m.onnx")), loaded)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_exported_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    lm = model()
    lm.denoiser.to(dtype)
    file = export_onnx(lm, tmp_path / "m.onnx")
    assert next(lm.denoiser.parameters()).dtype == dtype
    lm.denoiser.float()
    assert_agrees(session(file), lm)


def surest_first(graph: Any, tokens: list[int], mask: int) -> list[int]:
    """A sampler as somebody would write it who has the file and nothing else."""
    z = np.array([tokens])
    while (z == mask).any():
        (log_x,) = graph.run(["log_x"], {"tokens": z})
        score = np.where(z[0] == mask, log_x[0].max(-1), -np.inf)
        place = score.argmax()
        z[0, place] = log_x[0, place].argmax()
    return [int(i) for i in z[0]]


def test_a_sampler_without_this_library_writes_the_same(graph: Any) -> None:
    mask = int(graph.get_modelmeta().custom_metadata_map["mask_id"])
    hole = [mask]
    greedy = unmask.Confidence(steps=LENGTH, params=SamplingParams(temperature=0))
    written: set[int] = set()
    for template in ([3, *hole * 3, 7], [*hole * 2, 0, *hole * 3, 8, *hole], [1, *hole * 2, 2, *hole * 8]):
        ours = model().infill(template, sampler=greedy).tokens[0].tolist()
        assert surest_first(graph, template, mask) == ours
        written |= {new for new, old in zip(ours, template, strict=True) if old == mask}
    assert len(written) > 2  # not one token over and over


@pytest.mark.slow
def test_an_autoregressive_sampler_writes_the_same(tmp_path: Path) -> None:
    lm = model(CAUSAL, NextToken())
    graph = session(export_onnx(lm, tmp_path / "m.onnx"))
    assert "shifted right by one position" in graph.get_modelmeta().description
    text = [3]
    while len(text) < LENGTH:
        (log_x,) = graph.run(["log_x"], {"tokens": np.array([[MASK, *text]])})
        text.append(int(log_x[0, -1].argmax()))
    sampler = unmask.Autoregressive(SamplingParams(temperature=0))
    assert text == lm.sample(length=LENGTH, prompt=[3], sampler=sampler).tokens[0].tolist()
    assert len(set(text)) > 2


def test_the_file_says_what_a_caller_must_know(graph: Any) -> None:
    stated = dict(graph.get_modelmeta().custom_metadata_map)
    assert from_json(ModelConfig, json.loads(stated.pop("config"))) == model().denoiser.config
    assert stated == {
        "format": "unmask-onnx-2",
        "objective": "MDLM",
        "vocab_size": "9",
        "mask_id": "4",
        "max_length": "12",
    }
    assert "they sum to one" in graph.get_modelmeta().description
    shapes = {part.name: (part.shape, part.type) for part in [*graph.get_inputs(), *graph.get_outputs()]}
    assert shapes == {
        "tokens": (["batch", "length"], "tensor(int64)"),
        "log_x": (["batch", "length", 9], "tensor(float)"),
    }


def test_the_file_does_not_tell_where_it_was_made(exported: Path) -> None:
    data = exported.read_bytes()
    assert b".py" not in data
    assert str(Path(unmask.__file__).parents[1]).encode() not in data


def test_a_file_is_not_overwritten_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_module, "_export_graph", lambda *_: b"new")
    file = tmp_path / "m.onnx"
    file.write_bytes(b"old")
    with pytest.raises(ValueError, match=r"m\.onnx exists already; .*overwrite=True"):
        export_onnx(model(), file)
    assert file.read_bytes() == b"old"
    assert export_onnx(model(), str(file), overwrite=True) == file
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_export_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_module, "_export_graph", lambda *_: b"new")
    write = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        write(self, data[:1])
        raise OSError("no space left on device")

    file = tmp_path / "m.onnx"
    file.write_bytes(b"old")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        export_onnx(model(), file, overwrite=True)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_blocks_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not support block diffusion"):
        export_onnx(model(PLAIN, BlockDiffusion(block_size=2)), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder; name a file, as in .*model\.onnx"):
        export_onnx(model(), tmp_path, overwrite=True)


def test_exporting_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model()
    lm.denoiser.train()
    seen: list[torch.nn.Module] = []

    def stop(module: torch.nn.Module, *_: object, **__: object) -> None:
        seen.append(module)
        raise RuntimeError("far enough")

    monkeypatch.setattr(torch.onnx, "export", stop)
    with pytest.raises(ValueError, match="far enough"):
        export_onnx(lm, tmp_path / "m.onnx")
    assert not any(part.training for part in seen[0].modules())
    assert all(part.training for part in lm.denoiser.modules())
    assert all(parameter.requires_grad for parameter in lm.denoiser.parameters())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", ["onnx", "onnxscript"])
def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r"needs the extra onnx: pip install 'unmask\[onnx\]'"):
        export_onnx(model(), tmp_path / "m.onnx")


def test_a_model_that_does_not_fit_into_one_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_module, "_MAX_WEIGHT_BYTES", 1000)
    with pytest.raises(ValueError, match=r"limited to 2 GiB, but this model has [\d,]+ bytes of weights"):
        export_onnx(model(), tmp_path / "m.onnx")


def test_a_schedule_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    lm = model(objective=MDLM(schedule=IntegratedRate(beta=lambda t: 1 / (1 - t))))
    with pytest.raises(ValueError, match="cannot be written to a config file"):
        export_onnx(lm, tmp_path / "m.onnx")
