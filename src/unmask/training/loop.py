"""The training loop: steps until the end or a signal, with logging, evaluation and checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unmask.hardware.memory import OutOfMemoryError, is_out_of_memory, oom_advice, retain_freed_memory
from unmask.hardware.precision import bf16_is_faster
from unmask.training._checkpoint import CheckpointStore
from unmask.training._throughput import ThroughputMeter
from unmask.training.logger import TrainingLogger
from unmask.training.trainer import Trainer


class DivergedError(RuntimeError):
    """The loss was not finite for too long."""


def train(
    trainer: Trainer,
    checkpoints: CheckpointStore,
    logger: TrainingLogger,
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> bool:
    """Train to the end, or until a signal asks to stop (then False), saving checkpoints.

    `evaluate` is called with the averaged weights in place. On a CPU, the process keeps the memory it frees
    from now on (see `retain_freed_memory`).
    """
    _choose_precision(trainer)
    if trainer.device.type == "cpu":
        retain_freed_memory()
    config, state = trainer.config, trainer.state
    meter = ThroughputMeter(trainer.distributed, bool(state.bf16), state.tokens, state.flops)
    logger.info(f"matrix products run at {meter.peak_flops / 1e9:,.0f} GFLOP/s here")
    trainer.model.train()
    with _catch_stop_signals(trainer), _explain_out_of_memory(trainer, checkpoints):
        while state.step < config.steps and not state.ended_early:
            with meter.time_step():
                metrics = trainer.step()
            _check_finite(trainer, logger, metrics)
            is_last = state.step == config.steps or state.ended_early
            if is_last or state.step % config.log_every == 0:
                logger.log_step(state.step, {**metrics, **meter.metrics(state.tokens, state.flops)})
            if evaluate is not None and (is_last or state.step % config.eval_every == 0):
                logger.log_evaluation(state.step, _evaluate_average(trainer, evaluate))
            if is_last or trainer.should_stop or state.step % config.save_every == 0:
                trainer.save_checkpoint(checkpoints)
            if trainer.should_stop and not is_last:
                logger.info(f"saved at step {state.step}, stopping (give the same command again to go on)")
                return False
    return True


def _choose_precision(trainer: Trainer) -> None:
    """Measure which precision is faster, if the run has not decided yet; the first rank measures for all."""
    if trainer.state.bf16 is None:
        distributed = trainer.distributed
        trainer.state.bf16 = distributed.any_rank(distributed.is_main and bf16_is_faster(distributed.device))


def _check_finite(trainer: Trainer, logger: TrainingLogger, metrics: dict[str, float]) -> None:
    state, limit = trainer.state, trainer.config.max_nonfinite_steps
    if state.consecutive_skips:
        logger.log_skipped_step(state.step, metrics["loss"], metrics["grad_norm"])
    if state.consecutive_skips >= limit:
        raise DivergedError(
            f"loss or gradient was not finite for {limit} steps in a row, up to step {state.step};"
            " lower the learning rate or look at the data of these steps"
        )


def _evaluate_average(trainer: Trainer, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
    with trainer.ema.swapped_in(trainer.model):
        trainer.model.eval()
        metrics = evaluate()
        trainer.model.train()
    return metrics


@contextmanager
def _catch_stop_signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and SIGINT request a stop, so that the step can be finished and saved; a second one takes effect
    at once.

    But not on one of many ranks: where every process is signalled, torchrun forwards to a rank what it has
    received already, and it kills the ranks that do not exit in time.
    """
    single = trainer.distributed.world_size == 1
    previous: dict[int, Any] = {}

    def request_stop(number: int, _frame: Any) -> None:
        trainer.stop_requested = True
        if single:
            signal.signal(number, previous[number])

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous[number] = signal.signal(number, request_stop)
    except ValueError:  # not in the main thread, which alone receives signals
        pass
    try:
        yield
    finally:
        if single or not trainer.stop_requested:
            for caught, handler in previous.items():
                signal.signal(caught, handler)


@contextmanager
def _explain_out_of_memory(trainer: Trainer, checkpoints: CheckpointStore) -> Iterator[None]:
    """Memory that runs out gives one sentence: what to change, and where the run will go on."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        step, _ = checkpoints.latest()
        largest = max(rows for _, rows in trainer.microbatch_splits)
        saved = "there is no checkpoint yet" if step is None else f"the checkpoint {checkpoints.path(step)} is intact"
        raise OutOfMemoryError(
            f"memory ran out after step {trainer.state.step}: {oom_advice(largest)}; {saved}"
        ) from error
