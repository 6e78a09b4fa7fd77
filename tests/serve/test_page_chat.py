"""The chat tab in a real browser, with a small model in a golden template."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from browser import open_page, screenshot
from chat_models import chat_model
from live_server import LiveServer, live_server, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(chat_model()) as served:
        yield served


@pytest.fixture
def chat(page: Page) -> Page:
    page.click("#tab-chat")
    set_settings(page, max_tokens=8, steps=4, seed=1)
    return page


def set_settings(page: Page, **values: Any) -> None:
    page.evaluate("document.getElementById('chat-settings').open = true")
    for name, value in values.items():
        page.fill(f"#chat-{name.replace('_', '-')}", str(value))
    page.evaluate("document.getElementById('chat-settings').open = false")


def say(page: Page, text: str, key: str = "Enter") -> None:
    page.fill("#chat-text", text)
    page.press("#chat-text", key)
    answered(page)


def answered(page: Page) -> None:
    expect(page.locator("#chat-send")).to_be_visible()


def said(page: Page) -> list[str]:
    return [str(text) for text in page.locator("#chat-log .said").all_text_contents()]


def completed(server: LiveServer, *texts: str, system: str = "", **options: Any) -> str:
    """The server's own answer to a conversation of alternating users and assistants."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    body = {"messages": messages, "max_tokens": 8, "steps": 4, "temperature": 1, "top_p": 0.95, "seed": 1, **options}
    answer = server.post("/v1/chat/completions", **body).json()
    return str(answer["choices"][0]["message"]["content"])


def answer_with(page: Page, *deltas: str, reason: str = "stop") -> list[Any]:
    """Answer the chats of a page with these texts; returns the requests, as they come."""
    asked: list[Any] = []

    def fulfil(route: Route) -> None:
        asked.append(route.request.post_data_json)
        ends = [*({"delta": {"content": text}} for text in deltas), {"delta": {}, "finish_reason": reason}]
        chunks = [{"choices": [{"finish_reason": None, **end}], "seed": 7} for end in ends]
        route.fulfill(body="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")

    page.route("**/v1/chat/completions", fulfil)
    return asked


def test_a_conversation_is_the_servers(chat: Page, server: LiveServer) -> None:
    set_settings(chat, system="Be brief.")
    first = completed(server, "Hello", system="Be brief.")
    say(chat, "Hello")
    assert said(chat) == ["Hello", first]
    second = completed(server, "Hello", first, "And\nmore?", system="Be brief.")
    chat.fill("#chat-text", "And")
    chat.press("#chat-text", "Shift+Enter")
    chat.keyboard.type("more?")
    chat.press("#chat-text", "Control+Enter")
    answered(chat)
    assert said(chat) == ["Hello", first, "And\nmore?", second]
    assert chat.evaluate("document.activeElement.id") == "chat-text"
    expect(chat.locator("#chat-said")).to_contain_text("The model: ")  # for screen readers, once it is complete
    screenshot(chat, "chat")


def test_the_last_message_is_answered_again_and_edited(chat: Page, server: LiveServer) -> None:
    say(chat, "Hello")
    chat.click("text=Answer again")
    answered(chat)
    assert said(chat) == ["Hello", completed(server, "Hello", seed=2)]
    expect(chat.locator("#chat-text")).to_be_focused()
    chat.keyboard.press("ArrowUp")
    field = chat.locator("#chat-log textarea")
    expect(field).to_be_focused()
    expect(field).to_have_value("Hello")
    chat.keyboard.press("Escape")
    assert said(chat)[0] == "Hello"
    expect(chat.locator("#chat-text")).to_be_focused()
    chat.click("#chat-log >> text=Edit")
    field.fill("Hi")
    field.press("Enter")
    answered(chat)
    assert said(chat) == ["Hi", completed(server, "Hi")]


def test_an_answer_that_is_cut_off_goes_on(chat: Page, server: LiveServer) -> None:
    set_settings(chat, max_tokens=2, steps=2)
    say(chat, "Hello")
    expect(chat.locator("#chat-log")).to_contain_text("cut off")
    begun = said(chat)[1]
    more = completed(server, "Hello", begun, max_tokens=2, steps=2, continue_final_message=True)
    chat.click("text=Go on")
    answered(chat)
    assert said(chat) == ["Hello", begun + more]


def test_drafts_emerge_and_stop_keeps_what_is_finished(browser: Browser) -> None:
    with live_server(chat_model()) as slow:
        inner = slow.service.model.denoiser.forward

        def forward(*inputs: Any, **options: Any) -> Any:
            time.sleep(0.1)
            return inner(*inputs, **options)

        slow.service.model.denoiser.forward = forward  # type: ignore[method-assign]
        with open_page(browser, slow.url) as page:
            page.click("#tab-chat")
            set_settings(page, max_tokens=24, steps=24, block_size=1, seed=1)  # from left to right
            page.fill("#chat-text", "Hello")
            page.press("#chat-text", "Enter")
            expect(page.locator("#chat-log .draft .mask").first).to_be_visible()
            wait_until(lambda: page.locator(".draft .mask").count() < 14)
            expect(page.locator("#chat-log .draft")).to_contain_text(re.compile(r"\w"))
            assert page.locator("[aria-hidden=true] > .draft").count() == 1  # steps are not read aloud
            screenshot(page, "chat draft")
            page.press("#chat-text", "Escape")
            answered(page)
            expect(page.locator("#chat-status")).to_contain_text("stopped")
            (_, kept) = said(page)
            assert kept
            assert page.locator(".mask").count() == 0
            page.fill("#chat-text", "Again")
            page.press("#chat-text", "Enter")
            page.click("#chat-stop")
            answered(page)


def test_what_is_said_is_text_and_never_html(chat: Page) -> None:
    markup = "<img src=x onerror='document.title=1'><b>bold</b> & <mask:3>"
    answer_with(chat, markup[:9], markup[9:])
    say(chat, markup)
    assert said(chat) == [markup, markup]
    assert chat.locator("#chat-log img, #chat-log b, #chat-log .mask").count() == 0
    assert chat.title() == "unmask"


def test_a_conversation_is_kept_cleared_and_copied(chat: Page) -> None:
    answer_with(chat, "Hi, & #2")
    set_settings(chat, system="Be brief.")
    say(chat, "Hello?")
    chat.fill("#chat-text", "a dra")
    expect(chat).to_have_url(re.compile("chat-text=a.dra.*conversation="))
    chat.reload()
    expect(chat.locator("#chat")).to_be_visible()
    assert said(chat) == ["Hello?", "Hi, & #2"]
    expect(chat.locator("#chat-text")).to_have_value("a dra")
    expect(chat.locator("#chat-system")).to_have_value("Be brief.")
    expect(chat.locator("#chat-more-count")).to_contain_text("1 set")
    for button, copied in (
        ("#chat-copy", "You: Hello?\n\nModel: Hi, & #2"),
        (".assistant button >> nth=0", "Hi, & #2"),
    ):
        chat.click(button)
        expect(chat.locator(button)).to_have_text("Copied")
        assert chat.evaluate("navigator.clipboard.readText()") == copied
    chat.click("#chat-clear")
    assert said(chat) == []
    expect(chat.locator("#chat-empty")).to_be_visible()
    chat.click("text=Bring it back")
    assert said(chat) == ["Hello?", "Hi, & #2"]

    # What no URL can hold is still there after a reload.
    answer_with(chat, "long " * 4000)
    say(chat, "more")
    assert len(chat.url) < 8300
    chat.reload()
    expect(chat.locator("#chat-log .said").last).to_contain_text("long long")


def test_a_damaged_link_is_no_fault(browser: Browser, server: LiveServer) -> None:
    for damaged in ("{", '[{"role": "tool", "content": "x"}, {"role": "user", "content": 7}]', "[null]"):
        with open_page(browser, f"{server.url}/#tab=chat&conversation={damaged}&patterns={damaged}") as page:
            assert said(page) == []


def test_faults_are_told_in_one_sentence(chat: Page) -> None:
    told = chat.locator("#chat-error")
    chat.click("#chat-send")
    expect(told).to_have_text("There is no message yet: type one.")
    for answer, words in (
        ({"status": 429}, "The server is busy: try again in a few seconds."),
        ({"status": 503, "json": {"error": {"message": "the server is stopping"}}}, "The server is stopping."),
        ({"body": 'data: {"choices": [], "seed": 1}\n\n'}, "The server stopped before the answer was finished"),
        ({"body": 'event: error\ndata: {"error": {"message": "it broke"}}\n\n'}, "It broke."),
    ):
        chat.route("**/v1/chat/completions", partial(Route.fulfill, **answer))
        say(chat, "Hello")
        expect(told).to_contain_text(words)
        chat.unroute("**/v1/chat/completions")
        chat.click("#chat-clear")
    set_settings(chat, max_tokens=511)
    say(chat, "Hello")
    expect(told).to_contain_text("This is too long: the model takes 512 tokens at once. Ask for fewer tokens")
    expect(chat.locator("#chat-max-tokens")).to_be_focused()
    chat.fill("#chat-max-tokens", "8")
    chat.get_by_role("button", name="Answer").click()
    answered(chat)
    expect(told).to_be_hidden()
    assert len(said(chat)) == 2
    chat.select_option("#chat-must", "grammar")
    chat.fill("#chat-grammar", "roo")
    chat.click("#chat-settings > summary")
    say(chat, "Hello")
    expect(chat.locator("label:has(#chat-grammar) + #chat-error")).to_contain_text("Line 1 of the grammar has 'roo'")
    expect(chat.locator("#chat-grammar")).to_be_focused()


def test_an_answer_of_nothing(chat: Page) -> None:
    answer_with(chat)
    say(chat, "Hello")
    expect(chat.locator("#chat-status")).to_have_text("the answer is empty")
    assert said(chat) == ["Hello"]
    expect(chat.get_by_role("button", name="Answer")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_chat_on_a_phone(browser: Browser, server: LiveServer, scheme: Any) -> None:
    size: Any = {"width": 375, "height": 667}
    with open_page(browser, server.url, viewport=size, has_touch=True, color_scheme=scheme) as phone:
        phone.tap("#tab-chat")
        answer_with(phone, "long " * 200)
        for _ in range(2):
            phone.fill("#chat-text", "Hello\n" * 3)
            phone.tap("#chat-send")
            answered(phone)
        assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")
        expect(phone.locator("#chat-text")).to_be_in_viewport(ratio=1)
        expect(phone.locator("#chat-log .foot").last).to_be_in_viewport(ratio=1)
        screenshot(phone, f"phone chat {scheme}")


def test_a_model_without_a_template_has_no_tab(browser: Browser) -> None:
    with live_server() as other, open_page(browser, f"{other.url}/#tab=chat") as page:
        expect(page.locator("#tab-chat")).to_be_hidden()
        expect(page.locator("#write")).to_be_visible()
        page.focus("#tab-write")
        page.keyboard.press("End")
        expect(page.locator("#score")).to_be_visible()
