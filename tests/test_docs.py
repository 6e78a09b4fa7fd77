"""Every command of the documents and of --help runs on what a reader has: the demo's run, or a small one."""

from __future__ import annotations

import ast
import gzip
import io
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from chat_models import chat_model
from doc_examples import (
    BIN,
    ROOT,
    demo_commands,
    document_examples,
    help_examples,
    output_mismatch,
    run_in_shell,
)
from reference_models import write_reference_model
from test_seams import EXAMPLES
from unmask import save
from unmask.cli import main

SMALL = "--set backbone.width=32 backbone.depth=1 backbone.heads=2 eval_windows=8"
HUB = {
    "GSAI-ML/LLaDA-8B-Base": "GSAI-ML/LLaDA-8B-Base",
    "google-bert/bert-base-uncased": "google-bert/bert-base-uncased",
    "eval runs/demo/model mdlm-zero-shot": "ptb:validation",
}
"""What only the hub has, and what is said of it where there is no network."""
LATER = ("make", "pip", "source", "curl", "pre-commit", "lm_eval")
"""Programs whose lines have tests of their own, or install something."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's run in it, much smaller, and the files of one's own that examples speak of."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my_texts").mkdir()
    shutil.copy(ROOT / "LICENSE", folder)
    (folder / "my_text.txt").write_text("A few words of my own, and a few more.\n")
    for name in ("my_texts/one.txt", "my_test.txt", "notes.txt"):
        shutil.copy(ROOT / "CONTRIBUTING.md", folder / name)
    shutil.copy(ROOT / "README.md", folder / "my_texts" / "two.txt")
    (folder / "some_code").mkdir()
    for module in (ast, json, random, re, shlex, shutil, subprocess):
        shutil.copy(module.__file__, folder / "some_code" / f"{module.__name__}.py")
    (folder / "my_package").mkdir()
    (folder / "my_package" / "my_module.py").write_text("from unmask.recipes import stdlib_tiny as my_recipe\n")
    pairs = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}"} for n in range(60)]
    questions = [{"prompt": pair["prompt"], "text": pair["completion"]} for pair in pairs[:3]]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    templates = [{"template": f"{n} + 1 =<mask:{1 + n % 3}>", "seed": n} for n in range(12)]
    (folder / "templates.jsonl").write_text("".join(json.dumps(template) + "\n" for template in templates))
    prompts = [{"prompt": pair["prompt"]} for pair in pairs[:4]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "point.json").write_text('{"properties": {"x": {"type": "integer"}}, "required": ["x"]}')
    (folder / "sums.gbnf").write_text('root ::= root "+" root | [0-9]+')
    renamed = [{"question": pair["prompt"], "reply": pair["completion"]} for pair in pairs]
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({**a, **b}) + "\n" for a, b in zip(pairs, renamed, strict=True))
    )
    chats = [
        [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["completion"]}] for p in pairs
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "questions.txt").write_text("Who are you?\nWhat is 1 + 1?\n")
    save(chat_model(), folder / "runs" / "chat")
    _write_task(folder / "my_tasks")
    shutil.copytree(folder / "my_texts", folder / "my_data" / "wikitext2")
    shutil.copy(ROOT / "README.md", folder / "my_data" / "wikitext2" / "train.tokens")
    for name in ("lambada", "ptb", "wikitext"):
        text = "\n".join(["the cat sat on the mat and then it sat there for a long time"] * 20)
        (folder / "text_sets").mkdir(exist_ok=True)
        (folder / "text_sets" / f"{name}.txt").write_text(text)
    reads = "".join(f"@read{n}\n{'ACGT' * 30}\n+\n{'I' * 120}\n" for n in range(40))
    (folder / "reads.fastq.gz").write_bytes(gzip.compress(reads.encode()))
    reviews = [f"{'a good' if n % 2 else 'a bad'} film number {n},{n % 2}\n" for n in range(24)]
    (folder / "reviews.csv").write_text("".join(["text,label\n", *reviews]))
    (folder / "glue" / "SST-2").mkdir(parents=True)
    for part in ("train", "dev"):
        lines = [review.replace(",", "\t") for review in ["sentence,label\n", *reviews]]
        (folder / "glue" / "SST-2" / f"{part}.tsv").write_text("".join(lines))
    (folder / "genomic" / "human_nontata_promoters").mkdir(parents=True)
    for part in ("train", "test"):
        rows = "".join(f"{'ACGT' * (5 + n % 3)},{n % 2}\n" for n in range(20))
        (folder / "genomic" / "human_nontata_promoters" / f"{part}.csv").write_text(f"sequence,label\n{rows}")
    bases = random.Random(0).choices("ACGT", k=12_000)
    genome = f">chr1\n{''.join(bases[:8000])}\n>chr2\n{''.join(bases[8000:])}\n"
    (folder / "genome.fa.gz").write_bytes(gzip.compress(genome.encode()))
    (folder / "regions.bed").write_text("chr1\t0\t2000\ttrain\nchr1\t3000\t7000\ttrain\nchr2\t9\t1500\tvalid\n")
    write_reference_model(folder / "my_causal_model", "gpt2")
    trained = run_in_shell(f"unmask train stdlib-tiny --out runs/demo --steps 3 --batch-size 4 {SMALL}", folder)
    assert trained.returncode == 0, trained.stderr
    return folder


def _write_task(folder: Path) -> None:
    """The task that docs/harness.md shows, with a cache beside it."""
    folder.mkdir()
    shown = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "harness.md").read_text(), re.DOTALL)
    assert shown is not None
    cached = shown[1].replace("{data_files:", f"{{cache_dir: {folder / 'cache'}, data_files:")
    (folder / "sums.yaml").write_text(cached)
    sums = [{"question": f"{n} + 1 =", "choices": [str(n + 1), "11"], "answer": 0} for n in range(3)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))


SESSIONS = sorted({example.where for example in document_examples()})


@pytest.mark.parametrize("document", [*SESSIONS, "--help"])
def test_every_command_runs(
    document: str,
    reader: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the order of the document, one after another in one folder, as somebody would who tries them all."""
    folder = tmp_path / "reader"
    shutil.copytree(reader, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr("unmask.io.hub._is_reachable", lambda *_: False)  # nobody is to fetch 16 GB here
    (folder / ".local/share/bash-completion/completions").mkdir(parents=True)
    (folder / ".config/fish/completions").mkdir(parents=True)
    for command in _lines_to_try(document):
        code, out, err = _carried_out(command, folder, monkeypatch, capsys)
        absent = next((told for name, told in HUB.items() if name in command), None)
        if absent is not None:
            assert (code, absent in err) == (2, True), (command, err)
        else:
            assert code == 0, (document, command, err)
            assert out or ">" in command, (document, command)


@cache
def _session(document: str) -> list[str]:
    examples = help_examples() if document == "--help" else document_examples()
    return [line for example in examples if document in ("--help", example.where) for line in example.commands]


def _lines_to_try(document: str) -> list[str]:
    """All but those that another document tries, if nothing here reads what they write."""
    lines = _session(document)
    later = [" ".join(lines[place + 1 :]) for place in range(len(lines))]
    pairs = zip(lines, later, strict=True)
    return [line for line, rest in pairs if _tried_by(line) == document or _is_read(line, rest.replace(line, ""))]


def _tried_by(line: str) -> str:
    """The document that shows a line most often, and of several the first one."""
    return max([*SESSIONS, "--help"], key=lambda document: _session(document).count(line))


def _is_read(line: str, rest: str) -> bool:
    made = re.search(r"--out (\S+)|^unmask export \S+ (\S+)", line)
    return made is not None and str(made[1] or made[2]) in rest


def test_every_line_is_tried_somewhere() -> None:
    """As often as the document that shows it most often does."""
    shown = {document: _session(document) for document in [*SESSIONS, "--help"]}
    tried = [line for document in shown for line in _lines_to_try(document)]
    assert len(tried) > 80
    for lines in shown.values():
        assert all(tried.count(line) >= lines.count(line) for line in lines)


def _carried_out(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """In this process where that is the same: a new one takes seconds to import torch."""
    words = command.split()
    typed = words[:2] == ["unmask", "chat"] and "<" not in words  # in a terminal; tests/cli/test_chat.py
    if typed or words[0] in LATER or words[:2] == ["unmask", "serve"] or " unmask serve " in command:
        return 0, "elsewhere", ""
    if words[:2] == ["python", "-m"]:
        return _known_options(words[2], words[3:])
    command = _quickly(command)
    if command.startswith("torchrun ") and command != _quickly(_first_on_ranks(words)):
        command = command.removeprefix(" ".join(words[:4])).strip()
    if not command.startswith("unmask ") or any(mark in command for mark in ("$(", " | ")):
        done = run_in_shell(command, folder)
        return done.returncode, done.stdout, done.stderr
    return _run_here(command, monkeypatch, capsys)


def _first_on_ranks(words: list[str]) -> str:
    """The line that starts ranks for this command; others that only differ in options are tried without."""
    start = " ".join(words[:6])
    lines = (line for document in [*SESSIONS, "--help"] for line in _session(document))
    return next(line for line in lines if line.startswith(start))


def _run_here(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    command, _, target = command.partition(" > ")
    command, _, given = command.partition(" < ")
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    if given:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(given).read_bytes()), encoding="utf-8"))
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    if target:
        Path(target).expanduser().write_text(out, encoding="utf-8")
    return code, out, err


def _quickly(command: str) -> str:
    """Training of two steps, of a small network, on a little text; little to evaluate; reproductions only planned.

    The demo's run, which all begin with, has read the whole of the default text.
    """
    if re.match(r"unmask eval \S+ \S+corpus$", command):
        command += " --windows 16"
    if command.startswith("unmask eval-samples") and "--steps" not in command:
        command += " --steps 4 8"
    command = re.sub(r"\.reference-model/\S+", "my_causal_model", command)
    if command.startswith("unmask reproduce") and "--list" not in command and "--plan" not in command:
        return f"{command} --plan"  # tests/reproduce carries them out
    if "unmask distill" in command:
        return f"{re.sub(r' --steps-per-round [0-9]+', '', command)} --steps-per-round 1"
    if "unmask train" not in command or "--print-config" in command:
        return command
    command = f"{re.sub(r' --steps [0-9]+', '', command)} --steps 2"
    if ".json" not in command and "--sources" not in command:
        command += " --sources some_code/"
    small = SMALL.replace("backbone.heads=2 ", "") if " backbone=" in command else SMALL
    return command if "--init-from" in command or ".json" in command else f"{command} {small}"


def _known_options(module: str, options: list[str]) -> tuple[int, str, str]:
    """Benchmarks take minutes: their own tests run them, here it is whether they know the options."""
    if module.startswith("examples."):
        return 0 if module.removeprefix("examples.") in EXAMPLES else 1, "tests/test_seams.py runs all of them", module
    asked = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=100)
    unknown = [option for option in options if option.startswith("--") and option not in shown.stdout]
    return shown.returncode + len(unknown), shown.stdout, f"unknown: {unknown}"


def test_every_command_of_the_help_has_an_example() -> None:
    assert [example.where for example in help_examples() if not example.commands] == []


def test_make_knows_the_targets() -> None:
    commands = [c for e in document_examples() for c in e.commands if c.startswith("make ")]
    assert {"make demo", "make test", "make bench"} <= set(commands)
    for command in set(commands):
        subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_the_demo(reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What `make demo` does, but for the training."""
    commands = demo_commands(reader / "runs" / "demo")
    assert [command.split()[1] for command in commands] == ["train", "eval", "sample", "infill", "report"]
    lines = [command.removeprefix(f"{BIN}/") for command in commands[1:]]
    outputs = [_carried_out(line, ROOT, monkeypatch, capsys)[1] for line in lines]
    assert "bits/byte" in outputs[0]
    assert "def is_even(n):" in outputs[2]
    assert outputs[3].strip() == str(reader / "runs" / "demo" / "report" / "index.html")


def test_serving(reader: Path) -> None:
    """The server of docs/serving.md answers the request that is shown there."""
    lines = [c for e in document_examples() if e.where == "docs/serving.md" for c in e.commands]
    (serve,) = (line for line in lines if line.startswith("unmask serve"))
    (curl,) = (line for line in lines if line.startswith("curl"))
    server = subprocess.Popen(
        ["sh", "-c", f"exec {BIN}/{serve} --port 0"], cwd=reader, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        address = None
        while address is None:
            line = server.stderr.readline()
            assert line, "the server has ended"
            address = re.search(r"127\.0\.0\.1:\d+", line)
        while "is ready" not in line:
            line = server.stderr.readline()
            assert line, "the server has ended"
        shown = run_in_shell(curl.replace("localhost:8000", address[0]), reader)
        (result,) = json.loads(shown.stdout)["results"]
        assert result["text"].startswith("for i in")
        assert len(result["spans"][0]["tokens"]) == 4
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0


def test_python(reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(reader)
    for document in ("README.md", "docs/python.md"):
        names: dict[str, object] = {}
        text = (ROOT / document).read_text(encoding="utf-8")
        for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
            exec(compile(block, document, "exec"), names)
    printed = capsys.readouterr().out
    assert "nats per token" in printed
    assert "0 tokens still masked" in printed
    assert (reader / "runs" / "fox" / "model.safetensors").exists()


def test_the_tree_is_the_one_on_disk() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## The tree")[1]
    package = ROOT / "src" / "unmask"
    entries = [p.name for p in package.iterdir() if not p.name.startswith(("_", "py.typed"))]
    for entry in entries:
        assert f"  {entry}" in tree, entry


def test_the_readme_has_no_pictures_that_only_a_checkout_has() -> None:
    """It is also the description of the package, which is shown where there is no docs/."""
    assert not re.findall(r"!\[[^\]]*\]\((?!https?://)", (ROOT / "README.md").read_text())
    assert "<img" not in (ROOT / "README.md").read_text()
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "docs/pictures/README.md").read_text()):
        assert (ROOT / "docs/pictures" / picture).is_file()


def test_the_package_says_who_made_it_and_where_it_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] == [{"name": "The unmask developers"}]
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    assert project["classifiers"] == sorted(project["classifiers"])
    assert not any(name.startswith("License ::") for name in project["classifiers"])  # the expression says it


def test_outputs_are_compared_to_the_letter_or_within_their_errors() -> None:
    """Times do not count; on a machine that rounds otherwise, figures may differ by their errors."""
    shown = "text  nats  seconds\na  5.00 ± 0.02  1.5\n"
    assert output_mismatch(shown, shown.replace("1.5", "2.5"), exactly=True) is None
    assert output_mismatch(shown, shown.replace("5.00", "5.01"), exactly=True) is not None
    assert output_mismatch(shown, shown + "more\n", exactly=True) is not None
    assert output_mismatch(shown, shown.replace("5.00", "5.10"), exactly=False) is None
    assert output_mismatch(shown, shown.replace("5.00", "6.00"), exactly=False) is not None
    assert output_mismatch(shown, "", exactly=False) is not None


def test_every_equation_leads_to_code() -> None:
    """Each row of docs/equations.md names things that are defined in the files that it names."""
    rows = [line for line in (ROOT / "docs/equations.md").read_text(encoding="utf-8").splitlines() if ".py`" in line]
    assert len(rows) > 25
    for row in rows:
        code = re.split(r"(?<!\\)\|", row)[2]
        names, files = re.findall(r"`([A-Za-z0-9_.]+)`", code), re.findall(r"`([a-z0-9_/]+\.py)`", code)
        sources = [(ROOT / "src/unmask" / file).read_text(encoding="utf-8") for file in files]
        for name in (part for dotted in names if not dotted.endswith(".py") for part in dotted.split(".")):
            assert any(re.search(rf"\b(class|def) {name}\b", source) for source in sources), (name, files)


def test_every_system_of_the_paper_has_a_command_that_is_tried_and_a_proof() -> None:
    """A row of the table in docs/methods.md names the beginning of a line that a document shows, and files of tests."""
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    section = text.split("## The systems of the paper")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    shown = [line for document in [*SESSIONS, "--help"] for line in _session(document)]
    assert len(rows[2:]) > 20
    for system, _, command, state, proof in rows[2:]:
        assert state.startswith("works") == bool(proof), system
        for line in re.findall(r"`([^`]+)`", command):
            assert any(f"{each} ".startswith(f"{line} ") for each in shown), (system, line)
        for path in re.findall(r"`([^`]+)`", proof):
            assert "\ndef test_" in (ROOT / path).read_text(encoding="utf-8"), (system, path)


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), (document.name, target)
