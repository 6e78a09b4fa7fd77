"""Conversations: messages, the templates that make text of them, and the calls of tools that models write."""

from unmask.data.chat._messages import ASSISTANT, ROLES, Message, parse_messages, parse_tools
from unmask.data.chat._template import (
    CHAT_TEMPLATE_FILE,
    CHAT_TEMPLATES,
    ChatTemplate,
    load_chat_template,
    named_template,
    without_guards,
)
from unmask.data.chat._tool_calls import ToolCall, ToolFormat, tool_format

__all__ = [
    "ASSISTANT",
    "CHAT_TEMPLATES",
    "CHAT_TEMPLATE_FILE",
    "ROLES",
    "ChatTemplate",
    "Message",
    "ToolCall",
    "ToolFormat",
    "load_chat_template",
    "named_template",
    "parse_messages",
    "parse_tools",
    "tool_format",
    "without_guards",
]
