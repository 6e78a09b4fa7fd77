"""`unmask eval --tasks`: figures of lm-evaluation-harness, each with its errors and its definition."""

from __future__ import annotations

import configparser
import json
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.tasks import TaskManager

import tiny_models
import unmask
from harness_tasks import DOCUMENTS, write_tasks
from processes import run_program
from unmask import MDLM, SSDLM, LanguageModel, NextToken, Tokenizer
from unmask.evaluation.harness import HarnessModel, TaskConfig, TaskFigure, evaluate_tasks, load_tasks
from unmask.objectives import Objective

ROOT = Path(__file__).parents[2]
LETTERS = Tokenizer.characters("abc d")
ALL = "tiny_choices,tiny_last_word,tiny_whole_text,tiny_answer"


def tiny(objective: Objective | None = None, length: int = 12) -> LanguageModel:
    objective = MDLM() if objective is None else objective
    return LanguageModel(tiny_models.tiny_denoiser(objective, size=8, mask=5, length=length), LETTERS)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(unmask.save(tiny(), tmp_path_factory.mktemp("model") / "tiny"))


def figures_of(tasks: Path, model: HarnessModel, *names: str, **options: Any) -> dict[tuple[str, str], TaskFigure]:
    config = TaskConfig(names, include_path=tasks, **options)
    return {(each.task, each.metric): each for each in evaluate_tasks(model, load_tasks(config)).figures}


def test_a_table_and_its_json(letters: str, tasks: Path, command: Callable[..., Any], tmp_path: Path) -> None:
    options = ("eval", letters, "--tasks", ALL, "tiny_group", "--include-path", str(tasks), "--steps", "3")
    done = command(*options)
    assert done.code == 0, done.err
    header, *lines = done.out.splitlines()
    assert header.split()[:4] == ["task", "shots", "metric", "value"]
    rows = {tuple(line.split()[:3:2]): line for line in lines}
    assert " ± " in rows["tiny_choices", "acc"]
    assert rows["tiny_choices", "acc"].endswith("LLaDA, 128 draws")
    assert rows["tiny_whole_text", "bits_per_byte"].endswith("bound, 128 draws")
    assert rows["tiny_answer", "exact_match"].endswith("2.00  Confidence, 6 tokens")  # tokens/call, definition
    assert ("tiny_group", "acc") in rows
    sentences = {line.partition(":")[0] for line in lines if ": " in line}
    assert {"LLaDA, 128 draws", "bound, 128 draws", "Confidence, 6 tokens"} <= sentences
    assert "contexts were too long" in lines[-1]  # the model reads 12 tokens

    out = tmp_path / "figures.json"
    found = json.loads(command(*options, "--seed", "0", "--out", str(out), "--json").out)
    assert json.loads(out.read_text()) == found
    figures = {(each["task"], each["metric"]): each for each in found["figures"]}
    assert figures["tiny_last_word", "perplexity"]["monte_carlo_error"] > 0
    assert figures["tiny_whole_text", "bits_per_byte"]["standard_error"] > 0
    assert figures["tiny_answer", "exact_match"]["tokens_per_call"] == 2
    assert figures["tiny_answer", "exact_match"]["monte_carlo_error"] is None
    assert found["provenance"]["model"]["folder"] == letters
    limited = json.loads(command(*options, "--limit", "2", "--json").out)
    assert {each["documents"] for each in limited["figures"] if each["task"] == "tiny_choices"} == {2}


def test_the_monte_carlo_error_is_the_spread_over_seeds(tasks: Path) -> None:
    """Of the perplexity of last words: the standard deviation over ten seeds is that of any of them."""
    loaded = load_tasks(TaskConfig(("tiny_last_word",), include_path=tasks))
    models = [HarnessModel(tiny(), mc_num=16, seed=seed) for seed in range(10)]
    figures = [evaluate_tasks(model, loaded).figures[0] for model in models]
    spread = float(np.std([math.log(each.value) for each in figures], ddof=1))
    told = float(np.mean([each.monte_carlo_error / each.value for each in figures if each.monte_carlo_error]))
    assert 0.4 < told / spread < 2.5


def test_exact_likelihoods_have_no_monte_carlo_error(tasks: Path) -> None:
    found = figures_of(tasks, HarnessModel(tiny(NextToken())), "tiny_choices", "tiny_last_word", "tiny_whole_text")
    assert {each.monte_carlo_error for each in found.values()} == {0.0}
    assert {each.definition for each in found.values()} == {"exact"}


def test_accuracy_is_that_of_the_likelihoods(tasks: Path) -> None:
    model = HarnessModel(tiny())
    found = figures_of(tasks, model, "tiny_choices", "tiny_last_word")
    hits = 0
    for document in DOCUMENTS:
        scores = model.lm.score(document["choices"], [document["question"]] * 3, draws=256).per_text
        hits += int(np.argmin([score.nats for score in scores])) == document["answer"]
    assert found["tiny_choices", "acc"].value == hits / len(DOCUMENTS)
    assert 0 <= found["tiny_choices", "acc"].standard_error <= 0.5


def test_examples_come_before_questions_if_asked_for(tasks: Path) -> None:
    none, two = (
        figures_of(tasks, HarnessModel(tiny(length=64), mc_num=16), "tiny_last_word", num_fewshot=count)[
            "tiny_last_word", "perplexity"
        ]
        for count in (0, 2)
    )
    assert (none.num_fewshot, two.num_fewshot) == (0, 2)
    assert none.value != two.value


def test_ranks_share_the_work(letters: str, tasks: Path) -> None:
    options = ("eval", letters, "--tasks", "tiny_last_word,tiny_answer", "--include-path", tasks, "--json")
    one, two = (run_program("unmask", *options, ranks=ranks) for ranks in (1, 2))
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    found = [json.loads(each.stdout)["figures"] for each in (one, two)]
    for alone, shared in zip(*found, strict=True):
        assert shared == {**alone, "value": pytest.approx(alone["value"]), **approximately(alone)}


def approximately(figure: dict[str, Any]) -> dict[str, Any]:
    errors = ("standard_error", "monte_carlo_error", "tokens_per_call")
    return {name: None if figure[name] is None else pytest.approx(figure[name], rel=1e-4) for name in errors}


def only_included(include_path: Path | None, include_defaults: bool = True) -> TaskManager:
    """Without the harness's own tasks, which take seconds to look at."""
    return TaskManager(include_path=include_path, include_defaults=False)


def test_what_cannot_be_evaluated_is_one_sentence(
    letters: str, tasks: Path, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unmask.evaluation.harness._tasks.TaskManager", only_included)
    backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=12, dropout=0.0)
    continuous = LanguageModel.from_config(backbone, SSDLM(), LETTERS)
    simplex = str(unmask.save(continuous, tmp_path / "simplex"))
    lost = write_tasks(tmp_path / "lost")
    (lost / "documents.jsonl").unlink()
    masked = write_tasks(tmp_path / "masked", [{**DOCUMENTS[0], "question": "abce"}])
    e_is_the_mask = LanguageModel(tiny_models.tiny_denoiser(MDLM(), size=8, mask=5), Tokenizer.characters("abc de"))
    named = str(unmask.save(e_is_the_mask, tmp_path / "named"))
    include = ("--include-path", str(tasks))
    for arguments, sentence in (
        ((letters, "--tasks", "tiny_choice", *include), "there is no task 'tiny_choice' (did you mean tiny_choices?)"),
        ((str(tmp_path / "none"), "--tasks", "tiny_choices", *include), "is not a folder, nor a name on the hub"),
        ((letters, "--tasks", "tiny_choices", "--include-path", "nowhere"), "nowhere is not a folder with tasks"),
        ((letters, "--tasks", "tiny_choices", "--include-path", str(lost)), "the task tiny_choices cannot be loaded"),
        ((letters, "--tasks", "tiny_choices", *include, "--limit", "0"), "limit must be at least 1; got 0"),
        ((letters, "--tasks", "tiny_choices", *include, "--draws", "8"), "draws must be at least 16"),
        ((letters, "--tasks", "tiny_choices", *include, "--sampler", "conf"), "no sampler 'conf'"),
        ((letters, "--tasks", "tiny_answer", *include, "--sampler", "conf"), "'conf'"),
        ((letters, "--tasks", "tiny_choices", *include, "--apply-chat-template"), "has no chat template"),
        ((letters, "text.txt", "--tasks", "tiny_choices"), "evaluate on texts or on tasks"),
        ((letters, "text.txt", "--num-fewshot", "2"), "--num-fewshot is for tasks: name some with --tasks"),
        ((simplex, "--tasks", "tiny_choices", *include), "likelihood"),
        ((named, "--tasks", "tiny_choices", "--include-path", str(masked)), "contains the mask token e"),
    ):
        done = command("eval", *arguments)
        assert (done.code, done.out) == (2, ""), (arguments, done)
        assert sentence in done.err, (arguments, done.err)
        assert sum(line.startswith("unmask: ") for line in done.err.splitlines()) == 1, done.err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = command("eval", letters, "--tasks", "tiny_choices")
    assert (done.code, done.err) == (2, "unmask: this needs the package lm_eval: pip install 'unmask[harness]'\n")


def test_other_commands_do_not_import_the_harness(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, unmask.cli._evaluate, unmask.evaluation.evaluate\nsys.exit('lm_eval' in sys.modules)"
    )
    assert run_program(program).returncode == 0


def install_wheel(folder: Path) -> Path:
    """A folder into which the wheel of this tree is installed, without what it depends on."""
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "wheel"), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    if done.returncode != 0 and "hatchling" in done.stderr:
        pytest.skip("hatchling, which builds the wheel, is not installed and cannot be downloaded")
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "wheel").iterdir()
    site = folder / "site"
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True
    )
    return site


@pytest.mark.slow
def test_a_wheel_has_all_that_the_package_reads(tmp_path: Path) -> None:
    """Every file of the package but compiled ones, the module for the harness, and the entry points."""
    site = install_wheel(tmp_path)
    for package in ("unmask", "unmask_lm_eval.py"):
        source = ROOT / "src" / package
        files = [source] if source.is_file() else [each for each in source.rglob("*") if each.is_file()]
        names = {str(each.relative_to(ROOT / "src")) for each in files if "__pycache__" not in each.parts}
        assert {name for name in names if not (site / name).is_file()} == set()
    (metadata,) = site.glob("unmask-*.dist-info")
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    written = configparser.ConfigParser()
    written.read(metadata / "entry_points.txt")
    groups = {**stated["entry-points"], "console_scripts": stated["scripts"]}
    assert {group: dict(written[group]) for group in written.sections()} == groups


@pytest.mark.slow
def test_the_command_of_the_harness(letters: str, tasks: Path, tmp_path: Path) -> None:
    """`lm_eval --model unmask` where nothing but a wheel is installed, and not this tree."""
    site = install_wheel(tmp_path)
    words = [str(Path(sys.executable).with_name("lm_eval")), "--model", "unmask", "--batch_size", "4"]
    words += ["--model_args", f"pretrained={letters},mc_num=32", "--tasks", "tiny_choices,tiny_answer"]
    words += ["--include_path", str(tasks), "--output_path", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "|tiny_choices|" in done.stdout
    (written,) = tmp_path.rglob("out*.json")
    told = json.loads(written.read_text())["config"]["unmask"]
    assert told["definitions"]["loglikelihood"]["name"] == "LLaDA, 32 draws"
    assert told["tokens_per_call"] == {"tiny_answer": 1.0}
