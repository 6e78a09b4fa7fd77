"""Every command on every published family, and what is said of folders that are wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unmask
from unmask.pretrained.formats import FORMATS
from unmask.pretrained.state_dict import LazyTensor
from unmask.sampling.factory import make_sampler

Command = Callable[..., Any]
GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = {
    "a2d_llama_tiny": "a2d-llama",
    "a2d_qwen2_tiny": "a2d-qwen2",
    "a2d_qwen3_tiny": "a2d-qwen3",
    "fastdllm2_tiny": "Fast_dLLM_Qwen",
    "llada2_moe_tiny": "llada2_moe",
    "llada_moe_tiny": "lladamoe",
    "sdar_tiny": "sdar",
    "duo_tiny": "duo",
    "sedd_tiny": "sedd",
    "sedd_uniform_tiny": "sedd",
    "mdlm_tiny": "mdlm",
    "bd3lm_tiny": "bd3lm",
    "llada_tiny": "llada",
}
"""Golden folders, and the format of each."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A family's golden folder; those that are published without a tokenizer get one that writes ids as numbers."""
    copy = shutil.copytree(GOLDEN / request.param, tmp_path / request.param)
    if not (copy / "tokenizer.json").exists():
        size = unmask.load(copy).vocab.mask_id
        tokenizer = json.loads((GOLDEN / "sdar_tiny" / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"] = {str(id_): id_ for id_ in range(min(size, 10))}
        tokenizer["added_tokens"] = []
        tokenizer["model"]["unk_token"] = "0"
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_commands(folder: Path, command: Command, tmp_path: Path) -> None:
    model, family = str(folder), FAMILIES[folder.name]

    def run(*arguments: str) -> Any:
        done = command(*arguments)
        assert done.code == 0, (arguments, done.err)
        return json.loads(done.out) if "--json" in arguments else done.out.strip()

    filled = run("infill", model, "1 2 <mask:3> 4", "--json", "--dtype", "float32")
    assert len(filled["tokens"][0]) == 6
    assert [filled["tokens"][0][at] for at in (0, 1, 5)] == [1, 2, 4]
    completed = run("complete", model, "1 2 3", "4 5", "--length", "9", "--json", "--dtype", "float32")
    assert len(completed["texts"]) == 2
    assert all(len(tokens) <= 9 for tokens in completed["tokens"])
    scored = run("score", model, "1 2 3 4", "--draws", "16", "--json")
    assert scored["scores"][0]["nats_per_token"] > 0
    (tmp_path / "text.txt").write_text(" ".join(str(n % 9) for n in range(40)))
    evaluated = run("eval", model, str(tmp_path / "text.txt"), "--replicates", "2", "--json")
    assert evaluated["texts"][0]["nats_per_token"] > 0
    for name, options in (("own", ()), ("published", ("--format", family))):
        out = run("export", model, str(tmp_path / name), *options)
        again = run("infill", out, "1 2 <mask:3> 4", "--json", "--dtype", "float32")
        assert again["tokens"] == filled["tokens"], name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("confidence", {"stop_entropy": 6.0, "stable_steps": 1, "measure": "margin"}),
        ("threshold", {"threshold": 0.02, "min_tokens": 2}),
        ("joint-threshold", {"threshold": 0.02, "edit_threshold": 0.03, "max_post_steps": 3}),
        ("factor", {"factor": 30.0}),
        ("entropy-bounded", {"entropy_bound": 4.0}),
    ],
)
def test_options_of_samplers(name: str, options: dict[str, Any], command: Command, tmp_path: Path) -> None:
    """By flags, and in a line of a file of requests."""
    folder, template = str(GOLDEN / "llada_moe_tiny"), "1 2 <mask:16> 4"
    lm = unmask.load(folder)
    cold = unmask.SamplingParams(temperature=0)
    own, plain = (make_sampler(lm.denoiser, name, None, cold, block_size=8, **some) for some in (options, {}))
    expected = lm.infill(template, sampler=own, seed=0)
    assert expected.nfe < lm.infill(template, sampler=plain, seed=0).nfe
    flags = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    blocks = ("--sampler", name, "--block-size", "8", "--temperature", "0", "--dtype", "float32")
    done = command("infill", folder, template, *blocks, *flags, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["tokens"] == expected.ids
    (tmp_path / "in.jsonl").write_text(json.dumps({"template": template, **options}) + "\n")
    files = ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    done = command("infill", folder, *files, *blocks)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out.jsonl").read_text())["results"][0]["text"] == expected.text


def test_every_family_is_here() -> None:
    others = {"Dream", "caduceus", "mamba", "mamba_ssm", "dimamba", "bert", "sdtt", "transformers"}
    assert set(FORMATS) - others == set(FAMILIES.values())


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def grow_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"more-{n}": 101 + n for n in range(20)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


WRONG: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no config": ("sdar_tiny", lambda folder: (folder / "config.json").unlink(), "config.json"),
    "config is no JSON": ("sdar_tiny", lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "no weights": ("sdar_tiny", lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "weights cut off": ("sdar_tiny", cut, "model.safetensors"),
    "unknown family": (
        "sdar_tiny",
        change_config(model_type="sdar_moe"),
        "has an unknown format (its model_type is 'sdar_moe'): there are unmask-2, the published families",
    ),
    "wrong width": ("sdar_tiny", change_config(hidden_size=96), "has shape"),
    "wrong heads": ("fastdllm2_tiny", change_config(num_attention_heads=8), "has shape"),
    "wrong head width": ("sdar_tiny", change_config(head_dim=16), "has shape"),
    "too many layers": ("sdar_tiny", change_config(num_hidden_layers=3), "lack model.layers.2"),
    "too few layers": ("sdar_tiny", change_config(num_hidden_layers=1), "unknown tensor model.layers.1"),
    "larger vocabulary": ("sdar_tiny", change_config(vocab_size=202), "has shape"),
    "tied, with a head": ("sdar_tiny", change_config(tie_word_embeddings=True), "unknown tensor lm_head.weight"),
    "experts": ("llada_moe_tiny", change_config(num_experts=9), "lack model.layers.0.mlp.experts.8"),
    "experts per token": ("llada_moe_tiny", change_config(num_experts_per_tok=9), "a token passes from 1 to 8 experts"),
    "layers with experts": ("llada_moe_tiny", change_config(moe_layer_freq=[1]), "an entry for each of 2 layers"),
    "router": ("llada2_moe_tiny", change_config(score_function="softmax"), "only 'sigmoid' is supported"),
    "block": ("sdar_tiny", change_config(block_size="four"), "needs 'block_size', an integer above 0; got 'four'"),
    "rotation": ("sdar_tiny", change_config(rope_scaling={"type": "yarn"}), "only 'llama3' is supported"),
    "mask outside": ("sdar_tiny", change_config(mask_token_id=101), "the mask id 101 is outside the vocabulary 0..100"),
    "end outside": ("sdar_tiny", change_config(eos_token_id=[97, 300]), "the id 300 that ends an answer must be in"),
    "larger tokenizer": ("sdar_tiny", grow_tokenizer, "the tokenizer has 121 ids and the model only 101"),
    "no tokenizer": (
        "sdar_tiny",
        lambda folder: (folder / "tokenizer.json").unlink(),
        "sdar_tiny has no tokenizer.json",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_one_sentence(
    case: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before any weight is read, but where the weights themselves are cut off."""
    family, spoil, sentence = WRONG[case]
    copy = shutil.copytree(GOLDEN / family, tmp_path / family)
    spoil(copy)
    if case != "weights cut off":
        monkeypatch.setattr(LazyTensor, "read", lambda tensor: pytest.fail("weights were read"))
    (tmp_path / "text.txt").write_text("1 2 3 4 5 6")
    done = command("eval", str(copy), str(tmp_path / "text.txt"))
    assert done.code == 2, done.err
    assert sentence in done.err
    assert len(done.err.splitlines()) == 1
    assert done.out == ""


@pytest.mark.parametrize("words", [("complete",), ("score",), ("sample", "--prompt")])
def test_a_mask_in_a_text_is_one_sentence(words: tuple[str, ...], command: Command) -> None:
    name, *option = words
    done = command(name, str(GOLDEN / "sdar_tiny"), *option, "1 <|MASK|> 2")
    assert done.code == 2
    assert "contains the mask token <|MASK|>, which would be overwritten; use `infill`" in done.err
