"""Windows of DNA: inside contigs, on either strand, the same whenever and however they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.data.corpus import PrepareConfig, prepare
from unmask.data.loader import GenomeWindows, Loader
from unmask.data.loader import genome as genome_module
from unmask.data.tokenizers import get_tokenizer

DNA = get_tokenizer("dna")
CONTIGS = st.lists(st.text("ACGTN", min_size=1, max_size=40), min_size=1, max_size=5)


class Contigs:
    """Contigs, each followed by [SEP], as a corpus has them."""

    eos_id, unknown_ids = 1, (0, 2, 4, 5, 6, 11)

    def __init__(self, contigs: Sequence[str], complement_ids: tuple[int, ...] | None = DNA.complement_ids) -> None:
        self.ids = np.array([i for text in contigs for i in [*DNA.encode(text), 1]])
        self.document_ends = np.cumsum([len(text) + 1 for text in contigs])
        self.complement_ids = complement_ids

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop].copy()


def texts(batch: object) -> list[str]:
    tokens, valid = batch.tokens, batch.valid  # type: ignore[attr-defined]
    valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    return [DNA.decode(row[flags].tolist()) for row, flags in zip(tokens, valid, strict=True)]


def other_strand(text: str) -> str:
    return text.translate(str.maketrans("ACGT", "TGCA"))[::-1]


@settings(max_examples=80, deadline=None)
@given(CONTIGS, st.integers(1, 12), st.integers(0, 99))
def test_rows_are_windows_of_one_contig_on_one_strand(contigs: list[str], length: int, seed: int) -> None:
    loader = Loader(Contigs(contigs), GenomeWindows(length), batch_size=4, seed=seed)
    for step in range(4):
        for text in texts(loader.batch(step)):
            assert any(text in contig or text in other_strand(contig) for contig in contigs)
            assert len(text) == length or text in contigs or other_strand(text) in contigs
    assert "".join(texts(loader.sequential_batch(0, 1000))) == "".join(contigs)  # every base once, as it stands


@settings(max_examples=40, deadline=None)
@given(CONTIGS, st.integers(1, 12))
def test_windows_without_n(contigs: list[str], length: int) -> None:
    known = [part for contig in contigs for part in contig.split("N") if len(part) >= length]
    layout = GenomeWindows(length, reverse_complement=0.0, skip_unknown=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(genome_module, "_SCAN_TOKENS", 3)
        if not known:
            with pytest.raises(ValueError, match=f"^there is no stretch of {length} bases without N: choose a shorter"):
                Loader(Contigs(contigs), layout, 4)
            return
        loader = Loader(Contigs(contigs), layout, batch_size=4)
    assert "".join(texts(loader.sequential_batch(0, 1000))) == "".join(known)
    assert all(any(text in part for part in known) for text in texts(loader.batch(0)))


def test_half_of_the_rows_are_of_the_other_strand() -> None:
    """As often as the probability says, and anew in every epoch."""
    contig = "".join(np.random.default_rng(0).choice(list("ACGT"), 4000))
    shares = {}
    for probability in (0.0, 0.5, 1.0):
        loader = Loader(Contigs([contig]), GenomeWindows(8, reverse_complement=probability), batch_size=400, seed=3)
        rows = [text for step in range(4) for text in texts(loader.batch(step))]
        shares[probability] = sum(text not in contig for text in rows) / len(rows)
    assert shares[0.0] == 0
    assert abs(shares[0.5] - 0.5) < 4 * 0.5 / 40
    assert shares[1.0] > 0.9  # a few are on both
    loader = Loader(Contigs([contig]), GenomeWindows(8), batch_size=loader.num_rows, seed=3)
    flips = [loader._global_spans(step, loader.num_rows).reverse for step in range(2)]
    assert flips[0] is not None
    assert flips[1] is not None
    assert (np.sort(flips[0]) != np.sort(flips[1])).any()


def test_a_resumed_run_and_any_split_over_ranks_see_the_same_rows() -> None:
    contig = "".join(np.random.default_rng(0).choice(list("ACGTN"), 500))

    def loader() -> Loader:
        return Loader(Contigs([contig, "ACGT", contig[::-1]]), GenomeWindows(16), batch_size=6, seed=5)

    whole = [loader().batch(step).tokens for step in range(20)]
    resumed = loader()
    for step in range(7, 20):
        parts = [resumed.batch(step, first, 2).tokens for first in (0, 2, 4)]
        assert torch.equal(torch.cat(parts), whole[step])
    assert not torch.equal(whole[0], Loader(Contigs([contig]), GenomeWindows(16), batch_size=6, seed=6).batch(0).tokens)


def test_n_is_never_a_target(tmp_path: Path) -> None:
    (tmp_path / "a.fa").write_text(">a\n" + "ACGTNN" * 20 + "R\n>b\nACG\n")
    corpus = prepare([str(tmp_path / "a.fa")], tmp_path / "out", "dna", PrepareConfig(validation_fraction=0))
    batch = Loader(corpus.splits["train"], GenomeWindows(121, reverse_complement=0), 2).sequential_batch(0, 2)
    counted = batch.checked(corpus.vocab).loss_mask
    bases = torch.isin(batch.tokens, torch.tensor([6, 7, 8, 9, 10]))
    assert torch.equal(counted, bases & (torch.tensor([True]) if batch.valid is None else batch.valid))
    stated = PrepareConfig(validation_fraction=0, context_tokens=("N", "[UNK]"))
    vocab = prepare([str(tmp_path / "a.fa")], tmp_path / "other", "dna", stated).vocab
    assert vocab.context_ids == (11, 6)
    assert not batch.checked(vocab).loss_mask[batch.tokens == 6].any()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^reverse_complement is a probability from 0 to 1; got 1\.5$"):
        GenomeWindows(8, reverse_complement=1.5)
    with pytest.raises(ValueError, match=r"^GenomeWindows is for DNA, .* prepare with --tokenizer dna$"):
        Loader(Contigs(["ACGT"], None), GenomeWindows(2), 1)
