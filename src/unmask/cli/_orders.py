"""`unmask eval --order`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unmask.cli._arguments import write_results
from unmask.cli._progress import progress
from unmask.report.formatting import format_estimate, print_table

if TYPE_CHECKING:
    from unmask.data.corpus import Corpus
    from unmask.data.loader import RowLayout
    from unmask.evaluation.datasets import ResolvedDataset
    from unmask.evaluation.orders import OrderScore
    from unmask.model import LanguageModel

_OrderName = Literal["left-to-right", "confidence", "margin", "entropy", "blocks", "random"]


@dataclass(frozen=True)
class OrderOptions:
    """The options of orders."""

    order: tuple[_OrderName, ...] = ()
    """Instead of the bound over all orders, the exact likelihood in one: left-to-right; confidence, margin or entropy
    (the surest position first); blocks (confidence in blocks of 32); or random, a tighter bound with one from the
    other side. The network is called once for each token."""
    order_block_size: int | None = None
    """For --order: the order holds within blocks of this many tokens, which come from left to right."""
    tokens_per_step: int = 1
    """For --order: tokens that are written at once, as in parallel decoding."""
    order_draws: int = 8
    """For --order random: orders that are drawn of each window."""

    def __post_init__(self) -> None:
        for field in () if self.order else fields(self):
            if getattr(self, field.name) != field.default:
                raise ValueError(f"--{field.name.replace('_', '-')} is for orders: name some with --order")


@dataclass(frozen=True)
class EvaluatedOrders:
    """A text and what it costs in each order."""

    text: ResolvedDataset
    corpus: Corpus
    scores: tuple[OrderScore, ...]


def evaluate_orders(
    lm: LanguageModel,
    text: ResolvedDataset,
    corpus: Corpus,
    layout: RowLayout,
    options: OrderOptions,
    windows: int | None,
    seed: int,
    quiet: bool,
) -> EvaluatedOrders:
    """Evaluate a text in every order."""
    from unmask.data.loader import Loader
    from unmask.evaluation.evaluate import eval_split
    from unmask.evaluation.orders import OrderConfig, evaluate_order

    split, scores = eval_split(corpus), []
    rows = Loader(split, layout, 1).num_sequential_rows
    for name in options.order:
        config = OrderConfig(
            name, windows, options.order_block_size, options.tokens_per_step, options.order_draws, seed
        )
        total = min(rows, windows or rows) * (config.draws if name == "random" else 1)
        with progress(f"{text.name}, {name}", total, "windows", quiet) as report:
            scores.append(evaluate_order(lm, split, layout, config, report))
    return EvaluatedOrders(text, corpus, tuple(scores))


def report_orders(
    evaluated: Sequence[EvaluatedOrders],
    missing: Mapping[str, str],
    seed: int,
    model: Mapping[str, str],
    out: Path | None,
    as_json: bool,
) -> None:
    """Write the figures, or print them."""
    texts = [
        {
            "name": each.text.name,
            "origin": each.text.origin,
            "data": each.corpus.digest,
            "orders": [score.to_dict() for score in each.scores],
        }
        for each in evaluated
    ]
    fingerprints = {each.text.name: each.text.fingerprint for each in evaluated}
    if not write_results({"texts": texts, "missing": dict(missing)}, seed, fingerprints, model, out, as_json):
        _print_orders(evaluated)


def _print_orders(evaluated: Sequence[EvaluatedOrders]) -> None:
    header = ("text", "order", "nats/token", "perplexity", "bits/byte", "bits/character", "tokens", "calls")
    lines, notes = [], list[str]()
    for each in evaluated:
        for result in each.scores:
            f = {name: value for name, value in result.to_dict().items() if isinstance(value, int | float)}
            lines.append(
                (
                    each.text.name,
                    result.order,
                    format_estimate(f["nats_per_token"], f["standard_error"]),
                    format_estimate(f["perplexity"], f["perplexity_error"]),
                    format_estimate(f["bits_per_byte"], f["bits_per_byte_error"]),
                    format_estimate(f["bits_per_character"], f["bits_per_character_error"]),
                    f"{result.score.tokens:,}",
                    f"{result.nfe:,}",
                )
            )
            notes += [note for note in _notes(each.text.name, result) if note not in notes]
    print_table(header, lines)
    print(*notes, sep="\n")


def _notes(name: str, result: OrderScore) -> list[str]:
    """What the figure is; in random orders, also the plain mean, and the bound from the other side."""
    notes, bounds, tokens = [f"{result.order}: {result.definition}"], result.bounds, result.score.tokens
    if bounds is None:
        return notes
    mean = format_estimate(bounds.mean / tokens, bounds.mean_variance**0.5 / tokens)
    lower = format_estimate(bounds.lower / tokens, bounds.lower_variance**0.5 / tokens)
    which = "" if "blocks" in result.definition else ", which is the bound of unmask eval,"
    notes.append(f"{name}: the mean over orders{which} is {mean} nats/token")
    notes.append(
        f"{name}: it costs at least {lower} nats/token in random order (a tangent bound; effective number of orders of"
        f" the worst block: {bounds.effective_draws:.1f} of {result.draws}"
        + (", too few to trust the errors)" if bounds.effective_draws < result.draws / 2 else ")")
    )
    return notes
