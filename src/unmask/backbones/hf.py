"""Networks of the transformers library: masked LMs as they are, causal LMs with bidirectional attention.

transformers computes hidden states only: the output matrix is replaced by an identity in its network, and becomes
the `lm_head` of the backbone, which is evaluated at queried positions only.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from unmask.backbones._hf_attention import HFCacheAdapter, hf_attention_mask
from unmask.backbones.attention_mask import AttentionLayout, attention_layout
from unmask.backbones.base import Backbone, BackboneConfig, Capabilities
from unmask.backbones.cache import KVCache, KVCacheView, kv_view
from unmask.context import AttentionStages, Context
from unmask.io.errors import first_line
from unmask.io.untrusted import parse_json
from unmask.types import Positions, Queries, Times, Tokens, Vocab

_IGNORED_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "auto_map", "use_cache")
"""Config keys about the file that a config came from, not about the network."""


@dataclass(frozen=True)
class HFBackboneConfig(BackboneConfig):
    """A network of the transformers library; `config` is its own config, as JSON text.

    A masked LM is taken as it is. A causal LM attends to a fraction `future_visibility` of the later tokens,
    and still predicts a token at the position before it.
    """

    needs_weights = True

    config: str
    """The config of transformers, as JSON text."""
    future_visibility: float | None = None
    """None for a masked LM; for a causal LM the fraction of later tokens it attends to, 0 (causal) to 1 (all)."""
    max_length: int | None = None
    """The longest sequence; None for the network's own limit."""

    def __post_init__(self) -> None:
        if not isinstance(self.parsed.get("model_type"), str):
            raise ValueError(
                'config must be the JSON of a network of transformers with its "model_type", as in'
                f' {{"model_type": "bert"}}; got {self.config[:60]!r}'
            )
        if self.future_visibility is not None and not 0 <= self.future_visibility <= 1:
            raise ValueError(
                f"future_visibility must be in [0, 1], 0 is causal, 1 bidirectional; got {self.future_visibility}"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length must be at least 1; got {self.max_length}")

    @classmethod
    def from_hf(
        cls, config: Any, future_visibility: float | None = None, max_length: int | None = None
    ) -> HFBackboneConfig:
        """From a config object of transformers."""
        kept = {key: value for key, value in config.to_dict().items() if not _is_ignored_key(key)}
        return cls(json.dumps(kept, sort_keys=True), future_visibility, max_length)

    @property
    def parsed(self) -> dict[str, Any]:
        """`config` as a dictionary; empty if it is not a JSON object."""
        try:
            parsed = parse_json(self.config.encode(), "config")
        except ValueError:
            parsed = None
        return parsed if isinstance(parsed, dict) else {}

    @property
    def shift_logits(self) -> bool:
        """Whether a token is predicted at the position before it."""
        return self.future_visibility is not None

    def build(self, vocab: Vocab) -> HFBackbone:
        return HFBackbone(self, self._build_hf_model(vocab))

    def _build_hf_model(self, vocab: Vocab) -> Any:
        library = import_transformers()
        kind, settings = self.parsed["model_type"], self.parsed | {"vocab_size": vocab.size}
        if kind not in library.CONFIG_MAPPING:
            raise ValueError(f"the installed transformers has no network of the model_type {kind!r}")
        if isinstance(settings.get("pad_token_id"), int) and settings["pad_token_id"] >= vocab.size:
            settings["pad_token_id"] = None
        head = library.AutoModelForMaskedLM if self.future_visibility is None else library.AutoModelForCausalLM
        settings = {key: value for key, value in settings.items() if not _is_ignored_key(key)}
        errors: list[Exception] = []
        for attention in ("sdpa", "eager"):  # some networks have eager attention only
            try:
                config = library.CONFIG_MAPPING[kind].from_dict(settings)
                return head.from_config(
                    config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
                )
            except Exception as error:  # transformers raises many types
                errors.append(error)
        what = "masked" if self.future_visibility is None else "causal"
        raise ValueError(f"transformers cannot build a {what} language model of {kind!r}: {first_line(errors[0])}")


def import_transformers() -> Any:
    """The transformers library, imported only when one of its networks is used."""
    if find_spec("transformers") is None:
        raise ValueError("networks of transformers need the extra hf: pip install 'unmask[hf]'")
    import transformers

    return transformers


class HFBackbone(Backbone):
    """The network of `HFBackboneConfig`; it takes over `model`, and replaces its output matrix."""

    def __init__(self, config: HFBackboneConfig, model: Any) -> None:
        super().__init__()
        self.config = config
        self.future_visibility = config.future_visibility
        """The current value: attention annealing raises it during training, up to the config's."""
        self.lm_head_name = _find_lm_head(model)
        output = model.get_submodule(self.lm_head_name)
        model.set_submodule(self.lm_head_name, _PassThrough())
        self.model, self.lm_head = model, output
        self.position_offset = _find_position_offset(model)
        self._max_length = self._resolve_max_length()
        self._respects_mask: bool | None = None
        self._forward_params = frozenset(inspect.signature(model.forward).parameters)
        # ESM's token dropout rescales embeddings by the number of mask ids, so it needs the ids.
        needs_ids = getattr(self._text_config, "token_dropout", False)
        self._takes_embeddings = "inputs_embeds" in self._forward_params and not needs_ids
        self._check_head()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are recomputed in the backward pass, by transformers' own implementation."""
        return bool(self.model.is_gradient_checkpointing)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        if enabled and not self.model.supports_gradient_checkpointing:
            raise ValueError(
                f"{self._model_class} does not support gradient checkpointing; leave out gradient_checkpointing"
            )
        if enabled:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    @property
    def capabilities(self) -> Capabilities:
        """Stages and documents need a network that respects attention masks, which is checked at their first use."""
        return Capabilities(
            self._max_length,
            shift_logits=self.config.shift_logits,
            supports_stages=True,
            supports_documents=True,
            supports_cache=self.future_visibility is not None,
            supports_segments="token_type_ids" in self._forward_params and self._num_segments > 1,
            parses_special_tokens=True,
        )

    def blocks(self) -> Sequence[nn.Module]:
        return _find_blocks(self.model)

    def describe(self) -> dict[str, Any]:
        visibility = self.config.future_visibility
        attention = "" if visibility is None else f", attending to {visibility:.0%} of later tokens"
        return {"network": f"{self.config.parsed['model_type']} of the transformers library{attention}"}

    def new_cache(self) -> KVCache:
        if self.future_visibility is None:
            raise ValueError(f"{self._model_class} has no KV cache; sample without a cache")
        return KVCache()

    def embed(self, tokens: Tokens) -> Tensor:
        """The network's token embeddings; the ids themselves if it needs them elsewhere, too."""
        if not self._takes_embeddings:
            return tokens
        embeddings: Tensor = self.model.get_input_embeddings()(tokens)
        return embeddings

    def encode(self, h: Tensor, t: Times, positions: Positions | None = None, context: Context = Context()) -> Tensor:
        shape = h.shape[:2]
        attn, mask = self._attention(h, context)
        hidden = self._hidden_states(h, attn, mask, kv_view(context), context.segment_ids)
        if not self.config.shift_logits:
            return hidden if positions is None else hidden[positions]
        queries, order = Queries.resolve(Queries.everywhere(shape, h.device) if positions is None else positions, shape)
        hidden = hidden[queries[0], attn.shifted(queries)]
        if order is not None:
            hidden = hidden[order]
        return hidden.view(*shape, -1) if positions is None else hidden

    def features(self, h: Tensor, t: Times, context: Context = Context()) -> Tensor:
        """The last hidden states of the network without its head: BERT's before the transform of its predictions."""
        attn, mask = self._attention(h, context)
        hidden: Tensor = self.model.base_model(**self._inputs(h, attn, mask, None, context.segment_ids))[0]
        return hidden.to(self.lm_head.weight.dtype)

    def _attention(self, h: Tensor, context: Context) -> tuple[AttentionLayout, Any]:
        """Positions, and the mask that transformers takes."""
        attn = attention_layout(h.shape[1], h.device, causal=False, context=context)
        others = replace(context, valid=None, valid_on_host=None, segment_ids=None)
        plain = self.future_visibility is None and others.is_empty
        return attn, _padding_mask(h, context.valid) if plain else self._attention_mask(attn)

    def _hidden_states(
        self,
        h: Tensor,
        attn: AttentionLayout,
        mask: Any,
        cache: KVCacheView | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """The input of the output head, [B, n, width]."""
        if cache is not None and self.future_visibility is None:
            raise ValueError(f"{self._model_class} has no KV cache; call it without a cache")
        hidden: Tensor = self.model(**self._inputs(h, attn, mask, cache, segment_ids)).logits
        return hidden.to(self.lm_head.weight.dtype)  # autocast may have made it bfloat16

    def _inputs(
        self, h: Tensor, attn: AttentionLayout, mask: Any, cache: KVCacheView | None, segment_ids: Tensor | None
    ) -> dict[str, Any]:
        """The keyword arguments for the network's `forward`."""
        options: dict[str, Any] = {"attention_mask": mask, "return_dict": True}
        if "use_cache" in self._forward_params:
            options["use_cache"] = False
        if cache is not None:
            options["past_key_values"] = HFCacheAdapter(cache)
        if segment_ids is not None:
            options["token_type_ids"] = segment_ids
        options |= self._position_args(h, attn)
        options["inputs_embeds" if h.ndim == 3 else "input_ids"] = h
        return options

    def _position_args(self, h: Tensor, attn: AttentionLayout) -> dict[str, Tensor]:
        position = attn.position_ids.expand(h.shape[:2])
        if "position_ids" in self._forward_params:
            last = attn.last_position
            if self._max_length is not None and last >= self._max_length:
                raise ValueError(
                    f"a token at position {last} is beyond the network's maximum length of {self._max_length}"
                )
            return {"position_ids": position + self.position_offset}
        if attn.first_position != 0 or attn.position_ids.ndim == 2:
            raise ValueError(f"{self._model_class} does not take position_ids, so texts must begin at position 0")
        return {}

    def _attention_mask(self, context: AttentionLayout) -> Any:
        if self._respects_mask is None:
            self._respects_mask = self._probe_mask()
        if not self._respects_mask:
            raise ValueError(
                f"{self._model_class} does not respect attention masks, so it cannot be used with documents, blocks or"
                " future_visibility"
            )
        return hf_attention_mask(context, self.future_visibility, self.model)

    @torch.no_grad()
    def _probe_mask(self) -> bool:
        """Whether the output depends on exactly the tokens that an attention mask allows, tried with three tokens.

        Two texts that differ in the last are read one by one: rows of one call are rounded differently where threads
        share them.
        """
        device = self.lm_head.weight.device
        pair, position = torch.tensor([[0, 0, 0], [0, 0, 1]], device=device), torch.arange(3, device=device)
        changes = []
        for ids in ([0, 0, 0], [0, 0, 1]):  # the others attend to the last token, then do not
            stages = AttentionStages(
                torch.tensor(ids, device=device), position < 3, position, 0, num_positions=3, single_stage=ids[-1] == 0
            )
            layout = attention_layout(3, device, causal=False, context=Context(stages=stages))
            mask = hf_attention_mask(layout, None if self.future_visibility is None else 1.0, self.model)
            try:
                with _eval_mode(self.model):
                    hidden = torch.cat([self._hidden_states(self.embed(z[None]), layout, mask)[:, :2] for z in pair])
            except Exception:  # however the network fails on such a mask
                return False
            if bool(hidden.isnan().any()):  # damaged weights are reported elsewhere
                return True
            changes.append(float((hidden[0] - hidden[1]).abs().max()) / max(float(hidden.abs().max()), 1e-30))
        return changes[0] > 1e-6 and changes[1] < 0.01 * changes[0]

    @torch.no_grad()
    def _check_head(self) -> None:
        """ValueError if the network changes its logits after the output matrix, which `lm_head` could not do."""
        if self.lm_head.weight.device.type == "meta":
            return
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.lm_head.weight.device)
        expected = torch.linspace(-100, 100, 2 * self.lm_head.in_features, device=tokens.device).view(1, 2, -1)
        identity = self.model.get_submodule(self.lm_head_name)
        handle = identity.register_forward_hook(lambda *_: expected)
        try:
            with _eval_mode(self.model):
                logits = self.model(input_ids=tokens, return_dict=True).logits
            same = torch.equal(logits, expected)
        except Exception as error:  # a network that uses its head otherwise than by calling it
            raise ValueError(
                f"{self._model_class} is not supported: its output matrix is not a plain layer: {first_line(error)}"
            ) from None
        finally:
            handle.remove()
        if not same:
            raise ValueError(f"{self._model_class} is not supported: it changes its logits after the output matrix")

    def _resolve_max_length(self) -> int | None:
        own = getattr(self._text_config, "max_position_embeddings", None)
        own = own - self.position_offset if isinstance(own, int) and own > 0 else None
        if own is not None and (self.config.max_length or 0) > own:
            raise ValueError(f"max_length {self.config.max_length} is longer than the network's maximum of {own}")
        return self.config.max_length or own

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def _num_segments(self) -> int:
        return getattr(self._text_config, "type_vocab_size", None) or 0

    @property
    def _model_class(self) -> str:
        return type(self.model).__name__


class _PassThrough(nn.Module):
    """An identity in place of the output head."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def _padding_mask(h: Tensor, valid: Tensor | None) -> Tensor:
    return torch.ones(h.shape[:2], dtype=torch.int64, device=h.device) if valid is None else valid.long()


def _find_blocks(model: nn.Module) -> list[nn.Module]:
    """The network's repeated layers: the largest list of modules of one class, or else the first one."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    alike: list[nn.ModuleList] = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    if not alike:
        return []
    return [*max(alike, key=_num_parameters)]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _find_lm_head(model: Any) -> str:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"the output head of {type(model).__name__} must be a linear layer; got {type(head).__name__}")
    return str(next(name for name, module in model.named_modules() if module is head))


def _find_position_offset(model: nn.Module) -> int:
    """The id of the first position: 0, or the one after the padding index in RoBERTa and its relatives."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without dropout; afterwards the modules' modes are restored."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _is_ignored_key(key: str) -> bool:
    return key in _IGNORED_KEYS or "attn_implementation" in key
