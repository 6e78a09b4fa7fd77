"""`unmask push`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.cli._arguments import ModelPath, TextArg

if TYPE_CHECKING:
    from unmask.pretrained import EvalResult


def push(
    model: ModelPath,
    repo: TextArg,
    license: str | None = None,
    dataset: tuple[str, ...] = (),
    language: tuple[str, ...] = (),
    results: Path | None = None,
    public: bool = False,
    message: str = "Upload a model",
    dry_run: bool = False,
) -> None:
    """Upload a model folder to the hub, with its card.

    For example:
      unmask push runs/demo my-name/my-model --license mit --dry-run

    The card, config, weights and tokenizer are one commit; other files stay here. The token is that of `hf auth login`,
    or HF_TOKEN.

    Args:
        model: The folder of a model or of a finished run; `unmask export` writes it in other formats.
        repo: The repository, as OWNER/NAME; it is made if there is none.
        license: The model's license for its card, as hubs name it: apache-2.0, mit, cc-by-4.0.
        dataset: Names of the data sets that it was trained on, for its card.
        language: Codes of the languages that it generates, for its card: en, de.
        results: A file that `unmask eval --out` has written: its perplexities are added to the card.
        public: Make a new repository public; by default it is private. One that exists stays as it is.
        message: The message of the commit.
        dry_run: Print the files with their sizes, and the card, and upload nothing.
    """
    from unmask.pretrained import CardMetadata, check_repo_id, plan_push
    from unmask.pretrained import push as upload

    check_repo_id(repo)
    figures = () if results is None else _read_results(results)
    files = plan_push(model, CardMetadata(license, dataset, language, figures))
    if not dry_run:
        print(upload(files, repo, private=not public, message=message))
        return
    print(f"{repo}, {'public' if public else 'private'}:")
    for name, source in files.items():
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        print(f"  {name:28} {size:>14,} bytes")
    card = files["README.md"]
    assert isinstance(card, bytes)
    print(f"\n{card.decode()}", end="")


def _read_results(file: Path) -> tuple[EvalResult, ...]:
    """The perplexities of a file of results."""
    from unmask.io.untrusted import read_json_object
    from unmask.pretrained import EvalResult

    texts: Any = read_json_object(file).get("texts")
    try:
        results = tuple(
            EvalResult(
                str(text["name"]),
                "perplexity",
                float(text["perplexity"]),
                float(text["perplexity_error"]),
                "upper bound",
            )
            for text in texts
        )
    except (TypeError, KeyError, ValueError):
        results = ()
    if not results or not all(math.isfinite(result.value) for result in results):
        shown = json.dumps(texts)[:60]
        raise ValueError(f"{file} has no perplexities of texts, as `unmask eval --out` writes them; got {shown}")
    return results
