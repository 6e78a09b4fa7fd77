"""The command line: parse, build, call. torch is imported inside the commands, so that help comes at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from unmask.model import LanguageModel, Samples
    from unmask.sampling import AnySampler

Model = Annotated[Path, tyro.conf.Positional]
Text = Annotated[str, tyro.conf.Positional]
Texts = Annotated[tuple[str, ...], tyro.conf.Positional]
Json = Annotated[bool, tyro.conf.arg(name="json", help="Print one JSON object instead of text.")]


@dataclass(frozen=True)
class Writing:
    """How tokens are written."""

    n: int = 1
    """How many texts."""
    steps: int = 128
    """Steps of the sampler; more are better and slower."""
    temperature: float = 1.0
    """0 takes the most probable token, 1 samples the model as it is."""
    top_k: int | None = None
    """Sample from the k most probable tokens only."""
    top_p: float | None = None
    """Sample from the most probable tokens that together reach p only."""
    seed: int = 0
    """Row i is drawn with seed + i."""

    def sampler(self, lm: LanguageModel) -> AnySampler:
        """The plain sampler of the model, with these settings."""
        from unmask.diffusion.categorical import Choice

        return lm.default_sampler(self.steps, Choice(self.temperature, self.top_k, self.top_p))


Written = Annotated[Writing, tyro.conf.arg(name="")]


def sample(
    model: Model,
    length: int | None = None,
    prompt: str = "",
    writing: Written = Writing(),  # noqa: B008
    as_json: Json = False,
) -> None:
    """Write texts from nothing, or from a prompt.

    Example: unmask sample runs/demo --n 4 --length 16 --steps 16

    Args:
        model: A model folder, of ours or in the published MDLM layout.
        length: How many tokens each; the model's longest if not given.
        prompt: What each text begins with.
    """
    lm = _load(model)
    start = prompt or ()
    _show(lm.sample(writing.n, length, prompt=start, sampler=writing.sampler(lm), seed=writing.seed), as_json)


def infill(
    model: Model,
    template: Text,
    writing: Written = Writing(),  # noqa: B008
    as_json: Json = False,
) -> None:
    """Fill the holes of a text.

    Example: unmask infill runs/demo "Flat is <mask:2> nested."

    Args:
        model: A model folder, of ours or in the published MDLM layout.
        template: Text with <mask:12> for twelve hidden tokens, <mask> for one; any number of holes.
    """
    lm = _load(model)
    _show(lm.infill(template, n=writing.n, sampler=writing.sampler(lm), seed=writing.seed), as_json)


def score(model: Model, texts: Texts, draws: int = 64, seed: int = 0, as_json: Json = False) -> None:
    """Say how many nats a model needs for texts, with the standard error.

    Example: unmask score runs/demo "Flat is better than nested." "nested than better is Flat."

    Args:
        model: A model folder, of ours or in the published MDLM layout.
        texts: One or more texts.
        draws: Random maskings of each text; more make the error smaller.
        seed: Of the maskings.
    """
    names = ("tokens", "nats_per_token", "standard_error", "perplexity", "bits_per_byte")
    result = _load(model).score(list(texts), draws=draws, seed=seed)
    if as_json:
        scores = [{name: getattr(each, name) for name in names} for each in result.each]
        _print_json({"scores": [{"text": t, **s} for t, s in zip(texts, scores, strict=True)]})
        return
    for each, text in zip(result.each, texts, strict=True):
        print(
            f"{each.nats_per_token:.3f} ± {each.standard_error:.3f} nats/token"
            f"  perplexity {each.perplexity:.2f}  {each.bits_per_byte:.3f} bits/byte  {text!r}"
        )


def main() -> None:
    """Exit with 0; 1 on an unforeseen failure; 2 on bad input, told in one sentence."""
    commands: dict[str, Callable[..., Any]] = {"sample": sample, "infill": infill, "score": score}
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="unmask", description="Masked diffusion language models."
        )
    except ValueError as error:
        print(f"unmask: {error}", file=sys.stderr)
        sys.exit(2)


def _load(folder: Path) -> LanguageModel:
    from unmask.release import load

    return load(folder)


def _show(samples: Samples, as_json: bool) -> None:
    tokens = samples.tokens.tolist()
    texts = None if samples.tokenizer is None else samples.texts
    if as_json:
        _print_json({"texts": texts, "tokens": tokens, "network_calls": samples.network_calls})
        return
    for row in texts or [" ".join(map(str, ids)) for ids in tokens]:
        print(row)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False))
