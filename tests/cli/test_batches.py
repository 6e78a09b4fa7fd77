"""infill, complete and score on a file: every line is answered once, in order, as it would be alone."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

import unmask
from processes import run_program
from unmask.backbones.dit import LlamaBlock
from unmask.cli import _progress, _requests
from unmask.objectives import Objective
from unmask.sampling import Sampler
from unmask.sampling.uniform import UniformAncestral

Command = Callable[..., Any]
WORKER = Path(__file__).parents[1] / "batches_worker.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens depend on one another, in float64: rounding does not decide between tokens."""
    backbone = unmask.DiTConfig(width=16, depth=2, heads=2, max_length=32, dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.characters("abcde 0123456789"))
        for parameter in lm.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return str(unmask.save(lm, tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_requests, "_MAX_BATCH_TOKENS", 64)
    monkeypatch.setattr(_progress, "_SHOW_AFTER_SECONDS", float("inf"))  # on a busy machine, too


def templates(count: int = 24) -> list[str]:
    chance = random.Random(0)
    return [
        "abcde"[: chance.randint(0, 4)] + f"<mask:{chance.randint(1, 9)}>" + "ed " * chance.randint(0, 4)
        for _ in range(count)
    ]


def write(path: Path, *requests: Any) -> str:
    """A file of requests; a text is a line as it is."""
    lines = [request if isinstance(request, str) else json.dumps(request) for request in requests]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def answers(path: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_templates_are_filled_in_order_as_alone(model: str, command: Command, tmp_path: Path) -> None:
    asked = templates()
    source = write(tmp_path / "in.jsonl", *({"template": each} for each in asked))
    out = str(tmp_path / "out.jsonl")
    done = command("infill", model, "--input", source, "--output", out, "--steps", "5", "--seed", "3", "--n", "2")
    assert (done.code, done.out, done.err) == (0, f"{out}\n", "")
    found = answers(out)
    assert [answer["line"] for answer in found] == list(range(1, len(asked) + 1))
    lm, sampler = unmask.load(model), unmask.Ancestral(5)
    together = lm.infill(asked, n=2, seed=3, sampler=sampler).texts
    assert [result["text"] for answer in found for result in answer["results"]] == together
    for number in (0, 7, 23):
        for index, result in enumerate(found[number]["results"]):
            assert (result["index"], result["seed"]) == (index, 3 + 2 * number + index)
            assert lm.infill(asked[number], seed=result["seed"], sampler=sampler).text == result["text"]
            (span,) = result["spans"]
            before, _, after = asked[number].partition("<mask:")
            assert result["text"][: span["start"]] == before
            assert result["text"][span["end"] :] == after.partition(">")[2]
            assert result["text"][span["start"] : span["end"]] == span["text"]


def test_a_line_has_options_of_its_own(model: str, command: Command, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"template": "a<mask:4>", "seed": 9, "n": 3, "sampler": "confidence", "steps": 2, "temperature": 0.5},
        {"segments": ["ab", 2, 1, [0, 1]], "id": "mine", "top_k": None},
        {"template": "a<mask:2>b<mask:3>", "regex": ["[0-9]+", "[ab]+"], "id": 7},
    )
    done = command("infill", model, "--input", source)
    assert (done.code, done.err) == (0, "")
    first, second, third = (json.loads(line) for line in done.out.splitlines())
    lm = unmask.load(model)
    sampler = unmask.Confidence(2, params=unmask.SamplingParams(0.5))
    assert [each["text"] for each in first["results"]] == lm.infill("a<mask:4>", n=3, seed=9, sampler=sampler).texts
    assert second["id"] == "mine"
    assert [span["end"] - span["start"] for span in second["results"][0]["spans"]] == [2, 1]
    assert third["id"] == 7
    digits, letters = (span["text"] for span in third["results"][0]["spans"])
    assert (digits.isdecimal(), set(letters) <= set("ab")) == (True, True)


def test_prompts_are_completed_as_alone(model: str, command: Command, tmp_path: Path) -> None:
    chance = random.Random(1)
    asked = ["abcde 12"[: chance.randint(0, 8)] for _ in range(20)]
    requests = [{"prompt": prompt} for prompt in asked]
    source = write(tmp_path / "in.jsonl", *requests, {"prompt": [0, 1], "max_tokens": 3, "seed": 5})
    out = tmp_path / "out.jsonl"
    assert command("complete", model, "--input", source, "--output", str(out), "--length", "6").code == 0
    found, lm = answers(out), unmask.load(model)
    sampler = unmask.Ancestral(128)
    for number in (0, 3, 19):
        (choice,) = found[number]["choices"]
        alone = lm.complete([asked[number]], 6, seed=number, sampler=sampler).text
        assert choice == {"index": 0, "seed": number, "text": alone, "finish_reason": "length"}
    assert len(found[-1]["choices"][0]["text"]) == 3


def test_texts_are_scored_as_alone_and_ranked(model: str, command: Command, tmp_path: Path) -> None:
    chance = random.Random(2)
    asked = [
        ("ab"[: chance.randint(0, 2)], "".join(chance.choices("abc 01", k=chance.randint(1, 9)))) for _ in range(18)
    ]
    requests = [{"prompt": prompt, "text": text} for prompt, text in asked]
    source = write(tmp_path / "in.jsonl", *requests, {"text": "ab", "draws": 24, "seed": 11})
    out = tmp_path / "out.jsonl"
    done = command(
        "score", model, "--input", source, "--output", str(out), "--top", "2", "--seed", "4", "--draws", "16"
    )
    assert (done.code, done.err) == (0, "")
    found, lm = answers(out), unmask.load(model)
    for number in (0, 8, 17):
        prompt, text = asked[number]
        alone = lm.score(text, prompt, seed=4 + number, draws=16, per_token=True)
        assert found[number]["nats"] == pytest.approx(alone.nats, rel=1e-5)
        nats = sorted(alone.token_nats, reverse=True)[:2]
        assert [token["nats"] for token in found[number]["top_tokens"]] == pytest.approx(nats, rel=1e-5)
        assert all(text[token["position"]] == token["text"] for token in found[number]["top_tokens"])
    assert found[18]["nats"] == pytest.approx(lm.score("ab", draws=24, seed=11).nats, rel=1e-5)
    ranked = sorted(found, key=lambda answer: int(answer["rank"]))
    assert [answer["nats_per_token"] for answer in ranked] == sorted(
        (answer["nats_per_token"] for answer in found), reverse=True
    )
    shown = [line for line in done.out.splitlines() if line.startswith("line ")]
    assert [int(line.split(":")[0].split()[1]) for line in shown] == [answer["line"] for answer in ranked[:2]]
    assert done.out.count(" nats  ") == sum(len(answer["top_tokens"]) for answer in ranked[:2])


@pytest.mark.parametrize(
    ("objective", "sampler", "options"),
    [
        (unmask.NextToken(), None, []),
        (unmask.UniformDiffusion(), UniformAncestral(3), ["--steps", "3"]),
        (unmask.BlockDiffusion(), None, []),
    ],
)
def test_models_of_other_kinds(
    objective: Objective, sampler: Sampler | None, options: list[str], command: Command, tmp_path: Path
) -> None:
    """Texts of different lengths, some longer than the model, which share calls or do not: each as alone."""
    causal = isinstance(objective, unmask.NextToken)
    backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=16, dropout=0.0, causal=causal)
    lm = unmask.LanguageModel.from_config(backbone, objective, unmask.Tokenizer.characters("abcd"))
    model = str(unmask.save(lm, tmp_path / "model"))
    asked = ["a<mask:3>", "<mask:2>b", "ab<mask:2>cd<mask>", "abcd" * 3 + "<mask:4>", "abcd" * 5 + "<mask:2>a"]
    source = write(tmp_path / "in.jsonl", *({"template": each} for each in asked))
    filled = [json.loads(line) for line in command("infill", model, "--input", source, *options).out.splitlines()]
    lm = unmask.load(model)
    alone = [lm.infill(each, seed=number, sampler=sampler).text for number, each in enumerate(asked)]
    assert [answer["results"][0]["text"] for answer in filled] == alone
    prompts = ["a", "", "abc", "abcd" * 5]
    source = write(tmp_path / "in.jsonl", *({"prompt": each} for each in prompts))
    done = command("complete", model, "--input", source, "--length", "5", *options)
    alone = [lm.complete([each], 5, seed=number, sampler=sampler).text for number, each in enumerate(prompts)]
    assert [json.loads(line)["choices"][0]["text"] for line in done.out.splitlines()] == alone


def test_a_model_without_likelihood_is_refused(command: Command, tmp_path: Path) -> None:
    backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=16, dropout=0.0)
    lm = unmask.LanguageModel.from_config(backbone, unmask.SSDLM(), unmask.Tokenizer.characters("abcd"))
    source = write(tmp_path / "in.jsonl", {"text": "ab"})
    refused = command("score", str(unmask.save(lm, tmp_path / "model")), "--input", source)
    assert (refused.code, refused.err.startswith("unmask: SSD-LM has no likelihood")) == (2, True)


def test_the_most_surprising_of_texts_on_the_command_line(model: str, command: Command) -> None:
    texts = ["ab", "ba 0", "e e"]
    plain = command("score", model, *texts).out.splitlines()
    ranked = command("score", model, *texts, "--top", "2").out.splitlines()
    heads = [line for line in ranked if not line.startswith(" ")]
    assert heads == sorted(plain, key=lambda line: -float(line.split()[0]))[:2]
    assert len(ranked) == 6


def test_bad_lines_are_told_and_do_not_stop_the_rest(model: str, command: Command, tmp_path: Path) -> None:
    bad = {
        '{"template": "no hole"}': "has no hole",
        "{": "is not valid JSON",
        '{"tempalte": "<mask>"}': "did you mean template?",
        '{"template": "a<mask>", "n": 0}': "n must be from 1",
        '{"template": "a<mask>", "n": "2"}': "the request.n must be int",
        '{"template": "a<mask>", "seed": -1}': "a seed must be 0 or above",
        '{"template": "a<mask>", "sampler": "os:system"}': "there is no sampler 'os:system'",
        '{"template": "a<mask>", "steps": 0}': "steps",
        '{"template": "a<mask>", "temperature": NaN}': "temperature",
        '{"template": "a<mask:2>", "regex": "[0-9]{5}"}': "cannot match",
        '{"template": "a<mask:2>", "regex": "("}': "regular expression",
        '{"template": "a<mask:2>", "segments": [1]}': "either template or segments",
        '{"segments": [1, [16]]}': "is the mask",
        '{"segments": [1, [99]]}': "outside the vocabulary",
        '{"template": "a<mask:99999999999>"}': "a hole must have",
    }
    lines = [line for each in bad for line in (each, '{"template": "a<mask:2>"}')]
    source, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    done = command("infill", model, "--input", source, "--output", str(out))
    assert done.code == 4
    found = answers(out)
    assert ["error" in answer for answer in found] == [True, False] * len(bad)
    for answer, told in zip(found[::2], bad.values(), strict=True):
        assert told in answer["error"]["message"]
    assert done.err.startswith("unmask: line 1: the template 'no hole' has no hole")
    assert done.err.endswith("unmask: and 5 more lines\n")
    again = command("infill", model, "--input", source, "--output", str(out))
    assert (again.code, again.err) == (4, f"unmask: {out} is complete already\n")


def test_a_sequence_that_fails_while_it_is_computed_fails_alone(
    model: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = _requests.InfillTask.run

    def run(self: Any, items: Any) -> Any:
        if any(item.line == 3 for item in items):
            raise ValueError("too much work")
        return inner(self, items)

    source, out = write(tmp_path / "in.jsonl", *({"template": "a<mask:2>"} for _ in range(6))), tmp_path / "out.jsonl"
    monkeypatch.setattr(_requests.InfillTask, "run", run)
    done = command("infill", model, "--input", source, "--output", str(out))
    assert (done.code, done.err) == (4, "unmask: line 3: too much work\n")
    found = answers(out)
    assert found[2] == {"line": 3, "error": {"message": "too much work"}}
    assert sum("results" in answer for answer in found) == 5


def test_from_standard_input_to_standard_output(
    model: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", *({"template": each} for each in templates(9)))
    command("infill", model, "--input", source, "--output", str(tmp_path / "out.jsonl"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(source).read_bytes()), encoding="utf-8"))
    done = command("infill", model, "--input", "-", "--output", "-")
    assert (done.code, done.err) == (0, "")
    assert done.out == (tmp_path / "out.jsonl").read_text()


def test_what_is_written_is_not_overwritten(model: str, command: Command, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *({"template": each} for each in templates(5)))
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    request = ("infill", model, "--input", source, "--output", str(out))
    assert (command(*request).code, out.read_text()) == (2, "mine\n")
    assert command(*request, "--restart").code == 0
    whole = out.read_bytes()
    for options, told in ((["--seed", "1"], "another seed (0 then, 1 now)"), (["--steps", "7"], "another steps")):
        refused = command(*request, *options)
        assert (refused.code, told in refused.err, out.read_bytes()) == (2, True, whole)
    changed = write(tmp_path / "in.jsonl", {"template": "a<mask>"})
    refused = command("infill", model, "--input", changed, "--output", str(out))
    assert (refused.code, "made with another input" in refused.err) == (2, True)
    assert command(*request, "--restart").code == 0
    assert len(answers(out)) == 1
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["infill"], "there is nothing to fill: give a template, or a file of requests with --input"),
        (["complete"], "there is nothing to complete: give prompts"),
        (["infill", "a<mask>", "--input", "in.jsonl"], "TEMPLATE cannot be combined with --input"),
        (["complete", "a", "--input", "in.jsonl"], "PROMPTS cannot be combined with --input"),
        (["score", "a", "--input", "in.jsonl"], "TEXTS cannot be combined with --input"),
        (["infill", "--input", "in.jsonl", "--json"], "--json cannot be combined"),
        (["infill", "--input", "in.jsonl", "--watch"], "--watch cannot be combined"),
        (["score", "--input", "in.jsonl", "--out", "x.json"], "--out cannot be combined"),
        (["infill", "a<mask>", "--output", "x.jsonl"], "name one with --input"),
        (["score", "a", "--restart"], "name one with --input"),
        (["score", "a", "--top", "0"], "--top must be at least 1"),
        (["infill", "--input", "missing.jsonl"], "missing.jsonl cannot be read: No such file"),
        (["infill", "--input", "."], "Is a directory"),
        (["infill", "--input", "in.jsonl", "--output", "."], "is a folder"),
        (["infill", "--input", "in.jsonl", "--output", "no/out.jsonl"], "there is no folder no"),
        (["infill", "--input", "in.jsonl", "--output", "in.jsonl", "--restart"], "in.jsonl is --input as well"),
        (["score", "--input", "in.jsonl", "--draws", "3"], "draws must be at least 16"),
        (["score", "--input", "in.jsonl"], "in.jsonl has no line that can be answered: line 1: the request has"),
        (["infill", "--input", "in.jsonl", "--steps", "0"], "steps"),
        (["infill", "--input", "in.jsonl", "--sampler", "threshold", "--steps", "3"], "chooses the number of steps"),
    ],
)
def test_refusals_change_nothing(
    arguments: list[str], told: str, model: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", {"template": "a<mask>"})
    done = command(arguments[0], model, *arguments[1:])
    assert (done.code, done.out) == (2, "")
    assert told in done.err
    assert done.err.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_option_that_fails_for_every_line_is_refused(
    model: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a sampler for another process than the model's, which is found when it begins."""

    def run(*_: Any) -> None:
        raise ValueError("this sampler is for another process")

    monkeypatch.setattr(_requests.InfillTask, "run", run)
    source = write(tmp_path / "in.jsonl", {"template": "a<mask:2>"}, {"template": "b<mask:2>"}, "{")
    done = command("infill", model, "--input", source, "--output", str(tmp_path / "out.jsonl"))
    assert (done.code, done.out) == (2, "")
    assert "no line that can be answered: line 1: this sampler is for another process" in done.err
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_interruption_keeps_what_is_done(
    model: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "in.jsonl", *({"template": each} for each in templates())), tmp_path / "out.jsonl"
    request = ("infill", model, "--input", source, "--output", str(out), "--steps", "4")
    inner = _requests.InfillTask.run
    batches: list[int] = []

    def run(self: Any, items: Any) -> Any:
        batches.append(len(items))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return inner(self, items)

    monkeypatch.setattr(_requests.InfillTask, "run", run)
    stopped = command(*request)
    assert (stopped.code, stopped.err) == (130, "unmask: give the same command again to go on\n")
    done = command(*request)
    assert (done.code, "going on after 2 of " in done.err) == (0, True)
    assert sum(batches) == len(answers(out)) + batches[2]  # only the batch that was interrupted is computed again


def test_special_tokens_in_texts_of_a_file_are_plain_text(tmp_path: Path, command: Command) -> None:
    """As in the server: what spells the mask token is not one, where the command line and Python would refuse it."""
    words = ["[PAD]", "[UNK]", "[MASK]", "a", "b", "[", "]", "MASK"]
    inner = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.add_special_tokens(words[:3])
    backbone = unmask.DiTConfig(16, 1, 2, max_length=16, dropout=0.0, llama=LlamaBlock(16))
    lm = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer(inner))
    assert lm.parses_special_tokens
    unmask.save(lm, tmp_path / "llama")
    source = write(tmp_path / "in.jsonl", {"prompt": "a [MASK] b"}, {"prompt": "a b"}, {"prompt": [2]})
    done = command("complete", str(tmp_path / "llama"), "--input", source, "--length", "2")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert ["choices" in answer for answer in found] == [True, True, False]
    assert "the id 2 is the mask" in found[2]["error"]["message"]
    assert "contains the mask token" in command("complete", str(tmp_path / "llama"), "a [MASK] b", "--length", "2").err


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of three kinds, some of them wrong, and regular expressions."""
    folder = tmp_path_factory.mktemp("many")
    asked: list[Any] = [{"template": each} for each in templates(24)]
    asked[5:5] = ["{", {"template": "a<mask:4>", "regex": "[0-9]+", "n": 5}, "", {"template": "none"}]
    write(folder / "infill.jsonl", *asked)
    write(folder / "complete.jsonl", *({"prompt": "abcde 01"[: n % 9]} for n in range(30)))
    write(folder / "score.jsonl", *({"text": "abcde 01"[: 1 + n % 8], "prompt": "ab"[: n % 3]} for n in range(16)))
    return folder


COMMANDS = {
    "infill": ["--steps", "4"],
    "complete": ["--length", "6", "--sampler", "confidence", "--steps", "3"],
    "score": ["--draws", "16", "--top", "2"],
}


def work(name: str, model: str, folder: Path, out: Path, kill: int = -1, where: str = "between", ranks: int = 1) -> Any:
    options = ["--input", folder / f"{name}.jsonl", "--output", out, *COMMANDS[name]]
    return run_program(WORKER, kill, where, name, model, *options, ranks=ranks)


@pytest.mark.parametrize("name", COMMANDS)
def test_kill_9_and_ranks_change_nothing(name: str, model: str, many: Path, tmp_path: Path) -> None:
    """Killed within a line of the journal, on two ranks and at the very end, and gone on with: the same bytes."""
    expected = 4 if name == "infill" else 0
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert work(name, model, many, whole).returncode == expected
    lines = [number for number, line in enumerate((many / f"{name}.jsonl").read_text().splitlines(), start=1) if line]
    assert [answer["line"] for answer in answers(whole)] == lines
    assert work(name, model, many, out, 1, "between", ranks=2).returncode == -9
    assert work(name, model, many, out, 1, "within").returncode == -9
    assert not out.exists()
    assert len((tmp_path / "out.jsonl.partial" / "rank-0.jsonl").read_bytes().splitlines()) == 3  # the last is torn
    assert work(name, model, many, out, -1, "end").returncode == -9
    done = work(name, model, many, out)
    assert (done.returncode, "going on after" in done.stderr) == (expected, True)
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk_loses_nothing(model: str, many: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert work("complete", model, many, whole).returncode == 0
    full = work("complete", model, many, out, where="full")
    assert full.returncode == 2
    assert "cannot be written: File too large" in full.stderr
    journal = (tmp_path / "out.jsonl.partial" / "rank-0.jsonl").read_bytes()
    assert (len(journal), journal.count(b"\n") > 0, journal.endswith(b"\n")) == (1500, True, False)
    done = work("complete", model, many, out)
    assert (done.returncode, "going on after" in done.stderr) == (0, True)
    assert out.read_bytes() == whole.read_bytes()


def test_two_ranks_write_the_file_of_one(model: str, many: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    first, second = (work("infill", model, many, out, ranks=ranks) for out, ranks in ((one, 1), (two, 2)))
    assert (first.returncode, second.returncode) == (4, 4), second.stderr
    assert two.read_bytes() == one.read_bytes()
    assert (second.stdout.count(str(two)), second.stderr.count("line 6: ")) == (1, 1)


def test_ranks_do_not_share_standard_streams(model: str, many: Path) -> None:
    refused = run_program("unmask", "infill", model, "--input", many / "infill.jsonl", ranks=2)
    assert refused.returncode == 2
    assert "the ranks of torchrun share files" in refused.stderr
