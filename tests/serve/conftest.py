"""A server for the tests of a module, and a browser for those of its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from browser import launch_browser, open_page
from live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch_browser() as found:
        yield found


@pytest.fixture
def page(browser: Browser, server: LiveServer) -> Iterator[Page]:
    with open_page(browser, server.url) as page:
        yield page


@pytest.fixture
def phone(browser: Browser, server: LiveServer) -> Iterator[Page]:
    size: Any = {"width": 375, "height": 667}
    with open_page(browser, server.url, viewport=size, has_touch=True) as page:
        yield page
