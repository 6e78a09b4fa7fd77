"""What a language model with a chat template can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unmask.data.chat import ChatTemplate, Message
from unmask.data.tokenizers import BaseTokenizer
from unmask.model.samples import Completions
from unmask.types import Vocab

if TYPE_CHECKING:
    from unmask.guidance import GuidanceFn
    from unmask.sampling.base import Sampler


class ChatMethods(ABC):
    """Conversations in the chat template of a model, which may have none."""

    chat_template: ChatTemplate | None
    tokenizer: BaseTokenizer | None

    @property
    @abstractmethod
    def vocab(self) -> Vocab:
        """The ids, and which of them is the mask."""

    @abstractmethod
    def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        length: int = 128,
        *,
        sampler: Sampler | str | None = None,
        seed: int | Sequence[int] = 0,
        guidance: GuidanceFn | None = None,
    ) -> Completions:
        """At most `length` tokens after each prompt."""

    def chat(
        self,
        messages: Sequence[Message],
        length: int = 256,
        *,
        tools: Sequence[Message] | None = None,
        sampler: Sampler | str | None = None,
        seed: int = 0,
        guidance: GuidanceFn | None = None,
        **options: Any,
    ) -> Completions:
        """The assistant's answer to a conversation [{"role": "user", "content": ...}, ...], of at most `length` tokens.

        The model's own chat template makes the prompt; `options` are those of `encode_chat`.
        """
        prompt = self.encode_chat(messages, tools=tools, **options)
        return self.complete([prompt], length, sampler=sampler, seed=seed, guidance=guidance)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """The ids of a conversation in the model's chat template; special tokens in messages are plain text.

        `options` are those of `ChatTemplate.render`. ValueError for a model without a template, or messages that it
        refuses.
        """
        template, tokenizer = self.require_chat_template(), self.tokenizer
        assert tokenizer is not None
        options["add_generation_prompt"] = add_generation_prompt
        ids = template.encode(tokenizer, messages, tools=tools, **options)
        if self.vocab.mask_id in ids:
            spelled = tokenizer.id_to_token(self.vocab.mask_id)
            raise ValueError(f"a message or the chat template has the mask token {spelled}, which would be overwritten")
        return ids

    def require_chat_template(self) -> ChatTemplate:
        """The chat template; ValueError if the model has none."""
        if self.chat_template is None or self.tokenizer is None:
            raise ValueError(
                "this model has no chat template, so it cannot chat: it continues texts; a chat_template.jinja in its"
                " folder would be one"
            )
        return self.chat_template

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text or, in a chat, an answer."""
        if self.chat_template is None or self.tokenizer is None:
            return self.vocab.end_ids
        return tuple(dict.fromkeys((*self.vocab.end_ids, *self.chat_template.end_ids(self.tokenizer))))
