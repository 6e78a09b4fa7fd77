"""The server under load: concurrent clients compared with the same requests one after another.

    python -m benchmarks.serving [MODEL] [--clients 16] [--memory 2000] [--mixed 5000] [--quick]

Prints the ratio of tokens a second (repeats in turns), how evenly clients are served, the server's memory
while clients disconnect in the middle of requests, and how long short requests wait next to long
ones at 16, 64 and 256 clients.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.mixed_load import run_mixed_load
from unmask import LanguageModel, Tokenizer, save
from unmask.recipes import RECIPES

PROMPTS = ("def main():", "import os\n", "class Reader:\n    ", "for line in ", "return ")


@contextmanager
def running_server(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """Start a server; yields its address and process id."""
    command = [sys.executable, "-m", "unmask", "serve", model, "--port", "0", "--max-queue", "4096", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = re.search(r"http://\S+?(?=/)", process.stderr.readline())
    if found is None:
        raise SystemExit("the server did not start")
    reading = threading.Thread(target=process.stderr.read, daemon=True)
    reading.start()
    try:
        while _ready_status(found[0]) != 200:
            time.sleep(0.1)
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait()
        reading.join()
        process.stderr.close()


def _ready_status(url: str) -> int:
    try:
        return httpx.get(f"{url}/ready").status_code
    except httpx.TransportError:
        return 0


def make_requests(count: int, seed: int, lengths: Sequence[int] = (8, 16, 24)) -> list[dict[str, Any]]:
    """Completions of different lengths, samplers and steps."""
    chance = random.Random(seed)
    return [
        {
            "prompt": chance.choice(PROMPTS),
            "suffix": chance.choice(("", "\n    pass")),
            "max_tokens": chance.choice(lengths),
            "steps": chance.choice((8, 16)),
            "sampler": chance.choice(("default", "random-order", "confidence")),
            "seed": number,
        }
        for number in range(count)
    ]


def run_load(url: str, requests: list[dict[str, Any]], clients: int) -> tuple[float, list[float], list[str]]:
    """Tokens per second, the seconds of each request, and the texts."""
    place, opened = threading.local(), list[http.client.HTTPConnection]()

    def one(body: dict[str, Any]) -> tuple[float, str]:
        # A minimal client, because it runs on the same cores as the server.
        if not hasattr(place, "connection"):
            place.connection = http.client.HTTPConnection(url.removeprefix("http://"))
            opened.append(place.connection)
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        place.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = json.load(place.connection.getresponse())
        return time.perf_counter() - start, str(answer["choices"][0]["text"])

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        done = list(pool.map(one, requests))
    spent = time.perf_counter() - start
    for connection in opened:
        connection.close()
    tokens = sum(body["max_tokens"] for body in requests)
    return tokens / spent, [seconds for seconds, _ in done], [text for _, text in done]


def memory_under_disconnects(url: str, pid: int, count: int, clients: int) -> list[float]:
    """The server's memory in MB after each tenth of the requests; half of the clients disconnect early."""
    sizes = []
    chance = random.Random(1)

    def one(body: dict[str, Any]) -> None:
        patience = chance.choice((0.02, 0.1, 60, 60))
        with httpx.Client(base_url=url, timeout=patience) as client, suppress(httpx.TimeoutException):
            client.post("/v1/completions", json={**body, "stream": chance.random() < 0.5})

    for part in range(10):
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(one, make_requests(count // 10, seed=part)))
        sizes.append(_megabytes(pid))
    return sizes


def _megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1e3
    return 0.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder; else one like the demo's, with random weights")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--lengths", type=int, nargs="+", default=(8, 16, 24), help="tokens to write")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=int, default=2000, help="requests of the memory test")
    parser.add_argument("--mixed", type=int, default=5000, help="short requests of the mixed load")
    parser.add_argument("--crowds", type=int, nargs="+", default=(16, 64, 256), help="clients of the mixed load")
    parser.add_argument("--quick", action="store_true", help="a little of everything, to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.clients, args.repeats, args.memory = 8, 4, 1, 20
        args.mixed, args.crowds = 40, (4, 8)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or f"{folder}/model"
        if not args.model:
            recipe = RECIPES["stdlib-tiny"]()
            save(LanguageModel.from_config(recipe.backbone, recipe.objective, Tokenizer.bytes()), model)
        with running_server(model) as (url, pid):
            requests = make_requests(args.requests, 0, args.lengths)
            run_load(url, requests[:8], 1)
            ratios = []
            for _ in range(args.repeats):
                alone, _, texts = run_load(url, requests, 1)
                crowd, seconds, same = run_load(url, requests, args.clients)
                ratios.append(crowd / alone)
                agree = statistics.mean(a == b for a, b in zip(texts, same, strict=True))
                print(
                    f"one after another {alone:,.0f} tokens/s, {args.clients} clients {crowd:,.0f} tokens/s:"
                    f" {crowd / alone:.1f}x; a request took {statistics.median(seconds):.2f} s,"
                    f" the longest {max(seconds):.2f} s; {agree:.1%} of the texts are the same",
                    flush=True,
                )
            print(f"ratio {statistics.median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f})")
            if args.memory:
                sizes = memory_under_disconnects(url, pid, args.memory, args.clients)
                print(f"memory over {args.memory:,} requests, MB: {' '.join(f'{size:.0f}' for size in sizes)}")
            for clients in args.crowds if args.mixed else ():
                found = run_mixed_load(url, clients, args.mixed // len(args.crowds), 1.0 if args.quick else 10.0)
                print(found.summary(_megabytes(pid)), flush=True)


if __name__ == "__main__":
    main()
