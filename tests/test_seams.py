"""Parts from outside the package: as objects, on the command line, in files; and the tables of those inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

import unmask
from unmask import BACKBONES, OBJECTIVES, PROCESS_SAMPLERS, ROW_LAYOUTS, SAMPLERS, SCHEDULES
from unmask.cli import command_function
from unmask.cli._generation_options import GenerationOptions
from unmask.cli._help import help_text
from unmask.cli._signature import field_docstrings
from unmask.config import external_kinds, field_types, from_json, override, to_json
from unmask.data.tokenizers import TOKENIZERS, Tokenizer, get_tokenizer
from unmask.diffusion.schedule import LogLinear
from unmask.experiment import Experiment
from unmask.registry import build, family_of, resolve

ROOT = Path(__file__).parents[1]

CANARY = """
from dataclasses import dataclass
from pathlib import Path
from unmask.data.tokenizers import Tokenizer
from unmask.diffusion.schedule import LogLinear

Path(__file__).with_suffix(".imported").touch()

@dataclass(frozen=True)
class Outside(LogLinear):
    extra: int = 3

class NotADataclass(LogLinear.__base__):
    alpha = dalpha = weight = None

def letters():
    return Tokenizer.characters("abc")

number = 3
"""


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `canary_module` that can be imported; the file tells whether it was."""
    (tmp_path / "canary_module.py").write_text(CANARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "canary_module", raising=False)
    return tmp_path / "canary_module.imported"


DATA = {"kind": "MDLM", "schedule": {"kind": "canary_module:Outside", "eps": 0.25, "extra": 5}}


def test_code_is_not_imported_unless_it_is_allowed(canary: Path) -> None:
    for allow in (False, set(), {"canary_module:Other"}):
        with pytest.raises(ValueError, match=r"config\.schedule needs the class canary_module:Outside.*--allow-code"):
            from_json(unmask.Objective, DATA, allow_code=allow)
    assert not canary.exists()


@pytest.mark.parametrize("allow", [True, {"canary_module:Outside"}])
def test_allowed_code_comes_back_as_it_was_written(canary: Path, allow: Any) -> None:
    objective = from_json(unmask.Objective, DATA, allow_code=allow)
    assert canary.exists()
    assert (objective.schedule.eps, objective.schedule.extra) == (0.25, 5)
    assert external_kinds(objective) == {"canary_module:Outside"}
    assert from_json(unmask.Objective, json.loads(json.dumps(to_json(objective))), allow_code=True) == objective


def test_a_model_folder_never_imports_code_by_itself(canary: Path, tmp_path: Path) -> None:
    schedule = resolve("canary_module:Outside", unmask.Schedule)(extra=7)
    backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=8)
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(schedule=schedule), Tokenizer.bytes())
    folder = unmask.save(lm, tmp_path / "model")
    code = f"import unmask; unmask.load({str(folder)!r})"
    canary.unlink()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "needs the class canary_module:Outside" in done.stderr.splitlines()[-1]
    assert not canary.exists()
    assert unmask.load(folder, allow_code=True).objective == lm.objective


def test_changes_name_classes_from_outside(canary: Path) -> None:
    start = unmask.MDLM()
    with pytest.raises(ValueError, match="--allow-code"):
        override(start, "schedule=canary_module:Outside")
    changed = override(start, "schedule=canary_module:Outside", "schedule.extra=9", allow_code=True)
    assert (type(changed.schedule).__name__, changed.schedule.extra) == ("Outside", 9)  # type: ignore[attr-defined]
    assert override(changed, "schedule.extra=4").schedule.extra == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("canary_module:Missing", "the module canary_module has no Missing"),
        ("no_such_module:X", "no_such_module:X cannot be imported: there is no module 'no_such_module'"),
        ("canary_module:number", r"must be a Schedule \(see unmask\.diffusion\.schedule\); it is 3"),
        ("canary_module:NotADataclass", "to be a dataclass"),
        ("os:system", "must be a Schedule|to be a dataclass"),
    ],
)
def test_what_does_not_fit_is_one_sentence(canary: Path, name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        from_json(unmask.Schedule, {"kind": name}, allow_code=True)


def test_a_local_class_cannot_be_saved() -> None:
    @dataclass(frozen=True)
    class Here(LogLinear):
        pass

    with pytest.raises(ValueError, match="define the class at the top level of a module"):
        to_json(Here())


def test_a_tokenizer_from_outside_is_a_function_that_makes_one(canary: Path) -> None:
    with pytest.raises(ValueError, match="canary_module:letters is code from outside unmask"):
        get_tokenizer("canary_module:letters")
    assert not canary.exists()
    assert build("canary_module:letters", Tokenizer).encode("cab") == [2, 0, 1]


@pytest.mark.parametrize(
    "table", [SAMPLERS, PROCESS_SAMPLERS, OBJECTIVES, BACKBONES, SCHEDULES, ROW_LAYOUTS], ids=lambda t: next(iter(t))
)
def test_every_member_of_a_table_is_public_and_of_the_family(table: Any) -> None:
    for name in table:
        assert issubclass(table[name], table.base)
        assert getattr(unmask, table[name].__name__) is table[name]
        assert table[name].__name__ in unmask.__all__


def test_every_tokenizer_of_the_table_is_made_by_its_name() -> None:
    for name in TOKENIZERS:
        assert get_tokenizer(name).digest == TOKENIZERS[name]().digest


@dataclass(frozen=True)
class Added(unmask.Ancestral):
    """A sampler that a test adds to the table."""


@dataclass(frozen=True, kw_only=True)
class AddedObjective(unmask.MDLM):
    """An objective that a test adds to the table."""


def test_one_line_in_a_table_adds_a_sampler_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from unmask.serve.limits import Limits
    from unmask.serve.service import Service

    monkeypatch.setitem(SAMPLERS, "added", Added)
    assert unmask.Added is Added  # type: ignore[attr-defined]
    assert "Added" in unmask.__all__
    assert "remdm, added." in " ".join(help_text("sample", command_function("sample")).split())
    assert "added" in Service("tiny", Limits()).sampler_names()  # those that /v1/models lists


def test_one_line_in_a_table_adds_an_objective_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES, "added", AddedObjective)
    assert unmask.AddedObjective is AddedObjective  # type: ignore[attr-defined]
    assert "block,genmd4,flexmdm,mlm,added" in help_text("train", command_function("train")).replace(", ", ",")
    assert from_json(unmask.Objective, {"kind": "AddedObjective"}) == AddedObjective()


def test_the_names_for_type_checkers_are_those_of_the_tables() -> None:
    subprocess.run([sys.executable, "tools/exports.py", "--check"], cwd=ROOT, check=True)


@pytest.mark.slow  # the test above and those of tests/test_repr.py look at the same lines without mypy
def test_type_checkers_see_the_public_names_and_catch_typos(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("import unmask\nunmask.Ancestral(steps=3)\nunmask.Cosine()\nunmask.Ancestrl\n")
    run = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", str(tmp_path / "user.py")]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line] == ["4"]


# Settings


def config_classes(type_: Any) -> Iterator[type]:
    """The dataclasses that a type allows, and those of their fields."""
    members = get_args(type_) or (type_,)
    for member in members:
        family = family_of(member) if isinstance(member, type) else None
        for cls in [member] if family is None else list(family.values()):
            if len(members) > 1 or get_args(cls):
                yield from config_classes(cls)
            elif isinstance(cls, type) and is_dataclass(cls):
                yield cls
                for field_type in field_types(cls).values():
                    yield from config_classes(field_type)


def test_every_setting_has_a_help_text() -> None:
    classes = {cls for part in (Experiment, *SAMPLERS.values()) for cls in config_classes(part)}
    missing = sorted(
        f"{cls.__name__}.{field.name}"
        for cls in classes
        for field in fields(cls)
        if field.name not in field_docstrings(cls)
    )
    assert missing == []
    assert len(classes) > 30


def test_settings_are_listed_with_type_value_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    command_function("train")("stdlib-tiny", help_settings=True)
    text = capsys.readouterr().out
    assert "training.steps = 640\n    (int)\n" in text
    assert "objective.schedule.eps = 0.001\n    (float)\n    " in text
    assert "objective = MDLM\n    (MDLM or D3PM or SEDD" in text


# Examples

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("custom_*.py"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


PROGRAMS = """
import runpy, sys
for name in sys.argv[1:]:
    print("program", name)
    runpy.run_module(f"examples.{name}", run_name="__main__", alter_sys=True)
"""


def test_every_example_is_a_program() -> None:
    """As `python -m examples.NAME` runs it, all in one process: torch is imported once."""
    run = [sys.executable, "-c", PROGRAMS, *EXAMPLES]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    printed = dict(each.split("\n", 1) for each in done.stdout.split("program ")[1:])
    assert [name for name in EXAMPLES if printed[name].strip()] == EXAMPLES


COMMANDS = """
import contextlib, io, json, sys
sys.path.remove("")
from unmask.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv, code, out, err = ["unmask", *words], 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def in_new_process(*commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """Commands, from the project's folder: `examples` is importable only because it is typed."""
    run = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, env=environment())
    return [json.loads(line) for line in done.stdout.splitlines()]


CHANGES = {
    "sampler": [],
    "schedule": ["--set", "objective.schedule=examples.custom_schedule:Sine"],
    "objective": ["--objective", "examples.custom_objective:MaskGIT"],
    "backbone": ["--set", "backbone=examples.custom_backbone:GRUConfig"],
}


@pytest.mark.parametrize("part", [part for part in CHANGES if f"custom_{part}" in EXAMPLES])
def test_every_example_works_on_the_command_line(part: str, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    train = ("train", "examples.custom_recipe:tiny", "--steps", "3", "--out", out, *CHANGES[part])
    plain = ("sample", out, "--length", "8")
    more = ["--sampler", "examples.custom_sampler:Leftmost", "--sampler-option", "width=3"] if part == "sampler" else []
    trained, refused, written, resumed = in_new_process(train, plain, (*plain, "--json", "--allow-code", *more), train)
    assert trained[0] == 0, trained[2]
    if CHANGES[part]:
        assert refused[0] == 2
        assert f"needs the class examples.custom_{part}:" in refused[2]
    assert written[0] == 0, written[2]
    assert len(json.loads(written[1])["tokens"][0]) == 8
    assert not more or json.loads(written[1])["nfe"] == 3
    assert resumed[0] == 0, resumed[2]  # nothing is left to do


OUTSIDE = """
from dataclasses import dataclass
from unmask import Sampler, Wrapped

@dataclass(frozen=True)
class Plain(Sampler):
    def run(self, denoiser, canvas):
        yield canvas.tokens.masked_fill(canvas.tokens == denoiser.vocab.mask_id, 65)

plain = Plain()

@dataclass(frozen=True)
class Halves(Wrapped):
    def with_length(self, length):
        return Halves(max(1, length // 2))
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_parts.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_parts", raising=False)


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", ["outside_parts:Plain", "outside_parts:plain"])
def test_a_sampler_without_params_refuses_a_temperature(name: str) -> None:
    backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=16)
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), Tokenizer.bytes())
    for options in ({"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.5}):
        with pytest.raises(ValueError, match=f"^the sampler {name} has no temperature, top_k or top_p"):
            GenerationOptions(sampler=name, **options).build_sampler(lm)
        with pytest.raises(ValueError, match=f"^the sampler {name} has no temperature"):
            GenerationOptions(sampler=name, block_size=4, **options).build_sampler(lm)
    assert lm.sample(length=3, sampler=GenerationOptions(sampler=name).build_sampler(lm)).text == "AAA"
    drawn = GenerationOptions(sampler="examples.custom_sampler:Leftmost", top_k=2).build_sampler(lm)
    assert drawn.params.top_k == 2  # type: ignore[attr-defined]


def test_a_row_layout_from_outside_works_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "outside_parts.py").write_text(OUTSIDE)
    out = tmp_path / "run"
    words = ["train", "examples.custom_recipe:tiny", "--steps", "2", "--out", str(out)]
    words += ["--set", "layout=outside_parts:Halves", "--set", "layout.length=16"]
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from unmask.cli import main; main()"
    for _ in range(2):  # the second time, the run is resumed: nothing is left to do
        done = subprocess.run(
            [sys.executable, "-c", start, *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env=environment(),
        )
        assert done.returncode == 0, done.stderr
    saved = json.loads((out / "experiment.json").read_text())
    assert saved["layout"]["kind"] == "outside_parts:Halves"
    assert saved["layout"]["length"] == 16


def test_samplers_from_outside_are_objects_in_python() -> None:
    backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=16)
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), Tokenizer.bytes())

    class Own(unmask.Sampler):
        def run(self, denoiser: Any, canvas: Any) -> Any:
            yield canvas.tokens.masked_fill(canvas.tokens == denoiser.vocab.mask_id, 65)

    assert lm.sample(length=4, sampler=Own()).text == "AAAA"
    assert lm.complete(["ab"], length=3, sampler=Own()).texts == ["AAA"]
    assert replace(unmask.SemiAutoregressive(stride=2), sampler=Own()).sampler.run is not None  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampler must be a Sampler"):
        lm.sample(length=4, sampler=object())  # type: ignore[arg-type]
