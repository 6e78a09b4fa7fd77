"""Models in the layout of the transformers library: masked LMs as they are, causal LMs with opened eyes.

Their `config.json` has a `model_type` that transformers knows. What it has no words for (which id is the
mask, how far a causal network is opened, the objective) stands under the name `unmask`, which others ignore.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmask.backbones.hf import HFBackbone, HFBackboneConfig, import_transformers
from unmask.config import from_json, to_json
from unmask.data.tokenizers import Tokenizer
from unmask.io.untrusted import read_json_object
from unmask.model import LanguageModel, ModelConfig
from unmask.objectives import MDLM, AnyObjective
from unmask.pretrained.state_dict import read_state_dict, unique_tensors
from unmask.types import Vocab

_UNMASK_KEY = "unmask"
_TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_TOKENIZER_SOURCES = ("vocab.txt", "vocab.json", "*.model", "sentencepiece*")
"""Files that transformers can make a tokenizer of."""
_SPECIAL_TOKENS = {
    "mask_token": ("[MASK]", "<mask>", "<|mask|>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "pad_token": ("[PAD]", "<pad>"),
    "bos_token": ("<s>", "<bos>"),
    "eos_token": ("</s>", "<eos>", "<|endoftext|>"),
}
"""What published vocabularies call their special tokens."""

_COUNT_KEYS = re.compile(r"(n|num|encoder|decoder)_(\w+_)?(layers?|blocks|stages|groups|experts)|depth|layers")
"""What configs call the number of parts that a network is made of."""
_MAX_SHARED_LAYERS = 64
"""So many are believed of a network with fewer tensors: they may share them, as ALBERT's do."""
_MAX_CONFIG_INT = 1 << 24
"""Of any size of a network: the longest that is published reads ten million tokens."""
_MAX_ADDED_TOKENS = 1024
"""Tokens, such as the mask, that a network may be given beyond its own."""
_EPS_KEYS = re.compile(r"norm\w*_eps")
"""What configs call the number that keeps a norm from dividing by zero."""


def can_load(config: dict[str, Any]) -> bool:
    """Whether this is the config of a network that the installed transformers knows."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in import_transformers().CONFIG_MAPPING


def written_by_unmask(config: dict[str, Any]) -> bool:
    """Whether `write` made it."""
    return isinstance(config.get(_UNMASK_KEY), dict) and isinstance(config.get("model_type"), str)


def can_export(model: LanguageModel) -> bool:
    """Whether this is the layout of such a model."""
    return isinstance(model.denoiser.config.backbone, HFBackboneConfig)


def load(
    folder: Path,
    config: dict[str, Any],
    tokenizer: Tokenizer | None,
    folder_tokenizer: tuple[Tokenizer | None, int | None],
) -> LanguageModel:
    """A model of transformers from its folder; causal ones are opened, as far as the config says or all.

    `found` is what `read_tokenizer` says of the folder.
    """
    own, mask = folder_tokenizer
    said = config.get(_UNMASK_KEY) if written_by_unmask(config) else {}
    with _translated_errors(str(folder)):
        network = _load_network(config, read_state_dict(folder), str(folder))
    return _build_language_model(
        network, tokenizer or own, _get_token_id(config, "mask_token_id", mask), said or {}, str(folder)
    )


def validate_config(
    config: dict[str, Any], stored: Mapping[str, Tensor], tokenizer: Tokenizer | None, where: str
) -> None:
    """Refuse a config whose network is not that of the stored tensors, or of the tokenizer, unbuilt."""
    _check_config_ints(config, len(stored), where)
    size, rows = (
        config.get("vocab_size"),
        max((len(each) for each in stored.values() if each.ndim), default=0),
    )
    if type(size) is int and size > rows:
        raise ValueError(f"{where}: config.json asks for {size:,} tokens, and no tensor has as many rows")
    if tokenizer is not None and type(size) is int and tokenizer.vocab_size > size + _MAX_ADDED_TOKENS:
        raise ValueError(
            f"{where}: its tokenizer has {tokenizer.vocab_size:,} ids and the model only {size:,}:"
            " they do not belong together"
        )
    with _translated_errors(where), torch.device("meta"):
        stated = _to_transformers_config(config)
        network = getattr(import_transformers(), _model_class_name(config, where))._from_config(stated)
    _check_num_weights(network, stored, where)


def meta_shapes(
    backbone: HFBackboneConfig, vocab: Vocab, stored: Mapping[str, Tensor], where: str
) -> dict[str, torch.Size]:
    """The tensors of a network in our own format, without the memory for them."""
    _check_config_ints(backbone.parsed, len(stored), where)
    with _translated_errors(where), torch.device("meta"):
        network = backbone.build(vocab)
    return {name: each.shape for name, each in unique_tensors(network.state_dict(keep_vars=True)).items()}


def _check_config_ints(config: Mapping[str, Any], tensors: int, where: str) -> None:
    """Refuse numbers that no network of so many tensors has: some libraries make a list as long as one."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_config_ints(value, tensors, where)
        if type(value) is int and _COUNT_KEYS.fullmatch(key) and value > max(tensors, _MAX_SHARED_LAYERS):
            raise ValueError(
                f"{where}: config.json asks for {key} = {value:,}, and the weights are {tensors:,} tensors"
            )
        if type(value) is int and abs(value) > _MAX_CONFIG_INT and "theta" not in key and "base" not in key:
            raise ValueError(f"{where}: config.json has {key} = {value:,}, which no network has")
        if _EPS_KEYS.search(key) and type(value) in (int, float) and not 0 < value < 1:
            raise ValueError(f"{where}: config.json has {key} = {value}, which must be above 0 and below 1")


def _check_num_weights(network: Any, stored: Mapping[str, Tensor], where: str) -> None:
    wanted = sum(each.numel() for each in unique_tensors(dict(network.named_parameters())).values())
    held = sum(each.numel() for each in stored.values())
    if wanted > 2 * held:  # what exactly is missing is said once the rest has been read
        raise ValueError(f"{where}: config.json asks for {wanted:,} weights, and the files hold {held:,}")


def load_gguf(file: Path, tokenizer: Tokenizer | None = None) -> LanguageModel:
    """A causal LM from a GGUF file, opened; its weights are unpacked to float32."""
    library = import_transformers()
    if not all(map(find_spec, ("gguf", "accelerate"))):
        raise ValueError("GGUF files need the extra gguf: pip install 'unmask[gguf]'")
    place: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    with _translated_errors(str(file)):
        config = library.AutoConfig.from_pretrained(file.parent, **place)
        written = library.AutoTokenizer.from_pretrained(file.parent, **place)
        network, report = library.AutoModelForCausalLM.from_pretrained(
            file.parent, **place, config=config, dtype=torch.float32, output_loading_info=True
        )
        _check_loading_report(report, str(file))
    own = Tokenizer(written.backend_tokenizer)
    return _build_language_model(network, tokenizer or own, written.mask_token_id, {}, str(file))


def find_gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path is, or that is alone in a folder without a config.json."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ValueError(f"{path} holds {len(found)} .gguf files; name one of them, as in {found[0]}")
    return found[0] if found else None


def export_state(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and tensors as transformers reads them: the inverse of `load`, exactly."""
    config, backbone = model.denoiser.config, model.denoiser.backbone
    assert isinstance(config.backbone, HFBackboneConfig)
    assert isinstance(backbone, HFBackbone)
    stated = config.backbone.parsed | {
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
    named = dict(backbone.model.state_dict())
    named |= {f"{backbone.lm_head_name}.{name}": tensor for name, tensor in backbone.lm_head.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named.items():  # a tied head is written once, under the embedding's name
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    return stated, tensors


def make_tokenizer_config(tokenizer: Tokenizer, vocab: Vocab) -> dict[str, Any]:
    """What transformers must know beside a `tokenizer.json` to read it as it is.

    A mask that is the model's alone, one more id after the tokenizer's, is given to the tokenizer there.
    """
    special = {kind: _first_known_token(tokenizer, names) for kind, names in _SPECIAL_TOKENS.items()}
    special["mask_token"] = tokenizer.backend.id_to_token(vocab.mask_id)
    if special["eos_token"] is None and vocab.eos_id is not None:
        special["eos_token"] = tokenizer.backend.id_to_token(vocab.eos_id)
    special["pad_token"] = special["pad_token"] or special["eos_token"]
    added: dict[str, Any] = {}
    if special["mask_token"] is None and vocab.mask_id == tokenizer.backend.get_vocab_size():
        name = next(name for name in _SPECIAL_TOKENS["mask_token"] if tokenizer.backend.token_to_id(name) is None)
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        added = {"added_tokens_decoder": {str(vocab.mask_id): {"content": name, **flags, "special": True}}}
        special["mask_token"] = name
    found = {kind: name for kind, name in special.items() if name is not None}
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**fixed, **added, **found}


def load_tokenizer(folder: Path) -> tuple[Tokenizer | None, int | None]:
    """The tokenizer of a folder, if it has one, and the id of its mask, if that has one."""
    if (folder / _TOKENIZER_FILE).exists():
        tokenizer = Tokenizer.from_file(folder / _TOKENIZER_FILE)
        name = _read_mask_token(folder) or _first_known_token(tokenizer, _SPECIAL_TOKENS["mask_token"])
        return tokenizer, None if name is None else tokenizer.backend.token_to_id(name)
    if not any(any(folder.glob(source)) for source in _TOKENIZER_SOURCES):
        return None, None
    with _translated_errors(str(folder)):
        written: Any = import_transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return Tokenizer(written.backend_tokenizer), written.mask_token_id


def _load_network(config: dict[str, Any], weights: dict[str, Tensor], where: str) -> Any:
    library = import_transformers()
    network, report = getattr(library, _model_class_name(config, where)).from_pretrained(
        None,
        config=_to_transformers_config(config),
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation=None,  # the library's own, whatever kernel to fetch the config names
        output_loading_info=True,
    )
    _check_loading_report(report, where)
    return network


def _to_transformers_config(config: dict[str, Any]) -> Any:
    """The library's own config object."""
    stated = {key: value for key, value in config.items() if key not in (_UNMASK_KEY, "auto_map")}
    return import_transformers().CONFIG_MAPPING[config["model_type"]].from_dict(stated)


def _model_class_name(config: dict[str, Any], where: str) -> str:
    """The name of its class: a masked or causal LM's, which it says or which its type has."""
    if any(config.get(key) for key in ("is_encoder_decoder", "quantization_config")):
        raise ValueError(f"{where} is a network with an encoder and a decoder, or quantised: not known here")
    from transformers.models.auto import modeling_auto

    kind, said = config["model_type"], set(config.get("architectures") or ())
    tables = (
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    names = [str(table[kind]) for table in tables if kind in table]
    if not names:
        raise ValueError(f"{where} is a {kind!r}: transformers has neither a masked nor a causal LM of it")
    return next((name for name in names if name in said), names[0])


def _check_loading_report(report: dict[str, Any], where: str) -> None:
    """Refuse what transformers lets pass: absent weights."""
    absent = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ValueError(f"{where} lacks weights that its config asks for: {absent[0]}{more}")


def _build_language_model(
    network: Any, tokenizer: Tokenizer | None, mask_id: int | None, unmask_config: dict[str, Any], where: str
) -> LanguageModel:
    causal = type(network).__name__ in _causal_lm_classes()
    opened = unmask_config.get("future_visibility", 1.0 if causal else None)
    objective: AnyObjective = MDLM()
    size = network.get_input_embeddings().num_embeddings
    if unmask_config:
        vocab: Vocab = from_json(Vocab, unmask_config.get("vocab"), f"{where}: config.json's {_UNMASK_KEY}.vocab")
        objective = from_json(
            AnyObjective, unmask_config.get("objective"), f"{where}: config.json's {_UNMASK_KEY}.objective"
        )
    else:
        mask_id = size if mask_id is None else mask_id
        ends = network.config.get_text_config().eos_token_id if causal else None
        end = next((i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)), -1)
        vocab = Vocab(max(size, mask_id + 1), mask_id, end if 0 <= end < size and end != mask_id else None)
    if vocab.size > size + _MAX_ADDED_TOKENS:
        raise ValueError(f"{where}: a vocabulary of {vocab.size:,} ids is wanted, and the network has {size:,}")
    _resize_embeddings(network, vocab.size)
    backbone = HFBackboneConfig.from_hf(network.config, opened, unmask_config.get("max_length"))
    denoise = ModelConfig(vocab, backbone, objective).build()
    denoise.backbone.load_state_dict(HFBackbone(backbone, network).state_dict())
    return LanguageModel(denoise.eval(), tokenizer)


@torch.no_grad()
def _resize_embeddings(network: Any, size: int) -> None:
    """Make room for `size` tokens; new ones, such as the mask, begin as the mean of the others."""
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


def _read_mask_token(folder: Path) -> str | None:
    """The mask token that the tokenizer's config names."""
    for name in (TOKENIZER_CONFIG_FILE, "special_tokens_map.json"):
        try:
            stated = read_json_object(folder / name).get("mask_token")
        except ValueError:
            continue
        content = stated.get("content") if isinstance(stated, dict) else stated
        if isinstance(content, str):
            return content
    return None


def _first_known_token(tokenizer: Tokenizer, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if tokenizer.backend.token_to_id(name) is not None), None)


def _get_token_id(config: dict[str, Any], key: str, default: int | None) -> int | None:
    value = config.get(key)
    return value if type(value) is int and value >= 0 else default


@contextlib.contextmanager
def _translated_errors(where: str) -> Iterator[None]:
    """No progress bars and no advice; and whatever the library finds wrong with a model, in one sentence."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except ValueError as error:
        raise error if where in str(error) else _load_error(where, error) from None
    except Exception as error:
        raise _load_error(where, error) from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _load_error(where: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{where} is no model that transformers can read: {reason}")
