"""Reference models: causal language models that score texts which another model generated."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from unmask.io.errors import first_line
from unmask.io.hub import HUB_PREFIX, UNREACHABLE_MESSAGE, hub_session, parse_repo_id

_MAX_BATCH_LOGITS = 2**27
"""Logits of a batch (half a GiB in float32); a single window may have more."""

_PROBE_TEXT = "These words show that a tokenizer knows words, 1 2 3."
"""Shows whether a tokenizer has a vocabulary at all, and whether it adds a BOS token."""


class ReferenceModel(Protocol):
    """A language model that scores texts."""

    @property
    def name(self) -> str:
        """The model and its conventions: context length, and whether the first token is scored."""
        ...

    def nll(self, texts: Sequence[str]) -> list[tuple[float, int]]:
        """The -log p of each text, and the number of tokens that were predicted for it."""
        ...


@dataclass(frozen=True)
class CausalReferenceModel:
    """A causal language model of the transformers library, in float32.

    Texts are encoded by the model's own tokenizer. The first token is predicted from BOS if the tokenizer adds one;
    if it does not (GPT-2, SmolLM2), the model was not trained to predict that token, and it is not scored. Special
    tokens that are spelled out in a text are parsed as such.

    A text longer than `context_length` is scored in windows of that length, each with BOS in front. All tokens of the
    first window are scored, and of each further window only the new tokens, at most half of it: every token is
    scored once, given at least half a context or all the text before it.
    """

    model: nn.Module
    tokenizer: Any
    label: str
    """The name of the model."""
    bos_id: int | None
    """The token before every text; None if there is none."""
    context_length: int | None
    """Tokens of a window; None for no limit."""

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        gguf_file: str | None = None,
        *,
        context_length: int | None = None,
        device: str = "cpu",
    ) -> CausalReferenceModel:
        """Load a folder, a `.gguf` file, a folder that holds one, or a model of the hub.

        Safetensors, JSON and GGUF only: no code that comes with the model is executed. `context_length` makes
        windows shorter than the model's maximum.
        """
        place, file = _locate(source, gguf_file)
        model, tokenizer = _load(place, file)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if context_length is not None and not 2 <= context_length <= (longest or context_length):
            raise ValueError(
                f"the context length of a reference model must be 2 to {longest or 'any number of'} tokens;"
                f" got {context_length}"
            )
        adds_bos = tokenizer(_PROBE_TEXT).input_ids[:1] == [tokenizer.bos_token_id]
        return cls(
            model=model.to(device),
            tokenizer=tokenizer,
            label=file or (Path(place).resolve().name if Path(place).is_dir() else place),
            bos_id=tokenizer.bos_token_id if adds_bos else None,
            context_length=context_length or longest,
        )

    @property
    def name(self) -> str:
        """The model, its context, and whether the first token is scored: perplexities depend on all of these."""
        first = "not scored" if self.bos_id is None else "predicted from BOS"
        return f"{self.label} (context {self.context_length or 'unlimited'}, first token {first})"

    def digest(self) -> str:
        """SHA-256 of the weights as they are used, independent of the file format."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
            digest.update(weight.cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def nll(self, texts: Sequence[str]) -> list[tuple[float, int]]:
        """-log p of each text and its number of predicted tokens: (0, 0) if there is none to predict."""
        sums, counts = [0.0] * len(texts), [0] * len(texts)
        for batch in self._batches(texts):
            for window, nats in zip(batch, self._window_nll(batch), strict=True):
                sums[window.text_index] += nats
                counts[window.text_index] += window.num_scored
        if not all(map(math.isfinite, sums)):
            raise ValueError(
                f"the reference model {self.label} gives nats that are not finite; its weights are damaged"
            )
        return list(zip(sums, counts, strict=True))

    def _batches(self, texts: Sequence[str]) -> Iterator[list[_Window]]:
        """Windows of similar lengths together, the longest first, so that memory runs out at once or never."""
        past = [] if self.bos_id is None else [self.bos_id]
        encoded = self.tokenizer(list(texts), add_special_tokens=False).input_ids if texts else []
        windows = [w for text, ids in enumerate(encoded) for w in _windows(text, ids, past, self.context_length)]
        windows.sort(key=lambda window: -len(window.tokens))
        while windows:
            rows = max(1, _MAX_BATCH_LOGITS // (len(windows[0].tokens) * _vocab_size(self.model)))
            yield windows[:rows]
            windows = windows[rows:]

    @torch.inference_mode()
    def _window_nll(self, batch: list[_Window]) -> list[float]:
        """The nats of the scored tokens of each window: log-softmax in float32, summed in float64."""
        device = next(self.model.parameters()).device
        longest = max(len(window.tokens) for window in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        valid = torch.zeros_like(tokens)
        for row, window in enumerate(batch):  # padded on the right, which causal attention ignores
            tokens[row, : len(window.tokens)] = torch.tensor(window.tokens)
            valid[row, : len(window.tokens)] = 1
        tokens, valid = tokens.to(device), valid.to(device)
        logits = self.model(input_ids=tokens[:, :-1], attention_mask=valid[:, :-1]).logits
        nats = []
        for row, window in enumerate(batch):
            end = len(window.tokens)
            predicted = slice(end - 1 - window.num_scored, end - 1)
            targets = tokens[row, end - window.num_scored : end]
            nll = F.cross_entropy(logits[row, predicted].float(), targets, reduction="none")
            nats.append(float(nll.double().sum()))
        return nats


@dataclass(frozen=True)
class _Window:
    """Consecutive tokens of text `text_index`, of which the last `num_scored` are scored."""

    text_index: int
    tokens: list[int]
    num_scored: int


def _windows(text_index: int, ids: list[int], prefix: list[int], context_length: int | None) -> Iterator[_Window]:
    """Windows of `context_length` inputs; the last token of a window is only predicted."""
    room = len(ids) if context_length is None else context_length + 1 - len(prefix)
    end = min(room, len(ids))
    if end + len(prefix) > 1:
        yield _Window(text_index, prefix + ids[:end], end + len(prefix) - 1)
    while end < len(ids):
        done, end = end, min(end + room // 2, len(ids))
        yield _Window(text_index, prefix + ids[end - room : end], end - done)


def _locate(source: str | os.PathLike[str], gguf_file: str | None) -> tuple[str, str | None]:
    """A folder or a name on the hub, and the GGUF file in it that holds the model, if one does."""
    source = os.fspath(source).removeprefix(HUB_PREFIX)
    path = Path(source)
    if path.is_file() and path.suffix == ".gguf" and gguf_file is None:
        return str(path.parent), path.name
    if path.is_file() or path.suffix == ".gguf":
        raise ValueError(f"{source} is not a model; a reference model is a folder, a .gguf file or a name on the hub")
    if not path.is_dir() or gguf_file is not None or (path / "config.json").exists():
        return str(source), gguf_file
    found = sorted(file.name for file in path.glob("*.gguf"))
    if len(found) != 1:
        contents = f"holds {len(found)} .gguf files: name one of them" if found else "has none and no .gguf file"
        raise ValueError(f"the folder of a reference model has a config.json or one .gguf file; {path} {contents}")
    return str(path), found[0]


def _hub_lookup(path_or_name: str) -> AbstractContextManager[bool]:
    """Look for a name on the hub, unless it is a folder or cannot be a name there."""
    if "/" in path_or_name and not Path(path_or_name).exists() and parse_repo_id(path_or_name) is None:
        raise ValueError(f"there is no reference model {path_or_name}: it is neither a folder nor a .gguf file")
    return hub_session(path_or_name)


def _load(path_or_name: str, gguf_file: str | None) -> tuple[Any, Any]:
    """The model and its tokenizer, which must be complete, causal, and made for each other."""
    extra, needed = ("hf", ["transformers"]) if gguf_file is None else ("gguf", ["accelerate", "gguf"])
    if not all(map(find_spec, ["transformers", *needed])):
        raise ValueError(f"a reference model needs the extra {extra}: pip install 'unmask[{extra}]'")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": False}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    looking = _hub_lookup(path_or_name)
    try:
        with looking as online, contextlib.redirect_stderr(io.StringIO()):  # progress bars
            options["local_files_only"] = not online
            config = AutoConfig.from_pretrained(path_or_name, **options)
            tokenizer: Any = AutoTokenizer.from_pretrained(path_or_name, **options)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path_or_name,
                **options,
                config=config,
                attn_implementation=None,  # the library's own, whatever kernel to fetch the config names
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
    except Exception as error:  # the library raises errors of many kinds
        reason = first_line(error) if online else UNREACHABLE_MESSAGE
        what = (
            "cannot be loaded as a reference model" if Path(path_or_name).is_dir() else "is neither here nor on the hub"
        )
        raise ValueError(f"{path_or_name} {what}: {reason}") from None
    model, loading_info = loaded
    tokenizer.model_max_length = 10**12  # texts are split into windows here, so no warning is needed
    _validate(path_or_name, model.eval().requires_grad_(False), tokenizer, loading_info)
    model.config.use_cache = False
    return model, tokenizer


def _validate(path_or_name: str, model: Any, tokenizer: Any, loading_info: dict[str, Any]) -> None:
    """Refuse what transformers accepts: missing weights, an empty tokenizer, attention to later tokens."""
    missing = sorted(map(str, loading_info["missing_keys"])) + sorted(map(str, loading_info["mismatched_keys"]))
    if missing:
        raise ValueError(
            f"{path_or_name} lacks weights that its config requires: {missing[0]} and {len(missing) - 1} more"
        )
    if len(set(tokenizer(_PROBE_TEXT, add_special_tokens=False).input_ids)) < 2:
        raise ValueError(f"{path_or_name} has no usable tokenizer; a reference model needs its own")
    size = _vocab_size(model)
    if max(tokenizer.get_vocab().values()) >= size:
        raise ValueError(
            f"the tokenizer of {path_or_name} has ids beyond its model's {size}: they do not belong together"
        )
    with torch.inference_mode():
        first = model(input_ids=torch.tensor([[size // 2, size // 3], [size // 2, size // 4]])).logits[:, 0]
    if (first[0] - first[1]).abs().max() > 1e-4 * first.abs().max():
        raise ValueError(f"{path_or_name} is not causal, as a reference model must be: it attends to later tokens")


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])
