"""A model folder on the hub: its files in one commit, with what the card should say of license, data and results."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from unmask.io.errors import first_line
from unmask.io.hub import REPO_ID_PATTERN, hub_session
from unmask.pretrained._folder import CARD_FILE, CONFIG_FILE, MANIFEST_FILE, StoredModel
from unmask.pretrained.formats._hf_tokenizer import GENERATION_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from unmask.pretrained.load_save import is_model_folder, resolve_model_folder
from unmask.pretrained.model_card import CardMetadata
from unmask.pretrained.state_dict import list_weight_files

_OTHER_FILES = (
    CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION_FILE,
    MANIFEST_FILE,
)


def plan_push(folder: Path, metadata: CardMetadata | None = None) -> dict[str, Path | bytes]:
    """The files of a model, or of a finished run, that `push` uploads: its card, config, weights and tokenizer.

    Damaged folders, and weights that are pickles, are refused; whatever else lies in the folder stays where it is.
    """
    path = resolve_model_folder(folder)
    if not path.is_dir() or not is_model_folder(path):
        raise ValueError(f"{path} is not a model folder: `unmask export RUN {path}` writes one")
    weights = list_weight_files(path)
    if not weights or not weights[-1].endswith(".safetensors"):
        raise ValueError(f"{path} has no weights in safetensors: `unmask export {path} OUT` writes them")
    StoredModel(path).verify_weights()
    card = path / CARD_FILE
    text = card.read_text(encoding="utf-8") if card.exists() else "---\nlibrary_name: unmask\n---\n"
    files: dict[str, Path | bytes] = {CARD_FILE: (metadata or CardMetadata()).added_to(text).encode()}
    return files | {name: path / name for name in (*weights, *_OTHER_FILES) if (path / name).exists()}


@contextmanager
def _quiet_unless_watched() -> Iterator[None]:
    """The client's progress bars are for terminals."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    is_changed = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if is_changed:
        disable_progress_bars()
    try:
        yield
    finally:
        if is_changed:
            enable_progress_bars()


def check_repo_id(repo: str) -> None:
    """ValueError unless it is the name of a repository."""
    if not REPO_ID_PATTERN.fullmatch(repo):
        raise ValueError(f"a repository is written OWNER/NAME, as in my-name/my-model; got {repo!r}")


def push(files: Mapping[str, Path | bytes], repo: str, *, private: bool = True, message: str = "Upload a model") -> str:
    """Upload `files`, by their names there, to a repository of models, which is made if there is none.

    All of them are one commit: a model is there as a whole or not at all. Returns the address of the commit.
    """
    import huggingface_hub

    check_repo_id(repo)
    if huggingface_hub.get_token() is None:
        raise ValueError("the hub takes models with a token only: run `hf auth login`, or set HF_TOKEN")
    api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    operations = [
        huggingface_hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=source) for name, source in files.items()
    ]
    with hub_session(f"{repo} on the hub") as online, _quiet_unless_watched():
        if not online:
            raise ValueError("the hub cannot be reached from here; nothing was uploaded")
        try:
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.create_commit(repo, operations, commit_message=message)
        except Exception as error:  # many types: no permission, a broken connection, a refused card
            why = first_line(error if error.__cause__ is None else error.__cause__)
            raise ValueError(f"the hub did not take {repo}: {why}") from None
    return str(commit.commit_url)
