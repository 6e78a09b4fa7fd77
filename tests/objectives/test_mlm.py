"""MLM against enumeration: the mean of its loss; and that its loss is never taken for a bound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import tiny_models
from oracle import LENGTH, MASK, NUM_CLEAN, STATES, State, TableDenoiser, continuous_bound, probabilities, random_table
from unmask.likelihood._estimate import NatsEstimator, seeded_generator
from unmask.likelihood.requests import ScoreRequest, score_requests
from unmask.likelihood.step_bounds import why_no_step_bounds
from unmask.objectives import MDLM, MLM
from unmask.types import Batch

X: State = (2, 0, 1)


def expected_loss(table: TableDenoiser, objective: MLM, x: State) -> float:
    """(1/f) E over all choices and replacements of the summed cross-entropy at chosen tokens."""
    f, mask, other = objective.fraction, objective.mask_share, objective.random_share
    t = float(objective.schedule.inverse(torch.tensor(1 - f, dtype=torch.float64)))
    prediction = probabilities(table, t)
    nats = 0.0
    outcomes = [
        [(v, False, 1 - f), (MASK, True, f * mask), (v, True, f * (1 - mask - other))]
        + [(random, True, f * other / NUM_CLEAN) for random in range(NUM_CLEAN)]
        for v in x
    ]
    for combination in itertools.product(*outcomes):
        z = tuple(token for token, _, _ in combination)
        p = math.prod(probability for _, _, probability in combination)
        at_x = prediction[STATES.index(z), range(LENGTH), x]
        nats += p * sum(-math.log(at_x[place]) for place in range(LENGTH) if combination[place][1])
    return nats / f


@pytest.mark.parametrize(
    "objective",
    [MLM(), MLM(fraction=0.15), MLM(fraction=0.5, mask_share=0.5, random_share=0.5), MLM(mask_share=1, random_share=0)],
    ids=["mosaicbert", "bert", "half-random", "masks-only"],
)
def test_the_mean_of_the_loss_is_the_enumerated_one(objective: MLM) -> None:
    table = random_table(objective)
    batch = Batch(torch.tensor([X]).expand(8_000, -1))
    means = [float(objective.token_nll(table, batch, seeded_generator(seed)).sum(1).mean()) for seed in range(8)]
    mean = sum(means) / 8
    error = math.sqrt(sum((m - mean) ** 2 for m in means) / 7 / 8)
    assert error < 0.05
    assert abs(mean - expected_loss(table, objective, X)) < 4 * error


def test_chosen_tokens_are_replaced_in_their_shares() -> None:
    seen: list[torch.Tensor] = []

    class Spy(TableDenoiser):
        def __call__(self, z: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:  # type: ignore[override]
            seen.append(z)
            return super().__call__(z, *rest, **options)  # type: ignore[arg-type]

    table = random_table(MLM())
    batch = Batch(
        torch.tensor([X]).expand(40_000, -1), prompt_mask=torch.tensor([[True, False, False]]).expand(40_000, -1)
    )
    MLM(fraction=0.2).token_nll(Spy(table.logits, table.drift, table.objective), batch, seeded_generator(0))
    (z,) = seen
    assert (z[:, 0] == X[0]).all()  # given
    shares = {token: float((z[:, 1] == token).double().mean()) for token in range(4)}
    expected = {MASK: 0.2 * 0.8, 1: 0.2 * 0.1 / 3, 2: 0.2 * 0.1 / 3}
    for token, share in expected.items():
        assert abs(shares[token] - share) < 4 * math.sqrt(share / 40_000)


def test_the_loss_is_no_bound_and_evaluation_takes_mdlms() -> None:
    """Its loss is lower than the bound, so a likelihood from it would flatter the model."""
    table = random_table(MLM(), drift=0.0)
    assert MLM().bound == MDLM()
    assert MDLM().bound == MDLM()
    exact = continuous_bound(table, MLM().schedule, X)
    assert abs(expected_loss(table, MLM(mask_share=1, random_share=0), X) - exact) > 0.1
    estimator = NatsEstimator(table, MLM())
    assert isinstance(estimator.objective, MDLM)
    score = score_requests(table, MLM(), [ScoreRequest(X)])
    assert abs(score.nats - exact) < 4 * math.sqrt(score.variance)
    assert why_no_step_bounds(MLM()) is None
    assert isinstance(MLM().in_steps(4), MDLM)


def test_a_model_of_it_is_sampled_as_mdlms() -> None:
    mlm, mdlm = (tiny_models.tiny_denoiser(objective) for objective in (MLM(), MDLM()))
    z = torch.tensor([[4, 1, 4, 0]])
    at = torch.full((1, 1), 0.3, dtype=torch.float64), z == 4
    assert torch.equal(mlm(z, *at), mdlm(z, *at))
    assert mlm.process == mdlm.process


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fraction": 0.0}, r"^fraction must be above 0 and at most 1; got 0\.0$"),
        (
            {"mask_share": 0.9, "random_share": 0.2},
            r"^mask_share and random_share .* together at most 1; got 0\.9 and 0\.2$",
        ),
        ({"random_share": -0.1}, "must be 0 or above"),
    ],
)
def test_impossible_shares_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        MLM(**settings)
