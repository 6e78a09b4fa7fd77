"""Models by their name on the hub: what is needed is fetched once and kept where the hub's library keeps
it."""

from __future__ import annotations

import os
from pathlib import Path

from unmask.io.hub import REPO_ID_PATTERN, UNREACHABLE_MESSAGE, hub_session, parse_repo_id

_ALLOW_PATTERNS = ["*.json", "*.safetensors", "vocab.txt", "merges.txt", "*.model"]
"""No code and, at first, no pickles."""


def resolve_hub(model: str | os.PathLike[str]) -> Path:
    """The folder itself if it is one, or that of a model on the hub, as in `kuleshov-group/mdlm-owt`."""
    path, given = Path(model), os.fspath(model)
    name = parse_repo_id(given)
    if name is None:
        if REPO_ID_PATTERN.fullmatch(given) and not path.exists():
            raise ValueError(
                f"there is no folder {given} here (and {path.parts[0]} is taken for a folder of yours:"
                f" hub:{given} would be looked for on the hub)"
            )
        return path
    try:
        with hub_session(name) as online:
            return _download(name, online)
    except Exception as error:  # of many kinds: no such model, no network, no permission
        reason = " ".join(str(error).split()) if online else UNREACHABLE_MESSAGE
        raise ValueError(f"{name} is neither a folder nor to be had from the hub: {reason}") from None


def _download(name: str, online: bool) -> Path:
    import huggingface_hub

    known = not online
    folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=_ALLOW_PATTERNS, local_files_only=known))
    if any(folder.glob("*.safetensors")):
        return folder
    pickles = [*_ALLOW_PATTERNS, "pytorch_model*.bin"]
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=pickles, local_files_only=known))
