"""`unmask eval --tasks`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unmask.cli._arguments import LoadOptions, load_distributed, load_model, model_fingerprint, write_results
from unmask.cli._signature import Option
from unmask.report.formatting import MISSING_VALUE, format_estimate, print_table

if TYPE_CHECKING:
    from unmask.evaluation.harness import TaskFigure, TaskResults


@dataclass(frozen=True)
class TaskOptions:
    """The options of tasks."""

    tasks: tuple[str, ...] = ()
    """Evaluate on tasks, groups or tags of lm-evaluation-harness instead of texts, as in arc_easy,hellaswag; or on the
    .yaml file of a task. `lm_eval ls tasks` lists them."""
    limit: int | None = None
    """For --tasks: only the first N documents of each."""
    num_fewshot: int | None = None
    """For --tasks: examples before each question; the task's own number by default."""
    include_path: Path | None = None
    """For --tasks: a folder with tasks of your own; its Python code is run if a task names it."""
    apply_chat_template: bool = False
    """For --tasks: ask in the chat format of the model."""
    confirm_run_unsafe_code: bool = False
    """For --tasks: run tasks that execute the code that a model writes."""
    draws: int = 128
    """For --tasks: random maskings of each likelihood."""
    greedy: bool = False
    """For --tasks: decode one token at a time to tell whether a target is greedy, instead of in one network call."""
    sampler: Annotated[str, Option(completions="unmask.sampling:SAMPLERS")] = "default"
    """For --tasks that generate: the sampler; by default that of the model's family, in order of confidence."""
    steps: int | None = None
    """For --tasks that generate: denoising steps, of each block where there are blocks; one token each by default."""
    block_size: int | None = None
    """For --tasks that generate: write in blocks of this many tokens, from left to right."""
    temperature: float | None = None
    """For --tasks that generate: instead of the task's own, which is mostly 0."""
    max_gen_toks: int = 256
    """For --tasks that generate: tokens of an answer, where the task does not say."""
    batch_size: int = 16
    """For --tasks that generate: answers that are written together."""

    def __post_init__(self) -> None:
        if self.tasks:
            return
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ValueError(f"--{field.name.replace('_', '-')} is for tasks: name some with --tasks")


def evaluate_tasks(
    model: Path,
    options: TaskOptions,
    seed: int,
    both_strands: bool,
    weights: LoadOptions,
    out: Path | None,
    as_json: bool,
    allow_code: bool,
) -> None:
    """Evaluate on tasks, and print or write the figures."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars are for terminals; read when the library is imported
    from unmask.io.errors import import_optional
    from unmask.pretrained import resolve_model_folder

    import_optional("lm_eval", "harness")
    from unmask.evaluation import harness

    config = harness.TaskConfig(
        options.tasks,
        options.limit,
        options.num_fewshot,
        options.include_path,
        options.apply_chat_template,
        options.confirm_run_unsafe_code,
        seed,
    )
    if not resolve_model_folder(model).exists():
        load_model(model)  # which says what is wrong with it, before thousands of tasks are looked at
    loaded = harness.load_tasks(config)
    with load_distributed(model, allow_code, both_strands, weights) as (lm, is_main):
        asked = harness.HarnessModel(
            lm,
            folder=model,
            mc_num=options.draws,
            greedy=options.greedy,
            seed=seed,
            batch_size=options.batch_size,
            sampler=options.sampler,
            steps=options.steps,
            block_size=options.block_size,
            temperature=options.temperature,
            max_gen_toks=options.max_gen_toks,
        )
        results = harness.evaluate_tasks(asked, loaded)
        digest = model_fingerprint(model)
    if is_main and not write_results(asdict(results), seed, {}, digest, out, as_json):
        _print_results(results)


def _print_results(results: TaskResults) -> None:
    header = ("task", "shots", "metric", "value", "Monte-Carlo error", "documents", "tokens/call", "definition")
    print_table(header, [_line(figure) for figure in results.figures])
    print(
        "value ± standard error over documents; the Monte-Carlo error is that of drawing maskings",
        *_footer(results),
        sep="\n",
    )


def _line(figure: TaskFigure) -> Sequence[str]:
    return (
        figure.task,
        MISSING_VALUE if figure.num_fewshot is None else str(figure.num_fewshot),
        figure.metric if figure.filter == "none" else f"{figure.metric} ({figure.filter})",
        format_estimate(figure.value, figure.standard_error),
        MISSING_VALUE if figure.monte_carlo_error is None else f"{figure.monte_carlo_error:.2g}",
        f"{figure.documents:,}",
        MISSING_VALUE if figure.tokens_per_call is None else f"{figure.tokens_per_call:.2f}",
        figure.definition,
    )


def _footer(results: TaskResults) -> list[str]:
    lines = [f"{each.name}: {each.sentence}" for each in results.definitions]
    if results.truncated:
        lines.append(f"{results.truncated:,} contexts were too long for the model and lost their beginning")
    return lines
