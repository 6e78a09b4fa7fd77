"""A model as one ONNX file, for programs that know nothing of this library.

    log_x [batch, length, vocab] = graph(tokens [batch, length])          or graph(tokens, t [batch, 1])

`log_x` is float32: the log-probabilities of the clean token at every position, read as the objective
reads them (the mask's column is -inf). `t`, 0 for data and 1 for all mask, is an input only of models
whose answer depends on it. Batch and length are free. The file's metadata say what a caller must know.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmask.backbones.hf import HFBackboneConfig
from unmask.config import to_json
from unmask.diffusion.process import BlockMasking, LeftToRight
from unmask.io.atomic import atomic_file
from unmask.model import Denoiser, LanguageModel
from unmask.types import LogX, Times, Tokens

_ONNX_FORMAT = "unmask-onnx-2"
_MAX_WEIGHT_BYTES = 2**31 - 2**24
"""Bytes of weights: protobuf ends at 2 GiB, and the graph itself needs a little."""


class _DenseModel(nn.Module):
    """A denoiser asked at all rows: log_x [B, L, V].

    It is `Denoiser.forward` without the checks, which look at values; a graph knows only shapes.
    """

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, tokens: Tokens, t: Times | None = None) -> LogX:
        denoise = self.denoiser
        if t is None:
            t = torch.zeros_like(tokens[:, :1], dtype=torch.float32)
        hidden = denoise.backbone.encode(tokens, denoise._time_input(t))
        logits = denoise.backbone.lm_head(hidden.flatten(0, 1))
        alpha = denoise._alpha(tokens, t, _all_positions(tokens))
        log_x = denoise.objective.log_probs(logits, alpha, denoise.vocab)
        return log_x.reshape(*tokens.shape, denoise.vocab.size)


def export_onnx(model: LanguageModel, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the model, in float32, to an ONNX file: all of it or, if anything fails, nothing."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name a file, as in {file / 'model.onnx'}")
    if file.exists() and not overwrite:
        raise ValueError(f"{file} exists already; choose another name or pass overwrite=True")
    if isinstance(model.denoiser.config.backbone, HFBackboneConfig):
        raise ValueError(
            "ONNX export is for networks of unmask's; write those of transformers with upstream_format=True, for"
            " its own exporters"
        )
    if isinstance(model.denoiser.process, BlockMasking):
        raise ValueError(
            "ONNX export is not for block diffusion: a graph of one call holds no cache of finished blocks"
        )
    metadata = _graph_metadata(model.denoiser)
    size = 4 * sum(parameter.numel() for parameter in model.denoiser.parameters())
    if size > _MAX_WEIGHT_BYTES:
        raise ValueError(f"an ONNX file holds less than 2 GiB, and this model has {size:,} bytes of weights")
    graph = _export_graph(model.denoiser, metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as fresh:
        fresh.write_bytes(graph)
    return file


def _all_positions(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The indices of all positions: a mask of booleans would make the number of rows unknown to the graph."""
    row, place = (torch.arange(size, device=tokens.device) for size in tokens.shape)
    return row[:, None].expand(tokens.shape).flatten(), place.expand(tokens.shape).flatten()


def _graph_metadata(denoiser: Denoiser) -> dict[str, str]:
    """What a caller must know; `config` is all of what `config.json` says."""
    stated = {
        "format": _ONNX_FORMAT,
        "objective": type(denoiser.objective).__name__,
        "vocab_size": denoiser.vocab.size,
        "mask_id": denoiser.vocab.mask_id,
        "max_length": denoiser.max_length,
        "config": json.dumps(to_json(denoiser.config)),
    }
    return {name: str(value) for name, value in stated.items() if value is not None}


def _graph_description(denoiser: Denoiser) -> str:
    """How to call the graph, for people who have nothing but the file."""
    told = "" if denoiser.time_independent else " at time t (0: data, 1: pure noise)"
    read = "log_x[b, l] is the log-probabilities of the clean token at position l of row b"
    if isinstance(denoiser.process, LeftToRight):
        return f"{read}, if tokens are the text one place late, after the mask id{told}."
    total = "they sum to one" if denoiser.normalized else "what they lack to one stays masked"
    return f"{read}, given tokens with the mask id where they are hidden{told}; {total}."


def _export_graph(denoiser: Denoiser, metadata: dict[str, str]) -> bytes:
    try:
        import onnx
        import onnxscript  # noqa: F401  (torch's exporter needs it, and says so less clearly)
    except ModuleNotFoundError:
        raise ValueError("ONNX export needs the extra onnx: pip install 'unmask[onnx]'") from None
    whole = _DenseModel(copy.deepcopy(denoiser).float().cpu()).eval().requires_grad_(False)
    try:
        with _silence_loggers():
            program = torch.onnx.export(whole, (), **_example_inputs(denoiser), dynamo=True, verbose=False)
    except Exception as error:  # of many kinds, with pages of advice for those who work on torch
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(f"torch cannot write this network as an ONNX graph: {reason}") from None
    assert program is not None
    proto = program.model_proto
    _strip_metadata(proto.graph)
    del proto.graph.value_info[:]  # shapes of the exporter's own graph: tools that change it trip over them
    proto.doc_string = _graph_description(denoiser)
    onnx.helper.set_model_props(proto, metadata)
    written: bytes = proto.SerializeToString(deterministic=True)
    return written


def _example_inputs(denoiser: Denoiser) -> dict[str, Any]:
    """Example inputs, and which of their sizes are free.

    The exporter takes sizes of 0 and 1, and those that can have one value only, for constants: hence a
    batch of two, and at least three tokens, even for a model that takes fewer.
    """
    free = torch.export.Dim
    longest = denoiser.max_length and max(denoiser.max_length, 3)
    kwargs = {"tokens": torch.full((2, min(longest or 8, 8)), denoiser.vocab.mask_id)}
    shapes = {"tokens": {0: free("batch"), 1: free("length", max=longest)}}
    if not denoiser.time_independent:
        kwargs["t"] = torch.full((2, 1), 0.5)
        shapes["t"] = {0: free.DYNAMIC}  # named "batch" a second time, it would be warned about
    return {
        "kwargs": kwargs,
        "dynamic_shapes": shapes,
        "input_names": list(kwargs),
        "output_names": ["log_x"],
    }


def _strip_metadata(graph: Any) -> None:
    """Drop the exporter's notes: stack traces, with the paths of the computer that it ran on."""
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextmanager
def _silence_loggers() -> Iterator[None]:
    """Without what torch's exporter has to say about its own insides and about torchvision."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            yield
    finally:
        log.setLevel(level)
