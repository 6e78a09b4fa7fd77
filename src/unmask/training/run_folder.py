"""The folder of a run: whose it is, what it says of itself, where it goes on, how a refused run leaves it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unmask.data.corpus import Corpus
from unmask.distributed import Distributed
from unmask.io.atomic import atomic_file
from unmask.io.locks import folder_lock
from unmask.io.untrusted import read_json_object
from unmask.training import checkpoint
from unmask.training.trainer import Trainer

EXPERIMENT_FILE, MODEL_CONFIG_FILE, _METRICS_FILE = "experiment.json", "model_config.json", "metrics.jsonl"
"""What is carried out; the config of the network that is trained; the figures."""
CORPUS_FOLDER, TOKENIZER_FILE, MODEL_FOLDER = "corpus", "tokenizer.json", "model"


@contextmanager
def claim_run_folder(folder: Path, distributed: Distributed) -> Iterator[None]:
    """The folder is this run's alone, for as long as its first rank lives.

    It is left as it was if the run is refused before it has stated what it is: nothing is claimed then.
    """
    if not distributed.is_main:
        yield
        return
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    before = set(os.listdir(folder))
    try:
        with folder_lock(folder):
            try:
                yield
            except (ValueError, OSError):
                if not (folder / EXPERIMENT_FILE).exists():
                    _remove_entries(
                        folder / name
                        for name in (CORPUS_FOLDER, TOKENIZER_FILE, MODEL_CONFIG_FILE)
                        if name not in before
                    )
                raise
    finally:
        with suppress(OSError):  # those that are not empty
            for each in made:
                each.rmdir()


def read_experiment_json(folder: Path) -> dict[str, Any] | None:
    """What the folder says is carried out in it; None if nothing was yet."""
    path = folder / EXPERIMENT_FILE
    if not path.exists():
        return None
    found = read_json_object(path)
    if not isinstance(found.get("corpus"), str):
        raise ValueError(f"{path} is not what a run writes there: it does not say which corpus was used")
    return found


def write_json(folder: Path, name: str, data: Any) -> None:
    """Write JSON: all of it or nothing."""
    with atomic_file(folder / name) as fresh:
        fresh.write_text(json.dumps(data, indent=2), encoding="utf-8")


def raise_if_changed(folder: Path, changes: list[str]) -> None:
    """Say what has changed since the folder was claimed, if anything has."""
    if changes:
        raise ValueError(
            f"{folder} belongs to another experiment: {'; '.join(changes[:5])}."
            " Take another folder, or go back to what it was"
        )


def diff_settings(old: Any, new: Any, where: str = "") -> list[str]:
    """What differs between two statements; the same path may be spelled in many ways."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [d for key in keys for d in diff_settings(old.get(key), new.get(key), f"{where}.{key}".strip("."))]
    return [] if _normalize_path(old) == _normalize_path(new) else [f"{where} was {old!r} and is now {new!r}"]


def open_run_corpus(folder: Path) -> Corpus:
    """The corpus of a run that has begun; if it is damaged, a sentence that says what to do."""
    try:
        return Corpus.open(folder)
    except ValueError as error:
        remedy = f"delete {folder} and give the same command again, which makes it anew"
        raise ValueError(f"{str(error).removesuffix('; prepare it again')}; {remedy}") from None


def resume_latest(trainer: Trainer, folder: Path, restart: bool) -> list[str]:
    """Go on from the newest whole checkpoint, if there is any; what people should know of it."""
    news, step = list[str](), -1
    if trainer.distributed.is_main:
        if restart and (aside := checkpoint.set_aside(folder, _METRICS_FILE)) is not None:
            news.append(f"starting anew; what was there is in {aside}")
        path, damaged = checkpoint.latest(folder)
        if path is None and damaged:
            raise ValueError(
                f"{folder} has no checkpoint that is whole: {'; '.join(damaged)}. Bring one back, or give"
                " --restart to begin at step 1 again, which keeps what is there beside"
            )
        news += [f"{problem}; an older checkpoint is used" for problem in damaged]
        checkpoint.remove_leftovers(folder)
        if path is not None:
            step = checkpoint.checkpoint_step(path)
        elif (aside := checkpoint.set_aside(folder, _METRICS_FILE)) is not None:
            news.append(f"there is no checkpoint yet, so this begins at step 1; the old metrics are in {aside}")
    step = int(trainer.distributed.all_reduce_max(step))
    if step >= 0:
        trainer.load_checkpoint(checkpoint.checkpoint_path(folder, step))
        news.append(f"resumed from step {step}")
    return news


def _normalize_path(value: Any) -> Any:
    """The same for all spellings of a path, and different for different words."""
    if isinstance(value, list):
        return [_normalize_path(each) for each in value]
    return os.path.realpath(value) if isinstance(value, str) and "\0" not in value else value


def _remove_entries(entries: Iterator[Path]) -> None:
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
