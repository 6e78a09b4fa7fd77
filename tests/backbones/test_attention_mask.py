"""Who sees whom: stages, caches, padding before a text. Reading in parts is reading at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backbones.test_dit import BIDIRECTIONAL, LOCAL, OPTIONS, hidden, network, tokens
from unmask.backbones.attention_mask import attention_layout
from unmask.backbones.cache import KVCache
from unmask.context import AttentionStages, Context

CPU = torch.device("cpu")
every_network = pytest.mark.parametrize("options", BIDIRECTIONAL.values(), ids=list(BIDIRECTIONAL))


@given(length=st.integers(1, 12), block=st.integers(1, 13))
def test_the_two_streams_see_what_block_diffusion_defines(length: int, block: int) -> None:
    seen = AttentionStages.two_stream(length, block, CPU).mask()
    for i in range(2 * length):
        for j in range(2 * length):
            (noisy, mine), (also_noisy, theirs) = ((k < length, k % length // block) for k in (i, j))
            wanted = (theirs == mine if also_noisy else theirs < mine) if noisy else not also_noisy and theirs <= mine
            assert bool(seen[i, j]) == wanted


@given(st.data())
def test_a_part_of_the_text_in_blocks_sees_what_the_whole_does(data: st.DataObject) -> None:
    block, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    noisy = block * data.draw(st.integers(0, blocks - 1))
    order = AttentionStages.block_causal(0, block * blocks, block, noisy, CPU)
    whole = AttentionStages.two_stream(block * blocks, block, CPU).mask()
    clean = torch.arange(noisy) + block * blocks
    inside = torch.cat([clean, torch.arange(noisy, noisy + block)])
    size = noisy + block
    assert torch.equal(order.mask()[:size, :size], whole[inside][:, inside])


def read_in_parts(net: Any, z: Tensor, parts: tuple[int, ...], block: int, **context: Any) -> Tensor:
    """Hidden states of clean text, block by block, each part kept."""
    cache, read, states = KVCache(), 0, []
    for size in parts:
        order = AttentionStages.block_causal(read, read + size, block, read + size, CPU)
        states.append(hidden(net, z[:, read : read + size], 0.0, stages=order, cache=cache.view(), **context))
        read += size
    return torch.cat(states, 1)


@every_network
@pytest.mark.parametrize("parts", [(12,), (4, 8), (4, 4, 4)], ids=str)
def test_reading_block_by_block_is_reading_at_once(options: dict[str, Any], parts: tuple[int, ...]) -> None:
    net, z = network(**options), tokens(2, 12)
    at_once = hidden(net, z, 0.0, stages=AttentionStages.block_causal(0, 12, 4, 12, CPU))
    torch.testing.assert_close(read_in_parts(net, z, parts, 4), at_once, atol=1e-5, rtol=0)


@every_network
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_noisy_stream_says_what_a_block_beside_a_cache_says(options: dict[str, Any], number: int) -> None:
    """Training sees all blocks in one pass, sampling one beside the kept ones: they are the same network."""
    net, x, z, t = network(**options), tokens(2, 12), tokens(2, 12, seed=1), torch.rand(2, 12)
    t = t[:, ::4].repeat_interleave(4, 1)
    both = torch.cat([z, x], 1), torch.cat([t, torch.zeros_like(t)], 1)
    first = 4 * number
    window = slice(first, first + 4)
    trained = hidden(net, *both, stages=AttentionStages.two_stream(12, 4, CPU))[:, window]
    cache = KVCache()
    if first:
        clean = AttentionStages.block_causal(0, first, 4, first, CPU)
        hidden(net, x[:, :first], 0.0, stages=clean, cache=cache.view())
    order = AttentionStages.block_causal(first, first + 4, 4, first, CPU)
    sampled = hidden(net, z[:, window], t[:, window], stages=order, cache=cache.view(keep=0))
    torch.testing.assert_close(sampled, trained, atol=1e-5, rtol=0)
    assert cache.end == first
    # What was not read yet may come with the block, in one call.
    later = KVCache()
    together = torch.cat([x[:, :first], z[:, window]], 1), t[:, : first + 4].clone()
    together[1][:, :first] = 0
    order = AttentionStages.block_causal(0, first + 4, 4, first, CPU)
    sampled = hidden(net, *together, stages=order, cache=later.view(keep=first))[:, first:]
    torch.testing.assert_close(sampled, trained, atol=1e-5, rtol=0)
    assert later.end == first


@every_network
@pytest.mark.parametrize("part", [slice(5, 12), slice(5, 8)], ids=["prefix", "both sides"])
def test_a_part_read_again_beside_the_rest_of_the_same_text_says_the_same(options: dict[str, Any], part: slice) -> None:
    net, z = network(**options), tokens(3, 12)
    cache = KVCache()
    whole = hidden(net, z, cache=cache.view(0))
    again = hidden(net, z[:, part], cache=cache.view(part.start, keep=0))
    torch.testing.assert_close(again, whole[:, part], atol=1e-5, rtol=0)
    some = torch.tensor([2, 0])
    again = hidden(net, z[some, part], cache=cache.view(part.start, keep=0, sequence_ids=some))
    torch.testing.assert_close(again, whole[some, part], atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", BIDIRECTIONAL.values(), ids=list(BIDIRECTIONAL))
def test_padding_before_a_text_changes_nothing(options: dict[str, Any]) -> None:
    net, z = network(**options), tokens(2, 9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, :4] = False
    padded = hidden(net, z, valid=valid)
    torch.testing.assert_close(padded[:1], hidden(net, z[:1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(padded[1:, 4:], hidden(net, z[1:, 4:]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, LOCAL], ids=["plain", "local"])
def test_padding_before_a_text_in_blocks_changes_nothing(options: dict[str, Any]) -> None:
    net, z = network(**options), tokens(2, 12)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, :4] = False
    padded = read_in_parts(net, z, (4, 8), 4, valid=valid)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[1:, 4:], read_in_parts(net, z[1:, 4:], (8,), 4), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_padding_before_a_causal_text_changes_nothing(options: dict[str, Any]) -> None:
    net, z = network(causal=True, **options), tokens(2, 9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, :4] = False
    padded = hidden(net, z, valid=valid)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[1:, 4:], hidden(net, z[1:, 4:]), atol=1e-5, rtol=0)


def test_a_cache_forgets_the_oldest_places_and_drops_sequences() -> None:
    net, z = network(), tokens(3, 12)
    cache = KVCache()
    for first in (0, 4):
        order = AttentionStages.block_causal(first, first + 4, 4, first + 4, CPU)
        hidden(net, z[:, first : first + 4], 0.0, stages=order, cache=cache.view())
    assert (cache.start, cache.end) == (0, 8)
    order = AttentionStages.block_causal(8, 12, 4, 8, CPU)

    def said(rows: Tensor) -> Tensor:
        return hidden(net, z[rows, 8:], 0.0, stages=order, cache=cache.view(keep=0))

    everyone = said(torch.arange(3))
    cache.select(torch.tensor([0, 2]))
    torch.testing.assert_close(said(torch.tensor([0, 2])), everyone[[0, 2]], atol=1e-6, rtol=0)
    cache.evict_before(4)
    assert (cache.start, cache.end) == (4, 8)
    forgotten = said(torch.tensor([0, 2]))
    assert not torch.allclose(forgotten, everyone[[0, 2]], atol=1e-3)
    cache.evict_before(2)  # which it has long done
    assert torch.equal(said(torch.tensor([0, 2])), forgotten)


@every_network
def test_a_shifted_network_is_read_one_place_before(options: dict[str, Any]) -> None:
    straight, shifted, z = network(**options), network(shift_logits=True, **options), tokens(3, 8)
    rows = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    rows[0, :2], rows[1, 0] = True, False  # a text's first token has none before it
    sequence, place = rows.nonzero(as_tuple=True)
    expected = hidden(straight, z)[sequence, (place - 1).clamp(min=0)]
    torch.testing.assert_close(hidden(shifted, z, positions=rows), expected, atol=1e-5, rtol=0)


def test_the_first_token_of_a_block_is_predicted_by_the_clean_text_before_it() -> None:
    straight, shifted = network(), network(shift_logits=True)
    z, order = tokens(1, 16), AttentionStages.two_stream(8, 4, CPU)
    rows = torch.zeros(1, 16, dtype=torch.bool)
    rows[0, [4, 5]] = True
    expected = hidden(straight, z, stages=order)[0, [8 + 3, 4]]
    torch.testing.assert_close(hidden(shifted, z, positions=rows, stages=order), expected, atol=1e-5, rtol=0)


def test_a_shifted_network_needs_the_token_before_an_asked_one() -> None:
    net, z, cache = network(shift_logits=True), tokens(1, 8), KVCache()
    hidden(net, z, cache=cache.view(0))
    rows = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="must be given the token before"):
        hidden(net, z[:, 4:], positions=rows, cache=cache.view(4, keep=0))
    rows = torch.tensor([[False, True, True, True, True]])
    again = hidden(net, z[:, 3:], positions=rows, cache=cache.view(3, keep=0))
    torch.testing.assert_close(again, hidden(network(), z)[0, 3:7], atol=1e-5, rtol=0)


def test_text_begins_after_its_padding() -> None:
    """Rotary networks see only how far apart tokens are; others are told where each of them stands."""
    valid = torch.tensor([[True] * 5, [False, False, True, True, True], [True, True, True, False, False]])
    view = attention_layout(5, CPU, causal=False, context=Context(valid=valid))
    assert view.position_ids[:, 2:].tolist() == [[2, 3, 4], [0, 1, 2], [2, 3, 4]]
    cache = KVCache()
    hidden(network(), tokens(3, 4), valid=valid, cache=cache.view())
    view = attention_layout(1, CPU, causal=True, context=Context(valid=valid, cache=cache.view()))
    assert view.position_ids.tolist() == [[4], [2], [4]]


@pytest.mark.filterwarnings("ignore")  # that it is not compiled, which takes a minute
@pytest.mark.parametrize("padded", [False, True])
def test_flex_attention_sees_the_same(monkeypatch: pytest.MonkeyPatch, padded: bool) -> None:
    """Where there is a GPU the two streams go through flex attention; its forward pass runs here, too."""
    from torch.nn.attention.flex_attention import flex_attention

    net, z, order = network(), tokens(2, 32), AttentionStages.two_stream(16, 4, CPU)
    context = {"valid": torch.arange(16).expand(2, -1) < torch.tensor([[16], [9]])} if padded else {}
    expected = hidden(net, z, stages=order, **context)
    asked: list[int] = []

    def flex() -> Any:
        asked.append(1)
        return flex_attention

    monkeypatch.setattr("unmask.backbones.layers._flex_attention", flex)
    monkeypatch.setattr("unmask.backbones.dit.FLEX_DEVICES", {"cpu"})
    torch.testing.assert_close(hidden(net, z, stages=order, **context), expected, atol=1e-5, rtol=0)
    assert asked


@pytest.mark.parametrize("causal", [False, True])
def test_a_plain_text_needs_no_mask(causal: bool) -> None:
    view = attention_layout(5, CPU, causal=causal)
    assert view.mask is None
    assert view.position_ids.tolist() == [0, 1, 2, 3, 4]
