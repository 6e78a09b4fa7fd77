"""A file of templates compared with the server: tokens a second of `unmask infill --input` and of concurrent clients.

    python -m benchmarks.batches [MODEL] [--templates 10000] [--served 2000] [--clients 16] [--quick]

Both sides get the same short templates, steps and sampler, in turns in one run. The command is a process of its own,
and its time includes starting Python, loading the model, reading the file and writing the answers; the second figure
is without the start, which is measured by a file of one template. The server is running already; its clients are
threads with one connection each.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.serving import running_server
from unmask import LanguageModel, Tokenizer, save
from unmask.recipes import RECIPES

BEGINNINGS = ("def main(", "import ", "class Reader:\n    ", "for line in ", "return ", "x = ")
ENDINGS = ("", ":\n", ")\n    pass\n", "\n")


def make_templates(count: int, steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Templates of one or two holes."""
    chance = random.Random(seed)
    return [
        {
            "template": f"{chance.choice(BEGINNINGS)}<mask:{chance.randint(2, 12)}>{chance.choice(ENDINGS)}"
            + (f"<mask:{chance.randint(1, 6)}>" if chance.random() < 0.3 else ""),
            "steps": steps,
            "seed": number,
        }
        for number in range(count)
    ]


def num_tokens(answers: Sequence[dict[str, Any]]) -> int:
    """Tokens that were written: those of all holes."""
    return sum(int(part) for answer in answers for part in _hole_lengths(answer["template"]))


def _hole_lengths(template: str) -> list[str]:
    return [part.split(">")[0] for part in template.split("<mask:")[1:]]


def time_command(model: str, templates: Sequence[dict[str, Any]], folder: Path) -> tuple[float, list[str]]:
    """Seconds of the command, and the texts."""
    requests, answers = folder / "requests.jsonl", folder / "answers.jsonl"
    requests.write_text("".join(json.dumps(template) + "\n" for template in templates))
    command = [sys.executable, "-m", "unmask", "infill", model]
    start = time.perf_counter()
    subprocess.run(
        [*command, "--input", str(requests), "--output", str(answers), "--restart"], check=True, capture_output=True
    )
    seconds = time.perf_counter() - start
    return seconds, [json.loads(line)["results"][0]["text"] for line in answers.read_text().splitlines()]


def time_server(url: str, templates: Sequence[dict[str, Any]], clients: int) -> tuple[float, list[str]]:
    """Seconds of all clients together, and the texts."""
    place, opened = threading.local(), list[http.client.HTTPConnection]()

    def ask(body: dict[str, Any]) -> str:
        if not hasattr(place, "connection"):
            place.connection = http.client.HTTPConnection(url.removeprefix("http://"))
            opened.append(place.connection)
        headers = {"Content-Type": "application/json"}
        place.connection.request("POST", "/v1/infill", json.dumps(body), headers)
        return str(json.load(place.connection.getresponse())["results"][0]["text"])

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        texts = list(pool.map(ask, templates))
    seconds = time.perf_counter() - start
    for connection in opened:
        connection.close()
    return seconds, texts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder; else one like the demo's, with random weights")
    parser.add_argument("--templates", type=int, default=10_000, help="templates of the file")
    parser.add_argument("--served", type=int, default=2000, help="templates that the clients ask for")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a little of everything, to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.templates, args.served, args.clients, args.repeats = 20, 8, 4, 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = args.model or f"{folder}/model"
        if not args.model:
            recipe = RECIPES["stdlib-tiny"]()
            save(LanguageModel.from_config(recipe.backbone, recipe.objective, Tokenizer.bytes()), model)
        templates = make_templates(args.templates, args.steps)
        served = templates[: args.served]
        with running_server(model) as (url, _):
            time_server(url, served[:16], args.clients)
            ratios = []
            for _ in range(args.repeats):
                seconds, expected = time_server(url, served, args.clients)
                start, _ = time_command(model, templates[:1], folder)
                whole, texts = time_command(model, templates, folder)
                there, here = num_tokens(served) / seconds, num_tokens(templates) / whole
                running = num_tokens(templates) / max(1e-9, whole - start)
                same = statistics.mean(a == b for a, b in zip(expected, texts, strict=False))
                ratios.append(here / there)
                print(
                    f"server, {args.clients} clients: {there:,.0f} tokens/s; file of {len(templates):,}: {here:,.0f}"
                    f" tokens/s ({running:,.0f} after the start of {start:.1f} s): {here / there:.1f}x;"
                    f" {same:.1%} of the texts are the same",
                    flush=True,
                )
            print(f"ratio {statistics.median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
