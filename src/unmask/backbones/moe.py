"""Mixtures of experts: an MLP of which each token passes only a few parts, chosen by a router."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from unmask.backbones.layers import MLP

_MAX_EXPERTS = 1 << 14
"""No network has more; larger numbers are mistakes or attacks."""
_SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Experts:
    """The MLP of a block as a mixture of experts.

    Scores s = softmax(W x) or sigmoid(W x), in float32, say how well each expert fits a token. The `per_token` best of
    s + bias are asked, and the output is the sum of w_e expert_e(x) with w_e = s_e, divided by their sum if
    `normalize`, times `scale`; plus that of a shared expert, if there is one.
    """

    count: int
    """Number of experts."""
    per_token: int
    """How many of them a token passes."""
    intermediate_size: int
    """Width of an expert's hidden layer."""
    shared_intermediate_size: int | None = None
    """Width of the hidden layer of an expert that every token passes; None: there is none."""
    scoring: str = "softmax"
    """What turns the router's outputs into scores: softmax over all experts, or sigmoid of each."""
    normalize: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the experts' weights."""
    selection_bias: bool = False
    """Whether experts have a bias that is added to their scores when they are chosen, and not to their weights."""
    groups: int = 1
    """Number of groups of neighbouring experts; a group's score is the sum of its two best."""
    groups_per_token: int = 1
    """The experts of a token are chosen from so many of the best groups."""
    dense_layers: tuple[int, ...] = ()
    """Blocks that have a plain MLP instead, counted from 0."""
    balance_loss: float = 0.01
    """Coefficient of the auxiliary loss that is smallest when all experts are asked equally often; 0: none."""
    z_loss: float = 0.0
    """Coefficient of the mean square of log sum exp of the router's outputs, which keeps them small; 0: none."""

    def __post_init__(self) -> None:
        wrong = {
            f"there must be from 1 to {_MAX_EXPERTS:,} experts; got {self.count}": not 1 <= self.count <= _MAX_EXPERTS,
            f"a token passes from 1 to {self.count} experts; got {self.per_token}": not (
                1 <= self.per_token <= self.count
            ),
            f"intermediate_size of an expert must be at least 1; got {self.intermediate_size}": (
                self.intermediate_size < 1
            ),
            f"shared_intermediate_size must be at least 1, or None; got {self.shared_intermediate_size}": (
                self.shared_intermediate_size is not None and self.shared_intermediate_size < 1
            ),
            f"scoring must be softmax or sigmoid; got {self.scoring!r}": self.scoring not in _SCORINGS,
            f"groups must be equally large parts of the {self.count} experts; got {self.groups}": (
                self.groups < 1 or self.count % self.groups != 0
            ),
            f"groups_per_token must be from 1 to {self.groups}; got {self.groups_per_token}": not (
                1 <= self.groups_per_token <= self.groups
            ),
            "coefficients of auxiliary losses must not be negative": self.balance_loss < 0 or self.z_loss < 0,
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(message)
        if self.groups_per_token * (self.count // self.groups) < self.per_token:
            raise ValueError(
                f"{self.groups_per_token} of {self.groups} groups have fewer than {self.per_token} experts"
            )


class _Router(nn.Module):
    """Which experts each token passes, and with which weights."""

    def __init__(self, width: int, config: Experts) -> None:
        super().__init__()
        self.config = config
        # Not our `Linear`: scores are computed in float32 whatever the type of the network.
        self.gate = nn.Linear(width, config.count, bias=False)
        self.register_buffer("expert_bias", torch.zeros(config.count) if config.selection_bias else None)
        self.expert_bias: Tensor | None

    def forward(
        self, x: Float[Tensor, "N width"]
    ) -> tuple[Int[Tensor, "N k"], Float[Tensor, "N k"], Float[Tensor, "N E"]]:
        """The experts of each token, their weights, and the router's outputs."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.gate.weight.float())
        scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        weight = scores.gather(1, chosen)
        if config.normalize:
            weight = weight / weight.sum(1, keepdim=True)
        return chosen, weight * config.scale, logits

    def _choose(self, scores: Float[Tensor, "N E"]) -> Int[Tensor, "N k"]:
        config = self.config
        if self.expert_bias is not None:
            scores = scores + self.expert_bias.float()
        if config.groups_per_token < config.groups:
            grouped = scores.view(len(scores), config.groups, -1)
            best_two = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
            kept = best_two.topk(config.groups_per_token, dim=1).indices
            outside = torch.ones_like(best_two, dtype=torch.bool).scatter(1, kept, False)
            scores = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
        return scores.topk(config.per_token, dim=1).indices


class MixtureOfExperts(nn.Module):
    """The module of `Experts`: it takes the place of a block's MLP."""

    def __init__(self, width: int, config: Experts) -> None:
        super().__init__()
        self.config = config
        self.router = _Router(width, config)
        self.experts = nn.ModuleList(MLP.swiglu(width, config.intermediate_size) for _ in range(config.count))
        shared = config.shared_intermediate_size
        self.shared_expert = None if shared is None else MLP.swiglu(width, shared)
        self.aux_loss: Tensor | None = None

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weight, logits = self.router(tokens)
        self.aux_loss = self._aux_loss(chosen, logits) if torch.is_grad_enabled() else None
        # Choices sorted by expert: each expert then reads its tokens at once.
        order = chosen.flatten().argsort(stable=True)
        token, counts = order // self.config.per_token, chosen.flatten().bincount(minlength=self.config.count)
        asked = tokens[token]
        # An expert without tokens has a gradient of zero when training, so that all ranks have the same gradients.
        outputs = [
            expert(part)
            for expert, part in zip(self.experts, torch.split(asked, counts.tolist()), strict=True)
            if len(part) or torch.is_grad_enabled()
        ]
        weighted = torch.cat(outputs) * weight.flatten()[order, None].to(outputs[0].dtype)
        out = torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, token, weighted)
        if self.shared_expert is not None:
            out = out + self.shared_expert(tokens)
        return out.view(x.shape)

    def init_output(self, std: float) -> None:
        """Draw the last layer of each expert."""
        for expert in (*self.experts, *([] if self.shared_expert is None else [self.shared_expert])):
            assert isinstance(expert, MLP)
            expert.init_output(std)

    def _aux_loss(self, chosen: Int[Tensor, "N k"], logits: Float[Tensor, "N E"]) -> Tensor | None:
        """balance_loss E sum over e of f_e p_e / k, plus z_loss mean((log sum exp)^2).

        f_e is the number of times that expert e was chosen, per token, and p_e its mean probability: the sum is 1 if
        all are chosen equally often.
        """
        config = self.config
        if not config.balance_loss and not config.z_loss:
            return None
        if len(logits) == 0:  # nothing is masked, and the last block computes nothing
            return logits.sum()
        share = chosen.flatten().bincount(minlength=config.count) / chosen.numel()
        balance = config.count * (share * logits.softmax(-1).mean(0)).sum()
        return config.balance_loss * balance + config.z_loss * logits.logsumexp(-1).square().mean()
