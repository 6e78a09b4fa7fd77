"""What every objective promises: parametrised over the union."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_models
from unmask import Batch
from unmask.diffusion.schedule import Cosine, Geometric
from unmask.objectives import NextToken, Objective

KINDS = pytest.mark.parametrize("kind", tiny_models.OBJECTIVES, ids=lambda k: k.__name__)
MASK = 4


def tokens(rows: int, length: int = tiny_models.LENGTH, seed: int = 0) -> torch.Tensor:
    clean = torch.tensor([0, 1, 2, 3, 5, 6])
    return clean[torch.randint(6, (rows, length), generator=torch.Generator().manual_seed(seed))]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@KINDS
@pytest.mark.parametrize("timed", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 5),
    length=st.integers(1, tiny_models.LENGTH),
    seed=st.integers(0, 1000),
    schedule=st.sampled_from([None, Cosine(), Geometric()]),
)
def test_nats_and_gradients_are_finite(
    kind: type[Objective], timed: bool, rows: int, length: int, seed: int, schedule: object
) -> None:
    has_schedule = "schedule" in {field.name for field in fields(kind)}  # type: ignore[arg-type]
    objective = kind(schedule=schedule) if schedule is not None and has_schedule else kind()  # type: ignore[call-arg]
    model = tiny_models.tiny_denoiser(objective, time_conditioned=timed)
    model.requires_grad_(True)
    nats = objective.token_nll(model, Batch(tokens(rows, length, seed)), generator(seed))
    assert nats.shape == (rows, length)
    nats.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert nats.isfinite().all()
    assert all(g.isfinite().all() for g in gradients)
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)


@KINDS
@settings(max_examples=15, deadline=None)
@given(parts=st.lists(st.integers(1, 4), min_size=2, max_size=4), seed=st.integers(0, 1000))
def test_a_split_batch_gets_the_same_noise(kind: type[Objective], parts: list[int], seed: int) -> None:
    """Ranks and micro-batches together are the global batch, to the last mask."""
    objective, total = kind(), sum(parts)
    model, x = tiny_models.tiny_denoiser(objective), tokens(total, seed=seed)
    whole = objective.token_nll(model, Batch(x), generator(seed))
    pieces, first = [], 0
    for rows in parts:
        part = Batch(x[first : first + rows], row_offset=first, global_batch_size=total)
        pieces.append(objective.token_nll(model, part, generator(seed)))
        first += rows
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-9, atol=1e-12)


@KINDS
def test_padding_and_given_tokens_are_neither_noised_nor_counted(kind: type[Objective]) -> None:
    objective = kind()
    seen: list[torch.Tensor] = []
    model = tiny_models.tiny_denoiser(objective)

    class Watched(tiny_models.CountingDenoiser):
        def __call__(
            self, z: torch.Tensor, t: torch.Tensor, positions: torch.Tensor, *rest: object, **options: object
        ) -> torch.Tensor:  # type: ignore[override]
            seen.append(z)
            return super().__call__(z, t, positions, *rest, **options)

    x = tokens(30)
    valid, frozen = torch.ones_like(x, dtype=torch.bool), torch.zeros_like(x, dtype=torch.bool)
    valid[:, 9:] = False
    x[:, 9:] = MASK  # padding may be any id, even the mask's
    frozen[:, :3] = True
    nats = objective.token_nll(Watched(model), Batch(x, valid, frozen), generator())
    assert (nats[:, :3] == 0).all()
    assert (nats[:, 9:] == 0).all()
    assert (nats[:, 3:9] != 0).any()
    if not isinstance(objective, NextToken):  # its input is the text one place late
        draws = [draw for z in seen for draw in z.split(len(x))]  # a call may read more than one
        assert all(torch.equal(draw[:, :3], x[:, :3]) for draw in draws)


@KINDS
def test_context_ids_are_neither_noised_nor_counted(kind: type[Objective]) -> None:
    """As N in DNA: such tokens are read, and cost nothing."""
    objective = kind()
    config = tiny_models.tiny_denoiser(objective).config
    model = replace(config, vocab=replace(config.vocab, context_ids=(5, 6))).build().double().eval()
    seen: list[torch.Tensor] = []

    class Watched(tiny_models.CountingDenoiser):
        def __call__(
            self, z: torch.Tensor, t: torch.Tensor, positions: torch.Tensor, *rest: object, **options: object
        ) -> torch.Tensor:  # type: ignore[override]
            seen.append(z)
            return super().__call__(z, t, positions, *rest, **options)

    x = tokens(30)
    context = (x == 5) | (x == 6)
    nats = objective.token_nll(Watched(model), Batch(x), generator())
    assert (nats[context] == 0).all()
    assert (nats[~context] != 0).any()
    if objective.process.inserts_tokens:  # whose tokens move
        for row, text in zip(seen[0].tolist(), x.tolist(), strict=True):
            assert [v for v in row if v in (5, 6)] == [v for v in text if v in (5, 6)]
    elif not isinstance(objective, NextToken):
        draws = [draw[:, : x.shape[1]] for z in seen for draw in z.split(len(x))]
        assert all(torch.equal(draw[context], x[context]) for draw in draws)


@KINDS
def test_padding_does_not_change_the_nats_of_the_text(kind: type[Objective]) -> None:
    """A short text padded to a longer row costs what it costs alone."""
    objective = kind()
    model, x = tiny_models.tiny_denoiser(objective), tokens(4, 7)
    alone = objective.token_nll(model, Batch(x), generator())
    padded = torch.cat([x, torch.zeros(4, 5, dtype=torch.int64)], 1)
    valid = torch.arange(12).expand(4, -1) < 7
    together = objective.token_nll(model, Batch(padded, valid), generator())
    torch.testing.assert_close(together[:, :7], alone, rtol=1e-9, atol=1e-12)


@KINDS
def test_the_same_generator_gives_the_same_nats(kind: type[Objective]) -> None:
    objective = kind()
    model, batch = tiny_models.tiny_denoiser(objective), Batch(tokens(4))
    first, again = (objective.token_nll(model, batch, generator(3)) for _ in range(2))
    assert torch.equal(first, again)
    if not isinstance(objective, NextToken):
        assert not torch.equal(first, objective.token_nll(model, batch, generator(4)))


@KINDS
def test_the_mask_column_of_log_x_is_empty(kind: type[Objective]) -> None:
    model = tiny_models.tiny_denoiser(kind())
    z = torch.tensor([[4, 1, 4, 0]])
    log_x = model(z, torch.full((1, 1), 0.3), torch.ones_like(z, dtype=torch.bool))
    if kind().process.inserts_tokens:  # there is the rate of insertion
        log_x[:, MASK] = -torch.inf
    assert (log_x[:, MASK] == -torch.inf).all()
    if kind().normalized:
        torch.testing.assert_close(log_x.exp().sum(-1), torch.ones(4, dtype=log_x.dtype))


@KINDS
def test_padding_on_the_left_does_not_change_the_nats_either(kind: type[Objective]) -> None:
    """Noise is drawn by position, so only objectives without noise can be compared token by token."""
    objective = kind()
    model, x = tiny_models.tiny_denoiser(objective), tokens(4, 7)
    padded = torch.cat([torch.zeros(4, 5, dtype=torch.int64), x], 1)
    valid = torch.arange(12).expand(4, -1) >= 5
    together = objective.token_nll(model, Batch(padded, valid), generator())
    assert (together[:, :5] == 0).all()
    if isinstance(objective, NextToken):
        alone = objective.token_nll(model, Batch(x), generator())
        torch.testing.assert_close(together[:, 5:], alone, rtol=1e-9, atol=1e-12)
