"""The public API as its users call it."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
import unmask
from unmask import (
    MDLM,
    Ancestral,
    Batch,
    DiTConfig,
    FirstHitting,
    LanguageModel,
    NextToken,
    SamplingParams,
    Tokenizer,
)
from unmask.context import Context
from unmask.model import Denoiser, denoiser
from unmask.ops import linear as products
from unmask.sampling.factory import make_sampler


def model(objective: unmask.MDLM | unmask.NextToken | None = None) -> LanguageModel:
    objective = objective or MDLM()
    backbone = DiTConfig(
        width=32, depth=1, heads=2, max_length=24, dropout=0.5, causal=isinstance(objective, NextToken)
    )
    torch.manual_seed(0)
    lm = LanguageModel.from_config(backbone, objective, Tokenizer.characters("abc "))
    torch.nn.init.normal_(lm.denoiser.backbone.lm_head.weight, std=1.0)  # type: ignore[union-attr, arg-type]
    return lm


def test_sample() -> None:
    result = model().sample(n=4, length=20, sampler=Ancestral(steps=8), seed=0)
    assert result.tokens.shape == (4, 20)
    assert len(result.texts) == 4
    assert all(len(text) == 20 and set(text) <= set("abc ") for text in result.texts)
    assert 1 <= result.nfe <= 8
    assert result.num_queries == 80


def test_a_row_has_the_seed_it_would_have_alone() -> None:
    """Row i of seed s is row 0 of seed s + i."""
    lm = model()
    together = lm.sample(n=3, length=12, seed=5).texts
    assert together == [lm.sample(n=1, length=12, seed=5 + i).text for i in range(3)]


def test_dropout_is_off_in_sampling_and_scoring_and_on_again_afterwards() -> None:
    lm = model()
    lm.denoiser.train()
    assert lm.sample(length=12).text == lm.sample(length=12).text
    assert lm.score("abc").nats == lm.score("abc").nats
    assert lm.denoiser.training


def test_prompts_and_infilling_are_the_same_thing() -> None:
    lm = model()
    prompted = lm.sample(n=2, length=10, prompt="abc ", sampler=FirstHitting(), seed=1)
    infilled = lm.infill("abc <mask:6>", n=2, sampler=FirstHitting(), seed=1)
    assert prompted.texts == infilled.texts
    assert all(text.startswith("abc ") for text in prompted.texts)


def test_infill_keeps_the_text_around_the_holes() -> None:
    text = model().infill("ab<mask:3>ca<mask>b", seed=3).text
    assert len(text) == 9
    assert (text[:2], text[5:7], text[8]) == ("ab", "ca", "b")
    assert text == model().infill(["ab", 3, "ca", 1, "b"], seed=3).text


def test_denoise_answers_at_the_asked_rows_only() -> None:
    lm = model()
    lm.denoiser.eval()
    z = torch.tensor([[0, 4, 1, 4], [4, 4, 4, 2]])
    t = torch.tensor([[0.5], [0.9]])
    log_x = lm.denoiser(z, t, z == 4)
    assert log_x.shape == (5, 5)
    picked = lm.denoiser(z, t, (torch.tensor([1, 0]), torch.tensor([2, 3])))
    torch.testing.assert_close(picked, log_x[[4, 1]])


def test_a_training_loop_of_ones_own() -> None:
    """`objective.token_nll` is all it needs, and the loss falls."""
    lm = model()
    optimizer = torch.optim.AdamW(lm.denoiser.parameters(), lr=1e-2)
    x = torch.tensor([[0, 1, 2, 3] * 6] * 16)
    losses = []
    for step in range(30):
        loss = lm.objective.token_nll(lm.denoiser, Batch(x), torch.Generator().manual_seed(step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("kind", tiny_models.OBJECTIVES, ids=lambda k: k.__name__)
def test_every_objective_has_a_sampler_by_default(kind: type) -> None:
    denoise = tiny_models.tiny_denoiser(kind())
    samples = LanguageModel(denoise).sample(n=2, length=6)
    assert not any(denoise.vocab.mask_id in ids for ids in samples.ids)


def test_temperature_zero_is_one_text() -> None:
    sampler = Ancestral(steps=1, params=SamplingParams(temperature=0))
    assert len(set(model().sample(n=5, length=8, sampler=sampler).texts)) == 1


def test_every_public_name_is_there_and_importing_is_cheap() -> None:
    """`import unmask` alone must not pay for torch."""
    for name in unmask.__all__:
        assert getattr(unmask, name) is not None
    code = "import sys, unmask; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = unmask.nothing


def test_frames_lead_from_the_canvas_to_what_fill_gives() -> None:
    lm = model()
    canvas = lm.encode_template("a<mask:6>b", n=3)
    sampler = unmask.RandomOrder(steps=3)
    frames = list(lm.generate_steps(canvas, sampler, seed=5))
    filled = lm.generate(canvas, sampler, seed=5)
    assert frames[0].tokens.equal(canvas)
    assert [int((frame.tokens == lm.vocab.mask_id).sum()) for frame in frames] == [18, 12, 6, 0]
    assert [frame.nfe for frame in frames] == [0, 1, 2, 3]
    assert frames[-1].tokens.equal(filled.tokens)
    assert (frames[-1].nfe, frames[-1].num_queries) == (filled.nfe, filled.num_queries)


def test_who_watches_keeps_gradients_and_the_model_its_mode() -> None:
    lm = model()
    lm.denoiser.train()
    for _ in lm.generate_steps(lm.blank_canvas(1, 4), Ancestral(steps=2)):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        assert lm.denoiser.training


def test_a_canvas_without_holes_is_its_own_only_frame() -> None:
    lm = model()
    canvas = torch.zeros(2, 4, dtype=torch.int64)
    assert [frame.tokens.equal(canvas) for frame in lm.generate_steps(canvas)] == [True]


def test_inference_leaves_every_part_in_its_own_mode() -> None:
    lm = model()
    lm.denoiser.train()
    lm.denoiser.backbone.eval()
    before = [module.training for module in lm.denoiser.modules()]
    with lm.inference_mode():
        assert not any(module.training for module in lm.denoiser.modules())
    assert [module.training for module in lm.denoiser.modules()] == before
    assert len(set(before)) == 2


@pytest.mark.parametrize("objective", [MDLM(), NextToken()], ids=lambda o: type(o).__name__)
def test_bfloat16_is_float32_but_for_its_rounding(objective: unmask.MDLM | unmask.NextToken) -> None:
    """Matrices are rounded once, the head stays as it is, and the bound moves by about a part in 256."""
    lm, rounded = model(objective), model(objective)
    rounded.denoiser.to_bf16()
    weights = dict(rounded.denoiser.named_parameters())
    narrow = {name for name, weight in weights.items() if weight.dtype == torch.bfloat16}
    assert narrow == {name for name in weights if ".attention." in name or (".mlp." in name and "weight" in name)}
    exact, coarse = (each.score("abc cab" * 3, draws=32) for each in (lm, rounded))
    assert exact.nats != coarse.nats
    assert abs(exact.nats - coarse.nats) < 0.02 * exact.nats
    texts = rounded.sample(2, 12, seed=4).texts
    assert texts == rounded.sample(2, 12, seed=4).texts
    assert all(set(text) <= set("abc ") for text in texts)


def test_an_option_of_another_sampler_is_refused() -> None:
    lm = LanguageModel(tiny_models.tiny_denoiser(MDLM()))
    for name, words in (
        ("default", "is for threshold or joint-threshold: name that sampler, too"),
        ("confidence", "has no threshold"),
    ):
        with pytest.raises(ValueError, match=words):
            make_sampler(lm.denoiser, name, threshold=0.5)
    chosen = make_sampler(lm.denoiser, "threshold", threshold=0.5)
    assert isinstance(chosen, unmask.Threshold)
    assert chosen.threshold == 0.5
    with pytest.raises(ValueError, match="this model has an exact one"):
        make_sampler(
            LanguageModel(tiny_models.tiny_denoiser(unmask.BlockDiffusion(block_size=3))).denoiser,
            "confidence",
            cache="dual",
        )


class Listening:
    """What a denoiser's network is given to read."""

    def __init__(self, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sequences: list[int] = []
        encode = denoiser.backbone.encode

        def heard(tokens: Tensor, *inputs: Any, **options: Any) -> Tensor:
            self.sequences.append(len(tokens))
            return encode(tokens, *inputs, **options)

        monkeypatch.setattr(denoiser.backbone, "encode", heard)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_sequences_that_are_the_same_are_read_once(timed: bool, indexed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    denoise = tiny_models.tiny_denoiser(MDLM(), time_conditioned=timed)
    mask, random = denoise.vocab.mask_id, torch.Generator().manual_seed(0)
    z = torch.randint(4, (1, 8), generator=random).masked_fill(torch.arange(8) % 2 == 0, mask).repeat(3, 1)
    rows: Any = (z == mask) & (torch.rand(z.shape, generator=random) < 0.6)
    assert rows.sum(1).unique().numel() > 1
    if indexed:  # one of them twice
        rows = tuple(torch.cat([each, each[:1]]) for each in rows.nonzero(as_tuple=True))
    t = torch.full((3, 1), 0.5)
    listening = Listening(denoise, monkeypatch)
    with torch.no_grad():
        together = denoise(z, t, rows)
        assert set(listening.sequences) == {1}
        at, place = rows.nonzero(as_tuple=True) if isinstance(rows, Tensor) else rows
        first = torch.zeros_like(at)
        alone = [denoise(z[b, None], t[:1], (first[:1], place[n, None])) for n, b in enumerate(at)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_sequences_that_differ_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for timed, change in ((False, "text"), (True, "time"), (False, "padding"), (False, "gradient")):
        denoise = tiny_models.tiny_denoiser(MDLM(), time_conditioned=timed)
        z, t = torch.full((3, 8), denoise.vocab.mask_id), torch.full((3, 1), 0.5)
        context = Context()
        if change == "text":
            z[1, 2] = 0
        elif change == "time":
            t[2] = 0.25
        elif change == "padding":
            context = Context(valid=torch.arange(8) < torch.tensor([[8], [5], [8]]))
        with monkeypatch.context() as patch, torch.set_grad_enabled(change == "gradient"):
            listening = Listening(denoise, patch)
            denoise(z, t, z == denoise.vocab.mask_id, context)
        assert listening.sequences == [3], change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_it_writes_the_same(dtype: str) -> None:
    lm, packed = model(), model()
    if dtype == "bfloat16":
        lm.denoiser.to_bf16()
        packed.denoiser.to_bf16()
    packed.denoiser.prepack()
    assert packed.sample(3, 20, seed=1).tokens.equal(lm.sample(3, 20, seed=1).tokens)
    assert packed.score("abc cab").nats == pytest.approx(lm.score("abc cab").nats, rel=1e-5)


def test_packed_and_trained_on_it_says_what_its_weights_say() -> None:
    lm, packed = model(), model()
    packed.denoiser.prepack()
    for each in (lm, packed):
        with torch.no_grad():
            for weight in each.denoiser.parameters():
                weight.mul_(1.5)
    assert packed.score("abc cab").nats == lm.score("abc cab").nats


@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_what_is_packed_is_what_is_multiplied(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last layer's queries, keys and values, of which it may take a part each."""
    backbone = DiTConfig(width=32, depth=2, heads=2, max_length=24, activation=activation)
    lm = LanguageModel.from_config(backbone, MDLM(), Tokenizer.characters("abc "))
    asked: list[int] = []

    def looked_up(weight: Tensor) -> Tensor:
        asked.append(id(weight))
        return weight

    monkeypatch.setattr(products, "_get_packed", looked_up)
    lm.score("abc cab")
    *_, last = lm.denoiser.backbone.layers  # type: ignore[misc, union-attr]
    unasked = (
        {id(weight) for weight in lm.denoiser.backbone.parameters() if weight.ndim == 2}
        - {id(lm.denoiser.backbone.embedding.weight)}
        - set(asked)
    )
    assert unasked <= {id(last.attention.qkv.weight)}  # type: ignore[union-attr]


def test_a_large_network_is_packed_in_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    lm, packed, copies = model(), model(), len(products._PACKED_WEIGHTS)
    monkeypatch.setattr(denoiser, "_MAX_SECOND_COPY", 1000)
    packed.denoiser.prepack()
    packed.denoiser.prepack()
    assert len(products._PACKED_WEIGHTS) == copies + 1  # that of the head, which is small
    layers = [layer for layer in packed.denoiser.modules() if isinstance(layer, products.PackedLinear)]
    assert {id(layer) for layer in layers} == {id(layer) for layer in packed.denoiser.quantizable_layers().values()}
    assert all(layer.weight.is_mkldnn for layer in layers)
    assert packed.score("abc cab").nats == pytest.approx(lm.score("abc cab").nats, rel=1e-5)
    assert packed.denoiser.num_parameters == lm.denoiser.num_parameters
    for each in (packed, copy.deepcopy(packed)):
        state = each.denoiser.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in lm.denoiser.state_dict().items())
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    inputs = tokens, torch.ones(1, 1), tokens == 0
    logits = [each.denoiser.eval()(*inputs).detach() for each in (lm, packed)]  # with a gradient
    torch.testing.assert_close(*logits)
