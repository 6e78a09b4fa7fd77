"""Plaid: the published terms, gradients and bounds; the bound and the sampler's law where they are known exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from unmask import (
    Backbone,
    BackboneConfig,
    Batch,
    DiTConfig,
    LanguageModel,
    ModelConfig,
    Plaid,
    SamplingParams,
    Tokenizer,
    Vocab,
    load,
    save,
)
from unmask.backbones.base import Capabilities
from unmask.baselines import GaussianSteps
from unmask.baselines._bound import Rows, Terms
from unmask.context import Context
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.sampling.canvas import Canvas
from unmask.types import Positions, Times, Tokens


@dataclass(frozen=True)
class NoBlocksConfig(BackboneConfig):
    """The network of the golden numbers: a norm and a head."""

    width: int
    max_length: int | None = None

    def build(self, vocab: Vocab) -> NoBlocks:
        return NoBlocks(self.width, vocab)


class NoBlocks(Backbone):
    capabilities = Capabilities()

    def __init__(self, width: int, vocab: Vocab) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab.size, width)
        self.norm, self.lm_head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocab.size)

    def embed(self, tokens: Tokens) -> Tensor:
        return self.embedding(tokens)  # type: ignore[no-any-return]

    def encode(self, h: Tensor, t: Times, positions: Positions | None = None, context: Context = Context()) -> Tensor:
        hidden: Tensor = self.norm(h)
        return hidden if positions is None else hidden[tuple(positions)]

    def blocks(self) -> Sequence[nn.Module]:
        return []

    def describe(self) -> dict[str, Any]:
        return {}


NAMES = {
    "embedding_matrix.matrix": "embedding.matrix",
    "gamma_bounds.gamma_0": "schedule.gamma_0",
    "gamma_bounds.gamma_1": "schedule.gamma_1",
    "model.gamma_linear.weight": "noise_layer.weight",
    "model.input_linear.weight": "input_layer.weight",
    "model.output_linear.bias": "backbone.lm_head.bias",
    "model.output_linear.weight": "backbone.lm_head.weight",
    "model.output_norm.weight": "backbone.norm.weight",
    "model.selfcond_linear.weight": "estimate_layer.weight",
    "noise_schedule.W1": "schedule.w1",
    "noise_schedule.W2": "schedule.w2",
    "noise_schedule.b1": "schedule.b1",
}
"""Their names and ours."""


def published(golden: Path) -> tuple[Any, dict[str, Tensor]]:
    """The golden model, with a thirteenth token for the mask."""
    folder = golden / "plaid_loss"
    config = json.loads((folder / "config.json").read_text())
    plaid = Plaid(config["embed_dim"], config["schedule_hidden"], readout_width=config["mup_base_width"])
    size = config["vocab_size"]
    with torch.random.fork_rng():
        model = ModelConfig(Vocab(size + 1, size), NoBlocksConfig(config["dim"]), plaid).build()
    own = model.state_dict()
    for theirs, tensor in load_file(folder / "model.safetensors").items():
        own[NAMES[theirs]][tuple(slice(0, length) for length in tensor.shape)] = tensor
    model.load_state_dict(own)
    return model, load_file(folder / "expected.safetensors")


def golden_rows(expected: dict[str, Tensor], t: Tensor, self_conditioned: Tensor) -> Rows:
    reconstructs = t[:, None] == 0
    count = int(reconstructs.sum())
    share = torch.where(reconstructs, len(t) / count, 0.0).double()
    others = torch.where(reconstructs, 0.0, len(t) / (len(t) - count)).double()
    return Rows(t[:, None], share, others, self_conditioned.bool(), expected["eps"])


def close(ours: Tensor, theirs: Tensor, rtol: float = 1e-5) -> None:
    """Equal to 1e-5 of the largest number."""
    torch.testing.assert_close(ours.to(theirs), theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))


def test_the_schedule_and_the_noise_are_the_published_ones(golden: Path) -> None:
    model, expected = published(golden)
    at = model.schedule(expected["t"][:, None])
    diffuses = expected["t"] > 0
    close(at.gamma[:, 0], expected["gamma"], 1e-12)
    close(at.rate[diffuses, 0], expected["gamma_prime"][diffuses], 1e-12)
    close(-2 * at.weight[diffuses, 0], expected["snr_prime"][diffuses], 1e-12)
    close(at.alpha[:, 0], expected["alpha"], 1e-12)
    close(at.sigma[:, 0], expected["sigma"], 1e-12)
    clean = model.embedding()[expected["x"]]
    close(clean, expected["x_embed"])
    close(at.alpha[..., None] * clean + at.sigma[..., None] * expected["eps"], expected["z"])


@pytest.mark.parametrize("kind", ["plain", "selfcond"])
def test_the_bound_and_its_terms_are_the_published_ones(golden: Path, kind: str) -> None:
    model, expected = published(golden)
    batch = Batch(expected["x"])
    rows = golden_rows(expected, expected["t"], torch.full((16,), kind == "selfcond"))
    answers: list[tuple[Any, Tensor]] = []
    model.register_forward_hook(lambda _, args, log_x: answers.append((args[0], log_x)))
    with torch.no_grad():
        terms: Terms = model.eval().objective.row_terms(model, batch, rows)
    state, log_x = answers[-1]
    close(state.estimate.float(), expected[f"{kind}.x_selfcond"])
    close(log_x[:, :12].view(16, 7, 12), expected[f"{kind}.logits"].log_softmax(-1))
    close(model.estimate(log_x, state), expected[f"{kind}.x_reconst"].double(), 2e-5)
    count = int((expected["t"] == 0).sum())
    close(terms.reconstruction[:count].mean(1), expected[f"{kind}.reconst_rows"])
    close(terms.diffusion[count:].mean(1), expected[f"{kind}.diffusion_rows"][count:])
    close(terms.prior.mean(), expected[f"{kind}.prior"])
    close(terms.nats(rows).mean(), expected[f"{kind}.nll"])


@pytest.mark.parametrize("kind", ["plain", "selfcond"])
def test_the_gradients_of_a_training_step_are_the_published_ones(golden: Path, kind: str) -> None:
    model, expected = published(golden)
    rows = golden_rows(expected, expected[f"train.{kind}.t"], expected[f"train.{kind}.selfcond_rows"])
    loss = model.train().objective.row_terms(model, Batch(expected["x"]), rows).nats(rows).mean()
    close(loss, expected[f"train.{kind}.loss"])
    loss.backward()
    parameters = dict(model.named_parameters())
    for theirs, ours in NAMES.items():
        gradient, wanted = parameters[ours].grad, expected[f"train.{kind}.grad.{theirs}"]
        assert gradient is not None
        close(gradient[tuple(slice(0, length) for length in wanted.shape)], wanted, 2e-5)


# The exact denoiser: with a head that answers log p(x) whatever it reads, the output prior makes it the posterior.


def exact_model(p: Sequence[float], gamma_0: float, gamma_1: float, dim: int = 1, self_conditioning: int = 4) -> Any:
    """Tokens 0, ..., n - 1 have the probabilities p, and the mask is the last; in one dimension E = +1, -1, +1, ..."""
    size = len(p) + 1
    plaid = Plaid(dim, 8, gamma_0, gamma_1, self_conditioning)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ModelConfig(Vocab(size, size - 1), NoBlocksConfig(8), plaid).build()
    with torch.no_grad():
        model.backbone.lm_head.weight.zero_()
        model.backbone.lm_head.bias.copy_(torch.tensor([*p, 1.0]).log())
        if dim == 1:
            model.embedding.matrix.copy_(torch.tensor([1.0, -1.0] * size)[:size, None])
    return model.double().eval().requires_grad_(False)


def test_the_bound_is_the_entropy_and_what_the_prior_misses() -> None:
    """E_x bound = H(x) + KL(q(z_1) || N(0, 1)), by the I-MMSE identity: reconstruction is H(x | z_0), the diffusion
    term I(x; z_0) - I(x; z_1), and the prior KL(q(z_1 | x) || N(0, 1)). With gamma_1 = -1 the KL is large."""
    p, gamma_1 = torch.tensor([0.3, 0.7], dtype=torch.float64), -1.0
    model = exact_model(p.tolist(), -3.0, gamma_1)
    entropy = float(-(p * p.log()).sum())
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    alpha, sigma = (float(torch.sigmoid(torch.tensor(g)).sqrt()) for g in (-gamma_1, gamma_1))
    normal = torch.distributions.Normal
    q = sum(w * normal(sign * alpha, sigma).log_prob(z).exp() for w, sign in zip(p, (1, -1), strict=True))
    missed = float(torch.trapezoid(q * (q.log() - normal(0.0, 1.0).log_prob(z)), z))
    x = (torch.arange(200 * 40).view(40, 200).T >= 0.3 * 8000).long()  # the expectation over x is exact
    draws = []
    for seed in range(16):
        nats = model.objective.token_nll(model, Batch(x), torch.Generator().manual_seed(seed))
        draws.append(float(nats.mean()))
    mean, error = torch.tensor(draws).mean(), torch.tensor(draws).std() / math.sqrt(len(draws))
    assert missed > 8 * error
    assert abs(mean - entropy - missed) < 4 * error
    assert mean > entropy


def test_the_three_terms_are_what_information_theory_says() -> None:
    """At many times, the weighted squared errors integrate to I(x; z_0) - I(x; z_1)."""
    p = torch.tensor([0.3, 0.7], dtype=torch.float64)
    model = exact_model(p.tolist(), -2.0, 1.0)
    z = torch.linspace(-14, 14, 40_001, dtype=torch.float64)

    def information(gamma: float) -> float:
        alpha, sigma = torch.sigmoid(torch.tensor(-gamma)).sqrt(), torch.sigmoid(torch.tensor(gamma)).sqrt()
        normal = torch.distributions.Normal
        each = torch.stack([normal(sign * alpha, sigma).log_prob(z).exp().double() for sign in (1, -1)])
        q = (p[:, None] * each).sum(0)
        return float(torch.trapezoid((p[:, None] * each * (each.clamp(min=1e-300) / q).log()).sum(0), z))

    n = 40_000
    x = (torch.arange(n) >= 0.3 * n).long()[:, None]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    t = ((order + 0.5) / n).double()[:, None]
    eps = torch.randn(n, 1, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = Rows(t, torch.zeros_like(t), torch.ones_like(t), torch.ones(n, dtype=torch.bool), eps)
    terms = model.objective.row_terms(model, Batch(x), rows)
    expected = information(-2.0) - information(1.0)
    error = float(terms.diffusion.std()) / math.sqrt(n)
    assert abs(float(terms.diffusion.mean()) - expected) < 4 * error < 0.04


def test_samples_of_the_exact_denoiser_have_the_law_of_the_data() -> None:
    p = torch.tensor([0.15, 0.35, 0.5], dtype=torch.float64)
    model = exact_model(p.tolist(), -5.0, 7.0, dim=2, self_conditioning=0)
    with torch.no_grad():
        angles = torch.tensor([0.0, 2.1, 4.2, 1.0])
        model.embedding.matrix.copy_(torch.stack([angles.cos(), angles.sin()], 1))
    n, length = 4000, 100
    *_, tokens = GaussianSteps(150).run(model, Canvas(torch.full((n // length, length), 3), tuple(range(n // length))))
    counts = torch.bincount(tokens.flatten(), minlength=3).double()
    chi_square = float(((counts - n * p).square() / (n * p)).sum())
    assert chi_square < 13.8, counts  # 0.1 % for two degrees of freedom
    pairs = torch.bincount((tokens[:, ::2] * 3 + tokens[:, 1::2]).flatten(), minlength=9).double()
    wanted = n / 2 * (p[:, None] * p).flatten()
    assert float(((pairs - wanted).square() / wanted).sum()) < 26.1, pairs  # 0.1 % for eight


NETWORK = DiTConfig(width=16, depth=2, heads=2, max_length=12, dropout=0.0)
SMALL = Plaid(embedding_dim=4, schedule_width=8)


def tiny(context_ids: tuple[int, ...] = ()) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ModelConfig(Vocab(7, 4, context_ids=context_ids), NETWORK, SMALL).build().double().eval()
        for name, parameter in model.named_parameters():
            if not name.startswith("schedule"):
                nn.init.normal_(parameter, std=0.02 if "lm_head" in name else 0.5)
    return model.requires_grad_(False)


def tokens(rows: int, length: int = 12, seed: int = 0) -> Tensor:
    clean = torch.tensor([0, 1, 2, 3, 5, 6])
    return clean[torch.randint(6, (rows, length), generator=torch.Generator().manual_seed(seed))]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_split_batch_gets_the_same_noise() -> None:
    model, x = tiny(), tokens(20)
    whole = SMALL.token_nll(model, Batch(x), generator())
    parts = [
        SMALL.token_nll(model, Batch(x[i : i + 5], row_offset=i, global_batch_size=20), generator())
        for i in (0, 5, 10, 15)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-9, atol=1e-12)


def test_padding_changes_nothing() -> None:
    model, x = tiny(), tokens(16, 7)
    alone = SMALL.token_nll(model, Batch(x), generator())
    padded = torch.cat([x, torch.zeros(16, 5, dtype=torch.int64)], 1)
    valid = torch.arange(12).expand(16, -1) < 7
    together = SMALL.token_nll(model, Batch(padded, valid), generator())
    assert (together[:, 7:] == 0).all()
    assert together.isfinite().all()
    assert alone.shape == (16, 7)


def test_given_tokens_are_read_without_noise() -> None:
    """Their own noise changes nothing, they cost nothing, and what they are changes what the others cost."""
    model, x = tiny(), tokens(16, 7)
    given = torch.arange(7).expand(16, -1) < 3
    batch = Batch(x, prompt_mask=given)
    rows = SMALL._divide(batch, generator())
    terms = SMALL.row_terms(model, batch, rows)
    for term in (terms.reconstruction, terms.diffusion, terms.prior):
        assert (term[given] == 0).all()
    other = SMALL.row_terms(model, batch, replace(rows, eps=rows.eps + 5 * given[..., None]))
    torch.testing.assert_close(other.diffusion, terms.diffusion)
    changed = SMALL.row_terms(model, replace(batch, tokens=torch.where(given, 3 - x.clamp(max=3), x)), rows)
    assert not torch.allclose(changed.diffusion, terms.diffusion)
    torch.testing.assert_close(changed.prior, terms.prior)


def test_letters_that_are_only_context_are_given() -> None:
    """N in DNA: no loss is counted on it, and it is not noised."""
    model, x = tiny(context_ids=(1,)), tokens(16, 7)
    x[:, 2] = 1
    nats = SMALL.token_nll(model, Batch(x), generator())
    assert (nats[x == 1] == 0).all()
    assert nats[:, 1].ne(0).any()
    batch = Batch(x, prompt_mask=x == 1)
    torch.testing.assert_close(SMALL.token_nll(tiny(), batch, generator()), nats)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_every_division_of_a_batch_has_the_same_mean(rows: int) -> None:
    """The weights of both terms are one on average, for every row."""
    sums = torch.zeros(2, rows, dtype=torch.float64)
    trials = 600
    for seed in range(trials):
        divided = SMALL._divide(Batch(tokens(rows, 1)), generator(seed))
        sums += torch.stack([divided.reconstruction_weight[:, 0], divided.diffusion_weight[:, 0]])
    means = sums / trials
    deviation = 8 / math.sqrt(trials)
    assert ((means[0] - 1).abs() < 2 * deviation).all()
    assert ((means[1] - 1).abs() < deviation).all()


def test_rows_are_as_if_alone_and_seeds_decide() -> None:
    model, blank = tiny(), torch.full((3, 9), 4)
    for sampler in (GaussianSteps(5), GaussianSteps(5, SamplingParams(temperature=0.9))):
        *_, together = sampler.run(model, Canvas(blank, (3, 4, 5)))
        assert not (together == 4).any()
        for row in range(3):
            *_, alone = sampler.run(model, Canvas(blank[:1], (3 + row,)))
            assert torch.equal(alone[0], together[row])
        assert len({tuple(row) for row in together.tolist()}) == 3
    *_, warm = GaussianSteps(5).run(model, Canvas(blank, (3, 4, 5)))
    assert not torch.equal(warm, together)


def model_with_text() -> LanguageModel:
    tokenizer = Tokenizer.characters("abcde ")
    torch.manual_seed(0)
    vocab = Vocab(tokenizer.vocab_size + 1, tokenizer.vocab_size)
    return LanguageModel(ModelConfig(vocab, NETWORK, SMALL).build().eval(), tokenizer)


def test_it_writes_scores_and_is_saved(tmp_path: Path) -> None:
    lm = model_with_text()
    texts = lm.sample(3, 8, sampler=GaussianSteps(4), seed=1)
    assert texts.nfe == 5
    assert all(len(text) == 8 for text in texts.texts)
    score = lm.score(["abcde ab", "e"], draws=64)
    assert score.standard_error > 0
    assert score.tokens == 9
    save(lm, tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.objective == SMALL
    assert torch.equal(again.sample(3, 8, sampler=GaussianSteps(4), seed=1).tokens, texts.tokens)
    assert again.score(["abcde ab", "e"], draws=64).nats == score.nats


def test_what_it_cannot_do_is_one_sentence() -> None:
    lm = model_with_text()
    for call in (lambda: lm.infill("ab<mask:3>"), lambda: lm.sample(1, 8, prompt="ab"), lambda: lm.sample(1, 30)):
        with pytest.raises(ValueError, match="Plaid writes whole texts, of at most 12 tokens"):
            call()
    for params, sentence in (
        (SamplingParams(temperature=0), "must be above 0"),
        (SamplingParams(top_p=0.9), "leave out top_k and top_p"),
    ):
        with pytest.raises(ValueError, match=sentence):
            GaussianSteps(4, params)
    for wrong, sentence in (
        ({"embedding_dim": 0}, "embedding_dim must be from 1"),
        ({"gamma_0": 7.0}, "gamma_0 must be below gamma_1"),
        ({"self_conditioning": -1}, "self_conditioning must be 0"),
        ({"prior_warmup": 2.0}, "prior_warmup is a share"),
        ({"noise_lr_scale": 0.0}, "noise_lr_scale must be above 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Plaid(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set batch_size to 2 or more"):
        SMALL.training_loss(lm.denoiser.train(), Batch(tokens(1)), generator())


def test_embeddings_that_are_not_read_are_not_trained() -> None:
    for tied in (False, True):
        network = DiTConfig(width=16, depth=1, heads=2, max_length=12, tie_embeddings=tied)
        model: Any = ModelConfig(Vocab(7, 4), network, SMALL).build()
        assert model.backbone.embedding.weight.requires_grad == tied  # a tied matrix is the head's
        loss = SMALL.training_loss(model, Batch(tokens(4)), generator())
        loss.total.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_corpus_is_scored_with_an_error() -> None:
    import training_worker as worker
    from unmask.data.loader import Loader, Wrapped

    torch.manual_seed(0)
    model = ModelConfig(Vocab(7, 6), DiTConfig(width=16, depth=1, heads=2, max_length=16), SMALL).build().eval()
    loader = Loader(worker.CycleTokens(), Wrapped(16), 40)
    with torch.no_grad():
        scores = [score_corpus(model, SMALL, loader, EvalConfig(80, 8, seed=seed)) for seed in (0, 1)]
    difference = abs(scores[0].nats_per_token - scores[1].nats_per_token)
    assert 0 < scores[0].standard_error < 0.5 * scores[0].nats_per_token
    assert difference < 5 * (scores[0].standard_error + scores[1].standard_error)
    assert len(scores[0].by_time) == 20
