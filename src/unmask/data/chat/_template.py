"""Chat templates: conversations as the text that a model was trained to continue.

A template is Jinja, and is rendered as transformers does it (`_render_worker.py`). What people write is text: where a
message spells a special token, such as <|im_end|>, a *guard*, a character that no text has, is put into it before the
template is rendered. So the tokens that the template writes can be told from those that messages spell: only the
former become control tokens, and the guards are taken out of the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.config import lookup
from unmask.data.chat._renderer import render_template
from unmask.data.tokenizers import BaseTokenizer, load_tokenizer
from unmask.io.untrusted import read_bytes, read_json_object

if TYPE_CHECKING:
    from unmask.data.chat._messages import Message

CHAT_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")
_MAX_TEMPLATE_BYTES = 1 << 20

CHAT_TEMPLATES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "headers": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "roles": ("<role>", "</role>", "<|role_end|>"),
}
"""The templates that come with the library, and the tokens that each of them needs in a vocabulary: plain text for
models that are trained on conversations from scratch, and the forms of SDAR, Dream and others, of LLaDA, of LLaDA2."""

_GUARD, _SPLIT, _TAG = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters, which Unicode reserves for the inside of programs: in a special token that a message spells, in
other tokens of the template that it spells (which are then encoded in two pieces), and where an answer ends."""
_UNTRUSTED_ROLES = ("user", "tool")
"""Roles whose texts may not write the template's other tokens either; those of an assistant may, as in <think>."""


@dataclass(frozen=True)
class ChatTemplate:
    """A conversation as the text that a model was trained to continue."""

    source: str
    """The template in Jinja."""
    tool_source: str | None = None
    """Another template for conversations with tools, where a model has one."""
    variables: tuple[tuple[str, str], ...] = ()
    """Names and values that the template may use: the special tokens, as in bos_token."""
    control_tokens: tuple[str, ...] = ()
    """How the tokenizer's special tokens are spelled: in a message, they are plain text."""
    markup_tokens: tuple[str, ...] = ()
    """Other tokens of the vocabulary that the template writes, as <tool_call>: plain text in messages of users and
    tools."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation; ValueError with the template's reason if it refuses.

        With `add_generation_prompt` it ends where the assistant's answer begins; with `continue_final_message` in the
        last message, which is to be continued. `variables` are for the template, as in enable_thinking=False.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return without_guards(self.render_guarded(messages, tools=tools, **options, **variables))

    def encode(self, tokenizer: BaseTokenizer, messages: Sequence[Message], **options: Any) -> list[int]:
        """The ids of a conversation, with the options of `render`; special tokens in its messages are plain text."""
        return self.encode_guarded(tokenizer, self.render_guarded(messages, **options))

    def render_guarded(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of `render` with guards in tokens that messages spell."""
        guarded = [self._guard(message, message.get("role") in _UNTRUSTED_ROLES) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("a conversation is continued in its last message or by a new one, not by both")
            guarded[-1:] = [_tagged(guarded[-1])]
        text = self._fill(guarded, self._guard(tools), add_generation_prompt, self._guard(variables))
        return _cut_at_tag(text) if continue_final_message else text

    def _fill(
        self, messages: Sequence[Any], tools: Any = None, add_generation_prompt: bool = False, more: Any = None
    ) -> str:
        source = self.tool_source if tools and self.tool_source is not None else self.source
        fixed = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return render_template(source, {"documents": None, **dict(self.variables), **(more or {}), **fixed})
        except ValueError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def encode_guarded(self, tokenizer: BaseTokenizer, text: str) -> list[int]:
        """The ids of a guarded text: special tokens without a guard are those of the template."""
        if _GUARD not in text and _SPLIT not in text:
            return tokenizer.encode(text, parse_special_tokens=bool(self.control_tokens))
        ids: list[int] = []
        for piece in _any_of(self.control_tokens).split(text):
            if piece in self.control_tokens:
                ids.append(tokenizer.vocab[piece])
                continue
            for part in piece.split(_SPLIT):
                ids += tokenizer.encode(part.replace(_GUARD, "")) if part else []
        return ids

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes the tools that an assistant may call."""
        return self.tool_source is not None or re.search(r"\btools\b", self.source) is not None

    @cached_property
    def turn_end(self) -> str:
        """What follows an answer, as in "<|im_end|>"; empty if nothing does, or if it cannot be found."""
        question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{_TAG}"}
        try:
            return self._fill([question, answer]).rpartition(_TAG)[2].strip()
        except ValueError:
            return ""

    def cut_answer(self, text: str) -> str:
        """An answer up to the end of its turn, where that is spelled in plain text."""
        return text.split(self.turn_end)[0] if self.turn_end else text

    def end_ids(self, tokenizer: BaseTokenizer) -> tuple[int, ...]:
        """The special token that ends an answer, if there is one."""
        first = next((name for name in self.control_tokens if self.turn_end.startswith(name)), None)
        return () if first is None or first not in tokenizer.vocab else (tokenizer.vocab[first],)

    def _guard(self, value: Any, untrusted: bool = False) -> Any:
        """The same value with guards in all of its texts. Roles are no texts: templates write `<|` + role + `|>`."""
        if isinstance(value, Mapping):
            return {
                self._guard(name, untrusted): item if name == "role" else self._guard(item, untrusted)
                for name, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [self._guard(item, untrusted) for item in value]
        if not isinstance(value, str):
            return value
        if any(mark in value for mark in (_GUARD, _SPLIT, _TAG)):
            raise ValueError("a message has a noncharacter (U+FDD0 to U+FDD2), which no text has: remove it")
        text = _break_tokens(value, self.control_tokens, _GUARD)
        return _break_tokens(text, self.markup_tokens, _SPLIT) if untrusted else text


def without_guards(text: str) -> str:
    """A guarded text as people read it."""
    return text.replace(_GUARD, "").replace(_SPLIT, "")


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest one first."""
    names = map(re.escape, sorted(tokens, key=len, reverse=True))
    return re.compile(f"({'|'.join(names)})" if tokens else "(?!)")


def _break_tokens(text: str, tokens: Sequence[str], mark: str) -> str:
    """The text with a mark inside each token that it spells, and in the beginning of one that it ends with."""
    if not tokens:
        return text
    broken = _any_of(tokens).sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", text)
    longest = max(map(len, tokens))
    for start in range(max(0, len(broken) - longest), len(broken)):
        rest = broken[start:]
        if any(token.startswith(rest) for token in tokens):  # what follows might complete it
            return f"{broken[: start + 1]}{mark}{broken[start + 1 :]}"
    return broken


def _tagged(message: Message) -> Message:
    """A message with a tag after its content, which shows where it ends in the text."""
    if not isinstance(message.get("content"), str):
        raise ValueError("the last message has no content that could be continued")
    return {**message, "content": f"{message['content']}{_TAG} "}


def _cut_at_tag(text: str) -> str:
    """The text before the tag; where the template strips messages, without the white space before it."""
    before, tag, after = text.rpartition(_TAG)
    if not tag:
        raise ValueError("the chat template leaves out the last message, so that it cannot be continued")
    return before if after.startswith(" ") else before.rstrip()


def named_template(name: str, tokenizer: BaseTokenizer | None = None, **variables: str) -> ChatTemplate:
    """A template of `CHAT_TEMPLATES`, for models with this tokenizer."""
    lookup(name, CHAT_TEMPLATES, "chat template")
    source = (files("unmask.data.chat") / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return _for_tokenizer(source, None, variables, tokenizer)


def fits(name: str, tokenizer: BaseTokenizer) -> bool:
    """Whether a vocabulary has the tokens that a template of `CHAT_TEMPLATES` writes."""
    return all(token in tokenizer.vocab for token in CHAT_TEMPLATES[name])


def load_chat_template(
    folder: Path, tokenizer: BaseTokenizer | None = None, default: str | None = None
) -> ChatTemplate | None:
    """The template of a model folder: its `chat_template.jinja`, or else that of `tokenizer_config.json`.

    Without either, the one of the name `default`, if the vocabulary has its tokens.
    """
    variables: dict[str, str] = {}
    config: dict[str, Any] = {}
    for name in _CONFIG_FILES:
        if (folder / name).exists():
            config = read_json_object(folder / name)
            variables |= _special_tokens(config)
    if tokenizer is None and (folder / "tokenizer.json").exists():
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    named = _named_sources(config.get("chat_template"), folder)
    if (folder / CHAT_TEMPLATE_FILE).exists():
        data = read_bytes(folder / CHAT_TEMPLATE_FILE, _MAX_TEMPLATE_BYTES)
        named = {"default": data.decode(errors="replace")}
    if named:
        return _for_tokenizer(named["default"], named.get("tool_use"), variables, tokenizer)
    if default is None or tokenizer is None or not fits(default, tokenizer):
        return None
    return named_template(default, tokenizer, **variables)


def _for_tokenizer(
    source: str, tool_source: str | None, variables: Mapping[str, str], tokenizer: BaseTokenizer | None
) -> ChatTemplate:
    special = frozenset() if tokenizer is None else tokenizer.special_tokens
    added = () if tokenizer is None else tokenizer.added_tokens - special
    whole = source + (tool_source or "")
    markup = sorted(token for token in added if token in whole and not token.isspace())
    return ChatTemplate(source, tool_source, tuple(sorted(variables.items())), tuple(sorted(special)), tuple(markup))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a config names, as in bos_token."""
    found = ((name, value) for name, value in config.items() if name.endswith("_token"))
    spelled = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in found)
    return {name: value for name, value in spelled if isinstance(value, str)}


def _named_sources(value: Any, folder: Path) -> dict[str, str]:
    """The templates of a `tokenizer_config.json`: a text, or a list of named ones."""
    if value is None or isinstance(value, str):
        return {"default": value} if value else {}
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"chat_template in {folder / _CONFIG_FILES[1]} is neither a text nor a list of templates")
    named = {str(each.get("name")): str(each.get("template")) for each in value}
    if "default" not in named:
        raise ValueError(
            f"{folder / _CONFIG_FILES[1]} has the chat templates {', '.join(named)}, and none that is named default"
        )
    return named
