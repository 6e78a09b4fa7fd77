"""The page's further options: blocks, caches, guidance, patterns, schemas, grammars, and several models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, Route, expect

from browser import candidate_texts, generate, screenshot, set_options
from chat_models import chat_model
from live_server import LiveServer, live_server
from unmask import MDLM, BlockDiffusion, DiTConfig, LanguageModel, Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    backbone = DiTConfig(width=16, depth=1, heads=2, max_length=80, dropout=0.0)
    lm = LanguageModel.from_config(backbone, MDLM(), Tokenizer.characters("\n" + bytes(range(32, 127)).decode()))
    lm.denoiser.double().eval()
    with live_server(lm) as served:
        yield served


@pytest.fixture
def requests(page: Page) -> list[Any]:
    """What the page asks for, as it comes."""
    found: list[Any] = []

    def keep(request: Request) -> None:
        if request.url.endswith("/v1/infill"):
            found.append(request.post_data_json)

    page.on("request", keep)
    page.click("#more summary")
    page.fill("#text", "ab<mask:4>cd<mask:6>")
    set_options(page)
    return found


def candidates_of(server: LiveServer, body: dict[str, Any]) -> list[str]:
    results = server.post("/v1/infill", **{**body, "stream": False}).json()["results"]
    return [result["text"] for result in results]


def test_options_are_those_of_the_api(page: Page, server: LiveServer, requests: list[Any]) -> None:
    generate(page)
    assert not {"block_size", "sub_block_size", "cache", "cfg_scale", "top_k", "regex"} & requests[0].keys()
    for field in ("cache", "sub-block-size"):
        expect(page.locator(f"#{field}")).to_be_disabled()  # they are for blocks
    for field, value in {"top-k": 20, "cfg-scale": 1.5, "block-size": 4, "sub-block-size": 2}.items():
        page.fill(f"#{field}", str(value))
    page.select_option("#cache", "dual")
    expect(page.locator("#more-count")).to_have_text(" (5 set)")
    expect(page.locator("#sampler-help")).to_contain_text("The steps are those of a block.")
    generate(page)
    body = requests[1]
    wanted = {"top_k": 20, "cfg_scale": 1.5, "block_size": 4, "sub_block_size": 2, "cache": "dual"}
    assert {name: body[name] for name in wanted} == wanted
    assert candidate_texts(page) == candidates_of(server, body)
    page.click("#terminal summary")
    assert '"cache":"dual"' in str(page.locator("#curl").text_content())
    screenshot(page, "options")

    # Bounds are the API's own.
    schema = server.http.get("/openapi.json").json()["components"]["schemas"]["InfillRequest"]["properties"]
    assert float(page.get_attribute("#cfg-scale", "max") or 0) == schema["cfg_scale"]["maximum"]
    page.fill("#cfg-scale", "101")
    page.click("#go")
    expect(page.locator("#write-error")).to_have_text("Guidance must be a number from 0 to 100.")
    page.fill("#cfg-scale", "0")
    page.fill("#top-k", "0")
    page.click("#go")
    expect(page.locator("#write-error")).to_have_text("Top k must be a whole number of at least 1.")
    expect(page.locator("label:has(#top-k) + #write-error")).to_be_visible()  # beside the control

    expect(page).to_have_url(re.compile("cache=dual"))
    page.reload()
    expect(page.locator("#cache")).to_have_value("dual")
    expect(page.locator("#block-size")).to_have_value("4")


def test_each_hole_has_its_pattern(page: Page, server: LiveServer, requests: list[Any]) -> None:
    page.select_option("#must", "pattern")
    expect(page.locator("#constraint .patterns label")).to_have_count(2)
    page.click("#go")
    expect(page.locator("#write-error")).to_contain_text("There is no pattern yet")
    page.get_by_label("Pattern of hole 2, <mask:6>").fill("[0-9]+")
    generate(page)
    assert requests[-1]["regex"] == [None, "[0-9]+"]
    (text,) = candidate_texts(page)
    assert re.search(r"cd[0-9]{6}$", text)
    page.locator(".token[data-written]").first.click()  # a token alone cannot be kept where the hole must match
    expect(page.locator("#detail")).to_contain_text("the whole hole has to match")
    assert page.locator("#detail button").count() == 1

    page.fill("#text", "ab<mask:4>cd<mask:6>e<mask:2>")
    expect(page.locator("#constraint .patterns label")).to_have_count(3)
    page.get_by_label("Pattern of hole 3").fill("(")
    page.click("#go")
    expect(page.locator("#write-error")).to_contain_text("is not a regular expression")
    expect(page.get_by_label("Pattern of hole 3")).to_be_focused()
    page.get_by_label("Pattern of hole 3").fill("x*")
    generate(page)
    assert re.search(r"cd[0-9]{6}exx$", candidate_texts(page)[0])
    expect(page).to_have_url(re.compile("patterns="))
    page.reload()
    expect(page.get_by_label("Pattern of hole 3")).to_have_value("x*")

    page.click("#more summary")
    page.check("[value=continue]")
    page.fill("#text", "ab")
    page.fill("#length", "5")
    page.get_by_label("Pattern", exact=True).fill("z+")
    generate(page)
    assert candidate_texts(page) == ["abzzzzz"]


def test_json_schemas_and_grammars(page: Page, requests: list[Any]) -> None:
    page.fill("#text", "x = <mask:12>")
    told = page.locator("#write-error")
    page.select_option("#must", "json")
    generate(page)
    assert isinstance(json.loads(candidate_texts(page)[0][4:]), dict)
    page.select_option("#must", "schema")
    for text, words in (
        ("", "There is no schema yet"),
        ("{", "The schema is not JSON"),
        ('{"type": "odd"}', "The JSON schema has the type 'odd'"),
        ('{"nonsense": 1}', "nonsense"),
    ):
        page.fill("#schema", text)
        page.click("#go")
        expect(told).to_contain_text(words)
        expect(page.locator("label:has(#schema) + #write-error")).to_be_visible()
        expect(page.locator("#schema")).to_be_focused()
        expect(page.locator("#schema")).to_have_attribute("aria-invalid", "true")
    page.fill("#schema", json.dumps(SCHEMA))
    assert page.get_attribute("#schema", "aria-invalid") is None
    generate(page)
    expect(told).to_be_hidden()
    assert isinstance(json.loads(candidate_texts(page)[0][4:])["a"], int)
    page.select_option("#must", "grammar")
    page.fill("#grammar", "roo")
    page.click("#go")
    expect(page.locator("label:has(#grammar) + #write-error")).to_contain_text(
        "line 1 of the grammar", ignore_case=True
    )
    page.fill("#grammar", 'root ::= "y" root | "n"')
    generate(page)
    assert candidate_texts(page) == ["x = yyyyyyyyyyyn"]
    page.select_option("#must", "any")
    generate(page)
    assert not {"regex", "response_format", "grammar"} & requests[-1].keys()


def test_a_refusal_opens_what_was_folded(page: Page, requests: list[Any]) -> None:
    page.fill("#top-k", "0")
    page.click("#more summary")
    page.click("#go")
    expect(page.locator("#top-k")).to_be_focused()
    expect(page.locator("#write-error")).to_be_in_viewport()


def test_a_block_diffusion_model_has_its_own_blocks_and_cache(browser: Browser) -> None:
    backbone = DiTConfig(width=16, depth=1, heads=2, max_length=40, dropout=0.0)
    exact = LanguageModel.from_config(backbone, BlockDiffusion(block_size=5), Tokenizer.characters("abcdefgh \n"))
    with live_server(exact) as served:
        card = served.http.get("/v1/models").json()["data"][0]
        assert (card["defaults"], card["caches"], card["chat"]) == ({"block_size": 5}, ["none"], False)
        page = browser.new_page()
        page.goto(served.url)
        page.click("#more summary")
        expect(page.locator("#block-size")).to_have_attribute("placeholder", "5")
        expect(page.locator("#cache")).to_be_hidden()  # the model has an exact one
        expect(page.locator("#sub-block-size")).to_be_enabled()
        page.close()


def test_several_models(browser: Browser) -> None:
    """A select chooses the one that requests name; tabs, limits and examples follow it."""
    with live_server(chat_model()) as served:
        card = served.http.get("/v1/models").json()["data"][0]
        plain = {**card, "id": "plain", "chat": False, "max_length": 30, "caches": ["none"], "samplers": ["default"]}
        plain["examples"] = [{"name": "Short", "template": "ab<mask:2>", "text": "abcd"}]
        owned = {**card, "id": "own", "default_sampler": "blockwise", "defaults": {"temperature": 0, "block_size": 8}}
        labels = {**card, "id": "reviews", "samplers": [], "examples": [], "labels": ["good", "bad"]}
        page = browser.new_page()
        asked: list[Any] = []

        def fulfil(route: Route) -> None:
            asked.append(route.request.post_data_json)
            route.fulfill(status=503, json={"error": {"message": "enough"}})

        loaded, states = [labels, card], {"reviews": "ready", "tiny": "ready", "plain": "loading", "own": "loading"}
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": loaded}))
        page.route("**/health", lambda route: route.fulfill(json={"status": "alive", "models": states}))
        page.route(re.compile("/v1/(infill|chat/completions|score)$"), fulfil)
        page.goto(served.url)
        expect(page.locator("#model")).to_contain_text("tiny: MDLM")
        loaded += [plain, owned]  # they are listed once they are loaded
        states.update(plain="ready", own="ready")
        expect(page.locator("#chosen-model option")).to_have_text(["tiny", "plain", "own"])
        for path, tab, button in (
            ("messages", "chat", "#chat-send"),
            ("segments", "write", "#go"),
            ("text", "score", "#score-go"),
        ):
            page.click(f"#tab-{tab}")
            if tab == "chat":
                page.fill("#chat-text", "Hello")
            if tab == "score":
                page.fill("#score-text", "Hello")
            page.click(button)
            expect(page.locator(f"#{tab}-error")).to_have_text("Enough.")
            assert asked[-1]["model"] == "tiny"
            assert path in asked[-1]

        page.click("#tab-chat")
        page.select_option("#chosen-model", "plain")
        expect(page.locator("#chat-form")).to_be_hidden()
        expect(page.locator("#chat-missing")).to_contain_text("plain has no chat template, so it cannot chat")
        page.click("#tab-write")
        expect(page.locator("#sampler option")).to_have_count(1)
        assert page.get_attribute("#length", "max") == "30"
        expect(page.locator("#text")).to_have_value("ab<mask:2>")  # an example gives way to one of the other model
        page.click("#go")
        expect(page.locator("#write-error")).to_have_text("Enough.")
        assert (asked[-1]["model"], asked[-1]["segments"]) == ("plain", ["ab", 2])

        page.select_option("#chosen-model", "own")
        expect(page.locator("#temperature")).to_have_value("0")  # the model's own values, where nothing was typed
        expect(page.locator("#top-p")).to_have_value("1")
        expect(page.locator("#steps")).to_be_disabled()
        page.fill("#top-p", "0.5")
        page.select_option("#chosen-model", "tiny")
        expect(page.locator("#temperature")).to_have_value("1")
        expect(page.locator("#top-p")).to_have_value("0.5")
        page.select_option("#chosen-model", "own")
        expect(page).to_have_url(re.compile("chosen-model=own"))
        page.reload()
        expect(page.locator("#chosen-model")).to_have_value("own")
        page.close()
