"""Schemas of chat requests and responses, as OpenAI's clients send and read them."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from unmask.guidance.structure.structure import Structure
from unmask.serve._compat import field_error
from unmask.serve._response_schemas import Usage
from unmask.serve._schemas import GenerationRequest, Stops

_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TOOL_CHOICES = ("none", "auto", "required")
_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
"""Variables of a chat template that are fields of their own."""


class ChatRequest(GenerationRequest):
    """A chat request of OpenAI's clients; `steps`, `sampler`, `stream_drafts` and others are additions."""

    messages: list[dict[str, Any]] = Field(
        min_length=1, description="The conversation: messages with a `role` and a `content` (a text, or parts of text)."
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="The largest number of tokens of an answer; 256 if not given, or what the model has room for."
        " max_completion_tokens is the same.",
    )
    stop: Stops = None
    logprobs: bool = Field(False, description="Whether to list the tokens of the answer with log-probabilities.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="The number of most probable tokens to list with each; needs `logprobs`."
    )
    tools: list[dict[str, Any]] | None = Field(None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description="`none`, `auto` (with tools, the default), `required`, or"
        ' {"type": "function", "function": {"name": ...}}: the answer is then such a call.',
    )
    parallel_tool_calls: bool = Field(True, description="Whether an answer may have several calls.")
    stream_options: dict[str, Any] | None = Field(
        None, description="With include_usage, a stream ends with the token counts."
    )
    stream_drafts: bool = Field(
        False, description="Whether a stream also has the drafts: chunks without choices, and with a `draft`."
    )
    continue_final_message: bool = Field(
        False, description="Continue the last message, the beginning of an answer, instead of answering it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description='Variables for the chat template, as in {"enable_thinking": false}.'
    )

    @model_validator(mode="after")
    def _check_options(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "top_logprobs are listed with logprobs: send logprobs true, too")
        for name in self.chat_template_kwargs or {}:
            if name in _TEMPLATE_NAMES or not name.isidentifier():
                raise field_error("chat_template_kwargs", f"{name[:40]!r} is not a variable of chat templates")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        for name in self.function_names:
            if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
                raise field_error("tools", "every tool needs function.name: 1 to 64 letters, digits, -, _ and .")
        if len(set(self.function_names)) < len(self.function_names):
            raise field_error("tools", "two tools have the same name")
        for tool in self.tools or []:
            parameters = tool["function"].get("parameters") or {}
            if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
                raise field_error("tools", "function.parameters must be a JSON schema of type object")
        choice = self.tool_choice
        if isinstance(choice, str) and choice not in _TOOL_CHOICES:
            raise field_error("tool_choice", f"tool_choice must be {', '.join(_TOOL_CHOICES)} or a named function")
        if choice not in (None, "none", "auto") and not self.tools:
            raise field_error("tool_choice", "tool_choice asks for a call, and there are no tools")
        if isinstance(choice, dict) and self.chosen_functions == []:
            raise field_error("tool_choice", "tool_choice names a function that is not among the tools")
        if self.must_call and self.structure is not None:
            name = self.structure_field
            raise field_error(name, f"the answer must be a call of a tool, and cannot be what {name} asks for as well")

    _call: Structure | None = PrivateAttr(None)

    @property
    def may_end(self) -> bool:
        return True

    @property
    def structure(self) -> Structure | tuple[Structure | None, ...] | None:
        return self._call or super().structure

    def with_structure(self, structure: Structure) -> ChatRequest:
        """The same request, whose answer must match this."""
        request = self.model_copy()
        request._call = structure
        return request

    @property
    def function_names(self) -> list[Any]:
        """The names of all tools."""
        return [(tool.get("function") or {}).get("name") if _is_tool(tool) else None for tool in self.tools or []]

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return isinstance(self.tool_choice, dict) or self.tool_choice == "required"

    @property
    def chosen_functions(self) -> list[dict[str, Any]]:
        """The functions that may be called."""
        functions = [tool["function"] for tool in self.tools or [] if _is_tool(tool)]
        if not isinstance(self.tool_choice, dict):
            return [] if self.tool_choice == "none" else functions
        wanted = self.tool_choice.get("function")
        name = wanted.get("name") if isinstance(wanted, dict) else None
        return [function for function in functions if function["name"] == name]


def _is_tool(tool: dict[str, Any]) -> bool:
    return isinstance(tool.get("function"), dict)


class FunctionCall(BaseModel):
    """The function of a call."""

    name: str = Field(description="Its name.")
    arguments: str = Field(description="Its arguments, as JSON.")


class ToolCallMessage(BaseModel):
    """A call of a tool."""

    id: str = Field(description="The id of the call, which the tool's message repeats.")
    type: Literal["function"] = "function"
    function: FunctionCall = Field(description="What is called.")


class ChatMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="The text; null if the answer is calls only.")
    refusal: None = None
    tool_calls: list[ToolCallMessage] | None = Field(None, description="The calls of tools, if there are any.")


class TopLogprob(BaseModel):
    """A probable token of a position."""

    token: str = Field(description="The text of the token.")
    logprob: float = Field(description="Its log-probability under the model.")
    bytes: list[int] = Field(description="The bytes of the text.")


class TokenLogprob(TopLogprob):
    """A token of the answer; its log-probability is -9999 where it is not known."""

    top_logprobs: list[TopLogprob] = Field(description="The most probable tokens of the position.")


class ChatLogprobs(BaseModel):
    """The tokens of an answer."""

    content: list[TokenLogprob] = Field(description="The tokens, in order.")
    refusal: None = None


class ChatChoice(BaseModel):
    """One candidate."""

    index: int = Field(description="The number of the candidate, from 0.")
    message: ChatMessage = Field(description="The answer.")
    logprobs: ChatLogprobs | None = Field(None, description="Log-probabilities, if they were requested.")
    finish_reason: Literal["stop", "length", "tool_calls"] = Field(
        description="`stop` at the end of the answer or a stop text, `tool_calls` if it calls tools, else `length`."
    )


class ChatResponse(BaseModel):
    """All candidates."""

    id: str = Field(description="The id of the response.")
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="The time of the response, in seconds since 1970.")
    model: str = Field(description="The model's name.")
    choices: list[ChatChoice] = Field(description="The candidates, in order.")
    usage: Usage = Field(description="Token counts of all candidates.")
    seed: int = Field(description="The seed; candidate i has seed + i.")
