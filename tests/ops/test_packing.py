"""Asked at some positions, a network says there what it says when asked at all; padding costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from backbones.test_dit import BIDIRECTIONAL, OPTIONS, network, tokens
from unmask.context import Context
from unmask.ops.packing import PackedTokens, SelectedPositions
from unmask.types import Queries

B, L = 4, 9
ROWS = {
    "some": torch.tensor([[i % (b + 2) == 0 for i in range(L)] for b in range(B)]),
    "none of one sequence": torch.tensor([[b > 0 and i > 3 for i in range(L)] for b in range(B)]),
    "as many as heads": torch.tensor([[b == 1 and i < 2 for i in range(L)] for b in range(B)]),
    "all": torch.ones(B, L, dtype=torch.bool),
    "none": torch.zeros(B, L, dtype=torch.bool),
}
DOCUMENTS = (torch.arange(L) // 4).expand(B, L)
VALID = torch.arange(L)[None] < torch.tensor([[L], [6], [7], [L]])
CONTEXTS: dict[str, dict[str, Tensor]] = {
    "bare": {},
    "padded": {"valid": VALID},
    "documents": {"document_ids": DOCUMENTS},
    "both": {"document_ids": DOCUMENTS, "valid": VALID},
}
every_network = pytest.mark.parametrize("options", BIDIRECTIONAL.values(), ids=list(BIDIRECTIONAL))


@every_network
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=list(CONTEXTS))
@pytest.mark.parametrize("rows", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("width", [1, L], ids=["one time a sequence", "one time a position"])
def test_asked_positions(options: dict[str, Any], context: dict[str, Tensor], rows: Tensor, width: int) -> None:
    net = network(**options).double()
    z, t = tokens(B, L), torch.linspace(0.1, 0.9, B * width, dtype=torch.float64).view(B, width)
    rows = rows & VALID if "valid" in context else rows
    torch.testing.assert_close(
        net.encode(net.embed(z), t, rows, context=Context(**context)),
        net.encode(net.embed(z), t, context=Context(**context))[rows],
    )


@every_network
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=list(CONTEXTS))
def test_gradients_are_the_same(options: dict[str, Any], context: dict[str, Tensor]) -> None:
    gradients = []
    for asked in (True, False):
        net = network(**options).double()
        z, t = tokens(B, L), torch.full((B, 1), 0.3, dtype=torch.float64)
        rows = ROWS["some"] & VALID
        hidden = (
            net.encode(net.embed(z), t, rows, context=Context(**context))
            if asked
            else net.encode(net.embed(z), t, context=Context(**context))[rows]
        )
        hidden.sin().sum().backward()
        gradients.append({name: p.grad for name, p in net.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_a_causal_network_is_asked_too(options: dict[str, Any]) -> None:
    net = network(causal=True, **options)
    z, t, rows = tokens(B, L), torch.full((B, 1), 0.3), ROWS["some"]
    torch.testing.assert_close(net.encode(net.embed(z), t, rows), net.encode(net.embed(z), t)[rows])


@pytest.mark.parametrize("options", [{}, {"shift_logits": True}, {"causal": True}], ids=str)
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=list(CONTEXTS))
def test_indices_are_rows_too(options: dict[str, Any], context: dict[str, Tensor]) -> None:
    """In any order, some twice, and even where there is padding."""
    net = network(**options).double()
    z, t = tokens(B, L), torch.full((B, 1), 0.3, dtype=torch.float64)
    rows = (torch.tensor([3, 1, 0, 0]), torch.tensor([1, 7, 8, 8]))
    flags = torch.zeros(B, L, dtype=torch.bool)
    flags[rows] = True
    alike = net.encode(net.embed(z), t, flags, context=Context(**context))[[2, 1, 0, 0]]
    torch.testing.assert_close(net.encode(net.embed(z), t, rows, context=Context(**context)), alike)
    text = (torch.tensor([3, 1, 0, 0]), torch.tensor([1, 2, 8, 8]))
    torch.testing.assert_close(
        net.encode(net.embed(z), t, text, context=Context(**context)),
        net.encode(net.embed(z), t, context=Context(**context))[text],
    )


def test_the_last_layer_works_for_who_asks_only() -> None:
    net = network(depth=1)
    seen: list[int] = []
    net.layers[0].get_submodule("mlp").register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    net.encode(net.embed(tokens(B, L)), torch.zeros(B, 1), ROWS["some"])
    assert seen == [int(ROWS["some"].sum()) * net.config.width]


def test_places() -> None:
    asked = SelectedPositions(Queries.from_mask(ROWS["some"]))
    values = torch.arange(B * L).view(B, L)[ROWS["some"]]
    assert asked.max_selected == int(ROWS["some"].sum(1).max())
    assert asked.unpad(asked.pad(values)).tolist() == values.tolist()


@pytest.mark.parametrize("options", [*BIDIRECTIONAL.values(), {"shift_logits": True}], ids=[*BIDIRECTIONAL, "shifted"])
@pytest.mark.parametrize("how", ["plain", "causal", "recomputed"])
@pytest.mark.parametrize("width", [1, L], ids=["one time a sequence", "one time a position"])
@pytest.mark.parametrize("left", [False, True], ids=["padding after", "padding before"])
def test_a_padded_sequence_is_what_it_is_alone(options: dict[str, Any], how: str, width: int, left: bool) -> None:
    if how == "causal" and options.keys() & {"local_init", "shift_logits"}:
        return
    valid = VALID.flip(1) if left else VALID
    z, t = tokens(B, L), torch.linspace(0.1, 0.9, B * width, dtype=torch.float64).view(B, width)
    gradients = []
    for padded in (True, False):
        net = network(causal=how == "causal", **options).double()
        net.gradient_checkpointing = how == "recomputed"
        if padded:
            out = net.encode(net.embed(z), t, context=Context(valid=valid))[valid]
        else:
            alone = [
                net.encode(net.embed(row[kept][None]), time[kept if width > 1 else ...][None])[0]
                for row, time, kept in zip(z, t, valid, strict=True)
            ]
            out = torch.cat(alone)
        out.sin().sum().backward()
        gradients.append((out.detach(), {name: p.grad for name, p in net.named_parameters()}))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_padding_that_is_asked_about_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says is the same whether other padding is left out or not."""
    net, z, t = network().double(), tokens(B, L), torch.zeros(B, 1, dtype=torch.float64)
    rows = ROWS["some"] | (torch.arange(L) == L - 1)
    said = net.encode(net.embed(z), t, rows, context=Context(valid=VALID & (torch.arange(L) > 1)))
    monkeypatch.setattr("unmask.ops.packing._MAX_DENSITY", 0)
    torch.testing.assert_close(
        said, net.encode(net.embed(z), t, rows, context=Context(valid=VALID & (torch.arange(L) > 1)))
    )


def test_padding_is_left_out_of_the_layers() -> None:
    net = network(depth=2)
    seen: list[int] = []
    for name in ("attention.qkv", "attention.out", "mlp"):
        net.layers[0].get_submodule(name).register_forward_hook(lambda _, given, __: seen.append(given[0].numel()))
    net.encode(net.embed(tokens(B, L)), torch.zeros(B, 1), VALID, Context(valid=VALID))
    assert seen == [int(VALID.sum()) * net.config.width] * 3


def test_lines_and_rectangles() -> None:
    packed = PackedTokens(VALID, Queries.from_mask(VALID))
    values = torch.arange(B * L * 2).view(B, L, 2)
    assert torch.equal(packed.pack(values), values[VALID])
    assert torch.equal(packed.unpack(packed.pack(values))[VALID], values[VALID])
    one = torch.arange(B).view(B, 1, 1)
    assert torch.equal(packed.pack(one), one.expand(B, L, 1)[VALID])


@pytest.mark.parametrize("padding", [0, 1, 18], ids=["none", "hardly any", "nothing else"])
def test_padding_that_stays(padding: int) -> None:
    kept = torch.arange(18).view(2, 9) >= padding
    assert PackedTokens.if_sparse(kept, Queries.from_mask(kept)) is None
    sparse = torch.arange(18).view(2, 9) >= 3
    assert PackedTokens.if_sparse(sparse, Queries.from_mask(sparse)) is not None
