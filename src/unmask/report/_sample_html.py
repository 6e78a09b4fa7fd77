"""The section of samples, each token coloured by the step that unmasked it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from unmask.report._samples import RevealedSample, RevealedToken

_NUM_SHADES = 24
_COLORMAP_RANGE = (0.12, 0.97)
"""The part of the colour map that is used: its darkest end is hard to see on a dark page."""


def _palette() -> list[str]:
    """Colours from the first step to the last, perceptually uniform (viridis)."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    low, high = _COLORMAP_RANGE
    return [
        to_hex(colormaps["viridis"](low + (high - low) * shade / (_NUM_SHADES - 1))) for shade in range(_NUM_SHADES)
    ]


def palette_css() -> str:
    """A CSS class for each colour, with black or white text, whichever has more contrast."""
    shades = _palette()
    rules = [
        f".k{shade} {{ background: {color}; color: {'#000' if _luminance(color) > 0.18 else '#fff'}; }}"
        for shade, color in enumerate(shades)
    ]
    return "\n".join([*rules, f".legend i {{ background: linear-gradient(90deg, {', '.join(shades)}); }}"])


def samples_section(samples: Sequence[RevealedSample], sampler: str) -> str:
    """The samples, with a slider over the steps that is shown if scripts run."""
    last = max((sample.steps for sample in samples), default=0)
    texts = "".join(map(_sample_html, samples))
    return f"""<section aria-labelledby="samples"><h2 id="samples">Samples</h2>
<p class="note">Generated with {escape(sampler)}. A step is a network call; the colour of a token shows the step
that set its final value.</p>
<div class="legend"><span>first step</span><i></i><span>last step</span></div>
<div class="scrubber" hidden><button type="button">Play</button>
<input type="range" min="0" max="{last}" value="{last}" aria-label="step of the sampler">
<output>step {last} of {last}</output></div>
{texts}</section>"""


def _sample_html(sample: RevealedSample) -> str:
    tokens = "".join(_token_html(token, sample.steps) for token in sample.tokens)
    caption = f"Seed {sample.seed}: {len(sample.tokens):,} tokens in {sample.steps:,} steps."
    return f'<figure class="sample"><pre class="text">{tokens}</pre><figcaption>{caption}</figcaption></figure>'


def _token_html(token: RevealedToken, last: int) -> str:
    if token.step <= 0:
        return f'<span class="given">{escape(token.text)}</span>'
    shade = round((_NUM_SHADES - 1) * (token.step - 1) / max(1, last - 1))
    earlier = f' data-earlier="{escape(json.dumps(token.earlier))}"' if token.earlier else ""
    return f'<span class="k{shade}" data-step="{token.step}"{earlier}>{escape(token.text)}</span>'


def _luminance(color: str) -> float:
    """Relative luminance as WCAG defines it; at 0.18 black and white contrast alike."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
