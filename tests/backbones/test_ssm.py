"""State-space networks: the published numbers, padding, documents, the cache, and both strands of DNA."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unmask import MDLM, CaduceusConfig, DiMambaConfig, MambaConfig, ModelConfig, NextToken, Vocab
from unmask.backbones._recurrent_cache import RecurrentCache
from unmask.backbones._ssm import SelectiveSSM
from unmask.backbones.base import Backbone
from unmask.backbones.cache import KVCache
from unmask.backbones.dit import TimeConditioning
from unmask.backbones.state_space import SSMConfig, StateSpace
from unmask.context import Context
from unmask.model import Denoiser
from unmask.training._muon import MuonOptimizer
from unmask.training.optim import AdamW, Muon

SIZES: dict[str, Any] = {"width": 12, "depth": 2, "state_space": StateSpace(state_size=3)}
COMPLEMENT = (3, 2, 1, 0, 4, 5, 6)
CONFIGS: dict[str, SSMConfig] = {
    "mamba": MambaConfig(**SIZES),
    "caduceus-ph": CaduceusConfig(**SIZES),
    "caduceus-multiply": CaduceusConfig(**SIZES, strategy="multiply"),
    "caduceus-ps": CaduceusConfig(**SIZES, equivariant=True, complement_ids=COMPLEMENT),
    "dimamba": DiMambaConfig(**SIZES, dropout=0.0, time_conditioning=TimeConditioning(width=8)),
}
VOCAB = Vocab(7, 4)


def build(config: SSMConfig, seed: int = 0) -> Denoiser:
    """A network in float64 whose layers all matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        objective = NextToken() if config.causal else MDLM()
        model = ModelConfig(VOCAB, config, objective).build().double().eval()
        for name, parameter in model.named_parameters():
            if "A_log" not in name and "dt_proj.bias" not in name:
                torch.nn.init.normal_(parameter, std=0.4)
    return model.requires_grad_(False)


@pytest.fixture(params=list(CONFIGS))
def network(request: pytest.FixtureRequest) -> Backbone:
    return build(CONFIGS[request.param]).backbone


def encode(network: Backbone, tokens: Tensor, **context: Any) -> Tensor:
    t = torch.full((len(tokens), 1), 0.3, dtype=torch.float64)
    return network.encode(network.embed(tokens), t, None, Context(**context))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_padded_row_is_what_it_is_alone(network: Backbone, side: str) -> None:
    tokens = drawn(2, 11)
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[1, : {"left": 4, "right": 0, "both": 3}[side]] = False
    valid[1, 11 - {"left": 0, "right": 4, "both": 2}[side] :] = False
    padded = encode(network, tokens, valid=valid)
    torch.testing.assert_close(padded[1, valid[1]], encode(network, tokens[1:, valid[1]])[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(padded[:1], encode(network, tokens[:1]), rtol=1e-10, atol=1e-10)


def test_documents_in_a_row_are_what_they_are_alone(network: Backbone) -> None:
    tokens, documents = drawn(2, 11), torch.tensor([[0] * 4 + [1] * 7, [0] * 6 + [1] * 1 + [2] * 4])
    packed = encode(network, tokens, document_ids=documents)
    for row, number in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        own = documents[row] == number
        alone = encode(network, tokens[row : row + 1, own])
        torch.testing.assert_close(packed[row, own], alone[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["mask", "indices"])
def test_queried_positions_are_rows_of_all_positions(network: Backbone, kind: str) -> None:
    tokens, t = drawn(3, 9), torch.full((3, 1), 0.3, dtype=torch.float64)
    asked = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.4
    positions: Any = asked if kind == "mask" else tuple(index.flip(0) for index in asked.nonzero(as_tuple=True))
    hidden = network.encode(network.embed(tokens), t, positions)
    torch.testing.assert_close(hidden, encode(network, tokens)[positions], rtol=1e-12, atol=1e-12)
    assert network.compute_logits(hidden).shape == (int(asked.sum()), 7)
    assert network.has_plain_head


def test_attention_stages_and_foreign_caches_are_refused(network: Backbone) -> None:
    with pytest.raises(ValueError, match="does not support attention stages"):
        network.require(Context(stages=object()))  # type: ignore[arg-type]
    if not network.capabilities.supports_cache:
        with pytest.raises(ValueError, match="has no cache"):
            network.new_cache()
        return
    with pytest.raises(ValueError, match=r"recurrent state, and was given a \w*KVCacheView"):
        encode(network, drawn(1, 3), cache=KVCache().view())


@pytest.mark.parametrize("pieces", [(1,) * 11, (4, 1, 6), (2, 9), (10, 1)])
@pytest.mark.parametrize("restricted", ["", "valid", "document_ids"])
def test_mamba_in_pieces_beside_its_cache_is_mamba_at_once(pieces: tuple[int, ...], restricted: str) -> None:
    network, tokens = build(CONFIGS["mamba"]).backbone, drawn(2, 11)
    context: dict[str, Any] = {}
    if restricted == "valid":
        context["valid"] = torch.arange(11) >= torch.tensor([[0], [5]])
    elif restricted:
        context["document_ids"] = torch.tensor([[0] * 4 + [1] * 7, [0] * 5 + [1] * 6])
    whole, cache, outputs = encode(network, tokens, **context), network.new_cache(), []
    for size in pieces:
        part = tokens[:, cache.end : cache.end + size]
        outputs.append(encode(network, part, cache=cache.view(), **context))
    assert cache.end == 11
    expected = whole if restricted != "valid" else whole * context["valid"][..., None]
    joined = torch.cat(outputs, 1)
    joined = joined if restricted != "valid" else joined * context["valid"][..., None]
    torch.testing.assert_close(joined, expected, rtol=1e-10, atol=1e-10)


def test_a_recurrent_cache_selects_peeks_and_forgets_everything_or_nothing() -> None:
    network, tokens = build(CONFIGS["mamba"]).backbone, drawn(3, 8)
    cache = network.new_cache()
    assert isinstance(cache, RecurrentCache)
    with pytest.raises(ValueError, match="started by a call with all"):
        encode(network, tokens[:1, :2], cache=cache.view(sequence_ids=torch.tensor([0])))
    cache = network.new_cache()
    encode(network, tokens[:, :5], cache=cache.view())
    whole = encode(network, tokens)
    peeked = encode(network, tokens[:, 5:], cache=cache.view(keep=0))
    torch.testing.assert_close(peeked, whole[:, 5:])
    one = torch.tensor([1])
    some = encode(network, tokens[1:2, 5:6], cache=cache.view(keep=0, sequence_ids=one))
    torch.testing.assert_close(some, whole[1:2, 5:6])
    assert cache.end == 5
    cache.select(torch.tensor([2, 0]))
    torch.testing.assert_close(encode(network, tokens[[2, 0], 5:], cache=cache.view(5)), whole[[2, 0], 5:])
    with pytest.raises(ValueError, match="the next position is 8; got 3"):
        cache.view(3)
    with pytest.raises(ValueError, match="all 2 tokens of a call, or none; got keep=1"):
        encode(network, tokens[:2, :2], cache=cache.view(keep=1))
    with pytest.raises(ValueError, match="cannot forget a part of its 8 tokens"):
        cache.evict_before(3)
    cache.evict_before(0)
    cache.evict_before(8)
    assert (cache.end, cache.layers) == (8, [])
    torch.testing.assert_close(encode(network, tokens[:, :4], cache=cache.view()), encode(network, tokens[:, :4]))


def reverse_complement(tokens: Tensor) -> Tensor:
    return torch.tensor(COMPLEMENT)[tokens].flip(-1)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 2), st.integers(0, 10**6), st.sampled_from(["add", "multiply"]))
def test_the_other_strand_gives_the_reverse_complement_of_the_prediction(
    length: int, depth: int, seed: int, strategy: str
) -> None:
    config = CaduceusConfig(
        width=6, depth=depth, state_space=StateSpace(2), strategy=strategy, equivariant=True, complement_ids=COMPLEMENT
    )
    network, tokens = build(config, seed).backbone, drawn(2, length, seed=seed)
    hidden, reverse = (encode(network, x) for x in (tokens, reverse_complement(tokens)))
    expected = torch.cat(hidden.flip(1).chunk(2, dim=-1)[::-1], dim=-1)
    torch.testing.assert_close(reverse, expected, rtol=1e-14, atol=1e-14)
    # The head adds the products of both strands in their order, which rounds differently.
    logits, other = map(network.compute_logits, (hidden, reverse))
    torch.testing.assert_close(other, logits.flip(1)[..., list(COMPLEMENT)], rtol=1e-11, atol=1e-11)


def test_one_strand_alone_is_not_equivariant() -> None:
    network, tokens = build(CONFIGS["caduceus-ph"]).backbone, drawn(2, 8)
    logits, other = (network.compute_logits(encode(network, x)) for x in (tokens, reverse_complement(tokens)))
    assert (other - logits.flip(1)[..., list(COMPLEMENT)]).abs().max() > 0.1


def test_both_strands_are_the_network_of_one_strand_and_its_head() -> None:
    both = build(CONFIGS["caduceus-ps"]).backbone
    one = build(CONFIGS["caduceus-ph"]).backbone
    one.load_state_dict(both.state_dict(), strict=False)
    tokens = drawn(2, 9)
    hidden, other = encode(one, tokens), encode(one, reverse_complement(tokens)).flip(1)
    torch.testing.assert_close(encode(both, tokens), torch.cat([hidden, other], -1))
    expected = one.compute_logits(hidden) + one.compute_logits(other)[..., list(COMPLEMENT)]
    torch.testing.assert_close(both.compute_logits(encode(both, tokens)), expected)


def test_a_new_network_starts_as_published() -> None:
    torch.manual_seed(0)
    network = MambaConfig(width=64, depth=4).build(VOCAB)
    layer = next(module for module in network.modules() if isinstance(module, SelectiveSSM))
    torch.testing.assert_close(layer.A_log.exp(), torch.arange(1.0, 17).expand(128, 16))
    assert layer.D.eq(1).all()
    dt = torch.nn.functional.softplus(layer.dt_proj.bias)
    assert 0.0009 < dt.min() < 0.003 < 0.05 < dt.max() < 0.11
    assert layer.dt_proj.weight.abs().max() <= 4**-0.5
    out_proj = network.get_parameter("layers.0.mixer.out_proj.weight")
    assert float(out_proj.detach().abs().max()) == pytest.approx(128**-0.5 / 2, rel=0.01)
    assert float(network.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    total = sum(parameter.numel() for parameter in MambaConfig().build(Vocab(16, 3)).parameters())
    assert total == 468_608
    caduceus = CaduceusConfig().build(Vocab(16, 3))
    assert sum(parameter.numel() for parameter in caduceus.parameters()) == 470_702


def test_weight_decay_and_muon_leave_the_decays_and_the_embedding_alone() -> None:
    model = copy.deepcopy(build(CONFIGS["caduceus-ps"])).requires_grad_(True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    (optimizer,) = AdamW(weight_decay=0.1).build(model)
    decayed, free = ({names[p] for p in group["params"]} for group in optimizer.param_groups)
    assert {name.rpartition(".")[2] for name in free} == {"A_log", "D", "bias", "weight"}
    assert {name for name in free if name.endswith("weight")} == {
        name for name in names.values() if "norm" in name or "embedding" in name
    }
    assert {name.split(".", 4)[-1] for name in decayed} >= {"in_proj.weight", "ssm.conv1d.weight"}
    muon, _ = Muon().build(model)
    assert isinstance(muon, MuonOptimizer)
    assert not any("A_log" in names[p] for p in muon.param_groups[0]["params"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"equivariant": True}, "needs the complement of each token id"),
        ({"complement_ids": (1, 2, 0)}, "whose complement it is"),
        ({"complement_ids": (1, 9)}, "whose complement it is"),
        ({"strategy": "mean"}, "strategy must be add or multiply; got 'mean'"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"max_length": 0}, "max_length must be None, or from 1"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
    ],
)
def test_settings_that_make_no_network_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CaduceusConfig(**settings)


def test_sizes_and_complements_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="state_size must be from 1 to 4,096; got 0"):
        StateSpace(state_size=0)
    with pytest.raises(ValueError, match="0 < dt_min <= dt_max"):
        StateSpace(dt_min=0.5)
    with pytest.raises(ValueError, match="complement_ids has 7 token ids, and the vocabulary 8"):
        CaduceusConfig(complement_ids=COMPLEMENT).build(Vocab(8, 4))
    with pytest.raises(ValueError, match="the complement of the mask, 0, must be the mask"):
        CaduceusConfig(complement_ids=COMPLEMENT).build(Vocab(7, 0))
    with pytest.raises(ValueError, match=r"causal=True, and this objective needs causal=False"):
        MambaConfig().with_causal(False)
    with pytest.raises(ValueError, match="dropout must be in"):
        DiMambaConfig(dropout=1.0)
