"""Texts that match whatever the sampler, and are drawn from exactly what is left when the others are gone."""

from __future__ import annotations

import itertools
import math
import re
import time
from functools import cache
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

import oracle
from oracle import LINEAR, MASK, chi_square_p_value, random_table
from tiny_models import tiny_denoiser, words_of
from unmask import MDLM, Tokenizer
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.guidance.allowed_tokens import AllowedTokens
from unmask.guidance.regex._byte_dfa import ByteDFA, byte_dfa
from unmask.guidance.regex._token_bytes import token_bytes
from unmask.guidance.regex.constraint import RegexConstraint
from unmask.guidance.regex.limits import LRUCache
from unmask.guidance.regex.token_dfa import TokenDFA
from unmask.guidance.structure.structure import Structure
from unmask.objectives import SEDD, BlockDiffusion
from unmask.sampling import (
    Ancestral,
    Blockwise,
    Confidence,
    EntropyBounded,
    FirstHitting,
    RandomOrder,
    ReMDM,
    Sampler,
    SemiAutoregressive,
    Threshold,
)
from unmask.sampling.blockwise import DualCache, PrefixCache
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Margin
from unmask.sampling.remdm import Cap, Loop

pytestmark = pytest.mark.thorough

TEXT = [
    "the cat sat on the mat",
    "call 555-1234 or 20 30",
    "ab abc abcd 12 123 é日本 ok",
    "no-07 yes-42",
] * 20


@cache
def bpe() -> Tokenizer:
    return Tokenizer.train_bpe(iter(TEXT), 300)


@cache
def wordpiece(cleanup: bool = True) -> Tokenizer:
    words = [
        "[UNK]",
        "[SEP]",
        "the",
        "cat",
        "##s",
        "##ing",
        "a",
        "b",
        "##a",
        "##b",
        "12",
        "##3",
        ".",
        ",",
        "do",
        "n't",
    ]
    inner = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=cleanup)
    inner.add_special_tokens(["[SEP]", "[UNK]"])
    return Tokenizer(inner)


@cache
def metaspace() -> Tokenizer:
    return words_of(["▁the", "▁cat", "s", "▁", "a", "▁b", "12"], decoders.Metaspace())


@cache
def llama() -> Tokenizer:
    """Metaspace with bytes for characters that are not in the vocabulary."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    names = ["▁the", "▁cat", "s", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    return words_of(names, decoders.Sequence(parts))


TOKENIZERS = {
    "bytes": Tokenizer.bytes(),
    "characters": Tokenizer.characters("abc-0123é日 "),
    "bpe": bpe(),
    "wordpiece": wordpiece(),
    "metaspace": metaspace(),
    "llama": llama(),
}
"""With the patterns of a hole of six tokens and of one of four."""
PATTERNS = {
    "bytes": ("[a-c]{2}-[0-9]{3}", "(é|日).?"),
    "characters": ("[a-c]{1,4}-[0-9]*(é日?)?", "(a|b)*0"),
    "bpe": (r"[a-z]+-[0-9]{2,4}é?", "(日|é )[a-z ]+"),
    "wordpiece": (r" ?(the|a) cats?( 12[ab]*)+\.?", r"( [a-z]+|,)+"),
    "metaspace": (r" ?the( cats?)+ *", " [a-b]*(12)+"),
    "llama": (r" ?the( cats?)+é? *", "日a?.*"),
}
SAMPLERS: list[Sampler] = [
    Ancestral(1),
    Ancestral(3),
    Ancestral(5, SamplingParams(top_k=3)),
    FirstHitting(),
    RandomOrder(4),
    Confidence(4),
    Confidence(3, Margin(), SamplingParams(temperature=0)),
    Threshold(0.3),
    EntropyBounded(2.0),
    ReMDM(6, Cap(0.3)),
    ReMDM(9, loop=Loop()),
    Blockwise(5, Confidence(2)),
    Blockwise(5, Ancestral(2), PrefixCache()),
    Blockwise(4, RandomOrder(2), DualCache()),
    SemiAutoregressive(stride=5, window=13, sampler=Ancestral(3)),
]


def canvas_of(tokenizer: Tokenizer, rows: int) -> Tensor:
    """Holes between tokens; in every other sequence the first hole is at its beginning."""
    word, mask = tokenizer.encode("a")[:1], tokenizer.vocab_size
    gap = [mask] * 6 + word + [mask] * 4
    return torch.tensor([word * 2 + gap, gap + word * 2] * (rows // 2))


def last(sampler: Sampler, denoiser: DenoiserLike, tokens: Tensor, seed: int = 0) -> Tensor:
    *_, z = sampler.run(denoiser, Canvas(tokens, tuple(seed + row for row in range(len(tokens)))))
    return z


def hole_texts(tokenizer: Tokenizer, before: list[int], after: list[int]) -> list[str]:
    """What each hole adds to the decoded text."""
    texts, place = [], 0
    for masked, run in itertools.groupby(before, lambda id_: id_ == tokenizer.vocab_size):
        end = place + len(list(run))
        if masked:
            known = tokenizer.decode(after[:place])
            grown = tokenizer.decode(after[:end])
            assert grown.startswith(known)
            texts.append(grown[len(known) :])
        place = end
    return texts


def network(tokenizer: Tokenizer, objective: Any = None, length: int = 13) -> DenoiserLike:
    return tiny_denoiser(objective or MDLM(), tokenizer.vocab_size + 1, tokenizer.vocab_size, length=length)


def check_matches(sampler: Sampler, name: str, rows: int) -> None:
    tokenizer, patterns = TOKENIZERS[name], PATTERNS[name]
    tokens = canvas_of(tokenizer, rows)
    written = last(sampler, RegexConstraint(network(tokenizer), tokens, patterns, tokenizer), tokens)
    for before, after in zip(tokens.tolist(), written.tolist(), strict=True):
        for pattern, text in zip(patterns, hole_texts(tokenizer, before, after), strict=True):
            assert re.fullmatch(pattern, text), (pattern, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: f"{SAMPLERS.index(s)}-{type(s).__name__}")
def test_every_hole_matches_its_pattern(sampler: Sampler, name: str) -> None:
    check_matches(sampler, name, rows=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: f"{SAMPLERS.index(s)}-{type(s).__name__}")
def test_a_thousand_of_each_match(sampler: Sampler, name: str) -> None:
    check_matches(sampler, name, rows=1000)


@pytest.mark.parametrize("sampler", [Ancestral(2), Confidence(2)], ids=["ancestral", "confidence"])
def test_a_model_that_writes_blocks_with_an_exact_cache(sampler: Ancestral | Confidence) -> None:
    """A call shows one block. A second run finds nothing of what the first one wrote."""
    tokenizer, patterns, blocks = bpe(), PATTERNS["bpe"], Blockwise(sampler=sampler)
    tokens = canvas_of(tokenizer, 6)
    matching = RegexConstraint(network(tokenizer, BlockDiffusion(block_size=4)), tokens, patterns, tokenizer)
    written = last(blocks, matching, tokens)
    for before, after in zip(tokens.tolist(), written.tolist(), strict=True):
        for pattern, text in zip(patterns, hole_texts(tokenizer, before, after), strict=True):
            assert re.fullmatch(pattern, text), (pattern, text)
    other = last(blocks, matching, tokens, seed=100)
    assert not torch.equal(other, written)
    assert torch.equal(last(blocks, matching, tokens), written)


def test_a_sequence_is_written_alike_in_any_company() -> None:
    tokenizer, sampler = bpe(), RandomOrder(3)
    tokens = canvas_of(tokenizer, 6)
    together = last(sampler, RegexConstraint(network(tokenizer), tokens, PATTERNS["bpe"], tokenizer), tokens)
    for row in range(len(tokens)):
        alone = tokens[row : row + 1]
        matching = RegexConstraint(network(tokenizer), alone, PATTERNS["bpe"], tokenizer)
        assert torch.equal(last(sampler, matching, alone, seed=row)[0], together[row])


# Three tokens, of which two can spell a third, in three places: every text can be enumerated.
LETTERS = words_of(["a", "ab", "b"], decoders.Fuse())
WORLDS = ["a*b+", "(ab|ba)*b?", "a?ba.*", "[^b].*a|ab+"]
REJECT = 1e-3


def regex_dfa(pattern: str) -> ByteDFA:
    return byte_dfa(Structure.regex(pattern).expression())


def text_of(state: oracle.State) -> str:
    return "".join(["a", "ab", "b"][token] for token in state)


def matching_texts(pattern: str, canvas: oracle.State) -> list[oracle.State]:
    """Whose hole, the run of masks, matches."""
    hole = [place for place, token in enumerate(canvas) if token == MASK]
    return [
        x
        for x in oracle.CLEAN_STATES
        if all(token in (MASK, v) for token, v in zip(canvas, x, strict=True))
        and re.fullmatch(pattern, text_of(tuple(x[place] for place in hole)))
    ]


def law(table: DenoiserLike, pattern: str, canvas: oracle.State, shares: list[int]) -> dict[oracle.State, float]:
    """Holes are written in random order, so many at a time: of each share the product of the lines, where
    some text that matches can follow."""
    texts = matching_texts(pattern, canvas)
    lines = dict(zip(oracle.STATES, oracle.probabilities(table, 0.5).tolist(), strict=True))
    holes = [place for place, token in enumerate(canvas) if token == MASK]
    orders = list(itertools.permutations(holes))
    result = dict.fromkeys(oracle.CLEAN_STATES, 0.0)
    for order in orders:
        p = {canvas: 1.0}
        for first, share in zip(itertools.accumulate([0, *shares]), shares, strict=False):
            places = order[first : first + share]
            after: dict[oracle.State, float] = {}
            for state, mass in p.items():
                reached: dict[oracle.State, float] = {}
                for x in texts:
                    if all(z in (MASK, v) for z, v in zip(state, x, strict=True)):
                        new = tuple(x[i] if i in places else z for i, z in enumerate(state))
                        reached[new] = math.prod(lines[state][i][x[i]] for i in places)
                for new, weight in reached.items():
                    after[new] = after.get(new, 0) + mass * weight / sum(reached.values())
            p = after
        for x, mass in p.items():
            result[x] += mass / len(orders)
    return result


@pytest.mark.parametrize("canvas", [oracle.ALL_MASKED, (1, MASK, MASK)], ids=str)
@pytest.mark.parametrize("pattern", WORLDS)
def test_draws_are_exact(pattern: str, canvas: oracle.State) -> None:
    """All places in one call, two and then one, and one by one."""
    table = random_table(MDLM(schedule=LINEAR), drift=0)
    if not matching_texts(pattern, canvas):
        with pytest.raises(ValueError, match="cannot match"):
            RegexConstraint(table, torch.tensor([canvas]), pattern, LETTERS)
        return
    matching = RegexConstraint(table, torch.tensor([canvas] * 256), pattern, LETTERS)
    holes = canvas.count(MASK)
    every: list[tuple[Sampler, list[int]]] = [
        (Ancestral(1), [holes]),
        (RandomOrder(2), [holes - holes // 2, holes // 2]),
        (FirstHitting(), [1] * holes),
    ]
    for sampler, shares in every:
        seen = oracle.sample_counts(sampler, matching, 2560, 256, canvas)
        assert chi_square_p_value(seen, law(table, pattern, canvas, shares)) > REJECT


def test_the_chi_square_would_notice_another_law() -> None:
    """Exactness can fail: one call for all is not one by one."""
    table = random_table(MDLM(schedule=LINEAR), drift=0)
    matching = RegexConstraint(table, torch.tensor([oracle.ALL_MASKED] * 256), WORLDS[1], LETTERS)
    seen = oracle.sample_counts(Ancestral(1), matching, 2560, 256)
    assert chi_square_p_value(seen, law(table, WORLDS[1], oracle.ALL_MASKED, [1, 1, 1])) < REJECT


def test_one_query_of_a_hole_gives_the_conditional_distribution() -> None:
    """Without `row_fn`, one position of a hole can be queried, and more cannot."""
    table = random_table(MDLM(schedule=LINEAR), drift=0)
    z = torch.tensor([oracle.ALL_MASKED])
    matching = RegexConstraint(table, z, "a?ba.*", LETTERS)
    rows = torch.tensor([[True, False, False]])
    line = matching(z, torch.ones(1, 1), rows)[0].exp()
    free = table(z, torch.ones(1, 1), rows)[0].exp()
    kept = torch.tensor([True, True, True, False])  # a|b.., ab|a.., b|a..
    torch.testing.assert_close(line, free * kept / (free * kept).sum())
    with pytest.raises(ValueError, match="depend on each other"):
        matching(z, torch.ones(1, 1), torch.ones_like(z, dtype=torch.bool))
    with pytest.raises(ValueError, match="depend on each other"):
        last(Ancestral(4), RegexConstraint(random_table(SEDD(schedule=LINEAR)), z, ".*", LETTERS), z)
    with pytest.raises(ValueError, match="must return token ids"):
        matching(z, torch.ones(1, 1), z == MASK, row_fn=lambda log_x, _: log_x.amax(-1))


def test_holes_without_a_pattern_are_free() -> None:
    tokenizer = Tokenizer.bytes()
    tokens = canvas_of(tokenizer, 40)
    bare = network(tokenizer)
    written = last(Ancestral(3), RegexConstraint(bare, tokens, [None, None], tokenizer), tokens)
    assert torch.equal(written, last(Ancestral(3), bare, tokens))
    written = last(Ancestral(3), RegexConstraint(bare, tokens, [None, "[0-9]{4}"], tokenizer), tokens)
    texts = [hole_texts(tokenizer, b, a) for b, a in zip(tokens.tolist(), written.tolist(), strict=True)]
    assert all(re.fullmatch("[0-9]{4}", four) for _, four in texts)
    assert not all(re.fullmatch(r"[\x00-\x7f]*", six) for six, _ in texts)


def test_tokens_that_a_network_all_but_excludes() -> None:
    """A text a thousand nats away from the best one is still the only one that matches."""

    class Sure(oracle.TableDenoiser):
        def __call__(self, *args: Any, **options: Any) -> Tensor:
            each = options.pop("row_fn")
            log_x = super().__call__(*args, **options)
            far = log_x + torch.tensor([0.0, -3000.0, -1500.0, 0.0], dtype=log_x.dtype)
            return each(far, slice(None)) if each else far

    table = random_table(MDLM(schedule=LINEAR), drift=0)
    sure = Sure(table.logits, table.drift, table.objective)
    z = torch.tensor([oracle.ALL_MASKED] * 8)
    assert {text_of(tuple(x)) for x in last(Ancestral(1), RegexConstraint(sure, z, "abbb", LETTERS), z).tolist()} == {
        "abbb"
    }


def test_what_is_allowed_and_what_matches_must_go_together() -> None:
    tokenizer = Tokenizer.characters("ab01")
    z = torch.full((2, 4), 4)
    bare = network(tokenizer)
    written = last(Ancestral(2), RegexConstraint(AllowedTokens.ban(bare, [2]), z, "[ab]+", tokenizer), z)
    assert (written == 3).all()
    with pytest.raises(ValueError, match="has a probability above 0"):
        last(Ancestral(2), RegexConstraint(AllowedTokens.ban(bare, [2, 3]), z, "[ab]+", tokenizer), z)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("[0-9]{5}", "a hole of 4 tokens cannot match the pattern '[0-9]{5}', which needs at least 5 tokens"),
        ("[0-9]{2}", "the nearest length that can match is 2"),
        ("[x-z]+", "no sequence of the tokenizer's tokens matches the pattern '[x-z]+'"),
        ("(", "is not a regular expression"),
        ("^0+", "has an anchor"),
        (r"(.)\1", "which is not supported"),
        ("(?i)a", "which is not supported"),
        ("(?=a)....", "which is not supported"),
        (["0+", "1+"], "give one pattern, or one per hole (1); got 2"),
    ],
)
def test_refused_before_anything_is_drawn(pattern: str | list[str], message: str) -> None:
    tokenizer = Tokenizer.characters("ab0123456789")
    with pytest.raises(ValueError, match=re.escape(message)):
        RegexConstraint(network(tokenizer), torch.full((1, 4), tokenizer.vocab_size), pattern, tokenizer)


def test_a_pattern_that_needs_too_large_an_automaton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.guidance.regex._nfa.MAX_STATES", 100)
    for pattern in (".*a.{20}b", "(a{99}){99}"):
        with pytest.raises(ValueError, match="needs an automaton of more than 100 states"):
            regex_dfa(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b)*a(a|b){13}",
        "(a?){60000}",
        "(a?){2000}a{2000}",
        ".{0,10000}",
        "((){99999}){99999}",
        "a{9999999999}",
        "(" * 5000 + "a" + ")" * 5000,
        "(.{2}|.{3}){1,9000}",
        "(.*a){30}",
    ],
    ids=lambda pattern: pattern[:20],
)
def test_what_would_take_for_ever_is_refused_in_seconds(pattern: str) -> None:
    tokenizer = Tokenizer.bytes()
    began = time.process_time()
    with pytest.raises(ValueError, match=r"pattern|hole") as told:
        RegexConstraint(network(tokenizer), torch.full((1, 12), tokenizer.vocab_size), pattern, tokenizer)
    assert len(str(told.value)) < 250
    assert time.process_time() - began < 10


def test_large_patterns_that_are_not_too_large() -> None:
    tokenizer = Tokenizer.bytes()
    tokens = torch.full((1, 13), tokenizer.vocab_size)
    for pattern in (r"\w{3,20}", ".{0,500}"):
        written = last(Confidence(2), RegexConstraint(network(tokenizer), tokens, pattern, tokenizer), tokens)
        assert re.fullmatch(pattern, tokenizer.decode(written[0].tolist()))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("pattern", ["[a-d]{2,9}|[^a]+b", "(ab|c d)*", "[b-f ]{0,40}", "é?日*b"])
def test_a_token_moves_every_state_as_its_bytes_do(pattern: str, name: str) -> None:
    """The classes of tokens are exactly the distinct functions from states to states."""
    tokenizer, structure = TOKENIZERS[name], Structure.regex(pattern)
    by_bytes, spelled = byte_dfa(structure.expression()), token_bytes(tokenizer)
    dfa = TokenDFA.compile(structure, tokenizer)

    def read(text: bytes | None, state: int) -> int:
        for byte in text or b"":
            state = int(by_bytes.transitions[state, byte])
        return 0 if text is None else state

    own = {0: 0, 1: 1}  # the state of the bytes' automaton that each state of the tokens' is
    todo = [1]
    for state in todo:
        for token, text in enumerate(spelled.inside):
            reached = int(dfa.transitions[state, dfa.token_classes[token]])
            wanted = read(text, own[state])
            assert own.setdefault(reached, wanted) == wanted
            todo += [reached] * (reached not in todo)
        assert dfa.accepting[state] == by_bytes.accepting[own[state]]
    for token, text in enumerate(spelled.at_start):
        reached = int(dfa.transitions[dfa.text_start_state, dfa.token_classes[token]])
        assert own.get(reached, read(text, 1)) == read(text, 1)
    assert len({column.tobytes() for column in dfa.transitions.T.copy()}) == dfa.transitions.shape[1]


def test_what_is_kept_has_so_many_bytes() -> None:
    kept = LRUCache[str](100)
    for key, size in (("a", 40), ("b", 50), ("a", 30), ("c", 20)):
        kept.put(key, key, size)
    assert (kept.used_bytes, kept.get("b")) == (100, "b")
    kept.put("d", "d", 40)  # what has not been used for longest goes
    assert [kept.get(key) for key in "abcd"] == [None, "b", None, "d"]
    kept.put("e", "e", 1000)
    assert (kept.used_bytes, kept.get("e")) == (0, None)


def test_a_window_that_shows_a_part_is_refused() -> None:
    tokenizer = Tokenizer.bytes()
    tokens = canvas_of(tokenizer, 2)
    matching = RegexConstraint(network(tokenizer), tokens, ".*", tokenizer)
    with pytest.raises(ValueError, match="texts of 13 tokens, but the sampler reads 8"):
        last(SemiAutoregressive(stride=5, window=8, sampler=Ancestral(3)), matching, tokens)


def test_tokenizers_that_do_not_concatenate_tokens_are_refused() -> None:
    ends = words_of(["a", "b</w>", "c"], decoders.BPEDecoder(suffix="</w>"))
    with pytest.raises(ValueError, match="is not the concatenation"):
        token_bytes(ends)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_a_spelling_is_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    spelled = token_bytes(tokenizer)
    usable = [id_ for id_, text in enumerate(spelled.inside) if text is not None]
    ids = data.draw(st.lists(st.sampled_from(usable), min_size=1, max_size=6))
    whole = [spelled.at_start[ids[0]], *(spelled.inside[id_] for id_ in ids[1:])]
    try:
        text = b"".join(piece for piece in whole if piece is not None).decode()
    except UnicodeDecodeError:
        return
    assert text == tokenizer.decode(ids)


def test_the_end_of_a_document_is_no_text() -> None:
    separator = bpe().eos_id
    assert separator is not None
    assert token_bytes(bpe()).inside[separator] is None
    assert TokenDFA.compile(Structure.regex(".*"), bpe()).token_classes[separator] == 0


atoms = st.sampled_from(
    ["a", "b", "é", ".", "[ab]", "[^a]", r"\d", r"\w", r"\.", "日", "-", " ", r"[\]\d-]", r"\u00e9"]
)
patterns = st.recursive(
    atoms,
    lambda part: st.one_of(
        st.tuples(part, part).map("".join),
        st.tuples(part, part).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(part, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "{1,2}?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@given(patterns, st.lists(st.text("ab-1é日 .]\n", max_size=6), max_size=8))
def test_an_automaton_accepts_what_the_library_matches(pattern: str, texts: list[str]) -> None:
    automaton = regex_dfa(pattern)
    for text in ["", "a", "é", "aé", *texts]:
        state = 1
        for byte in text.encode():
            state = int(automaton.transitions[state, byte])
        assert bool(automaton.accepting[state]) == bool(re.fullmatch(pattern, text)), (pattern, text)


def test_an_automaton_is_small_and_knows_no_broken_text() -> None:
    assert len(regex_dfa("(a|b)*abb").transitions) == 5
    assert len(regex_dfa("(aa|ab|ba|bb)*").transitions) == len(regex_dfa("([ab][ab])*").transitions) == 3
    everything = regex_dfa("(.|\n)*")
    for broken in (b"\xff", b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe6\x97"):
        state = 1
        for byte in broken:
            state = int(everything.transitions[state, byte])
        assert not everything.accepting[state]
