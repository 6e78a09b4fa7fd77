"""The likelihood of text in an order, of windows of a corpus and of a sampler's own samples."""

from __future__ import annotations

import pytest
import torch

import unmask
from unmask import MDLM, BlockDiffusion, NextToken, SamplingParams
from unmask.data.corpus import Corpus, PrepareConfig, Split, prepare
from unmask.data.loader import Wrapped
from unmask.evaluation.evaluate import eval_split, evaluate_corpus
from unmask.evaluation.orders import ORDERS, OrderConfig, evaluate_order, own_nats
from unmask.likelihood.corpus import EvalConfig
from unmask.sampling import Ancestral, Autoregressive, Blockwise, Confidence, RandomOrder, SemiAutoregressive

LENGTH = 8
TEXT = "abc cab bca abc a b c " * 6


def tiny_lm(objective: unmask.Objective = MDLM()) -> unmask.LanguageModel:  # noqa: B008
    with torch.random.fork_rng():
        torch.manual_seed(1)
        causal = isinstance(objective, NextToken)
        backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=LENGTH, dropout=0.0, causal=causal)
        lm = unmask.LanguageModel.from_config(backbone, objective, unmask.Tokenizer.characters("abc "))
        for parameter in lm.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return lm


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    return prepare(
        [str(folder / "text.txt")], folder / "corpus", tiny_lm().tokenizer, PrepareConfig(validation_fraction=0)
    )


@pytest.fixture(scope="module")
def text(corpus: Corpus) -> Split:
    return eval_split(corpus)


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "random"])
@pytest.mark.parametrize("at_once", [1, 3])
def test_rules_are_exact_and_counted_in_calls(text: Split, order: str, at_once: int) -> None:
    config = OrderConfig(order, windows=5, tokens_per_step=at_once, block_size=4)
    found = evaluate_order(tiny_lm(), text, Wrapped(LENGTH), config)
    assert (found.score.variance, found.bounds, found.lower, found.draws) == (0, None, None, 1)
    assert found.score.tokens == 5 * LENGTH
    assert found.score.text_stats is not None
    in_blocks = order != "left-to-right"  # two blocks of four, three tokens and one; or 3, 3 and 2 of the whole
    assert found.nfe == (LENGTH if at_once == 1 else 4 if in_blocks else 3)
    assert found.definition.startswith("exact -log p: ")
    assert ("in blocks of 4" in found.definition) == in_blocks
    assert ("3 at once" in found.definition) == (at_once == 3)


@torch.no_grad()
def test_left_to_right_is_the_chain_rule(text: Split) -> None:
    lm = tiny_lm()
    found = evaluate_order(lm, text, Wrapped(LENGTH), OrderConfig("left-to-right", windows=1)).score
    ids, nats, mask = text.read(0, LENGTH), 0.0, lm.vocab.mask_id
    for place, token in enumerate(ids.tolist()):
        z = torch.tensor([[*ids[:place].tolist(), *[mask] * (LENGTH - place)]])
        log_x = lm.denoiser(z, torch.ones(1, 1), torch.arange(LENGTH)[None] == place)
        nats -= float(log_x[0, token])
    assert found.nats == pytest.approx(nats, rel=1e-6)


def test_the_mean_over_random_orders_is_the_bound_of_eval(corpus: Corpus, text: Split) -> None:
    lm = tiny_lm()
    bound = evaluate_corpus(lm, corpus, text.record.name, Wrapped(LENGTH), EvalConfig(windows=4, replicates=64))
    found = evaluate_order(lm, text, Wrapped(LENGTH), OrderConfig("random", windows=4, draws=48))
    bounds = found.bounds
    assert bounds is not None
    error = (bounds.mean_variance + bound.variance) ** 0.5
    assert abs(bounds.mean - bound.nats) < 4 * error
    assert bounds.lower - 3 * bounds.lower_variance**0.5 <= bounds.upper <= bounds.mean
    assert found.score.nats == bounds.upper
    assert found.lower is not None
    assert found.lower <= found.score.nats_per_token
    few = evaluate_order(lm, text, Wrapped(LENGTH), OrderConfig("random", windows=4, draws=4)).bounds
    assert few is not None
    assert few.upper > bounds.upper


def test_models_with_blocks_keep_theirs(text: Split) -> None:
    lm = tiny_lm(BlockDiffusion(block_size=4))
    for order in ORDERS:
        assert "in blocks of 4" in evaluate_order(lm, text, Wrapped(LENGTH), OrderConfig(order, 2)).definition
    with pytest.raises(ValueError, match="the model writes blocks of 4 tokens; leave out a size of 2"):
        evaluate_order(lm, text, Wrapped(LENGTH), OrderConfig("margin", 2, block_size=2))


def test_models_with_one_order_are_refused(text: Split) -> None:
    with pytest.raises(ValueError, match="leave --order out"):
        evaluate_order(tiny_lm(NextToken()), text, Wrapped(LENGTH), OrderConfig("left-to-right"))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [({"order": "upwards"}, "upwards"), ({"tokens_per_step": 0}, "at least 1"), ({"draws": 3}, "at least 4 orders")],
)
def test_settings_are_checked(config: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OrderConfig(**{"order": "margin", **config})  # type: ignore[arg-type]


def test_samples_cost_what_their_sampler_makes_of_them() -> None:
    """The average cost of samples is the entropy of the sampler's law, from both sides where orders are random."""
    lm, n = tiny_lm(), 400
    exact = own_nats(lm, rule := Confidence(LENGTH, "margin"), lm.sample(n, sampler=rule, seed=1).tokens, 1)
    assert exact is not None
    assert exact.at_least == exact.at_most
    assert exact.error is not None
    sharp = Confidence(LENGTH, "margin", SamplingParams(temperature=0.2))
    sharper = own_nats(lm, sharp, lm.sample(n, sampler=sharp).tokens, 0)
    assert sharper is not None
    assert sharper.at_most < exact.at_most - 0.2
    random = RandomOrder(LENGTH)
    both = own_nats(lm, random, lm.sample(n, sampler=random).tokens, 0)
    assert both is not None
    assert both.at_least < both.at_most


def test_where_it_is_not_known_there_is_none() -> None:
    lm = tiny_lm()
    tokens = lm.sample(2, 12).tokens
    assert own_nats(lm, Confidence(4), tokens[:, :LENGTH], 0) is None
    assert own_nats(lm, Ancestral(4), tokens, 0) is None  # written in windows
    assert own_nats(lm, SemiAutoregressive(4), tokens, 0) is None
    blocks = tiny_lm(BlockDiffusion(block_size=4))
    assert own_nats(blocks, Blockwise(sampler=Ancestral(2)), blocks.sample(2, 12).tokens, 0) is not None
    left = tiny_lm(NextToken())
    found = own_nats(left, Autoregressive(), (drawn := left.sample(3, LENGTH)).tokens, 0)
    assert found is not None
    assert found.at_most == pytest.approx(left.score(drawn.tokens.tolist()).nats_per_token, rel=1e-6)
