"""Networks of the transformers library: masked LMs as they are, causal LMs with their attention opened.

The library is asked for hidden states only. Its output matrix is taken out of the network, where a
pass-through stands from then on, and becomes the head, which is asked at chosen rows as any other.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from unmask.backbones.attention_mask import AttentionContext, KVCache, KVCacheView, attention_context, kv_view
from unmask.backbones.base import Backbone, BackboneConfig
from unmask.backbones.hf_attention import HFCacheAdapter, hf_attention_mask
from unmask.context import AttentionStages, Context
from unmask.io.untrusted import parse_json
from unmask.types import Positions, Times, Tokens, Vocab

_IGNORED_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "auto_map", "use_cache")
"""What a config says of the file that it came from, and not of the network."""


@dataclass(frozen=True)
class HFBackboneConfig(BackboneConfig):
    """A network of the transformers library; `config` is its own config, as JSON text.

    `future_visibility` is None for networks that look to both sides by birth. Those that are causal by birth look at a
    share `future_visibility` of what follows, from 0, the causal network, to 1, an open one, and still predict a token
    where the one before it is read. `length` None is the longest text that the network was made for.
    """

    needs_weights = True

    config: str
    future_visibility: float | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.parsed.get("model_type"), str):
            raise ValueError(
                'config must be the JSON of a network of transformers with its "model_type", as in'
                f' {{"model_type": "bert"}}; got {self.config[:60]!r}'
            )
        if self.future_visibility is not None and not 0 <= self.future_visibility <= 1:
            raise ValueError(
                f"future_visibility must be in [0, 1], 0 for causal and 1 for open; got {self.future_visibility}"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1; got {self.max_length}")

    @classmethod
    def from_hf(
        cls, config: Any, future_visibility: float | None = None, max_length: int | None = None
    ) -> HFBackboneConfig:
        """From a config object of transformers."""
        stated = {key: value for key, value in config.to_dict().items() if not _is_ignored_key(key)}
        return cls(json.dumps(stated, sort_keys=True), future_visibility, max_length)

    @property
    def parsed(self) -> dict[str, Any]:
        """What `config` says."""
        try:
            stated = parse_json(self.config.encode(), "config")
        except ValueError:
            stated = None
        return stated if isinstance(stated, dict) else {}

    @property
    def shift_logits(self) -> bool:
        """Whether a token is predicted where the one before it is read."""
        return self.future_visibility is not None

    def build(self, vocab: Vocab) -> HFBackbone:
        return HFBackbone(self, self._build_hf_model(vocab))

    def _build_hf_model(self, vocab: Vocab) -> Any:
        library = import_transformers()
        kind, stated = self.parsed["model_type"], self.parsed | {"vocab_size": vocab.size}
        if kind not in library.CONFIG_MAPPING:
            raise ValueError(f"the installed transformers has no network of the model_type {kind!r}")
        if isinstance(stated.get("pad_token_id"), int) and stated["pad_token_id"] >= vocab.size:
            stated["pad_token_id"] = None
        head = library.AutoModelForMaskedLM if self.future_visibility is None else library.AutoModelForCausalLM
        said = {key: value for key, value in stated.items() if not _is_ignored_key(key)}
        reason: Exception | None = None
        for attention in ("sdpa", "eager"):  # some have no other than the second
            try:
                config = library.CONFIG_MAPPING[kind].from_dict(said)
                return head.from_config(
                    config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
                )
            except Exception as error:  # of many kinds, as transformers finds them
                reason = reason or error
        what = "masked" if self.future_visibility is None else "causal"
        raise ValueError(f"transformers cannot build a {what} language model of {kind!r}: {_one_line(reason)}")


def import_transformers() -> Any:
    """The library, which is loaded only where a network of it is wanted."""
    if find_spec("transformers") is None:
        raise ValueError("networks of Hugging Face need the extra hf: pip install 'unmask[hf]'")
    import transformers

    return transformers


class HFBackbone(Backbone):
    """The network of `HFBackboneConfig`, made from one of transformers, which it takes apart."""

    def __init__(self, config: HFBackboneConfig, model: Any) -> None:
        super().__init__()
        self.config = config
        self.causal, self.time_conditioned, self.shift_logits = False, False, config.shift_logits
        self.future_visibility = config.future_visibility
        """A training may open it step by step, up to what the config says."""
        self.lm_head_name = _find_lm_head(model)
        output = model.get_submodule(self.lm_head_name)
        model.set_submodule(self.lm_head_name, _PassThrough())
        self.model, self.lm_head = model, output
        self.position_offset = _find_position_offset(model)
        self.max_length = self._resolve_max_length()
        self._respects_mask: bool | None = None
        self._forward_params = frozenset(inspect.signature(model.forward).parameters)
        self._check_head()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in the backward pass, by the library's own means."""
        return bool(self.model.is_gradient_checkpointing)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        if enabled and not self.model.supports_gradient_checkpointing:
            raise ValueError(f"{self._model_class} cannot recompute its blocks; leave out gradient_checkpointing")
        if enabled:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def encode(
        self,
        tokens: Tokens,
        t: Times,
        positions: Positions | None = None,
        context: Context = Context(),
    ) -> Tensor:
        view = attention_context(tokens.shape[1], tokens.device, causal=False, context=context)
        plain = self.future_visibility is None and replace(context, valid=None).is_empty
        mask = _padding_mask(tokens, context.valid) if plain else self._attention_mask(view)
        hidden = self._hidden_states(tokens, view, mask, kv_view(context))
        if not self.shift_logits:
            return hidden if positions is None else hidden[positions]
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        there, taken = view.previous_positions(positions if isinstance(positions, Tensor) else everywhere)
        hidden = hidden[there][taken]
        if isinstance(positions, Tensor):
            return hidden
        hidden = hidden.view(*tokens.shape, -1)
        return hidden if positions is None else hidden[positions]

    def new_cache(self) -> KVCache:
        return KVCache()

    def _hidden_states(
        self, tokens: Tokens, context: AttentionContext, mask: Any, cache: KVCacheView | None = None
    ) -> Tensor:
        """What the head would read [B, n, width]."""
        if cache is not None and self.future_visibility is None:
            raise ValueError(f"{self._model_class} keeps no keys and values: it cannot read beside a cache")
        asked: dict[str, Any] = {"attention_mask": mask, "return_dict": True}
        if "use_cache" in self._forward_params:
            asked["use_cache"] = False
        if cache is not None:
            asked["past_key_values"] = HFCacheAdapter(cache)
        asked |= self._position_args(tokens, context)
        hidden: Tensor = self.model(input_ids=tokens, **asked).logits
        return hidden.to(self.lm_head.weight.dtype)  # products of 16 bits may have been asked for

    def _position_args(self, tokens: Tokens, context: AttentionContext) -> dict[str, Tensor]:
        position = context.position_ids.expand(tokens.shape)
        if "position_ids" in self._forward_params:
            if self.max_length is not None and int(position.max()) >= self.max_length:
                raise ValueError(f"a token at place {int(position.max())} is beyond the network's {self.max_length}")
            return {"position_ids": position + self.position_offset}
        if not torch.equal(position, torch.arange(tokens.shape[1], device=tokens.device).expand_as(position)):
            raise ValueError(
                f"{self._model_class} cannot be told where a token stands: texts must begin at the first place"
            )
        return {}

    def _attention_mask(self, context: AttentionContext) -> Any:
        if self._respects_mask is None:
            self._respects_mask = self._probe_mask()
        if not self._respects_mask:
            raise ValueError(
                f"{self._model_class} does not obey masks of who sees whom: it can be given neither documents nor"
                " blocks, and cannot be opened"
            )
        return hf_attention_mask(context, self.future_visibility, self.model)

    @torch.no_grad()
    def _probe_mask(self) -> bool:
        """Whether it looks at what a mask shows and at nothing else: a trial with three tokens."""
        device = self.lm_head.weight.device
        pair, place = torch.tensor([[0, 0, 0], [0, 0, 1]], device=device), torch.arange(3, device=device)
        changes = []
        for stages in ([0, 0, 0], [0, 0, 1]):  # the last token is seen by the others, and is not
            order = AttentionStages(torch.tensor(stages, device=device), place < 3, place)
            view = attention_context(3, device, causal=False, context=Context(stages=order))
            mask = hf_attention_mask(view, None if self.future_visibility is None else 1.0, self.model)
            try:
                with eval_mode(self.model):
                    hidden = self._hidden_states(pair, view, mask)[:, :2]
            except Exception:  # however it fails on such a mask
                return False
            if bool(hidden.isnan().any()):  # damaged weights are found out elsewhere
                return True
            changes.append(float((hidden[0] - hidden[1]).abs().max()) / max(float(hidden.abs().max()), 1e-30))
        return changes[0] > 1e-6 > changes[1]

    @torch.no_grad()
    def _check_head(self) -> None:
        """What the head says must be what the network says: refuse those that change their logits then."""
        if self.lm_head.weight.device.type == "meta":
            return
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.lm_head.weight.device)
        said = torch.linspace(-100, 100, 2 * self.lm_head.in_features, device=tokens.device).view(1, 2, -1)
        passing = self.model.get_submodule(self.lm_head_name)
        handle = passing.register_forward_hook(lambda *_: said)
        try:
            with eval_mode(self.model):
                heard = self.model(input_ids=tokens, return_dict=True).logits
            same = torch.equal(heard, said)
        except Exception as error:  # a head that is used otherwise than called
            raise ValueError(
                f"{self._model_class} uses its output matrix in a way of its own: {_one_line(error)}"
            ) from None
        finally:
            handle.remove()
        if not same:
            raise ValueError(f"{self._model_class} changes its logits after the output matrix, which is not known here")

    def _resolve_max_length(self) -> int | None:
        own = getattr(self._text_config, "max_position_embeddings", None)
        own = own - self.position_offset if isinstance(own, int) and own > 0 else None
        if own is not None and (self.config.max_length or 0) > own:
            raise ValueError(f"max_length {self.config.max_length} is longer than the network's {own}")
        return self.config.max_length or own

    @torch.no_grad()
    def init_output_bias(self, logits: Tensor) -> None:
        if self.lm_head.bias is None:
            raise ValueError("a head without a bias cannot begin with frequencies; set unigram_bias_init=false")
        self.lm_head.bias.copy_(logits)

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def _model_class(self) -> str:
        return type(self.model).__name__


class _PassThrough(nn.Module):
    """Stands where a network had its head, and hands on what the head would have read."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def _padding_mask(tokens: Tokens, valid: Tensor | None) -> Tensor:
    return torch.ones_like(tokens) if valid is None else valid.long()


def _find_lm_head(model: Any) -> str:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no output matrix of its own, which a head needs; it has {type(head).__name__}"
        )
    return str(next(name for name, module in model.named_modules() if module is head))


def _find_position_offset(model: nn.Module) -> int:
    """Of RoBERTa's kind, whose positions are counted from the one after the padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, and afterwards all as it was."""
    awake = [module for module in model.modules() if module.training]
    for module in awake:
        module.training = False
    try:
        yield
    finally:
        for module in awake:
            module.training = True


def _is_ignored_key(key: str) -> bool:
    return key in _IGNORED_KEYS or "attn_implementation" in key


def _one_line(error: Exception | None) -> str:
    return " ".join(str(error).split()) or type(error).__name__
