"""Calls of tools: every family's form is read back as its template writes it, and nothing else is a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_models import GOLDEN, WEATHER
from unmask.data.chat import ChatTemplate, ToolFormat, load_chat_template, tool_format
from unmask.data.tokenizers import Tokenizer

# What the templates of families write, in short, in our own words: how calls are asked for, and how they are written.
QWEN = (
    "{% if tools %}Answer with <tool_call>{'name': ..., 'arguments': ...}</tool_call>: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
)
LLAMA = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its'
    " value}. {{ tools | tojson }}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>"
    '\n\n{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
)


def golden_template() -> ChatTemplate:
    folder = GOLDEN / "chat_tiny"
    template = load_chat_template(folder, Tokenizer.from_file(folder / "tokenizer.json"))
    assert template is not None
    return template


FAMILIES: dict[str, tuple[ChatTemplate, int]] = {
    "SDAR, Dream, Fast-dLLM v2 and A2D, golden": (golden_template(), 2),
    "Qwen's and LLaDA2's": (ChatTemplate(QWEN), 2),
    "Llama's, one call": (ChatTemplate(LLAMA), 1),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_writes_is_read_back(family: str) -> None:
    template, count = FAMILIES[family]
    arguments: list[dict[str, Any]] = [
        {"days": 3, "city": 'Zürich </tool_call> "\n'},
        {"days": 1, "unit": "C", "nested": {"a": [1, None, True]}},
    ]
    calls = [{"type": "function", "function": {"name": "weather", "arguments": each}} for each in arguments[:count]]
    asked = [{"role": "user", "content": "rain?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    with_call, before = (template.render(messages, tools=[WEATHER]) for messages in (asked, asked[:1]))
    form = tool_format(template)
    assert form is not None
    answer = template.cut_answer(with_call.removeprefix(before))
    answer = answer[answer.index("{" if not form.end else form.begin) :]
    text, found = form.parse(answer, ["weather"])
    assert text == ""
    assert [json.loads(each.arguments) for each in found] == arguments[:count]
    assert {each.name for each in found} == {"weather"}


def test_templates_without_tools_have_no_form() -> None:
    assert tool_format(ChatTemplate("{{ messages[0].content }}")) is None
    assert tool_format(ChatTemplate("{{ tools }}{{ messages[0].content }}")) is None


TAGS, BARE = ToolFormat("<tool_call>", "</tool_call>", "arguments"), ToolFormat("{", "", "parameters")
GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ANSWERS: dict[str, tuple[ToolFormat, str, str, list[str]]] = {
    "several": (TAGS, f"{GOOD}\n{GOOD}", "", ['{"x": 1}'] * 2),
    "texts around": (TAGS, f"Wait. {GOOD} and {GOOD}\nDone", "Wait.\nand\nDone", ['{"x": 1}'] * 2),
    "no arguments": (TAGS, '<tool_call>{"name": "f"}</tool_call>', "", ["{}"]),
    "an end in a text": (
        TAGS,
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
        "",
        ['{"x": "</tool_call>"}'],
    ),
    "bare": (BARE, ' {"name": "f", "parameters": {"x": "é"}} \n', "", ['{"x": "é"}']),
}
NO_CALLS: dict[str, tuple[ToolFormat, str]] = {
    "broken JSON": (TAGS, '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call>'),
    "no end": (TAGS, '<tool_call>{"name": "f", "arguments": {}}'),
    "more after it": (TAGS, '<tool_call>{"name": "f"} {"name": "f"}</tool_call>'),
    "another function": (TAGS, '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    "arguments that are a text": (TAGS, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    "arguments that are no JSON": (TAGS, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    "a list": (TAGS, '<tool_call>[{"name": "f"}]</tool_call>'),
    "a name that is a list": (TAGS, '<tool_call>{"name": ["f"]}</tool_call>'),
    "deep": (TAGS, "<tool_call>" + "[" * 100_000),
    "many begins": (TAGS, "<tool_call>" * 3000),
    "a long number": (TAGS, '<tool_call>{"name": ' + "1" * 10_000 + "}</tool_call>"),
    "text after it": (BARE, '{"name": "f", "parameters": {}} and so on'),
    "text before it": (BARE, 'I call {"name": "f", "parameters": {}}'),
    "nothing": (BARE, ""),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_calls_are_taken_out_of_answers(case: str) -> None:
    form, answer, text, arguments = ANSWERS[case]
    left, calls = form.parse(answer, ["f"])
    assert left == text
    assert [(call.name, call.arguments) for call in calls] == [("f", each) for each in arguments]


@pytest.mark.parametrize("case", NO_CALLS)
def test_what_is_no_call_stays_as_it_is(case: str) -> None:
    form, answer = NO_CALLS[case]
    assert form.parse(answer, ["f"]) == (answer, [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.text(), json_values, max_size=3), st.sampled_from([TAGS, BARE]))
@settings(max_examples=50, deadline=None)
def test_any_arguments_are_read_back(arguments: dict[str, Any], form: ToolFormat) -> None:
    call = json.dumps({"name": "f", form.arguments_key: arguments}, ensure_ascii=False)
    text, (found,) = form.parse(f"{form.tags[0]}{call}{form.tags[1]}", ["f"])
    assert (text, json.loads(found.arguments)) == ("", arguments)
