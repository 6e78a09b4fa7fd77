"""`unmask chat`: pipes, a terminal, the commands with a slash, and what is refused."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import unmask
from chat_models import chat_model
from unmask import Confidence
from unmask.cli._watch import _MASK_GLYPH
from unmask.data.chat import named_template
from unmask.data.corpus import Corpus
from unmask.data.readers import ChatRecord

Command = Any
QUICK = ("--steps", "4", "--length", "12")


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    lm = chat_model(length=128)
    lm.denoiser.float()
    return str(unmask.save(lm, tmp_path_factory.mktemp("model") / "chatty"))


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_a_model_keeps_its_template(chatty: str, tmp_path: Path) -> None:
    lm, original = unmask.load(chatty), chat_model()
    assert lm.chat_template == original.chat_template
    assert lm.end_ids == (lm.tokenizer.vocab["<|im_end|>"],)  # type: ignore[union-attr]
    again = unmask.load(unmask.save(lm, tmp_path / "again"))
    assert again.chat_template == lm.chat_template
    named = unmask.ChatTemplate(
        "{{ messages[0].content }}", "{{ tools[0] }}", *list(vars(lm.chat_template).values())[2:4]
    )
    both = unmask.load(unmask.save(lm.with_chat_template(named), tmp_path / "named")).chat_template
    assert both is not None
    assert (both.source, both.tool_source) == (named.source, named.tool_source)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(chatty)
    messages = [{"role": "user", "content": "2 < 3"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == lm.chat_template.render(messages)  # type: ignore[union-attr]
    assert theirs.eos_token == "<|im_end|>"


def test_answers_of_a_pipe_are_those_of_the_library(
    command: Command, chatty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "Hello\n\nAnd\\\nnow?\n")
    done = command("chat", chatty, "--system", "Be brief.", "--json", "--sampler", "confidence", *QUICK)
    assert (done.code, done.err) == (0, "")
    first, second = map(json.loads, done.out.splitlines())
    lm = unmask.load(chatty)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answer = lm.chat(messages, 12, sampler=Confidence(4), seed=0)
    assert first["content"] == answer.text
    assert (first["seed"], second["seed"], first["nfe"]) == (0, 1, answer.nfe)
    assert first["finish_reason"] == ("stop" if len(answer.ids[0]) < 12 else "length")
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And\nnow?"}]
    assert second["content"] == lm.chat(messages, 12, sampler=Confidence(4), seed=1).text
    pipe(monkeypatch, "Hello\n")
    plain = command("chat", chatty, "--system", "Be brief.", "--sampler", "confidence", *QUICK)
    assert plain.out == f"{first['content']}\n"


def test_commands(command: Command, chatty: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    lines = ["/system Be brief.", "Hello", f"/save {file}", "/undo", "/seed 0", "Hello", "/seed 0", "/retry"]
    lines += ["/reset", f"/load {file}", "/history", "/help", "//x", "/exit", "not read"]
    pipe(monkeypatch, "\n".join(lines))
    done = command("chat", chatty, "--json", *QUICK)
    assert done.code == 0
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert len(answers) == 4
    assert answers[0] == answers[1] == answers[2]
    stored = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in stored] == ["system", "user", "assistant"]
    assert stored[-1]["content"] == answers[0]["content"]
    assert "system: Be brief.\nuser: Hello\nassistant: " in done.err
    assert "/save FILE: write the conversation as JSON" in done.err
    assert file.read_text().count("\n") == 1


BAD: dict[str, tuple[tuple[str, ...], str, str]] = {
    "command": ((), "/rest", "there is no command 'rest' (did you mean reset?)"),
    "undo": ((), "/undo", "there is no message yet"),
    "save": ((), "/save", "name a file"),
    "no folder": ((), "/save nowhere/chat.json", "nowhere/chat.json cannot be written: No such file or directory"),
    "load": ((), "/load nowhere.json", "nowhere.json"),
    "load a folder": ((), "/load .", "."),
    "seed": ((), "/seed x", "a seed is a whole number"),
    "long": ((), "a" * 400, "leaves no room for an answer in a model of 128"),
    "n": (("--n", "2"), "a", "one answer at a time"),
    "length": (("--length", "0"), "a", "length must be at least 1"),
    "sampler": (("--sampler", "x"), "a", "--sampler cannot be 'x'"),
    "noncharacter": ((), "\ufdd0", "noncharacter"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_ends_a_pipe(case: str, command: Command, chatty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, text, sentence = BAD[case]
    pipe(monkeypatch, f"{text}\nnever asked\n")
    done = command("chat", chatty, *(options or QUICK))
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_models_that_cannot_chat(command: Command, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "a\n")
    done = command("chat", folder)
    assert done.code == 2
    assert "this model has no chat template, so it cannot chat" in done.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))


def test_a_terminal_shows_drafts_and_survives_mistakes(
    command: Command, chatty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Any] = ["/rest", "/save no/where", "/load .", "Hello", KeyboardInterrupt, "Again", EOFError]

    def typed(prompt: str) -> str:
        line = lines.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    done = command("chat", chatty, "--watch", "--delay", "0", *QUICK)
    assert done.code == 130  # Ctrl-C where a message is typed ends the chat
    assert "did you mean reset?" in done.err
    assert "no/where cannot be written" in done.err
    assert _MASK_GLYPH in done.err
    assert done.out.count("\n") >= 1
    assert lines == ["Again", EOFError]


def test_training_on_conversations(
    command: Command, chatty: str, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The model's template makes the rows, goes into the run, and comes out with the model."""
    chats = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": str(n)}] * (1 + n % 2)
        for n in range(40)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    run = tmp_path / "run"
    train = ("train", "chat", "--sources", str(file), "--steps", "2", "--set", "training.batch_size=4")
    done = command(*train, "layout.length=64", "--init-from", chatty, "--out", str(run))
    assert done.code == 0, done.err
    template = chat_model().chat_template
    assert unmask.load(run).chat_template == template
    corpus = Corpus.open(run / "corpus")
    assert corpus.manifest.prepare.source.pair_format == ChatRecord(template=template)
    assert sum(split.num_documents for split in corpus.splits.values()) == 60
    tokens, lengths = corpus.splits["train"], corpus.splits["train"].prompt_lengths
    assert lengths is not None
    row = tokens.read(0, int(tokens.document_ends[0])).tolist()
    prompt = unmask.load(chatty).encode_chat(chats[0][:1])
    assert row[: len(prompt)] == prompt
    assert lengths[0] == len(prompt)
    assert command(*train, "layout.length=64", "--init-from", chatty, "--out", str(run)).code == 0  # resumes
    assert command("export", str(run), str(tmp_path / "exported")).code == 0
    assert unmask.load(tmp_path / "exported").chat_template == template
    done = command(*train, "layout.length=16", "--init-from", folder, "--out", str(tmp_path / "other"))
    assert done.code == 2
    assert "has no chat template to learn conversations with" in done.err
    assert not (tmp_path / "other").exists()


def test_a_new_model_learns_the_plain_form(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [{"role": "user", "content": "a <|endoftext|>"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "chats.jsonl"
    file.write_text((json.dumps({"messages": chat}) + "\n") * 40)
    small = ("backbone.width=32", "backbone.depth=1", "backbone.heads=2", "layout.length=64", "training.batch_size=4")
    pairs = ("prepare.source.pair_format=ChatRecord", "layout=PromptCompletionRows", "tokenizer=bytes", *small)
    options = ("--sources", str(file), "--steps", "2", "--out", str(tmp_path / "run"), "--set", *pairs)
    done = command("train", "stdlib-tiny", *options)
    assert done.code == 0, done.err
    lm = unmask.load(tmp_path / "run")
    assert lm.chat_template is not None
    assert lm.chat_template.source == named_template("plain").source
    assert lm.tokenizer is not None
    assert lm.tokenizer.decode(lm.encode_chat(chat[:1])) == "user:\na <|endoftext|>\n\nassistant:\n"
    pipe(monkeypatch, "a\n")
    assert command("chat", str(tmp_path / "run"), "--steps", "2", "--length", "8").code == 0


def test_preparing_with_a_template(command: Command, chatty: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = tmp_path / "chats.jsonl"
    file.write_text((json.dumps({"talk": chat, "tools": []}) + "\n") * 40)
    prepare = ("prepare", str(file), "--messages", "talk", "--tools", "tools", "--tokenizer", chatty)
    done = command(*prepare, "--chat-template", chatty, "--out", str(tmp_path / "out"))
    assert done.code == 0, done.err
    corpus = Corpus.open(tmp_path / "out")
    ids = corpus.splits["train"].read(0, int(corpus.splits["train"].document_ends[0])).tolist()
    assert corpus.tokenizer.decode(ids).startswith("<|im_start|>user\na<|im_end|>\n")
    assert ids[0] == corpus.tokenizer.vocab["<|im_start|>"]
    done = command(*prepare, "--chat-template", "nothing", "--out", str(tmp_path / "out"))
    assert (done.code, "there is no chat template 'nothing'" in done.err) == (2, True)
    done = command("prepare", str(file), "--chat-template", "plain", "--out", str(tmp_path / "out"))
    assert (done.code, "--chat-template and --tools are for --messages" in done.err) == (2, True)
