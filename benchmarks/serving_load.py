"""256 clients, 10,000 requests of all kinds, a tenth of them hostile: statuses, waiting times and memory.

    python -m benchmarks.serving_load [MODEL] [--clients 256] [--requests 10000] [--workers 1] [--quick]

Each client sends one request after another: infills, completions, streams, scores, conversations, regular expressions,
schemas and tokenizations; and patterns that blow up, impossible schemas, bad JSON, disconnects in the middle of
requests and answers, and slow readers. Prints the statuses, the median and 99th percentile of each kind, for short
requests (one token, one step) their ratio, and the memory of the server and its processes. Exits with 1 if an answer
was 5xx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.load_requests import KINDS, LoadRequest, make_request
from benchmarks.serving import _megabytes, running_server
from unmask import ChatTemplate, LanguageModel, Tokenizer, save
from unmask.recipes import RECIPES

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_PATIENCE = (0.02, 0.5)
"""The range of seconds after which a client leaves that does not wait for its answer."""
_SLOW_BYTES, _SLOW_SECONDS, _SLOW_READS = 64, 0.1, 30
"""How a slow reader reads: so many bytes, after so many seconds, so many times."""


class Client:
    """A client with a connection that it keeps, except for requests that break it off."""

    def __init__(self, url: str, number: int) -> None:
        self._address, self._chance = urlsplit(url).netloc, random.Random(number)
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: LoadRequest) -> str:
        """The status of the answer, or what the client did in place of reading it."""
        fresh = self._connection is None
        try:
            return await self._ask(request)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            if fresh:
                return "connection lost"
            return await self.ask(request)  # a kept connection may have been closed by the server meanwhile

    async def _ask(self, request: LoadRequest) -> str:
        host, port = self._address.split(":")
        if self._connection is None:
            self._connection = await asyncio.open_connection(host, int(port))
        reader, writer = self._connection
        head = (
            f"POST {request.path} HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(request.body)}\r\n\r\n"
        ).encode()
        if request.behaviour == "sends half":
            writer.write(head + request.body[: len(request.body) // 2])
            await asyncio.sleep(self._chance.uniform(*_PATIENCE))
            self.close()
            return "left"
        writer.write(head + request.body)
        if request.behaviour == "leaves":
            await asyncio.sleep(self._chance.uniform(*_PATIENCE))
            self.close()
            return "left"
        if request.behaviour == "reads slowly":
            for _ in range(_SLOW_READS):
                await asyncio.sleep(_SLOW_SECONDS)
                if not await reader.read(_SLOW_BYTES):
                    break
            self.close()
            return "left"
        return await self._read_answer(reader)

    async def _read_answer(self, reader: asyncio.StreamReader) -> str:
        """The status; for a stream that ends with an error, the status that it would have been."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if "transfer-encoding: chunked" in head:
            body = b""
            while size := int((await reader.readline()).split(b";")[0], 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readline()
        else:
            length = head.partition("content-length:")[2].split("\r\n")[0]
            body = await reader.readexactly(int(length))
        if "connection: close" in head:
            self.close()
        if b"event: error" in body:
            error = json.loads(body.rpartition(b"data: ")[2])["error"]
            return {"timeout": "504", "server_error": "500"}.get(error["type"], "400") + " in a stream"
        return head.split(" ", 2)[1]

    def close(self) -> None:
        """Break the connection off."""
        if self._connection is not None:
            self._connection[1].transport.abort()
        self._connection = None


class Load:
    """Clients that take requests from one list; what became of them."""

    def __init__(self, url: str, pid: int, kinds: dict[str, int]) -> None:
        self._url, self._pid, self._kinds = url, pid, kinds
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.ends: dict[str, Counter[str]] = defaultdict(Counter)
        self.memory = [(0, process_megabytes(pid))]

    async def run(self, clients: int, requests: range, marks: tuple[int, ...]) -> None:
        """Send the requests; memory is measured after as many as the marks say."""
        remaining, done = iter(requests), 0

        async def one(number: int) -> None:
            nonlocal done
            client = Client(self._url, number)
            for each in remaining:
                request = make_request(each, self._kinds)
                start = time.perf_counter()
                end = await client.ask(request)
                self.ends[request.kind][end] += 1
                if end == "200":
                    self.seconds[request.kind].append(time.perf_counter() - start)
                done += 1
                if done in marks:
                    self.memory.append((done, process_megabytes(self._pid)))
            client.close()

        await asyncio.gather(*(one(number) for number in range(clients)))

    def num_server_errors(self) -> int:
        """Answers that were 5xx, and connections that the server has broken off."""
        return sum(
            count
            for ends in self.ends.values()
            for end, count in ends.items()
            if end.startswith("5") or end == "connection lost"
        )

    def lines(self) -> list[str]:
        """A line for each kind."""
        table = []
        for kind in sorted(self.ends):
            told = ", ".join(f"{count:,} {end}" for end, count in self.ends[kind].most_common())
            waited = ""
            if self.seconds[kind]:
                waited = f"median {at(self.seconds[kind], 0.5):.2f} s, 99% {at(self.seconds[kind], 0.99):.2f} s; "
            table.append(f"{kind}: {waited}{told}")
        return table


def at(seconds: list[float], share: float) -> float:
    """A quantile."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def process_megabytes(pid: int) -> float:
    """The memory of a process and of those that it has started; what they share is counted several times."""
    sizes = {pid: _megabytes(pid)}
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = True
    while found:
        found = False
        for child, parent in parents.items():
            if parent in sizes and child not in sizes:
                with suppress(OSError):
                    sizes[child], found = _megabytes(child), True
    return sum(sizes.values())


def chat_model() -> LanguageModel:
    """The demo's network with random weights, bytes as tokens, and a chat template."""
    recipe = RECIPES["stdlib-tiny"]()
    lm = LanguageModel.from_config(recipe.backbone, recipe.objective, Tokenizer.bytes())
    return lm.with_chat_template(ChatTemplate(_CHAT_TEMPLATE))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model folder; else one like the demo's, with random weights")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1, help="processes of the server")
    parser.add_argument("--quick", action="store_true", help="a little of everything, to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.clients = 60, 8
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(save(chat_model(), f"{folder}/model"))
        kinds = dict(KINDS)
        if not (Path(model) / "chat_template.jinja").exists():
            del kinds["chat"]
        with running_server(model, "--workers", str(args.workers)) as (url, pid):
            load, start = Load(url, pid, kinds), time.perf_counter()
            asyncio.run(load.run(args.clients, range(args.requests), (args.requests // 10, args.requests)))
            spent = time.perf_counter() - start
    rate = args.requests / spent
    print(f"{args.requests:,} requests of {args.clients} clients in {spent:.0f} s, {rate:.1f} a second")
    print("\n".join(load.lines()))
    short = load.seconds["short"]
    median, late = at(short, 0.5), at(short, 0.99)
    print(f"short requests: median {median:.2f} s, 99% {late:.2f} s, {late / median:.1f} times the median")
    shown = ", ".join(f"{size:.0f} after {count:,}" for count, size in load.memory)
    print(f"memory in MB: {shown} requests")
    print(f"answers with 5xx, or none: {load.num_server_errors()}")
    sys.exit(load.num_server_errors() > 0)


if __name__ == "__main__":
    main()
