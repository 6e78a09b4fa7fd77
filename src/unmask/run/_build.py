"""The trainer of an experiment, at its first step."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from unmask.data.corpus import Corpus
from unmask.data.loader import Loader
from unmask.distributed import Distributed
from unmask.experiment import Experiment
from unmask.hardware.dtypes import DtypeName
from unmask.model import Denoiser, LanguageModel, ModelConfig
from unmask.pretrained import load
from unmask.training.denoising import build_denoising_trainer
from unmask.training.trainer import Trainer


def build_trainer(
    experiment: Experiment, corpus: Corpus, distributed: Distributed, init_model: LanguageModel | None = None
) -> Trainer:
    """A trainer of the experiment at its first step; `init_model`: that of `init_from`, if it is loaded already."""
    config = experiment.training
    torch.manual_seed(config.seed)
    denoiser = initial_denoiser(experiment, corpus, init_model)
    if experiment.unigram_bias_init:
        bias = _unigram_log_probs(corpus)
        if denoiser.process.inserts_tokens:  # the mask's logit is that of a rate, which starts at 1
            bias[corpus.vocab.mask_id] = 0
        denoiser.backbone.init_output_bias(bias)
    if experiment.lora is not None:
        experiment.lora.apply(denoiser)
    loader = Loader(corpus.splits["train"], experiment.layout, config.batch_size, config.seed)
    if experiment.distillation is None:
        return build_denoising_trainer(denoiser, experiment.objective, loader, config, distributed)
    loss_fn, hooks = experiment.distillation.build(denoiser, experiment.objective, distributed.device)
    return build_denoising_trainer(
        denoiser, experiment.objective, loader, config, distributed, loss_fn=loss_fn, hooks=hooks
    )


def initial_denoiser(experiment: Experiment, corpus: Corpus, init_model: LanguageModel | None) -> Denoiser:
    """The network before its first step: new, or that of the model to start from."""
    if experiment.init_from is None:
        return ModelConfig(corpus.vocab, experiment.backbone, experiment.objective).build()
    old = (init_model or load(experiment.init_from, dtype=frozen_dtype(experiment))).denoiser
    if corpus.tokenizer.vocab_size > old.vocab.size:
        raise ValueError(
            f"the text's tokenizer has {corpus.tokenizer.vocab_size} ids, and {experiment.init_from} only"
            f" {old.vocab.size}"
        )
    # A model without an end-of-text id learns one from the new text.
    eos_id = corpus.eos_id if old.vocab.eos_id is None else old.vocab.eos_id
    config = replace(old.config, objective=experiment.objective, vocab=replace(old.vocab, eos_id=eos_id))
    if frozen_dtype(experiment) != "float32":
        old.change_objective(config)
        return old
    denoiser = config.build()
    denoiser.load_initial(old)
    return denoiser


def frozen_dtype(experiment: Experiment) -> DtypeName:
    """The type in which the model to start from is loaded: weights that are trained are float32."""
    return "float32" if experiment.lora is None else cast(DtypeName, experiment.lora.dtype)


def _unigram_log_probs(corpus: Corpus) -> torch.Tensor:
    """log((count + 1)/(total + V)) of each token [V], from 64 stretches of the training text."""
    text = corpus.splits["train"]
    counts = torch.ones(corpus.vocab.size, dtype=torch.float64)
    for part in range(64):
        first = text.num_tokens * part // 64
        ids = text.read(first, min(text.num_tokens * (part + 1) // 64, first + 16_384))
        counts += torch.bincount(torch.from_numpy(ids.astype("int64")), minlength=len(counts))
    return (counts / counts.sum()).log()
