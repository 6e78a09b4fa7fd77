from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saved_tensors import count_saved_tensors
from unmask.backbones import dit
from unmask.backbones.cache import KVCache
from unmask.backbones.dit import DiT, DiTConfig, LlamaBlock, LocalInit, TimeConditioning
from unmask.backbones.layers import Attention, DepthwiseConv, RotaryEmbedding, _apply_rotary
from unmask.context import Context
from unmask.types import Times, Tokens, Vocab

VOCAB = Vocab(size=11, mask_id=10)
SMALL = DiTConfig(width=32, depth=2, heads=2, max_length=32, dropout=0.0)
TIMED = {"time_conditioning": TimeConditioning(width=16)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "timed": TIMED,
    "qk_norm": {"qk_norm": True},
    "tied": {"tie_embeddings": True},
    "relu2": {"activation": "relu2"},
    "llama": {"llama": LlamaBlock(intermediate_size=48, kv_heads=1, qkv_bias=True)},
}
LOCAL: dict[str, Any] = {"local_init": LocalInit(kernel_size=3), "rope_theta": 100.0}
BIDIRECTIONAL = {**OPTIONS, "local": LOCAL}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
every_bidirectional = pytest.mark.parametrize("options", BIDIRECTIONAL.values(), ids=list(BIDIRECTIONAL))
both_directions = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def network(**options: Any) -> DiT:
    """A DiT in eval mode, every weight moved off its start: zeros would hide what depends on what."""
    torch.manual_seed(0)
    net = replace(SMALL, **options).build(VOCAB).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return net


def tokens(rows: int, length: int, seed: int = 0) -> Tokens:
    return torch.randint(VOCAB.size, (rows, length), generator=torch.Generator().manual_seed(seed))


def hidden(net: DiT, z: Tokens, t: Times | float = 0.3, positions: Any = None, **context: Any) -> Tensor:
    with torch.no_grad():
        return net.encode(
            net.embed(z), torch.full((len(z), 1), t) if isinstance(t, float) else t, positions, Context(**context)
        )


def changed(a: Tensor, b: Tensor) -> list[bool]:
    """For each position, whether any of its hidden states moved."""
    return ((a - b).abs().amax(dim=(0, 2)) > 1e-3).tolist()


def test_a_plain_network_knows_no_time() -> None:
    net = network()
    assert not net.capabilities.time_conditioned
    assert [name for name, _ in net.named_parameters() if "modulation" in name or "time" in name] == []
    assert torch.equal(hidden(net, tokens(2, 5), 0.1), hidden(net, tokens(2, 5), 0.9))


def test_a_timed_network_knows_the_time_of_each_position() -> None:
    net, z = network(**TIMED), tokens(2, 5)
    assert net.capabilities.time_conditioned
    names = {name.split(".")[-2] for name, _ in net.named_parameters()}
    assert "modulation" in names
    assert all(changed(hidden(net, z, 0.1), hidden(net, z, 0.9)))
    torch.testing.assert_close(hidden(net, z, torch.full((2, 5), 0.3)), hidden(net, z, 0.3))
    times = torch.tensor([[0.3], [0.7]])  # rows of a batch do not share their time
    torch.testing.assert_close(hidden(net, z, times)[1:], hidden(net, z[1:], 0.7))


def test_time_is_modulation_and_nothing_else() -> None:
    # At its start modulation does nothing, gates being one: the same weights without it agree bit for bit.
    torch.manual_seed(0)
    timed, plain = replace(SMALL, **TIMED).build(VOCAB), SMALL.build(VOCAB)
    lacking = plain.load_state_dict(timed.state_dict(), strict=False)
    assert {name.split(".")[-1] for name in lacking.missing_keys} == {"bias"}  # of norms, which are zero
    torch.testing.assert_close(hidden(timed, tokens(2, 6)), hidden(plain, tokens(2, 6)))


@every_option
def test_a_causal_network_sees_no_later_token(options: dict[str, Any]) -> None:
    net, z = network(causal=True, **options), tokens(2, 8)
    other = z.clone()
    other[:, 5] = (z[:, 5] + 1) % VOCAB.size
    assert changed(hidden(net, z), hidden(net, other)) == [False] * 5 + [True] * 3


@every_bidirectional
def test_a_bidirectional_network_sees_all_tokens(options: dict[str, Any]) -> None:
    net, z = network(**options), tokens(2, 8)
    other = z.clone()
    other[:, 5] = (z[:, 5] + 1) % VOCAB.size
    assert changed(hidden(net, z), hidden(net, other)) == [True] * 8


@both_directions
@pytest.mark.parametrize("where", ["left", "right"])
def test_nobody_looks_at_padding(causal: bool, where: str) -> None:
    # Padding on the left also moves the text: only distances between positions count.
    net, text = network(causal=causal), tokens(1, 6)
    inside = slice(4, 10) if where == "left" else slice(0, 6)
    z, valid = tokens(2, 10, seed=1), torch.ones(2, 10, dtype=torch.bool)
    z[0, inside] = text[0]
    valid[0] = False
    valid[0, inside] = True
    padded = hidden(net, z, valid=valid)
    torch.testing.assert_close(padded[:1, inside], hidden(net, text), atol=1e-5, rtol=0)
    torch.testing.assert_close(padded[1:], hidden(net, z[1:]), atol=1e-5, rtol=0)
    assert padded.isfinite().all()  # a loss over all positions must not meet NaN, even times zero
    if not causal or where == "left":  # without `valid` the padding would have been looked at
        assert not torch.allclose(hidden(net, z)[:1, inside], padded[:1, inside], atol=1e-3)


@both_directions
def test_a_row_that_is_all_padding_is_finite_and_harms_nobody(causal: bool) -> None:
    net, z = network(causal=causal), tokens(2, 6)
    out = hidden(net, z, valid=torch.tensor([[False] * 6, [True] * 6]))
    assert out.isfinite().all()
    torch.testing.assert_close(out[1:], hidden(net, z[1:]), atol=1e-5, rtol=0)


def test_the_order_of_tokens_matters() -> None:
    # Without positions a bidirectional network's states would just move along with their tokens.
    net, z = network(), torch.tensor([[1, 2, 3, 4]])
    assert not torch.allclose(hidden(net, z).flip(1), hidden(net, z.flip(1)), atol=1e-3)


@pytest.mark.parametrize("options", [{}, TIMED, {"qk_norm": True}], ids=["plain", "timed", "qk_norm"])
@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 7), (1, 4, 7), (6, 1, 5)], ids=str)
def test_reading_in_chunks_with_a_cache_is_reading_at_once(chunks: tuple[int, ...], options: dict[str, Any]) -> None:
    net, z = network(causal=True, **options), tokens(2, 12)
    cache, parts, read = KVCache(), [], 0
    for size in chunks:
        parts.append(hidden(net, z[:, read : read + size], cache=cache.view()))
        read += size
        assert cache.end == read
    torch.testing.assert_close(torch.cat(parts, 1), hidden(net, z), atol=1e-5, rtol=0)


def test_tying_shares_the_tensor() -> None:
    tied, free = network(tie_embeddings=True), network()
    assert tied.lm_head.weight is tied.embedding.weight
    assert free.lm_head.weight is not free.embedding.weight
    assert count(free) - count(tied) == VOCAB.size * SMALL.width


def count(net: DiT) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def test_qk_norm_has_parameters_and_bounds_queries() -> None:
    net, plain = network(qk_norm=True), network()
    names = {name for name, _ in net.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert names == {f"layers.{i}.attention.{x}_norm.weight" for i in range(SMALL.depth) for x in "qk"}
    expected = hidden(net, tokens(2, 6))
    with torch.no_grad():
        for block in net.layers:
            block.attention.qkv.weight[: 2 * SMALL.width] *= 10  # normed away; values are left alone
    torch.testing.assert_close(hidden(net, tokens(2, 6)), expected, atol=1e-3, rtol=0)


@both_directions
@every_option
def test_the_first_prediction_is_uniform_unless_tied(options: dict[str, Any], causal: bool) -> None:
    net = replace(SMALL, causal=causal, **options).build(VOCAB)
    logits = net.compute_logits(hidden(net, tokens(2, 6)))
    assert logits.shape == (2, 6, VOCAB.size)
    assert bool((logits == 0).all()) != net.config.tie_embeddings


def test_dropout_acts_in_training_only() -> None:
    net, z = network(dropout=0.5), tokens(2, 6)
    assert torch.equal(hidden(net, z), hidden(net, z))
    assert torch.equal(hidden(net, z), hidden(network(), z))
    net.train()
    assert not torch.equal(hidden(net, z), hidden(net, z))
    still = network(dropout=0.0).train()
    assert torch.equal(hidden(still, z), hidden(still, z))


def test_the_head_answers_at_chosen_rows_as_it_does_everywhere() -> None:
    net, z = network(), tokens(3, 7)
    states, rows = hidden(net, z), tokens(3, 7, seed=1) < 4
    full, chosen = net.compute_logits(states), net.compute_logits(states[rows])
    assert chosen.shape == (int(rows.sum()), VOCAB.size)
    torch.testing.assert_close(chosen, full[rows])


@every_bidirectional
def test_every_parameter_learns(options: dict[str, Any]) -> None:
    net = network(**options)
    net.compute_logits(net.encode(net.embed(tokens(2, 6)), torch.full((2, 1), 0.3))).log_softmax(-1)[
        ..., 0
    ].sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad != 0).any()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
@every_bidirectional
def test_other_precisions_say_nearly_the_same(options: dict[str, Any], dtype: torch.dtype) -> None:
    net, z = network(**options), tokens(2, 32)
    expected = hidden(net, z)
    got = hidden(net.to(dtype), z)  # times keep their own precision: bfloat16 would round 0.3 by 0.001
    assert got.dtype == dtype
    tolerance = 0.1 * float(expected.abs().max()) if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"width": 30, "heads": 4}, "width 30 must be an even multiple of the 4 heads"),
        ({"width": 6, "heads": 2}, "width 6 must be an even multiple of the 2 heads"),
        ({"width": 0}, "width must be at least 1; got 0"),
        ({"depth": 0}, "depth must be at least 1; got 0"),
        ({"heads": -1}, "heads must be at least 1; got -1"),
        ({"max_length": 0}, "max_length must be at least 1; got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\); got 1.0"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\); got -0.1"),
        ({"dropout": float("nan")}, r"dropout must be in \[0, 1\); got nan"),
        ({"rope_theta": 0.0}, "rope_theta.*got 0"),
    ],
    ids=str,
)
def test_bad_sizes_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DiTConfig(**options)


def test_a_time_embedding_of_no_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width.*got 0"):
        TimeConditioning(width=0)


def test_dropout_is_on_both_branches() -> None:
    """With a dropout near one, attention and mlp both fall silent: only the embedding is left."""
    config = DiTConfig(width=16, depth=2, heads=2, max_length=8, dropout=0.999999)
    network = config.build(Vocab(5, 4)).train()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    z = torch.tensor([[0, 1, 2, 3]])
    hidden = network.encode(network.embed(z), torch.zeros(1, 1))
    torch.testing.assert_close(hidden, network.norm(network.embedding(z)))


@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 3])
def test_a_head_starts_by_looking_at_its_offset(offset: int) -> None:
    """With queries and keys of nothing but biases: the logit of j seen from i is largest at i + offset."""
    rotary = RotaryEmbedding(32, theta=100.0)
    attention = Attention(64, heads=2, qk_norm=False, causal=False, offset_bias=True)
    attention.init_offset_bias((offset, offset), scale=8.0, rotary=rotary)
    angles = rotary.cos_sin(torch.arange(20))
    assert attention.q_bias is not None
    assert attention.k_bias is not None
    q, k = (
        _apply_rotary(bias.view(2, 1, 32).expand(-1, 20, -1), angles) for bias in (attention.q_bias, attention.k_bias)
    )
    logits = (q @ k.mT / math.sqrt(32)).detach()
    for i in range(4, 16):
        assert logits[:, i].argmax(-1).tolist() == [i + offset] * 2
        assert logits[0, i, i + offset].item() == pytest.approx(8.0, rel=1e-5)
        assert logits[0, i].softmax(-1)[i + offset] > 0.5


def test_heads_take_the_offsets_in_turn() -> None:
    net = DiTConfig(width=64, depth=1, heads=4, local_init=LocalInit(offsets=(-1, 1))).build(VOCAB)
    bias = net.layers[0].attention.q_bias.view(4, 16)
    assert torch.equal(bias[0], bias[2])
    assert not torch.equal(bias[0], bias[1])


def test_neighbours_are_a_convolution() -> None:
    torch.manual_seed(0)
    layer, x = DepthwiseConv(5, kernel_size=3), torch.randn(2, 7, 5)
    expected = torch.nn.functional.conv1d(x.mT, layer.weight.T[:, None], padding=1, groups=5).mT
    assert torch.allclose(layer(x, None, None), expected, atol=1e-6)


def test_neighbours_end_at_the_border_of_a_document() -> None:
    net, z = network(**LOCAL), tokens(1, 8)
    other = z.clone()
    other[0, 4:] = (other[0, 4:] + 1) % VOCAB.size
    documents = torch.tensor([[0] * 4 + [1] * 4])
    a, b = (hidden(net, each, document_ids=documents) for each in (z, other))
    assert torch.equal(a[0, :4], b[0, :4])
    assert not torch.allclose(a[0, 4:], b[0, 4:])


@pytest.mark.parametrize("where", ["left", "right"])
def test_neighbours_do_not_look_at_padding(where: str) -> None:
    net, z = network(**LOCAL), tokens(2, 5)
    padding = torch.full((2, 3), 7)
    flags = torch.zeros(2, 3, dtype=torch.bool)
    valid = torch.ones_like(z, dtype=torch.bool)
    parts = ([padding, z], [flags, valid]) if where == "left" else ([z, padding], [valid, flags])
    padded = hidden(net, torch.cat(parts[0], 1), valid=torch.cat(parts[1], 1))
    kept = padded[:, 3:] if where == "left" else padded[:, :5]
    assert torch.allclose(kept, hidden(net, z), atol=1e-5)


def test_only_a_network_that_sees_both_sides_can_start_locally() -> None:
    with pytest.raises(ValueError, match="attends to both sides"):
        DiTConfig(causal=True, local_init=LocalInit())
    with pytest.raises(ValueError, match="odd"):
        LocalInit(kernel_size=4)
    with pytest.raises(ValueError, match="at least one offset"):
        LocalInit(offsets=())
    assert SMALL.local_init is None


def test_the_activation_is_the_one_asked_for() -> None:
    """Between two linear layers that change nothing, only it is left."""
    x = torch.tensor([[-2.0, 0.5, 3.0, 0.0] * 8])
    for name, expected in (
        ("relu2", x.clamp(min=0) ** 2),
        ("gelu", torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        first, between, _ = replace(SMALL, activation=name).build(VOCAB).layers[0].mlp  # type: ignore[union-attr, misc]
        assert first.out_features == 4 * SMALL.width
        torch.testing.assert_close(between(x), expected)
    with pytest.raises(ValueError, match="activation must be gelu or relu2; got 'swish'"):
        replace(SMALL, activation="swish")


@every_option
def test_what_is_computed_again_is_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients to the last bit, dropout included; and what is kept for them is less, and less again."""
    z, asked = tokens(3, 20), tokens(3, 20, seed=1) < 4
    found, sizes = [], []
    for way in ("all", "spared", "recomputed"):
        net = network(**options, depth=4, dropout=0.3).train()
        net.gradient_checkpointing = way == "recomputed"
        torch.manual_seed(1)
        with count_saved_tensors() as kept, monkeypatch.context() as patched:
            if way == "all":
                patched.setattr(dit, "recompute_scope", nullcontext)
            loss = net.encode(net.embed(z), torch.full((3, 1), 0.3), asked).square().sum()
        sizes.append(kept.activation_bytes(net))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([p.grad for p in net.parameters() if p.grad is not None])
    assert sizes[1] < 0.9 * sizes[0]
    assert sizes[2] < 0.5 * sizes[1]
    for all_kept, spared, recomputed in zip(*found, strict=True):
        assert torch.equal(all_kept, spared)
        assert torch.equal(all_kept, recomputed)


def test_a_network_may_be_transformed() -> None:
    """Gradients of gradients, and those of torch.func, which knows no hooks, are what they were."""
    net, z, t = network().double(), tokens(2, 6), torch.full((2, 1), 0.3)
    weight = net.embedding.weight.detach()

    def loss(embedding: Tensor) -> Tensor:
        net.embedding.forward = lambda z: embedding[z]  # type: ignore[method-assign, assignment]
        with sdpa_kernel(SDPBackend.MATH):  # the others have no gradients of gradients
            return net.encode(net.embed(z), t).square().mean()

    slope = torch.func.grad(loss)
    x = weight.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(x), x, create_graph=True)
    torch.testing.assert_close(found.detach(), slope(weight))
    along = torch.randn_like(weight)
    (curved,) = torch.autograd.grad((found * along).sum(), x)
    step = 1e-5
    expected = (slope(weight + step * along) - slope(weight - step * along)) / (2 * step)
    torch.testing.assert_close(curved, expected, rtol=1e-4, atol=1e-7)
