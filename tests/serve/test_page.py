"""The page in a real browser, against a live server: what it does."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from browser import TEXT, candidate_texts, screenshot, select_text, set_options
from live_server import LiveServer, language_model, live_server
from unmask import Ancestral, SamplingParams


def test_words_become_holes_and_are_filled(page: Page, server: LiveServer) -> None:
    page.fill("#text", TEXT)
    select_text(page, "#text", 4, 8)
    page.click("#make-hole")
    expect(page.locator("#text")).to_have_value("abc <mask:4> beef abc")
    select_text(page, "#text", 13, 17)
    page.keyboard.press("Control+m")
    expect(page.locator("#text")).to_have_value("abc <mask:4> <mask:4> abc")
    set_options(page)
    page.click("#go")
    expect(page.locator("#write-status")).to_contain_text("done in")
    sampler = Ancestral(5, SamplingParams(top_p=0.95))
    expected = language_model().infill("abc <mask:4> <mask:4> abc", sampler=sampler, seed=3).text
    assert candidate_texts(page) == [expected]
    assert page.locator(".token.mask").count() == 0
    screenshot(page, "filled")

    # Back to the beginning and forth again, by keyboard.
    end = int(page.locator("#scrub").get_attribute("max") or 0)
    page.focus("#scrub")
    page.keyboard.press("Home")
    expect(page.locator(".token.mask")).to_have_count(8)
    expect(page.locator("#scrub-label")).to_have_text(f"step 0 of {end}")
    page.keyboard.press("ArrowRight")
    first = page.locator(".token.fresh").count()
    assert first > 0
    assert page.locator(".token.mask").count() == 8 - first
    screenshot(page, "first step")
    page.click("#play")
    expect(page.locator("#scrub-label")).to_have_text(f"step {end} of {end}")
    expect(page.locator("#play")).to_have_text("Play")

    # What else was possible, by mouse and by arrow keys.
    page.locator(".token[data-written]").first.click()
    expect(page.locator("#detail")).to_contain_text("probability")
    assert page.locator("#detail .bar").count() >= 6
    told = page.locator("#detail").text_content()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#detail")).not_to_have_text(told or "")
    screenshot(page, "alternatives")

    # The command gives the same text.
    page.click("#terminal summary")
    line = page.locator("#curl").text_content() or ""
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["results"][0]["text"] == expected
    for button, copied in (("#copy-curl", line), (".candidate button", expected)):
        page.click(button)
        expect(page.locator(button)).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == copied


def test_candidates_stand_side_by_side(page: Page) -> None:
    page.check("[value=nothing]")
    assert page.locator("#text").is_hidden()
    page.fill("#length", "20")
    set_options(page, n=3)
    page.click("#go")
    expect(page.locator("#write-status")).to_contain_text("done in")
    expected = language_model().sample(3, 20, sampler=Ancestral(5, SamplingParams(top_p=0.95)), seed=3).texts
    assert candidate_texts(page) == expected
    boxes = [card.bounding_box() for card in page.locator(".candidate").all()]
    assert len({box["x"] for box in boxes if box}) > 1
    screenshot(page, "candidates")


def test_a_text_is_continued(page: Page) -> None:
    page.check("[value=continue]")
    page.fill("#text", "abc ")
    page.fill("#length", "10")
    page.select_option("#sampler", "confidence")
    set_options(page)
    page.click("#go")
    expect(page.locator("#write-status")).to_contain_text("done in 5 steps")
    (written,) = candidate_texts(page)
    assert written.startswith("abc ")
    assert len(written) == 14


def test_stop_frees_the_row(browser: Browser) -> None:
    with live_server() as slow:
        inner = slow.service.model.denoiser.forward

        def forward(*inputs: Any, **options: Any) -> Any:
            import time

            time.sleep(0.1)
            return inner(*inputs, **options)

        slow.service.model.denoiser.forward = forward  # type: ignore[method-assign]
        page = browser.new_page()
        page.goto(slow.url)
        expect(page.locator("#model")).to_contain_text("tiny")
        page.check("[value=nothing]")
        page.fill("#length", "40")
        page.select_option("#sampler", "first-hitting")
        page.click("#go")
        expect(page.locator(".token.fresh").first).to_be_visible()
        page.click("#stop")
        expect(page.locator("#write-status")).to_have_text("stopped")
        assert page.locator(".token.mask").count() > 0
        expect(page.locator("#go")).to_be_enabled()
        page.close()


def test_a_text_is_scored(page: Page) -> None:
    page.click("#tab-score")
    page.fill("#score-text", TEXT)
    page.click("#score-go")
    expect(page.locator("#figures dd")).to_have_count(3)
    found = language_model().score(TEXT, draws=128)
    expect(page.locator("#figures dd").first).to_contain_text(f"{found.nats_per_token:.4g}")
    expect(page.locator("#figures dd").first).to_contain_text("±")
    assert page.locator("#surprise .token").count() == len(TEXT)
    assert page.locator("#by-time rect").count() == 20
    page.locator("#surprise .token").nth(2).focus()
    expect(page.locator("#surprise-detail")).to_contain_text("nats")
    screenshot(page, "score")


def test_keyboard_alone_is_enough(page: Page) -> None:
    page.focus("#tab-write")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#score")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "tab-score"
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#write")).to_be_visible()
    page.focus("#text")
    page.keyboard.press("Control+a")
    page.keyboard.type("abc ")
    page.keyboard.type("<mask:3>")
    set_options(page)
    page.focus("#seed")
    page.keyboard.press("Enter")
    expect(page.locator("#write-status")).to_contain_text("done in")
    page.focus(".token[data-written]")
    page.keyboard.press("Enter")  # to the alternatives
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".token.fixed")).to_be_focused()
    expect(page.locator("#go")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()


def test_everything_has_a_name(page: Page) -> None:
    """For screen readers: every control has a label, and what changes is announced."""
    nameless = page.evaluate(
        """[...document.querySelectorAll("input, select, textarea, button")].filter((each) =>
            !(each.labels && each.labels.length || each.ariaLabel || each.textContent.trim())
        ).map((each) => each.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("[role=status]").count() >= 3
    assert page.locator("[role=alert]").count() == 3
    assert page.get_attribute("html", "lang") == "en"
    assert page.locator("h1").all_text_contents() == ["unmask"]
    assert page.locator("h3").count() == 0  # no level is left out


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_and_the_dark(browser: Browser, server: LiveServer, scheme: Any) -> None:
    page = browser.new_page(viewport={"width": 375, "height": 740}, color_scheme=scheme)
    page.goto(server.url)
    expect(page.locator("#model")).to_contain_text("tiny")
    page.fill("#text", "abc<mask:9>def<mask:5>")
    set_options(page, n=2)
    page.click("#go")
    expect(page.locator("#write-status")).to_contain_text("done in")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"phone {scheme}")
    page.click("#tab-score")
    page.fill("#score-text", TEXT)
    page.click("#score-go")
    expect(page.locator("#figures dd")).to_have_count(3)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground, ink = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    assert _contrast(ground, ink) > 7
    page.close()


def _contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        channels = [int(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)
