"""Folders of the transformers library: masked LMs, and causal LMs converted to bidirectional attention.

Their `config.json` has a `model_type` that transformers knows. Settings that it has no keys for (the mask id,
the visibility of the future, the objective) are under the key `unmask`, which other programs ignore.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmask.backbones.hf import HFBackbone, HFBackboneConfig, import_transformers
from unmask.config import from_json, to_json
from unmask.data.tokenizers import BaseTokenizer
from unmask.io.errors import first_line, silenced_loggers
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM, Objective
from unmask.pretrained.state_dict import LazyTensor, unique_tensors
from unmask.types import Vocab

_UNMASK_KEY = "unmask"
_COUNT_KEYS = re.compile(r"(n|num|encoder|decoder)_(\w+_)?(layers?|blocks|stages|groups|experts)|depth|layers")
"""Config keys that count the parts of a network."""
_MAX_SHARED_LAYERS = 64
"""Layers that are accepted even with fewer tensors: layers may share weights, as in ALBERT."""
_MAX_CONFIG_INT = 1 << 24
"""The largest size in a config; the longest published context is ten million tokens."""
_MAX_ADDED_TOKENS = 1024
"""Tokens, such as the mask, that may be added to a network's vocabulary."""
_EPS_KEYS = re.compile(r"norm\w*_eps")
"""Config keys of the epsilon of a norm."""


def can_load(config: dict[str, Any]) -> bool:
    """Whether the installed transformers knows the network of this config."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in import_transformers().CONFIG_MAPPING


def written_by_unmask(config: dict[str, Any]) -> bool:
    """Whether `export_state` wrote it."""
    return isinstance(config.get(_UNMASK_KEY), dict) and isinstance(config.get("model_type"), str)


def can_export(model: LanguageModel) -> bool:
    """Whether the network is one of transformers."""
    return isinstance(model.denoiser.config.backbone, HFBackboneConfig)


def load(
    folder: Path,
    config: dict[str, Any],
    tensors: Mapping[str, LazyTensor],
    tokenizer: BaseTokenizer | None,
    folder_tokenizer: tuple[BaseTokenizer | None, int | None],
    require_head: bool = True,
) -> LanguageModel:
    """A model of transformers from its folder; causal ones get the future visibility of the config, or all of it.

    `folder_tokenizer` is the result of `load_tokenizer`. Without `require_head`, a missing head is a new one.
    """
    own_tokenizer, mask_id = folder_tokenizer
    unmask_config = config[_UNMASK_KEY] if written_by_unmask(config) else {}
    with translated_errors(str(folder)):
        weights = {name: tensor.view() for name, tensor in tensors.items()}
        network = _load_network(config, weights, str(folder), require_head)
    mask_id = _get_token_id(config, "mask_token_id", mask_id)
    return language_model_from_hf(network, tokenizer or own_tokenizer, mask_id, unmask_config, str(folder))


def validate_config(
    config: dict[str, Any], stored: Mapping[str, LazyTensor], tokenizer: BaseTokenizer | None, where: str
) -> None:
    """Refuse a config that does not fit the stored tensors or the tokenizer, before the network is built."""
    _check_config_ints(config, len(stored), where)
    size, rows = (
        config.get("vocab_size"),
        max((len(each) for each in stored.values() if each.shape), default=0),
    )
    if type(size) is int and size > rows:
        raise ValueError(f"{where}: config.json asks for {size:,} tokens, but no tensor has as many rows")
    if tokenizer is not None and type(size) is int and tokenizer.vocab_size > size + _MAX_ADDED_TOKENS:
        raise ValueError(
            f"{where}: the tokenizer has {tokenizer.vocab_size:,} ids but the model only {size:,}:"
            " they do not belong together"
        )
    with translated_errors(where), torch.device("meta"):
        hf_config = _to_transformers_config(config)
        network = getattr(import_transformers(), _model_class_name(config, where))._from_config(hf_config)
    _check_num_weights(network, stored, where)


def meta_shapes(
    backbone: HFBackboneConfig, vocab: Vocab, stored: Mapping[str, LazyTensor], where: str
) -> dict[str, torch.Size]:
    """The shapes of a network's tensors in our format, without allocating them."""
    _check_config_ints(backbone.parsed, len(stored), where)
    with translated_errors(where), torch.device("meta"):
        network = backbone.build(vocab)
    return {name: each.shape for name, each in unique_tensors(network.state_dict(keep_vars=True)).items()}


def _check_config_ints(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Refuse numbers too large for so many tensors: transformers allocates lists of such lengths."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_config_ints(value, tensors, where)
        if type(value) is int and _COUNT_KEYS.fullmatch(key) and value > max(tensors, _MAX_SHARED_LAYERS):
            raise ValueError(
                f"{where}: config.json asks for {key} = {value:,}, but the weights have only {tensors:,} tensors"
            )
        if type(value) is int and abs(value) > _MAX_CONFIG_INT and "theta" not in key and "base" not in key:
            raise ValueError(f"{where}: config.json has {key} = {value:,}, which is more than any network has")
        if _EPS_KEYS.search(key) and type(value) in (int, float) and not 0 < value < 1:
            raise ValueError(f"{where}: config.json has {key} = {value}, which must be above 0 and below 1")


def _check_num_weights(network: Any, stored: Mapping[str, LazyTensor], where: str) -> None:
    expected = sum(each.numel() for each in unique_tensors(dict(network.named_parameters())).values())
    present = sum(each.numel() for each in stored.values())
    if expected > 2 * present:  # smaller differences are reported by name after loading
        raise ValueError(f"{where}: config.json asks for {expected:,} weights, but the files hold {present:,}")


def export_state(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and tensors as transformers reads them: the inverse of `load`."""
    config, backbone = model.denoiser.config, model.denoiser.backbone
    assert isinstance(config.backbone, HFBackboneConfig)
    assert isinstance(backbone, HFBackbone)
    exported = config.backbone.parsed | {
        "architectures": [type(backbone.model).__name__],
        "vocab_size": config.vocab.size,
        "dtype": str(backbone.lm_head.weight.dtype).removeprefix("torch."),
        _UNMASK_KEY: {
            "vocab": to_json(config.vocab),
            "future_visibility": config.backbone.future_visibility,
            "max_length": config.backbone.max_length,
            "objective": to_json(config.objective),
        },
    }
    state = dict(backbone.model.state_dict())
    state |= {f"{backbone.lm_head_name}.{name}": tensor for name, tensor in backbone.lm_head.state_dict().items()}
    return exported, unique_tensors(state)


def _load_network(config: dict[str, Any], weights: dict[str, Tensor], where: str, require_head: bool) -> Any:
    library = import_transformers()
    network, report = getattr(library, _model_class_name(config, where)).from_pretrained(
        None,
        config=_to_transformers_config(config),
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation=None,  # never a kernel that the config names, which would be downloaded
        output_loading_info=True,
    )
    check_loading_report(report, where, "" if require_head else f"{network.base_model_prefix}.")
    return network


def _to_transformers_config(config: dict[str, Any]) -> Any:
    """The config object of transformers."""
    known = {key: value for key, value in config.items() if key not in (_UNMASK_KEY, "auto_map")}
    return import_transformers().CONFIG_MAPPING[config["model_type"]].from_dict(known)


def _model_class_name(config: dict[str, Any], where: str) -> str:
    """The class of the masked or causal LM: the config's `architectures`, or the default of its type."""
    if any(config.get(key) for key in ("is_encoder_decoder", "quantization_config")):
        raise ValueError(f"{where} is an encoder-decoder or quantized network, which is not supported")
    from transformers.models.auto import modeling_auto

    kind, architectures = config["model_type"], set(config.get("architectures") or ())
    tables = (
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    names = [str(table[kind]) for table in tables if kind in table]
    if not names:
        raise ValueError(f"{where} is a {kind!r}: transformers has neither a masked nor a causal LM of it")
    return next((name for name in names if name in architectures), names[0])


def check_loading_report(report: dict[str, Any], where: str, prefix: str = "") -> None:
    """Refuse missing weights, which transformers would initialize at random: all whose names begin with `prefix`."""
    missing = sorted(name for name in map(str, report["missing_keys"]) if name.startswith(prefix))
    missing += sorted(map(str, report["mismatched_keys"]))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{where} lacks weights that its config asks for: {missing[0]}{more}")


def language_model_from_hf(
    network: Any, tokenizer: BaseTokenizer | None, mask_id: int | None, unmask_config: dict[str, Any], where: str
) -> LanguageModel:
    """A loaded network as a model; `unmask_config` is our part of its config, empty if others wrote it."""
    causal = type(network).__name__ in _causal_lm_classes()
    future_visibility = unmask_config.get("future_visibility", 1.0 if causal else None)
    objective: Objective = MDLM()
    size = network.get_input_embeddings().num_embeddings
    if unmask_config:
        vocab: Vocab = from_json(Vocab, unmask_config.get("vocab"), f"{where}: config.json's {_UNMASK_KEY}.vocab")
        objective = from_json(
            Objective, unmask_config.get("objective"), f"{where}: config.json's {_UNMASK_KEY}.objective"
        )
    else:
        mask_id = size if mask_id is None else mask_id
        eos_ids = network.config.get_text_config().eos_token_id if causal else None
        eos_id = next((i for i in (eos_ids if isinstance(eos_ids, list) else [eos_ids]) if isinstance(i, int)), -1)
        vocab = Vocab(max(size, mask_id + 1), mask_id, eos_id if 0 <= eos_id < size and eos_id != mask_id else None)
    if vocab.size > size + _MAX_ADDED_TOKENS:
        raise ValueError(
            f"{where}: config.json asks for a vocabulary of {vocab.size:,} ids, but the network has {size:,}"
        )
    _resize_embeddings(network, vocab.size)
    backbone = HFBackboneConfig.from_hf(network.config, future_visibility, unmask_config.get("max_length"))
    denoiser = ModelConfig(vocab, backbone, objective).build()
    denoiser.backbone.load_state_dict(HFBackbone(backbone, network).state_dict())
    return LanguageModel(denoiser.eval(), tokenizer)


@torch.no_grad()
def _resize_embeddings(network: Any, size: int) -> None:
    """Grow the embedding to `size` tokens; new ones, such as the mask, start as the mean of the others."""
    old = network.get_input_embeddings().num_embeddings
    if size <= old:
        return
    network.resize_token_embeddings(size, mean_resizing=False)
    grown: list[Any] = [network.get_input_embeddings(), network.get_output_embeddings()]
    for tensor in {id(table.weight): table.weight for table in grown}.values():
        tensor[old:] = tensor[:old].mean(0)
    bias = getattr(grown[1], "bias", None)
    if isinstance(bias, nn.Parameter):
        bias[old:] = bias[:old].mean()


def _causal_lm_classes() -> set[str]:
    from transformers.models.auto import modeling_auto

    return set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def _get_token_id(config: dict[str, Any], key: str, default: int | None) -> int | None:
    value = config.get(key)
    return value if type(value) is int and value >= 0 else default


@contextlib.contextmanager
def translated_errors(where: str) -> Iterator[None]:
    """Silence progress bars and warnings of transformers, and turn its errors into one sentence."""
    try:
        with silenced_loggers("transformers", "huggingface_hub"), contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # of many types
        if isinstance(error, ValueError) and where in str(error):
            raise
        raise ValueError(f"{where} cannot be read by transformers: {first_line(error)}") from None
