"""Small causal language models of the transformers library, to judge with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

CONTEXT = 24
VOCAB_SIZE = 257


def write_tokenizer(folder: Path, bos: bool) -> None:
    """A token for each byte; id 0 is the BOS, which the tokenizer puts before a text only if `bos`."""
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>").save_pretrained(folder)


def write_model(folder: Path, config: Any) -> None:
    """With weights so large that what came before matters."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)


def write_reference_model(folder: Path, kind: str) -> Path:
    from transformers import BertConfig, GPT2Config, LlamaConfig

    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": CONTEXT}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    configs = {"gpt2": GPT2Config, "llama": LlamaConfig, "bert": BertConfig}
    write_model(folder, configs[kind](**sizes))
    write_tokenizer(folder, bos=kind == "llama")
    return folder
