"""The served model: it is loaded here, and requests become samplers, guidance and jobs of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from unmask.classification import Classifier
from unmask.config import lookup
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.process import Process
from unmask.guidance import Guidance
from unmask.guidance.regex.token_dfa import TokenDFA
from unmask.guidance.structure.structure import Structure
from unmask.model import Denoiser, LanguageModel
from unmask.sampling import PROCESS_SAMPLERS, SAMPLERS, Sampler
from unmask.sampling.blockwise import CACHE_POLICIES
from unmask.sampling.factory import default_sampler, make_sampler
from unmask.serve._classifier import ServedClassifier
from unmask.serve._engine import DeadlineError, Engine, EngineClosedError, Job, Task
from unmask.serve._examples import example_templates
from unmask.serve._jobs import StepEvent
from unmask.serve._metrics import EngineMetrics
from unmask.serve._renderings import Renderings
from unmask.serve._response_schemas import ModelCard
from unmask.serve._schemas import GenerationRequest
from unmask.serve._structure_compiler import StructureCompiler
from unmask.serve._text_codec import TextCodec
from unmask.serve.limits import FieldError, Limits

_DEFAULT_MAX_LENGTH = 4096
"""The longest sequence where the model has no limit."""


_MAX_UNREAD_TOKENS = 1 << 22
"""Tokens of drafts that may wait for a client that reads them more slowly than they are written: 150 MB."""


class SlowReaderError(Exception):
    """The client reads its stream too slowly."""


class NotReadyError(Exception):
    """The model is still being loaded, or its engine is stuck."""


class UnknownModelError(ValueError):
    """A request for a model that is not served."""


@dataclass(frozen=True)
class Finished:
    """A sequence of a request has its result."""

    result: Any


class RequestHandle:
    """A submitted request: the events and results of its sequences."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], deadline: float, stream: bool) -> None:
        loop = asyncio.get_running_loop()
        self._engine, self._events = engine, asyncio.Queue[tuple[int, Any]]()
        self._deadline, self._unread_tokens = deadline, 0

        def event_fn(index: int, wrap: Callable[[Any], Any]) -> Callable[[Any], None]:
            def emit(event: Any) -> None:
                # Called in the engine's thread; the server's event loop may be closed already.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._put, index, wrap(event))

            return emit

        self._tasks = [Task(job, event_fn(index, Finished), deadline=deadline) for index, job in enumerate(jobs)]
        if stream:
            for index, task in enumerate(self._tasks):
                task.on_progress = event_fn(index, lambda event: event)
        engine.submit(self._tasks)

    def _put(self, index: int, event: Any) -> None:
        """Keep an event until it is read; the request ends if there are too many."""
        self._unread_tokens += _num_tokens(event)
        if self._unread_tokens <= _MAX_UNREAD_TOKENS:
            self._events.put_nowait((index, event))
        elif not self._tasks[index].cancelled.is_set():
            self.cancel()
            self._events.put_nowait(
                (index, Finished(SlowReaderError("the stream is read more slowly than it is written")))
            )

    async def events(self) -> AsyncIterator[tuple[int, Any]]:
        """(index of the sequence, event) until all are Finished; an error of any sequence is raised.

        The engine checks deadlines between iterations; here they hold even while it is busy.
        """
        remaining = len(self._tasks)
        try:
            while remaining:
                try:
                    async with asyncio.timeout(self._deadline - time.monotonic()):
                        index, event = await self._events.get()
                except TimeoutError:
                    raise DeadlineError("the deadline has passed") from None
                self._unread_tokens -= _num_tokens(event)
                if isinstance(event, Finished):
                    if isinstance(event.result, Exception):
                        raise event.result
                    remaining -= 1
                yield index, event
        finally:
            self.cancel()

    async def results(self) -> list[Any]:
        """The results of all sequences."""
        results: list[Any] = [None] * len(self._tasks)
        async for index, event in self.events():
            if isinstance(event, Finished):
                results[index] = event.result
        return results

    def cancel(self) -> None:
        """Drop what is not finished yet."""
        self._engine.cancel(self._tasks)


class Service:
    """A model, its limits and its engine; `start` loads the model.

    `samplers` adds sampler objects of the caller, which requests choose by these names. `classifies`: the model is a
    classifier. `prefix_cache_mb` megabytes of what is cached of prompts are kept for later requests that begin alike.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        max_batch: int = 32,
        max_queue: int = 256,
        stuck_after: float = 60.0,
        samplers: Mapping[str, Sampler] | None = None,
        classifies: bool = False,
        prefix_cache_mb: int = 0,
    ) -> None:
        self.name, self.limits, self.max_batch, self.max_queue = name, limits, max_batch, max_queue
        self.stuck_after, self.samplers, self.classifies = stuck_after, dict(samplers or {}), classifies
        self.prefix_bytes = prefix_cache_mb * 1_000_000
        self.metrics, self.created = EngineMetrics(), int(time.time())
        self._engine: Engine | None = None
        self._failed = False
        self._codec: TextCodec | None = None
        self._structure_compiler: StructureCompiler | None = None
        self.renderings = Renderings()

    def start(
        self,
        load: Callable[[], LanguageModel | Classifier],
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Load the model in the engine's thread, then serve it."""

        def loaded() -> LanguageModel | ServedClassifier:
            model = load()
            served = ServedClassifier(model) if isinstance(model, Classifier) else model
            if served.tokenizer is None:
                raise ValueError(f"the model {self.name} has no tokenizer, and a server reads and writes text")
            if isinstance(model, LanguageModel):
                _check_process(self.name, model.denoiser.process)
            self._codec = TextCodec(served.tokenizer, served.vocab.mask_id)
            return served

        def failed(error: Exception) -> None:
            self._failed = True
            on_failure(error)

        self._engine = Engine(
            loaded,
            self.metrics,
            self.max_batch,
            self.max_queue,
            on_ready,
            failed,
            self.stuck_after,
            self.prefix_bytes,
        )

    def close(self, shutdown_timeout: float) -> bool:
        """Finish running requests, then stop; returns whether the engine's thread has ended."""
        return self._engine is None or self._engine.close(shutdown_timeout)

    async def close_structure_compiler(self) -> None:
        """Stop the process that compiles structures."""
        if self._structure_compiler is not None:
            await self._structure_compiler.close()

    def check_alive(self) -> None:
        """Raise if the engine has ended or is stuck."""
        engine = self._engine
        if self._failed:
            raise EngineClosedError(f"the model {self.name!r} could not be loaded; the server's log says why")
        if engine is not None and not engine.alive:
            raise EngineClosedError("the server is stopping")
        if engine is not None and engine.stuck:
            raise NotReadyError(
                f"the engine has been in one iteration for {engine.iteration_seconds:.0f} seconds and may be stuck:"
                " restart the server"
            )

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._engine is not None and self._engine.ready

    def check_ready(self) -> None:
        """Raise if the model is not loaded, or cannot answer."""
        _ = self.engine

    @property
    def state(self) -> Literal["loading", "ready", "stuck", "failed", "stopped"]:
        """What the model is at."""
        engine = self._engine
        if self._failed:
            return "failed"
        if engine is not None and not engine.alive:
            return "stopped"
        if engine is None or not engine.ready:
            return "loading"
        return "stuck" if engine.stuck else "ready"

    @property
    def engine(self) -> Engine:
        """The engine; NotReadyError until the model is loaded."""
        self.check_alive()
        if self._engine is None or not self._engine.ready:
            raise NotReadyError("the model is still being loaded: try again in a few seconds")
        return self._engine

    @property
    def model(self) -> LanguageModel:
        """The language model."""
        model = self.engine.model
        assert isinstance(model, LanguageModel)
        return model

    @property
    def classifier(self) -> ServedClassifier:
        """The classifier."""
        served = self.engine.model
        assert isinstance(served, ServedClassifier)
        return served

    @property
    def codec(self) -> TextCodec:
        """Conversion between text and ids."""
        _ = self.engine  # raises if the model is not loaded yet
        assert self._codec is not None
        return self._codec

    @property
    def max_length(self) -> int:
        """The longest sequence."""
        served = self.classifier if self.classifies else self.model.denoiser
        return served.max_length or _DEFAULT_MAX_LENGTH

    def model_card(self) -> ModelCard:
        """The model, its samplers and the limits."""
        if self.classifies:
            return self._classifier_card()
        denoiser, process = self.model.denoiser, self.model.denoiser.process
        max_tokens = min(self.max_length, self.limits.prompt_tokens, self.limits.max_tokens)
        return ModelCard(
            id=self.name,
            created=self.created,
            objective=type(denoiser.objective).__name__,
            num_parameters=sum(weight.numel() for weight in denoiser.parameters()),
            vocab_size=self.model.vocab.size,
            max_length=self.max_length,
            samplers=self.sampler_names(),
            default_sampler=_sampler_name(default_sampler(self.model.denoiser, 1)),
            defaults=_sampler_options(denoiser),
            caches=["none"] if process.block_size or not process.has_masks else list(CACHE_POLICIES),
            chat=self.model.chat_template is not None,
            examples=example_templates(self.codec.tokenizer, max_tokens),
            limits=asdict(self.limits),
        )

    def _classifier_card(self) -> ModelCard:
        served = self.classifier
        classifier = served.classifier
        return ModelCard(
            id=self.name,
            created=self.created,
            objective="classification",
            num_parameters=sum(weight.numel() for weight in classifier.network.parameters()),
            vocab_size=served.vocab.size,
            max_length=self.max_length,
            samplers=[],
            default_sampler="",
            examples=[],
            limits=asdict(self.limits),
            labels=list(classifier.config.labels),
            columns=list(classifier.config.columns),
        )

    def sampler_names(self) -> list[str]:
        """The samplers that requests may name; before the model is loaded, those of all models."""
        masked = not self.ready or self.model.denoiser.process.has_masks
        return ["default", *(SAMPLERS if masked else ()), *self.samplers]

    def deadline(self, timeout: float | None) -> float:
        """The deadline of a request that arrives now, as a time of `time.monotonic`."""
        return time.monotonic() + min(timeout or self.limits.timeout, self.limits.timeout)

    def sampler(self, request: GenerationRequest) -> Sampler:
        """The sampler of a request; its numbers must be within the limits."""
        self.limits.check("n", request.n)
        own = self.model.denoiser.own_sampler
        steps = self.limits.resolve("steps", request.steps, (own and own.steps) or 64)
        is_given = request.model_fields_set & {"temperature", "top_k", "top_p"}
        params = SamplingParams(request.temperature, request.top_k, request.top_p) if is_given else None
        # Only names of the tables: a client must not make the server import "package.module:Name".
        lookup(request.sampler, dict.fromkeys(("default", *SAMPLERS, *self.samplers)), "sampler")
        options = request.sampler_options
        self.limits.check("steps", options.get("max_post_steps", 0))
        if request.sampler in self.samplers:
            for option in options:
                raise ValueError(
                    f"the sampler {request.sampler} is this server's own, and has no {option}: leave it out"
                )
            sampler = _with_steps(self.samplers[request.sampler], request.steps)
            return sampler if params is None else sampler.with_params(params, request.sampler)
        return make_sampler(
            self.model.denoiser,
            request.sampler,
            steps,
            params,
            block_size=request.block_size,
            sub_block_size=request.sub_block_size,
            cache=request.cache,
            **options,
        )

    async def guidance(self, request: GenerationRequest, deadline: float) -> Guidance | None:
        """The guidance of a request, with what its text must match compiled; None without any."""
        wanted = request.structure
        if not request.cfg_scale and wanted is None:
            return None

        async def compiled(structure: Structure | None, param: str) -> TokenDFA | None:
            try:
                return None if structure is None else await self.structure_compiler.compile(structure, deadline)
            except ValueError as error:
                raise FieldError(param, str(error)) from None

        each: TokenDFA | tuple[TokenDFA | None, ...] | None
        if isinstance(wanted, tuple):
            each = tuple([await compiled(one, f"regex[{index}]") for index, one in enumerate(wanted)])
        else:
            each = await compiled(wanted, request.structure_field)
        return Guidance(request.cfg_scale, each, end_ids=self.model.end_ids if request.may_end else ())

    @property
    def structure_compiler(self) -> StructureCompiler:
        """The compiler of structures, started at first use."""
        if self._structure_compiler is None:
            self._structure_compiler = StructureCompiler(self.codec.tokenizer)
        return self._structure_compiler

    def submit(self, jobs: Sequence[Job], deadline: float, stream: bool = False) -> RequestHandle:
        """Queue the sequences of a request; with `stream`, they report every step."""
        return RequestHandle(self.engine, jobs, deadline, stream)


def _num_tokens(event: Any) -> int:
    """The tokens of a draft that an event has."""
    return len(event.ids) if isinstance(event, StepEvent) else 0


def _sampler_name(sampler: Sampler) -> str:
    """The name of a sampler in its table, or else the name of its class."""
    class_name = type(sampler).__name__
    return {**SAMPLERS.class_names, **PROCESS_SAMPLERS.class_names}.get(class_name, class_name)


def _sampler_options(denoiser: Denoiser) -> dict[str, int | float]:
    """The options that the model's own sampler and its blocks decide where a request does not."""
    sampler, own = default_sampler(denoiser), denoiser.own_sampler
    options = {"block_size": getattr(sampler, "block_size", None) or denoiser.process.block_size}
    if own is not None and isinstance(denoiser.process, own.processes):
        params = getattr(sampler.inner or sampler, "params", SamplingParams())
        options |= {"steps": sampler.steps, "sub_block_size": getattr(sampler, "sub_block_size", None), **vars(params)}
    return {name: value for name, value in options.items() if value is not None}


def _with_steps(sampler: Sampler, steps: int | None) -> Sampler:
    """The sampler with the steps of a request, if it has such a field; None leaves it as it is."""
    if steps is None or not is_dataclass(sampler) or "steps" not in {field.name for field in fields(sampler)}:
        return sampler
    return replace(sampler, steps=steps)


def _check_process(name: str, process: Process) -> None:
    """ValueError for a model whose texts cannot share calls with those of other requests."""
    if process.is_continuous:
        why = "whose steps a server cannot join with those of other requests"
    elif process.predicts_ratios:
        why = "whose log-probabilities a server cannot tell"
    elif process.inserts_tokens:
        why = "and texts keep their length in a server"
    else:
        return
    raise ValueError(
        f"the model {name} writes text by {process.title}, {why}: take `unmask sample`, `infill` or `complete`"
    )
