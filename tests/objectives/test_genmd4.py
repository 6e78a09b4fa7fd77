"""GenMD4: the published numbers, the bound and its gradient against enumeration, and its sampler's law."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tiny_models
from oracle import (
    ALL_MASKED,
    CLEAN_STATES,
    LENGTH,
    MASK,
    NUM_CLEAN,
    VOCAB,
    State,
    TableDenoiser,
    chi_square_p_value,
    point_mass,
    probabilities,
    random_table,
    reverse_step,
    sample_counts,
    text_distribution,
)
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import PerTokenMasking
from unmask.diffusion.schedule import LogLinear
from unmask.diffusion.token_schedule import TokenPowers
from unmask.objectives import MDLM, GenMD4
from unmask.objectives.genmd4 import _score_term
from unmask.objectives.mdlm import subs
from unmask.sampling import SAMPLERS, Ancestral, Blockwise, Sampler
from unmask.sampling.canvas import Canvas
from unmask.types import Batch, RowFn, Vocab

X: State = (2, 0, 1)
POWERS = (0.4, 1.0, 2.5)
EPS, T1 = 0.02, 0.05  # so large that a lost end would be seen
ENUMERATED = GenMD4(eps=EPS, t1=T1)
PATTERNS = list(itertools.product((False, True), repeat=LENGTH))


def learned(objective: GenMD4, powers: tuple[float, ...] = POWERS, vocab: Vocab = VOCAB) -> nn.Module:
    """Parameters, in float64, whose softplus are these powers."""
    parameters = objective.new_parameters(vocab).double()
    with torch.no_grad():
        parameters.raw[: len(powers)] = torch.tensor(powers, dtype=torch.float64).expm1().log()  # type: ignore[index]
    return parameters


def table(objective: GenMD4 = ENUMERATED, powers: tuple[float, ...] = POWERS, drift: float = 1.0) -> TableDenoiser:
    return replace(random_table(objective, drift=drift), objective_parameters=learned(objective, powers))


def schedule_of(denoiser: DenoiserLike) -> TokenPowers:
    process = denoiser.process
    assert isinstance(process, PerTokenMasking)
    return process.schedule


# --- the definition, written down a second time -----------------------------------------------------------------


def mask_prob(w: Tensor, t: float) -> Tensor:
    """1 - alpha_v(t): a power from t1 on, a straight line below it."""
    return (1 - EPS) * (t**w if t >= T1 else T1**w * t / T1)


def expected_nats(network: TableDenoiser, w: Tensor, x: State, t: float, hidden: Tensor, rates: Tensor) -> Tensor:
    """E over z of the sum over masked positions of rate_x (-log mu_x) + sum_v rate_v mu_v - rate_x."""
    total = torch.zeros((), dtype=torch.float64)
    for pattern in PATTERNS:
        p = torch.ones((), dtype=torch.float64)
        for masked, token in zip(pattern, x, strict=True):
            p = p * (hidden[token] if masked else 1 - hidden[token])
        z = torch.tensor([[MASK if masked else token for masked, token in zip(pattern, x, strict=True)]])
        mu = network(z, torch.full((1, 1), t, dtype=torch.float64), torch.ones_like(z, dtype=torch.bool)).exp()
        for place in itertools.compress(range(LENGTH), pattern):
            line, r = mu[place, :NUM_CLEAN], rates[x[place]]
            total = total + p * (r * -line[x[place]].log() + (rates * line).sum() - r)
    return total


def exact_bound(network: TableDenoiser, w: Tensor, x: State = X) -> Tensor:
    """The integral of the rates' nats over alpha from 0 to eps at t = 1, and over t from 1 to 0."""
    points, weights = np.polynomial.legendre.leggauss(40)
    ones, nats = torch.ones_like(w), torch.zeros((), dtype=torch.float64)
    for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
        share = (point + 1) / 2
        hidden = 1 - EPS * share  # P(masked) of every token, before t leaves 1
        nats = nats + EPS * weight / 2 * expected_nats(network, w, x, 1.0, hidden * ones, ones / hidden)
        t = T1**share  # t from 1 to t1, evenly in log t: dt/t = log(1/t1) dshare
        nats = nats + math.log(1 / T1) * weight / 2 * expected_nats(network, w, x, t, mask_prob(w, t), w)
        t = T1 * share
        nats = nats + weight / 2 * expected_nats(network, w, x, t, mask_prob(w, t), ones) / share
    return nats


def step_mask_probs(w: np.ndarray, steps: int) -> list[np.ndarray]:
    """P(masked) of each token at t = 0, 1/T, ..., 1; none is at 0, all are at 1."""
    inner = [mask_prob(torch.from_numpy(w), i / steps).numpy() for i in range(1, steps)]
    return [np.zeros_like(w), *inner, np.ones_like(w)]


def law(network: TableDenoiser, steps: int, canvas: State = ALL_MASKED) -> dict[State, float]:
    """The law of T reverse steps: v is unmasked with (alpha_v(s) - alpha_v(t))/(1 - alpha_v(t)) mu_v."""
    levels, p = step_mask_probs(np.array(POWERS), steps), point_mass(canvas)
    for i in range(steps, 0, -1):
        p = reverse_step(network, p, i / steps, (levels[i] - levels[i - 1]) / levels[i])
    return text_distribution(p)


def step_bound(network: TableDenoiser, steps: int, x: State) -> float:
    """The sum of the steps' KL(q(z_s | z_t, x) || p(z_s | z_t)), each from its definition."""
    levels, nats = step_mask_probs(np.array(POWERS), steps), 0.0
    for i in range(1, steps + 1):
        r, prediction = (levels[i] - levels[i - 1]) / levels[i], probabilities(network, i / steps)
        for pattern in PATTERNS:
            z = tuple(MASK if masked else token for masked, token in zip(pattern, x, strict=True))
            p = math.prod(levels[i][v] if masked else 1 - levels[i][v] for masked, v in zip(pattern, x, strict=True))
            for place in itertools.compress(range(LENGTH), pattern):
                line, v = prediction[int(np.dot(z, [16, 4, 1])), place, :NUM_CLEAN], x[place]
                nats += p * r[v] * -math.log(line[v])
                if r[v] < 1:
                    nats += p * (1 - r[v]) * math.log((1 - r[v]) / (1 - float(r @ line)))
    return nats


# --- the published numbers --------------------------------------------------------------------------------------


@dataclass
class NeighbourTable:
    """logits at l = W[0][z_l] + W[1][z_{l-1}] + W[2][z_{l+1}] of the clean tokens."""

    weights: Tensor
    objective: GenMD4
    parameters: nn.Module
    vocab: Vocab

    @property
    def process(self) -> PerTokenMasking:
        return self.objective.process_with(self.parameters)

    def __call__(self, z: Tensor, t: Tensor, positions: Any, *rest: Any, row_fn: RowFn) -> Tensor:
        here, before, after = self.weights
        logits = here[z]
        logits[:, 1:] += before[z[:, :-1]]
        logits[:, :-1] += after[z[:, 1:]]
        logits = torch.cat([logits, torch.zeros_like(logits[..., :1])], -1)[positions[0], positions[1]]
        return row_fn(self.objective.log_probs(logits, torch.zeros(len(logits), 1), self.vocab), slice(None))


def test_losses_and_gradients_are_the_published_ones(golden: Path) -> None:
    expected = load_file(golden / "genmd4_loss" / "expected.safetensors")
    config = json.loads((golden / "genmd4_loss" / "config.json").read_text())
    vocab = Vocab(config["vocab_size"] + 1, config["mask"])
    objective = GenMD4(eps=config["eps"], t1=config["t1"], published_reconstruction=True)
    parameters = objective.new_parameters(vocab)
    with torch.no_grad():
        parameters.raw[: config["vocab_size"]] = expected["w"]  # type: ignore[index]
    network = NeighbourTable(expected["table"].clone().requires_grad_(), objective, parameters, vocab)
    schedule = network.process.schedule
    torch.testing.assert_close(schedule.power[:-1], expected["power"])
    u = (expected["t"].double()[:, None] - config["t1"]) / (1 - config["t1"])
    level = objective.noise_level(schedule, u)
    alpha = -torch.expm1(level.log_mask_prob(schedule.power[:-1].expand(len(u), -1)))
    torch.testing.assert_close(alpha.float(), expected["alpha"], atol=1e-6, rtol=1e-5)
    uniform = 1 - expected["u"].double()  # there, a token is visible where u < alpha
    batch = Batch(expected["x"])
    nats = objective.two_draw_nll(network, batch, schedule, level, uniform)  # type: ignore[arg-type]
    bound = (expected["loss_diff_1"] + expected["loss_diff_2"]) / 2 + expected["loss_recon"]
    torch.testing.assert_close(nats.sum(1), bound, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(nats.sum(1).mean(), expected["loss_nelbo"][0], atol=1e-5, rtol=1e-5)
    nats.sum(1).mean().backward()
    assert isinstance(parameters.raw, Tensor)
    assert parameters.raw.grad is not None
    torch.testing.assert_close(parameters.raw.grad[:-1], expected["grad.w"], atol=1e-5, rtol=1e-5)
    assert parameters.raw.grad[-1] == 0  # the mask's power is not used
    torch.testing.assert_close(network.weights.grad, expected["grad.table"], atol=1e-5, rtol=1e-5)
    # The score term by itself: our loss has its gradient, theirs its value too.
    log_p = level.log_mask_prob(schedule.power[expected["x"]])
    masked = torch.stack([expected["z_1"], expected["z_2"]]) == config["mask"]
    nll = torch.stack([expected["loss_diff_1"], expected["loss_diff_2"]])[..., None] / masked.shape[-1]
    score = _score_term(nll.expand(masked.shape), log_p, masked, torch.ones_like(masked[0]))
    torch.testing.assert_close(score.sum(1).float(), expected["rloo"], atol=1e-4, rtol=1e-5)


# --- the bound --------------------------------------------------------------------------------------------------


def all_pairs(network: TableDenoiser, objective: GenMD4, u: float) -> tuple[Tensor, Tensor]:
    """The loss of each pair of maskings (z1, z2) at u, and the probability of the pair."""
    pairs = list(itertools.product(PATTERNS, PATTERNS))
    uniform = torch.tensor(pairs).transpose(0, 1).logical_not().double()  # 0: masked, 1: visible
    schedule = schedule_of(network)
    level = objective.noise_level(schedule, torch.full((len(pairs), 1), u, dtype=torch.float64))
    batch = Batch(torch.tensor([X]).expand(len(pairs), -1))
    loss = objective.two_draw_nll(network, batch, schedule, level, uniform).sum(1)
    p = level.log_mask_prob(schedule.power[batch.tokens]).exp()
    p = torch.where(uniform == 0, p, 1 - p).prod(2).prod(0)
    return loss[p > 0], p[p > 0]  # at t = 1 everything is masked


@pytest.mark.parametrize("u", [0.01, 0.03, 0.06, 0.3, 0.9, 0.985])  # below t1, between, and where t = 1
def test_two_draws_have_the_gradient_of_the_expected_loss(u: float) -> None:
    """Exactly, summed over all pairs: that of the powers, through the loss and through z, and that of the network."""
    network = table()
    network.logits.requires_grad_()
    assert network.objective_parameters is not None
    raw = next(network.objective_parameters.parameters())
    loss, p = all_pairs(network, ENUMERATED, u)
    surrogate = torch.autograd.grad((p.detach() * loss).sum(), [raw, network.logits], retain_graph=True)
    t, ones = min(u / (1 - EPS), 1.0), torch.ones(NUM_CLEAN, dtype=torch.float64)
    w = schedule_of(network).power[:NUM_CLEAN]
    own = T1 <= t < 1
    hidden = mask_prob(w, t) if t < 1 else u * ones
    exact = expected_nats(network, w, X, t, hidden, w if own else ones) / u
    torch.testing.assert_close((p * loss).sum(), exact)
    gradients = torch.autograd.grad(exact, [raw, network.logits], materialize_grads=True)
    for ours, expected in zip(surrogate, gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def test_the_gradient_needs_the_score_term() -> None:
    network = table()
    assert network.objective_parameters is not None
    raw = next(network.objective_parameters.parameters())
    loss, p = all_pairs(network, ENUMERATED, 0.3)
    whole, through_loss = (
        torch.autograd.grad(total, raw, retain_graph=True)[0]
        for total in ((p * loss.detach() + p.detach() * loss).sum(), (p.detach() * loss).sum())
    )
    assert (whole - through_loss).abs().max() > 0.1  # a second score term would be one too many


def test_the_estimators_mean_and_gradient_are_those_of_the_exact_bound() -> None:
    network = table()
    assert network.objective_parameters is not None
    raw = next(network.objective_parameters.parameters())
    exact = exact_bound(network, schedule_of(network).power[:NUM_CLEAN])
    (exact_grad,) = torch.autograd.grad(exact, raw)
    batch, means, grads = Batch(torch.tensor([X]).expand(2000, -1)), [], []
    for seed in range(24):
        loss = ENUMERATED.token_nll(network, batch, torch.Generator().manual_seed(seed)).sum(1).mean()
        means.append(loss.detach())
        grads.append(torch.autograd.grad(loss, raw)[0][:NUM_CLEAN])
    for draws, expected in ((torch.stack(means), exact.detach()), (torch.stack(grads), exact_grad[:NUM_CLEAN])):
        mean, error = draws.mean(0), draws.std(0) / math.sqrt(len(draws))
        assert (error < 0.1).all()
        assert ((mean - expected).abs() < 4 * error).all()


def test_given_tokens_and_padding_have_no_part_in_the_score() -> None:
    network = table()
    assert network.objective_parameters is not None
    raw = next(network.objective_parameters.parameters())
    x = torch.tensor([X]).expand(50, -1)
    given = torch.tensor([[True, False, True]]).expand_as(x)  # token 0 alone is noised
    loss = ENUMERATED.token_nll(network, Batch(x, prompt_mask=given), torch.Generator().manual_seed(0))
    assert (loss[:, [0, 2]] == 0).all()
    # Rows at t = 1, where everything is masked, have no visible token whose probability is 0.
    level = ENUMERATED.noise_level(schedule_of(network), torch.full((50, 1), 1.0, dtype=torch.float64))
    last = ENUMERATED.two_draw_nll(
        network, Batch(x, prompt_mask=given), schedule_of(network), level, torch.rand(2, 50, 3, dtype=torch.float64)
    )
    for nats in (loss, last):
        (grad,) = torch.autograd.grad(nats.sum(), raw, retain_graph=True)
        assert grad.isfinite().all()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_bound_of_t_steps_is_the_sum_of_kls_and_bounds_what_the_sampler_draws(steps: int) -> None:
    objective = replace(ENUMERATED, steps=steps)
    network = table(objective)
    drawn = law(network, steps)
    slack = [step_bound(network, steps, x) + math.log(drawn[x]) for x in CLEAN_STATES]
    assert min(slack) > -1e-9
    assert (max(slack) < 1e-9) == (steps == 1)  # a single step writes all tokens at once: the bound is exact
    terms = [all_pairs(network, objective, (i - 0.5) / steps) for i in range(1, steps + 1)]
    mean = sum((p * loss).sum().item() for loss, p in terms) / steps
    assert math.isclose(mean, step_bound(network, steps, X), rel_tol=1e-9)


def test_more_steps_tighten_the_bound_towards_continuous_time() -> None:
    network = table(drift=0)
    limit = exact_bound(network, torch.tensor(POWERS, dtype=torch.float64)).item()
    gaps = [abs(step_bound(network, steps, X) - limit) for steps in (20, 80, 320)]
    assert gaps[0] > 3 * gaps[1] > 9 * gaps[2]
    many = ENUMERATED.in_steps(None)
    loss, p = all_pairs(replace(network, objective=many), many, 0.3)
    continuous, q = all_pairs(network, ENUMERATED, 0.3 * (1 - EPS))
    # In so many steps t is 0.3 to six digits, and a step's KL is that of the limit.
    assert math.isclose((p * loss).sum().item(), (q * continuous).sum().item() * (1 - EPS), rel_tol=1e-4)


class TruePosterior(TableDenoiser):
    """p(x_l | z, t) for a joint distribution of texts: a masked token is the likelier, the earlier it is masked."""

    joint: np.ndarray = np.random.default_rng(0).dirichlet(np.ones(len(CLEAN_STATES)))

    def __call__(
        self, z: Tensor, t: Tensor, positions: Any, *rest: Any, row_fn: RowFn | None = None, **options: Any
    ) -> Tensor:
        texts, w = torch.tensor(CLEAN_STATES), torch.tensor(POWERS, dtype=torch.float64)
        masked = (z == MASK)[:, None]
        hidden = t[:, :, None].clamp(min=T1) ** w[texts]  # but for a factor that all tokens have
        fits = ((z[:, None] == texts) | masked).all(-1)
        p = fits * torch.from_numpy(self.joint) * torch.where(masked, hidden, 1).prod(-1)
        mass = torch.einsum("bx,xlv->blv", p, torch.nn.functional.one_hot(texts, VOCAB.size).double())
        where = positions if isinstance(positions, Tensor) else tuple(positions)
        log_x = subs(mass.log().clamp(min=-700)[where], VOCAB)
        return log_x if row_fn is None else row_fn(log_x, slice(None))


def test_the_bound_is_exact_for_a_network_that_knows_the_joint_distribution() -> None:
    """Nothing is lost by revealing tokens in an order that depends on what they are."""
    network = TruePosterior(*vars(table()).values())
    w = torch.tensor(POWERS, dtype=torch.float64)
    for x, p in zip(CLEAN_STATES[::4], network.joint[::4].tolist(), strict=True):
        assert math.isclose(exact_bound(network, w, x).item(), -math.log(p), rel_tol=1e-6)
    batch = Batch(torch.tensor([X]).expand(2000, -1))
    with torch.no_grad():
        draws = torch.stack(
            [ENUMERATED.token_nll(network, batch, torch.Generator().manual_seed(s)).sum(1).mean() for s in range(16)]
        )
    nats = -math.log(network.joint[CLEAN_STATES.index(X)])
    assert abs(draws.mean().item() - nats) < 4 * draws.std().item() / 4


# --- the sampler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("canvas", [ALL_MASKED, (MASK, 1, MASK)], ids=["blank", "infill"])
@pytest.mark.parametrize(("steps", "drift"), [(1, 1.0), (3, 0.0), (3, 1.0), (30, 1.0)])  # 1/30 is below t1
def test_ancestral_is_the_enumerated_chain(steps: int, canvas: State, drift: float) -> None:
    network = table(drift=drift)
    with torch.no_grad():
        seen = sample_counts(Ancestral(steps), network, 3200, 1600, canvas)
    assert chi_square_p_value(seen, law(network, steps, canvas)) > 1e-3


def test_the_chi_square_would_notice_other_powers() -> None:
    network = table(powers=POWERS[::-1])
    with torch.no_grad():
        seen = sample_counts(Ancestral(3), network, 6400, 640)
    assert chi_square_p_value(seen, law(network, 3)) < 1e-3


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "ancestral"])
def test_samplers_of_one_schedule_refuse(name: str) -> None:
    sampler: Sampler = SAMPLERS[name]()
    model, canvas = tiny_models.tiny_denoiser(GenMD4()), Canvas(torch.full((1, tiny_models.LENGTH), 4), (0,))
    for each in (sampler, Blockwise(sampler=sampler)):
        with pytest.raises(ValueError, match="schedule for each token: use the default sampler"):
            list(each.run(model, canvas))


def test_blocks_refuse_but_one_block_is_the_sampler_itself() -> None:
    model = tiny_models.tiny_denoiser(GenMD4(), time_conditioned=True)
    canvas = Canvas(torch.full((3, tiny_models.LENGTH), 4), (0, 1, 2))
    *_, alone = Ancestral(5).run(model, canvas)
    *_, in_block = Blockwise(sampler=Ancestral(5)).run(model, canvas)
    assert torch.equal(alone, in_block)
    with pytest.raises(ValueError, match="not block by block"):
        list(Blockwise(block_size=5, sampler=Ancestral(5)).run(model, canvas))


# --- equal powers are MDLM --------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [None, 4])
def test_with_powers_of_one_losses_are_mdlms(steps: int | None) -> None:
    ours, mdlm = replace(ENUMERATED, steps=steps), MDLM(schedule=LogLinear(EPS), steps=steps)
    network = table(ours, powers=(1.0, 1.0, 1.0))
    twin = replace(network, objective=mdlm, objective_parameters=None)
    u = torch.tensor([[0.001], [0.02], [0.3], [0.97], [0.9999]], dtype=torch.float64)
    uniform = torch.rand(2, 5, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.tensor([X]).expand(5, -1))
    schedule, level = schedule_of(network), mdlm.noise_level(u)
    found = ours.two_draw_nll(network, batch, schedule, ours.noise_level(schedule, u), uniform)
    z = [torch.where(each < 1 - level.alpha, MASK, batch.tokens) for each in uniform]
    expected = sum(mdlm.weighted_nll(twin, batch, each, level) for each in z) / 2
    assert expected.sum() > 0  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected)


def test_with_powers_of_one_texts_are_mdlms() -> None:
    network = table(powers=(1.0, 1.0, 1.0))
    twin = replace(network, objective=MDLM(schedule=LogLinear(EPS)), objective_parameters=None)
    canvas = Canvas(torch.tensor([ALL_MASKED] * 50), tuple(range(50)))
    with torch.no_grad():
        *_, ours = Ancestral(6).run(network, canvas)
        *_, theirs = Ancestral(6).algorithm_1(twin, canvas)
    assert torch.equal(ours, theirs)


# --- bad input --------------------------------------------------------------------------------------------------


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="eps"):
        GenMD4(eps=1.0)
    with pytest.raises(ValueError, match="t1"):
        GenMD4(t1=0.0)
    with pytest.raises(ValueError, match="whole number"):
        GenMD4(steps=0)
    with pytest.raises(ValueError, match="continuous time"):
        GenMD4(steps=10, published_reconstruction=True)
    with pytest.raises(ValueError, match="belong to a model"):
        _ = GenMD4().process.schedule
    with pytest.raises(ValueError, match="needs a model with learned schedules"):
        GenMD4().token_nll(random_table(MDLM()), Batch(torch.tensor([X])), torch.Generator())
