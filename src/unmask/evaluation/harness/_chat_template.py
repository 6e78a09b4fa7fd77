"""The chat template of a model folder, as transformers renders it: in a sandbox, from JSON and Jinja files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unmask.backbones.hf import import_transformers
from unmask.io.errors import first_line
from unmask.pretrained import resolve_model_folder

_FILES = ("tokenizer.json", "tokenizer_config.json")


class ChatTemplate:
    """A conversation as the text that a model was trained to continue; ValueError for a model without a template."""

    def __init__(self, folder: str | Path) -> None:
        path = resolve_model_folder(folder)
        self.name = str(folder)
        if not all((path / name).exists() for name in _FILES):
            raise ValueError(f"the model {folder} has no chat template: leave out the chat template")
        try:
            self.tokenizer: Any = import_transformers().PreTrainedTokenizerFast.from_pretrained(path)
        except Exception as error:  # transformers raises many types
            raise ValueError(f"transformers cannot read the tokenizer of {folder}: {first_line(error)}") from None
        if not self.tokenizer.chat_template:
            raise ValueError(f"the model {folder} has no chat template: leave out the chat template")

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The text of messages, and of the beginning of the answer; or up to the last message, to be continued."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # templates raise errors of their own, as for a role that they do not know
            raise ValueError(f"the chat template of {self.name} refuses these messages: {first_line(error)}") from None
        return text
