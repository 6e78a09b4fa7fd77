"""SSD-LM: the published schedule, projections, steps, decodes and losses; and what every model here promises."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from unmask import SSDLM, Batch, DiTConfig, LanguageModel, ModelConfig, SamplingParams, Tokenizer, Vocab, load, save
from unmask.backbones.hf import HFBackboneConfig
from unmask.baselines import SimplexBlocks
from unmask.baselines._simplex import SimplexDiffusion, SimplexState, alpha_bar, draw_kept, nucleus
from unmask.sampling.canvas import Canvas

VOCAB = Vocab(7, 4)
NETWORK = DiTConfig(width=16, depth=2, heads=2, max_length=12, dropout=0.0)


@pytest.fixture(scope="module")
def step_golden(golden: Path) -> dict[str, torch.Tensor]:
    return load_file(golden / "ssdlm_step" / "expected.safetensors")


@pytest.mark.parametrize("steps", [1000, 2500, 5000])
def test_the_schedule_is_the_published_one(step_golden: dict[str, torch.Tensor], steps: int) -> None:
    published = {name: step_golden[f"schedule.T{steps}.{name}"].double() for name in ("t", "alpha_bar")}
    at, before = alpha_bar(published["t"] / steps), alpha_bar((published["t"] - 1) / steps)
    close = {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(at, published["alpha_bar"], **close)
    torch.testing.assert_close(before, step_golden[f"schedule.T{steps}.alpha_bar_before"].double(), **close)
    close["atol"] = 1e-4  # quotients of the published float32 numbers, which are small near t = T
    torch.testing.assert_close(at / before, step_golden[f"schedule.T{steps}.alpha"].double(), **close)
    beta = 1 - at / before
    torch.testing.assert_close(beta, step_golden[f"schedule.T{steps}.beta"].double(), **close)
    beta_tilde = (1 - before) / (1 - at) * beta
    torch.testing.assert_close(beta_tilde, step_golden[f"schedule.T{steps}.beta_tilde"].double(), **close)


@pytest.mark.parametrize("top_p", [0.0, 0.2, 0.5, 0.9, 0.99])
def test_projections_are_the_published_ones(step_golden: dict[str, torch.Tensor], top_p: float) -> None:
    process, logits = SimplexDiffusion(), step_golden["logits"]
    kept = nucleus(logits, top_p)
    assert torch.equal(kept, step_golden[f"nucleus.top_p{top_p}"])
    assert torch.equal(process.one_hot(kept), step_golden[f"project.even.top_p{top_p}"])
    published_draw = step_golden[f"project.sampling.top_p{top_p}"] > 0
    uniform = torch.rand(15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = draw_kept(logits.flatten(0, 1), kept.flatten(0, 1), uniform).view(kept.shape)
    for one in (published_draw, drawn):
        assert (one.sum(-1) == 1).all()
        assert (one & ~kept).sum() == 0


def test_a_step_and_the_noise_are_the_published_ones(golden: Path, step_golden: dict[str, torch.Tensor]) -> None:
    config = json.loads((golden / "ssdlm_step" / "config.json").read_text())
    process, vocab = SimplexDiffusion(scale=config["K"]), Vocab(41, 40)

    def with_mask(values: torch.Tensor) -> torch.Tensor:
        return F.pad(values, (0, 1))

    t, z = step_golden["t"][:, None].double() / config["T"], with_mask(step_golden["z"])
    clean = process.one_hot(F.one_hot(step_golden["w"], 41).bool())
    noisy = process.add_noise(clean, t, z, vocab)
    # The published 1 - abar is a difference of float32 numbers, so its root near t = 0 has four digits.
    torch.testing.assert_close(noisy[..., :40], step_golden["forward.logits"], rtol=1e-5, atol=1e-4)
    assert (noisy[..., 40] == -torch.inf).all()
    projected = with_mask(process.one_hot(nucleus(step_golden["logits"], config["next_uses_top_p"])))
    before = process.add_noise(projected, t - 1 / config["T"], z, vocab)
    torch.testing.assert_close(before[..., :40], step_golden["next.logits"], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(before.softmax(-1)[..., :40], step_golden["next.simplex"], rtol=1e-4, atol=1e-7)


@dataclass(frozen=True)
class GivenNoise:
    """The normal numbers [T + 1, B, n, V] of a published decode, with a column for the mask."""

    numbers: torch.Tensor

    def normal(self, step: int) -> torch.Tensor:
        return F.pad(self.numbers[step], (0, 1))


def published_model(folder: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """The tiny RoBERTa of the golden folder as an SSD-LM of ours, whose mask is a 41st token."""
    pytest.importorskip("transformers")
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("ssdlm")
    objective = SSDLM(settings["block"], settings["K"], settings["T"])
    with torch.random.fork_rng():
        model = ModelConfig(Vocab(41, 40), HFBackboneConfig(json.dumps(config)), objective).build().eval()
    weights = load_file(folder / "model.safetensors")
    own = model.state_dict()
    for name, tensor in weights.items():
        if name.startswith(("roberta", "lm_head")):
            name = f"backbone.model.{name}"
        rows = tuple(slice(0, size) for size in tensor.shape)
        targets = {"backbone.model.lm_head.bias": ["backbone.lm_head.bias", "backbone.model.lm_head.bias"]}
        for target in targets.get(name, [name]):
            if target in own:
                own[target][rows] = tensor
    own["backbone.lm_head.weight"][:40] = weights["roberta.embeddings.word_embeddings.weight"]
    model.load_state_dict(own)
    return model.requires_grad_(False), settings, load_file(folder / "expected.safetensors")


def test_a_whole_decode_is_the_published_one(golden: Path) -> None:
    model, settings, expected = published_model(golden / "ssdlm_tiny")
    sampler = SimplexBlocks(settings["T"], SamplingParams(top_p=settings["top_p"]))
    context, fed = expected["context"], []
    handle = model.register_forward_pre_hook(lambda _, args: fed.append(args[0].block))
    for block in range(settings["depth"]):
        noise: Any = GivenNoise(expected["noise"][block])
        fed.clear()
        answers = torch.stack(list(sampler.block_steps(model, context, noise)))[..., :40]
        torch.testing.assert_close(
            torch.stack(fed).softmax(-1)[..., :40], expected["simplex"][block], rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(answers, expected["logits"][block].log_softmax(-1), rtol=1e-5, atol=1e-5)
        context = torch.cat([context, answers[-1].argmax(-1)], 1)
    handle.remove()
    assert torch.equal(context[:, expected["context"].shape[1] :], expected["ids"])


def test_the_training_loss_is_the_published_one(golden: Path) -> None:
    model, settings, expected = published_model(golden / "ssdlm_tiny")
    t = expected["train.t"][:, None].double() / settings["T"]
    noise = F.pad(expected["train.noise"], (0, 1))
    loss = model.objective.block_loss(model, Batch(expected["train.rows"]), settings["train_context"], t, noise)
    torch.testing.assert_close(loss.total / loss.count, expected["train.loss"], rtol=1e-5, atol=0)


def tiny(objective: SSDLM = SSDLM(block_size=5), network: DiTConfig = NETWORK) -> Any:  # noqa: B008
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(VOCAB, network, objective).build().double().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        torch.nn.init.normal_(model.embed_sum_layer.weight, std=10.0)  # so that noise decides
    return model.requires_grad_(False)


def tokens(rows: int, length: int = 12, seed: int = 0) -> torch.Tensor:
    clean = torch.tensor([0, 1, 2, 3, 5, 6])
    return clean[torch.randint(6, (rows, length), generator=torch.Generator().manual_seed(seed))]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("length", [2, 5, 12])
def test_a_split_batch_gets_the_same_noise(length: int) -> None:
    model, x = tiny(), tokens(6, length)
    whole = model.objective.training_loss(model, Batch(x), generator())
    parts = [
        model.objective.training_loss(model, Batch(x[i : i + 2], row_offset=i, global_batch_size=6), generator())
        for i in (0, 2, 4)
    ]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total, rtol=1e-9, atol=0)
    assert sum(int(part.count) for part in parts) == int(whole.count) > 0


def test_padding_and_prompts_are_not_counted() -> None:
    model, x = tiny(), tokens(20)
    valid, prompt = torch.ones_like(x, dtype=torch.bool), torch.zeros_like(x, dtype=torch.bool)
    valid[:, 9:], prompt[:, :3] = False, True
    counts = set()
    for seed in range(20):
        loss = model.objective.training_loss(model, Batch(x, valid, prompt), generator(seed))
        assert loss.total.isfinite()
        counts.add(int(loss.count) // 20)
    assert counts == {2, 3, 4, 5}  # of blocks of five at 0, ..., 7 those of 3, ..., 8


def test_only_tokens_before_a_block_are_read() -> None:
    model, x = tiny(), tokens(3)
    changed = x.clone()
    changed[:, 10:] = 5 - changed[:, 10:].clamp(max=5)
    t, noise = torch.full((3, 1), 0.5).double(), torch.randn(3, 5, 7, generator=generator()).double()
    losses = [model.objective.block_loss(model, Batch(rows), 5, t, noise).total for rows in (x, changed)]
    assert torch.equal(*losses)
    changed[:, 0] = 5 - changed[:, 0].clamp(max=5)
    assert not torch.equal(losses[0], model.objective.block_loss(model, Batch(changed), 5, t, noise).total)


SAMPLERS = [
    SimplexBlocks(4),
    SimplexBlocks(3, SamplingParams(temperature=0)),
    SimplexBlocks(4, SamplingParams(0.8, top_p=0.7), "sampling"),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_holes_are_filled_and_rows_are_as_if_alone(sampler: SimplexBlocks) -> None:
    model, rows = tiny(), tokens(5, 30)
    rows[0, 3:], rows[1, :], rows[2, 4:9], rows[3, 20:22], rows[3, 28:] = 4, 4, 4, 4, 4  # and the last has no hole
    seeds = (5, 6, 2**63, 7, 8)
    result = rows
    for result in sampler.run(model, Canvas(rows, seeds)):  # noqa: B007
        pass
    assert not (result == 4).any()
    assert torch.equal(result[rows != 4], rows[rows != 4])
    for row in range(5):
        alone = rows[row : row + 1]
        for alone in sampler.run(model, Canvas(rows[row : row + 1], seeds[row : row + 1])):  # noqa: B007
            pass
        assert torch.equal(alone[0], result[row])


def test_seeds_and_choices_decide() -> None:
    model, blank = tiny(), torch.full((4, 12), 4)

    def last(sampler: SimplexBlocks, seeds: tuple[int, ...]) -> torch.Tensor:
        return list(sampler.run(model, Canvas(blank, seeds)))[-1]

    first = last(SimplexBlocks(6), (0, 1, 2, 3))
    assert torch.equal(first, last(SimplexBlocks(6), (0, 1, 2, 3)))
    assert not torch.equal(first, last(SimplexBlocks(6), (4, 5, 6, 7)))
    assert not torch.equal(first, last(SimplexBlocks(6, SamplingParams(top_p=1.0)), (0, 1, 2, 3)))
    wide = SamplingParams(temperature=3.0, top_p=0.95)
    many = last(SimplexBlocks(6, wide), (0, 1, 2, 3))
    assert not torch.equal(many, last(SimplexBlocks(6, wide, "sampling"), (0, 1, 2, 3)))


class Exact(torch.nn.Module):
    """The exact posterior p(w | a_t) of one token with the probabilities p, as a denoiser."""

    vocab, process, max_length = Vocab(4, 3), SimplexDiffusion(1), 4

    def __init__(self, p: list[float]) -> None:
        super().__init__()
        self.log_p = torch.tensor(p, dtype=torch.float64).log()

    def forward(self, z: SimplexState, t: torch.Tensor, positions: Any, **_: Any) -> torch.Tensor:
        signal = alpha_bar(t)[..., None]
        # log N(a_t; sqrt(abar) a(w), (1 - abar) K^2) up to a constant: 2 K sqrt(abar) a_t[w] / ((1 - abar) K^2)
        evidence = 2 * signal.sqrt() * z.block / ((1 - signal) * self.process.scale)
        return F.pad((self.log_p + evidence[..., :3].double()).log_softmax(-1), (0, 1), value=-torch.inf)[:, 0]


def test_a_single_step_of_the_exact_denoiser_has_the_law_of_its_argmax() -> None:
    """With T = 1 all is noise, a posterior is the prior, and the token is the most probable one: SSD-LM does not
    sample its data's distribution, which is why it has no likelihood."""
    canvas = Canvas(torch.full((50, 1), 3), tuple(range(50)))
    (result,) = SimplexBlocks(1).run(Exact([0.2, 0.5, 0.3]), canvas)  # type: ignore[arg-type]
    assert (result == 1).all()


def test_sampling_projection_with_the_exact_denoiser_reaches_all_tokens() -> None:
    """The posterior sharpens while noise fades: with the projection by sampling, tokens come out in proportion to
    about their probabilities (T steps that draw afresh are not the reverse process, so not exactly)."""
    n = 2000
    canvas = Canvas(torch.full((n, 1), 3), tuple(range(n)))
    sampler = SimplexBlocks(40, SamplingParams(top_p=1.0), "sampling")
    *_, result = sampler.run(Exact([0.2, 0.5, 0.3]), canvas)  # type: ignore[arg-type]
    shares = torch.bincount(result[:, 0], minlength=3) / n
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.5, 0.3]), rtol=0, atol=0.15)


def model_with_text() -> LanguageModel:
    tokenizer = Tokenizer.characters("abcde ")
    torch.manual_seed(0)
    vocab = Vocab(tokenizer.vocab_size + 1, tokenizer.vocab_size)
    return LanguageModel(ModelConfig(vocab, NETWORK, SSDLM(block_size=4)).build().eval(), tokenizer)


def test_it_writes_completes_and_is_saved(tmp_path: Path) -> None:
    lm = model_with_text()
    sampler = SimplexBlocks(3)
    texts = lm.sample(3, 20, sampler=sampler, seed=1)
    assert texts.nfe == 3 * 5
    assert all(len(text) == 20 for text in texts.texts)
    done = lm.complete(["ab", "abcde ab"], 9, sampler=sampler, seed=3)
    assert done.ids[1] == lm.complete(["abcde ab"], 9, sampler=sampler, seed=4).ids[0]
    save(lm, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.objective == lm.objective
    assert torch.equal(again.sample(3, 20, sampler=sampler, seed=1).tokens, texts.tokens)
    assert lm.sample(1, 6).nfe == 2 * 128  # the default sampler, as on the command line


def test_what_it_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    from unmask import Ancestral, Guidance

    lm = model_with_text()
    with pytest.raises(ValueError, match=r"SSD-LM has no likelihood: .*eval-samples"):
        lm.score(["abc"])
    with pytest.raises(ValueError, match="SSD-LM has no likelihood"):
        lm.objective.token_nll(lm.denoiser, Batch(tokens(2)), generator())
    with pytest.raises(ValueError, match="simplex diffusion has none: leave it out"):
        lm.sample(1, 8, guidance=Guidance(cfg_scale=1.0))
    with pytest.raises(ValueError, match=r"trained for simplex diffusion: use the default sampler"):
        lm.sample(1, 8, sampler=Ancestral(2))
    for wrong, sentence in (
        ({"projection": "nearest"}, "projection must be multi-hot or sampling; got 'nearest'"),
        ({"params": SamplingParams(top_k=2)}, "leave out top_k"),
        ({"steps": 0}, "steps"),
    ):
        with pytest.raises(ValueError, match=sentence):
            SimplexBlocks(**wrong)  # type: ignore[arg-type]
    for wrong, sentence in (
        ({"block_size": 0}, "block_size must be from 1"),
        ({"scale": 0.0}, "scale, the logit K"),
        ({"steps": 0}, "steps"),
    ):
        with pytest.raises(ValueError, match=sentence):
            SSDLM(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 tokens; got 1"):
        lm.objective.training_loss(lm.denoiser, Batch(tokens(2, 1)), generator())
