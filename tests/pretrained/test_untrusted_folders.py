"""Folders that strangers made to do harm: one sentence, soon, and no memory for what they only claim."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import unmask
from unmask import DiTConfig, LlamaBlock, Tokenizer
from unmask.backbones.dit import LocalInit
from unmask.diffusion.schedule import LogLinear
from unmask.pretrained import state_dict

HUGE = 10**9
LETTERS = Tokenizer.characters("abcdefg")
LINEAR = unmask.MDLM(schedule=LogLinear(eps=0.0))


def ours(folder: Path) -> None:
    backbone = DiTConfig(width=8, depth=2, heads=2, max_length=12, local_init=LocalInit(), dropout=0.0)
    unmask.save(unmask.LanguageModel.from_config(backbone, unmask.MDLM(), LETTERS), folder)


def mdlm(folder: Path) -> None:
    backbone = DiTConfig(width=8, depth=2, heads=2, max_length=12)
    unmask.save(unmask.LanguageModel.from_config(backbone, unmask.MDLM(), LETTERS), folder, upstream_format=True)


def llada(folder: Path) -> None:
    backbone = DiTConfig(width=8, depth=2, heads=2, max_length=12, dropout=0.0, llama=LlamaBlock(intermediate_size=16))
    unmask.save(unmask.LanguageModel.from_config(backbone, LINEAR, LETTERS), folder, upstream_format=True)


def bert(folder: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=16, max_position_embeddings=24, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(folder)


def qwen(folder: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Qwen2Config(vocab_size=16, num_key_value_heads=2, **sizes)
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def bert_in_ours(folder: Path) -> None:
    bert(folder.with_name("bert"))
    unmask.save(unmask.load(folder.with_name("bert")), folder)


MAKERS = {"ours": ours, "mdlm": mdlm, "llada": llada, "bert": bert, "qwen": qwen, "in ours": bert_in_ours}


def put(*path: str, value: Any) -> Callable[[Path], None]:
    """Write a value into config.json."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        node = config
        for name in path[:-1]:
            node = node[name]
        node[path[-1]] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def put_inside(name: str, value: Any) -> Callable[[Path], None]:
    """Write a value into the config of transformers that ours holds as text."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        inner = json.loads(config["backbone"]["config"])
        config["backbone"]["config"] = json.dumps(inner | {name: value})
        (folder / "config.json").write_text(json.dumps(config))

    return change


def link(name: str, target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def bound_socket(folder: Path) -> None:
    (folder / "config.json").unlink()
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket is at most 100 characters long
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("config.json")
    finally:
        os.chdir(here)


def text(name: str, written: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(written) and None


def sparse(name: str, size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return change


def header(**tensors: dict[str, Any]) -> Callable[[Path], None]:
    """A safetensors file of nothing but a header."""

    def change(folder: Path) -> None:
        written = json.dumps(tensors).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(written)) + written)

    return change


def header_length(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10**12) + b"{}")


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Change the embedding."""

    def changed(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        name = next(name for name in held if "embed" in name)
        held[name] = change(held[name])
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return changed


def empty_giants(folder: Path) -> None:
    """A billion tensors' worth of rows, none of which has a number."""
    held = load_file(folder / "model.safetensors")
    held["embedding.weight"] = torch.empty(HUGE, 0)
    save_file(held, folder / "model.safetensors")
    put("vocab", "size", value=HUGE)(folder)


def zip_bomb(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 26))


def index_of_devices(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "x.safetensors").symlink_to("/dev/zero")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')


def deep_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(DEEP)


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = '{"a": ' * 500 + "1" + "}" * 500
KINDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "ours, depth 10^9": ("ours", put("backbone", "depth", value=HUGE)),
    "ours, depth 20,000": ("ours", put("backbone", "depth", value=20_000)),
    "ours, one layer more": ("ours", put("backbone", "depth", value=3)),
    "ours, width 10^9": ("ours", put("backbone", "width", value=HUGE)),
    "ours, width 10^18": ("ours", put("backbone", "width", value=4 * 10**18)),
    "ours, heads 10^9": ("ours", put("backbone", "heads", value=HUGE)),
    "ours, length 10^12": ("ours", put("backbone", "max_length", value=10**12)),
    "ours, vocabulary 10^9": ("ours", put("vocab", "size", value=HUGE)),
    "ours, taps 10^9": ("ours", put("backbone", "local_init", "kernel_size", value=HUGE + 1)),
    "ours, offset 10^9": ("ours", put("backbone", "local_init", "offsets", value=[HUGE])),
    "ours, strength NaN": ("ours", put("backbone", "local_init", "bias_scale", value=float("nan"))),
    "ours, time width 10^9": (
        "ours",
        put("backbone", "time_conditioning", value={"kind": "TimeConditioning", "width": HUGE}),
    ),
    "ours, rotary base inf": ("ours", put("backbone", "rope_theta", value=float("inf"))),
    "ours, a long wrong value": ("ours", put("backbone", "width", value=["x" * 1000] * 1000)),
    "mdlm, depth 10^9": ("mdlm", put("n_blocks", value=HUGE)),
    "mdlm, cond 10^9": ("mdlm", put("cond_dim", value=HUGE)),
    "mdlm, vocabulary 10^9": ("mdlm", put("vocab_size", value=HUGE)),
    "llada, depth 10^9": ("llada", put("n_layers", value=HUGE)),
    "llada, hidden 10^9": ("llada", put("mlp_hidden_size", value=HUGE)),
    "llada, vocabulary 10^9": ("llada", put("embedding_size", value=HUGE)),
    "llada, eps 0": ("llada", put("rms_norm_eps", value=0)),
    "llada, length 10^12": ("llada", put("max_sequence_length", value=10**12)),
    "bert, depth 10^9": ("bert", put("num_hidden_layers", value=HUGE)),
    "bert, depth 20,000": ("bert", put("num_hidden_layers", value=20_000)),
    "bert, width 10^9": ("bert", put("hidden_size", value=HUGE)),
    "bert, width 10^6": ("bert", put("hidden_size", value=10**6)),
    "bert, vocabulary 10^9": ("bert", put("vocab_size", value=HUGE)),
    "bert, vocabulary 10^6": ("bert", put("vocab_size", value=10**6)),
    "bert, positions 10^9": ("bert", put("max_position_embeddings", value=HUGE)),
    "bert, positions 10^6": ("bert", put("max_position_embeddings", value=10**6)),
    "bert, mask id 10^9": ("bert", put("mask_token_id", value=10**7)),
    "bert, eps 0": ("bert", put("layer_norm_eps", value=0.0)),
    "bert, our vocabulary 10^9": (
        "bert",
        put("unmask", value={"vocab": {"size": HUGE, "mask_id": 3}, "objective": {"kind": "MDLM"}}),
    ),
    "qwen, depth 10^9": ("qwen", put("num_hidden_layers", value=HUGE)),
    "bert in ours, depth 10^9": ("in ours", put_inside("num_hidden_layers", HUGE)),
    "bert in ours, width 10^6": ("in ours", put_inside("hidden_size", 10**6)),
    "bert in ours, vocabulary 10^9": ("in ours", put("vocab", "size", value=HUGE)),
    "bert in ours, deep": ("in ours", put("backbone", "config", value=DEEP)),
    "config is /dev/zero": ("ours", link("config.json", "/dev/zero")),
    "config is /dev/tty": ("ours", link("config.json", "/dev/tty")),
    "config is a pipe": ("ours", pipe("config.json")),
    "config is a socket": ("ours", bound_socket),
    "config is a folder": ("ours", link("config.json", "..")),
    "config is of a terabyte": ("ours", sparse("config.json", 1 << 40)),
    "config of 40 MB": ("ours", text("config.json", "[" + "[]," * 13_000_000 + "1]")),
    "config is deep": ("ours", text("config.json", DEEP)),
    "config is nested": ("ours", text("config.json", NESTED)),
    "config is nested, bert": ("bert", text("config.json", '{"model_type": "bert", "a": ' + NESTED + "}")),
    "config of a long number": ("ours", text("config.json", '{"format": ' + "9" * 100_000 + "}")),
    "tokenizer is a pipe": ("ours", pipe("tokenizer.json")),
    "tokenizer is /dev/zero": ("ours", link("tokenizer.json", "/dev/zero")),
    "tokenizer is of a terabyte": ("ours", sparse("tokenizer.json", 1 << 40)),
    "tokenizer is deep": ("ours", text("tokenizer.json", DEEP)),
    "vocab.txt is a pipe": ("bert", pipe("vocab.txt")),
    "tokenizer_config is a pipe": ("bert", pipe("tokenizer_config.json")),
    "manifest is a pipe": ("ours", pipe("manifest.json")),
    "manifest is deep": ("ours", text("manifest.json", DEEP)),
    "manifest names nothing": ("ours", text("manifest.json", "{}")),
    "weights are a pipe": ("ours", pipe("model.safetensors")),
    "weights are /dev/zero": ("ours", link("model.safetensors", "/dev/zero")),
    "weights of a terabyte": ("ours", sparse("model.safetensors", 1 << 40)),
    "weights with a long header": ("ours", header_length),
    "weights that are not there": (
        "ours",
        header(a={"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}),
    ),
    "weights of rows without numbers": ("ours", empty_giants),
    "weights that are a zip bomb": ("ours", zip_bomb),
    "weights by an index of devices": ("ours", index_of_devices),
    "index is deep": ("ours", deep_index),
    "weights that are NaN": ("ours", weights(lambda each: each * float("nan"))),
    "weights that are infinite": ("bert", weights(lambda each: each + float("inf"))),
    "weights that are whole numbers": ("ours", weights(lambda each: each.long())),
}

LOAD = """
import json, resource, sys, time
import unmask, transformers
from unmask.backbones.hf import import_transformers as library
library().BertForMaskedLM, library().AutoModelForMaskedLM, library().Qwen2ForCausalLM
unmask.load(sys.argv[1]), unmask.load(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (1 << 35, 1 << 35))
for folder in sys.argv[3:]:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        unmask.load(folder)
        said = None
    except ValueError as error:
        said = str(error)
    except BaseException as error:
        said = f"{type(error).__name__}, not a sentence"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([folder, said, time.process_time() - began, grown]), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str | None, float, int]]:
    """What loading each kind says, the seconds of a processor that it takes, and kilobytes."""
    root = tmp_path_factory.mktemp("hostile")
    folders = {}
    for number, (kind, (maker, change)) in enumerate(KINDS.items()):
        folder = root / str(number) / "m"
        folder.parent.mkdir()
        MAKERS[maker](folder)
        if "manifest" not in kind:
            (folder / "manifest.json").unlink(missing_ok=True)
        change(folder)
        folders[str(folder)] = kind
    good = []
    for maker in ("ours", "bert"):
        MAKERS[maker](root / maker)
        good.append(str(root / maker))
    run = subprocess.run([sys.executable, "-c", LOAD, *good, *folders], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return {folders[name]: (*rest,) for name, *rest in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_folder_is_refused_in_a_sentence(
    kind: str, answers: dict[str, tuple[str | None, float, int]]
) -> None:
    said, seconds, grown = answers[kind]
    assert said is not None, "it was loaded"
    assert "not a sentence" not in said
    assert len(said) < 600
    assert "\n" not in said
    assert seconds < 3  # about 0.01; a few kinds take longer to parse
    assert grown < 300_000


def test_what_they_were_made_of_is_read(tmp_path: Path) -> None:
    for name, maker in MAKERS.items():
        maker(tmp_path / name / "m")
        (tmp_path / name / "m" / "manifest.json").unlink(missing_ok=True)
        assert unmask.load(tmp_path / name / "m").sample(length=4).tokens.shape == (1, 4)


def test_half_precision_is_read(tmp_path: Path) -> None:
    ours(tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    weights(lambda each: each.half())(tmp_path / "m")
    assert unmask.load(tmp_path / "m").denoiser.backbone.lm_head.weight.dtype == torch.float32


def test_shapes_are_compared_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert(tmp_path / "m")
    put("max_position_embeddings", value=10**6)(tmp_path / "m")
    monkeypatch.setattr(state_dict, "_map_file", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=r"asks for 8,\d\d\d,\d\d\d weights, but the files hold \d,\d\d\d$"):
        unmask.load(tmp_path / "m")
