"""A hundred patterns that were written to do harm, or look as if they were."""

from __future__ import annotations

import random


def adversarial_regexes() -> list[str]:
    """At most 200 characters each, as a request may have."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(1, 6))) for _ in range(60)]
    several = [
        *(f"(a|b)*a(a|b){{{n}}}" for n in (9, 11, 13, 15, 20, 60)),
        *(f".*a.{{{n}}}b" for n in (6, 10, 20, 100)),
        *(f".{{0,{n}}}" for n in (500, 2000, 10000, 100000)),
        *(f"(a?){{{n}}}" for n in (100, 1000, 5000, 60000)),
        *(f"(a?){{{n}}}a{{{n}}}" for n in (20, 200, 2000)),
        *(f"a{{{n}}}" for n in (1000, 16000, 100000, 4294967294, 99999999999999)),
        *(f"(a{{{n}}}){{{n}}}" for n in (9, 99, 9999)),
        *("(" * n + "a" + "{9})" * n for n in (2, 4, 8, 30)),
        *("(" * n + "a*" + ")*" * n for n in (5, 20, 60)),
        *("(" * n + "a" + ")" * n for n in (50, 99)),
        *(f"(){{{n}}}" for n in (99999999, 4294967294)),
        *(f"((){{{n}}}){{{n}}}" for n in (9999, 99999)),
        *(f"({source}){{1,{n}}}" for source in (r"\w", r"\W", r"\d", r"\s", r"[^\W\d]") for n in (20, 500)),
        *(f"({source}+ ){{{n}}}{source}+" for source in (r"\w", ".", "[a-h]") for n in (5, 50, 2000)),
        *("|".join(words[:n]) for n in (10, 35)),
        *(f"({'|'.join(words[:n])})*" for n in (10, 35)),
        *(f"({'|'.join(words[:n])}){{1,200}}" for n in (5, 30)),
        *(f"((a|b){{{n}}}|(b|c){{{n + 1}}})*" for n in (5, 30, 300)),
        *(f"(.*,){{{n}}}P" for n in (5, 11, 100)),
        *(f"(x+x+)+y{{{n}}}" for n in (1, 2000)),
        "".join(f"[{chr(97 + n % 8)}{chr(48 + n % 10)}]" for n in range(50)),
        "".join(f"[{chr(n)}-{chr(n + 9)}]?" for n in range(0x4E00, 0x4E00 + 33)),
        "".join(f"(.{{0,{n}}}a)?" for n in range(1, 17)),
        "(a|aa)+$",
        "^(a+)+",
        "(.)\\1{99}",
        "(?=a)*b",
        "[[a]b]{99}",
        "[a&&b--c||d]{99}",
        "((a*)*b*)*c{300}",
        "(((a|b)|(c|d))|((e|f)|(g|h))){1,900}",
        r"(\u4e00|\U0001f600|é){1,2000}",
        r"[\u0000-\U0010ffff]{1,3000}",
        r"[^\u0000-\U0010ffff]{1,3000}",
        r"([^a][^b][^c][^d][^e]){1,300}",
        r"(a.{3}|b.{5}|c.{7}|d.{11}|e.{13})*",
        r"(.{2}|.{3}|.{5}|.{7})*",
        "(a{1,50}b{1,50}){1,50}",
        "((a{1,30}){1,30}){1,30}",
        "(ab?c?d?e?f?g?h?){1,3000}",
        "a?b?c?d?e?f?g?h?" * 12,
        ".*" * 99,
        ".?" * 99,
        "(.*a){30}",
        "(.+){99}",
        "(a|b|ab)*(ba|a|b){40}",
        "\x00{1,9999}",
        "a{0,65535}b{0,65535}",
        "(?P<x>a{999}){999}",
        "(?:(?:(?:a{99}){99}){99}){99}",
        "+" * 200,
        "(" * 200,
        "[" * 200,
        "\\" * 199,
        "(a|b)*a(a|b){13}|(b|c)*b(b|c){13}",
        "([ab]*a[ab]{6}){3}",
        "([ab]*a[ab]{4}c){20}",
    ]
    return [pattern[:200] for pattern in several]
