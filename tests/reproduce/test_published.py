"""Published networks from packages: files of stand-ins with the packages' layouts, and the tables on them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import unmask
from unmask.reproduce import TABLES, Setup, _bert, _lab, _published, plan_tables, reproduce
from unmask.reproduce._antibodies import SPECIES, write_antibodies

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *RESIDUES]


def germlines(alleles: int = 3) -> dict[str, object]:
    """20 genes of each species and chain, whose names say what they are: V genes begin with the species."""
    letter = dict(zip(SPECIES, "ACDEF", strict=True))
    v = {
        chain: {
            species: {
                f"IG{chain}V{gene}*0{allele}": f"{letter[species]}-{chain}{RESIDUES[gene]}--{RESIDUES[allele]}WWWWWW"
                for gene in range(20)
                for allele in range(alleles)
            }
            for species in SPECIES
        }
        for chain in ("H", "K", "L")
    }
    j = {chain: {species: {"J1*01": f"---{letter[species]}{chain}Y"} for species in SPECIES} for chain in "HKL"}
    return {"J": j, "V": v}


@pytest.fixture
def antibodies(tmp_path: Path) -> Path:
    file = tmp_path / "germlines.py"
    file.write_text(f"import os\nall_germlines = {germlines()!r}\nraise SystemExit('this file was run')\n")
    folder = tmp_path / "antibodies"
    folder.mkdir()
    write_antibodies(file, folder)
    return folder


def read_rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def test_genes_are_joined_within_their_species_and_chain(antibodies: Path) -> None:
    rows = [row for part in ("train", "valid", "test") for row in read_rows(antibodies / f"{part}.csv")]
    assert len(rows) == len({row["sequence"] for row in rows}) == 3 * 5 * 20 * 3
    letter = dict(zip(SPECIES, "ACDEF", strict=True))
    for row in rows:
        sequence, species = row["sequence"], letter[row["label"]]
        assert sequence[0] == species
        assert sequence[-3:] == f"{species}{sequence[1]}Y"


def test_alleles_of_a_gene_are_in_one_part(antibodies: Path) -> None:
    """A gene is its species, chain and number: the first three letters of its sequence."""
    parts = {part: {row["sequence"][:3] for row in read_rows(antibodies / f"{part}.csv")} for part in ("train", "test")}
    assert parts["train"]
    assert parts["test"]
    assert not parts["train"] & parts["test"]
    texts = (antibodies / "train.txt").read_text().splitlines()
    assert texts == [row["sequence"] for row in read_rows(antibodies / "train.csv")]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "germlines.py").write_text("genes = {}")
    with pytest.raises(ValueError, match="does not list germline genes"):
        write_antibodies(tmp_path / "germlines.py", tmp_path)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """The packages antiberty and anarci with a tiny network of random weights."""
    folder = tmp_path / "site"
    network = folder / "antiberty" / "trained_models" / "AntiBERTy_md_smooth"
    network.mkdir(parents=True)
    (folder / "anarci").mkdir()
    (folder / "anarci" / "germlines.py").write_text(f"all_germlines = {germlines()!r}")
    config = BertConfig(
        vocab_size=len(TOKENS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    bert = BertForMaskedLM(config).eval()
    stored = {**bert.state_dict(), "bert.pooler.dense.weight": torch.zeros(16, 16), "cls.chain.weight": torch.zeros(2)}
    torch.save(stored, network / "pytorch_model.bin")
    (network / "config.json").write_text(json.dumps({**config.to_dict(), "_name_or_path": "/home/somebody"}))
    (network.parent / "vocab.txt").write_text("\n".join(TOKENS))
    monkeypatch.setattr(_published, "_package_folder", folder.joinpath)
    return folder.joinpath


def test_antiberty_is_the_published_network(packages: Callable[[str], Path], tmp_path: Path) -> None:
    published = _published.antiberty(tmp_path / "out")
    assert "somebody" not in (published.model / "config.json").read_text()
    lm = unmask.load(published.model)
    tokenizer = lm.tokenizer
    assert tokenizer is not None
    assert (lm.vocab.mask_id, tokenizer.eos_id) == (4, 3)
    ids = tokenizer.encode("ACDYW")
    assert ids == [TOKENS.index(letter) for letter in "ACDYW"]
    assert tokenizer.decode(ids) == "ACDYW"
    tokens = torch.tensor([[2, *ids, 3]])
    expected = BertForMaskedLM.from_pretrained(published.model)(tokens).logits
    backbone = lm.denoiser.backbone
    logits = backbone.compute_logits(backbone.encode(backbone.embed(tokens), torch.zeros(1)))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_published, "_package_folder", lambda name: None if name == "anarci" else Path())
    assert _published.missing_packages() == "pip install --no-deps anarci==2026.2.13.2"
    assert "pip install --no-deps anarci" in str(TABLES["glue"].missing(Setup()))


@pytest.mark.thorough
def test_proteins_are_fine_tuned_and_classified(
    packages: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rows are measured on the same text, whose genes the training has not seen, and tell the species."""
    monkeypatch.setattr(_lab, "RATE_FACTORS", (1.0,))
    table = replace(TABLES["glue"], trainings=lambda _setup: _bert.protein_trainings(), missing=lambda _setup: None)
    out = tmp_path / "out"
    out.mkdir()
    plan = {
        "format": "unmask-reproduce-1",
        "scale": "tiny",
        "minutes": 0.0005,
        "bf16": False,
        "steps": {"antibodies": 9},
    }
    (out / "plan.json").write_text(json.dumps(plan))
    (data,) = reproduce([table], Setup("tiny", None, 0.0005, 1), out)
    rows = {row["key"]: row["figures"] for row in data["rows"] if row["figures"]}
    assert set(rows) == {"antiberty", "antiberty-mdlm"}
    assert all(set(figures) == {"perplexity", "nats", "species"} for figures in rows.values())
    assert rows["antiberty-mdlm"]["perplexity"]["mean"] < rows["antiberty"]["perplexity"]["mean"]
    steps = {cell["method"]: cell["steps"] for cell in data["cells"]}
    assert steps == {"antiberty": 0, "antiberty-mdlm": 9}
    cell = json.loads((out / "cells" / "glue" / "antiberty-mdlm-seed-1.json").read_text())
    assert cell["experiment"]["sources"] == ["OUT/published/antibodies/train.txt"]
    assert cell["experiment"]["prepare"]["valid_sources"] == ["OUT/published/antibodies/test.txt"]


def test_the_paper_needs_no_data_to_be_planned() -> None:
    glue, dna, genomic = plan_tables([TABLES[name] for name in ("glue", "dna", "genomic")], Setup("paper"))
    # AR and MLM: 70,000 steps of 4,096 rows of 128; MDLM-FT: 5,000 of 512 rows.
    assert glue["tokens"] == 3 * (2 * 70_000 * 4096 * 128 + 5_000 * 512 * 128)
    assert set(glue["new_trainings"]) == {"c4-ar", "c4-bert", "c4-bert-mdlm"}
    assert glue["missing"] is None
    # Two pre-trainings of 10,000 steps and four trainings of 50,000, each of 2^20 bases.
    assert dna["tokens"] == 3 * (2 * 10_000 + 4 * 50_000) * 2**20
    assert "hg38.ml.fa" in dna["missing"]
    assert genomic["new_trainings"] == []
    assert all(each["gpu_days"] > 0 for each in (glue, dna))
