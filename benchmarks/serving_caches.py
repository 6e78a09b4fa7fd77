"""Requests whose networks keep a cache: 16 clients compared with one after another, and prompts that begin alike.

    python -m benchmarks.serving_caches [--kinds "next token" "block diffusion (8)"] [--clients 16] [--quick]

For each kind of model, with random weights: the ratio of tokens a second (repeats in turns), the same in seconds of the
server's processor time, which other programs on the machine disturb less, and how many texts are the same. Then a
long system prompt with short questions: seconds to the first event and to the end of a request, before the prompt is
known and after.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.serving import PROMPTS, run_load, running_server
from unmask import MDLM, BlockDiffusion, DiTConfig, LanguageModel, MambaConfig, NextToken, Tokenizer, save
from unmask.backbones import BackboneConfig
from unmask.objectives import Objective

SIZES: dict[str, Any] = {"width": 256, "depth": 4, "heads": 4, "max_length": 1024}
KINDS: dict[str, tuple[BackboneConfig, Objective, dict[str, Any]]] = {
    "MDLM": (DiTConfig(**SIZES), MDLM(), {"steps": 16}),
    "next token": (DiTConfig(**SIZES, causal=True), NextToken(), {}),
    "next token, recurrent": (MambaConfig(width=256, depth=4, max_length=1024), NextToken(), {}),
    "block diffusion (8)": (DiTConfig(**SIZES), BlockDiffusion(block_size=8), {"steps": 8}),
    "MDLM, prefix cache": (DiTConfig(**SIZES), MDLM(), {"steps": 8, "block_size": 8, "cache": "prefix"}),
    "MDLM, dual cache": (DiTConfig(**SIZES), MDLM(), {"steps": 8, "block_size": 8, "cache": "dual"}),
}
"""Networks, objectives and options of requests."""
EXACT = ("next token", "next token, recurrent", "block diffusion (8)")
"""Those whose prompts are stored."""


@contextmanager
def served(kind: str) -> Iterator[tuple[str, int]]:
    """A server of a model with random weights that are not all zero; its address and process id."""
    backbone, objective, _ = KINDS[kind]
    torch.manual_seed(0)
    lm = LanguageModel.from_config(backbone, objective, Tokenizer.bytes())
    torch.nn.init.normal_(lm.denoiser.backbone.lm_head.weight, std=0.02)
    with tempfile.TemporaryDirectory() as folder:
        save(lm, f"{folder}/model")
        with running_server(f"{folder}/model") as (url, pid):
            yield url, pid


def make_requests(kind: str, count: int) -> list[dict[str, Any]]:
    """Completions of 16, 24 or 32 tokens after prompts of different lengths."""
    chance = random.Random(0)
    return [
        {
            "prompt": chance.choice(PROMPTS) * chance.randint(1, 4),
            "max_tokens": chance.choice((16, 24, 32)),
            "seed": number,
            **KINDS[kind][2],
        }
        for number in range(count)
    ]


def compare_clients(kind: str, url: str, pid: int, clients: int, count: int, repeats: int) -> str:
    """One after another against `clients` at once."""
    requests, ratios, cpu_ratios, agreements = make_requests(kind, count), [], [], []
    rates: list[tuple[float, float]] = []
    run_load(url, requests[:4], 1)
    for _ in range(repeats):
        before = _cpu_seconds(pid)
        alone, _, texts = run_load(url, requests, 1)
        between = _cpu_seconds(pid)
        crowd, _, same = run_load(url, requests, clients)
        rates.append((alone, crowd))
        ratios.append(crowd / alone)
        cpu_ratios.append((between - before) / max(1e-9, _cpu_seconds(pid) - between))
        agreements.append(statistics.mean(a == b for a, b in zip(texts, same, strict=True)))
    alone, crowd = (statistics.median(column) for column in zip(*rates, strict=True))
    return (
        f"{kind}: one after another {alone:,.0f} tokens/s, {clients} clients {crowd:,.0f} tokens/s:"
        f" {statistics.median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f});"
        f" {statistics.median(cpu_ratios):.1f}x per second of the processor;"
        f" {statistics.mean(agreements):.1%} of the texts are the same"
    )


def compare_prompts(kind: str, url: str, prompt_tokens: int, count: int) -> str:
    """A request with a system prompt that was never read, against one whose prompt was, in turns."""
    chance = random.Random(0)
    new: list[tuple[float, float]] = []
    known: list[tuple[float, float]] = []
    for number in range(count + 1):
        system = "".join(chance.choice("abcdefgh \n") for _ in range(prompt_tokens))
        for times, question in ((new, "import "), (known, "for line in ")):
            body = {"prompt": system + question, "max_tokens": 16, "seed": number, "stream": True, **KINDS[kind][2]}
            seconds = _timed_stream(url, body)
            if number:  # the first of all is slower
                times.append(seconds)
    first, later = ([statistics.median(column) for column in zip(*times, strict=True)] for times in (new, known))
    return (
        f"{kind}: a prompt of {prompt_tokens:,} tokens, 16 to write: first event after {first[0]:.3f} s,"
        f" {later[0]:.3f} s if its beginning is known ({first[0] / later[0]:.1f}x); end after {first[1]:.3f} s,"
        f" {later[1]:.3f} s ({first[1] / later[1]:.1f}x)"
    )


def _timed_stream(url: str, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first event of a streamed completion, and to its end."""
    start, first = time.perf_counter(), 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            first = first or (time.perf_counter() - start if line.startswith("data:") else 0.0)
    return first, time.perf_counter() - start


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=800, help="tokens of the system prompt")
    parser.add_argument("--prompts", type=int, default=5, help="system prompts")
    parser.add_argument("--quick", action="store_true", help="a little of everything, to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.clients, args.repeats, args.prompt_tokens, args.prompts = 4, 2, 1, 100, 1
    for kind in args.kinds:
        with served(kind) as (url, pid):
            print(compare_clients(kind, url, pid, args.clients, args.requests, args.repeats), flush=True)
            if kind in EXACT:
                print(compare_prompts(kind, url, args.prompt_tokens, args.prompts), flush=True)


if __name__ == "__main__":
    main()
