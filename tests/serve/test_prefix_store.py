"""Prompts that begin alike are read once: later requests read the rest, and write the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from cached_setups import IN_BLOCKS, SETUPS, VOCAB, alone, network
from engine_harness import PendingTasks, running_engine
from live_server import language_model
from unmask import BlockDiffusion, NextToken
from unmask.backbones.cache import KVCache
from unmask.context import Cache, Context, Prefix
from unmask.diffusion.denoiser import DenoiserLike
from unmask.guidance import Guidance
from unmask.objectives import Objective
from unmask.sampling import Autoregressive
from unmask.sampling.canvas import Canvas
from unmask.sampling.denoisers import PaddedDenoiser
from unmask.serve import _prefix_store
from unmask.serve._jobs import generation_job
from unmask.serve._metrics import EngineMetrics
from unmask.serve._prefix_store import PrefixStore
from unmask.serve._step_batching import SamplerCoroutine, run_batch

EXACT = [name for name in SETUPS if name.startswith(("next", "recurrent", "blocks"))]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prefix_store, "_SEGMENT_TOKENS", 8)


def text(system: int, question: int, seed: int, holes: int = 6) -> Canvas:
    """Given tokens of which the first `system` are those of all, and holes."""
    same = torch.randint(4, (1, system), generator=torch.Generator().manual_seed(99))
    own = torch.randint(4, (1, question), generator=torch.Generator().manual_seed(seed))
    return Canvas(torch.cat([same, own, torch.full((1, holes), VOCAB.mask_id)], 1), (seed,))


def told(name: str, canvas: Canvas, store: PrefixStore) -> tuple[Tensor, list[Tensor], int]:
    """The text, what the sampler was told, and how many tokens the network has read for it."""
    written, heard, num_read = canvas.tokens, list[Tensor](), 0

    def work(denoiser: DenoiserLike) -> None:
        nonlocal written
        for written in SETUPS[name][2].run(denoiser, canvas):  # noqa: B007
            pass

    talk = SamplerCoroutine(work, network(name), store)
    talk.start()
    while talk.pending_call is not None:
        num_read += talk.pending_call.z.shape[1]
        (output,) = run_batch(network(name), [talk.pending_call])
        heard += [output] if len(output) else []
        talk.send(output)
    return written, heard, num_read


def counted(metrics: EngineMetrics, name: str, **labels: str) -> float:
    registry: CollectorRegistry = metrics.registry
    return registry.get_sample_value(f"unmask_{name}", labels) or 0.0


@pytest.mark.parametrize("name", EXACT)
def test_later_texts_are_the_same_and_read_less(name: str) -> None:
    metrics = EngineMetrics()
    store = PrefixStore(10**7, metrics)
    with torch.no_grad():
        read = []
        for seed, question in enumerate((3, 7, 11, 0)):  # of block-causal networks, blocks count from the beginning
            question -= question % 4 - 3 if "from the prompt" in name else 0
            canvas = text(20, question, seed)
            own = alone(name, canvas)
            written, heard, num_read = told(name, canvas, store)
            assert torch.equal(written, own.tokens)
            for one, other in zip(heard, own.heard, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
            again, _, num_again = told(name, canvas, store)
            assert torch.equal(again, written)
            read.append((num_read, num_again))
    assert counted(metrics, "prefix_hits_total") == 7 == counted(metrics, "prefix_lookups_total") - 1
    # Two segments of the 20 tokens that all have, and those that only the same text has.
    assert all(first - again >= 0 for first, again in read)
    assert read[0][0] - read[0][1] >= 15
    assert counted(metrics, "prefix_tokens_total", source="stored") >= 7 * 15
    assert counted(metrics, "prefix_bytes") == store.num_bytes > 0


@pytest.mark.parametrize("name", ["prefix", "dual"])
def test_networks_that_look_ahead_use_nothing(name: str) -> None:
    """What is cached of their prompt depends on what follows it."""
    metrics = EngineMetrics()
    with torch.no_grad():
        for seed in (0, 1):
            told(name, text(20, 3, seed), PrefixStore(10**7, metrics))
    assert counted(metrics, "prefix_lookups_total") == 0 == counted(metrics, "prefix_bytes")


def segment_bytes(tokens: int) -> int:
    return 2 * tokens * 4


def read_prefix(store: PrefixStore, tokens: list[int], **options: int) -> int:
    """Read a prefix beside a cache of one number for each token; how many tokens were stored before."""
    cache = KVCache()
    reader = store.open(cache, Prefix(torch.tensor([tokens]), **options))
    stored = cache.end
    rest = torch.tensor(tokens[stored:], dtype=torch.float32).view(1, 1, -1, 1)
    cache.view().update(0, rest, rest)
    reader.store_read()
    assert cache.layers[0][0].flatten().tolist() == tokens
    return stored


def test_what_was_used_longest_ago_is_dropped_first_and_ends_before_beginnings() -> None:
    store = PrefixStore(4 * segment_bytes(8), EngineMetrics())
    system, one, other = [1] * 8, [*[1] * 8, *[2] * 16], [*[1] * 8, *[3] * 16]
    assert read_prefix(store, one) == 0
    assert read_prefix(store, system) == 8
    assert read_prefix(store, other) == 8  # which drops the end of the first
    assert store.num_bytes == 4 * segment_bytes(8)
    assert read_prefix(store, one) == 16
    assert read_prefix(store, list(range(100))) == 0
    assert store.num_bytes <= store.max_bytes
    assert read_prefix(store, list(range(100))) == 32  # its beginning
    assert read_prefix(store, system) == 0


def test_blocks_that_begin_elsewhere_are_not_the_same() -> None:
    store, tokens = PrefixStore(10**6, EngineMetrics()), [n % 4 for n in range(33)]
    assert read_prefix(store, tokens, block_size=3, offset=1) == 0
    assert read_prefix(store, tokens, block_size=3, offset=1) == 26
    assert read_prefix(store, tokens, block_size=3, offset=2) == 0
    assert read_prefix(store, tokens, block_size=3, offset=2) == 25
    assert read_prefix(store, tokens, block_size=3) == 0
    assert read_prefix(store, tokens) == 0
    assert read_prefix(store, [*tokens[:20], 9, *tokens[21:]]) == 16


def test_padded_texts_and_guided_ones_begin_with_an_empty_cache() -> None:
    class Knows:
        def new_cache(self, prefix: Prefix | None = None) -> Cache:
            assert prefix is None
            return KVCache()

    padded = PaddedDenoiser(Knows(), torch.ones(1, 3, dtype=torch.bool))  # type: ignore[arg-type]
    assert padded.new_cache(Prefix(torch.zeros(1, 3))).end == 0
    lm = language_model(BlockDiffusion(block_size=4))
    ids = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, *[lm.vocab.mask_id] * 6]
    job = generation_job(lm, ids, IN_BLOCKS, 0, guidance=Guidance(1.0))
    with running_engine(lm, prefix_bytes=10**6) as running:
        waiting = PendingTasks([job])
        running.submit(waiting.tasks)
        assert len(waiting.wait()[0].ids) == len(ids)
        assert counted(running.metrics, "prefix_lookups_total") == 0


@pytest.mark.parametrize("objective", [NextToken(), BlockDiffusion(block_size=4)], ids=lambda o: type(o).__name__)
def test_the_engine_reads_a_system_prompt_once(objective: Objective) -> None:
    lm = language_model(objective)
    sampler: Any = Autoregressive() if isinstance(objective, NextToken) else IN_BLOCKS
    texts = [[1, 2, 5, 4] * 6 + [seed] * (1 + seed) + [lm.vocab.mask_id] * 9 for seed in range(5)]
    expected = [lm.generate(torch.tensor([ids]), sampler, seed).tokens[0].tolist() for seed, ids in enumerate(texts)]
    jobs = [generation_job(lm, ids, sampler, seed) for seed, ids in enumerate(texts)]

    def run(jobs: list[Any], prefix_bytes: int) -> tuple[list[list[int]], Callable[[str], float]]:
        with running_engine(lm, prefix_bytes=prefix_bytes) as running:
            ids = []
            for part in (jobs[:1], jobs[1:]):
                waiting = PendingTasks(part)
                running.submit(waiting.tasks)
                ids += [list(row.ids) for row in waiting.wait()]
            return ids, lambda name: counted(running.metrics, name)

    ids, number = run(jobs, 10**6)
    assert ids == expected
    assert (number("prefix_lookups_total"), number("prefix_hits_total")) == (5, 4)
    ids, number = run(jobs, 0)
    assert ids == expected
    assert number("prefix_lookups_total") == 0


def test_a_context_without_a_cache_is_nobodys_prefix() -> None:
    """A sampler may call the network without the cache that it has taken."""
    net, store = network("next token"), PrefixStore(10**6, EngineMetrics())

    def work(denoiser: DenoiserLike) -> None:
        tokens = torch.ones(1, 9, dtype=torch.int64)
        denoiser.new_cache(Prefix(tokens))
        denoiser(tokens, torch.zeros(1, 1), tokens == 1, Context())

    talk = SamplerCoroutine(work, net, store)
    talk.start()
    talk.send(torch.zeros(9, 7))
    assert talk.finished
    assert store.num_bytes == 0
