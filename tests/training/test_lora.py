"""Low-rank fine-tuning: begins where the network is, moves A and B only, and folds into a plain network.

On ranks, this file is also its own worker: `test_lowrank.py FOLDER`.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from processes import run_program
from unmask import MDLM, DiTConfig, ModelConfig, TimeConditioning, Vocab
from unmask.backbones.dit import LlamaBlock, LocalInit
from unmask.config import from_json, to_json
from unmask.data.loader import Loader, PromptCompletionRows
from unmask.distributed import Distributed, init_distributed
from unmask.training._checkpoint import CheckpointStore
from unmask.training._parallelism import DDP, FSDP
from unmask.training.config import TrainingConfig
from unmask.training.denoising import build_denoising_trainer
from unmask.training.lora import LoRA, merge_lora
from unmask.training.optim import AdamW, AnyOptimizer, Muon
from unmask.training.trainer import Trainer

END, MASK = 0, 9
SMALL = DiTConfig(width=32, depth=2, heads=2, max_length=16, dropout=0.0)
KINDS = {
    "plain": SMALL,
    "timed": replace(SMALL, time_conditioning=TimeConditioning(width=8)),
    "llama": replace(SMALL, heads=4, llama=LlamaBlock(intermediate_size=48, kv_heads=2, qkv_bias=True)),
    "local": replace(SMALL, local_init=LocalInit(kernel_size=3, offsets=(-1, 1))),
    "shifted": replace(SMALL, shift_logits=True),
}


class Stream:
    """Pairs whose answer begins as the prompt does and goes on in one of two ways."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        prompts = [random.integers(1, MASK, random.integers(1, 6)).tolist() for _ in range(60)]
        pairs = [[*prompt, prompt[0], 6, 7, *[8] * (len(prompt) % 2), END] for prompt in prompts]
        self.prompt_lengths = np.array([len(prompt) for prompt in prompts])
        self.document_ends = np.cumsum([len(pair) for pair in pairs])
        self.ids = np.array([id_ for pair in pairs for id_ in pair])
        self.num_tokens = len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


SETTINGS = TrainingConfig(
    steps=80,
    batch_size=8,
    microbatch_size=3,
    optimizer=AdamW(lr=1e-2, eps=1e-4),
    warmup_steps=3,
    bf16=False,
    ema_decay=0.9,
)


def network(config: DiTConfig = SMALL, dtype: torch.dtype = torch.float32) -> Any:
    """With random matrices everywhere, so that every part of it matters."""
    torch.manual_seed(0)
    denoise = ModelConfig(Vocab(10, MASK), config, MDLM()).build().to(dtype)
    for parameter in denoise.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    return denoise


def adapted(config: DiTConfig = SMALL, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    denoise = network(config, dtype)
    LoRA(**{"rank": 4, **options}).apply(denoise)
    return denoise


def moved(denoiser: nn.Module) -> None:
    """As if it had been trained: B is no longer zero."""
    torch.manual_seed(1)
    for name, parameter in denoiser.named_parameters():
        if name.endswith("weight.0.b"):
            nn.init.normal_(parameter, std=0.1)


def run_of(denoiser: Any, where: Distributed = Distributed(), **changes: Any) -> Trainer:  # noqa: B008
    settings = replace(SETTINGS, **changes)
    loader = Loader(Stream(), PromptCompletionRows(16), settings.batch_size)
    return build_denoising_trainer(denoiser, denoiser.objective, loader, settings, where)


def answers(denoiser: Any) -> Tensor:
    random = torch.Generator().manual_seed(0)
    z = torch.randint(0, 10, (3, 12), generator=random)
    log_x: Tensor = denoiser(z, torch.rand(3, 1, generator=random), z % 2 == 1)
    return log_x


def trainable(denoiser: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in denoiser.named_parameters() if p.requires_grad}


def base_of(denoiser: nn.Module) -> dict[str, Tensor]:
    """The frozen weights under their plain names."""
    frozen = {name: p for name, p in denoiser.named_parameters() if not p.requires_grad}
    return {name.replace("parametrizations.weight.original", "weight"): p for name, p in frozen.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bf16", [False, True])
@torch.no_grad()
def test_the_first_prediction_is_unchanged(kind: str, bf16: bool) -> None:
    plain, denoise = network(KINDS[kind]), adapted(KINDS[kind])
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert torch.equal(answers(plain), answers(denoise))
        moved(denoise)
        assert not torch.allclose(answers(plain), answers(denoise), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_merging_gives_a_plain_network_that_computes_the_same(kind: str) -> None:
    plain, denoise = network(KINDS[kind], torch.float64), adapted(KINDS[kind], torch.float64)
    moved(denoise)
    said = answers(denoise)
    merge_lora(denoise)
    torch.testing.assert_close(answers(denoise), said, atol=1e-12, rtol=0)
    state = denoise.state_dict()
    assert {name: w.shape for name, w in state.items()} == {n: w.shape for n, w in plain.state_dict().items()}
    assert {type(m) for m in denoise.modules()} == {type(m) for m in plain.modules()}
    assert len(trainable(denoise)) == len(list(denoise.parameters()))
    plain.load_state_dict(state)
    assert torch.equal(answers(plain), answers(denoise))
    before = network(KINDS[kind], torch.float64).state_dict()
    layers = ("attention.qkv", "attention.out", "mlp.0", "mlp.2")
    inside = {f"backbone.layers.{i}.{layer}.weight" for i in range(2) for layer in layers}
    assert {name for name, weight in before.items() if bool((weight != state[name]).any())} == inside


@torch.no_grad()
def test_a_weight_is_the_sum_and_the_fraction() -> None:
    denoise = adapted(rank=2, alpha=6.0, target_modules=("attention.qkv",), dtype=torch.float64)
    moved(denoise)
    names = {name.split(".parametrizations")[0] for name in trainable(denoise)}
    assert names == {f"backbone.layers.{i}.attention.qkv" for i in range(2)}
    layer = denoise.backbone.layers[1].attention.qkv
    difference, original = layer.parametrizations.weight[0], layer.parametrizations.weight.original
    assert (difference.a.shape, difference.b.shape) == ((2, 32), (96, 2))
    torch.testing.assert_close(layer.weight, original + 3 * difference.b @ difference.a)


def test_half_a_network_keeps_its_type_and_whole_differences() -> None:
    denoise = adapted(dtype=torch.bfloat16)
    before = denoise.backbone.layers[0].mlp[0].base.weight.clone()
    assert before.dtype == torch.bfloat16
    assert {p.dtype for p in trainable(denoise).values()} == {torch.float32}
    merge_lora(denoise)
    assert torch.equal(denoise.backbone.layers[0].mlp[0].weight, before)  # B is zero


def test_gradients_are_of_a_and_b_only() -> None:
    denoise = adapted()
    assert len(trainable(denoise)) == 2 * 4 * 2
    for with_differences in (False, True):
        if with_differences:
            moved(denoise)
        denoise.zero_grad()
        answers(denoise).where(torch.arange(10) != MASK, 0).square().sum().backward()
        touched = {n for n, p in denoise.named_parameters() if p.grad is not None and bool(p.grad.any())}
        # While B is zero, A has nothing to say and so nothing to learn.
        assert touched == {n for n in trainable(denoise) if with_differences or n.endswith(".b")}


def test_differences_start_from_their_seed_alone() -> None:
    torch.manual_seed(5)
    one, two, other = adapted(seed=1), adapted(seed=1), adapted(seed=2)
    for name, parameter in trainable(one).items():
        assert torch.equal(parameter, trainable(two)[name])
        assert torch.equal(parameter, trainable(other)[name]) == name.endswith(".b")
    starts = [p for name, p in trainable(one).items() if name.endswith("qkv.parametrizations.weight.0.a")]
    assert not torch.equal(starts[0], starts[1])


@torch.no_grad()
def nats_per_token(run: Trainer) -> float:
    """Of some batches, always the same and with the same noise."""
    nats = counted = 0.0
    for step in range(8):
        batch, random = run.batches.batch(step, 0, run.config.batch_size), torch.Generator().manual_seed(step)
        nats += float(run.model.objective.token_nll(run.model, batch, random).sum())
        counted += float(batch.loss_mask.sum())
    return nats / counted


@pytest.mark.parametrize("optimizer", [AdamW(lr=1e-2), Muon(lr=1e-2)], ids=lambda o: type(o).__name__)
def test_fine_tuning_learns_pairs_and_leaves_the_network_alone(optimizer: AnyOptimizer) -> None:
    denoise = adapted(rank=8)
    run = run_of(denoise, optimizer=optimizer, microbatch_size=None, batch_size=16)
    at_first = nats_per_token(run)
    shown: list[tuple[Tensor, int]] = []
    hook = denoise.register_forward_pre_hook(lambda _, given: shown.append((given[0], run.state.step)))
    for _ in range(40):
        run.step()
    hook.remove()
    assert nats_per_token(run) < 0.4 * at_first
    for z, step in shown:
        batch = run.batches.batch(step, 0, run.config.batch_size)
        assert batch.prompt_mask is not None
        assert torch.equal(z[batch.prompt_mask], batch.tokens[batch.prompt_mask]), "a prompt is never hidden"
        assert bool((z == MASK).any())
    assert len(shown) == 40
    base, before = base_of(denoise), network().state_dict()
    assert base.keys() == before.keys()
    assert all(torch.equal(before[name], weight) for name, weight in base.items())
    size = sum(p.numel() for p in trainable(denoise).values())
    held = [v for o in run.optimizers for s in o.state.values() for v in s.values() if v.numel() > 1]
    assert sum(v.numel() for v in held) == size * (2 if isinstance(optimizer, AdamW) else 1)


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    one = run_of(adapted())
    for _ in range(3):
        one.step()
    one.save_checkpoint(CheckpointStore(tmp_path))
    two = run_of(adapted())
    two.load_checkpoint(CheckpointStore(tmp_path), 3)
    assert [one.step()["loss"] for _ in range(3)] == [two.step()["loss"] for _ in range(3)]
    averages = []
    for run in (one, two):
        run.model.load_state_dict(run.ema.weights, strict=False)
        merge_lora(run.model)
        averages.append(run.model.state_dict())
    assert all(torch.equal(weight, averages[1][name]) for name, weight in averages[0].items())
    fresh = network().state_dict()
    assert not torch.equal(averages[0]["backbone.layers.0.mlp.0.weight"], fresh["backbone.layers.0.mlp.0.weight"])
    assert torch.equal(averages[0]["backbone.lm_head.weight"], fresh["backbone.lm_head.weight"])


def test_computing_again_and_copying_change_nothing() -> None:
    runs = [
        run_of(adapted()),
        run_of(adapted(), gradient_checkpointing=True),
        run_of(copy.deepcopy(adapted())),
    ]
    curves = [[run.step()["loss"] for _ in range(3)] for run in runs]
    assert curves[0] == curves[1] == curves[2]


def test_what_cannot_be_done_is_refused() -> None:
    for options, message in (
        ({"rank": 0}, "^rank must be at least 1; got 0$"),
        ({"alpha": 0.0}, "^alpha must be above 0; got 0.0$"),
        (
            {"target_modules": ("att",)},
            "^no linear layer of a block is called 'att'; there are attention.out, attent",
        ),
        ({"rank": 33}, "^rank 33 is more than backbone.layers.0.attention.qkv can have, 32; choose less$"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted(**options)
    denoise = adapted()
    with pytest.raises(ValueError, match=r"^this network has LoRA adapters already: call merge_lora\(\) first$"):
        LoRA().apply(denoise)
    merge_lora(denoise)
    with pytest.raises(ValueError, match=r"^this network has no LoRA adapters to merge"):
        merge_lora(denoise)


def test_it_is_json() -> None:
    chosen = LoRA(3, 6.0, ("mlp.0",), 7)
    assert from_json(LoRA, to_json(chosen)) == chosen


def curve_of(where: Distributed, parallelism: DDP | FSDP, folder: Path) -> list[float]:
    """Four steps, saved after two, of a network that was spread over the ranks."""
    denoise = adapted()
    run = run_of(denoise, where, parallelism=parallelism, gradient_checkpointing=isinstance(parallelism, FSDP))
    before = {name: whole(weight) for name, weight in base_of(denoise).items()}
    losses = []
    for step in range(4):
        if step == 2:
            run.save_checkpoint(CheckpointStore(folder, where))
        losses.append(run.step()["loss"])
    assert all(torch.equal(before[name], whole(weight)) for name, weight in base_of(denoise).items())
    return losses


def whole(weight: Tensor) -> Tensor:
    full = getattr(weight, "full_tensor", None)
    return weight.detach().clone() if full is None else full()


SPREAD: dict[str, DDP | FSDP] = {"replicated": DDP(), "sharded": FSDP()}


def test_ranks_give_the_same_curve_and_checkpoints_move_between_them(tmp_path: Path) -> None:
    alone = curve_of(Distributed(), DDP(), tmp_path / "alone")
    done = run_program(__file__, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    for name in SPREAD:
        found = json.loads((tmp_path / name / "losses.json").read_text())
        assert found == pytest.approx(alone, abs=1e-5)
        run = run_of(adapted())
        run.load_checkpoint(CheckpointStore(tmp_path / name), 2)
        assert [run.step()["loss"] for _ in range(2)] == pytest.approx(alone[2:], abs=1e-5)


def main() -> None:
    torch.set_num_threads(1)
    with init_distributed() as where:
        for name, parallelism in SPREAD.items():
            folder = Path(sys.argv[1]) / name
            losses = curve_of(where, parallelism, folder)
            if where.is_main:
                (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
