"""A file of templates compared with the server: tokens a second of `unmask infill --input` and of concurrent clients.

    python -m benchmarks.batches [MODEL] [--templates 10000] [--served 2000] [--clients 16] [--quick]

Both sides get the same short templates, steps and sampler, in turns in one run. The command is a process of its own,
and its time includes starting Python, loading the model, reading the file and writing the answers; the second figure
is without the start, which is measured by a file of one template. The server is running already; its clients are
threads with one connection each. Tokens per second of processor time, of the server's process and of the command,
hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Timing:
    """Seconds of one side: on the clock, and of processor time."""

    elapsed: float
    processor: float


def time_command(model: str, templates: Sequence[dict[str, Any]], folder: Path) -> tuple[Timing, list[str]]:
    """The time of the command, and the texts."""
    requests, answers = folder / "requests.jsonl", folder / "answers.jsonl"
    requests.write_text("".join(json.dumps(template) + "\n" for template in templates))
    command = [sys.executable, "-m", "unmask", "infill", model]
    start, before = time.perf_counter(), os.times()
    subprocess.run(
        [*command, "--input", str(requests), "--output", str(answers), "--restart"], check=True, capture_output=True
    )
    seconds, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Timing(seconds, used), [json.loads(line)["results"][0]["text"] for line in answers.read_text().splitlines()]


def time_server(url: str, pid: int, templates: Sequence[dict[str, Any]], clients: int) -> tuple[Timing, list[str]]:
    """The time of all clients together, and the texts."""
    place, opened = threading.local(), list[http.client.HTTPConnection]()

    def ask(body: dict[str, Any]) -> str:
        if not hasattr(place, "connection"):
            place.connection = http.client.HTTPConnection(url.removeprefix("http://"))
            opened.append(place.connection)
        headers = {"Content-Type": "application/json"}
        place.connection.request("POST", "/v1/infill", json.dumps(body), headers)
        return str(json.load(place.connection.getresponse())["results"][0]["text"])

    start, before = time.perf_counter(), _processor_seconds(pid)
    with ThreadPoolExecutor(clients) as pool:
        texts = list(pool.map(ask, templates))
    timing = Timing(time.perf_counter() - start, _processor_seconds(pid) - before)
    for connection in opened:
        connection.close()
    return timing, texts


def _processor_seconds(pid: int) -> float:
    """Processor time of a process, as Linux reports it."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


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
        with running_server(model) as (url, pid):
            time_server(url, pid, served[:16], args.clients)
            ratios, efforts = [], []
            for _ in range(args.repeats):
                there, expected = time_server(url, pid, served, args.clients)
                start, _ = time_command(model, templates[:1], folder)
                here, texts = time_command(model, templates, folder)
                same = statistics.mean(a == b for a, b in zip(expected, texts, strict=False))
                asked, filled = num_tokens(served), num_tokens(templates)
                ratios.append(filled / here.elapsed / (asked / there.elapsed))
                efforts.append(filled / here.processor / (asked / there.processor))
                running = filled / max(1e-9, here.elapsed - start.elapsed)
                print(
                    f"server, {args.clients} clients: {asked / there.elapsed:,.0f} tokens/s"
                    f" ({asked / there.processor:,.0f} per second of processor time); file of {len(templates):,}:"
                    f" {filled / here.elapsed:,.0f} tokens/s ({filled / here.processor:,.0f}), {running:,.0f} after"
                    f" the start of {start.elapsed:.1f} s; {same:.1%} of the texts are the same",
                    flush=True,
                )
            for name, found in (("tokens/s", ratios), ("tokens per second of processor time", efforts)):
                print(f"{name}: {statistics.median(found):.1f}x ({min(found):.1f} to {max(found):.1f})")


if __name__ == "__main__":
    main()
