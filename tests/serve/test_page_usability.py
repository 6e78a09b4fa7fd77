"""The page for who has never seen it: first clicks, mistakes, second thoughts, links, phones."""

from __future__ import annotations

import json
import re
import subprocess
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from browser import TEXT, candidate_texts, generate, open_page, screenshot, set_options
from live_server import LiveServer, language_model, live_server
from unmask import MDLM, Ancestral, DiTConfig, LanguageModel, SamplingParams, Tokenizer


def box(found: Locator) -> dict[str, float]:
    rectangle: Any = found.bounding_box()
    assert rectangle is not None
    return {**rectangle, "bottom": rectangle["y"] + rectangle["height"]}


@pytest.mark.parametrize("by", ["key", "button"])
def test_hiding_can_be_taken_back(page: Page, by: str) -> None:
    """With real keys: what the page writes into the field is in the browser's own history."""
    example = page.input_value("#text")
    page.focus("#text")
    page.keyboard.press("Control+Home")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowRight")
    hidden = f"<mask:3>{example[3:]}"
    if by == "key":
        page.keyboard.press("Control+m")
    else:
        page.click("#make-hole")
    expect(page.locator("#text")).to_have_value(hidden)
    page.keyboard.press("Control+z")
    expect(page.locator("#text")).to_have_value(example)
    page.keyboard.press("Control+Shift+z")
    expect(page.locator("#text")).to_have_value(hidden)

    page.keyboard.press("Control+a")
    page.keyboard.type(TEXT)
    for _ in range(4):
        page.keyboard.press("Shift+ArrowLeft")
    page.keyboard.press("Control+m")
    expect(page.locator("#text")).to_have_value(f"{TEXT[:-4]}<mask:4>")
    page.keyboard.press("Control+z")
    expect(page.locator("#text")).to_have_value(TEXT)


def test_the_first_click_works(browser: Browser, server: LiveServer) -> None:
    """In every mode, on models of different texts and lengths, without anything being filled in."""
    backbone = DiTConfig(width=16, depth=1, heads=2, max_length=24, dropout=0.0)
    dna = LanguageModel.from_config(backbone, MDLM(), Tokenizer.dna())
    with live_server(dna) as other:
        for url, holes in ((other.url, "ATG"), (server.url, "abcdefgh<mask:16>")):
            with open_page(browser, url) as page:
                assert page.input_value("#text").startswith(holes)
                generate(page)
                assert page.locator(".token[data-written]").count() > 0
                for mode in ("continue", "nothing", "fill"):
                    page.check(f"[value={mode}]")
                    generate(page)
                    expect(page.locator("#written .token.mask")).to_have_count(0)
                assert page.input_value("#text").startswith(holes)
                page.fill("#text", "")
                page.click("#examples button")
                assert page.input_value("#text").startswith(holes)
                page.click("#tab-score")
                page.click("#score-go")
                expect(page.locator("#figures dd")).to_have_count(3)
                for form in ("write", "score"):
                    expect(page.locator(f"#{form}-error")).to_be_hidden()


def test_faults_are_told_in_a_visitors_words(page: Page) -> None:
    told = page.locator("#write-error")

    def tried(text: str) -> None:
        page.fill("#text", text)
        page.click("#go")

    tried("abc")
    expect(told).to_have_text("There is no hole yet: select some words and hide them.")
    page.click("#make-hole")
    expect(told).to_have_text("Select the words to hide first.")
    tried("abc [MASK]")
    expect(told).to_have_text("There is no hole yet: a hole of four tokens is written <mask:4>.")
    tried("  ")
    expect(told).to_have_text("There is no text yet: type one, or take an example.")
    tried("abc<mask:0>")
    expect(told).to_have_text("A hole hides at least one token: make <mask:0> a <mask:1>, or delete it.")
    for holes in ("abc<mask:47>", "abc<mask:5000000000>"):
        tried(holes)
        expect(told).to_contain_text("This is too long: the model takes 48 tokens at once.")
    tried("xyz<mask:3>")
    expect(told).to_contain_text("This model does not know some characters ('x' 1, 'y' 1, 'z' 1): leave them out.")
    for field, value, sentence in (
        ("n", "0", "Candidates must be a whole number from 1 to 16."),
        ("steps", "", "Steps must be a whole number from 1 to 4096."),
        ("temperature", "-1", "Temperature must be a number from 0 to 100."),
    ):
        before = page.input_value(f"#{field}")
        page.fill(f"#{field}", value)
        tried("abc<mask:3>")
        expect(told).to_have_text(sentence)
        assert page.evaluate("document.activeElement.id") == field
        page.fill(f"#{field}", before)
    tried("abc<mask:3>")
    expect(page.locator("#write-status")).to_contain_text("done in")
    expect(told).to_be_hidden()
    page.click("#tab-score")
    page.fill("#score-text", "")
    page.click("#score-go")
    expect(page.locator("#score-error")).to_have_text("There is no text to score yet: type or paste one.")


def test_a_server_that_fails_is_told_of(page: Page) -> None:
    told = page.locator("#write-error")
    page.fill("#text", "abc<mask:3>")
    canvas = {"seed": 1, "n": 1, "tokens": [None, None]}
    for answer, words in (
        ({"status": 429}, "The server is busy: try again in a few seconds."),
        ({"status": 500}, "Something went wrong in the server: its log says what."),
        ({"status": 504}, "This took too long: ask for fewer tokens, steps or candidates."),
        (
            {"status": 503, "json": {"error": {"message": "the server is stopping"}}},
            "The server is stopping.",
        ),
        ({"body": f"event: canvas\ndata: {json.dumps(canvas)}\n\n"}, "The server stopped before the text"),
    ):
        page.route("**/v1/infill", partial(Route.fulfill, **answer))
        page.click("#go")
        expect(told).to_contain_text(words)
        page.unroute("**/v1/infill")


def test_a_server_that_is_gone_is_told_of(browser: Browser) -> None:
    with live_server() as gone, open_page(browser, gone.url) as page:
        gone.stop()
        page.click("#go")
        sentence = "The server does not answer. Is it still running?"
        expect(page.locator("#write-error")).to_have_text(sentence)
        page.click("#tab-score")
        page.click("#score-go")
        expect(page.locator("#score-error")).to_have_text(sentence)


def test_an_alternative_is_kept_and_the_rest_written_anew(page: Page) -> None:
    lm, sampler = language_model(), Ancestral(5, SamplingParams(top_p=0.95))
    page.fill("#text", "abc <mask:4> <mask:3> abc")
    set_options(page, n=2)
    generate(page)
    first = candidate_texts(page)
    assert first == lm.infill("abc <mask:4> <mask:3> abc", n=2, sampler=sampler, seed=3).texts
    expect(page.locator("#back")).to_be_hidden()

    def choose(place: int) -> str:
        """Another token than the one that is there; its id is its place in the alphabet."""
        page.locator(f".candidate:nth-child(2) .token[data-position='{place}']").click()
        other = page.locator(".choice:not(.chosen)").first
        token = str(other.locator("code").text_content()).replace("␣", " ").replace("⏎", "\n")
        other.click()
        expect(page.locator(f".candidate:nth-child(2) .token.fixed[data-position='{place}']")).to_have_text(token)
        expect(page.locator("#write-status")).to_contain_text("done in")
        expect(page.locator("#go")).to_be_enabled()
        return token

    tokenizer = lm.tokenizer
    assert tokenizer is not None
    one = choose(5)
    fixed = ["abc ", 1, tokenizer.encode(one), 2, " ", 3, " abc"]
    second = lm.infill(fixed, n=2, sampler=sampler, seed=3).texts
    assert candidate_texts(page) == second
    assert page.evaluate("document.activeElement.dataset.position") == "5"  # for who has no mouse
    two = choose(11)
    fixed = ["abc ", 1, tokenizer.encode(one), 2, " ", 2, tokenizer.encode(two), " abc"]
    third = lm.infill(fixed, n=2, sampler=sampler, seed=3).texts
    assert candidate_texts(page) == third
    screenshot(page, "fixed")
    line = page.locator("#curl").text_content() or ""
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert [result["text"] for result in json.loads(done.stdout)["results"]] == third

    for before in (second, first):
        page.click("#back")
        assert candidate_texts(page) == before
    expect(page.locator("#back")).to_be_hidden()
    choose(5)
    page.click("text=Let the model choose again")
    expect(page.locator(".token.fixed")).to_have_count(0)
    expect(page.locator("#go")).to_be_enabled()
    assert candidate_texts(page) == first

    page.fill("#text", "ab<mask:1>")
    generate(page)
    page.locator(".token[data-written]").first.click()
    page.locator(".choice").nth(1).click()
    expect(page.locator("#write-status")).to_have_text("every token is fixed")
    assert len(candidate_texts(page)) == 1


def test_a_token_that_was_unlikely_is_listed_too(page: Page) -> None:
    page.fill("#text", "ab<mask:30>")
    set_options(page)
    page.fill("#temperature", "20")
    page.fill("#top-p", "1")
    generate(page)
    page.focus(".token[data-written]")
    counts = set()
    for _ in range(page.locator(".token[data-written]").count()):
        widths, room, shares, title = page.evaluate(
            """[[...document.querySelectorAll("#detail .bar")].map((bar) => bar.offsetWidth),
                document.querySelector("#detail .track").offsetWidth,
                [...document.querySelectorAll(".chosen > :last-child")].map((each) => each.textContent),
                document.querySelector("#detail h2").textContent]"""
        )
        assert max(widths) == room  # bars are drawn relative to the largest
        assert len(shares) == 1  # what was drawn is always among them, with its probability
        assert f"probability {shares[0]}," in title
        counts.add(len(widths))
        page.keyboard.press("ArrowRight")
    assert counts == {6, 7}


def test_four_candidates_lie_two_and_two(page: Page) -> None:
    page.fill("#text", "abc<mask:4>")
    set_options(page, n=4)
    generate(page)
    lefts, tops = (
        page.evaluate(f"[...document.querySelectorAll('.candidate')].map((each) => each.{side})")
        for side in ("offsetLeft", "offsetTop")
    )
    assert (len(set(lefts)), len(set(tops))) == (2, 2)


def test_samplers_and_steps_are_explained(page: Page) -> None:
    told = page.locator("#sampler-help")
    expect(told).to_contain_text("For this model, “default” is ancestral: in each step")
    for name in page.evaluate("[...document.querySelectorAll('#sampler option')].map((each) => each.value)"):
        page.select_option("#sampler", name)
        assert len(str(told.text_content())) > 40
        counted = name not in ("first-hitting", "threshold", "factor", "entropy-bounded", "joint-threshold")
        assert page.locator("#steps").is_enabled() == counted
    page.fill("#text", "ab<mask:6>")
    page.select_option("#sampler", "first-hitting")
    generate(page, "done in 6 steps")
    page.select_option("#sampler", "confidence")
    page.fill("#steps", "32")
    generate(page, "done in 6 of 32 steps: in the others there was nothing to write")
    page.click("#help summary")
    for label in page.locator(".controls label:visible").all():
        name = str(label.evaluate("each => each.firstChild.textContent")).strip()
        assert label.get_attribute("title")
        if name != "Draws":
            assert page.locator("#help dt", has_text=name).is_visible()


def test_everything_is_kept_in_the_address(page: Page, browser: Browser) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url + (request.post_data or "")))
    page.fill("#text", "abc & <mask:4>\n#beef")
    page.check("[value=continue]")
    for field, value in {"length": "7", "n": "2", "steps": "6", "temperature": "0.5", "top-p": "0.9"}.items():
        page.fill(f"#{field}", value)
    page.select_option("#sampler", "confidence")
    page.click("#tab-score")
    page.fill("#score-text", "dead beef")
    expect(page).to_have_url(re.compile("score-text=dead"))
    page.reload()
    expect(page.locator("#sampler")).to_have_value("confidence")
    expect(page.locator("#score")).to_be_visible()
    expect(page.locator("#score-text")).to_have_value("dead beef")
    page.click("#tab-write")
    expect(page.locator("#text")).to_have_value("abc & <mask:4>\n#beef")
    assert page.is_checked("[value=continue]")
    kept = [page.input_value(f"#{field}") for field in ("length", "n", "steps", "temperature", "top-p")]
    assert kept == ["7", "2", "6", "0.5", "0.9"]
    assert not any("dead" in each for each in sent)  # a fragment is not sent

    # A link gives the same text, though the seed was any.
    page.check("[value=fill]")
    page.fill("#text", "abc <mask:9>")
    generate(page)
    page.click("#copy-link")
    expect(page.locator("#copy-link")).to_have_text("Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    with open_page(browser, link) as other:
        expect(other.locator("#sampler")).to_have_value("confidence")
        generate(other)
        assert candidate_texts(other) == candidate_texts(page)

    page.fill("#text", "abc " * 5000)
    page.click("#copy-link")
    expect(page.locator("#copy-link")).to_contain_text("too long")
    assert len(page.evaluate("navigator.clipboard.readText()")) < 8300
    assert len(page.url) < 8300


@pytest.mark.parametrize("key", ["Control+Enter", "Meta+Enter"])
def test_a_key_starts_it(page: Page, key: str) -> None:
    page.focus("#text")
    page.keyboard.press(key)
    expect(page.locator("#write-status")).to_contain_text("done in")
    page.click("#tab-score")
    page.focus("#score-text")
    page.keyboard.press(key)
    expect(page.locator("#figures dd")).to_have_count(3)


def test_results_come_into_view_on_a_phone(phone: Page) -> None:
    phone.fill("#text", "abc <mask:9> def <mask:9>\nabc\nabc\nabc")
    generate(phone)
    height = 667
    expect(phone.locator(".candidate .text")).to_be_in_viewport(ratio=0.9)
    for token in phone.locator(".token[data-written]").all()[::5]:
        token.tap()
        expect(phone.locator("#detail")).to_be_in_viewport(ratio=0.99)
        panel, picked = box(phone.locator("#detail")), box(phone.locator(".picked"))
        assert panel["bottom"] <= height
        assert picked["y"] >= 0
        assert picked["bottom"] <= panel["y"]
        phone.tap("#detail .close")
    screenshot(phone, "phone detail")
    phone.click("#help summary")
    assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
    phone.click("#tab-score")
    phone.click("#score-go")
    expect(phone.locator("#figures dd").last).to_be_in_viewport(ratio=1)
