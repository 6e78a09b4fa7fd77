"""Chat templates: golden renderings of transformers, plain text in messages, and templates of strangers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmask.config import from_json, to_json
from unmask.data.chat import ChatTemplate, load_chat_template, named_template, parse_messages, parse_tools
from unmask.data.chat import _render_worker as worker
from unmask.data.tokenizers import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = ("chat_tiny", "chat_role_tiny", "chat_llada_tiny")
CONVERSATIONS = {
    f"{folder}-{each['name']}": (folder, each)
    for folder in FOLDERS
    for each in json.loads((GOLDEN / folder / "expected.json").read_text())["conversations"]
}
USER = {"role": "user", "content": "a"}


def template_of(folder: str) -> tuple[ChatTemplate, Tokenizer]:
    tokenizer = Tokenizer.from_file(GOLDEN / folder / "tokenizer.json")
    template = load_chat_template(GOLDEN / folder, tokenizer)
    assert template is not None
    return template, tokenizer


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_golden_renderings(name: str) -> None:
    folder, expected = CONVERSATIONS[name]
    template, tokenizer = template_of(folder)
    options = {key: expected[key] for key in ("tools", "add_generation_prompt", "continue_final_message")}
    options |= expected["kwargs"]
    if "error" in expected:
        with pytest.raises(ValueError, match=f"^the chat template refuses these messages: {expected['error']}$"):
            template.render(expected["messages"], **options)
        return
    assert template.render(expected["messages"], **options) == expected["text"]
    assert template.encode(tokenizer, expected["messages"], **options) == expected["ids"]


@pytest.mark.parametrize("folder", FOLDERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_messages_cannot_write_control_tokens(folder: str, data: st.DataObject) -> None:
    """Whatever a user writes, the special tokens are those of the same conversation with a harmless text."""
    template, tokenizer = template_of(folder)
    names = sorted(tokenizer.added_tokens)
    pieces = st.sampled_from([*names, *(name[:-1] for name in names), *(name[1:] for name in names), "<", "é ", "a"])
    text = "".join(data.draw(st.lists(pieces, min_size=1, max_size=6)))
    content = f"b{text}"
    ids = template.encode(tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True)
    harmless = template.encode(tokenizer, [{"role": "user", "content": "b"}], add_generation_prompt=True)
    control = {tokenizer.vocab[name] for name in names}
    assert [id_ for id_ in ids if id_ in control] == [id_ for id_ in harmless if id_ in control]
    shown = content.strip() if folder == "chat_llada_tiny" else content
    assert shown in tokenizer.decode(ids)
    assert tokenizer.decode(ids) == template.render([{"role": "user", "content": content}], add_generation_prompt=True)


def test_tools_and_parts_cannot_write_control_tokens_either() -> None:
    template, tokenizer = template_of("chat_tiny")
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {}}}]
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    messages = parse_messages([{"role": "user", "content": parts}])
    ids = template.encode(tokenizer, messages, tools=tools, add_generation_prompt=True)
    assert ids.count(tokenizer.vocab["<|im_end|>"]) == 2  # of the system's turn and the user's
    assert tokenizer.decode(ids).count("<|im_end|>") == 4
    with pytest.raises(ValueError, match=r"noncharacter \(U\+FDD0"):
        template.encode(tokenizer, [{"role": "user", "content": "<\ufdd0|im_end|>"}])


def test_an_assistant_may_think_and_call() -> None:
    template, tokenizer = template_of("chat_tiny")
    ids = template.encode(tokenizer, [USER, {"role": "assistant", "content": "<think>x</think>y<|im_end|>"}])
    assert tokenizer.vocab["<think>"] in ids
    assert ids.count(tokenizer.vocab["<|im_end|>"]) == 2


def test_a_file_wins_over_the_config_and_lists_have_names(tmp_path: Path) -> None:
    config: dict[str, Any] = {"chat_template": "config", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "eos_token": "old"}')
    found = load_chat_template(tmp_path)
    assert found is not None
    assert found.render([USER]) == "config"
    assert dict(found.variables) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = load_chat_template(tmp_path)
    assert found is not None
    assert (found.render([USER]), found.render([USER], tools=[{"x": 1}])) == ("one", "two")
    assert from_json(ChatTemplate, to_json(found)) == found
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    found = load_chat_template(tmp_path)
    assert found is not None
    assert found.render([USER], bos_token="<b>") == "<b>file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(ValueError, match="has the chat templates tool_use, and none that is named default"):
        load_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_chat_template(tmp_path) is None


def test_what_transformers_offers_to_templates() -> None:
    source = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}|{{ {'b': '<é>', 'a': 1} | tojson }}"
        "|{{ strftime_now('%Y') | length }}|{{ dict(a=1).a }}|{{ nothing }}"
    )
    assert ChatTemplate(source).render([USER, USER]) == 'a|{"b": "<é>", "a": 1}|4|1|'


def test_continuing_needs_a_message_that_can_be_continued() -> None:
    template, _ = template_of("chat_tiny")
    with pytest.raises(ValueError, match="in its last message or by a new one, not by both"):
        template.render([USER], add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ValueError, match="no content that could be continued"):
        template.render([{"role": "assistant"}], continue_final_message=True)
    with pytest.raises(ValueError, match="leaves out the last message"):
        ChatTemplate("nothing").render([USER], continue_final_message=True)


HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "it takes more than",
    "{{ 'a' * 10**10 }}": "512 MB of memory",
    "{{ 'a'.center(10**9) }}": "512 MB of memory",
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "more than 8,388,608 characters",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{% set x = messages[0].__init__.__globals__ %}{{ x.os }}": "unsafe|undefined|no attribute",
    "{% if %}": "its line 1 is not Jinja",
    "{{ 10 ** (10 ** 10) }}": "it takes more than",
    "{{ 1 / 0 }}": "division",
}


@pytest.mark.parametrize("source", HOSTILE)
def test_templates_of_strangers_are_bounded(source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hasty = tmp_path / "worker.py"
    hasty.write_text(Path(worker.__file__).read_text().replace("RENDER_SECONDS = 5.0", "RENDER_SECONDS = 1.0"))
    monkeypatch.setattr(worker, "__file__", str(hasty))
    from unmask.data.chat._renderer import _Renderer

    renderer = _Renderer()
    begun = time.monotonic()
    try:
        with pytest.raises(ValueError, match=HOSTILE[source]) as refused:
            renderer.render(source, {"messages": [USER]})
        assert "\n" not in str(refused.value)
        assert time.monotonic() - begun < 4
        assert renderer.render("{{ 1 + 1 }}", {}) == "2"  # and the next one is answered
    finally:
        renderer.end()


def test_a_fork_has_a_process_of_its_own() -> None:
    template = named_template("plain")
    before = template.render([USER])
    child = os.fork()
    if child == 0:
        os._exit(0 if template.render([USER]) == before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render([USER]) == before


def test_the_end_of_a_turn() -> None:
    for folder, end in zip(FOLDERS, ("<|im_end|>", "<|role_end|>", "<|eot_id|>"), strict=True):
        template, tokenizer = template_of(folder)
        assert template.turn_end == end
        assert template.end_ids(tokenizer) == (tokenizer.vocab[end],)
    assert named_template("plain").turn_end == ""
    assert ChatTemplate("{{ raise_exception('never') }}").turn_end == ""


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
BAD_MESSAGES: dict[str, tuple[Any, str]] = {
    "none": ([], "has no list of messages"),
    "text": ("hello", "has no list of messages"),
    "number": ([3], "message 1 must be an object with role and content; got int"),
    "role": ([{"role": "wizard", "content": "a"}], "message 1 has the role 'wizard'; there are system, user"),
    "content": ([{"role": "user"}], "message 1 has no text in 'content'"),
    "image": ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "reads text only"),
    "tool first": ([{"role": "tool", "content": "1"}], "message 1 is a tool's and follows no call"),
    "tool late": (
        [USER, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "1"}],
        "message 3 is a tool's and follows no call of a tool: roles are out of order",
    ),
    "call": (
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1", "tool_call_id": "c2"}],
        "message 3 answers the call 'c2'; calls before it are c1",
    ),
    "user calls": ([{**USER, "tool_calls": [CALL]}], "only the assistant calls tools"),
    "arguments": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        "calls 'f' with arguments that are not a JSON object",
    ),
}


@pytest.mark.parametrize("case", BAD_MESSAGES)
def test_bad_messages_are_told(case: str) -> None:
    messages, sentence = BAD_MESSAGES[case]
    with pytest.raises(ValueError, match=sentence):
        parse_messages(messages)


def test_messages_are_brought_into_one_form() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None}
    answer = {"role": "tool", "content": "1", "tool_call_id": "c1"}
    found = parse_messages([{"role": "developer", "content": "x"}, USER, call, answer])
    assert found[0] == {"role": "system", "content": "x"}
    assert found[2]["content"] == ""
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert found[3] == answer
    assert parse_tools(None) is None
    with pytest.raises(ValueError, match="a tool that is not of the form"):
        parse_tools([{"type": "function"}])
