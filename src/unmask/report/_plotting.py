"""Plots in one style, as SVG for the page and as PNG files.

In the SVG, lines and text are `currentColor` on a transparent background, so that it follows the page's light or dark
colours. The PNG is dark on white. Series have mid-tones, which are visible on both.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Cell: TypeAlias = float | str | None

PALETTE = ("#3f86d4", "#d8731f", "#2b9a72", "#b765c0", "#c9544f", "#93862a", "#4a9db5", "#8a7bd0")
INK_COLOR = "#101418"
_LARGE_FIGSIZE, SMALL_FIGSIZE = (4.6, 2.9), (3.3, 2.2)
_MATPLOTLIB_STYLE: Any = {
    "axes.edgecolor": INK_COLOR,
    "axes.grid": True,
    "axes.labelcolor": INK_COLOR,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.alpha": 0.14,
    "grid.color": INK_COLOR,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.labelcolor": INK_COLOR,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "unmask",
    "text.color": INK_COLOR,
    "text.parse_math": False,  # a dollar in a sampler's name is a dollar
    "xtick.color": INK_COLOR,
    "ytick.color": INK_COLOR,
}
ERRORBAR_STYLE: dict[str, Any] = {"capsize": 2.5, "elinewidth": 1.2, "marker": "o", "markersize": 4}
_SVG_FONT = re.compile(r"font: ([\d.]+px) [^;\"]*")
_SVG_REFERENCE = re.compile(r'(\bid="|href="#|url\(#)')
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Plot:
    """A plot with its caption, a description of what it shows, and its data as a table."""

    name: str
    caption: str
    alt: str
    svg: str
    png: bytes
    columns: tuple[str, ...] = ()
    table: tuple[tuple[_Cell, ...], ...] = ()


def require_matplotlib() -> None:
    """Raise an error if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("a report needs the extra report: pip install 'unmask[report]'") from None


def render_plot(
    name: str,
    caption: str,
    alt: str,
    draw: Callable[[Axes], None],
    columns: tuple[str, ...] = (),
    table: Sequence[tuple[_Cell, ...]] = (),
    size: tuple[float, float] = _LARGE_FIGSIZE,
) -> Plot:
    """The plot that `draw` makes on the axes; `name` is also that of its PNG file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_MATPLOTLIB_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        draw(axes)
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=200, facecolor="white")
        figure.set_layout_engine("none")  # the layout is computed
        figure.savefig(svg, format="svg", transparent=True, metadata=_NO_METADATA)
    return Plot(name, caption, alt, _inline_svg(svg.getvalue(), name), png.getvalue(), columns, tuple(table))


def nan_gaps(values: Sequence[float | None]) -> list[float]:
    """Values for a line, which has a gap where there is none."""
    return [math.nan if value is None else value for value in values]


def log2_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic x axis with plain numbers at powers of two."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    stride = max(1, math.ceil((high - low) / 9))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([2.0**k for k in range(low, high + 1, stride)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def log_axis(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers, enough of them to be read off."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_locator(NullLocator())
    if high / low < 10:  # less than a decade: evenly spaced ticks are easier to read
        axes.yaxis.set_major_locator(MaxNLocator(6))
    else:
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _inline_svg(svg: str, name: str) -> str:
    """The SVG as part of a page: unique ids, the page's colours and fonts, no prologue."""
    svg = svg[svg.index("<svg") :]
    svg = _SVG_REFERENCE.sub(rf"\g<1>{name}-", svg)
    svg = _SVG_FONT.sub(r"font: \1 system-ui, sans-serif", svg)
    return svg.replace(INK_COLOR, "currentColor")
