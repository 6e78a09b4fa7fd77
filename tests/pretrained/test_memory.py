"""Weights in the types in which they are kept: what is read, how much memory that takes, and what is computed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from benchmarks.llada_shape import LLaDAShape, write_llada
from processes import run_program
from unmask.hardware import memory
from unmask.hardware.dtypes import DtypeName
from unmask.pretrained import state_dict

SMALL = LLaDAShape(width=32, depth=2, heads=4, intermediate_size=48, vocab_size=260, max_length=32)
TEXT = [[7 * i % 250 for i in range(24)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llada(tmp_path_factory.mktemp("llada"), SMALL)


def nats(lm: unmask.LanguageModel) -> float:
    return lm.score(TEXT, draws=32).nats_per_token


@pytest.mark.parametrize("tied", [False, True])
def test_saved_types_are_kept_and_computed_in_float32(folder: Path, tmp_path: Path, tied: bool) -> None:
    """With 16 bits in memory the result is that of a network in float32, to the last bit."""
    if tied:
        config = unmask.DiTConfig(32, 2, 4, 32, 0.0, tie_embeddings=True, llama=unmask.LlamaBlock(48))
        lm = unmask.LanguageModel(unmask.ModelConfig(unmask.Vocab(260, 259), config, unmask.MDLM()).build())
        lm.denoiser.bfloat16()
        folder = unmask.save(lm, tmp_path / "tied")
    kept, wide = unmask.load(folder).denoiser, unmask.load(folder, dtype="float32").denoiser
    matrices = {name for name, weight in kept.named_parameters() if weight.dtype == torch.bfloat16}
    assert len(matrices) == (9 if tied else 10)
    assert all("norm" not in name for name in matrices)
    assert {weight.dtype for weight in wide.parameters()} == {torch.float32}
    assert (kept.backbone.lm_head.weight is kept.backbone.get_submodule("embedding").weight) == tied
    assert nats(unmask.LanguageModel(kept)) == nats(unmask.LanguageModel(wide))
    again = unmask.load(unmask.save(unmask.LanguageModel(kept), tmp_path / "again")).denoiser
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in kept.state_dict().items())


def test_few_bits_lose_few_nats(folder: Path) -> None:
    exact = nats(unmask.load(folder, dtype="float32"))
    errors = {}
    for dtype in ("bfloat16", "int8", "int4"):
        lm = unmask.load(folder, dtype=dtype)
        assert lm.denoiser.weights_dtype == dtype
        assert dtype in repr(lm)
        assert lm.denoiser.num_parameters == SMALL.num_parameters
        errors[dtype] = abs(nats(lm) - exact)
    assert 0 < errors["int8"] < 1e-4
    assert errors["int8"] < errors["int4"] < 1e-2
    wide = unmask.load(folder, dtype="float32").denoiser.quantizable_layers()
    distances = []
    for group_size in (4, 32):
        rounded = unmask.load(folder, dtype="int4", group_size=group_size).denoiser
        matrices = {name: rounded.get_submodule(name).weight.to(torch.float32) for name in wide}
        distances.append(sum(float((layer.weight.detach() - matrices[name]).norm()) for name, layer in wide.items()))
    assert distances[0] < 0.75 * distances[1]


def test_rounded_weights_are_not_saved(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rounded to int4, which no format holds: load the model with another dtype"):
        unmask.save(unmask.load(folder, dtype="int4"), tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dtype": "int2"}, "dtype must be one of auto, bfloat16, float32, int8, int4; got 'int2'"),
        ({"dtype": "int8", "group_size": 1}, "group_size must be from 2 to 65,536; got 1"),
    ],
)
def test_unknown_types_are_refused(folder: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        unmask.load(folder, **options)


def test_what_does_not_fit_is_said_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict, "_map_file", lambda *_: pytest.fail("the weights were read"))
    sizes = {"float32": 138_000, "bfloat16": 69_000, "int4": 45_000}
    monkeypatch.setattr(memory, "_free_memory", lambda _: 60_000)
    monkeypatch.setattr(memory, "_format_bytes", lambda size: f"{size:,} B")
    for dtype in ("float32", "bfloat16", "auto"):
        with pytest.raises(
            ValueError, match=rf"needs about [\d,]+ B of memory with the dtype {dtype}, and 60,000 B are"
        ) as e:
            unmask.load(folder, dtype=dtype)  # type: ignore[arg-type]
        needed = int(str(e.value).split("about ")[1].split(" B")[0].replace(",", ""))
        assert needed == pytest.approx(sizes["float32" if dtype == "float32" else "bfloat16"], rel=0.05)
        assert "choose the dtype int8 (about" in str(e.value)
    monkeypatch.setattr(memory, "_free_memory", lambda _: 10)
    with pytest.raises(ValueError, match="10 B are free: free some memory, or split its weights"):
        unmask.load(folder)


def test_free_memory_is_that_of_the_machine_or_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    cpu = torch.device("cpu")
    assert memory._free_memory(cpu) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    5 kB\n")
    assert memory._free_memory(cpu) == 5 * 1024
    for name, text in (
        ("memory.max", "4000"),
        ("memory.current", "3000"),
        ("memory.stat", "anon 7\ninactive_file 500"),
    ):
        (tmp_path / name).write_text(text)
    assert memory._free_memory(cpu) == 1500


@pytest.mark.parametrize("dtype", ["auto", "float32", "int4"])
def test_few_tensors_are_mapped_at_once(folder: Path, dtype: DtypeName, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values become one matrix: three tensors of a file are open, and no more."""
    original, alive, most = state_dict._map_file, weakref.WeakSet[Any](), []

    def counted(*arguments: Any) -> torch.Tensor:
        tensor = original(*arguments)
        alive.add(tensor)
        most.append(len(alive))
        return tensor

    monkeypatch.setattr(state_dict, "_map_file", counted)
    lm = unmask.load(folder, dtype=dtype)
    gc.collect()
    assert (max(most), len(alive), len(most)) == (3, 0, 3 + 9 * SMALL.depth)
    for file in folder.glob("*.safetensors"):  # the model does not need its files any more
        assert str(file) not in Path("/proc/self/maps").read_text()
    assert nats(lm) > 0


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llada(tmp_path, SMALL)
    tensors = state_dict.read_state_dict(tmp_path)
    file = tmp_path / "model-00001.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    last = [tensor for name, tensor in tensors.items() if ".blocks.0." in name]
    with pytest.raises(ValueError, match="has become shorter since its header was read"):
        [tensor.read() for tensor in last]


def test_two_ranks_share_the_weights_and_write_the_same_texts(folder: Path) -> None:
    """Each rank keeps half of every tensor, in 16 and in 4 bits."""
    done = run_program(__file__, folder, ranks=2)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for dtype in ("auto", "int4"):
        lm = unmask.load(folder, dtype=dtype)  # type: ignore[arg-type]
        whole = sum(weight.nbytes for weight in lm.denoiser.parameters())
        texts = lm.sample(3, 12, sampler=unmask.Ancestral(4)).ids
        ranks = [each for each in found if each["dtype"] == dtype]
        assert [each["texts"] for each in ranks] == [texts, texts]
        assert all(each["kept"] < 0.6 * whole for each in ranks)
        assert ranks[0]["nats"] == ranks[1]["nats"] == nats(lm)


def main() -> None:
    """One of the two ranks."""
    from unmask.distributed import init_distributed

    torch.set_num_threads(1)
    with init_distributed() as where:
        for dtype in ("auto", "int4"):
            lm = unmask.load(sys.argv[1], dtype=dtype, distributed=where, shard_weights=True)  # type: ignore[arg-type]
            kept = sum(weight.to_local().nbytes for weight in lm.denoiser.parameters())  # type: ignore[operator]
            texts = lm.sample(3, 12, sampler=unmask.Ancestral(4)).ids
            print(json.dumps({"dtype": dtype, "kept": kept, "texts": texts, "nats": nats(lm)}), flush=True)


_LOAD_AND_ANSWER = """
import json, sys, time
import torch, unmask, unmask.pretrained.load_save
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
before = peak()
lm = unmask.load(sys.argv[1], dtype=sys.argv[2])
loaded = peak() - before
weights = sum(weight.nbytes for weight in lm.denoiser.parameters())
text = lm.infill("a<mask:4>b", sampler=unmask.Confidence(2)).texts[0]
print(json.dumps({"loaded": loaded, "weights": weights, "parameters": lm.denoiser.num_parameters, "text": text}))
"""


@pytest.mark.slow
def test_a_large_model_needs_little_more_than_its_weights(tmp_path: Path) -> None:
    """1.55 billion weights: loading takes the weights and less than 1 GB, and the model answers."""
    shape = LLaDAShape(depth=20)
    write_llada(tmp_path / "large", shape)
    for dtype, bits in (("bfloat16", 16), ("int4", 4.5)):
        command = [sys.executable, "-c", _LOAD_AND_ANSWER, str(tmp_path / "large"), dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        outer = 2 * shape.vocab_size * shape.width
        assert found["parameters"] == shape.num_parameters >= 1.5e9
        assert found["weights"] == pytest.approx(2 * outer + (shape.num_parameters - outer) * bits / 8, rel=0.01)
        assert found["loaded"] < found["weights"] + 1e9
        assert (found["text"][0], found["text"][-1]) == ("a", "b")


if __name__ == "__main__":
    main()
