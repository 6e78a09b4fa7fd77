"""The published format is written as well as read: a round trip changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import unmask
from unmask import D3PM, MDLM, DiTConfig, LanguageModel, TimeConditioning, Tokenizer


def model(**options: object) -> LanguageModel:
    backbone = DiTConfig(width=32, depth=2, heads=2, max_length=16, dropout=0.1, **options)  # type: ignore[arg-type]
    lm = LanguageModel.from_config(backbone, MDLM(), Tokenizer.characters("abc "))
    for parameter in lm.denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return lm


@pytest.mark.parametrize("tied", [False, True])
def test_a_round_trip_is_exact(tmp_path: Path, tied: bool) -> None:
    lm = model(tie_embeddings=tied)
    folder = unmask.save(lm, tmp_path / "published", upstream_format=True)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mdlm"
    again = unmask.load(folder)
    z = torch.tensor([[0, 4, 1, 4, 2]])
    t, rows = torch.full((1, 1), 0.4), z == 4
    assert torch.equal(again.denoiser(z, t, rows), lm.denoiser.eval()(z, t, rows))
    assert again.denoiser.config.backbone.dropout == 0.1


def test_what_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    for lm, remedy in (
        (
            model(time_conditioning=TimeConditioning()),
            r"its time_conditioning; .* --set backbone\.time_conditioning=None$",
        ),
        (model(qk_norm=True), r"its qk_norm; .* --set backbone\.qk_norm=false$"),
        (model(rope_theta=100.0), r"its rope_theta; .* --set backbone\.rope_theta=10000$"),
    ):
        with pytest.raises(ValueError, match=f"MDLM's format cannot hold this network because of {remedy}"):
            unmask.save(lm, tmp_path / "refused", upstream_format=True)
    backbone = DiTConfig(width=32, depth=1, heads=2, max_length=16)
    d3pm = LanguageModel.from_config(backbone, D3PM(), Tokenizer.characters("abc "))
    with pytest.raises(ValueError, match="no published format holds a model of D3PM with a DiTConfig"):
        unmask.save(d3pm, tmp_path / "refused", upstream_format=True)
    assert not (tmp_path / "refused").exists()
