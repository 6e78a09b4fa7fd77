"""The served model: it is loaded here, and requests become samplers, guidance and jobs of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from unmask.classification import Classifier
from unmask.config import lookup, suggest
from unmask.diffusion.categorical import SamplingParams
from unmask.guidance import Guidance
from unmask.guidance.regex.token_dfa import TokenDFA
from unmask.guidance.structure.structure import Structure
from unmask.model import LanguageModel
from unmask.sampling import PROCESS_SAMPLERS, SAMPLERS, Sampler
from unmask.sampling.factory import default_sampler, make_sampler
from unmask.serve._classifier import ServedClassifier
from unmask.serve._engine import DeadlineError, Engine, EngineClosedError, Job, Task
from unmask.serve._examples import example_templates
from unmask.serve._metrics import Metrics
from unmask.serve._response_schemas import ModelCard
from unmask.serve._schemas import GenerationRequest
from unmask.serve._structure_compiler import StructureCompiler
from unmask.serve._text_codec import MaskedText, TextCodec
from unmask.serve.limits import Limits

_DEFAULT_MAX_LENGTH = 4096
"""The longest sequence where the model has no limit."""


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
        self._deadline = deadline

        def event_fn(index: int, wrap: Callable[[Any], Any]) -> Callable[[Any], None]:
            def emit(event: Any) -> None:
                # Called in the engine's thread; the server's event loop may be closed already.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._events.put_nowait, (index, wrap(event)))

            return emit

        self._tasks = [Task(job, event_fn(index, Finished), deadline=deadline) for index, job in enumerate(jobs)]
        if stream:
            for index, task in enumerate(self._tasks):
                task.on_progress = event_fn(index, lambda event: event)
        engine.submit(self._tasks)

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
        self.metrics, self.created = Metrics(), int(time.time())
        self._engine: Engine | None = None
        self._codec: TextCodec | None = None
        self._structure_compiler: StructureCompiler | None = None

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
                self._require_positions(model)
            self._codec = TextCodec(served.tokenizer, served.vocab.mask_id)
            return served

        self._engine = Engine(
            loaded,
            self.metrics,
            self.max_batch,
            self.max_queue,
            on_ready,
            on_failure,
            self.stuck_after,
            self.prefix_bytes,
        )

    def _require_positions(self, model: LanguageModel) -> None:
        """ValueError for a model whose texts are no tokens at places of their own, step after step."""
        process = model.denoiser.process
        if process.is_continuous:
            raise ValueError(
                f"the model {self.name} writes text by {process.title}, whose steps a server cannot join with those of"
                " other requests: take `unmask sample` or `unmask complete`"
            )
        if process.inserts_tokens:
            raise ValueError(
                f"the model {self.name} inserts tokens, and a server's texts keep their length: take `unmask infill`"
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
        return self.model.denoiser.max_length or _DEFAULT_MAX_LENGTH

    def model_card(self) -> ModelCard:
        """The model, its samplers and the limits."""
        if self.classifies:
            return self._classifier_card()
        denoiser = self.model.denoiser
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
            max_length=served.max_length or _DEFAULT_MAX_LENGTH,
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

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.name:
            hint = suggest(name, [self.name])
            raise UnknownModelError(f"there is no model {name!r} here{hint}; this server has {self.name!r}")

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
        if request.sampler in self.samplers:
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
        )

    async def guidance(self, request: GenerationRequest, deadline: float) -> Guidance | None:
        """The guidance of a request, with what its text must match compiled; None without any."""
        wanted = request.structure
        if not request.cfg_scale and wanted is None:
            return None

        async def compiled(structure: Structure | None) -> TokenDFA | None:
            return None if structure is None else await self.structure_compiler.compile(structure, deadline)

        each = tuple([await compiled(one) for one in wanted]) if isinstance(wanted, tuple) else await compiled(wanted)
        return Guidance(request.cfg_scale, each, end_ids=self.model.end_ids if request.may_end else ())

    @property
    def structure_compiler(self) -> StructureCompiler:
        """The compiler of structures, started at first use."""
        if self._structure_compiler is None:
            self._structure_compiler = StructureCompiler(self.codec.tokenizer)
        return self._structure_compiler

    def check_canvas(self, masked_text: MaskedText, param: str) -> None:
        """Refuse a text that is too long; `param` is the field with the number of new tokens."""
        self.limits.check_context(param, masked_text.num_prompt_tokens, masked_text.num_masked, self.max_length)

    def submit(self, jobs: Sequence[Job], deadline: float, stream: bool = False) -> RequestHandle:
        """Queue the sequences of a request; with `stream`, they report every step."""
        return RequestHandle(self.engine, jobs, deadline, stream)


def _sampler_name(sampler: Sampler) -> str:
    """The name of a sampler in its table, or else the name of its class."""
    class_name = type(sampler).__name__
    return {**SAMPLERS.class_names, **PROCESS_SAMPLERS.class_names}.get(class_name, class_name)


def _with_steps(sampler: Sampler, steps: int | None) -> Sampler:
    """The sampler with the steps of a request, if it has such a field; None leaves it as it is."""
    if steps is None or not is_dataclass(sampler) or "steps" not in {field.name for field in fields(sampler)}:
        return sampler
    return replace(sampler, steps=steps)
