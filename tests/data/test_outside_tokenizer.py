"""A tokenizer from outside the package: as an object, by name, in a corpus and in a model folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiny_models
import unmask
from outside_tokenizer import Codons
from unmask import MDLM, DiTConfig, LanguageModel
from unmask.data.corpus import Corpus, PrepareConfig, prepare, stale_reasons
from unmask.data.loader import Wrapped
from unmask.data.readers import SourceConfig
from unmask.data.tokenizers import get_tokenizer, load_tokenizer
from unmask.distributed import Distributed
from unmask.evaluation.datasets import resolve_dataset
from unmask.evaluation.evaluate import tokenize_dataset
from unmask.experiment import Experiment
from unmask.report import ReportConfig
from unmask.report._measure import measure_run
from unmask.run import run_experiment
from unmask.training.config import TrainingConfig

NAME = f"{Codons.__module__}:Codons"
LINES = PrepareConfig(SourceConfig(lines=True), validation_fraction=0)


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "genes.txt").write_text("ATGGCC\nTTTAAACCC\n")
    return str(tmp_path / "genes.txt")


def test_a_corpus_is_prepared_and_opened_with_it(source: str, tmp_path: Path) -> None:
    tokenizer, out = Codons(), tmp_path / "out"
    corpus = prepare([source], out, tokenizer, LINES)
    split = corpus.splits["train"]
    end = Codons().eos_id
    assert split.read(0, split.num_tokens).tolist() == [
        *Codons().encode("ATGGCC"),
        end,
        *Codons().encode("TTTAAACCC"),
        end,
    ]
    assert corpus.vocab.mask_id == Codons().vocab_size
    assert prepare([source], out, tokenizer, LINES).digest == corpus.digest
    assert stale_reasons([source], out, tokenizer, LINES) == []
    assert stale_reasons([source], out, Codons("TGCA"), LINES) == ["the tokenizer or the config"]
    with pytest.raises(ValueError, match=r"tokenizer\.json needs the class .*:Codons, which is code from outside"):
        Corpus.open(out)
    assert Corpus.open(out, allow_code=True).tokenizer == Codons()
    assert Corpus.open(out, allow_code=[NAME]).tokenizer == Codons()


def test_names_give_classes_and_functions_if_they_are_allowed() -> None:
    function = f"{Codons.__module__}:rna"
    assert get_tokenizer(NAME, allow_code=True) == Codons()
    assert get_tokenizer(function, allow_code=[function]) == Codons("ACGU")
    for allow_code in (False, [NAME]):
        with pytest.raises(ValueError, match=rf"^the tokenizer {function} is code from outside unmask: pass the"):
            get_tokenizer(function, allow_code=allow_code)
    with pytest.raises(ValueError, match=r"^no\.such:Thing cannot be imported: there is no module 'no'$"):
        get_tokenizer("no.such:Thing", allow_code=True)
    with pytest.raises(ValueError, match=r"^pathlib:Path must be a BaseTokenizer"):
        get_tokenizer("pathlib:Path", allow_code=True)


def test_shards_are_merged_with_it(source: str, tmp_path: Path) -> None:
    whole = prepare([source], tmp_path / "whole", Codons(), LINES)
    for i in range(2):
        config = PrepareConfig(LINES.source, validation_fraction=0, shard=(i, 2))
        merged = prepare([source], tmp_path / "shards", Codons(), config)
    assert (merged.folder, merged.tokenizer) == (tmp_path / "shards", Codons())
    assert merged.splits["train"].num_tokens == whole.splits["train"].num_tokens


def test_a_model_is_saved_and_loaded_with_it_if_the_caller_allows_its_code(tmp_path: Path) -> None:
    lm = LanguageModel.from_config(tiny_models.tiny_denoiser(MDLM()).config.backbone, MDLM(), Codons())
    text = lm.sample(n=1, length=4).texts[0]
    assert set(text) <= set("ACGT.")
    assert lm.infill("ATG<mask:1>").texts[0].startswith("ATG")
    unmask.save(lm, tmp_path / "model")
    with pytest.raises(ValueError, match=r"needs the class .*:Codons, which is code from outside unmask"):
        unmask.load(tmp_path / "model")
    loaded = unmask.load(tmp_path / "model", allow_code=True)
    assert loaded.tokenizer == Codons()
    assert loaded.sample(n=1, length=4).texts[0] == text
    with pytest.raises(ValueError, match=r"^patterns need a tokenizer of the `tokenizers` library.*; got a Codons$"):
        loaded.infill("ATG<mask:1>", guidance=unmask.Guidance(regex="A+"))


def test_a_file_round_trip(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(Codons("TGCA").to_json())
    assert load_tokenizer(tmp_path / "tokenizer.json", allow_code=True) == Codons("TGCA")


def test_a_run_trains_resumes_exports_and_is_evaluated_with_it(source: str, tmp_path: Path) -> None:
    experiment = Experiment(
        sources=(source,),
        tokenizer=f"{Codons.__module__}:codons",
        backbone=DiTConfig(width=16, depth=1, heads=2, max_length=4),
        layout=Wrapped(4),
        training=TrainingConfig(steps=2, batch_size=2, save_every=1),
        prepare=LINES,
    )
    with pytest.raises(ValueError, match=r"codons is code from outside unmask"):
        run_experiment(experiment, tmp_path / "run", Distributed())
    for steps in (1, 2):
        longer = replace(experiment, training=replace(experiment.training, steps=steps))
        assert run_experiment(longer, tmp_path / "run", Distributed(), allow_code=True)
    lm = unmask.load(tmp_path / "run/model", allow_code=True)
    assert lm.tokenizer == Codons()
    lines = SourceConfig(lines=True)
    corpus, text = (
        resolve_dataset(str(path), tmp_path, source_config=lines, allow_code=True)
        for path in (tmp_path / "run/corpus", source)
    )
    assert tokenize_dataset(lm, corpus, tmp_path / "a").tokenizer == Codons()
    assert tokenize_dataset(lm, text, tmp_path / "b").tokenizer == Codons()
    config = ReportConfig(windows=1, samples=1, steps=1, replicates=2, sweep_replicates=2)
    assert measure_run(tmp_path / "run", config, allow_code=True).name == "run"
