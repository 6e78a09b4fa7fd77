"""The benchmark of the server under load runs, and counts every request."""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest

from benchmarks import serving_load
from benchmarks.load_requests import KINDS, make_request


@pytest.mark.slow
def test_a_quick_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["serving_load", "--quick"])
    with pytest.raises(SystemExit) as end:
        serving_load.main()
    told = capsys.readouterr().out
    assert end.value.code == 0, told
    lines = [line for line in told.splitlines() if re.match(r"[a-z ]+: .*\d+ (200|400|413|422|left)", line)]
    assert sum(int(count) for line in lines for count in re.findall(r"(\d+) (?:\d{3}\b|left)", line)) == 60
    assert "answers with 5xx, or none: 0" in told


def test_a_tenth_of_the_requests_is_hostile_and_all_kinds_are_there() -> None:
    requests = [make_request(number, KINDS) for number in range(2000)]
    assert sum(request.is_hostile for request in requests) == 200
    kinds = Counter(request.kind for request in requests)
    assert kinds.keys() > KINDS.keys()
    assert kinds["short"] > 400
    assert len({request.behaviour for request in requests}) == 4
    assert requests[17] == make_request(17, KINDS)
