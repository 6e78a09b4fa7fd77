"""Networks of the transformers library: masked LMs as they are, causal LMs with their attention opened.

The library is asked for hidden states only. Its output matrix is taken out of the network, where a
pass-through stands from then on, and becomes the head, which is asked at chosen rows as any other.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from unmask.backbones.base import Backbone
from unmask.backbones.masks import Beside, Order, Sight, sight
from unmask.backbones.opened import Held, masks
from unmask.types import Rows, Times, Tokens, Vocab
from unmask.untrusted import parse_json

PASSING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "auto_map", "use_cache")
"""What a config says of the file that it came from, and not of the network."""


@dataclass(frozen=True)
class HuggingFace:
    """A network of the transformers library; `config` is its own config, as JSON text.

    `opened` is None for networks that look to both sides by birth. Those that are causal by birth look at a
    share `opened` of what follows, from 0, the causal network, to 1, an open one, and still predict a token
    where the one before it is read. `length` None is the longest text that the network was made for.
    """

    config: str
    opened: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.stated.get("model_type"), str):
            raise ValueError(
                'config must be the JSON of a network of transformers with its "model_type", as in'
                f' {{"model_type": "bert"}}; got {self.config[:60]!r}'
            )
        if self.opened is not None and not 0 <= self.opened <= 1:
            raise ValueError(f"opened must be in [0, 1], 0 for causal and 1 for open; got {self.opened}")
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be at least 1; got {self.length}")

    @classmethod
    def of(cls, config: Any, opened: float | None = None, length: int | None = None) -> HuggingFace:
        """From a config object of transformers."""
        stated = {key: value for key, value in config.to_dict().items() if not _is_passing(key)}
        return cls(json.dumps(stated, sort_keys=True), opened, length)

    @property
    def stated(self) -> dict[str, Any]:
        """What `config` says."""
        try:
            stated = parse_json(self.config.encode(), "config")
        except ValueError:
            stated = None
        return stated if isinstance(stated, dict) else {}

    @property
    def shifted(self) -> bool:
        """Whether a token is predicted where the one before it is read."""
        return self.opened is not None

    def build(self, vocab: Vocab) -> Network:
        """A network with fresh weights."""
        return Network(self, self._fresh(vocab))

    def _fresh(self, vocab: Vocab) -> Any:
        library = transformers()
        kind, stated = self.stated["model_type"], self.stated | {"vocab_size": vocab.size}
        if kind not in library.CONFIG_MAPPING:
            raise ValueError(f"the installed transformers has no network of the model_type {kind!r}")
        if isinstance(stated.get("pad_token_id"), int) and stated["pad_token_id"] >= vocab.size:
            stated["pad_token_id"] = None
        head = library.AutoModelForMaskedLM if self.opened is None else library.AutoModelForCausalLM
        said = {key: value for key, value in stated.items() if not _is_passing(key)}
        reason: Exception | None = None
        for attention in ("sdpa", "eager"):  # some have no other than the second
            try:
                config = library.CONFIG_MAPPING[kind].from_dict(said)
                return head.from_config(
                    config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
                )
            except Exception as error:  # of many kinds, as transformers finds them
                reason = reason or error
        what = "masked" if self.opened is None else "causal"
        raise ValueError(f"transformers cannot build a {what} language model of {kind!r}: {_line(reason)}")


def transformers() -> Any:
    """The library, which is loaded only where a network of it is wanted."""
    if find_spec("transformers") is None:
        raise ValueError("networks of Hugging Face need the extra hf: pip install 'unmask[hf]'")
    import transformers

    return transformers


class Network(Backbone):
    """The network of `HuggingFace`, made from one of transformers, which it takes apart."""

    def __init__(self, config: HuggingFace, network: Any) -> None:
        super().__init__()
        self.config = config
        self.causal, self.timed, self.shifted = False, False, config.shifted
        self.opened = config.opened
        """A training may open it step by step, up to what the config says."""
        self.head_name = _head_name(network)
        output = network.get_submodule(self.head_name)
        network.set_submodule(self.head_name, PassThrough())
        self.network, self.output = network, output
        self.before_first = _positions_before_first(network)
        self.max_length = self._longest()
        self._obeys: bool | None = None
        self._accepted = frozenset(inspect.signature(network.forward).parameters)
        self._check_head()

    @property
    def recompute(self) -> bool:
        """Whether blocks are computed again in the backward pass, by the library's own means."""
        return bool(self.network.is_gradient_checkpointing)

    @recompute.setter
    def recompute(self, wanted: bool) -> None:
        if wanted and not self.network.supports_gradient_checkpointing:
            raise ValueError(f"{self._kind} cannot recompute its blocks; leave out recompute")
        if wanted:
            self.network.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.network.gradient_checkpointing_disable()

    def encode(
        self,
        tokens: Tokens,
        t: Times,
        rows: Rows | None = None,
        *,
        valid: Tensor | None = None,
        documents: Tensor | None = None,
        order: Order | None = None,
        beside: Beside | None = None,
    ) -> Tensor:
        context: dict[str, Any] = {"valid": valid, "documents": documents, "order": order, "beside": beside}
        view = sight(tokens.shape[1], tokens.device, causal=False, **context)
        plain = self.opened is None and documents is None and order is None and beside is None
        hidden = self._hidden(tokens, view, _flat(tokens, valid) if plain else self._masks(view), beside)
        if not self.shifted:
            return hidden if rows is None else hidden[rows]
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        there, taken = view.before(rows if isinstance(rows, Tensor) else everywhere)
        hidden = hidden[there][taken]
        if isinstance(rows, Tensor):
            return hidden
        hidden = hidden.view(*tokens.shape, -1)
        return hidden if rows is None else hidden[rows]

    def _hidden(self, tokens: Tokens, view: Sight, mask: Any, beside: Beside | None = None) -> Tensor:
        """What the head would read [B, n, width]."""
        if beside is not None and self.opened is None:
            raise ValueError(f"{self._kind} keeps no keys and values: it cannot read beside a cache")
        asked: dict[str, Any] = {"attention_mask": mask, "return_dict": True}
        if "use_cache" in self._accepted:
            asked["use_cache"] = False
        if beside is not None:
            asked["past_key_values"] = Held(beside)
        asked |= self._positions(tokens, view)
        hidden: Tensor = self.network(input_ids=tokens, **asked).logits
        return hidden.to(self.output.weight.dtype)  # products of 16 bits may have been asked for

    def _positions(self, tokens: Tokens, view: Sight) -> dict[str, Tensor]:
        position = view.position.expand(tokens.shape)
        if "position_ids" in self._accepted:
            if self.max_length is not None and int(position.max()) >= self.max_length:
                raise ValueError(
                    f"a token at place {int(position.max())} is beyond the network's {self.max_length}"
                )
            return {"position_ids": position + self.before_first}
        if not torch.equal(position, torch.arange(tokens.shape[1], device=tokens.device).expand_as(position)):
            raise ValueError(
                f"{self._kind} cannot be told where a token stands: texts must begin at the first place"
            )
        return {}

    def _masks(self, view: Sight) -> Any:
        if self._obeys is None:
            self._obeys = self._tried()
        if not self._obeys:
            raise ValueError(
                f"{self._kind} does not obey masks of who sees whom: it can be given neither documents nor"
                " blocks, and cannot be opened"
            )
        return masks(view, self.opened, self.network)

    @torch.no_grad()
    def _tried(self) -> bool:
        """Whether it looks at what a mask shows and at nothing else: a trial with three tokens."""
        device = self.output.weight.device
        pair, place = torch.tensor([[0, 0, 0], [0, 0, 1]], device=device), torch.arange(3, device=device)
        changes = []
        for stages in ([0, 0, 0], [0, 0, 1]):  # the last token is seen by the others, and is not
            order = Order(torch.tensor(stages, device=device), place < 3, place)
            view = sight(3, device, causal=False, order=order)
            mask = masks(view, None if self.opened is None else 1.0, self.network)
            try:
                with _asleep(self.network):
                    hidden = self._hidden(pair, view, mask)[:, :2]
            except Exception:  # however it fails on such a mask
                return False
            if bool(hidden.isnan().any()):  # damaged weights are found out elsewhere
                return True
            changes.append(float((hidden[0] - hidden[1]).abs().max()) / max(float(hidden.abs().max()), 1e-30))
        return changes[0] > 1e-6 > changes[1]

    @torch.no_grad()
    def _check_head(self) -> None:
        """What the head says must be what the network says: refuse those that change their logits then."""
        if self.output.weight.device.type == "meta":
            return
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.output.weight.device)
        said = torch.linspace(-100, 100, 2 * self.output.in_features, device=tokens.device).view(1, 2, -1)
        passing = self.network.get_submodule(self.head_name)
        handle = passing.register_forward_hook(lambda *_: said)
        try:
            with _asleep(self.network):
                heard = self.network(input_ids=tokens, return_dict=True).logits
            same = torch.equal(heard, said)
        except Exception as error:  # a head that is used otherwise than called
            raise ValueError(
                f"{self._kind} uses its output matrix in a way of its own: {_line(error)}"
            ) from None
        finally:
            handle.remove()
        if not same:
            raise ValueError(
                f"{self._kind} changes its logits after the output matrix, which is not known here"
            )

    def _longest(self) -> int | None:
        own = getattr(self._text_config, "max_position_embeddings", None)
        own = own - self.before_first if isinstance(own, int) and own > 0 else None
        if own is not None and (self.config.length or 0) > own:
            raise ValueError(f"length {self.config.length} is longer than the network's {own}")
        return self.config.length or own

    @torch.no_grad()
    def expect(self, logits: Tensor) -> None:
        if self.output.bias is None:
            raise ValueError("a head without a bias cannot begin with frequencies; set unigram_start=false")
        self.output.bias.copy_(logits)

    @property
    def _text_config(self) -> Any:
        return self.network.config.get_text_config()

    @property
    def _kind(self) -> str:
        return type(self.network).__name__


class PassThrough(nn.Module):
    """Stands where a network had its head, and hands on what the head would have read."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def _flat(tokens: Tokens, valid: Tensor | None) -> Tensor:
    return torch.ones_like(tokens) if valid is None else valid.long()


def _head_name(network: Any) -> str:
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{type(network).__name__} has no output matrix of its own, which a head needs;"
            f" it has {type(head).__name__}"
        )
    return str(next(name for name, module in network.named_modules() if module is head))


def _positions_before_first(network: nn.Module) -> int:
    """Of RoBERTa's kind, whose positions are counted from the one after the padding's."""
    for name, module in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


@contextmanager
def _asleep(network: nn.Module) -> Iterator[None]:
    """No dropout, and afterwards all as it was."""
    awake = [module for module in network.modules() if module.training]
    for module in awake:
        module.training = False
    try:
        yield
    finally:
        for module in awake:
            module.training = True


def _is_passing(key: str) -> bool:
    return key in PASSING or "attn_implementation" in key


def _line(error: Exception | None) -> str:
    return " ".join(str(error).split()) or type(error).__name__
