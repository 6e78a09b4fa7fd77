"""Families of published instruct models: golden logits, cached passes, texts and calls; round trips."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import unmask
from unmask import (
    Autoregressive,
    Blockwise,
    Confidence,
    DiTConfig,
    Guidance,
    JointThreshold,
    LanguageModel,
    LlamaBlock,
    ModelConfig,
    SamplingParams,
    Threshold,
)
from unmask.context import AttentionStages, Context
from unmask.diffusion.schedule import LogLinear
from unmask.objectives import MDLM, BlockDiffusion, NextToken
from unmask.sampling.factory import default_sampler, make_sampler

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = {
    "sdar_tiny": 4,
    "a2d_qwen3_tiny": 8,
    "a2d_qwen2_tiny": 8,
    "a2d_llama_tiny": 8,
    "fastdllm2_tiny": 8,
    "llada2_moe_tiny": 8,
}
every_family = pytest.mark.parametrize("family", SIZES)
GREEDY = SamplingParams(temperature=0.0)


def expected(family: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / family / "expected.safetensors")


def logits(lm: LanguageModel, tokens: Tensor, stages: AttentionStages | None = None, cache: object = None) -> Tensor:
    """Unshifted, as golden vectors are."""
    backbone = lm.denoiser.backbone
    context = Context(stages=stages, cache=cache)  # type: ignore[arg-type]
    with torch.no_grad():
        return backbone.compute_logits(backbone.features(backbone.embed(tokens), torch.zeros(len(tokens), 1), context))


@every_family
def test_logits(family: str) -> None:
    lm, golden = unmask.load(GOLDEN / family), expected(family)
    z, size = golden["z"], SIZES[family]
    stages = AttentionStages.block_causal(0, z.shape[1], size, z.shape[1], z.device)
    torch.testing.assert_close(logits(lm, z, stages), golden["logits.block_causal"], atol=1e-4, rtol=0)
    if "logits.full" in golden:
        torch.testing.assert_close(logits(lm, z), golden["logits.full"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [family for family in SIZES if "cached.clean" in expected(family)])
def test_a_block_beside_the_cache_of_finished_blocks(family: str) -> None:
    lm, golden = unmask.load(GOLDEN / family), expected(family)
    size, clean, noisy = SIZES[family], golden["cached.clean"], golden["cached.noisy"]
    for name in (name for name in golden if name.startswith("cached.logits.block")):
        start = size * int(name.removeprefix("cached.logits.block"))
        cache = lm.denoiser.new_cache()
        before = AttentionStages.block_causal(0, start, size, start, clean.device)
        logits(lm, clean[:, :start], before, cache.view())
        block = AttentionStages.block_causal(start, start + size, size, start, clean.device)
        beside = logits(lm, noisy[:, start : start + size], block, cache.view(keep=0))
        torch.testing.assert_close(beside, golden[name], atol=1e-4, rtol=0)


def test_a_sub_block_beside_its_block() -> None:
    """Fast-dLLM v2's block cache: keys and values of a block, of which those of the sub-block are replaced."""
    lm, golden = unmask.load(GOLDEN / "fastdllm2_tiny"), expected("fastdllm2_tiny")
    clean, noisy = golden["cached.clean"], golden["cached.noisy"]
    for name in (name for name in golden if name.startswith("sub.logits.block")):
        start = 8 * int(name.removeprefix("sub.logits.block"))
        cache = lm.denoiser.new_cache()
        logits(lm, clean[:, :start], AttentionStages.block_causal(0, start, 8, start, clean.device), cache.view())
        block = AttentionStages.block_causal(start, start + 8, 8, start, clean.device)
        logits(lm, noisy[:, start : start + 8], block, cache.view())
        part = AttentionStages.block_causal(start + 4, start + 8, 8, start, clean.device)
        alone = logits(lm, golden[f"sub.tokens.block{start // 8}"], part, cache.view(start + 4, keep=0))
        torch.testing.assert_close(alone, golden[name], atol=1e-4, rtol=0)


def test_llada_moe_writes_as_published() -> None:
    lm, golden = unmask.load(GOLDEN / "llada_moe_tiny"), expected("llada_moe_tiny")
    torch.testing.assert_close(logits(lm, golden["z"]), golden["logits.full"], atol=1e-4, rtol=0)
    keep, backbone = golden["keep"].bool(), lm.denoiser.backbone
    with torch.no_grad():
        hidden = backbone.features(backbone.embed(golden["z"]), torch.zeros(3, 1), Context(valid=keep))
        padded = backbone.compute_logits(hidden)
    torch.testing.assert_close(padded[keep], golden["logits.padded"][keep], atol=1e-4, rtol=0)
    for name, text in golden.items():
        if not name.startswith("generate.") or name.endswith("calls"):
            continue
        prompt, options = (
            golden[name.split(".")[1]],
            dict(re.findall(r"\.(steps|block|cfg)([\d.]+?)(?=\.[a-z]|$)", name)),
        )
        size = int(options["block"])
        sampler = Blockwise(size, Confidence(int(options["steps"]) * size // 16, params=GREEDY))
        guidance = Guidance(cfg_scale=float(options["cfg"])) if "cfg" in options else None
        written = lm.generate(prompted(prompt, prompt.shape[1] + 16, lm.vocab.mask_id), sampler, guidance=guidance)
        assert torch.equal(written.tokens, text), name
        assert written.nfe == golden[f"{name}.calls"], name


def sdar_sampler(strategy: str, steps: int, threshold: str, end_ids: tuple[int, ...] = ()) -> Blockwise:
    size = 4 // steps
    if strategy == "sequential":
        return Blockwise(sampler=Confidence(1, params=GREEDY), sub_block_size=size, end_ids=end_ids)
    above = float(threshold) if "dynamic" in strategy else 1.0
    return Blockwise(sampler=Threshold(above, GREEDY, min_tokens=size), end_ids=end_ids)


def test_sdar_writes_as_published() -> None:
    """Blocks from the beginning of the prompt; the published code reads every block once more. Where it stops, it
    leaves the masks of later blocks, and goes on to the end of the block: here the end is repeated."""
    lm, golden = unmask.load(GOLDEN / "sdar_tiny"), expected("sdar_tiny")
    assert isinstance(lm.objective, BlockDiffusion)
    pattern = r"generate\.(prompt\d+)\.(\w+)\.steps(\d)(?:\.threshold([\d.]+?))?(\.stop)?$"
    found = [(name, re.fullmatch(pattern, name)) for name in golden if name.startswith("generate.")]
    stopped = 0
    for name, match in found:
        if match is None:
            assert name.endswith("calls")
            continue
        prompt_name, strategy, steps, threshold, stop = match.groups()
        prompt, text = golden[prompt_name], golden[name]
        sampler = sdar_sampler(strategy, int(steps), threshold or "1", lm.vocab.end_ids if stop else ())
        written = lm.generate(prompted(prompt, text.shape[1], lm.vocab.mask_id), sampler)
        new = text[0, prompt.shape[1] :].tolist()
        end = next((i + 1 for i, id_ in enumerate(new) if stop and id_ == 97), len(new)) + prompt.shape[1]
        assert torch.equal(written.tokens[:, :end], text[:, :end]), name
        # Published: a call for the prompt's blocks and one for each finished block; here these share the next call.
        num_blocks = int((text != lm.vocab.mask_id).sum()) // 4
        stored = num_blocks - prompt.shape[1] // 4 + (prompt.shape[1] >= 4)
        calls = int(golden[f"{name}.calls"]) - stored
        assert written.nfe == calls if end == text.shape[1] else written.nfe <= calls, name
        stopped += end < text.shape[1]
    assert stopped > 0


def with_blocks(family: str, folder: Path, size: int) -> Path:
    """The golden folder, whose config says that there are blocks."""
    shutil.copytree(GOLDEN / family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "block_size": size}))
    return folder


PARTS = pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))], ids=["some", "more", "rest"]
)
"""Every third of many published texts; the others are long proofs."""


@PARTS
@pytest.mark.parametrize("family", ["a2d_qwen3_tiny", "a2d_qwen2_tiny", "a2d_llama_tiny"])
def test_a2d_writes_as_published(family: str, part: int, tmp_path: Path) -> None:
    """With full attention, blocks are only an order; with blocks, they are counted from the end of the prompt."""
    golden = expected(family)
    for kind, folder in (("mdlm", GOLDEN / family), ("bd3lm", with_blocks(family, tmp_path / "bd3lm", 8))):
        lm = unmask.load(folder)
        # `right_shift` is an option for other networks than A2D's, which are not shifted.
        names = [name for name in golden if name.startswith(f"{kind}.prompt") and "right_shift" not in name]
        for name in [name for name in names if "calls" not in name][part::3]:
            text = golden[name]
            options = dict(re.findall(r"\.(steps|block|cfg)([\d.]+?)(?=\.[a-z]|$)", name))
            prompt = golden[name.split(".")[1]]
            size = int(options.get("block", 8))
            steps = int(options["steps"]) if kind == "bd3lm" else -(-int(options["steps"]) // -(-20 // size))
            canvas = torch.cat([prompt, torch.full((1, 20), lm.vocab.mask_id)], 1)
            size_option = None if kind == "bd3lm" else size
            sampler = Blockwise(size_option, Confidence(steps, params=GREEDY))
            guidance = Guidance(cfg_scale=float(options["cfg"])) if "cfg" in options else None
            written = lm.generate(canvas, sampler, guidance=guidance)
            # A prompt is padded there, on the left, to whole blocks; the text stops after the block that ends it.
            padding = -prompt.shape[1] % 8 if kind == "bd3lm" else 0
            assert torch.equal(written.tokens[:, : text.shape[1] - padding], text[:, padding:]), name
            # Published: with blocks, a call for the prefix of each; here it shares the first one of the block.
            if written.tokens.shape[1] == text.shape[1] - padding:
                calls = int(golden[f"{name}.calls"]) - (6 if "cfg" in options else 3) * (kind == "bd3lm")
                assert written.nfe == calls, name


@pytest.mark.parametrize("family", ["a2d_qwen3_tiny", "a2d_qwen2_tiny", "a2d_llama_tiny"])
def test_a2d_prompts_of_different_lengths_share_calls(family: str, tmp_path: Path) -> None:
    """Published batches are padded: texts are those of each prompt alone, in both kinds."""
    golden = expected(family)
    prompts = [golden[f"prompt{length}"][0].tolist() for length in (11, 5)]
    for name, folder in (
        ("mdlm.both.steps24.block8", GOLDEN / family),
        ("bd3lm.both.steps8", with_blocks(family, tmp_path / "bd3lm", 8)),
    ):
        lm = unmask.load(folder)
        written = lm.complete(prompts, 20, sampler=Blockwise(8, Confidence(8, params=GREEDY)))
        for prompt, completion, text in zip(prompts, written.ids, golden[name].tolist(), strict=True):
            start = next(i for i in range(len(text)) if text[i : i + len(prompt)] == prompt) + len(prompt)
            assert completion == text[start : start + len(completion)], name
            assert len(completion) == 20 or text[start + len(completion)] in lm.vocab.end_ids, name


def prompted(prompt: Tensor, length: int, mask_id: int) -> Tensor:
    """The prompt, with masks up to `length` tokens."""
    return torch.cat([prompt, torch.full((1, length - prompt.shape[1]), mask_id)], 1)


@PARTS
def test_fast_dllm_writes_as_published(part: int) -> None:
    """Sub-blocks; the first token of a block comes first, and follows from the block before. `block_cache`, which asks
    a sub-block alone, makes a text depend on the others of its batch, and is left out."""
    lm, golden = unmask.load(GOLDEN / "fastdllm2_tiny"), expected("fastdllm2_tiny")
    names = [name for name in golden if name.startswith("generate.") and "block_cache" not in name]
    for name in [name for name in names if not name.endswith("calls")][part::3]:
        text = golden[name]
        prompt_name, size, threshold = re.findall(r"(prompt\d+)\.sub(\d+)\.threshold([\d.]+?)(?:\.[a-z]|$)", name)[0]
        prompt = golden[prompt_name]
        length = 8 * (3 + prompt.shape[1] // 8) + 1
        end = () if "no_stop" in name else (90,)
        sampler = Blockwise(sampler=Threshold(float(threshold), GREEDY), sub_block_size=int(size), end_ids=end)
        written = lm.generate(prompted(prompt, length, lm.vocab.mask_id), sampler)
        assert torch.equal(written.tokens[:, : text.shape[1]], text), name
        # Published: the whole blocks of a prompt are read by a call of their own, unless they predict the next token.
        own_call = int(prompt.shape[1] > 8 and prompt.shape[1] % 8 != 0)
        assert written.nfe == int(golden[f"{name}.calls"]) - own_call, name


def llada2(tmp_path: Path) -> LanguageModel:
    return unmask.load(with_blocks("llada2_moe_tiny", tmp_path / "llada2", 8))


def test_llada2_writes_as_published(tmp_path: Path) -> None:
    lm, golden = llada2(tmp_path), expected("llada2_moe_tiny")
    for name, text in golden.items():
        if not name.startswith("v20.") or name.endswith("calls"):
            continue
        prompt, options = golden[name.split(".")[1]], dict(re.findall(r"\.(steps|threshold)(\d+(?:\.\d+)?)", name))
        sampler = Threshold(float(options["threshold"]), GREEDY, min_tokens=8 // int(options["steps"]))
        length = -(-(prompt.shape[1] + 20) // 8) * 8
        written = lm.generate(prompted(prompt, length, lm.vocab.mask_id), Blockwise(sampler=sampler, end_ids=(90,)))
        assert torch.equal(written.tokens[:, prompt.shape[1] :][:, : text.shape[-1]], text.view(1, -1)), name
        calls = int(golden[f"{name}.calls"])
        assert written.nfe == calls if "early" in name else written.nfe <= calls, name


@PARTS
def test_llada2_edits_as_published(part: int, tmp_path: Path) -> None:
    lm, golden = llada2(tmp_path), expected("llada2_moe_tiny")
    for name in [name for name in golden if name.startswith("v21.") and not name.endswith("calls")][part::3]:
        text = golden[name]
        prompt = golden[name.split(".")[1]]
        options = dict(re.findall(r"\.(threshold|edit|post)(\d+(?:\.\d+)?)", name))
        edit = float(options["edit"])
        sampler = JointThreshold(float(options["threshold"]), None if edit > 1 else edit, int(options["post"]), GREEDY)
        length = -(-(prompt.shape[1] + 20) // 8) * 8
        ends = (90,) if "early" in name else ()
        written = lm.generate(prompted(prompt, length, lm.vocab.mask_id), Blockwise(sampler=sampler, end_ids=ends))
        assert torch.equal(written.tokens[:, prompt.shape[1] :][:, : text.shape[-1]], text.view(1, -1)), name
        # Published: one call more for each block even if nothing may be replaced.
        assert written.nfe == int(golden[f"{name}.calls"]) if edit <= 1 else written.nfe < golden[f"{name}.calls"], name


@pytest.mark.parametrize("family", [*SIZES, "llada_moe_tiny"])
def test_round_trip(family: str, tmp_path: Path) -> None:
    lm = unmask.load(GOLDEN / family)
    name = json.loads((GOLDEN / family / "config.json").read_text())["model_type"]
    unmask.save(lm, tmp_path / "out", upstream_format="lladamoe" if name == "llada" else name)
    again = unmask.load(tmp_path / "out")
    assert again.denoiser.config == lm.denoiser.config
    stored, written = (load_file(folder / "model.safetensors") for folder in (GOLDEN / family, tmp_path / "out"))
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[key], written[key]) for key in stored)


@pytest.mark.parametrize(
    ("family", "sampler"),
    [
        ("sdar_tiny", Blockwise(sampler=Threshold(0.85), end_ids=(97,))),
        ("llada_moe_tiny", Blockwise(32, Confidence(32, params=GREEDY), end_ids=(90,))),
        ("llada2_moe_tiny", Blockwise(sampler=Threshold(0.95, GREEDY), end_ids=(90,))),
        ("fastdllm2_tiny", Blockwise(sampler=Threshold(1.0, GREEDY), sub_block_size=8, end_ids=(90,))),
        ("a2d_llama_tiny", Blockwise(32, Confidence(32, params=GREEDY), end_ids=(90,))),
    ],
)
def test_a_family_comes_with_its_sampler(family: str, sampler: Blockwise, tmp_path: Path) -> None:
    """It is kept in our folders too, and every part of it can be overridden."""
    lm = unmask.load(GOLDEN / family)
    assert default_sampler(lm.denoiser) == sampler
    again = unmask.load(unmask.save(lm, tmp_path / "own"))
    assert again.denoiser.config == lm.denoiser.config
    assert default_sampler(again.denoiser) == sampler
    hot = make_sampler(lm.denoiser, params=SamplingParams(0.5))
    assert hot == replace(sampler, sampler=replace(sampler.inner, params=SamplingParams(0.5)))
    assert make_sampler(lm.denoiser, "random-order", 3).steps == 3
    canvas = prompted(torch.tensor([[1, 2, 3]]), 12, lm.vocab.mask_id)
    assert torch.equal(lm.generate(canvas).tokens, lm.generate(canvas, sampler).tokens)


def test_options_change_a_models_own_sampler() -> None:
    denoiser = unmask.load(GOLDEN / "llada_moe_tiny").denoiser
    inner, ends = Confidence(32, params=GREEDY), (90,)
    assert make_sampler(denoiser, steps=4) == Blockwise(32, replace(inner, steps=4), end_ids=ends)
    assert make_sampler(denoiser, block_size=8, cache="dual", measure="margin") == Blockwise(
        8, replace(inner, measure="margin"), "dual", ends
    )
    with pytest.raises(ValueError, match="threshold is for threshold or joint-threshold: name that sampler, too"):
        make_sampler(denoiser, threshold=0.5)


def test_llada21_is_known_by_its_name(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "llada2_moe_tiny", tmp_path / "LLaDA2.1-mini")
    assert unmask.load(folder).denoiser.own_sampler == Blockwise(sampler=JointThreshold(0.95, 0.9, 16, GREEDY))


def test_a_model_of_another_process_does_not_use_the_familys_sampler() -> None:
    config = unmask.load(GOLDEN / "sdar_tiny").denoiser.config
    backbone = replace(config.backbone, causal=True)  # type: ignore[type-var]
    autoregressive = replace(config, backbone=backbone, objective=NextToken()).build()
    assert isinstance(default_sampler(autoregressive), Autoregressive)


def test_ends_of_a_turn_end_an_answer_too(tmp_path: Path) -> None:
    """As in SDAR's `generation_config.json`."""
    folder = shutil.copytree(GOLDEN / "sdar_tiny", tmp_path / "sdar")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [94, 97]}))
    lm = unmask.load(folder)
    assert lm.vocab.end_ids == (97, 94)
    again = unmask.load(unmask.save(lm, tmp_path / "out", upstream_format="sdar"))
    assert again.vocab == lm.vocab
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [940]}))
    with pytest.raises(ValueError, match="the id 940 that ends an answer must be in the vocabulary"):
        unmask.load(folder)


def test_illada(tmp_path: Path) -> None:
    """iLLaDA is LLaDA with shared keys and values, one matrix for embedding and head, and the mask 5."""
    backbone = DiTConfig(32, 2, 4, 64, 0.0, tie_embeddings=True, llama=LlamaBlock(48, kv_heads=2))
    vocab = unmask.Vocab(155_136, 5, 4)
    lm = LanguageModel(ModelConfig(vocab, backbone, MDLM(schedule=LogLinear(eps=0.0))).build().eval())
    folder = unmask.save(lm, tmp_path / "illada", upstream_format="llada")
    config = json.loads((folder / "config.json").read_text())
    assert config["weight_tying"]
    assert config["n_kv_heads"] == 2
    assert "model.transformer.ff_out.weight" not in load_file(folder / "model.safetensors")
    del config["mask_token_id"]
    config["embedding_size"] = None  # then the vocabulary is its size
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").unlink()
    again = unmask.load(folder)
    assert again.vocab == vocab
    tokens = torch.tensor([[5, 7, 5, 9]])
    assert torch.equal(logits(again, tokens), logits(lm, tokens))
