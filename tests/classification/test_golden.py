"""Classifiers of published networks: MosaicBERT's pooler, Caduceus' mean of one strand and of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import unmask
from unmask.classification import ClassifierConfig, SequenceClassifier
from unmask.context import Context


def classifier(folder: Path, outputs: int, pooling: str) -> SequenceClassifier:
    lm = unmask.load(folder)
    labels = tuple(f"class {number}" for number in range(outputs))
    config = ClassifierConfig(lm.denoiser.config, labels, pooling, hidden_layer=pooling == "first", dropout=0.0)
    network = SequenceClassifier(config)
    network.backbone.load_state_dict(lm.denoiser.backbone.state_dict())
    return network.eval().requires_grad_(False)


def set_head(network: SequenceClassifier, part: str, weight: Tensor, bias: Tensor | None = None) -> None:
    layer = network.head.get_submodule(part)
    layer.load_state_dict({"weight": weight, "bias": torch.zeros(len(weight)) if bias is None else bias})


def test_mosaicbert(golden: Path) -> None:
    """tanh(W h_0 + b), a linear layer, cross-entropy; padding and token types as published."""
    folder = golden / "mosaicbert_tiny"
    expected = load_file(folder / "expected.safetensors")
    network = classifier(folder, 3, "first")
    set_head(network, "hidden", *(expected[f"classifier.bert.pooler.dense.{name}"] for name in ("weight", "bias")))
    set_head(network, "output", *(expected[f"classifier.classifier.{name}"] for name in ("weight", "bias")))
    context = Context(valid=expected["attention_mask"].bool(), segment_ids=expected["token_type_ids"])
    logits = network(expected["input_ids"], context)
    torch.testing.assert_close(logits, expected["classifier.logits"], rtol=1e-4, atol=1e-5)
    loss = F.cross_entropy(logits, expected["classifier.labels"])
    torch.testing.assert_close(loss, expected["classifier.loss"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["ph", "ps"])
def test_caduceus(kind: str, golden: Path) -> None:
    """The published head has no bias, and reads padding like any token."""
    folder = golden / f"caduceus_{kind}_tiny"
    expected = load_file(folder / "expected.safetensors")
    network = classifier(folder, 3, "mean")
    set_head(network, "output", expected["classifier.score"])
    one, other = network(expected["input_ids"]), network(expected["rc_input_ids"])
    plain = expected["classifier.logits.plain" if kind == "ph" else "classifier.logits"]
    torch.testing.assert_close(one, plain, rtol=1e-4, atol=1e-4)
    both = expected["classifier.logits.posthoc" if kind == "ph" else "classifier.logits.rc"]
    torch.testing.assert_close((one + other) / 2, both, rtol=1e-4, atol=1e-4)
