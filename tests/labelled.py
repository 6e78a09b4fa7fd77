"""Small labelled tables, and small models to make classifiers of."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

import unmask
from unmask import MDLM, DiTConfig, LanguageModel, NextToken, Tokenizer
from unmask.classification import (
    ClassificationExperiment,
    Classifier,
    ClassifierConfig,
    LabelledData,
    SequenceClassifier,
    Split,
    make_experiment,
)
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW, LinearDecay

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "the", "was", "is"]
LETTERS = "abcdefgh \n"


def write_csv(path: Path, header: list[str], rows: list[list[object]], delimiter: str = ",") -> str:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows([header, *rows])
    return str(path)


def letter_rows(count: int, seed: int = 0) -> list[list[object]]:
    """Texts of letters; class `yes` are those with more than three a's among the first eight letters."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[object]] = []
    for number in range(count):
        length = int(torch.randint(8, 15, (1,), generator=generator))
        favourite = "a" if number % 2 else "b"
        text = "".join(
            favourite
            if torch.rand(1, generator=generator) < 0.6
            else "cdefgh"[int(torch.randint(6, (1,), generator=generator))]
            for _ in range(length)
        )
        rows.append([text, "yes" if favourite == "a" else "no"])
    return rows


def tiny_lm(causal: bool = False, tokenizer: Tokenizer | None = None, length: int = 24) -> LanguageModel:
    backbone = DiTConfig(width=16, depth=2, heads=2, max_length=length, dropout=0.0, causal=causal)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = LanguageModel.from_config(
            backbone, NextToken() if causal else MDLM(), tokenizer or Tokenizer.characters(LETTERS)
        )
        for parameter in lm.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return lm


def classifier(**fields: Any) -> Classifier:
    """In float64, so that a text alone and a text in a batch differ by far less than any probability."""
    lm = tiny_lm(tokenizer=fields.pop("tokenizer", None))
    config = ClassifierConfig(lm.denoiser.config, **{"labels": ("no", "yes", "perhaps"), "max_length": 24, **fields})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = SequenceClassifier(config)
        torch.nn.init.normal_(network.head.output.weight)
    network.backbone.load_state_dict(lm.denoiser.backbone.state_dict())
    assert lm.tokenizer is not None
    return Classifier(network.double().eval(), lm.tokenizer)


def tiny_folder(path: Path, **options: object) -> str:
    return str(unmask.save(tiny_lm(**options), path))  # type: ignore[arg-type]


def bert_folder(path: Path, with_head: bool = True) -> tuple[str, transformers.BertConfig]:
    """A small BERT with BERT's template of pairs; `with_head` False: an encoder, as of sentence transformers."""
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.add_special_tokens(WORDS[:5])
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind = transformers.BertForMaskedLM if with_head else transformers.BertModel
        kind(config).save_pretrained(path)
    backend.save(str(path / "tokenizer.json"))
    return str(path), config


def experiment(
    init_from: str, train: str, test: str | None = None, valid: str | None = None, **changes: object
) -> ClassificationExperiment:
    """A quick one, in float32."""
    data: dict[str, object] = {
        name: changes.pop(name)
        for name in ("validation_fraction", "is_number", "folds", "labels", "skip_empty")
        if name in changes
    }
    training = TrainingConfig(
        batch_size=16,
        optimizer=AdamW(lr=2e-2),
        warmup_steps=0,
        lr_schedule=LinearDecay(),
        ema_decay=0.0,
        bf16=False,
        log_every=1,
        seed=3,
    )
    labelled = LabelledData(
        Split("train", (train,)),
        None if valid is None else Split("valid", (valid,)),
        () if test is None else (Split("test", (test,)),),
        **data,  # type: ignore[arg-type]
    )
    return make_experiment(init_from, labelled, **{"training": training, **changes})
