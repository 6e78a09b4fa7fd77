"""The plots of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from unmask.likelihood.step_bounds import StepBound
from unmask.report._measure import ReportData
from unmask.report._plotting import (
    ERRORBAR_STYLE,
    INK_COLOR,
    PALETTE,
    SMALL_FIGSIZE,
    Plot,
    log2_axis,
    log_axis,
    nan_gaps,
    render_plot,
)
from unmask.report._run_log import Curves, SampleEval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _RED = PALETTE[0], PALETTE[1], PALETTE[4]


def make_plots(data: ReportData) -> dict[str, Plot]:
    """Every plot for which there is data, by name."""
    curves, held_out = data.curves, data.validation or {}
    plots: list[Plot] = []
    if curves.step or curves.valid_step:
        plots.append(_loss_plot(data))
    if curves.step:
        plots += _training_plots(curves)
    if held_out.get("by_time"):
        plots.append(_time_plot(held_out["by_time"], held_out["by_time_error"]))
    if data.step_bounds:
        plots.append(_step_bounds_plot(data.step_bounds))
    if data.sample_evals:
        plots += _sample_eval_plots(data.sample_evals)
    return {plot.name: plot for plot in plots}


def _loss_plot(data: ReportData) -> Plot:
    curves, curriculum_end_step = data.curves, data.curriculum_end_step

    def draw(axes: Axes) -> None:
        if curves.step:
            axes.plot(curves.step, nan_gaps(curves.loss), color=_BLUE, alpha=0.4, linewidth=1)
            axes.plot(curves.step, nan_gaps(curves.smoothed()), color=_BLUE, label="training")
        if curves.valid_step:
            nats, errors = curves.valid_nats, curves.valid_error
            axes.errorbar(curves.valid_step, nats, errors, color=_ORANGE, label="held out", **ERRORBAR_STYLE)
        for number, step in enumerate(curves.skipped_steps):
            label = None if number else "step skipped"
            axes.axvline(step, color=_RED, alpha=0.6, linewidth=0.8, label=label)
        axes.set(xlabel="step", ylabel="nats per token")
        axes.legend()

    smooth = [value for value in curves.smoothed() if value is not None]
    return render_plot(
        "loss",
        "Loss: each logged step (faint) and its running mean; held-out text with standard errors."
        + (
            f" Up to step {curriculum_end_step:,} a curriculum masks other shares of the text than the bound does."
            if curriculum_end_step
            else ""
        )
        + data.loss_note,
        "Training loss and held-out nats per token against the step."
        + (f" The running mean ends at {smooth[-1]:.3f} nats." if smooth else ""),
        draw,
        ("step", "held-out nats per token", "standard error"),
        list(zip(curves.valid_step, curves.valid_nats, curves.valid_error, strict=True)),
    )


def _training_plots(curves: Curves) -> list[Plot]:
    """What to look at when the loss curve looks wrong."""
    panels = (
        ("lr_factor", "Learning rate, as a factor of its peak", "factor", curves.lr_factor),
        ("grad_norm", "Norm of the gradient, before clipping", "gradient norm", curves.grad_norm),
        ("throughput", "Speed between the lines of the log", "tokens per second", curves.tokens_per_second),
    )

    def draw(axes: Axes, label: str, values: Sequence[float | None], color: str) -> None:
        axes.plot(curves.step, nan_gaps(values), color=color)
        axes.set(xlabel="step", ylabel=label)
        axes.set_ylim(bottom=0)

    return [
        render_plot(
            name,
            f"{caption}.",
            f"{caption}, against the step.",
            partial(draw, label=label, values=values, color=color),
            size=SMALL_FIGSIZE,
        )
        for (name, caption, label, values), color in zip(panels, PALETTE[2:5], strict=True)
    ]


def _time_plot(nats: Sequence[float], errors: Sequence[float]) -> Plot:
    bins = len(nats)
    middles = [(bin_index + 0.5) / bins for bin_index in range(bins)]

    def draw(axes: Axes) -> None:
        axes.bar(middles, nats, width=0.84 / bins, color=_BLUE)
        axes.errorbar(middles, nats, errors, fmt="none", ecolor=INK_COLOR, elinewidth=1, alpha=0.65)
        axes.set(xlabel="t, from all visible (0) to all masked (1)", ylabel="nats per token", xlim=(0, 1))
        axes.grid(visible=False, axis="x")

    top = max(range(bins), key=lambda bin_index: nats[bin_index])
    edges = [f"{bin_index / bins:.2f} to {(bin_index + 1) / bins:.2f}" for bin_index in range(bins)]
    return render_plot(
        "by-time",
        f"Nats from each bin of the time; the bars sum to the bound, {sum(nats):.3f} nats per token.",
        f"Bars over t from 0 to 1; the highest, {nats[top]:.3f} nats, is at t = {edges[top]}.",
        draw,
        ("t", "nats per token", "standard error"),
        list(zip(edges, nats, errors, strict=True)),
    )


def _step_bounds_plot(bounds: Sequence[StepBound]) -> Plot:
    finite = [bound for bound in bounds if bound.steps is not None]
    limit = next((bound for bound in bounds if bound.steps is None), None)

    def draw(axes: Axes) -> None:
        steps = [float(bound.steps or 0) for bound in finite]
        values, errors = [b.perplexity for b in finite], [b.perplexity_error for b in finite]
        axes.errorbar(steps, values, errors, color=_BLUE, label="T steps", **ERRORBAR_STYLE)
        if limit is not None:
            low, high = (limit.perplexity + sign * limit.perplexity_error for sign in (-1, 1))
            axes.axhline(limit.perplexity, color=_ORANGE, linestyle="--", label="continuous time")
            axes.axhspan(low, high, color=_ORANGE, alpha=0.16, linewidth=0)
        axes.set(xlabel="steps T", ylabel="perplexity (bound)")
        log2_axis(axes, steps)
        log_axis(axes)
        axes.legend()

    first, last = finite[0], finite[-1]
    return render_plot(
        "steps",
        "The bound on held-out perplexity of a T-step sampler, all on the same text.",
        f"The bound is {first.perplexity:.2f} with {first.steps} step and {last.perplexity:.2f} with"
        f" {last.steps}" + (f"; in continuous time {limit.perplexity:.2f}." if limit is not None else "."),
        draw,
        ("T", "perplexity", "standard error"),
        [("continuous" if b.steps is None else b.steps, b.perplexity, b.perplexity_error) for b in bounds],
    )


_Point = tuple[str, float, float, float | None]
"""A sampler's name, x, y and the error of y."""


def _sample_eval_plots(evals: Sequence[SampleEval]) -> list[Plot]:
    """Three plots of the same samples; the first has the table of all numbers."""
    quality = [(e.sampler, e.steps, e.perplexity, e.perplexity_error) for e in evals]
    entropy = [(e.sampler, e.steps, e.entropy, e.entropy_error) for e in evals]
    cost = [(e.sampler, e.seconds, e.perplexity, e.perplexity_error) for e in evals if e.seconds > 0]
    names = ", ".join(dict.fromkeys(e.reference_model for e in evals if e.reference_model)) or "another model"
    columns = ("sampler", "steps", "perplexity", "error", "entropy", "error", "seconds")
    table = [
        (e.sampler, e.steps, e.perplexity, e.perplexity_error, e.entropy, e.entropy_error, e.seconds) for e in evals
    ]
    views: list[tuple[str, str, str, str, list[_Point]]] = [
        (
            "samples-perplexity",
            f"Perplexity of samples under {names}.",
            "steps",
            "perplexity",
            quality,
        ),
        (
            "samples-entropy",
            "Entropy of the samples' tokens; low perplexity with low entropy is repetition.",
            "steps",
            "entropy (nats)",
            entropy,
        ),
        ("samples-seconds", "The same perplexity against the time it took.", "seconds", "perplexity", cost),
    ]
    found = [
        render_plot(name, caption, f"{y} against {x}, a line for each sampler.", partial(_plot_samplers, x, y, points))
        for name, caption, x, y, points in views
        if points
    ]
    return [replace(found[0], columns=columns, table=tuple(table)), *found[1:]]


def _plot_samplers(x: str, y: str, points: Sequence[_Point], axes: Axes) -> None:
    """A line for each sampler."""
    for number, name in enumerate(dict.fromkeys(point[0] for point in points)):
        line = sorted((point for point in points if point[0] == name), key=lambda point: point[1])
        xs, ys, errors = zip(*[(at, value, error or 0.0) for _, at, value, error in line], strict=True)
        axes.errorbar(xs, ys, errors, color=PALETTE[number % len(PALETTE)], label=name, **ERRORBAR_STYLE)
    axes.set(xlabel=x, ylabel=y)
    log2_axis(axes, [point[1] for point in points])
    axes.legend()
