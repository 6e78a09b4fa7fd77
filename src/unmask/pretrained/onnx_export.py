"""Export to ONNX, for programs without this library.

    log_x [batch, length, vocab] = graph(tokens [batch, length])          or graph(tokens, t [batch, 1])

`log_x` is float32: the log-probabilities of the clean token at every position, in the parameterization of the
objective (the mask's column is -inf). `t`, 0 for data and 1 for all mask, is an input only of models whose
output depends on it. Batch and length are dynamic. The file's metadata has what a caller must know.
"""

from __future__ import annotations

import copy
import json
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
from unmask.io.errors import silenced_loggers
from unmask.model import Denoiser, LanguageModel
from unmask.types import Times, Tokens

_ONNX_FORMAT = "unmask-onnx-2"
_MAX_WEIGHT_BYTES = 2**31 - 2**24
"""Bytes of weights: protobuf is limited to 2 GiB, and the graph itself needs some."""


class _DenseModel(nn.Module):
    """`Denoiser.dense_log_probs` as a module, which torch's exporter takes."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, tokens: Tokens, t: Times | None = None) -> Tensor:
        return self.denoiser.dense_log_probs(tokens, t)


def export_onnx(model: LanguageModel, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write the model, in float32, to an ONNX file: all of it or, if anything fails, nothing."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{file} is a folder; name a file, as in {file / 'model.onnx'}")
    if file.exists() and not overwrite:
        raise ValueError(f"{file} exists already; choose another name or pass overwrite=True")
    if isinstance(model.denoiser.config.backbone, HFBackboneConfig):
        raise ValueError(
            "ONNX export does not support networks of transformers: save the model with upstream_format=True, and use"
            " their own exporters"
        )
    if isinstance(model.denoiser.process, BlockMasking):
        raise ValueError("ONNX export does not support block diffusion: a graph has no cache of finished blocks")
    metadata = _graph_metadata(model.denoiser)
    size = 4 * sum(parameter.numel() for parameter in model.denoiser.parameters())
    if size > _MAX_WEIGHT_BYTES:
        raise ValueError(f"an ONNX file is limited to 2 GiB, but this model has {size:,} bytes of weights")
    graph = _export_graph(model.denoiser, metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as fresh:
        fresh.write_bytes(graph)
    return file


def _graph_metadata(denoiser: Denoiser) -> dict[str, str]:
    """What a caller must know; `config` is the content of `config.json`."""
    values = {
        "format": _ONNX_FORMAT,
        "objective": type(denoiser.objective).__name__,
        "vocab_size": denoiser.vocab.size,
        "mask_id": denoiser.vocab.mask_id,
        "max_length": denoiser.max_length,
        "config": json.dumps(to_json(denoiser.config)),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _graph_description(denoiser: Denoiser) -> str:
    """How to call the graph, for readers of the file."""
    time = "" if denoiser.time_independent else " at time t (0: data, 1: pure noise)"
    output = "log_x[b, l] is the log-probabilities of the clean token at position l of sequence b"
    if isinstance(denoiser.process, LeftToRight):
        return f"{output}, if tokens are the text shifted right by one position, after the mask id{time}."
    if denoiser.process.predicts_ratios:
        return f"log_x[b, l, v] is log p(tokens with v at l)/p(tokens){time}; to be read as 0 for the present token."
    total = "they sum to one" if denoiser.normalized else "the rest to one is the probability of staying masked"
    return f"{output}, given tokens with the mask id at masked positions{time}; {total}."


def _export_graph(denoiser: Denoiser, metadata: dict[str, str]) -> bytes:
    try:
        import onnx
        import onnxscript  # noqa: F401  (needed by torch's exporter)
    except ModuleNotFoundError:
        raise ValueError("ONNX export needs the extra onnx: pip install 'unmask[onnx]'") from None
    dense = _DenseModel(copy.deepcopy(denoiser).float().cpu()).eval().requires_grad_(False)
    try:
        with _silenced_exporter():
            program = torch.onnx.export(dense, (), **_example_inputs(denoiser), dynamo=True, verbose=False)
    except Exception as error:  # many types, with long messages for developers of torch
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(f"torch cannot export this network to ONNX: {reason}") from None
    assert program is not None
    proto = program.model_proto
    _strip_metadata(proto.graph)
    del proto.graph.value_info[:]  # stale shapes, over which tools that rewrite the graph stumble
    proto.doc_string = _graph_description(denoiser)
    onnx.helper.set_model_props(proto, metadata)
    serialized: bytes = proto.SerializeToString(deterministic=True)
    return serialized


def _example_inputs(denoiser: Denoiser) -> dict[str, Any]:
    """Example inputs, and their dynamic sizes.

    The exporter treats sizes of 0 and 1, and sizes with a single possible value, as constants: hence a batch of
    two and at least three tokens, even for a model that takes fewer.
    """
    free = torch.export.Dim
    longest = denoiser.max_length and max(denoiser.max_length, 3)
    kwargs = {"tokens": torch.full((2, min(longest or 8, 8)), denoiser.vocab.mask_id)}
    shapes = {"tokens": {0: free("batch"), 1: free("length", max=longest)}}
    if not denoiser.time_independent:
        kwargs["t"] = torch.full((2, 1), 0.5)
        shapes["t"] = {0: free.DYNAMIC}  # a second dimension named "batch" causes a warning
    return {
        "kwargs": kwargs,
        "dynamic_shapes": shapes,
        "input_names": list(kwargs),
        "output_names": ["log_x"],
    }


def _strip_metadata(graph: Any) -> None:
    """Drop the exporter's metadata: stack traces with local paths."""
    for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, graph):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


@contextmanager
def _silenced_exporter() -> Iterator[None]:
    """Silence the output and warnings of torch's exporter."""
    quiet = silenced_loggers("torch.onnx")
    with quiet, redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        yield
