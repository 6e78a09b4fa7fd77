"""The report of a tiny real run: whole, self-contained, true to its numbers, and safe with any text."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import unmask
from unmask.backbones.dit import DiTConfig
from unmask.data.corpus import Corpus, PrepareConfig
from unmask.data.loader import Loader, Wrapped
from unmask.distributed import Distributed
from unmask.experiment import Experiment
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.likelihood.step_bounds import step_bounds
from unmask.objectives import MDLM, SEDD, NextToken
from unmask.report import ReportConfig, write_report
from unmask.report._html import render_page
from unmask.report._measure import _STEP_COUNTS, ReportData, measure_run
from unmask.report._plots import make_plots
from unmask.report._plotting import Plot
from unmask.report._samples import RevealedSample, RevealedToken
from unmask.report.formatting import format_with_error
from unmask.run import run_experiment
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60
QUICK = ReportConfig(windows=4, replicates=2, sweep_windows=2, sweep_replicates=2, samples=2, steps=4)
SECTIONS = ("figures", "training", "likelihood", "samples", "settings", "provenance")
HOSTILE = '</pre><script>alert("1")</script><img src=x onerror=alert(1)>&amp;'
VOID = {"meta", "input", "br", "img", "link", "hr"}


def trained(folder: Path, **changes: object) -> Path:
    """A run in its folder: two checkpoints and a model."""
    source = folder.parent / "fox.txt"
    source.write_text(TEXT)
    training = TrainingConfig(
        steps=6, batch_size=4, optimizer=AdamW(lr=1e-2), warmup_steps=2, bf16=False, save_every=3, log_every=1
    )
    experiment = Experiment(
        sources=(str(source),),
        tokenizer="bytes",
        backbone=DiTConfig(width=32, depth=1, heads=2, max_length=16, dropout=0.0),
        layout=Wrapped(16),
        training=replace(training, eval_every=3),
        eval_windows=4,
    )
    objective = changes.pop("objective", experiment.objective)
    assert run_experiment(replace(experiment.with_objective(objective), **changes), folder, Distributed())  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "fox & co")


@pytest.fixture(scope="module")
def contents(run: Path) -> ReportData:
    return measure_run(run, QUICK)


@pytest.fixture(scope="module")
def drawings(contents: ReportData) -> dict[str, Plot]:
    return make_plots(contents)


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    return write_report(run, config=QUICK).parent


class Page(HTMLParser):
    """Checks the nesting of a page, and gathers its tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def read(folder: Path) -> Page:
    return Page((folder / "index.html").read_text(encoding="utf-8"))


def test_every_section_and_figure_is_there(report: Path) -> None:
    found = read(report)
    headings = {attributes.get("id") for tag, attributes in found.tags if tag == "h2"}
    assert headings == set(SECTIONS)
    figures = {"loss", "lr_factor", "grad_norm", "throughput", "by-time", "steps"}
    assert {path.stem for path in report.glob("*.png")} == figures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in report.glob("*.png"))
    drawn = [attributes for tag, attributes in found.tags if tag == "svg"]
    assert len(drawn) == len(figures)
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawn)
    assert ("title", {}) in found.tags
    assert "fox & co" in found.text


def test_the_page_asks_nobody_for_anything(report: Path) -> None:
    text, found = (report / "index.html").read_text(encoding="utf-8"), read(report)
    for tag, attributes in found.tags:
        assert tag not in {"link", "img", "iframe", "object", "base"}
        for name, value in attributes.items():
            if name in {"src", "href", "xlink:href", "action", "poster"}:
                assert (value or "").startswith("#")
            assert "://" not in (value or "") or name.startswith("xmlns")
    assert "@import" not in text
    assert text.count("url(") == text.count("url(#")
    assert "default-src 'none'" in text


def test_the_numbers_are_those_of_report_json(report: Path) -> None:
    data, text = json.loads((report / "report.json").read_text(encoding="utf-8")), read(report).text
    headline = data["headline"]
    for name, error in (
        ("bits_per_byte", "bits_per_byte_error"),
        ("nats_per_token", "standard_error"),
        ("perplexity", "perplexity_error"),
    ):
        assert headline[name] == data["validation"][name]
        assert headline[error] > 0
        assert " ".join(format_with_error(headline[name], headline[error])) in text
    assert headline["tokens_seen"] == 6 * 4 * 16
    assert sum(data["validation"]["by_time"]) == pytest.approx(headline["nats_per_token"])
    assert [bound["steps"] for bound in data["step_bounds"]] == [*_STEP_COUNTS, None]
    assert data["network"]["network"] in text
    assert len(data["curves"]["loss"]) == 6
    assert data["curves"]["valid_step"] == [3, 6]
    stored = json.loads((report.parent / "experiment.json").read_text(encoding="utf-8"))
    assert stored["corpus_sha256"] == data["provenance"]["data"]["corpus (SHA-256)"]
    assert stored["corpus_sha256"] in text
    assert data["provenance"]["report"]["windows"] == QUICK.windows
    assert all(version in text for version in data["provenance"]["versions"].values())
    assert all(sample["text"] in text for sample in data["samples"])


def test_bounds_are_those_of_the_plain_estimate(contents: ReportData, run: Path) -> None:
    """With T = 1 every position is asked with all hidden: nothing is drawn, so the bound is exact."""
    one, *_, limit = contents.step_bounds
    lm, text = unmask.load(run / "model"), Corpus.open(run / "corpus").splits["valid"]
    loader = Loader(text, Wrapped(16), batch_size=2)
    with lm.inference_mode():
        exact = score_corpus(lm.denoiser, MDLM(steps=1), loader, EvalConfig(2, 2, seed=5))
        plain = score_corpus(lm.denoiser, MDLM(), loader, EvalConfig(2, 50, seed=5))
    assert (one.steps, limit.steps) == (1, None)
    assert one.nats_per_token == pytest.approx(exact.nats_per_token)
    assert one.standard_error == pytest.approx(0, abs=1e-6)
    assert limit.nats_per_token == pytest.approx(plain.nats_per_token, rel=0.5)
    assert limit.standard_error > 0


def test_samples_are_the_models_own(contents: ReportData, run: Path) -> None:
    written = unmask.load(run / "model").sample(2, 16, sampler=unmask.Ancestral(4), seed=0)
    assert [sample.text for sample in contents.samples] == written.texts
    assert all(1 <= piece.step <= sample.steps for sample in contents.samples for piece in sample.tokens)


def test_a_loss_that_is_no_bound_is_said_to_be_none(contents: ReportData) -> None:
    assert contents.loss_note == ""
    assert "no bound; held-out nats are MDLM's" in replace(contents, objective="MLM").loss_note
    distilled = {**contents.settings, "distillation": {"kind": "SDTT"}}
    assert "that of the distillation; held-out nats are MDLM's" in replace(contents, settings=distilled).loss_note


def test_hostile_text_is_only_text(contents: ReportData, drawings: dict[str, Plot]) -> None:
    pieces = (
        RevealedToken(HOSTILE, 1),
        RevealedToken('"x', 3, ((0, ""), (1, f"'\"{HOSTILE}"), (2, ""))),
        RevealedToken(HOSTILE, 0),
    )
    hostile = replace(
        contents,
        name=HOSTILE,
        samples=(RevealedSample(pieces, 3, 0),),
        settings={**contents.settings, "sources": [HOSTILE], HOSTILE: HOSTILE},
        provenance={**contents.provenance, "command": HOSTILE},
        sampler=HOSTILE,
        objective=HOSTILE,
        why_no_step_bounds=HOSTILE,
    )
    found = Page(render_page(hostile, drawings))
    assert found.count("script") == 1
    assert found.count("img") == 0
    assert found.text.count(HOSTILE) >= 9
    earlier = next(a["data-earlier"] for _, a in found.tags if "data-earlier" in a)
    assert json.loads(earlier or "") == [[0, ""], [1, f"'\"{HOSTILE}"], [2, ""]]


def test_a_run_that_is_not_finished(run: Path, tmp_path: Path) -> None:
    going = tmp_path / "going"
    shutil.copytree(run, going, ignore=shutil.ignore_patterns("model", "step-00000006", "report"))
    lines = (going / "metrics.jsonl").read_text().splitlines()
    bad = json.dumps({"step": 5, "skipped_batch": 4, "loss": "nan", "grad_norm": "inf"})
    (going / "metrics.jsonl").write_text("\n".join([*lines[:-2], bad, '{"step": 6, "lo']))
    folder = write_report(going, tmp_path / "out", QUICK).parent
    data, text = json.loads((folder / "report.json").read_text()), read(folder).text
    assert data["status"] == {"finished": False, "step": 5, "steps": 6, "checkpoint_step": 3}
    assert "at step 5 of 6" in text
    assert "the checkpoint of step 3" in text
    assert data["curves"]["skipped_steps"] == [5]
    assert data["curves"]["step"] == [1, 2, 3, 4, 5]


def test_a_run_without_held_out_text(tmp_path: Path) -> None:
    run = trained(tmp_path / "all", prepare=PrepareConfig(validation_fraction=0))
    folder = write_report(run, config=QUICK).parent
    data, text = json.loads((folder / "report.json").read_text()), read(folder).text
    assert data["validation"] is None
    assert data["headline"]["perplexity"] is None
    assert data["step_bounds"] == []
    assert "No text was held out" in text
    assert not (folder / "by-time.png").exists()
    assert (folder / "loss.png").exists()


@pytest.mark.parametrize(
    ("objective", "exact", "sentence"),
    [(NextToken(), True, "no number of steps to choose"), (SEDD(), False, "continuous time")],
)
def test_other_objectives_say_why_there_are_no_steps(
    objective: object, exact: bool, sentence: str, tmp_path: Path
) -> None:
    folder = write_report(trained(tmp_path / "other", objective=objective), config=QUICK).parent
    data, text = json.loads((folder / "report.json").read_text()), read(folder).text
    assert sentence in text
    assert data["step_bounds"] == []
    assert (data["validation"]["standard_error"] == 0) is exact
    assert ("exact, as the model is autoregressive" in text) is exact
    assert (folder / "by-time.png").exists() is not exact


def test_exact_counts_are_no_hindrance(tmp_path: Path) -> None:
    found = measure_run(trained(tmp_path / "even", objective=MDLM(exact_mask_counts=True)), QUICK)
    assert [bound.steps for bound in found.step_bounds] == [*_STEP_COUNTS, None]


def test_the_limit_has_the_luck_of_many_steps(tmp_path: Path) -> None:
    run = trained(tmp_path / "even", objective=MDLM(exact_mask_counts=True))
    lm, corpus = unmask.load(run), Corpus.open(run / "corpus")
    loader = Loader(corpus.splits["valid"], Wrapped(16), batch_size=4)
    with lm.inference_mode():
        many, limit = step_bounds(lm.denoiser, lm.objective, loader, (1 << 16,), EvalConfig(4, 2))
    assert (many.steps, limit.steps) == (1 << 16, None)
    assert limit.standard_error > 1e-3
    assert limit.nats_per_token == pytest.approx(many.nats_per_token, abs=0.02 * limit.standard_error)


def test_judged_samples_are_drawn(run: Path, tmp_path: Path) -> None:
    judged = tmp_path / "sample_evals"
    shutil.copytree(run, judged, ignore=shutil.ignore_patterns("report"))
    entry = {
        "perplexity_error": 2.5,
        "entropy": 3.0,
        "entropy_error": 0.1,
        "seconds": 1.5,
        "reference_model": "a $judge$",
    }
    entries = [
        {**entry, "sampler": HOSTILE, "steps": 4, "perplexity": 123.25},
        {**entry, "sampler": HOSTILE, "steps": 16, "perplexity": 99.5, "seconds": 4.0},
        {**entry, "sampler": "first hitting", "steps": None, "nfe": 16, "perplexity": 80.0},
        {**entry, "sampler": "unjudged", "steps": 4, "perplexity": None},
    ]
    (judged / "sample_evals.json").write_text(json.dumps({"sample_evals": entries, "provenance": {}}))
    folder = write_report(judged, config=QUICK).parent
    found, data = read(folder), json.loads((folder / "report.json").read_text())
    assert {path.stem for path in folder.glob("samples-*.png")} == {
        "samples-perplexity",
        "samples-entropy",
        "samples-seconds",
    }
    assert [entry["steps"] for entry in data["sample_evals"]] == [4, 16, 16]
    assert "123.25" in found.text
    assert found.count("script") == 1
    broken = {**entry, "sampler": "x", "perplexity": 3.0}
    (judged / "sample_evals.json").write_text(json.dumps({"sample_evals": [broken]}))
    with pytest.raises(ValueError, match="without a finite steps"):
        write_report(judged, config=QUICK)


def test_a_report_is_replaced_whole_or_not_at_all(
    report: Path, run: Path, drawings: dict[str, Plot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unmask.report._plots.make_plots", lambda _: drawings)
    before = (report / "index.html").read_bytes()
    (report / "stale.png").write_bytes(b"old")
    with monkeypatch.context() as broken:
        broken.setattr("unmask.report._html.render_page", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_report(run, config=QUICK)
    assert not list(run.glob(".report*"))
    assert (report / "index.html").read_bytes() == before
    assert (report / "stale.png").exists()
    write_report(run, config=QUICK)
    assert not (report / "stale.png").exists()
    assert not list(run.glob(".report*"))


def test_what_cannot_be_reported_is_told(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"not the folder of a run: it has no experiment\.json"):
        write_report(tmp_path, config=QUICK)
    assert not (tmp_path / "report").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"is not a report \(holds thesis\.tex\); choose another folder"):
        write_report(run, mine, QUICK)
    assert (mine / "thesis.tex").exists()
    with pytest.raises(ValueError, match="replicates must be at least 2"):
        ReportConfig(replicates=1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"needs the extra report: pip install 'unmask\[report\]'"):
        write_report(run, config=QUICK)


def test_every_part_of_the_work_is_told(run: Path, tmp_path: Path) -> None:
    told: dict[str, list[int | None]] = {}

    @contextmanager
    def progress(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        told[what] = [total]
        yield told[what].append

    write_report(run, tmp_path / "told", QUICK, progress)
    assert list(told) == ["held-out text", "bounds by steps", "samples", "plots"]
    assert told["held-out text"][0] == told["held-out text"][-1] == 4 * 2
    assert told["bounds by steps"] == [len(_STEP_COUNTS) + 1, *range(1, len(_STEP_COUNTS) + 2)]
    assert told["samples"][0] == 4
    assert 1 <= len(told["samples"][1:]) <= 8
