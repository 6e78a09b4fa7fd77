"""A model of DNA behind the engine and on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import unmask
from engine_harness import PendingTasks, running_engine
from unmask.cli import main
from unmask.sampling import Ancestral
from unmask.serve._jobs import generation_job, scoring_job


@pytest.fixture(scope="module")
def lm() -> unmask.LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=24, dropout=0.0)
        model = unmask.LanguageModel.from_config(backbone, unmask.MDLM(), unmask.Tokenizer.dna())
        for parameter in model.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    return model


@pytest.mark.parametrize("both_strands", [False, True])
def test_the_engine_answers_as_the_library(lm: unmask.LanguageModel, both_strands: bool) -> None:
    model = lm.with_both_strands() if both_strands else lm
    ids = [model.encode_template(text)[0].tolist() for text in ("ACGN<mask:5>T", "<mask:9>", "TT<mask:2>ACGNAC")]
    expected = [model.generate(torch.tensor([row]), Ancestral(4), 7).tokens[0].tolist() for row in ids]
    nats = model.score("ACGNNA", draws=32, seed=3)
    with running_engine(model) as running:
        jobs = [generation_job(model, row, Ancestral(4), 7) for row in ids]
        waiting = PendingTasks([*jobs, scoring_job(model, [7, 8, 9, 11, 11, 7], 32, 3)])
        running.submit(waiting.tasks)
        *rows, score = waiting.wait()
    assert [list(row.ids) for row in rows] == expected
    assert score.nats == pytest.approx(nats.nats)
    assert score.tokens == nats.tokens == 4
    assert score.token_nats[3:5] == (0.0, 0.0)  # N costs nothing


def test_commands_take_and_give_letters(
    lm: unmask.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(unmask.save(lm, tmp_path / "dna"))

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["unmask", *arguments])
        main()
        return capsys.readouterr().out

    loaded = unmask.load(folder)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.complement_ids == unmask.Tokenizer.dna().complement_ids
    assert loaded.vocab == lm.vocab
    for strands in ([], ["--both-strands"]):
        text = run("infill", folder, "acg<mask:4>N", *strands).strip()
        assert text.startswith("ACG")
        assert text.endswith("N")
        assert run("sample", folder, "--length", "8", *strands).strip()
        scores = json.loads(run("score", folder, "ACGT", "ACGTN", "--json", *strands))
        assert [score["tokens"] for score in scores["scores"]] == [4, 4]
