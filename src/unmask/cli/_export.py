"""`unmask export`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from unmask.cli._arguments import AllowCodeFlag, LoadOptions, ModelPath, allow_imports, load_model

_UNSUPPORTED_SUFFIXES = (
    ".gguf",
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".json",
    ".zip",
    ".tflite",
    ".mlmodel",
)
"""Suffixes of file formats that are not written; a folder of such a name would be a mistake."""


def export(
    source: ModelPath,
    out: ModelPath,
    format: str = "unmask",
    license: str | None = None,
    dataset: tuple[str, ...] = (),
    language: tuple[str, ...] = (),
    allow_code: AllowCodeFlag = False,
) -> None:
    """Write a model folder, or an ONNX file, from a run's newest checkpoint or from another model folder.

    For example:
      unmask export runs/tiny tiny-model --license apache-2.0 --language en
      unmask export runs/demo demo.onnx
      unmask train stdlib-tiny --out runs/plain \\
        --set backbone.local_init=None backbone.activation=gelu backbone.rope_theta=10000
      unmask export runs/plain plain-mdlm --format upstream
      unmask export runs/demo demo-hf --format transformers

    Args:
        source: The folder of a run (its averaged weights are used) or of a model.
        out: The new folder; or a file that ends in .onnx, for onnxruntime and the like: tokens
            [batch, length] in, log-probabilities of the clean token out.
        format: upstream writes the format in which such models are published (MDLM, BD3LM, LLaDA, Dream, SDAR,
            transformers' own networks, ...), and a family's model_type, such as sdar or a2d-qwen3, the format of that
            family. MDLM's holds plain networks, as runs/plain above; what does not fit is named, with a remedy.
            transformers writes what its AutoModelForMaskedLM opens, after `import unmask.hf` unless the network is
            one of Llama blocks.
        license: The model's license for its card, as hubs name it: apache-2.0, mit, cc-by-4.0.
        dataset: Names of the data sets that it was trained on, for its card.
        language: Codes of the languages that it generates, for its card: en, de.
    """
    from unmask.cli._progress import heartbeat
    from unmask.pretrained import CardMetadata, export_onnx, save
    from unmask.run import load_ema_model, read_card_metadata

    metadata = CardMetadata(license, dataset, language)
    _check_output(out, format, has_metadata=metadata != CardMetadata())
    is_run = (source / "experiment.json").exists()
    if is_run:
        allow_imports(allow_code)
        lm, facts = load_ema_model(source, _warn, allow_code=allow_code)
    else:
        as_onnx = LoadOptions("float32") if out.suffix == ".onnx" else LoadOptions()
        lm, facts = load_model(source, allow_code=allow_code, options=as_onnx), None
    if out.suffix == ".onnx":
        with heartbeat("writing the ONNX graph, which takes a minute or so"):
            print(export_onnx(lm, out))
        return
    of_run = read_card_metadata(source) if is_run else CardMetadata()
    metadata = replace(metadata, datasets=dataset or of_run.datasets, results=of_run.results)
    upstream: bool | str = {"unmask": False, "upstream": True}.get(format, format)
    print(save(lm, out, upstream_format=upstream, facts=facts, metadata=metadata))


def _check_output(out: Path, format: str, has_metadata: bool) -> None:
    onnx = out.suffix == ".onnx"
    if format not in ("unmask", "upstream"):
        from unmask.config import lookup
        from unmask.pretrained.formats import FORMATS

        lookup(format, FORMATS, "published format")
    if format != "unmask" and onnx:
        raise ValueError(f"--format {format} writes a folder, not an .onnx file; drop one of them")
    if onnx and has_metadata:
        raise ValueError("--license, --dataset and --language are for a folder's card; an .onnx file has none")
    if out.suffix in _UNSUPPORTED_SUFFIXES:
        raise ValueError(f"{out.suffix} files are not supported; name a new folder, or a file that ends in .onnx")
    if out.exists():
        raise ValueError(f"{out} exists already; choose another name")


def _warn(text: str) -> None:
    print(f"unmask: {text}", file=sys.stderr)
