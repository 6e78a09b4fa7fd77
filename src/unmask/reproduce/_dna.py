"""How methods are trained on DNA: Caduceus and Mamba of the paper's size, on a part of a human chromosome.

Caduceus is trained by MLM first, and every diffusion objective starts from it, as in the paper; Mamba, which is
autoregressive from the beginning, has as many steps as both trainings together.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unmask.backbones.caduceus import CaduceusConfig
from unmask.backbones.mamba import MambaConfig
from unmask.baselines import Plaid
from unmask.data.loader import GenomeWindows
from unmask.experiment import Experiment
from unmask.objectives import MDLM, MLM, SEDD, NextToken, Objective
from unmask.recipes import hg38_caduceus
from unmask.reproduce._vocabulary import Needs, Setup, Training
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW, CosineDecay

GENOME = "dna/genomes/human_chrX_20Mb.fa.gz"
"""Where a data folder has 20 megabases of chromosome X."""

_HG38_FILES = ("dna/hg38/hg38.ml.fa", "dna/hg38/sequences_human.bed")
_HG38 = f"the human genome and the intervals of Basenji2: DATA/{' and DATA/'.join(_HG38_FILES)}"
GENOMES = Needs(f"DATA/{GENOME}", _HG38)
"""What trainings on DNA need."""
_PAPER_STEPS = 50_000

_OBJECTIVES: dict[str, tuple[Objective, float]] = {
    "mdlm": (MDLM(), 1.0),
    "sedd": (SEDD(), 1.0),
    "plaid": (Plaid(), 2.0),
}
"""What Caduceus is fine-tuned with, and what a step of it takes."""
_LENGTH = 256
_NETWORKS = (CaduceusConfig(max_length=_LENGTH), MambaConfig(max_length=_LENGTH))
"""The networks of the paper, of about 470,000 parameters each."""
_TRAINING = TrainingConfig(
    batch_size=8,
    optimizer=AdamW(lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1),
    lr_schedule=CosineDecay(min_factor=0.0125),
    ema_decay=0.97,
)


def dna_trainings(setup: Setup, *methods: str) -> list[Training]:
    """Trainings on DNA: mdlm, sedd, plaid (each from mlm), mlm, and ar (Mamba)."""
    trainings = _tiny_trainings(setup) if setup.is_tiny else _paper_trainings(setup)
    return [trainings[method] for method in methods]


def _tiny_trainings(setup: Setup) -> dict[str, Training]:
    assert setup.data is not None
    caduceus, mamba = _NETWORKS
    experiment = Experiment(
        sources=(str((setup.data / GENOME).resolve()),),
        tokenizer="dna",
        backbone=caduceus,
        objective=MLM(fraction=0.15),
        layout=GenomeWindows(caduceus.max_length or _LENGTH),
        training=_TRAINING,
    )
    ar = replace(experiment, backbone=mamba, objective=NextToken())
    return {
        "ar": Training("dna-ar", "ar", ar, "dna", share=2.0, relative_cost=0.5, pace=experiment),
        **_fine_tunings(Training("dna-mlm", "mlm", experiment, "dna"), _TRAINING),
    }


def _paper_trainings(setup: Setup) -> dict[str, Training]:
    """Pre-training as in Caduceus' paper, then 50,000 steps at a constant batch and a rate of 1e-3 (appendix D.7)."""
    recipe = hg38_caduceus()
    train, test = ((":".join([*map(str, _hg38_files(setup)), part]),) for part in ("train", "test"))
    experiment = replace(recipe, sources=train, prepare=replace(recipe.prepare, valid_sources=test))
    mamba = replace(experiment, backbone=MambaConfig(max_length=experiment.layout.length), objective=NextToken())
    steps = replace(experiment.training, steps=_PAPER_STEPS, warmup_steps=_PAPER_STEPS // 10)
    pretrained = Training("hg38-ar-pretraining", "ar-pretraining", mamba, "hg38")
    return {
        "ar": _fine_tuning("hg38-ar", "ar", pretrained, NextToken(), steps),
        **_fine_tunings(Training("hg38-mlm", "mlm", experiment, "hg38"), steps),
    }


def _hg38_files(setup: Setup) -> list[Path]:
    return [(setup.data or Path("DATA")) / name for name in _HG38_FILES]


def _fine_tunings(mlm: Training, training: TrainingConfig) -> dict[str, Training]:
    """MLM itself, and every objective that starts from it."""
    tuned = {
        name: _fine_tuning(f"{mlm.group}-{name}", name, mlm, objective, training, cost)
        for name, (objective, cost) in _OBJECTIVES.items()
    }
    return {"mlm": mlm, **tuned}


def _fine_tuning(
    name: str, method: str, parent: Training, objective: Objective, training: TrainingConfig, cost: float = 1.0
) -> Training:
    assert isinstance(training.optimizer, AdamW)
    gentle = replace(training, optimizer=replace(training.optimizer, lr=1e-3))
    experiment = replace(parent.experiment, objective=objective, training=gentle, init_from="")
    return Training(name, method, experiment, parent.group, relative_cost=cost, pace=parent.experiment, parent=parent)


def missing_genome(setup: Setup) -> str | None:
    """Why there is no DNA to train on."""
    if not setup.is_tiny:
        return None if all(file.is_file() for file in _hg38_files(setup)) else f"it needs {_HG38}"
    if setup.data is None or not (Path(setup.data) / GENOME).is_file():
        return f"it needs a genome: DATA/{GENOME}"
    return None
