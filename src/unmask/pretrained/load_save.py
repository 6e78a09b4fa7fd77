"""Model folders: `config.json`, `model.safetensors`, `tokenizer.json`, a card `README.md` and a
`manifest.json` of SHA-256 sums.

Loading executes nothing from the folder: it reads JSON and safetensors only. The card is documentation:
loading ignores it, and saving never overwrites a card that was edited.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from unmask.config import from_json, lookup, to_json
from unmask.data.chat import CHAT_TEMPLATE_FILE, load_chat_template
from unmask.data.tokenizers import BaseTokenizer, Tokenizer, load_tokenizer
from unmask.distributed import Distributed
from unmask.hardware.dtypes import DtypeName
from unmask.hardware.memory import is_out_of_memory
from unmask.io.untrusted import read_json_object
from unmask.model import LanguageModel, ModelConfig
from unmask.model.language_model import validate_tokenizer
from unmask.ops.linear import DEFAULT_GROUP_SIZE
from unmask.pretrained._folder import CONFIG_FILE, OBJECTIVE_PREFIX, WEIGHTS_FILE, StoredModel, write_folder
from unmask.pretrained._hub import resolve_hub
from unmask.pretrained._network import NetworkBuilder, WeightStorage, require_float32_memory
from unmask.pretrained.formats import FORMATS, Format
from unmask.pretrained.formats import _hf as hf
from unmask.pretrained.formats._gguf import find_gguf_file, load_gguf
from unmask.pretrained.formats._hf_tokenizer import (
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    find_mask_id,
    load_hf_tokenizer,
    make_tokenizer_config,
)
from unmask.pretrained.formats._llama import LlamaFormat
from unmask.pretrained.formats.transformers import TRANSFORMERS_FORMAT
from unmask.pretrained.model_card import CardMetadata, TrainingFacts, model_card
from unmask.pretrained.state_dict import LazyTensor, unique_tensors
from unmask.registry import AllowCode
from unmask.training.lora import LoRA

_MODEL_FORMAT = "unmask-2"
CLASSIFIER_FORMAT = "unmask-classifier-1"
"""The format of a classifier's folder, which `unmask.classification` reads and writes."""

_GPT2_VOCAB_SIZE = 50_257
"""Tokens of GPT-2's vocabulary."""


def load(
    folder: str | os.PathLike[str],
    tokenizer: BaseTokenizer | None = None,
    *,
    require_tokenizer: bool = False,
    require_head: bool = True,
    allow_code: AllowCode = False,
    dtype: DtypeName = "auto",
    group_size: int = DEFAULT_GROUP_SIZE,
    distributed: Distributed = Distributed(),  # noqa: B008
    shard_weights: bool = False,
) -> LanguageModel:
    """Load a model folder: of unmask, or in a published format (MDLM, BD3LM, Duo, SEDD, SDTT, LLaDA, iLLaDA,
    LLaDA-MoE, LLaDA2, Dream, SDAR, A2D, Fast-dLLM v2, Caduceus, Mamba, DiMamba, MosaicBERT).

    Folders of the transformers library (masked LMs, and causal LMs, which get bidirectional attention) and
    GGUF files are loaded too. `folder` may also be a name on the hub, as in `kuleshov-group/mdlm-owt`, or the
    folder of a finished run.

    The `tokenizer` is the given one, else the folder's, else GPT-2's if the model is from the hub and has its
    vocabulary. Without a tokenizer the model takes and returns ids; with `require_tokenizer` it is refused
    before its weights are read. An encoder of transformers without a head for masked tokens is refused, unless
    `require_head` is False: it then gets a new head on its word embeddings, to be trained or, by a classifier, ignored.

    A folder whose network, objective or schedule is a class from outside unmask is loaded only with
    `allow_code=True`, which imports that class: allow it only for folders that you trust.

    `dtype`: weights are kept in the type in which they were saved (auto), or in float32, bfloat16, int8 or int4; the
    last two round the matrices of the blocks, each `group_size` weights with a scale of their own. A network that is
    kept in float32 computes in float32, any other in bfloat16 if it is large and that is measured to be faster here.
    Weights that do not fit into memory are refused before they are read. `shard_weights` splits them over the ranks of
    `distributed`, for models that do not fit one: each rank then computes all texts, and gets the same.
    """
    storage = WeightStorage(dtype, group_size)
    path = resolve_model_folder(folder)
    gguf_file = find_gguf_file(path)
    if gguf_file is not None:
        return _converted(load_gguf(gguf_file, tokenizer), storage, distributed, shard_weights)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder, nor a name on the hub; a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    stored = StoredModel(path)
    config = _with_token_ids(stored.config, path)
    if _is_transformers_model(config):
        lm = _load_transformers(stored, tokenizer, require_tokenizer, require_head, distributed)
        lm = lm.with_chat_template(load_chat_template(path, lm.tokenizer))
        return _converted(lm, storage, distributed, shard_weights)
    # Everything that can be checked is checked before weights are read, which takes long for large models.
    model_config, tensors = _convert_state(config, stored.tensors(), path, allow_code)
    stored.check(model_config, tensors)
    tokenizer = tokenizer or _find_tokenizer(path, model_config, not Path(folder).exists(), allow_code)
    _check_has_tokenizer(require_tokenizer, tokenizer, path)
    validate_tokenizer(tokenizer, model_config.vocab)
    stored.verify_weights()
    try:
        denoiser = NetworkBuilder(model_config, tensors, storage, distributed, str(path), shard_weights).build()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"{path / CONFIG_FILE} asks for a network that does not fit into memory") from None
    chat_template = load_chat_template(path, tokenizer, _family_chat_template(config))
    return LanguageModel(denoiser.eval(), tokenizer, chat_template=chat_template)


def _family_chat_template(config: dict[str, Any]) -> str | None:
    """The chat template of a published family, for folders that come without one."""
    found = (format_ for format_ in FORMATS.values() if format_.can_load(config))
    return next((each.chat_template for each in found if isinstance(each, LlamaFormat)), None)


def _converted(
    lm: LanguageModel, storage: WeightStorage, distributed: Distributed, shard_weights: bool
) -> LanguageModel:
    """A model of another library, which is read in float32, with its weights as they are to be kept."""
    if shard_weights:
        raise ValueError("networks of transformers cannot be split over processes: leave out the splitting of weights")
    storage.apply(lm.denoiser, distributed)
    return lm


def _load_transformers(
    stored: StoredModel,
    tokenizer: BaseTokenizer | None,
    require_tokenizer: bool,
    require_head: bool,
    distributed: Distributed,
) -> LanguageModel:
    path, config = stored.path, stored.config
    folder_tokenizer = load_hf_tokenizer(path)
    used_tokenizer = tokenizer or folder_tokenizer[0]
    _check_has_tokenizer(require_tokenizer, used_tokenizer, path)
    tensors = stored.tensors()
    hf.validate_config(config, tensors, used_tokenizer, str(path))
    require_float32_memory(str(path), tensors, distributed)
    stored.verify_weights()
    return hf.load(path, config, tensors, tokenizer, folder_tokenizer, require_head)


def _with_token_ids(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """A published config with the id of the mask, which many leave to the tokenizer, and all ends of a text."""
    if "format" in config:
        return config
    config = {**config, **_read_end_ids(config, path / GENERATION_FILE)}
    if config.get("mask_token_id") is not None or not (path / TOKENIZER_FILE).exists():
        return config
    mask_id = find_mask_id(path, load_tokenizer(path / TOKENIZER_FILE))
    return config if mask_id is None else {**config, "mask_token_id": mask_id}


def _read_end_ids(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The config's `eos_token_id`, followed by those with which texts are generated, such as the end of a turn."""
    if not file.exists():
        return {}
    listed = [source.get("eos_token_id") for source in (config, read_json_object(file))]
    ids = [id_ for each in listed for id_ in (each if isinstance(each, list) else [each]) if id_ is not None]
    return {"eos_token_id": list(dict.fromkeys(ids))} if len(set(map(str, ids))) > 1 else {}


def _find_tokenizer(path: Path, config: ModelConfig, from_hub: bool, allow_code: AllowCode) -> BaseTokenizer | None:
    if (path / TOKENIZER_FILE).exists():
        return load_tokenizer(path / TOKENIZER_FILE, allow_code=allow_code)
    if from_hub and config.vocab.size == _GPT2_VOCAB_SIZE + 1:
        return Tokenizer.from_hub("gpt2")  # MDLM and BD3LM are published without their tokenizer
    return None


def _check_has_tokenizer(required: bool, tokenizer: BaseTokenizer | None, path: Path) -> None:
    if required and tokenizer is None:
        raise ValueError(
            f"the model {path.name} has no tokenizer.json, and texts are asked for: put the tokenizer.json that it was"
            " trained with into its folder"
        )


def _convert_state(
    config: dict[str, Any], weights: dict[str, LazyTensor], path: Path, allow_code: AllowCode
) -> tuple[ModelConfig, dict[str, LazyTensor]]:
    """Our config and tensors of a model in our format or in a published one."""
    version = config.get("format")
    if version == _MODEL_FORMAT:
        fields = {key: value for key, value in config.items() if key != "format"}
        return from_json(ModelConfig, fields, str(path / CONFIG_FILE), allow_code=allow_code), weights
    if version == CLASSIFIER_FORMAT:
        raise ValueError(f"{path} is a classifier: `unmask classify` and `unmask.load_classifier` read it")
    if isinstance(version, str) and version.startswith("unmask-"):
        raise ValueError(
            f"{path} has the format {version}, and this version of unmask reads {_MODEL_FORMAT}: export the model in a"
            " published format with the version that wrote it (`unmask export MODEL OUT --published`), or train it"
            " again"
        )
    return _find_format(config, path).load_state(config, weights, str(path))


def _is_transformers_model(config: dict[str, Any]) -> bool:
    """Whether the config is neither ours nor that of a published diffusion model, but known to transformers."""
    is_diffusion_format = any(format_.can_load(config) for format_ in FORMATS.values())
    return "format" not in config and "model_type" in config and not is_diffusion_format and hf.can_load(config)


def _find_format(config: dict[str, Any], path: Path) -> Format:
    """The published format of a config."""
    for format_ in FORMATS.values():
        if format_.can_load(config):
            return format_
    kind = config.get("model_type")
    raise ValueError(
        f"{path / CONFIG_FILE} has an unknown format (its model_type is {kind!r}): there are {_MODEL_FORMAT}, the"
        f" published families {', '.join(FORMATS)}, and networks of the installed transformers"
    )


def resolve_model_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, the model of a run's folder, or the local copy of a model on the hub."""
    path = resolve_hub(folder)
    if (path / "experiment.json").exists() and not (path / "model").exists() and not (path / CONFIG_FILE).exists():
        raise ValueError(
            f"{path} is a run that has no model yet; `unmask export {path} OUT` writes one from its newest checkpoint"
        )
    return path / "model" if (path / "model" / CONFIG_FILE).exists() and not (path / CONFIG_FILE).exists() else path


def save(
    model: LanguageModel,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    upstream_format: bool | str = False,
    facts: TrainingFacts | None = None,
    metadata: CardMetadata | None = None,
) -> Path:
    """Write a model folder: all of it or, if anything fails, nothing.

    `upstream_format`: in the format in which models of its kind are published, for other programs; where several
    families could hold it, in the first, or in the one that is named.
    `facts`: how the model was trained, and `metadata`: its license, data and results, for its card.
    `overwrite` keeps a card that was edited by hand; delete that card to get a new one.
    """
    if LoRA.is_applied(model.denoiser):
        raise ValueError("LoRA adapters are not merged: call merge_lora() before saving")
    if model.denoiser.weights_dtype in ("int8", "int4"):
        raise ValueError(
            f"the weights are rounded to {model.denoiser.weights_dtype}, which no format holds: load the model with"
            " another dtype to save it"
        )
    return write_folder(
        folder,
        lambda new_folder: _write_model(model, new_folder, upstream_format),
        model_card(model, facts, metadata),
        is_model_folder,
        overwrite=overwrite,
    )


def is_model_folder(path: Path) -> bool:
    """Whether the folder holds a model: many other programs write a config.json."""
    try:
        config = read_json_object(path / CONFIG_FILE)
    except ValueError:
        return False
    return (
        config.get("format") == _MODEL_FORMAT
        or any(format_.can_load(config) for format_ in FORMATS.values())
        or hf.written_by_unmask(config)
    )


def _write_model(model: LanguageModel, folder: Path, upstream_format: bool | str) -> None:
    config, weights = _export_upstream(model, upstream_format) if upstream_format else _export_own(model)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    if model.tokenizer is not None:
        (folder / TOKENIZER_FILE).write_text(model.tokenizer.to_json(), encoding="utf-8")
        if isinstance(model.tokenizer, Tokenizer):  # others cannot be read by transformers
            settings = make_tokenizer_config(model.tokenizer, model.vocab, model.chat_template)
            (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if model.chat_template is not None and model.chat_template.tool_source is None:
        (folder / CHAT_TEMPLATE_FILE).write_text(model.chat_template.source, encoding="utf-8")


def _export_own(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"format": _MODEL_FORMAT, **to_json(model.denoiser.config)}
    learned = model.denoiser.objective_parameters
    weights = unique_tensors(model.denoiser.stored_module.state_dict())
    of_objective = {} if learned is None else learned.state_dict()
    return config, weights | {OBJECTIVE_PREFIX + name: tensor for name, tensor in of_objective.items()}


def _export_upstream(model: LanguageModel, name: bool | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if isinstance(name, str):
        format_ = lookup(name, FORMATS, "published format")
        if not format_.can_export(model):
            raise ValueError(f"the format {name} is for other networks or objectives than this model's")
        return format_.export_state(model)
    if hf.can_export(model):
        return hf.export_state(model)
    for format_ in FORMATS.values():
        if format_ is not TRANSFORMERS_FORMAT and format_.can_export(model):  # in which no family is published
            return format_.export_state(model)
    raise ValueError(
        f"no published format holds a model of {type(model.objective).__name__} with a"
        f" {type(model.denoiser.config.backbone).__name__}; there are {', '.join(FORMATS)}"
    )
