"""Small chat models with random weights, in the golden templates."""

from __future__ import annotations

from pathlib import Path

import torch

from unmask import MDLM, DiTConfig, LanguageModel, Tokenizer
from unmask.data.chat import load_chat_template

GOLDEN = Path(__file__).parent / "golden"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
            "required": ["days", "unit"],
        },
    },
}


def chat_model(folder: str = "chat_tiny", length: int = 512) -> LanguageModel:
    """A model that knows the form of a conversation, and nothing else."""
    tokenizer = Tokenizer.from_file(GOLDEN / folder / "tokenizer.json")
    backbone = DiTConfig(width=16, depth=2, heads=2, max_length=length, dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = LanguageModel.from_config(backbone, MDLM(), tokenizer)
        for parameter in lm.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    lm.denoiser.double().eval()
    return lm.with_chat_template(load_chat_template(GOLDEN / folder, tokenizer))
