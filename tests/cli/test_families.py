"""Every command on every published family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import unmask
from cli.conftest import Command
from unmask.pretrained.formats import FORMATS

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


def test_every_family_is_here() -> None:
    others = {"Dream", "caduceus", "mamba", "mamba_ssm", "dimamba", "bert", "eurobert", "unmask"}
    assert set(FORMATS) - others == set(FAMILIES.values())
