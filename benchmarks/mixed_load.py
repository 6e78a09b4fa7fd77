"""A mix of long and short requests, half of whose clients disconnect: how long the short ones wait."""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

SHORT_REQUEST = {"prompt": "import ", "max_tokens": 1, "steps": 1}
LONG_REQUEST = {"prompt": "import ", "max_tokens": 96, "steps": 4096, "sampler": "remdm", "n": 4}
CLIENT_TIMEOUTS = {"short": (0.01, 0.1), "long": (0.1, 2.0)}
"""The range of seconds after which a disconnecting client leaves."""


@dataclass
class MixedLoadResult:
    """The outcome of a mixed load."""

    clients: int
    elapsed: float = 0.0
    forward_passes: float = 0.0
    short_latencies: list[float] = field(default_factory=list)
    """Seconds of the short requests that were answered."""
    outcomes: Counter[str] = field(default_factory=Counter)

    def summary(self, megabytes: float) -> str:
        """The figures in one line."""
        waited, call = sorted(self.short_latencies), self.elapsed / max(1.0, self.forward_passes)

        def at(share: float) -> str:
            seconds = waited[min(len(waited) - 1, int(share * len(waited)))] if waited else float("nan")
            return f"{seconds:.3f} s ({seconds / call:.1f} calls)"

        ends = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.outcomes.items()))
        return (
            f"{self.clients} clients, short requests beside long ones: median {at(0.5)}, 95% {at(0.95)},"
            f" 99% {at(0.99)}, longest {at(1.0)}; a call {call:.3f} s; {ends}; {megabytes:.0f} MB"
        )


def run_mixed_load(url: str, clients: int, count: int, seconds: float = 10.0, seed: int = 0) -> MixedLoadResult:
    """`count` short requests by three quarters of the clients, while the others keep asking for long ones
    of at most `seconds`; every second client of each kind disconnects before its response, so half of the
    short requests are never answered."""
    result, lock, over = MixedLoadResult(clients), threading.Lock(), threading.Event()
    leaving = sorted({_disconnects(number) for number in range(clients) if _kind(number) == "short"})
    left = {leaves: iter(range(first, count, len(leaving))) for first, leaves in enumerate(leaving)}

    def ask(kind: str, patience: float | None, number: int) -> None:
        body = {
            **(SHORT_REQUEST if kind == "short" else {**LONG_REQUEST, "timeout": seconds}),
            "seed": number,
        }
        began = time.perf_counter()
        end = _post(url, body, 60.0 if patience is None else patience)
        end = "gone" if end == "TimeoutError" and patience is not None else end
        with lock:
            result.outcomes[f"{kind} {end}"] += 1
            if kind == "short" and end == "200":
                result.short_latencies.append(time.perf_counter() - began)

    def client(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        kind, leaves = _kind(number), _disconnects(number)
        while not over.is_set():
            with lock:
                following = next(left[leaves], None) if kind == "short" else chance.randrange(1 << 30)
            if following is None:
                return
            ask(kind, chance.uniform(*CLIENT_TIMEOUTS[kind]) if leaves else None, following)

    _run(url, result, [lambda number=number: client(number) for number in range(clients)], over)  # type: ignore[misc]
    return result


def _kind(number: int) -> str:
    """The kind of requests of a client: every fourth sends long ones."""
    return "short" if number % 4 else "long"


def _disconnects(number: int) -> bool:
    """Whether a client disconnects before its responses: every other group of four does."""
    return number // 4 % 2 == 1


def _run(url: str, result: MixedLoadResult, clients: list[Callable[[], None]], over: threading.Event) -> None:
    before, began = _forward_passes(url), time.perf_counter()
    threads = [threading.Thread(target=client) for client in clients]
    for thread in threads:
        thread.start()
    for number, thread in enumerate(threads):
        if number % 4:
            thread.join()
    result.elapsed, result.forward_passes = time.perf_counter() - began, _forward_passes(url) - before
    over.set()
    for thread in threads:
        thread.join()


def _post(url: str, body: dict[str, Any], timeout: float) -> str:
    """The status, or the error of the client."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def _forward_passes(url: str) -> float:
    found = re.search(r"^unmask_forward_passes_total\{.*\} (\S+)", httpx.get(f"{url}/metrics", timeout=60).text, re.M)
    return float(found[1]) if found else 0.0
