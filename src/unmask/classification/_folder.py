"""Folders of classifiers: `config.json`, `model.safetensors`, `tokenizer.json`, a card and a manifest of checksums.

Like folders of language models, they hold JSON and safetensors only: nothing in them is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unmask.classification._classifier import Classifier
from unmask.classification._metrics import Metric
from unmask.classification._network import ClassificationHead, ClassifierConfig, SequenceClassifier
from unmask.config import from_json, to_json
from unmask.data.tokenizers import load_tokenizer
from unmask.io.untrusted import read_json_object
from unmask.model.language_model import validate_tokenizer
from unmask.pretrained import CLASSIFIER_FORMAT, StoredModel, resolve_model_folder, write_folder
from unmask.pretrained.state_dict import LazyTensor, unique_tensors
from unmask.registry import AllowCode
from unmask.training.lora import LoRA

_CONFIG_FILE, _WEIGHTS_FILE, _TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
_BACKBONE, _HEAD = "backbone.", "head."


def is_classifier(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a classifier, or of a run that has made one."""
    try:
        config = read_json_object(resolve_model_folder(folder) / _CONFIG_FILE)
    except ValueError:
        return False
    return config.get("format") == CLASSIFIER_FORMAT


def save_classifier(
    classifier: Classifier,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    facts: Mapping[str, str] | None = None,
    results: Mapping[str, Metric] | None = None,
) -> Path:
    """Write the folder of a classifier: all of it or, if anything fails, nothing.

    `facts`: how it was trained, and `results`: what it scored, for its card.
    """
    if LoRA.is_applied(classifier.network):
        raise ValueError("LoRA adapters are not merged: call merge_lora() before saving")

    def write(path: Path) -> None:
        config = {"format": CLASSIFIER_FORMAT, **to_json(classifier.config)}
        (path / _CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(_tensors(classifier.network), path / _WEIGHTS_FILE, metadata={"format": "pt"})
        (path / _TOKENIZER_FILE).write_text(classifier.tokenizer.to_json(), encoding="utf-8")

    card = _card(classifier, facts or {}, results or {})
    return write_folder(folder, write, card, _is_classifier_folder, overwrite=overwrite)


def load_classifier(folder: str | os.PathLike[str], *, allow_code: AllowCode = False) -> Classifier:
    """Load a classifier that `unmask classify train` or `save_classifier` has written; a run's folder will do.

        classifier = unmask.load_classifier("runs/sst2")
        classifier.predict(["a charming and often affecting journey"])
        classifier.predict_proba(["unflinchingly bleak and desperate"])

    A folder whose network or tokenizer is a class from outside unmask is loaded only with `allow_code=True`.
    """
    if (Path(folder) / "experiment.json").exists() and not (Path(folder) / "model").exists():
        raise ValueError(f"{folder} is a run that is not finished: give its command again to go on")
    path = resolve_model_folder(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; a classifier's folder holds {_CONFIG_FILE} and {_WEIGHTS_FILE}")
    if not (path / _CONFIG_FILE).exists():
        raise ValueError(_why_no_classifier(path))
    stored = StoredModel(path)
    if stored.config.get("format") != CLASSIFIER_FORMAT:
        raise ValueError(f"{path} is not a classifier: its format is {stored.config.get('format')!r:.60}")
    fields = {key: value for key, value in stored.config.items() if key != "format"}
    config: ClassifierConfig = from_json(ClassifierConfig, fields, str(path / _CONFIG_FILE), allow_code=allow_code)
    tensors = stored.tensors()
    stored.check_shapes(_expected_shapes(stored, config, tensors), tensors)
    tokenizer = load_tokenizer(path / _TOKENIZER_FILE, allow_code=allow_code)
    validate_tokenizer(tokenizer, config.model.vocab)
    stored.verify_weights()
    network = SequenceClassifier(config)
    weights = {name: tensor.view() for name, tensor in tensors.items()}
    network.load_state_dict(weights, strict=False)  # tied tensors are stored once; the shapes are checked
    return Classifier(network.eval(), tokenizer)


def _expected_shapes(
    stored: StoredModel, config: ClassifierConfig, headers: Mapping[str, LazyTensor]
) -> dict[str, torch.Size]:
    of_backbone = {
        name.removeprefix(_BACKBONE): tensor for name, tensor in headers.items() if name.startswith(_BACKBONE)
    }
    shapes = stored.expected_shapes(config.model, of_backbone)
    output = headers.get(f"{_HEAD}output.weight")
    width = output.shape[-1] if output is not None and len(output.shape) == 2 else 1
    with torch.device("meta"):
        head = ClassificationHead(width, config)
    return {
        **{f"{_BACKBONE}{name}": shape for name, shape in shapes.items()},
        **{f"{_HEAD}{name}": tensor.shape for name, tensor in head.state_dict().items()},
    }


def _tensors(network: SequenceClassifier) -> dict[str, Tensor]:
    """Each tensor once, on the CPU."""
    return {name: tensor.cpu() for name, tensor in unique_tensors(network.state_dict()).items()}


def _is_classifier_folder(path: Path) -> bool:
    return (path / _CONFIG_FILE).exists() and is_classifier(path)


def _why_no_classifier(path: Path) -> str:
    runs = sorted(entry.parent.parent.name for entry in path.glob("*/model/config.json"))
    if runs:
        return f"{path} holds {len(runs)} classifiers: name one of them, as in {path / runs[0]}"
    return f"{path} is not the folder of a classifier: it has no {_CONFIG_FILE}"


def _card(classifier: Classifier, facts: Mapping[str, str], results: Mapping[str, Metric]) -> str:
    config = classifier.config
    network = ", ".join(str(value) for value in classifier.network.backbone.describe().values())
    lines: list[tuple[str, Any]] = [
        ("predicts", "a number" if classifier.labels.is_number else ", ".join(config.labels)),
        ("reads", " and ".join(config.columns)),
        ("network", network),
        ("pooling", config.pooling),
        ("tokens of a row", "no limit" if config.max_length is None else f"up to {config.max_length}"),
        *facts.items(),
        *((name, _describe(metric)) for name, metric in results.items()),
    ]
    table = "\n".join(f"| {name} | {str(value).replace('|', '/')} |" for name, value in lines)
    return f"""---
library_name: unmask
pipeline_tag: text-classification
---

# A classifier

| | |
|---|---|
{table}

```python
import unmask

classifier = unmask.load_classifier("FOLDER")
classifier.predict(["a text"])
```
"""


def _describe(metric: Metric) -> str:
    if metric.value is None:
        return "not defined"
    if metric.low is None or metric.high is None:
        return f"{metric.value:.4f}"
    return f"{metric.value:.4f} (95 % interval {metric.low:.4f} to {metric.high:.4f})"
