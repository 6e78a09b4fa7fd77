"""Texts of JSON schemas and grammars: always valid, and otherwise drawn as the model would draw them."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

import oracle
from oracle import LINEAR, MASK, chi_square_p_value, random_table
from schemas import SCHEMAS, hostile_schemas
from tiny_models import tiny_denoiser, words_of
from unmask import MDLM, Guidance, LanguageModel, Tokenizer
from unmask.guidance import Structure
from unmask.guidance.regex._byte_dfa import ByteDFA, byte_dfa
from unmask.guidance.regex._expression import MAX_DEPTH
from unmask.guidance.regex.constraint import RegexConstraint
from unmask.guidance.regex.token_dfa import TokenDFA
from unmask.sampling import Ancestral, Confidence, FirstHitting, RandomOrder, Sampler

LENGTH = 72
REJECT = 1e-3


@cache
def language_model() -> LanguageModel:
    """A random network over bytes."""
    tokenizer = Tokenizer.bytes()
    return LanguageModel(
        tiny_denoiser(MDLM(), tokenizer.vocab_size + 1, tokenizer.vocab_size, length=LENGTH), tokenizer
    )


def dfa_of(structure: Structure) -> ByteDFA:
    return byte_dfa(structure.expression())


def accepts(dfa: ByteDFA, text: str) -> bool:
    state = 1
    for byte in text.encode():
        state = int(dfa.transitions[state, byte])
    return bool(dfa.accepting[state])


def check_valid(name: str, draws: int, sampler: Sampler) -> None:
    schema = SCHEMAS[name]
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    batch = min(draws, 250)
    for seed in range(0, draws, batch):
        for text in (
            language_model().infill(f"<mask:{LENGTH}>", n=batch, schema=schema, sampler=sampler, seed=seed).texts
        ):
            checker.validate(json.loads(text))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_has_its_schema(name: str) -> None:
    check_valid(name, 20, Ancestral(1))
    check_valid(name, 2, RandomOrder(12))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_thousand_texts_of_each_schema(name: str) -> None:
    check_valid(name, 1000, Ancestral(1))
    check_valid(name, 20, RandomOrder(24))
    check_valid(name, 20, Confidence(8))


ACCEPTED: dict[str, tuple[Any, list[str], list[str]]] = {
    "order and whitespace": (
        {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["b"]},
        ['{"a":null,"b":null}', '{"b": null}', ' {"a":null, "b":null}\n  \n', '\n{"b":null}'],
        ['{"b":null,"a":null}', '{"a":null}', "{}", '{"b":  null}', '{"b":null,}', '  {"b":null}', '{"b":null} x'],
    ),
    "integers": (
        {"type": "integer", "minimum": -12, "maximum": 205},
        [str(n) for n in range(-12, 206)],
        ["-13", "206", "007", "-0", "1.0", "1e1", "+5", "2050", "-120", ""],
    ),
    "integers above": ({"type": "integer", "exclusiveMinimum": 98}, ["99", "100", "98765"], ["98", "9", "0", "-100"]),
    "integers below": ({"type": "integer", "maximum": -7}, ["-7", "-12", "-100"], ["-6", "7", "0", "-", "-07"]),
    "numbers": (
        {"type": "number", "minimum": 0, "exclusiveMaximum": 10},
        ["0", "0.0", "9.99", "5", "3.10"],
        ["10", "10.0", "-1", "-0.5", "1e1", "11.5", "09", ".5", "5."],
    ),
    "numbers around zero": (
        {"type": "number", "exclusiveMinimum": -2, "maximum": 1},
        ["-1.99", "-0.5", "0", "1", "1.0", "0.25"],
        ["-2", "-2.0", "1.01", "-0", "-3.5", "2"],
    ),
    "any number": ({"type": "number"}, ["0", "-1.5", "12e-3", "1E9"], ["01", "1.", "1e999", "--1"]),
    "found anywhere": ({"type": "string", "pattern": "ab|^c|d$"}, ['"xaby"', '"c1"', '"1d"'], ['"xc"', '"dx"', '"ba"']),
    "escapes": ({"type": "string", "pattern": '^["\\\\\n]$'}, ['"\\""', '"\\\\"', '"\\n"'], ['"""', '"\n"', '"a"']),
    "lengths in characters": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"é日"', '"\\n\\""', '"abc"'],
        ['"a"', '"abcd"', '"\\n"', '""'],
    ),
    "other members": (
        {"properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ['{"ab":null,"a":1}', '{"abc":1,"":2}', "{}", '{"é":1}'],
        ['{"ab":1}', '{"a":1,"ab":null}', '{"a":null}'],
    ),
    "nested to the depth": (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
        ["[" * n + "]" * n for n in range(1, MAX_DEPTH + 1)],
        ["[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "[", "[]]"],
    ),
    "fewer items than prefixes": (
        {"prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}, "maxItems": 3},
        ["[]", "[1]", "[1,2]", "[1, 2, 3]"],
        ["[2]", "[1,3]", "[1,2,3,3]"],
    ),
    "dates": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"2023-12-31"', '"0001-01-01"'],
        ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"', '"2023-13-01"', '"0000-01-01"'],
    ),
    "an enum with a type": ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
    "an enum with bounds": ({"enum": [1, 5, 9], "minimum": 4, "maximum": 6}, ["5"], ["1", "9"]),
    "nullable": ({"type": "string", "nullable": True, "maxLength": 0}, ["null", '""'], ["0"]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_which_texts_a_schema_has(name: str) -> None:
    schema, good, bad = ACCEPTED[name]
    dfa = dfa_of(Structure.json_schema(schema))
    for text in good:
        jsonschema.validate(json.loads(text), {**schema, "nullable": None} if "nullable" not in schema else {})
    assert [text for text in good if not accepts(dfa, text)] == []
    assert [text for text in bad if accepts(dfa, text)] == []


@given(st.integers(-3000, 3000), st.integers(0, 3000), st.lists(st.integers(-7000, 7000), max_size=50))
@settings(max_examples=30)
def test_integers_between_any_bounds(low: int, width: int, tried: list[int]) -> None:
    dfa = dfa_of(Structure.json_schema({"type": "integer", "minimum": low, "maximum": low + width}))
    for number in (low - 1, low, low + width, low + width + 1, 0, *tried):
        assert accepts(dfa, str(number)) == (low <= number <= low + width)


REFUSED: list[tuple[Any, str]] = [
    ({"type": "strin"}, "the type 'strin' at #; types are null, boolean"),
    ({"type": "object", "propertis": {}}, "has 'propertis' at #, which is not supported"),
    ({"not": {}}, "has 'not' at #"),
    ({"properties": {"a": {"if": {}}}}, "has 'if' at #/properties/a"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems at # is not supported"),
    ({"type": "number", "multipleOf": 3}, "has 'multipleOf'"),
    ({"patternProperties": {}}, "has 'patternProperties'"),
    ({"type": "string", "format": "uri"}, "the format 'uri' at # is not supported; use one of date, time"),
    ({"type": "string", "minLength": -1}, "minLength at # must be an integer of 0 or above; got '-1'"),
    ({"type": "integer", "minimum": "3"}, "minimum at # must be a number"),
    ({"type": "number", "minimum": 0.5}, "the bound 0.5 of numbers at # is not supported; use an integer"),
    ({"$ref": "other.json"}, "the $ref 'other.json' at # is not supported"),
    ({"$ref": "#/$defs/nod", "$defs": {"node": {}}}, "leads nowhere"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may share values"),
    ({"anyOf": []}, "anyOf at # must be a list of schemas"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "two different 'pattern' are joined"),
    (
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        "one of them has 'additionalProperties'",
    ),
    ({"type": "string", "pattern": "a(?=b)"}, "which is not supported"),
    ({"type": "string", "pattern": "a$b"}, "'$' before its end"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no text"),
    ({"required": ["a"], "additionalProperties": False}, "no text"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "no text matches"),
    ({"type": "array", "prefixItems": [{"type": "null"}] * 2, "minItems": 1, "maxItems": 0}, "no text matches"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no text matches"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}, "minItems": 1}}}, "4 times inside itself"),
    ({"const": "\x01"}, "control characters"),
    ({"properties": []}, "properties at # must be an object of schemas"),
    ("{", "is not JSON"),
    ("[1]", "must have an object, true or false at #"),
    ('{"const": NaN}', "has NaN, which is no number of JSON"),
    ("[" * 60_000, "nested too deeply"),
    (json.dumps({"enum": ["a" * 70_000]}), "it may have up to 65,536"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_schemas_that_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as told:
        language_model().infill("<mask:24>", schema=schema)
    assert len(str(told.value)) < 250


@pytest.mark.parametrize("schema", hostile_schemas(), ids=lambda schema: json.dumps(schema)[:40])
def test_hostile_schemas_are_answered_in_seconds(schema: Any) -> None:
    began = time.process_time()
    refusal = ""
    try:
        language_model().infill("<mask:24>", schema=schema, sampler=Ancestral(1))
    except ValueError as error:
        refusal = str(error)
    assert len(refusal) < 300
    assert time.process_time() - began < 10


def test_a_hole_that_is_too_short_is_told_what_it_needs() -> None:
    schema = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
    with pytest.raises(
        ValueError, match=r"a hole of 8 tokens cannot match the JSON schema .* needs at least 11 tokens"
    ):
        language_model().infill("x<mask:8>", schema=schema)
    (text,) = language_model().infill("x<mask:11>", schema=schema).texts
    assert text == 'x{"name":""}'
    with pytest.raises(ValueError, match="one of regex, a JSON schema and a grammar"):
        Guidance(regex="a", schema={})
    with pytest.raises(ValueError, match="Guidance only"):
        language_model().infill("x<mask:8>", schema={}, guidance=lambda denoiser, *_: denoiser)


GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "left recursion is a loop": (
        'root ::= e\ne ::= e "+" t | t # sums\nt ::= t "*" f | f\nf ::= "(" e ")" | [0-9]+',
        ["1", "1+2*3", "+".join("123456789"), "((1+2)*3)*4"],
        ["", "1+", "(1", "1)", "()"],
    ),
    "right recursion is a loop": ('root ::= "a" root | "b"', ["b", "ab", "a" * 50 + "b"], ["a", "", "ba"]),
    "recursion on both sides": ('root ::= root "+" root | "x"', ["x", "+".join("x" * 30)], ["+", "x+", "xx"]),
    "nested to the depth": (
        'root ::= "a" root "b" | ""',
        ["a" * n + "b" * n for n in range(MAX_DEPTH)],
        ["a" * MAX_DEPTH + "b" * MAX_DEPTH, "ab" * 2, "aab"],
    ),
    "classes, escapes and counts": (
        'root ::= [^a-c\\n\\]]{2,3} "\\x41\\u00e9\\"\\\\" . [x\\-z-]?',
        ['deAé"\\\n', 'défAé"\\.-', '--Aé"\\zx'],
        ['aeAé"\\.', 'dAé"\\.', 'de]Aé"\\.', 'deAé"\\.y'],
    ),
    "lines and groups": ('root ::=\n  ( "a"\n | "b" )+ ws\n  | "c"\n\nws ::= [ \\t]*', ["ab", "b \t", "c"], ["", "c "]),
    "an empty class": ('root ::= "a" | [] "b"', ["a"], ["b", ""]),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_which_texts_a_grammar_has(name: str) -> None:
    grammar, good, bad = GRAMMARS[name]
    dfa = dfa_of(Structure.grammar(grammar))
    assert [text for text in good if not accepts(dfa, text)] == []
    assert [text for text in bad if accepts(dfa, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "has no rule `root`"),
        ('start ::= "a"', "has no rule `root`"),
        ("root ::= ab", "refers to 'ab', which there is not"),
        ('root ::= "a', "which is no token of GBNF"),
        ('root ::= ("a"', "line 1 of the grammar has its end where ) should be"),
        ('"a"', "line 1 of the grammar has '\"a\"' where a rule"),
        ('root ::= "a"\nroot ::= "b"', "has the rule 'root' twice"),
        ("root ::= [z-a]", "a range that ends before it begins"),
        ('root ::= "\\q"', "the escape '\\\\q', which is unknown"),
        ('root ::= "a"{3,2}', "repeats from 3 to 2 times"),
        ("root ::= root", "no text"),
        ('root ::= "(" root ")"', "no text"),
        ("root ::= " + "(" * 50_000, "nested too deeply"),
        ('root ::= "a"{1000000000}', "more than 8192 states"),
        ("root ::= " + '"a" root "b" ' * 20 + '| ""', "more than 8192 states"),
        ('root ::= "\\ud800"', "which is no character"),
    ],
    ids=lambda text: text[:30],
)
def test_grammars_that_are_refused(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as told:
        dfa_of(Structure.grammar(grammar))
    assert len(str(told.value)) < 250


def derived(rules: dict[str, list[list[str]]], max_length: int) -> set[str]:
    """The texts of `S` up to a length: the least fixed point of the rules."""
    texts: dict[str, set[str]] = {name: set() for name in rules}
    while True:
        grown = {
            name: {
                text
                for option in options
                for parts in itertools.product(*(texts.get(symbol, {symbol}) for symbol in option))
                if len(text := "".join(parts)) <= max_length
            }
            for name, options in rules.items()
        }
        if grown == texts:
            return texts["S"]
        texts = grown


symbols = st.sampled_from(["a", "b", "S", "T"])
rule_options = st.lists(st.lists(symbols, min_size=1, max_size=3), min_size=1, max_size=3)


@given(st.fixed_dictionaries({"S": rule_options, "T": rule_options}))
@settings(max_examples=60, deadline=None)
def test_recursive_rules_have_no_other_texts_and_all_short_ones(rules: dict[str, list[list[str]]]) -> None:
    """Every text of up to 4 letters is derived with less nesting than `MAX_DEPTH`, if rules are not left open."""
    spelled = {
        name: " | ".join(" ".join(f'"{s}"' if s in "ab" else s.lower() for s in option) for option in options)
        for name, options in rules.items()
    }
    wanted = derived(rules, 4)
    grammar = Structure.grammar(f"root ::= s\ns ::= {spelled['S']}\nt ::= {spelled['T']}")
    refusal = ""
    try:
        dfa = dfa_of(grammar)
    except ValueError as error:
        refusal = str(error)
    if refusal:  # ambiguous rules may need too many states
        assert not wanted or "more than 8192 states" in refusal or "too much time" in refusal
        return
    every = ("".join(letters) for n in range(5) for letters in itertools.product("ab", repeat=n))
    assert {text for text in every if accepts(dfa, text)} == wanted


# Three tokens in three places: every text can be enumerated.
QUOTES = words_of(['"', "a", "b"], decoders.Fuse())
BRACKETS = words_of(["(", ")", "()"], decoders.Fuse())
NESTED = 'root ::= "(" root ")" | root root | "()"'


def balanced(text: str) -> bool:
    depths = list(itertools.accumulate(1 if sign == "(" else -1 for sign in text))
    return min(depths) >= 0 and depths[-1] == 0


def is_string(text: str) -> bool:
    return re.fullmatch(r'"[ab]*"', text) is not None


@pytest.mark.parametrize("sampler", [Ancestral(1), FirstHitting()], ids=["at once", "one by one"])
@pytest.mark.parametrize("kind", ["string", "brackets"])
def test_draws_keep_the_distribution_of_the_model(kind: str, sampler: Sampler) -> None:
    """All at once: the product of the model's distributions, restricted to the texts that match. One by one: each
    token from the model's distribution, restricted to those after which a match can follow."""
    tokenizer, names = (QUOTES, ['"', "a", "b"]) if kind == "string" else (BRACKETS, ["(", ")", "()"])
    structure = Structure.json_schema({"type": "string"}) if kind == "string" else Structure.grammar(NESTED)
    matches = is_string if kind == "string" else balanced
    texts = [x for x in oracle.CLEAN_STATES if matches("".join(names[token] for token in x))]
    assert 1 < len(texts) < len(oracle.CLEAN_STATES) / 2
    table = random_table(MDLM(schedule=LINEAR), drift=0)
    lines = dict(zip(oracle.STATES, oracle.probabilities(table, 0.5).tolist(), strict=True))
    law = dict.fromkeys(oracle.CLEAN_STATES, 0.0)
    if isinstance(sampler, Ancestral):
        weights = {x: math.prod(lines[oracle.ALL_MASKED][i][x[i]] for i in range(oracle.LENGTH)) for x in texts}
        law |= {x: weight / sum(weights.values()) for x, weight in weights.items()}
    else:
        for order, x in itertools.product(itertools.permutations(range(oracle.LENGTH)), texts):
            state, p = list(oracle.ALL_MASKED), 1 / math.factorial(oracle.LENGTH)
            for place in order:
                line = lines[tuple(state)][place]
                possible = {y[place] for y in texts if all(z in (MASK, v) for z, v in zip(state, y, strict=True))}
                p *= line[x[place]] / sum(line[token] for token in possible)
                state[place] = x[place]
            law[x] += p
    matching = RegexConstraint(table, torch.tensor([oracle.ALL_MASKED] * 256), structure, tokenizer)
    seen = oracle.sample_counts(sampler, matching, 2560, 256)
    assert chi_square_p_value(seen, law) > REJECT


def test_a_completion_may_end_before_its_last_token() -> None:
    """Up to the end the text matches; what follows is not looked at, so that the law is that of the text alone."""
    table = random_table(MDLM(schedule=LINEAR), drift=0)
    table.vocab = oracle.Vocab(size=4, mask_id=MASK, eos_id=2)
    tokenizer = words_of(["a", "b", "</s>"], decoders.Fuse())
    structure = Structure.grammar('root ::= "a" | "a" root "b"')  # a, aab, ...
    texts = [x for x in oracle.CLEAN_STATES if x[:2] == (0, 2) or x == (0, 0, 1)]
    weights = {x: math.prod(oracle.probabilities(table, 0.5)[-1][i][x[i]] for i in range(3)) for x in texts}
    law = dict.fromkeys(oracle.CLEAN_STATES, 0.0) | {x: w / sum(weights.values()) for x, w in weights.items()}
    tokens = torch.tensor([oracle.ALL_MASKED] * 256)
    seen = oracle.sample_counts(Ancestral(1), RegexConstraint(table, tokens, structure, tokenizer, (2,)), 2560, 256)
    assert chi_square_p_value(seen, law) > REJECT
    assert TokenDFA.compile(structure, tokenizer).with_ends((2,)) is TokenDFA.compile(structure, tokenizer).with_ends(
        (2,)
    )
