"""The model as requests see it: load it, plan what a request asks for, hand that to the engine."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from unmask.config import suggest
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.process import BlockMasking, Masking
from unmask.guidance import Guidance
from unmask.guidance.regex.token_dfa import TokenDFA
from unmask.model import LanguageModel
from unmask.sampling import SAMPLERS, Blockwise, ReMDM, Sampler, UniformAncestral
from unmask.serve.engine import DeadlineError, Engine, EngineClosedError, Job, Task
from unmask.serve.examples import example_templates
from unmask.serve.limits import Limits, check_context_length, check_limit, checked_or_default
from unmask.serve.metrics import Metrics
from unmask.serve.regex_compiler import RegexCompiler
from unmask.serve.schemas import GenerationRequest, ModelCard
from unmask.serve.text_codec import MaskedText, TextCodec

_DEFAULT_MAX_LENGTH = 4096
"""The longest canvas of a model that does not have one."""


class NotReadyError(Exception):
    """The model is still being loaded."""


class _StuckError(NotReadyError):
    """The engine does not come to the end of its turn."""


class UnknownModelError(ValueError):
    """A request for another model than the one that is served."""


@dataclass(frozen=True)
class Finished:
    """A row of a request has its result."""

    result: Any


class RequestHandle:
    """The rows of one request on their way; `give_up` where nobody waits for them any more."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], deadline: float, stream: bool) -> None:
        loop = asyncio.get_running_loop()
        self._engine, self._events = engine, asyncio.Queue[tuple[int, Any]]()
        self._deadline = deadline

        def event_fn(row: int, wrap: Callable[[Any], Any]) -> Callable[[Any], None]:
            def emit(event: Any) -> None:
                # In the engine's thread, which must not care whether the server's loop has closed meanwhile.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._events.put_nowait, (row, wrap(event)))

            return emit

        self._tasks = [Task(work, event_fn(row, Finished), deadline=deadline) for row, work in enumerate(jobs)]
        if stream:
            for row, task in enumerate(self._tasks):
                task.on_progress = event_fn(row, lambda event: event)
        engine.submit(self._tasks)

    async def events(self) -> AsyncIterator[tuple[int, Any]]:
        """What the rows tell, with their numbers, until all have Ended; an exception of any is raised.

        The engine looks at deadlines between its turns; here they hold whatever it does.
        """
        left = len(self._tasks)
        try:
            while left:
                try:
                    async with asyncio.timeout(self._deadline - time.monotonic()):
                        row, event = await self._events.get()
                except TimeoutError:
                    raise DeadlineError("the deadline has passed") from None
                if isinstance(event, Finished):
                    if isinstance(event.result, Exception):
                        raise event.result
                    left -= 1
                yield row, event
        finally:
            self.cancel()

    async def results(self) -> list[Any]:
        """The results of all rows."""
        found: list[Any] = [None] * len(self._tasks)
        async for row, event in self.events():
            if isinstance(event, Finished):
                found[row] = event.result
        return found

    def cancel(self) -> None:
        """Free what is still on its way."""
        self._engine.cancel(self._tasks)


class Service:
    """A model, its limits and its engine; the model comes with `begin`."""

    def __init__(
        self, name: str, limits: Limits, max_batch: int = 32, max_queue: int = 256, stuck_after: float = 60.0
    ) -> None:
        self.name, self.limits, self.max_batch, self.max_queue = name, limits, max_batch, max_queue
        self.stuck_after = stuck_after
        self.metrics, self.created = Metrics(), int(time.time())
        self._engine: Engine | None = None
        self._codec: TextCodec | None = None
        self._regex_compiler: RegexCompiler | None = None

    def start(
        self,
        load: Callable[[], LanguageModel],
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Load the model, in the engine's thread, and serve it from then on."""

        def loaded() -> LanguageModel:
            model = load()
            if model.tokenizer is None:
                raise ValueError(f"the model {self.name} has no tokenizer, and a server reads and writes text")
            self._codec = TextCodec(model.tokenizer, model.vocab.mask_id)
            return model

        self._engine = Engine(
            loaded, self.metrics, self.max_batch, self.max_queue, on_ready, on_failure, self.stuck_after
        )

    def close(self, shutdown_timeout: float) -> bool:
        """Finish what there is, then stop; whether the engine has come to its end."""
        return self._engine is None or self._engine.close(shutdown_timeout)

    async def close_regex_compiler(self) -> None:
        """Nobody will ask for a pattern any more."""
        if self._regex_compiler is not None:
            await self._regex_compiler.close()

    def check_alive(self) -> None:
        """Refuse where nothing can be expected any more: the engine has ended, or is stuck."""
        engine = self._engine
        if engine is not None and not engine.alive:
            raise EngineClosedError("the server is stopping")
        if engine is not None and engine.stuck:
            raise _StuckError(
                f"the engine has been in one turn for {engine.iteration_seconds:.0f} seconds: it may be stuck, and"
                " then only a new start helps"
            )

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._engine is not None and self._engine.ready

    @property
    def engine(self) -> Engine:
        """The engine, once there is one."""
        self.check_alive()
        if self._engine is None or not self._engine.ready:
            raise NotReadyError("the model is still being loaded: try again in a few seconds")
        return self._engine

    @property
    def model(self) -> LanguageModel:
        """The model."""
        return self.engine.model

    @property
    def codec(self) -> TextCodec:
        """Its tokenizer."""
        _ = self.engine  # or there is none yet
        assert self._codec is not None
        return self._codec

    @property
    def max_length(self) -> int:
        """The longest canvas."""
        return self.model.denoiser.max_length or _DEFAULT_MAX_LENGTH

    def model_card(self) -> ModelCard:
        """What there is to know before asking."""
        denoise = self.model.denoiser
        named = list(SAMPLERS) if isinstance(denoise.process, Masking | BlockMasking) else []
        room = min(self.max_length, self.limits.prompt_tokens, self.limits.max_tokens)
        return ModelCard(
            id=self.name,
            created=self.created,
            objective=type(denoise.objective).__name__,
            num_parameters=sum(weight.numel() for weight in denoise.parameters()),
            vocab_size=self.model.vocab.size,
            max_length=self.max_length,
            samplers=["default", *named],
            default_sampler=_sampler_name(self.model.default_sampler(1)),
            examples=example_templates(self.codec.tokenizer, room),
            limits=asdict(self.limits),
        )

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.name:
            hint = suggest(name, [self.name])
            raise UnknownModelError(f"there is no model {name!r} here{hint}; this server has {self.name!r}")

    def deadline(self, timeout: float | None) -> float:
        """When a request that comes now is late, by `time.monotonic`."""
        return time.monotonic() + min(timeout or self.limits.timeout, self.limits.timeout)

    def sampler(self, request: GenerationRequest) -> Sampler:
        """The sampler of a request, whose numbers are within the limits."""
        check_limit("n", request.n, self.limits.n)
        steps = checked_or_default("steps", request.steps, 64, self.limits.steps)
        choice = SamplingParams(request.temperature, request.top_k, request.top_p)
        return self.model.make_sampler(
            request.sampler, steps, choice, block_size=request.block_size, cache=request.cache
        )

    async def guidance(self, request: GenerationRequest, deadline: float) -> Guidance | None:
        """What a request asks of its text beyond the model, its patterns worked out."""
        if not request.cfg_scale and not request.regex:
            return None

        async def compile_regex(regex: str | None) -> TokenDFA | None:
            return None if regex is None else await self.regex_compiler.compile(regex, deadline)

        if isinstance(request.regex, list):
            return Guidance(request.cfg_scale, tuple([await compile_regex(pattern) for pattern in request.regex]))
        return Guidance(request.cfg_scale, await compile_regex(request.regex))

    @property
    def regex_compiler(self) -> RegexCompiler:
        """Who works out the patterns of requests."""
        if self._regex_compiler is None:
            self._regex_compiler = RegexCompiler(self.codec.tokenizer)
        return self._regex_compiler

    def check_canvas(self, masked_text: MaskedText, param: str) -> None:
        """Refuse what is too long; `param` is the field that says how many tokens are to be written."""
        check_context_length(param, masked_text.num_prompt_tokens, masked_text.num_masked, self.max_length, self.limits)

    def submit(self, jobs: Sequence[Job], deadline: float, stream: bool = False) -> RequestHandle:
        """Send the rows of a request on their way; if `watched`, they tell of their progress."""
        return RequestHandle(self.engine, jobs, deadline, stream)


def may_remask(sampler: Sampler) -> bool:
    """Whether a token that is written may still change."""
    return isinstance(sampler.sampler if isinstance(sampler, Blockwise) else sampler, ReMDM | UniformAncestral)


def _sampler_name(sampler: Sampler) -> str:
    """What commands and requests call it: FirstHitting is first-hitting."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(sampler).__name__).lower()


def random_seed() -> int:
    """A seed for who did not bring one; it is told, so that the answer can be had again."""
    return secrets.randbelow(1 << 31)


def response_id(prefix: str) -> str:
    """A name for an answer."""
    return f"{prefix}-{secrets.token_hex(12)}"
