"""Models of unmask for the transformers library: `import unmask.hf`, then `AutoModelForMaskedLM.from_pretrained`.

The folder is one that `unmask export MODEL FOLDER --format transformers` has written. It holds no code: the network is
built by the installed unmask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from unmask.config import from_json
from unmask.context import AttentionStages, Context
from unmask.diffusion.process import BlockMasking, Masking
from unmask.model import Denoiser, ModelConfig


class _UnmaskConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """The config of a model; `unmask` is that of its folder."""

    model_type = "unmask"

    def __init__(self, unmask: dict[str, Any] | None = None, **settings: Any) -> None:
        self.unmask = unmask
        super().__init__(**{"tie_word_embeddings": False, **settings})


class UnmaskForMaskedLM(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A masked diffusion model: logits of the clean token at every position."""

    config_class = _UnmaskConfig
    base_model_prefix = "denoiser"
    _no_split_modules = None

    def __init__(self, config: _UnmaskConfig) -> None:
        super().__init__(config)
        settings: ModelConfig = from_json(ModelConfig, config.unmask, "config.json's unmask")
        with torch.device("cpu"):  # transformers builds without memory, where constants could not be computed
            self.denoiser: Denoiser = settings.build()
        self._constants = {
            module: {name: module.get_buffer(name).clone() for name in module._non_persistent_buffers_set}
            for module in self.denoiser.modules()
        }
        self._tied_weights_keys = _tied_parameters(self)
        config.tie_word_embeddings = bool(self._tied_weights_keys)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """Restore the constants of a module, which transformers has emptied; all weights are in the folder."""
        for name, value in self._constants.get(module, {}).items():
            module.get_buffer(name).copy_(value)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError("the embedding of a model of unmask cannot be replaced: its vocabulary is fixed")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        timesteps: Tensor | None = None,
        **_: Any,
    ) -> MaskedLMOutput:
        """Logits [B, L, V] of the token at each position; row i is about token i also where the network is shifted.

        `attention_mask` [B, L] is 0 on padding. `timesteps` [B] are the times t; None: those at which so many tokens
        are masked. `labels` [B, L], -100 where there is none, give the mean cross-entropy as `loss`.
        """
        valid = None if attention_mask is None else attention_mask.bool()
        context = Context(valid=valid, stages=self._stages(input_ids))
        backbone = self.denoiser.backbone
        hidden = backbone.encode(backbone.embed(input_ids), self._time_input(input_ids, timesteps), None, context)
        logits = backbone.compute_logits(hidden)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]

    def _stages(self, input_ids: Tensor) -> AttentionStages | None:
        """Block-causal attention, where the model has blocks; they are counted from the beginning of the text."""
        size, length = self.denoiser.process.block_size, input_ids.shape[1]
        return None if size is None else AttentionStages.block_causal(0, length, size, length, input_ids.device)

    def _time_input(self, input_ids: Tensor, timesteps: Tensor | None) -> Tensor:
        process = self.denoiser.process
        if timesteps is not None:
            t = timesteps[:, None]
        elif self.denoiser.backbone.capabilities.time_conditioned and isinstance(process, Masking | BlockMasking):
            num_masked = (input_ids == self.denoiser.vocab.mask_id).sum(1, keepdim=True)
            t = process.inner.schedule.inverse(1 - num_masked.double() / input_ids.shape[1]).float()
        else:
            t = torch.zeros_like(input_ids[:, :1], dtype=torch.float32)
        return process.sigma(t) if self.denoiser.config.condition_on_sigma else t


def _tied_parameters(model: nn.Module) -> dict[str, str]:
    """The second names of parameters that have two, with their first."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[weight] for name, weight in named if first.setdefault(weight, name) != name}


AutoConfig.register("unmask", _UnmaskConfig, exist_ok=True)
AutoModelForMaskedLM.register(_UnmaskConfig, UnmaskForMaskedLM, exist_ok=True)
