"""Models of the Hugging Face hub by name; files are downloaded once, into the hub's own cache."""

from __future__ import annotations

import os
from pathlib import Path

from unmask.io.hub import REPO_ID_PATTERN, UNREACHABLE_MESSAGE, hub_session, parse_repo_id

_ALLOW_PATTERNS = ["*.json", "*.safetensors", "vocab.txt", "merges.txt", "*.model"]
"""Never code; pickles only if there are no safetensors."""


def resolve_hub(model: str | os.PathLike[str]) -> Path:
    """The local folder, or that of a model on the hub such as `kuleshov-group/mdlm-owt`."""
    path, given = Path(model), os.fspath(model)
    name = parse_repo_id(given)
    if name is None:
        if REPO_ID_PATTERN.fullmatch(given) and not path.exists():
            raise ValueError(
                f"there is no folder {given} ({path.parts[0]} is a local folder; write hub:{given} for a model on"
                " the hub)"
            )
        return path
    try:
        with hub_session(name) as online:
            return _download(name, online)
    except Exception as error:  # many types: no such model, no network, no permission
        reason = " ".join(str(error).split()) if online else UNREACHABLE_MESSAGE
        raise ValueError(f"{name} is neither a folder nor available from the hub: {reason}") from None


def _download(name: str, online: bool) -> Path:
    import huggingface_hub

    folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=_ALLOW_PATTERNS, local_files_only=not online))
    if any(folder.glob("*.safetensors")):
        return folder
    pickles = [*_ALLOW_PATTERNS, "pytorch_model*.bin"]
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=pickles, local_files_only=not online))
