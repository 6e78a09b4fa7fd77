"""The network of a classifier: the same as transformers', padding that does not count, golden values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from labelled import bert_folder, experiment, tiny_lm, write_csv
from unmask import (
    MDLM,
    BackboneConfig,
    CaduceusConfig,
    DiMambaConfig,
    DiTConfig,
    MambaConfig,
    ModelConfig,
    NextToken,
    Vocab,
)
from unmask.classification import ClassifierConfig, SequenceClassifier, load_encoder
from unmask.classification._experiment import load_data
from unmask.classification._network import pool
from unmask.classification._training import build_classifier, build_trainer
from unmask.context import Context
from unmask.distributed import Distributed
from unmask.model import Denoiser

PAIRS = [["good film", "the film was good", "same"], ["bad", "a good film", "other"], ["the film is", "bad", "other"]]


def test_a_training_step_is_that_of_plain_transformers(tmp_path: Path) -> None:
    """Pairs of different lengths through BertForSequenceClassification and torch's AdamW: losses, then weights."""
    folder, config = bert_folder(tmp_path / "bert")
    rows = write_csv(tmp_path / "pairs.csv", ["a", "b", "label"], PAIRS)
    settings = experiment(folder, rows)
    split = replace(settings.data.train, columns=(("a", "b", "label"),))  # type: ignore[type-var]
    settings = replace(settings, data=replace(settings.data, train=split), dropout=0.0, epochs=5)
    data = load_data(settings.data, 0)
    classifier = build_classifier(settings, data, load_encoder(folder), Distributed())
    theirs: Any = transformers.BertForSequenceClassification(replace_labels(config, 2))
    theirs.load_state_dict(_as_transformers(classifier.network, theirs))
    trainer, _, _ = build_trainer(settings, data, classifier, tmp_path)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=2e-2, weight_decay=0.0)
    for step in range(3):
        batch = trainer.batches.batch(step, 0, 16)
        count = int(batch.counted.sum())
        assert count == 3
        for group in optimizer.param_groups:
            group["lr"] = 2e-2 * (1 - step / 5)
        output = theirs(
            input_ids=batch.tokens[:count],
            attention_mask=batch.valid[:count].long(),
            token_type_ids=batch.segment_ids[:count],
            labels=batch.targets[:count].long(),
        )
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        assert trainer.step()["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    for name, weight in _as_transformers(classifier.network, theirs).items():
        torch.testing.assert_close(weight, theirs.state_dict()[name], rtol=1e-3, atol=1e-4)


def replace_labels(config: transformers.BertConfig, labels: int) -> Any:
    return transformers.BertConfig(**{**config.to_dict(), "num_labels": labels})


def _as_transformers(network: SequenceClassifier, theirs: Any) -> dict[str, Tensor]:
    """Our tensors by the names of BertForSequenceClassification."""
    bert: Any = network.backbone.model
    tensors = {f"bert.{name}": tensor for name, tensor in bert.bert.state_dict().items()}
    head = network.head.state_dict()
    for part, name in (("hidden", "bert.pooler.dense"), ("output", "classifier")):
        tensors |= {f"{name}.{kind}": head[f"{part}.{kind}"] for kind in ("weight", "bias")}
    assert set(tensors) == set(theirs.state_dict())
    return tensors


def test_an_encoder_without_a_head_is_as_good(tmp_path: Path) -> None:
    whole, _ = bert_folder(tmp_path / "whole")
    bare, _ = bert_folder(tmp_path / "bare", with_head=False)
    with pytest.raises(ValueError, match="lacks weights that its config asks for: cls"):
        load_encoder_strictly(bare)
    tokens = torch.tensor([[2, 5, 7, 3]])
    features = []
    for folder in (whole, bare):
        backbone = load_encoder(folder).denoiser.backbone
        features.append(backbone.features(backbone.embed(tokens), torch.zeros(1, 1)))
    assert features[0].shape == features[1].shape == (1, 4, 16)
    theirs = transformers.BertModel.from_pretrained(bare).eval()
    with torch.no_grad():
        torch.testing.assert_close(features[1], theirs(tokens).last_hidden_state)


def load_encoder_strictly(folder: str) -> Any:
    from unmask import load

    return load(folder)


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_padding_does_not_count(pooling: str) -> None:
    lm = tiny_lm()
    config = ClassifierConfig(lm.denoiser.config, ("a", "b", "c"), pooling, hidden_layer=pooling == "first")
    torch.manual_seed(0)
    network = SequenceClassifier(config)
    network.backbone.load_state_dict(lm.denoiser.backbone.state_dict())
    network.double().eval()
    short, long = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 1, 2]])
    tokens = torch.tensor([[1, 2, 3, 9, 9], [4, 5, 6, 1, 2]])
    valid = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    together = network(tokens, Context(valid=valid))
    torch.testing.assert_close(together[:1], network(short))
    torch.testing.assert_close(together[1:], network(long))
    assert not torch.allclose(together[:1], network(tokens[:1]))


def test_pooling_of_left_padding_and_of_nan() -> None:
    hidden = torch.tensor([[[torch.nan], [1.0], [3.0]], [[5.0], [6.0], [7.0]]])
    valid = torch.tensor([[False, True, True], [True, True, False]])
    assert pool(hidden, valid, "first").tolist() == [[1.0], [5.0]]
    assert pool(hidden, valid, "last").tolist() == [[3.0], [6.0]]
    assert pool(hidden, valid, "mean").tolist() == [[2.0], [5.5]]


@pytest.mark.parametrize("shift", [False, True])
def test_features_are_at_their_own_positions(shift: bool) -> None:
    """A network that predicts a token one position earlier still describes it where it stands."""
    backbone = DiTConfig(width=16, depth=2, heads=2, max_length=8, dropout=0.0, shift_logits=shift)
    torch.manual_seed(0)
    denoiser: Denoiser = ModelConfig(Vocab(7, 4), backbone, MDLM()).build().eval()
    network = denoiser.backbone
    tokens, t = torch.randint(4, (2, 6)), torch.zeros(2, 1)
    features = network.features(network.embed(tokens), t)
    encoded = network.encode(network.embed(tokens), t)
    expected = torch.cat([encoded[:, 1:], features[:, -1:]], 1) if shift else encoded
    torch.testing.assert_close(features, expected)


def test_a_network_refuses_segments_that_it_cannot_tell_apart() -> None:
    lm = tiny_lm()
    network = SequenceClassifier(ClassifierConfig(lm.denoiser.config, ("a", "b")))
    with pytest.raises(ValueError, match="DiT does not support segment ids"):
        network(torch.zeros(1, 2, dtype=torch.int64), Context(segment_ids=torch.zeros(1, 2, dtype=torch.int64)))


def test_what_no_output_depends_on_is_frozen() -> None:
    """DDP would wait for its gradients; everything else is trained."""
    lm = tiny_lm()
    network = SequenceClassifier(ClassifierConfig(lm.denoiser.config, ("a", "b")))
    network.freeze_unused()
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert frozen == {"backbone.lm_head.weight", "backbone.lm_head.bias"}


COMPLEMENT = (3, 2, 1, 0, 4, 5, 6)


@pytest.mark.parametrize("kind", ["mamba", "caduceus-ph", "caduceus-ps", "dimamba"])
def test_state_space_networks_classify(kind: str) -> None:
    """Padding does not count; an equivariant network answers alike for both strands; all of the rest is trained."""
    backbone: BackboneConfig = {
        "mamba": MambaConfig(width=12, depth=2),
        "caduceus-ph": CaduceusConfig(width=12, depth=2),
        "caduceus-ps": CaduceusConfig(width=12, depth=2, equivariant=True, complement_ids=COMPLEMENT),
        "dimamba": DiMambaConfig(width=12, depth=2, dropout=0.0),
    }[kind]
    torch.manual_seed(0)
    objective = NextToken() if kind == "mamba" else MDLM()
    network = SequenceClassifier(ClassifierConfig(ModelConfig(Vocab(7, 4), backbone, objective), ("a", "b")))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.double().eval().freeze_unused()
    tokens = torch.tensor([[0, 1, 2, 5, 5], [3, 2, 1, 1, 0]])
    valid = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    together = network(tokens, Context(valid=valid))
    torch.testing.assert_close(together[:1], network(tokens[:1, :3]))
    torch.testing.assert_close(together[1:], network(tokens[1:]))
    other = torch.tensor(COMPLEMENT)[tokens.flip(1)]
    assert torch.allclose(network(tokens), network(other)) == (kind == "caduceus-ps")
    frozen = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert all("lm_head" in name for name in frozen)
