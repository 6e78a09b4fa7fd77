"""State-space networks through the seams: sampled, trained, resumed, adapted, exported and served as any other."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
import tiny_models
import training_worker as worker
import unmask
from backbones.test_ssm import CONFIGS, build
from oracle import chi_square_p_value
from test_experiment import TEXT
from unmask import MDLM, Ancestral, Autoregressive, Blockwise, CaduceusConfig, DiMambaConfig, MambaConfig, NextToken
from unmask.backbones.state_space import SSMConfig, StateSpace
from unmask.cli import main
from unmask.data.loader import Loader, Wrapped
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.process import shift_right
from unmask.distributed import Distributed
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.ops import fast_paths
from unmask.pretrained import export_onnx
from unmask.sampling import Sampler
from unmask.sampling.blockwise import NoCache
from unmask.sampling.canvas import Canvas
from unmask.training._checkpoint import CheckpointStore
from unmask.training._compile import compile_blocks
from unmask.training.denoising import build_denoising_trainer
from unmask.training.lora import LoRA, merge_lora
from unmask.training.optim import AdamW
from unmask.training.trainer import Trainer
from unmask.types import Batch, Vocab

KINDS = ["mamba", "caduceus-ps", "dimamba"]
SAMPLERS = [
    sampler
    for sampler in tiny_models.all_samplers()
    if tiny_models.is_compatible(sampler, MDLM())
    and (not isinstance(sampler, Blockwise) or isinstance(sampler.cache, NoCache))
]


@pytest.mark.parametrize("name", ["caduceus-ps", "dimamba"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_every_sampler_of_masked_diffusion_fills_the_holes(name: str, sampler: Sampler) -> None:
    """And a sequence is the same alone and in a batch."""
    model = build(CONFIGS[name])
    tokens = torch.full((3, 9), 4)
    tokens[1, 2:4] = 1
    *_, z = sampler.run(model, Canvas(tokens, (5, 6, 7)))
    assert (z != 4).all()
    assert (z[1, 2:4] == 1).all()
    *_, alone = sampler.run(model, Canvas(tokens[1:2], (6,)))
    assert torch.equal(alone[0], z[1])


@pytest.mark.parametrize("policy", ["prefix", "dual"])
def test_a_cache_of_both_directions_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="Caduceus has no cache: sample without one"):
        list(
            Blockwise(3, Ancestral(2), cache=policy).run(
                build(CONFIGS["caduceus-ph"]), Canvas(torch.full((1, 6), 4), (0,))
            )
        )


def test_one_token_at_a_time_is_what_the_whole_pass_says() -> None:
    model = build(CONFIGS["mamba"])
    *_, z = Autoregressive(SamplingParams(temperature=0)).run(model, Canvas(torch.full((2, 10), 4), (0, 1)))
    whole = model(shift_right(z, model.vocab), torch.zeros(2, 1), torch.ones_like(z, dtype=torch.bool))
    assert torch.equal(whole.argmax(-1).view(2, 10), z)


STRANDS = (1, 0, 2, 3)


def tiny_world(equivariant: bool) -> Denoiser:
    """Of the enumerated world: token 0 is the complement of 1, and 2 and the mask are their own."""
    config = CaduceusConfig(
        width=8, depth=2, state_space=StateSpace(2), equivariant=equivariant, complement_ids=STRANDS
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ModelConfig(oracle.VOCAB, config, MDLM(schedule=oracle.LINEAR)).build().double().eval()
        for name, parameter in model.named_parameters():
            if "A_log" not in name and "dt_proj.bias" not in name:
                torch.nn.init.normal_(parameter, std=0.7)
    return model.requires_grad_(False)


def strand_of(state: oracle.State) -> oracle.State:
    return tuple(STRANDS[token] for token in reversed(state))


@pytest.mark.thorough
def test_texts_and_their_other_strands_are_equally_probable() -> None:
    """The exact law of the sampler, by enumeration; that of one strand alone is another."""
    for equivariant in (True, False):
        exact = oracle.ancestral_distribution(tiny_world(equivariant), oracle.LINEAR, 4)
        gap = max(abs(exact[x] - exact[strand_of(x)]) for x in exact)
        assert gap < 1e-9 if equivariant else gap > 1e-2
    model = tiny_world(True)
    seen = oracle.sample_counts(Ancestral(4), model, 1600, 64)
    exact = oracle.ancestral_distribution(model, oracle.LINEAR, 4)
    turned = {strand_of(x): count for x, count in seen.items()}
    assert chi_square_p_value(seen, exact) > 1e-3
    assert chi_square_p_value(turned, exact) > 1e-3
    one = tiny_world(False)
    exact = oracle.ancestral_distribution(one, oracle.LINEAR, 4)
    seen = oracle.sample_counts(Ancestral(4), one, 1600, 64)
    assert chi_square_p_value({strand_of(x): count for x, count in seen.items()}, exact) < 1e-3


def fresh(name: str, **changes: Any) -> Trainer:
    given: dict[str, Any] = {"optimizer": AdamW(lr=1e-2, weight_decay=0.1), "microbatch_size": None, **changes}
    settings = replace(worker.TRAINING, **given)
    config = CONFIGS[name]
    objective = NextToken() if config.causal else MDLM()
    torch.manual_seed(0)
    denoiser = ModelConfig(Vocab(7, 6), config, objective).build()
    loader = Loader(worker.CycleTokens(), Wrapped(16), settings.batch_size)  # type: ignore[arg-type]
    return build_denoising_trainer(denoiser, objective, loader, settings, Distributed())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mamba", "caduceus-ph", "caduceus-ps", "dimamba"])
def test_the_loss_falls(name: str) -> None:
    run = fresh(name, steps=40, batch_size=16)
    curve = [run.step()["loss"] for _ in range(40)]
    assert sum(curve[-8:]) < 0.93 * sum(curve[:8])


@pytest.mark.parametrize("name", KINDS)
def test_a_resumed_run_is_the_same_run(name: str, tmp_path: Path) -> None:
    def weights(run: Trainer) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in run.model.parameters()]

    whole = fresh(name, steps=4)
    for _ in range(4):
        whole.step()
    half = fresh(name, steps=4)
    for _ in range(2):
        half.step()
    store = CheckpointStore(tmp_path)
    half.save_checkpoint(store)
    again = fresh(name, steps=4)
    again.load_checkpoint(store, 2)
    for _ in range(2):
        again.step()
    assert all(map(torch.equal, weights(whole), weights(again)))


@pytest.mark.parametrize("name", KINDS)
def test_computing_again_and_plain_torch_change_nothing(name: str) -> None:
    plain, again = fresh(name), fresh(name, gradient_checkpointing=True)
    losses = [plain.step()["loss"] for _ in range(2)]
    assert [again.step()["loss"] for _ in range(2)] == losses
    with fast_paths(False):
        reference = fresh(name)
        assert [reference.step()["loss"] for _ in range(2)] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_the_same_up_to_its_rounding(name: str) -> None:
    model = copy.deepcopy(build(CONFIGS[name])).float()
    z, everywhere = torch.randint(0, 7, (2, 12)), torch.ones(2, 12, dtype=torch.bool)
    with torch.inference_mode():
        exact = model(z, torch.full((2, 1), 0.5), everywhere)
        model.to_bf16()
        rounded = model(z, torch.full((2, 1), 0.5), everywhere)
    finite = exact.isfinite()
    assert 0 < float((rounded[finite] - exact[finite]).abs().mean()) < 0.05 * float(exact[finite].abs().mean())


@pytest.mark.parametrize("name", ["mamba", "caduceus-ps"])
def test_low_rank_adapters_train_and_merge(name: str) -> None:
    model = copy.deepcopy(build(CONFIGS[name])).float()
    z = torch.randint(0, 4, (2, 8))
    before = model(z, torch.ones(2, 1), z < 9)
    LoRA(rank=2).apply(model)
    torch.testing.assert_close(model(z, torch.ones(2, 1), z < 9), before)
    model.train()
    objective = model.objective
    objective.token_nll(model, Batch(z), torch.Generator().manual_seed(0)).sum().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {n.rpartition(".parametrizations")[0].rpartition(".")[2] for n in trained} == {
        "in_proj",
        "out_proj",
        "x_proj",
    }  # dt_proj is of rank 1 here: no adapter of rank 2 fits
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.01)
    adapted = model.eval()(z, torch.ones(2, 1), z < 9)
    merge_lora(model)
    torch.testing.assert_close(model(z, torch.ones(2, 1), z < 9), adapted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the compiler
@pytest.mark.parametrize("name", KINDS)
def test_compiled_blocks_are_eager_blocks(name: str) -> None:
    eager, compiled = fresh(name), fresh(name)
    compile_blocks(compiled.model)
    for _ in range(3):
        assert compiled.step()["loss"] == pytest.approx(eager.step()["loss"], rel=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_folder_gives_the_same_network(name: str, tmp_path: Path) -> None:
    model = LanguageModel(copy.deepcopy(build(CONFIGS[name])).float())
    loaded = unmask.load(unmask.save(model, tmp_path / "model"))
    assert loaded.denoiser.config == model.denoiser.config
    z, everywhere = torch.randint(0, 7, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    answers = [lm.denoiser(z, torch.full((2, 1), 0.5), everywhere) for lm in (model, loaded)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_that_asks_for_more_than_its_weights_is_refused(name: str, tmp_path: Path) -> None:
    folder = unmask.save(LanguageModel(copy.deepcopy(build(CONFIGS[name])).float()), tmp_path / "model")
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for field, value, sentence in (("depth", 10**9, "1,000,000,000 layers"), ("width", 10**9, "are only")):
        changed = {**config, "backbone": {**config["backbone"], field: value}}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=sentence):
            unmask.load(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name == "mamba" else pytest.mark.slow) for name in KINDS]
)
def test_onnx_graphs_of_any_length_agree(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    lm = LanguageModel(copy.deepcopy(build(CONFIGS[name])).float())
    file = export_onnx(lm, tmp_path / "model.onnx")
    graph = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch, length in ((1, 1), (2, 7), (3, 40)):
        z, t = torch.randint(0, 7, (batch, length)), torch.rand(batch, 1)
        given = {"tokens": z.numpy(), "t": t.numpy()}
        (got,) = graph.run(["log_x"], {each.name: given[each.name] for each in graph.get_inputs()})
        expected = lm.denoiser(z, t, torch.ones_like(z, dtype=torch.bool)).view(batch, length, -1)
        torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("--objective", "ar", "--set", "backbone=MambaConfig"), MambaConfig),
        (("--set", "backbone=CaduceusConfig"), CaduceusConfig),
        (("--set", "backbone=DiMambaConfig", "objective.exact_mask_counts=false"), DiMambaConfig),
    ],
    ids=["mamba", "caduceus", "dimamba"],
)
def test_the_command_line_trains_samples_scores_and_exports(
    words: tuple[str, ...],
    kind: type[SSMConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["unmask", *arguments])
        main()
        return capsys.readouterr().out

    (tmp_path / "fox.txt").write_text(TEXT)
    out = str(tmp_path / "run")
    sizes = ("backbone.width=16", "backbone.depth=1", "backbone.max_length=16", "layout.length=16")
    data = ("--sources", str(tmp_path / "fox.txt"), "--tokenizer", "bytes", "--steps", "3", "--batch-size", "4")
    command("train", "stdlib-tiny", *words, *sizes, "unigram_bias_init=false", *data, "--out", out)
    lm = unmask.load(out)
    assert isinstance(lm.denoiser.config.backbone, kind)
    steps = () if kind is MambaConfig else ("--steps", "2")
    assert len(command("sample", out, "--length", "8", *steps).strip()) > 0
    assert "nats" in command("score", out, "the quick")
