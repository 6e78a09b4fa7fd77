"""What an interactive user sees: short representations, public names only, misspelt names told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unmask
from unmask import LanguageModel, Tokenizer

BACKBONE = unmask.DiTConfig(width=16, depth=1, heads=2, max_length=12)


def model(text: str = "abc ") -> LanguageModel:
    return LanguageModel.from_config(BACKBONE, unmask.MDLM(), Tokenizer.characters(text))


def test_a_model_says_what_it_is() -> None:
    lm = model()
    parameters = sum(parameter.numel() for parameter in lm.denoiser.parameters())
    assert repr(lm) == (
        f"LanguageModel(MDLM, 1 layers of width 16 with 2 heads, {parameters:,} parameters, vocabulary 5,"
        " up to 12 tokens, cpu, float32,"
        " Tokenizer(WordLevel, 4 ids))"
    )


def test_a_score_is_one_short_line() -> None:
    lm = model()
    said = repr(lm.score(["abc", "a b"], draws=16))
    assert said.startswith("Score(1.386 ± 0 nats")
    assert "nats/token, perplexity 4" in said
    assert said.endswith("bits/byte, 6 tokens)")
    assert len(said) < 100
    assert "bits" not in repr(lm.score([[0, 1]], draws=16))


def test_samples_show_their_texts() -> None:
    samples = model().sample(n=6, length=12, sampler=unmask.Ancestral(2))
    said = repr(samples)
    assert repr(samples.texts[0]) in said
    assert "tensor" not in said
    assert said.endswith("and 2 more; 2 network calls)")
    assert repr(LanguageModel(model().denoiser).sample(length=3, sampler=unmask.Ancestral(1))).startswith(
        "Samples([",
    )
    first = next(iter(model().generate_steps(torch.full((1, 3), 4))))
    assert repr(first) == "Samples([4, 4, 4]; 0 network calls)"


def test_only_public_names_are_listed() -> None:
    assert [name for name in dir(unmask) if not name.startswith("_")] == unmask.__all__


def test_checkers_see_no_catch_all() -> None:
    """Which would take `unmask.Tokeniser` for a name of ours; the next test asks mypy itself."""
    source = Path(unmask.__file__).read_text()
    assert "if not TYPE_CHECKING:" in source
    assert "\ndef __getattr__" not in source


@pytest.mark.slow
def test_mypy_notices_a_misspelt_name(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text("import unmask\n\nunmask.Tokenizer\nunmask.Tokeniser\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--config-file=", str(snippet)]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert 'Module has no attribute "Tokeniser"' in said
    assert '"Tokenizer"' not in said.split(";")[0]


def test_unknown_ids_are_never_drawn() -> None:
    """Published vocabularies are padded; nothing changes where there is nothing to forbid."""
    torch.manual_seed(0)
    tokenizer, padded = Tokenizer.characters("abcd"), unmask.Vocab(64, 10)
    lm = LanguageModel(unmask.ModelConfig(padded, BACKBONE, unmask.MDLM()).build().eval(), tokenizer)
    for sampler in (unmask.Ancestral(4), unmask.Confidence(4), unmask.FirstHitting(), unmask.Blockwise(4)):
        drawn = lm.sample(n=8, length=12, sampler=sampler)
        assert int(drawn.tokens.max()) < 4
        assert len(drawn.texts) == 8
    assert int(LanguageModel(lm.denoiser).sample(n=8, length=12).tokens.max()) > 10
    whole = model()
    assert whole.ban_unknown_tokens(whole.denoiser) is whole.denoiser
    assert lm.score([[0, 20, 1]], draws=16).nats_per_token > 0  # what was measured stays
