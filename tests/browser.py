"""The page of a server in a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TEXT = "abc dead beef abc"
SCREENSHOTS = os.environ.get("UNMASK_SCREENSHOTS")
"""A folder for screenshots, for people who want to look."""


@contextmanager
def launch_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = next(filter(None, map(shutil.which, BROWSERS)), own if Path(own).exists() else None)
        if path is None:
            pytest.skip(f"no browser here: install one of {', '.join(BROWSERS)} (make test tries to)")
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def open_page(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """A page on which no script fails, and nothing is against its policy."""
    allowed = ["clipboard-read", "clipboard-write"]
    context = browser.new_context(permissions=allowed, reduced_motion="reduce", **options)
    page = context.new_page()
    page.set_default_timeout(15_000)
    faults: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            faults.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("tiny: MDLM")
    expect(page.locator("#examples button").first).to_be_attached()
    yield page
    context.close()
    assert faults == []


def screenshot(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


def set_options(page: Page, seed: int = 3, steps: int = 5, n: int = 1) -> None:
    for field, value in (("seed", seed), ("steps", steps), ("n", n)):
        page.fill(f"#{field}", str(value))


def select_text(page: Page, field: str, start: int, end: int) -> None:
    page.focus(field)
    page.evaluate(f"document.querySelector('{field}').setSelectionRange({start}, {end})")


def generate(page: Page, status: str = "done in") -> None:
    page.click("#go")
    expect(page.locator("#write-status")).to_contain_text(status)


def candidate_texts(page: Page) -> list[str]:
    return [str(text) for text in page.locator(".candidate .text").all_text_contents()]
