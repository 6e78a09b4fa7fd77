"""`unmask score`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.cli._arguments import (
    AllowCodeFlag,
    BothStrandsFlag,
    FileOptions,
    InlineFileOptions,
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
    from unmask.batches import RequestFile
    from unmask.likelihood.requests import ScoreConfig
    from unmask.model import LanguageModel

_MAX_SHOWN_CHARS = 200


def score(
    model: ModelPath,
    texts: TextArgs = (),
    prompt: str = "",
    top: int | None = None,
    files: InlineFileOptions = FileOptions(),  # noqa: B008
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
      unmask score runs/demo/model " print(i)" " return i" --prompt "for i in range(10):" --top 2
      unmask score runs/demo/model --input questions.jsonl --output scores.jsonl --top 3
      unmask score runs/demo/model - < my_text.txt

    A line of --input is {"text": " 4", "prompt": "2 + 2 ="}, with draws or a seed of its own if it has any. Line i
    without a seed has seed + i - 1, and the same score as alone with that seed.

    Args:
        model: A model folder, of unmask or in a published format, or a name on the hub.
        texts: One or more texts; - reads one from standard input. A text longer than the model's maximum length is
            scored in windows.
        prompt: Score each text given this prompt before it. The prompt is not counted, and is encoded by itself:
            a space between it and the text belongs to the text.
        top: Show this many of the most surprising texts, the most nats per token first, and as many of the tokens of
            each. The answers to --input then have a rank, and the nats of these tokens.
        draws: Random maskings of each text; more give a smaller error.
        precision: Draw until the standard error is this fraction of the nats, 0.01 for 1 %.
        seed: The seed of the maskings.
    """
    if top is not None and top < 1:
        raise ValueError(f"--top must be at least 1; got {top}")
    if files.input is not None:
        files.refuse_others(TEXTS=texts, json=as_json, out=out)
        config = _make_config(draws, precision, seed)
        _score_file(model, files, prompt, top, config, both_strands, weights, allow_code)
        return
    files.refuse_unused()
    validate_output(out)
    if not texts:
        raise ValueError("there is nothing to score: give texts, or a file of requests with --input")
    read = [read_stdin() if text == "-" else text for text in texts]
    warn_literal_masks("a text that is scored", read)
    with load_distributed(model, allow_code, both_strands, weights) as (lm, is_main):
        result = lm.score(read, [prompt] * len(read), draws=draws, precision=precision, seed=seed, per_token=bool(top))
        longest, digest = lm.denoiser.max_length, model_fingerprint(model)
    if not is_main:
        return
    rows = []  # a text from standard input is shown as -
    for text, given, each in zip(texts, read, result.per_text, strict=True):
        warn_if_imprecise(_abbreviate(text), each.standard_error / each.nats_per_token, precision)
        tokens = {"top_tokens": top_tokens(lm, lm.encode(given), each.token_nats, top)} if top else {}
        windows = _num_windows(each.tokens, longest)
        rows.append({"text": text, "prompt": prompt, "windows": windows, **each.to_dict(), **tokens})
    if top:
        rank_answers(rows)
    if not write_results({"scores": rows}, seed, {}, digest, out, as_json):
        for row in _most_surprising(rows, top):
            print(_describe(row, longest))


def _make_config(draws: int, precision: float | None, seed: int) -> ScoreConfig:
    from unmask.likelihood.requests import ScoreConfig

    return ScoreConfig(draws, precision, seed)


def _score_file(
    model: Path,
    files: FileOptions,
    prompt: str,
    top: int | None,
    config: ScoreConfig,
    both_strands: bool,
    weights: LoadOptions,
    allow_code: bool,
) -> None:
    """Score the requests of a file, and print the most surprising ones."""
    from unmask.cli._batches import FileCommand
    from unmask.cli._requests import ScoreTask

    def rank(requests: RequestFile, answers: list[dict[str, Any]]) -> None:
        good = [answer for answer in answers if "error" not in answer]
        if top is None:
            return
        rank_answers(good)
        if str(files.output) != "-":
            texts = {line.number: line.fields.get("text") for line in requests.lines}
            for answer in _most_surprising(good, top):
                print(f"line {answer['line']}: {_describe({**answer, 'text': texts[answer['line']]}, None)}")

    settings = {"command": "score", "prompt": prompt, "top": top, **vars(config), "both_strands": both_strands}
    settings |= vars(weights)
    FileCommand(
        model,
        files,
        settings,
        config.seed,
        lambda lm: ScoreTask(lm, config, prompt, top),
        lambda _lm, _chosen: weights.dtype,
        rank,
        allow_code,
        both_strands,
        weights,
    ).run()


def rank_answers(rows: Sequence[dict[str, Any]]) -> None:
    """Give each its rank: 1 for the most nats per token; of equal ones, the first comes first."""
    for number, row in enumerate(sorted(rows, key=lambda row: -row["nats_per_token"]), start=1):
        row["rank"] = number


def _most_surprising(rows: Sequence[dict[str, Any]], top: int | None) -> list[dict[str, Any]]:
    """The first `top` by rank; all in their order if there is no `top`."""
    return list(rows) if top is None else sorted(rows, key=lambda row: int(row["rank"]))[:top]


def top_tokens(lm: LanguageModel, ids: Sequence[int], nats: Sequence[float], count: int) -> list[dict[str, Any]]:
    """The tokens of the most nats, the most surprising first."""
    from unmask.data.tokenizers import token_texts

    texts = [str(token) for token in ids] if lm.tokenizer is None else token_texts(lm.tokenizer.decode, ids)
    order = sorted(range(len(ids)), key=lambda position: (-nats[position], position))[:count]
    return [
        {"position": position, "id": ids[position], "text": texts[position], "nats": nats[position]}
        for position in order
    ]


def _describe(row: Mapping[str, Any], max_length: int | None) -> str:
    """A line for a text, and one for each of its most surprising tokens."""
    bits = f"{row['bits_per_byte']:.3f} bits/byte  " if "bits_per_byte" in row else ""
    count = _num_windows(row["tokens"], max_length)
    tokens = [f"\n  {token['nats']:7.3f} nats  {token['text']!r}" for token in row.get("top_tokens", ())]
    return (
        f"{row['nats_per_token']:.3f} ± {row['standard_error']:.3f} nats/token"
        f"  perplexity {row['perplexity']:.2f}  {bits}{_abbreviate(row['text'])}"
        + (f"  (in {count} windows of {max_length} tokens)" if count > 1 else "")
        + "".join(tokens)
    )


def _num_windows(tokens: int, max_length: int | None) -> int:
    return 1 if max_length is None else -(-tokens // max_length)


def _abbreviate(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[: _MAX_SHOWN_CHARS - 3]}..."
