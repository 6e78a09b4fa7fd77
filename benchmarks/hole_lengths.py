"""Holes of unknown length in held-out code: a fixed length, the posterior of lengths, a model that inserts tokens.

    python -m benchmarks.hole_lengths MDLM_RUN FLEXMDM_RUN [CASES]     # 240 if not given

Both runs must have learned the same corpus. From its held-out files, Python expressions of one line and of 1 to 8
tokens are hidden, as many of each length, with up to 48 tokens left on both sides. Tokens are the most probable ones.
The fixed length is the one with the most exact matches on as many other cases.
"""

from __future__ import annotations

import ast
import difflib
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import unmask
from unmask import Batch, LanguageModel
from unmask.data.corpus import Corpus
from unmask.data.tokenizers import BaseTokenizer
from unmask.diffusion.categorical import SamplingParams
from unmask.objectives import MDLM
from unmask.sampling import Confidence, Insertion
from unmask.sampling.templates import Template

LENGTHS, CANDIDATES, CONTEXT = range(1, 9), range(1, 13), 48
GREEDY = SamplingParams(temperature=0)
DRAWS, VOTES, STEPS = 32, 8, 24
LEAST_PROBABILITY = 1e-4
"""Of a length that the comparison has left out."""


@dataclass(frozen=True)
class Case:
    """A hidden expression, as ids, and what stands around it."""

    before: list[int]
    hidden: list[int]
    after: list[int]


def documents(corpus: Corpus) -> Iterator[str]:
    """The held-out files."""
    split, start = corpus.splits["valid"], 0
    for end in split.document_ends.tolist():
        ids = split.read(start, end).tolist()
        yield corpus.tokenizer.decode([id_ for id_ in ids if id_ != corpus.eos_id])
        start = end


def expressions(text: str) -> Iterator[tuple[int, int]]:
    """Where the expressions of one line begin and end; with the space before them, if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return
    if not text.isascii():  # columns are counted in bytes
        return
    lines = [0, *(place + 1 for place, character in enumerate(text) if character == "\n")]
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and node.lineno == node.end_lineno and node.end_col_offset is not None:
            first = lines[node.lineno - 1] + node.col_offset
            has_space = text[first - 1 : first] == " " and not text[lines[node.lineno - 1] : first].isspace()
            yield first - has_space, lines[node.lineno - 1] + node.end_col_offset


def make_cases(corpus: Corpus, count: int, seed: int = 0) -> list[Case]:
    """As many of each length, of all files."""
    tokenizer, rng = corpus.tokenizer, random.Random(seed)
    found: dict[int, list[Case]] = {length: [] for length in LENGTHS}
    for text in documents(corpus):
        places = sorted(set(expressions(text)))
        for first, end in rng.sample(places, min(len(places), 60)):
            case = make_case(tokenizer, text, first, end)
            if len(case.hidden) in found and case.before and case.after:
                found[len(case.hidden)].append(case)
    for cases in found.values():
        rng.shuffle(cases)
    return [case for cases in found.values() for case in cases[: count // len(LENGTHS)]]


def make_case(tokenizer: BaseTokenizer, text: str, first: int, end: int) -> Case:
    before, after = text[max(0, first - 400) : first], text[end : end + 400]
    return Case(
        tokenizer.encode(before)[-CONTEXT:], tokenizer.encode(text[first:end]), tokenizer.encode(after)[:CONTEXT]
    )


def filled(lm: LanguageModel, cases: Sequence[Case], lengths: Sequence[int]) -> list[str]:
    """What the model writes into holes of these lengths, the most certain tokens first."""
    sampler = Confidence(steps=max(lengths), params=GREEDY)
    templates: list[Template | Tensor] = [
        [case.before, length, case.after] for case, length in zip(cases, lengths, strict=True)
    ]
    return hole_texts(lm, cases, lm.infill(templates, sampler=sampler).ids)


def inserted(lm: LanguageModel, cases: Sequence[Case], n: int = 1) -> list[list[str]]:
    """What a model that inserts tokens writes, `n` times each."""
    sampler = Insertion(STEPS, GREEDY)
    texts = []
    for case in cases:
        rows = lm.infill([case.before, range(max(CANDIDATES) + 1), case.after], n=n, sampler=sampler).ids
        texts.append(hole_texts(lm, [case] * n, rows))
    return texts


def hole_texts(lm: LanguageModel, cases: Sequence[Case], rows: Sequence[list[int]]) -> list[str]:
    assert lm.tokenizer is not None
    return [
        lm.tokenizer.decode(ids[len(case.before) : len(ids) - len(case.after)])
        for case, ids in zip(cases, rows, strict=True)
    ]


def nats_of_hidden(lm: LanguageModel, case: Case, draws: int) -> float:
    """The bound on -log p of the hidden tokens given what stands around them."""
    ids = [*case.before, *case.hidden, *case.after]
    given = torch.ones(draws, len(ids), dtype=torch.bool)
    given[:, len(case.before) : len(case.before) + len(case.hidden)] = False
    batch = Batch(torch.tensor([ids] * draws), prompt_mask=given)
    objective = lm.objective
    if isinstance(objective, MDLM):
        objective = replace(objective, exact_mask_counts=True)
    with lm.inference_mode():
        nll = objective.token_nll(lm.denoiser, batch, torch.Generator().manual_seed(0))
    return float(nll.double().sum() / draws)


class Results:
    """Exact matches, similarity of characters and lengths of all cases, method by method."""

    def __init__(self, lm: LanguageModel, cases: Sequence[Case]) -> None:
        assert lm.tokenizer is not None
        self.tokenizer, self.truth = lm.tokenizer, [lm.tokenizer.decode(case.hidden) for case in cases]
        self.lengths = [len(case.hidden) for case in cases]
        self.exact: dict[str, np.ndarray] = {}

    def add(self, name: str, texts: Sequence[str]) -> None:
        """Print a method's figures."""
        pairs = list(zip(texts, self.truth, strict=True))
        exact = np.array([text == true for text, true in pairs], dtype=float)
        alike = np.array([difflib.SequenceMatcher(None, text, true).ratio() for text, true in pairs])
        off = np.array([len(self.tokenizer.encode(text)) for text in texts]) - np.array(self.lengths)
        self.exact[name] = exact
        print(
            f"{name:<36} exact {percent(exact)}   similarity {percent(alike)}   right length {percent(off == 0)}"
            f"   off by {np.abs(off).mean():.2f} tokens",
            flush=True,
        )

    def compare(self, one: str, other: str) -> None:
        """Print the difference of exact matches, case by case."""
        print(f"{one} - {other}: exact {percent(self.exact[one] - self.exact[other])}")


def percent(values: np.ndarray) -> str:
    """The mean with its standard error over the cases, in percent."""
    return f"{100 * values.mean():5.1f} ± {100 * values.std(ddof=1) / len(values) ** 0.5:.1f} %"


def nats(values: Sequence[float]) -> str:
    """The mean with its standard error over the cases."""
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.2f} nats"


def best_fixed_length(lm: LanguageModel, cases: Sequence[Case]) -> int:
    """The length with the most exact matches."""
    results = Results(lm, cases)
    hits = {n: sum(map(str.__eq__, filled(lm, cases, [n] * len(cases)), results.truth)) for n in LENGTHS}
    print("exact matches of fixed lengths on the validation cases:", hits, flush=True)
    return max(hits, key=lambda n: hits[n])


def main(mdlm_run: str, flexmdm_run: str, count: int = 240) -> None:
    """Print the figures of all methods on the same cases."""
    mdlm, flexmdm = unmask.load(mdlm_run), unmask.load(flexmdm_run)
    corpus = Corpus.open(Path(mdlm_run) / "corpus")
    assert mdlm.tokenizer is not None
    assert flexmdm.tokenizer is not None
    assert mdlm.tokenizer.digest == flexmdm.tokenizer.digest, "the runs must have learned the same corpus"
    both = make_cases(corpus, 2 * count)
    validation, cases = both[::2], both[1::2]
    print(f"{len(cases)} cases, {len(validation)} for the fixed length", flush=True)
    results = Results(mdlm, cases)
    fixed = best_fixed_length(mdlm, validation)
    results.add(f"MDLM, {fixed} tokens", filled(mdlm, cases, [fixed] * len(cases)))
    results.add("MDLM, the true length", filled(mdlm, cases, [len(case.hidden) for case in cases]))
    several = inserted(flexmdm, cases, VOTES)
    results.add("FlexMDM, one text", [texts[0] for texts in several])
    results.add(f"FlexMDM, the most frequent of {VOTES}", [Counter(texts).most_common(1)[0][0] for texts in several])
    with_lengths = [mdlm.hole_lengths([case.before, CANDIDATES, case.after], draws=DRAWS) for case in cases]
    results.add("MDLM, the most probable length", filled(mdlm, cases, [each.lengths[0][0] for each in with_lengths]))
    for name in (f"MDLM, {fixed} tokens", "MDLM, the most probable length"):
        results.compare(f"FlexMDM, the most frequent of {VOTES}", name)
    given_length = [nats_of_hidden(mdlm, case, DRAWS) for case in cases]
    of_length = [
        -np.log(max(dict(zip(each.lengths, each.probabilities, strict=True)).get((n,), 0), LEAST_PROBABILITY))
        for each, n in zip(with_lengths, results.lengths, strict=True)
    ]
    whole = [nats_of_hidden(flexmdm, case, 2 * DRAWS) for case in cases]
    print(f"MDLM: length {nats(of_length)}, tokens {nats(given_length)}")
    print(f"MDLM: both {nats([a + b for a, b in zip(of_length, given_length, strict=True)])}")
    print(f"FlexMDM: both {nats(whole)}")
    print(f"difference {nats([a - b - c for a, b, c in zip(whole, of_length, given_length, strict=True)])}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
