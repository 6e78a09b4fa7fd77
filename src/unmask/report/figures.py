"""Which figures a report has, and what each shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from unmask.report.contents import Contents
from unmask.report.drawing import (
    INK,
    POINTS,
    SERIES,
    SMALL,
    Drawing,
    doubling,
    drawing,
    gaps,
    plain_logarithmic,
)
from unmask.report.history import Curves, Judged
from unmask.report.measures import Bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, RED = SERIES[0], SERIES[1], SERIES[4]


def draw_all(contents: Contents) -> dict[str, Drawing]:
    """Every figure for which there are numbers, by name."""
    curves, held_out = contents.curves, contents.held_out or {}
    drawings: list[Drawing] = []
    if curves.step or curves.evaluated_step:
        drawings.append(_loss(curves, contents.curriculum_ends))
    if curves.step:
        drawings += _training(curves)
    if held_out.get("by_time"):
        drawings.append(_by_time(held_out["by_time"], held_out["by_time_error"]))
    if contents.step_bounds:
        drawings.append(_step_bounds(contents.step_bounds))
    if contents.judged:
        drawings += _judged(contents.judged)
    return {each.name: each for each in drawings}


def _loss(curves: Curves, curriculum_ends: int | None) -> Drawing:
    def draw(axes: Axes) -> None:
        if curves.step:
            axes.plot(curves.step, gaps(curves.loss), color=BLUE, alpha=0.4, linewidth=1)
            axes.plot(curves.step, gaps(curves.smoothed()), color=BLUE, label="training")
        if curves.evaluated_step:
            nats, errors = curves.evaluated_nats, curves.evaluated_error
            axes.errorbar(curves.evaluated_step, nats, errors, color=ORANGE, label="held out", **POINTS)
        for number, step in enumerate(curves.bad_steps):
            label = None if number else "step skipped"
            axes.axvline(step, color=RED, alpha=0.6, linewidth=0.8, label=label)
        axes.set(xlabel="step", ylabel="nats per token")
        axes.legend()

    smooth = [value for value in curves.smoothed() if value is not None]
    return drawing(
        "loss",
        "Loss: each logged step (faint) and its running mean; held-out text with standard errors."
        + (
            f" Up to step {curriculum_ends:,} a curriculum hides other shares of text than the bound does."
            if curriculum_ends
            else ""
        ),
        "Training loss and held-out nats per token against the step."
        + (f" The running mean ends at {smooth[-1]:.3f} nats." if smooth else ""),
        draw,
        ("step", "held-out nats per token", "standard error"),
        list(zip(curves.evaluated_step, curves.evaluated_nats, curves.evaluated_error, strict=True)),
    )


def _training(curves: Curves) -> list[Drawing]:
    """The three things to look at when a loss curve looks wrong."""
    panels = (
        ("learning-rate", "Learning rate, as a factor of its peak", "factor", curves.learning_rate),
        ("gradient", "Norm of the gradient, before clipping", "gradient norm", curves.gradient),
        ("speed", "Speed between the lines of the log", "tokens per second", curves.tokens_per_second),
    )

    def draw(axes: Axes, label: str, values: Sequence[float | None], color: str) -> None:
        axes.plot(curves.step, gaps(values), color=color)
        axes.set(xlabel="step", ylabel=label)
        axes.set_ylim(bottom=0)

    return [
        drawing(
            name,
            f"{caption}.",
            f"{caption}, against the step.",
            partial(draw, label=label, values=values, color=color),
            size=SMALL,
        )
        for (name, caption, label, values), color in zip(panels, SERIES[2:5], strict=True)
    ]


def _by_time(nats: Sequence[float], errors: Sequence[float]) -> Drawing:
    cells = len(nats)
    middles = [(cell + 0.5) / cells for cell in range(cells)]

    def draw(axes: Axes) -> None:
        axes.bar(middles, nats, width=0.84 / cells, color=BLUE)
        axes.errorbar(middles, nats, errors, fmt="none", ecolor=INK, elinewidth=1, alpha=0.65)
        axes.set(xlabel="t, from all visible (0) to all masked (1)", ylabel="nats per token", xlim=(0, 1))
        axes.grid(visible=False, axis="x")

    top = max(range(cells), key=lambda cell: nats[cell])
    edges = [f"{cell / cells:.2f} to {(cell + 1) / cells:.2f}" for cell in range(cells)]
    return drawing(
        "by-time",
        f"What each part of the time contributes; the bars sum to the bound, {sum(nats):.3f} nats per token.",
        f"Bars over t from 0 to 1; the highest, {nats[top]:.3f} nats, is at t = {edges[top]}.",
        draw,
        ("t", "nats per token", "standard error"),
        list(zip(edges, nats, errors, strict=True)),
    )


def _step_bounds(bounds: Sequence[Bound]) -> Drawing:
    finite = [bound for bound in bounds if bound.steps is not None]
    limit = next((bound for bound in bounds if bound.steps is None), None)

    def draw(axes: Axes) -> None:
        steps = [float(bound.steps or 0) for bound in finite]
        values, errors = [b.perplexity for b in finite], [b.perplexity_error for b in finite]
        axes.errorbar(steps, values, errors, color=BLUE, label="T steps", **POINTS)
        if limit is not None:
            low, high = (limit.perplexity + sign * limit.perplexity_error for sign in (-1, 1))
            axes.axhline(limit.perplexity, color=ORANGE, linestyle="--", label="continuous time")
            axes.axhspan(low, high, color=ORANGE, alpha=0.16, linewidth=0)
        axes.set(xlabel="steps T", ylabel="perplexity (bound)")
        doubling(axes, steps)
        plain_logarithmic(axes)
        axes.legend()

    first, last = finite[0], finite[-1]
    return drawing(
        "steps",
        "The bound on held-out perplexity of a T-step sampler, all on the same text.",
        f"The bound is {first.perplexity:.2f} with {first.steps} step and {last.perplexity:.2f} with"
        f" {last.steps}" + (f"; in continuous time {limit.perplexity:.2f}." if limit is not None else "."),
        draw,
        ("T", "perplexity", "standard error"),
        [("continuous" if b.steps is None else b.steps, b.perplexity, b.perplexity_error) for b in bounds],
    )


Point = tuple[str, float, float, float | None]
"""A sampler's name, x, y and the error of y."""


def _judged(judged: Sequence[Judged]) -> list[Drawing]:
    """Three views of the same samples; the first has the numbers of all."""
    quality = [(j.sampler, j.steps, j.perplexity, j.perplexity_error) for j in judged]
    entropy = [(j.sampler, j.steps, j.entropy, j.entropy_error) for j in judged]
    cost = [(j.sampler, j.seconds, j.perplexity, j.perplexity_error) for j in judged if j.seconds > 0]
    names = ", ".join(dict.fromkeys(j.judge for j in judged if j.judge)) or "another model"
    columns = ("sampler", "steps", "perplexity", "error", "entropy", "error", "seconds")
    table = [
        (j.sampler, j.steps, j.perplexity, j.perplexity_error, j.entropy, j.entropy_error, j.seconds)
        for j in judged
    ]
    views: list[tuple[str, str, str, str, list[Point]]] = [
        ("judge-perplexity", f"Perplexity of samples, as {names} judges it.", "steps", "perplexity", quality),
        (
            "judge-entropy",
            "Entropy of the samples' tokens; low perplexity with low entropy is repetition.",
            "steps",
            "entropy (nats)",
            entropy,
        ),
        ("judge-seconds", "The same perplexity against the time it took.", "seconds", "perplexity", cost),
    ]
    found = [
        drawing(name, caption, f"{y} against {x}, a line for each sampler.", partial(_compare, x, y, points))
        for name, caption, x, y, points in views
        if points
    ]
    return [replace(found[0], columns=columns, table=tuple(table)), *found[1:]]


def _compare(x: str, y: str, points: Sequence[Point], axes: Axes) -> None:
    """A line for each sampler."""
    for number, name in enumerate(dict.fromkeys(point[0] for point in points)):
        own = sorted((point for point in points if point[0] == name), key=lambda point: point[1])
        xs, ys, errors = zip(*[(at, value, error or 0.0) for _, at, value, error in own], strict=True)
        axes.errorbar(xs, ys, errors, color=SERIES[number % len(SERIES)], label=name, **POINTS)
    axes.set(xlabel=x, ylabel=y)
    doubling(axes, [point[1] for point in points])
    axes.legend()
