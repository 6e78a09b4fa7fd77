"""The server's memory under short requests of many shapes.

    python -m benchmarks.serving_memory [MODEL] [--requests 12000] [--clients 8]

Prints the megabytes that the process holds when the model is ready and after each tenth of the requests
(infills, completions and scores, no two lengths alike), and how many requests were answered a second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.serving import _megabytes, running_server
from unmask import LanguageModel, Tokenizer, save
from unmask.recipes import RECIPES

WORDS = (
    "def",
    "class",
    "import",
    "return",
    "for",
    "in",
    "range",
    "self",
    "None",
    "x",
    "if",
    "else",
    "with",
    "as",
)


def make_request(number: int, seed: int = 0) -> tuple[str, dict[str, Any]]:
    """A short request, whose shape follows from its number."""
    chance = random.Random(f"{seed} {number}")
    text = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 24)))
    kind = chance.choice(("infill", "completions", "score"))
    if kind == "score":
        return "/v1/score", {"text": text, "draws": chance.choice((16, 32, 64)), "seed": number}
    steps = chance.randint(2, 12)
    if kind == "completions":
        tokens = chance.randint(1, 32)
        body = {"prompt": text, "max_tokens": tokens, "n": chance.randint(1, 3)}
    else:
        holes = "".join(f" {chance.choice(WORDS)}<mask:{chance.randint(1, 10)}>" for _ in range(3))
        body = {"template": text + holes, "n": chance.randint(1, 4), "alternatives": chance.choice((0, 3))}
    return f"/v1/{kind}", {**body, "steps": steps, "seed": number}


def run_requests(url: str, request_ids: range, clients: int) -> tuple[float, dict[int, int]]:
    """The seconds that the requests took, and the number of responses by status."""
    place, statuses, opened = threading.local(), dict[int, int](), list[http.client.HTTPConnection]()

    def one(number: int) -> int:
        if not hasattr(place, "connection"):
            place.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
            opened.append(place.connection)
        path, body = make_request(number)
        place.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = place.connection.getresponse()
        answer.read()
        return int(answer.status)

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for status in pool.map(one, request_ids):
            statuses[status] = statuses.get(status, 0) + 1
    for connection in opened:
        connection.close()
    return time.perf_counter() - start, statuses


def measure_memory(model: str, count: int, clients: int) -> list[float]:
    """Megabytes when the model is ready, and after each tenth of the requests; printed as they come."""
    with running_server(model) as (url, pid):
        sizes = [_megabytes(pid)]
        print(f"ready: {sizes[0]:.0f} MB", flush=True)
        for part in range(10):
            seconds, statuses = run_requests(url, range(part * count // 10, (part + 1) * count // 10), clients)
            sizes.append(_megabytes(pid))
            summary = ", ".join(f"{many} x {status}" for status, many in sorted(statuses.items()))
            pace = sum(statuses.values()) / seconds
            print(f"{(part + 1) * count // 10:,}: {sizes[-1]:.0f} MB, {pace:.0f} a second ({summary})", flush=True)
    return sizes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder; else one like the demo's, with random weights")
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or f"{folder}/model"
        if not args.model:
            recipe = RECIPES["stdlib-tiny"]()
            save(LanguageModel.from_config(recipe.backbone, recipe.objective, Tokenizer.bytes()), model)
        sizes = measure_memory(model, args.requests, args.clients)
        print(f"largest {max(sizes) / sizes[0]:.2f} times the start")


if __name__ == "__main__":
    main()
