from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import tiny_models
from unmask import MDLM
from unmask.context import Context
from unmask.objectives.base import sample_noise
from unmask.types import Batch, NoiseGroup, Vocab


def tokens(rows: int = 2, length: int = 3) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length)


# Vocab


@pytest.mark.parametrize("size", [1, 0, -4])
def test_a_vocabulary_needs_a_token_beside_the_mask(size: int) -> None:
    with pytest.raises(ValueError, match=f"^a vocabulary needs at least one token besides the mask, .* got {size}$"):
        Vocab(size, 0)


@pytest.mark.parametrize("mask", [-1, 5, 17])
def test_the_mask_is_one_of_the_ids(mask: int) -> None:
    with pytest.raises(ValueError, match=rf"^the mask id {mask} is outside the vocabulary 0\.\.4$"):
        Vocab(5, mask)


@pytest.mark.parametrize("mask", [0, 2, 4])
def test_the_mask_may_be_any_id(mask: int) -> None:
    Vocab(5, mask).validate(torch.tensor([[0, 1, 2, 3, 4]]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_may_be_either_integer(dtype: torch.dtype) -> None:
    Vocab(5, 4).validate(torch.tensor([[0, 3]], dtype=dtype), clean=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
def test_ids_of_another_type_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"^token ids must be integers \(int64\); got {dtype}$"):
        Vocab(5, 4).validate(torch.zeros(1, 2, dtype=dtype))


@pytest.mark.parametrize("worst", [-1, 5, 999])
def test_an_id_outside_the_vocabulary_is_named(worst: int) -> None:
    with pytest.raises(ValueError, match=rf"^token id {worst} is outside the vocabulary 0\.\.4$"):
        Vocab(5, 4).validate(torch.tensor([[1, worst, 2]]))


def test_data_must_not_contain_the_mask() -> None:
    hidden = torch.tensor([[1, 2, 3]])
    Vocab(5, 2).validate(hidden)  # on a canvas it may
    with pytest.raises(ValueError, match=r"^the data contains the mask id 2, which is not a token of text;"):
        Vocab(5, 2).validate(hidden, clean=True)


def test_no_tokens_are_in_order() -> None:
    Vocab(5, 4).validate(torch.zeros(0, 8, dtype=torch.int64), clean=True)


# Batch


@pytest.mark.parametrize("shape", [(6,), (1, 2, 3)])
def test_tokens_are_rows_of_sequences(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^tokens must be \[B, L\]; got shape \[.*\]$") as error:
        Batch(torch.zeros(shape, dtype=torch.int64))
    assert str(list(shape)) in str(error.value)


@pytest.mark.parametrize("name", ["valid", "prompt_mask"])
@pytest.mark.parametrize(
    ("flags", "got"),
    [
        (torch.ones(2, 4, dtype=torch.bool), r"torch.bool \[2, 4\]"),
        (torch.ones(2, 3), r"torch.float32 \[2, 3\]"),
    ],
)
def test_flags_are_booleans_in_the_shape_of_the_tokens(name: str, flags: torch.Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be booleans of shape \[2, 3\]; got {got}$"):
        Batch(tokens(), **{name: flags})


def test_everything_counts_unless_said_otherwise() -> None:
    batch = Batch(tokens())
    assert bool(batch.loss_mask.all())
    assert batch.loss_mask.shape == (2, 3)
    assert batch.context == Context()


def test_neither_padding_nor_what_is_given_counts() -> None:
    valid = torch.tensor([[True, True, False], [True, True, True]])
    frozen = torch.tensor([[True, False, False], [False, False, False]])
    batch = Batch(tokens(), valid=valid, prompt_mask=frozen)
    assert batch.loss_mask.tolist() == [[False, True, False], [True, True, True]]
    assert valid.tolist() == [[True, True, False], [True, True, True]]  # and the flags are left alone
    assert Batch(tokens(), valid=valid).loss_mask.tolist() == valid.tolist()
    assert Batch(tokens(), prompt_mask=frozen).loss_mask.tolist() == (~frozen).tolist()


def test_the_network_is_told_of_padding_and_of_nothing_else() -> None:
    flags = torch.tensor([[True, True, False], [True, True, True]])
    assert Batch(tokens(), valid=flags, prompt_mask=flags).context == Context(valid=flags)
    assert Batch(tokens(), prompt_mask=flags).context.is_empty


def test_a_batch_alone_is_the_global_batch() -> None:
    assert Batch(tokens()).resolved_global_batch_size == 2
    assert Batch(tokens(), global_batch_size=8).resolved_global_batch_size == 8
    assert Batch(tokens(), row_offset=6, global_batch_size=8).resolved_global_batch_size == 8


@pytest.mark.parametrize(
    ("row_offset", "global_batch_size", "rows"), [(7, 8, r"7\.\.8"), (0, 1, r"0\.\.1"), (-1, 8, r"-1\.\.0")]
)
def test_rows_must_fit_into_the_global_batch(row_offset: int, global_batch_size: int, rows: str) -> None:
    with pytest.raises(ValueError, match=f"^rows {rows} are outside a global batch of {global_batch_size} rows$"):
        Batch(tokens(), row_offset=row_offset, global_batch_size=global_batch_size)


def test_rows_of_several_noise_groups_are_drawn_as_if_each_were_alone() -> None:
    """Of whichever batch a group is a part, and however much padding its rows have there."""
    objective, vocab = MDLM(), Vocab(6, 5)
    model = tiny_models.tiny_denoiser(objective, vocab.size, vocab.mask_id)
    texts = torch.arange(3 * 8).view(3, 8) % 5

    def noise(batch: Batch) -> list[torch.Tensor]:
        return list(sample_noise(model, batch, objective.times, torch.Generator(), num_blocks=2))

    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    first = NoiseGroup(generator(1), 1, row_offset=4, global_batch_size=9)
    groups = (first, NoiseGroup(generator(2), 2, row_offset=0, global_batch_size=2))
    together = noise(Batch(texts, noise_groups=groups))
    apart = [
        sample_noise(model, Batch(texts[:1], row_offset=4, global_batch_size=9), objective.times, generator(1), 2),
        sample_noise(model, Batch(texts[1:, :5]), objective.times, generator(2), 2),
    ]
    for both, one, two in zip(together, *apart, strict=True):
        assert torch.equal(both[:1], one)
        assert torch.equal(both[1:, : two.shape[1]], two)


def test_truncating_a_batch_keeps_what_a_row_has_once() -> None:
    @dataclass(frozen=True)
    class Labelled(Batch):
        labels: torch.Tensor | None = None

    batch = Labelled(torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.bool), labels=torch.arange(3))
    short = batch.truncated(2)
    assert isinstance(short, Labelled)
    assert short.tokens.tolist() == [[0, 1], [4, 5], [8, 9]]
    assert short.valid is not None
    assert short.valid.shape == (3, 2)
    assert short.labels is not None
    assert short.labels.tolist() == [0, 1, 2]
