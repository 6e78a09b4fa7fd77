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

from unmask.config import did_you_mean
from unmask.diffusion.categorical import Choice
from unmask.diffusion.process import BlockMasking, Masking
from unmask.guidance import Guidance
from unmask.guidance.automaton import TokenAutomaton
from unmask.model import LanguageModel
from unmask.sampling import BY_NAME, AnySampler, Blockwise, Remask, UniformAncestral
from unmask.serve.engine import ClosedError, Engine, LateError, Task, Work
from unmask.serve.examples import examples
from unmask.serve.limits import Limits, check, check_length, within
from unmask.serve.metrics import Metrics
from unmask.serve.patterns import PatternCompiler
from unmask.serve.schemas import ModelCard, Writing
from unmask.serve.wording import HoledText, Wording

NO_LIMIT = 4096
"""The longest canvas of a model that does not have one."""


class NotReadyError(Exception):
    """The model is still being loaded."""


class StuckError(NotReadyError):
    """The engine does not come to the end of its turn."""


class UnknownModelError(ValueError):
    """A request for another model than the one that is served."""


@dataclass(frozen=True)
class Ended:
    """A row of a request has its result."""

    result: Any


class Ticket:
    """The rows of one request on their way; `give_up` where nobody waits for them any more."""

    def __init__(self, engine: Engine, works: Sequence[Work], deadline: float, watched: bool) -> None:
        loop = asyncio.get_running_loop()
        self._engine, self._events = engine, asyncio.Queue[tuple[int, Any]]()
        self._deadline = deadline

        def teller(row: int, wrap: Callable[[Any], Any]) -> Callable[[Any], None]:
            def tell(event: Any) -> None:
                # In the engine's thread, which must not care whether the server's loop has closed meanwhile.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._events.put_nowait, (row, wrap(event)))

            return tell

        self._tasks = [Task(work, teller(row, Ended), deadline=deadline) for row, work in enumerate(works)]
        if watched:
            for row, task in enumerate(self._tasks):
                task.on_progress = teller(row, lambda event: event)
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
                    raise LateError("the deadline has passed") from None
                if isinstance(event, Ended):
                    if isinstance(event.result, Exception):
                        raise event.result
                    left -= 1
                yield row, event
        finally:
            self.give_up()

    async def results(self) -> list[Any]:
        """The results of all rows."""
        found: list[Any] = [None] * len(self._tasks)
        async for row, event in self.events():
            if isinstance(event, Ended):
                found[row] = event.result
        return found

    def give_up(self) -> None:
        """Free what is still on its way."""
        self._engine.give_up(self._tasks)


class Service:
    """A model, its limits and its engine; the model comes with `begin`."""

    def __init__(
        self, name: str, limits: Limits, rows: int = 32, queue: int = 256, stuck_after: float = 60.0
    ) -> None:
        self.name, self.limits, self.rows, self.queue = name, limits, rows, queue
        self.stuck_after = stuck_after
        self.metrics, self.created = Metrics(), int(time.time())
        self._engine: Engine | None = None
        self._wording: Wording | None = None
        self._patterns: PatternCompiler | None = None

    def begin(
        self,
        load: Callable[[], LanguageModel],
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Load the model, in the engine's thread, and serve it from then on."""

        def loaded() -> LanguageModel:
            model = load()
            if model.tokenizer is None:
                raise ValueError(
                    f"the model {self.name} has no tokenizer, and a server reads and writes text"
                )
            self._wording = Wording(model.tokenizer, model.vocab.mask)
            return model

        self._engine = Engine(
            loaded, self.metrics, self.rows, self.queue, on_ready, on_failure, self.stuck_after
        )

    def close(self, patience: float) -> bool:
        """Finish what there is, then stop; whether the engine has come to its end."""
        return self._engine is None or self._engine.close(patience)

    async def forget_patterns(self) -> None:
        """Nobody will ask for a pattern any more."""
        if self._patterns is not None:
            await self._patterns.close()

    def check(self) -> None:
        """Refuse where nothing can be expected any more: the engine has ended, or is stuck."""
        engine = self._engine
        if engine is not None and not engine.alive:
            raise ClosedError("the server is stopping")
        if engine is not None and engine.stuck:
            raise StuckError(
                f"the engine has been in one turn for {engine.turn_seconds:.0f} seconds: it may be stuck, and"
                " then only a new start helps"
            )

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._engine is not None and self._engine.ready

    @property
    def engine(self) -> Engine:
        """The engine, once there is one."""
        self.check()
        if self._engine is None or not self._engine.ready:
            raise NotReadyError("the model is still being loaded: try again in a few seconds")
        return self._engine

    @property
    def model(self) -> LanguageModel:
        """The model."""
        return self.engine.model

    @property
    def wording(self) -> Wording:
        """Its tokenizer."""
        _ = self.engine  # or there is none yet
        assert self._wording is not None
        return self._wording

    @property
    def length(self) -> int:
        """The longest canvas."""
        return self.model.denoise.max_length or NO_LIMIT

    def card(self) -> ModelCard:
        """What there is to know before asking."""
        denoise = self.model.denoise
        named = list(BY_NAME) if isinstance(denoise.process, Masking | BlockMasking) else []
        room = min(self.length, self.limits.prompt_tokens, self.limits.max_tokens)
        return ModelCard(
            id=self.name,
            created=self.created,
            kind=type(denoise.objective).__name__,
            parameters=sum(weight.numel() for weight in denoise.parameters()),
            vocabulary=self.model.vocab.size,
            length=self.length,
            samplers=["default", *named],
            default_sampler=_name(self.model.default_sampler(1)),
            examples=examples(self.wording.tokenizer, room),
            limits=asdict(self.limits),
        )

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.name:
            hint = did_you_mean(name, [self.name])
            raise UnknownModelError(f"there is no model {name!r} here{hint}; this server has {self.name!r}")

    def deadline(self, asked: float | None) -> float:
        """When a request that comes now is late, by `time.monotonic`."""
        return time.monotonic() + min(asked or self.limits.seconds, self.limits.seconds)

    def sampler(self, asked: Writing) -> AnySampler:
        """The sampler of a request, whose numbers are within the limits."""
        check("n", asked.n, self.limits.n)
        steps = within("steps", asked.steps, 64, self.limits.steps)
        choice = Choice(asked.temperature, asked.top_k, asked.top_p)
        return self.model.sampler(asked.sampler, steps, choice, block=asked.block, cache=asked.cache)

    async def guide(self, asked: Writing, deadline: float) -> Guidance | None:
        """What a request asks of its text beyond the model, its patterns worked out."""
        if not asked.guidance and not asked.match:
            return None

        async def compiled(pattern: str | None) -> TokenAutomaton | None:
            return None if pattern is None else await self.patterns.compiled(pattern, deadline)

        if isinstance(asked.match, list):
            return Guidance(asked.guidance, tuple([await compiled(pattern) for pattern in asked.match]))
        return Guidance(asked.guidance, await compiled(asked.match))

    @property
    def patterns(self) -> PatternCompiler:
        """Who works out the patterns of requests."""
        if self._patterns is None:
            self._patterns = PatternCompiler(self.wording.tokenizer)
        return self._patterns

    def check_canvas(self, canvas: HoledText, param: str) -> None:
        """Refuse what is too long; `param` is the field that says how many tokens are to be written."""
        check_length(param, canvas.given, canvas.hidden, self.length, self.limits)

    def ticket(self, works: Sequence[Work], deadline: float, watched: bool = False) -> Ticket:
        """Send the rows of a request on their way; if `watched`, they tell of their progress."""
        return Ticket(self.engine, works, deadline, watched)


def revises(sampler: AnySampler) -> bool:
    """Whether a token that is written may still change."""
    return isinstance(
        sampler.sampler if isinstance(sampler, Blockwise) else sampler, Remask | UniformAncestral
    )


def _name(sampler: AnySampler) -> str:
    """What commands and requests call it: FirstHitting is first-hitting."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(sampler).__name__).lower()


def new_seed() -> int:
    """A seed for who did not bring one; it is told, so that the answer can be had again."""
    return secrets.randbelow(1 << 31)


def new_id(kind: str) -> str:
    """A name for an answer."""
    return f"{kind}-{secrets.token_hex(12)}"
