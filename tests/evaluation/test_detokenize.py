from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmask.evaluation._detokenize import LAMBADA, LM1B, PTB, SCIENTIFIC_PAPERS, WIKITEXT, Detokenizer

SHORTER = [WIKITEXT, PTB, LM1B, SCIENTIFIC_PAPERS]

# What the rules look at, so that they meet each other; and any other text.
MARKS = [*" 'sN1.,:;!?\"()[]{}=@-/$£#°\n\\“”é", "<unk>", " n't", " @-@ ", "http : / / ", " . ", "word"]
texts = st.one_of(st.text(), st.lists(st.sampled_from(MARKS), max_size=30).map("".join))


@pytest.mark.parametrize(
    ("spaced", "plain"),
    [
        (" = Robert Boulter = \n", " = Robert Boulter =\n"),
        (" = = Filmography = = \n", " == Filmography ==\n"),
        (" = = = = Stage = = = = \n", " ==== Stage ====\n"),
        ("a guest @-@ starring role , 1 @,@ 000 at 2 @.@ 5 ;", "a guest-starring role, 1,000 at 2.5 ;"),
        ("Why ? Now ! Then : so ; it is . Yes", "Why? Now! Then: so; it is. Yes"),
        (
            'as " Craig " in the episode " Teddy \'s Story " of',
            'as "Craig" in the episode "Teddy\'s Story" of',
        ),
        ("( born 1990 ) [ sic ] {  x  }", "(born 1990) [sic] {x}"),
        ("the actors ' guild and ' Herons ' by", "the actors'guild and' Herons' by"),  # a published flaw
        ("at 30 ° C", "at 30°C"),
        ("in N <unk> years", "in 1 <unk> years"),
        ("N N N N", "N 1 N N"),  # one pass, so every second
        ("one \n two", "one\ntwo"),
    ],
)
def test_wikitext(spaced: str, plain: str) -> None:
    assert WIKITEXT(spaced) == plain


@pytest.mark.parametrize(
    ("spaced", "plain"),
    [
        ("no it was n't black monday", "no it wasn't black monday"),
        ("standard & poor 's 500-stock", "standard & poor's 500-stock"),
        ("the traders ' desk", "the traders' desk"),
        (r"capital cities\/abc", "capital cities/abc"),
        ("fell N N N to $ N million # N a", "fell 1 1 1 to $1 million #1 a"),
        ("N of <unk> rose N", "N of ? rose N"),  # at the ends a number stays
        ("one \n two", "one\ntwo"),
    ],
)
def test_ptb(spaced: str, plain: str) -> None:
    assert PTB(spaced) == plain


@pytest.mark.parametrize(
    ("spaced", "plain"),
    [
        ("Butler 's the scorer .", "Butler's the scorer."),
        ("It ended . They left .", "It ended. They left."),
        ("How about a friend ? No ! Why ?", "How about a friend? No! Why?"),
        ("Stop !", "Stop!"),
        ('He said : " We know ; go on , "', 'He said: "We know; go on,"'),
        ("a ' b ' c", "a 'b' c"),
        ("( a ) [ b ] either / or", "(a) [b] either/or"),
        ("$ 5 or £ 4 at http : / / a or https : / / b", "$5 or £4 at http://a or https://b"),
        ("did n't", "did n't"),
    ],
)
def test_lm1b(spaced: str, plain: str) -> None:
    assert LM1B(spaced) == plain


def test_lambada() -> None:
    assert LAMBADA(" “Give me a minute,” she said \n") == '\n"Give me a minute," she said'
    assert LAMBADA("  ") == "\n"


def test_papers_are_wikitext_and_then_lm1b() -> None:
    assert SCIENTIFIC_PAPERS(" . ?") == ".?" != WIKITEXT(LM1B(" . ?"))
    assert SCIENTIFIC_PAPERS(" x @-@ rays ( fig . 1 ) are $ 5 .") == " x-rays (fig. 1) are $5."


@given(texts)
def test_a_text_gets_no_longer(text: str) -> None:
    for detokenizer in SHORTER:
        assert len(detokenizer(text)) <= len(text)
    assert len(LAMBADA(text)) <= len(text) + 1


@given(texts)
def test_lm1b_takes_away_nothing_but_spaces(text: str) -> None:
    assert LM1B(text).replace(" ", "") == text.replace(" ", "")


@given(texts)
def test_wikitext_takes_away_nothing_but_blanks(text: str) -> None:
    text = text.replace("@", "").replace("N", "")
    assert "".join(WIKITEXT(text).split()) == "".join(text.split())


@given(st.text(alphabet="abc xyz").map(" ".join))
@pytest.mark.parametrize("detokenizer", [WIKITEXT, PTB, LM1B, SCIENTIFIC_PAPERS])
def test_plain_words_stay_as_they_are(detokenizer: Detokenizer, text: str) -> None:
    assert detokenizer(text) == text


@given(texts)
def test_lambada_and_nothing_else_promises_to_be_idempotent(text: str) -> None:
    assert LAMBADA(LAMBADA(text)) == LAMBADA(text)
