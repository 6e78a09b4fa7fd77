"""What the denoisers of continuous diffusion share: a backbone whose input is vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unmask.backbones.base import Backbone
from unmask.diffusion.denoiser import DenoiserWrapper
from unmask.model.denoiser import Denoiser, ModelConfig


class ContinuousDenoiser(Denoiser):
    """A denoiser with input layers of its own beside the backbone; model folders hold all of them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_width = embedding_matrix(self.backbone, config.vocab.size).shape[-1]

    @property
    def stored_module(self) -> nn.Module:
        return self

    @property
    def time_independent(self) -> bool:
        return False

    def load_initial(self, other: Denoiser) -> None:
        """All weights of a model of the same kind; else those of its network, with fresh input layers."""
        if type(other) is type(self):
            self.load_state_dict(other.state_dict())
        else:
            super().load_initial(other)


@torch.no_grad()
def embedding_matrix(backbone: Backbone, vocab_size: int) -> Tensor:
    """The backbone's embeddings [V, width] of all tokens."""
    device = backbone.lm_head.weight.device
    embeddings = backbone.embed(torch.arange(vocab_size, device=device)[None])[0]
    if not embeddings.is_floating_point():
        raise ValueError(
            f"{type(backbone).__name__} reads token ids only, and continuous diffusion gives it vectors: take another"
            " backbone"
        )
    return embeddings


def freeze_embedding(backbone: Backbone) -> None:
    """Take the parameters that `embed` uses, and the head does not, out of training.

    They would get no gradient in a model with embeddings of its own, which DDP does not allow.
    """
    device = backbone.lm_head.weight.device
    if device.type == "meta":
        return
    parameters = list(backbone.parameters())

    def used(output: Tensor) -> list[bool]:
        gradients = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
        return [gradient is not None for gradient in gradients]

    with torch.enable_grad():
        by_embed = used(backbone.embed(torch.zeros(1, 1, dtype=torch.int64, device=device)))
        by_head = used(backbone.lm_head(torch.zeros(1, backbone.lm_head.in_features, device=device)))
    for parameter, embeds, answers in zip(parameters, by_embed, by_head, strict=True):
        if embeds and not answers:
            parameter.requires_grad_(False)


def unwrap(denoiser: Any, kind: type[Any]) -> Any:
    """The denoiser of this kind inside wrappers."""
    while isinstance(denoiser, DenoiserWrapper):
        denoiser = denoiser.denoiser
    inner = getattr(denoiser, "model", denoiser)  # in training, that of DDP's wrapper
    if not isinstance(inner, kind):
        raise ValueError(f"this objective trains a {kind.__name__}; got a {type(inner).__name__}")
    return inner
