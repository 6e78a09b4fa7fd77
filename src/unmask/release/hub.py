"""Models by their name on the hub: what is needed is fetched once and kept where the hub's library keeps
it."""

from __future__ import annotations

import os
import re
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WANTED = ["*.json", "*.safetensors", "vocab.txt", "merges.txt", "*.model"]
"""No code and, at first, no pickles."""


def fetched(model: str | os.PathLike[str]) -> Path:
    """The folder itself if it is one, or that of a model on the hub, as in `kuleshov-group/mdlm-owt`."""
    path = Path(model)
    if path.exists() or not NAME.fullmatch(os.fspath(model)):
        return path
    import huggingface_hub

    name = os.fspath(model)
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=WANTED))
        if not any(folder.glob("*.safetensors")):
            folder = Path(
                huggingface_hub.snapshot_download(name, allow_patterns=[*WANTED, "pytorch_model*.bin"])
            )
    except Exception as error:  # of many kinds: no such model, no network, no permission
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} is neither a folder nor to be had from the hub: {reason}") from None
    return folder
