"""Distillation as a run: rounds, resuming after a real SIGKILL, ranks, the command and the student's folder.

Started as a program, this file is its own worker: `test_runs.py FOLDER TEACHER TEXT KILL_AT PARALLELISM`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import unmask
from processes import run_program
from unmask.cli import main as main_command
from unmask.config import override
from unmask.distillation import DCD, SDTT, ConfidenceDistillation
from unmask.distillation.base import TeacherRounds
from unmask.distributed import Distributed, init_distributed
from unmask.experiment import Experiment
from unmask.recipes import RECIPES
from unmask.run import build_trainer, prepare_corpus, run_experiment
from unmask.training.curriculum import TimeWidening
from unmask.training.lora import LoRA
from unmask.training.run_folder import RunFolder
from unmask.training.trainer import Trainer

WORDS = "the quick brown fox jumps over the lazy dog\n" * 60


def save_teacher(folder: Path, objective: unmask.Objective) -> Path:
    backbone = unmask.DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        letters = unmask.Tokenizer.characters("abcdefghijklmnopqrstuvwxyz \n")
        lm = unmask.LanguageModel.from_config(backbone, objective, letters)
        for parameter in lm.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return unmask.save(lm, folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with teachers and a text."""
    folder = tmp_path_factory.mktemp("place")
    save_teacher(folder / "teacher", unmask.MDLM())
    save_teacher(folder / "uniform", unmask.UniformDiffusion())
    (folder / "text.txt").write_text(WORDS)
    return folder


def experiment(teacher: Path, text: Path, distillation: Any = SDTT(sampling_steps=16, steps_per_round=4)) -> Experiment:  # noqa: B008
    recipe = RECIPES["distill"]()
    made = recipe.with_init_from(str(teacher), unmask.load(teacher))
    training = replace(
        made.training,
        steps=12,
        batch_size=6,
        microbatch_size=2,
        warmup_steps=2,
        optimizer=replace(made.training.optimizer, lr=1e-2),
        bf16=False,
        log_every=1,
        save_every=3,
        eval_every=12,
        ema_decay=0.8,
    )
    return replace(made, sources=(str(text),), training=training, distillation=distillation, eval_windows=4)


def trainer_of(made: Experiment, folder: Path) -> Trainer:
    run = RunFolder(folder)
    return build_trainer(made, prepare_corpus(made, run), Distributed())


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["round"]) for line in lines if "loss" in line]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("average", [False, True])
def test_after_each_round_the_student_becomes_the_teacher(place: Path, tmp_path: Path, average: bool) -> None:
    method = SDTT(sampling_steps=16, steps_per_round=4, teacher_average=average)
    trainer = trainer_of(experiment(place / "teacher", place / "text.txt", method), tmp_path)
    (hook,) = (each for each in trainer.hooks if isinstance(each, TeacherRounds))
    first = weights(trainer.model)
    assert equal(first, weights(hook.teacher))
    for step in range(1, 10):
        before = {name: w.clone() for name, w in trainer.ema.weights.items()} if average else weights(trainer.model)
        metrics = trainer.step()
        assert metrics["round"] == (step - 1) // 4 + 1
        assert trainer.loss_fn.number == (step - 1) // 4  # type: ignore[attr-defined]
        if step <= 4:
            assert equal(weights(hook.teacher), first)
        elif step % 4 == 1:
            assert equal(weights(hook.teacher), before)
            boundary = before
        else:
            assert equal(weights(hook.teacher), boundary)
    assert not hook.teacher.training
    assert not any(parameter.requires_grad for parameter in hook.teacher.parameters())
    assert metrics["loss"] > 0


def test_the_first_round_of_one_step_begins_at_no_loss(place: Path, tmp_path: Path) -> None:
    """The student is its teacher, and of one step of the teacher it already says all."""
    method = SDTT(sampling_steps=16, steps_per_round=4, teacher_steps=1)
    trainer = trainer_of(experiment(place / "teacher", place / "text.txt", method), tmp_path)
    metrics = trainer.step()
    assert abs(metrics["loss"]) < 1e-6
    assert metrics["grad_norm"] < 1e-5


def run(folder: Path, place: Path, kill_at: int = -1, ranks: int = 1, sharded: bool = False) -> int:
    words = (folder, place / "teacher", place / "text.txt", kill_at, "FSDP" if sharded else "DDP")
    done = run_program(__file__, *words, ranks=ranks)
    print(done.stderr)  # which a failing test then shows
    return done.returncode


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, place) == 0
    assert [step for step, *_ in losses(folder)] == list(range(1, 13))
    return folder


@pytest.mark.parametrize("kill_at", [5, 10])
def test_kill_9_in_any_round_changes_no_loss(whole: Path, place: Path, tmp_path: Path, kill_at: int) -> None:
    """Checkpoints are those of steps 3, 6, 9: within the first round, and after the last teacher is made."""
    assert run(tmp_path, place, kill_at) == -9
    assert run(tmp_path, place) == 0
    assert losses(tmp_path) == losses(whole)
    first, second = (unmask.load(folder).denoiser for folder in (whole, tmp_path))
    assert equal(weights(first), weights(second))


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_distil_as_one(whole: Path, place: Path, tmp_path: Path, sharded: bool) -> None:
    """Also where the student is sharded, and resumed with a whole teacher."""
    if sharded:
        assert run(tmp_path, place, kill_at=10, ranks=2, sharded=True) != 0
    assert run(tmp_path, place, ranks=2, sharded=sharded) == 0
    for (_, a, _), (_, b, _) in zip(losses(tmp_path), losses(whole), strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=1e-6)


def test_with_lora_teacher_and_student_share_what_is_frozen(place: Path, tmp_path: Path) -> None:
    made = replace(experiment(place / "teacher", place / "text.txt"), lora=LoRA(rank=4))
    trainer = trainer_of(made, tmp_path)
    (hook,) = (each for each in trainer.hooks if isinstance(each, TeacherRounds))
    assert set(hook.weights) == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    shared = dict(hook.teacher.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        assert (shared[name] is parameter) == (not parameter.requires_grad)
    for _ in range(5):
        metrics = trainer.step()
    assert metrics["round"] == 2
    assert any(float(weight.abs().max()) > 0 for name, weight in hook.weights.items() if name.endswith("b"))


@pytest.mark.parametrize(
    ("teacher", "method"),
    [
        ("uniform", DCD(sampling_steps=16, steps_per_round=4)),
        ("teacher", ConfidenceDistillation()),
    ],
)
def test_the_other_methods_run_and_leave_a_model(place: Path, tmp_path: Path, teacher: str, method: Any) -> None:
    made = experiment(place / teacher, place / "text.txt", method)
    assert run_experiment(made, tmp_path / "run", Distributed())
    student = unmask.load(tmp_path / "run")
    assert len(student.sample(n=1, length=8, seed=0).texts) == 1
    assert not equal(weights(student.denoiser), weights(unmask.load(place / teacher).denoiser))


Command = Callable[..., Any]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def give(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["unmask", *map(str, arguments)])
        code = 0
        try:
            main_command()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return give


QUICK = ("--batch-size", "4", "--set", "training.warmup_steps=1", "training.bf16=false", "eval_windows=4")


def test_the_command_distils_says_so_on_the_card_and_goes_on(place: Path, tmp_path: Path, command: Command) -> None:
    given = ("distill", place / "teacher", "--sources", place / "text.txt", "--out", tmp_path / "run", *QUICK)
    code, out, err = command(*given, "--rounds", "2", "--steps-per-round", "3")
    assert (code, out) == (0, f"{tmp_path / 'run' / 'model'}\n"), err
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"| distilled from | {place / 'teacher'} |" in card
    assert "| distillation | SDTT, 2 rounds of 3 steps from 16 sampling steps" in card
    code, out, _ = command("sample", tmp_path / "run", "--n", "1", "--length", "8", "--steps", "2")
    assert code == 0
    assert out
    code, _, err = command(*given, "--rounds", "3", "--steps-per-round", "3")
    assert code == 0, err
    assert "extended from 6 to 9 steps" in err
    assert "3 rounds of 3 steps" in (tmp_path / "run" / "model" / "README.md").read_text()
    code, _, err = command(*given, "--rounds", "3", "--steps-per-round", "2")
    assert code == 2
    assert err.count("\n") == 1


def test_defaults_follow_the_teacher(place: Path, command: Command) -> None:
    code, out, err = command("distill", place / "teacher", "--sources", "x", "--print-config")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["layout"]["length"] == 16
    assert shown["distillation"]["sampling_steps"] == 16
    assert shown["training"]["steps"] == 4 * shown["distillation"]["steps_per_round"]  # 16 -> 8 -> 4 -> 2 -> 1
    confident = ("--method", "confidence", "--steps-per-round", "7")
    code, out, err = command("distill", place / "teacher", "--sources", "x", "--print-config", *confident)
    assert code == 0, err
    shown = json.loads(out)
    assert (shown["distillation"]["kind"], shown["training"]["steps"]) == ("ConfidenceDistillation", 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{teacher}",), "needs --sources TEXT"),
        (("{uniform}", "--sources", "{text}"), "cannot be the teacher: SDTT distils masked diffusion"),
        (("{teacher}", "--sources", "{text}", "--method", "dcd"), "DCD distils uniform noise"),
        (("{teacher}", "--sources", "{text}", "--rounds", "9"), "at most 4 rounds"),
        (("{teacher}", "--sources", "{text}", "--rounds", "0"), "--rounds must be at least 1; got 0"),
        (("{teacher}", "--sources", "{text}", "--method", "confidence", "--rounds", "2"), "has no rounds of teachers"),
        (("{teacher}", "--sources", "{text}", "--method", "sttd"), "sdtt"),
        (("{missing}", "--sources", "{text}"), "missing"),
        (("{teacher}", "--sources", "{missing}"), "missing"),
        (
            ("{teacher}", "--sources", "{text}", "--set", "training.curriculum=TimeWidening"),
            "curriculum is for learning",
        ),
        (("{teacher}", "--sources", "{text}", "--set", "backbone.depth=2"), "would have no effect"),
        (("{teacher}", "--sources", "{text}", "--set", "objective=D3PM"), "a student has its teacher's objective"),
    ],
)
def test_what_does_not_fit_is_one_sentence_and_leaves_nothing(
    place: Path, tmp_path: Path, command: Command, arguments: tuple[str, ...], said: str
) -> None:
    names = {name: str(place / name) for name in ("teacher", "uniform", "missing")} | {"text": str(place / "text.txt")}
    given = [argument.format(**names) for argument in arguments]
    code, out, err = command("distill", *given, "--out", tmp_path / "run")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err
    assert not (tmp_path / "run").exists()


def test_an_experiment_of_distillation_needs_a_teacher() -> None:
    with pytest.raises(ValueError, match="needs a teacher: name it as init_from"):
        Experiment(distillation=SDTT())
    recipe = RECIPES["distill"]()
    training = replace(recipe.training, curriculum=TimeWidening())
    with pytest.raises(ValueError, match="curriculum is for learning from text"):
        replace(recipe, training=training)


def main() -> None:
    folder, teacher, text, kill_at = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    take_step = Trainer.step

    def step(self: Trainer) -> dict[str, float]:
        if self.state.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(self)

    Trainer.step = step  # type: ignore[method-assign]
    with init_distributed() as distributed:
        made = override(experiment(teacher, text), f"training.parallelism={sys.argv[5]}")
        assert run_experiment(made, folder, distributed)


if __name__ == "__main__":
    main()
