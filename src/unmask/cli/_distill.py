"""`unmask distill`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from unmask.cli._arguments import AllowCodeFlag, ModelPath, build_typed, load_model
from unmask.cli._signature import Option
from unmask.cli._train import Overrides, customize, run_in_folder
from unmask.config import external_kinds, to_json

if TYPE_CHECKING:
    from unmask.distillation import Distillation

_MethodArg = Annotated[str, Option(family="unmask.distillation:DISTILLATIONS")]


def distill(
    teacher: ModelPath,
    method: _MethodArg = "sdtt",
    rounds: int | None = None,
    steps_per_round: int | None = None,
    sampling_steps: int | None = None,
    sources: tuple[str, ...] = (),
    valid_sources: tuple[str, ...] = (),
    out: Path = Path("runs/distilled"),
    lora_rank: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    overrides: Overrides = (),
    restart: bool = False,
    print_config: bool = False,
    allow_code: AllowCodeFlag = False,
) -> None:
    """Distil a model into one that samples in fewer steps, and save it; resume the run if it was interrupted.

    For example:
      unmask distill runs/demo --sources my_texts/ --out runs/fast
      unmask distill runs/demo --method sdtt --rounds 5 --sampling-steps 128 --sources my_texts/ --out runs/five
      unmask distill runs/demo --method confidence --sources my_texts/ --lora-rank 8 --out runs/sure
      torchrun --nproc_per_node 2 -m unmask distill runs/demo --sources my_texts/ --out runs/ranks

    The student starts as its teacher. In each round it learns to take two of its teacher's steps at once; then it
    becomes the teacher, whose steps are twice as long. Give the same command again to resume, or with more --rounds to
    go on; SIGTERM and SIGINT finish the step, save a checkpoint, and exit with code 3.

    Args:
        teacher: The model to distil: a run, a model folder or a name on the hub.
        method: sdtt is for masked diffusion, dcd for uniform noise (discrete consistency distillation); confidence
            trains for samplers that write what they are sure of, and has no rounds.
        rounds: The rounds; each halves the steps in which the student samples. 5 by default, or fewer if a text then
            takes one step.
        steps_per_round: Training steps of a round: 200 by default. For confidence, those of the run: 1000.
        sampling_steps: The steps in which the teacher samples: by default, as many as its rows have tokens.
        sources: The text to learn on, as `unmask train` takes it: like that which the teacher was trained on.
        valid_sources: Sources to hold out for validation, instead of a fraction of the text.
        out: The run's folder: corpus, checkpoints, metrics.jsonl and, at the end, model/.
        lora_rank: Train LoRA adapters of this rank instead of all weights.
        batch_size: The global batch size: 16 by default.
        seed: Decides the order of the text, and all noise.
        overrides: Any setting of `unmask train distill --help-settings`, as in `training.optimizer.lr=0.0001` or
            `distillation.teacher_average=true`.
        restart: Begin at step 1 again; earlier checkpoints and metrics are kept in aside-1/.
        print_config: Print the experiment as JSON, and stop.
    """
    if not sources:
        raise ValueError("unmask distill needs --sources TEXT: the student learns on text like its teacher's")
    from unmask.recipes import distill as recipe

    _choose(method, rounds, steps_per_round, sampling_steps, 1 << 20)  # refuses what is wrong before loading the model
    experiment = recipe().with_init_from(str(teacher), load_model(teacher, allow_code=allow_code))
    chosen, steps = _choose(method, rounds, steps_per_round, sampling_steps, experiment.layout.length)
    training = replace(experiment.training, steps=steps)
    experiment = replace(experiment, sources=sources, distillation=chosen, training=training)
    flags = {
        "prepare.valid_sources": valid_sources or None,
        "training.batch_size": batch_size,
        "training.seed": seed,
    }
    experiment = customize(experiment, None, lora_rank, flags, [each for group in overrides for each in group])
    if print_config:
        print(json.dumps(to_json(experiment), indent=2, ensure_ascii=False))
        return
    run_in_folder(experiment, out, restart, "", allow_code or external_kinds(experiment))


def _choose(
    method: str, rounds: int | None, steps_per_round: int | None, sampling_steps: int | None, length: int
) -> tuple[Distillation, int]:
    """The distillation of a model whose rows have `length` tokens, and its training steps."""
    from unmask.distillation import DISTILLATIONS
    from unmask.distillation.base import RoundDistillation

    _check_at_least_one(rounds=rounds, steps_per_round=steps_per_round, sampling_steps=sampling_steps)
    chosen: Distillation = build_typed(method, DISTILLATIONS.base) if ":" in method else DISTILLATIONS[method]()
    if isinstance(chosen, RoundDistillation):
        per_round = steps_per_round or 200
        chosen = replace(chosen, steps_per_round=per_round, sampling_steps=sampling_steps or length)
        return chosen, per_round * (rounds or min(5, chosen.max_rounds))
    if rounds is not None or sampling_steps is not None:
        raise ValueError(
            f"{method} has no rounds of teachers: leave --rounds and --sampling-steps out, and give its training steps"
            " as --steps-per-round"
        )
    return chosen, steps_per_round or 1000


def _check_at_least_one(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1; got {number}")
