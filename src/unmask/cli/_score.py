"""`unmask score`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unmask.cli._arguments import (
    AllowCodeFlag,
    BothStrandsFlag,
    InlineLoadOptions,
    JsonFlag,
    LoadOptions,
    ModelPath,
    ResultsPath,
    TextArgs,
    load_distributed,
    model_fingerprint,
    read_stdin,
    validate_output,
    warn_if_imprecise,
    warn_literal_masks,
    write_results,
)

if TYPE_CHECKING:
    from unmask.likelihood.score import Score

_MAX_SHOWN_CHARS = 200


def score(
    model: ModelPath,
    texts: TextArgs = (),
    prompt: str = "",
    requests: Path | None = None,
    draws: int = 64,
    precision: float | None = None,
    seed: int = 0,
    both_strands: BothStrandsFlag = False,
    weights: InlineLoadOptions = LoadOptions(),  # noqa: B008
    out: ResultsPath = None,
    as_json: JsonFlag = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Score texts: nats per token and perplexity, with standard errors.

    For example:
      unmask score runs/demo/model "def main():" "main def:()" --draws 256
      unmask score runs/demo/model "for i in range(10):" --precision 0.02
      unmask score runs/demo/model " print(i)" " return i" --prompt "for i in range(10):"
      unmask score runs/demo/model --requests questions.jsonl --json
      unmask score runs/demo/model - < my_text.txt

    Args:
        model: A model folder, of unmask or in a published format, or a name on the hub.
        texts: One or more texts; - reads one from standard input. A text longer than the model's maximum length is
            scored in windows.
        prompt: Score each text given this prompt before it. The prompt is not counted, and is encoded by itself:
            a space between it and the text belongs to the text.
        requests: Also score the rows of a table (.jsonl, .csv, .parquet) with the columns prompt and text, or only
            text.
        draws: Random maskings of each text; more give a smaller error.
        precision: Draw until the standard error is this fraction of the nats, 0.01 for 1 %.
        seed: The seed of the maskings.
    """
    validate_output(out)
    pairs = [(prompt, read_stdin() if text == "-" else text) for text in texts]
    if requests is not None:
        pairs += _read_requests(requests)
    if not pairs:
        raise ValueError("there is nothing to score: give texts, or a table with --requests")
    prompts, read = map(list, zip(*pairs, strict=True))
    warn_literal_masks("a text that is scored", read)
    with load_distributed(model, allow_code, both_strands, weights) as (lm, is_main):
        result = lm.score(read, prompts, draws=draws, precision=precision, seed=seed)
        longest = lm.denoiser.max_length
        digest = model_fingerprint(model)
    if not is_main:
        return
    shown = [*texts, *read[len(texts) :]]  # a text from standard input is shown as -
    for text, each in zip(shown, result.per_text, strict=True):
        warn_if_imprecise(_abbreviate(text), each.standard_error / each.nats_per_token, precision)
    rows = [
        {"text": text, "prompt": before, "windows": _num_windows(each, longest), **each.to_dict()}
        for text, before, each in zip(shown, prompts, result.per_text, strict=True)
    ]
    if not write_results({"scores": rows}, seed, {}, digest, out, as_json):
        for text, each in zip(shown, result.per_text, strict=True):
            print(_describe(text, each, longest))


def _read_requests(path: Path) -> list[tuple[str, str]]:
    """The prompt and text of each row of a table."""
    from unmask.data.readers import validate_text
    from unmask.data.readers.files import format_suffix, open_file
    from unmask.data.readers.tables import table_readers

    readers, (suffix, _) = table_readers(), format_suffix(path)
    if suffix not in readers:
        raise ValueError(f"{path} must be a table, as in requests.jsonl; the formats are {', '.join(readers)}")
    pairs = []
    with open_file(path) as file:
        for where, columns, values in readers[suffix](file, str(path), [("prompt", "text"), ("text",)]):
            row = {name: validate_text(value, where, name) for name, value in zip(columns, values, strict=True)}
            pairs.append((row.get("prompt", ""), row["text"]))
    return pairs


def _describe(text: str, score: Score, max_length: int | None) -> str:
    bits = "" if score.text_stats is None else f"{score.bits_per_byte:.3f} bits/byte  "
    count = _num_windows(score, max_length)
    return (
        f"{score.nats_per_token:.3f} ± {score.standard_error:.3f} nats/token"
        f"  perplexity {score.perplexity:.2f}  {bits}{_abbreviate(text)}"
        + (f"  (in {count} windows of {max_length} tokens)" if count > 1 else "")
    )


def _num_windows(score: Score, max_length: int | None) -> int:
    return 1 if max_length is None else -(-score.tokens // max_length)


def _abbreviate(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[: _MAX_SHOWN_CHARS - 3]}..."
