"""A backbone that answers with classes or numbers: hidden states, pooled, through a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unmask.backbones.base import Backbone, network_blocks
from unmask.context import Context
from unmask.model import ModelConfig

Pooling: TypeAlias = Literal["first", "mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("first", "mean", "last")


@dataclass(frozen=True)
class ClassifierConfig:
    """Everything that is needed to rebuild a classifier, but for its weights and its tokenizer."""

    model: ModelConfig
    """The network that it was made from, with its vocabulary."""
    labels: tuple[str, ...]
    """The classes; none where a number is predicted."""
    pooling: str = "mean"
    """Whose hidden state is read: that of the first token, of the last one, or the mean of all."""
    hidden_layer: bool = False
    """Whether the head has BERT's hidden layer, tanh(W h + b), before the last one."""
    dropout: float = 0.1
    """Dropout before the last layer of the head, in training."""
    max_length: int | None = None
    """The most tokens of a row, special ones included; longer ones are cut."""
    columns: tuple[str, ...] = ("text",)
    """The columns of the texts in the training set: one or two."""
    both_strands: bool = False
    """Whether the logits of DNA are the mean of those of both strands."""

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}; got {self.pooling!r}")
        if len(self.labels) == 1 or len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels must be two or more different classes, or none for a number; got {self.labels}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1); got {self.dropout}")
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1; got {self.max_length}")
        if not 1 <= len(self.columns) <= 2:
            raise ValueError(f"a classifier reads one or two texts; got the columns {self.columns}")

    @property
    def num_outputs(self) -> int:
        """A logit for each class, or the number."""
        return max(1, len(self.labels))


class SequenceClassifier(nn.Module):
    """logits = head(pool(features(tokens))), with features at t = 0: all tokens are clean."""

    def __init__(self, config: ClassifierConfig, backbone: Backbone | None = None) -> None:
        super().__init__()
        self.config = config
        self.backbone = config.model.backbone.build(config.model.vocab) if backbone is None else backbone
        self.head = ClassificationHead(self._width(), config)

    def forward(self, tokens: Int[Tensor, "B L"], context: Context = Context()) -> Float[Tensor, "B K"]:
        """Logits of the classes, or the number, of each row."""
        backbone = self.backbone
        backbone.require(context)
        t = torch.zeros(len(tokens), 1, device=tokens.device)
        if self.config.model.condition_on_sigma:
            t = self.config.model.objective.process.sigma(t)
        hidden = backbone.features(backbone.embed(tokens), t, context)
        logits: Tensor = self.head(pool(hidden, context.valid, self.config.pooling))
        return logits

    def freeze_unused(self) -> None:
        """Freeze what no output depends on, such as the language model's head, and DDP would wait for.

        Blocks are left alone: which experts are used depends on the text.
        """
        in_blocks = {parameter for block in network_blocks(self) for parameter in block.parameters()}
        was_training = self.training
        self.eval()
        with torch.enable_grad():
            self(torch.zeros(1, 2, dtype=torch.int64, device=self.head.output.weight.device)).sum().backward()
        for parameter in self.parameters():
            if parameter.grad is None and parameter not in in_blocks:
                parameter.requires_grad_(False)
            parameter.grad = None
        self.train(was_training)

    def _width(self) -> int:
        """The width of the hidden states."""
        self.backbone.eval()
        with torch.no_grad():
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.backbone.lm_head.weight.device)
            features = self.backbone.features(self.backbone.embed(tokens), torch.zeros(1, 1, device=tokens.device))
        return features.shape[-1]


class ClassificationHead(nn.Module):
    """W dropout(x) + b, or W dropout(tanh(V x + c)) + b as in BERT."""

    def __init__(self, width: int, config: ClassifierConfig) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, width) if config.hidden_layer else None
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(width, config.num_outputs)
        for layer in (self.hidden, self.output):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Float[Tensor, "B width"]) -> Float[Tensor, "B K"]:
        """The logits of pooled hidden states."""
        if self.hidden is not None:
            x = torch.tanh(self.hidden(x))
        logits: Tensor = self.output(self.dropout(x))
        return logits.float()


def pool(
    hidden: Float[Tensor, "B L width"], valid: Bool[Tensor, "B L"] | None, pooling: str
) -> Float[Tensor, "B width"]:
    """The hidden state of the first or last token of each row, or the mean of all; padding does not count."""
    if valid is None:
        return {"first": hidden[:, 0], "last": hidden[:, -1], "mean": hidden.mean(1)}[pooling]
    if pooling == "mean":
        weights = valid[..., None].to(hidden.dtype)
        # Hidden states of padding may be anything, also NaN.
        return torch.where(valid[..., None], hidden, 0).sum(1) / weights.sum(1).clamp(min=1)
    rows, length = torch.arange(len(hidden), device=hidden.device), hidden.shape[1]
    flags = valid.long()
    place = flags.argmax(1) if pooling == "first" else length - 1 - flags.flip(1).argmax(1)
    return hidden[rows, place]
