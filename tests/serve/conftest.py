"""A server for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from served import Served, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as served:
        yield served
