"""A recipe of your own: a function without arguments that returns an `Experiment`.

python -m examples.custom_recipe
unmask train examples.custom_recipe:tiny --out runs/tiny --set training.steps=50
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import unmask
from unmask import MDLM, DiTConfig, LanguageModel, Wrapped
from unmask.distributed import Distributed
from unmask.experiment import Experiment
from unmask.run import run_experiment
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW


def tiny() -> Experiment:
    """The text of this file, byte by byte: a few seconds on one core."""
    return Experiment(
        sources=(__file__,),
        tokenizer="bytes",
        backbone=DiTConfig(width=32, depth=1, heads=2, max_length=32, dropout=0.0),
        objective=MDLM(exact_mask_counts=True),
        layout=Wrapped(32),
        training=TrainingConfig(steps=20, batch_size=4, optimizer=AdamW(lr=1e-2), warmup_steps=2, ema_decay=0.5),
        eval_windows=2,
    )


def train(experiment: Experiment) -> LanguageModel:
    """Run an experiment in a temporary folder, and load the model that it saves."""
    with TemporaryDirectory() as folder:
        run_experiment(experiment, Path(folder), Distributed())
        return unmask.load(folder, allow_code=True)


if __name__ == "__main__":
    print(train(tiny()).score(["def tiny()"]).nats_per_token)
