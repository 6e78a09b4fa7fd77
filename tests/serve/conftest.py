"""A server for the tests of a module, and a browser for those of its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from browsing import opened, started
from served import Served, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    with opened(browser, server.url) as page:
        yield page


@pytest.fixture
def phone(browser: Browser, server: Served) -> Iterator[Page]:
    size: Any = {"width": 375, "height": 667}
    with opened(browser, server.url, viewport=size, has_touch=True) as page:
        yield page
