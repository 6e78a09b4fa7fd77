"""A conversation with a model: what was said, answers, and the commands that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unmask.cli._arguments import print_json
from unmask.cli._generation_options import GenerationOptions
from unmask.cli._watch import CONTROL_PICTURES, watch
from unmask.config import lookup
from unmask.data.chat import ASSISTANT, parse_messages
from unmask.io.atomic import atomic_file
from unmask.io.untrusted import read_json
from unmask.model import Completions, LanguageModel, Samples
from unmask.sampling import Sampler


class ChatSession:
    """The messages so far; a message or command that is refused leaves them as they are."""

    def __init__(
        self, lm: LanguageModel, options: GenerationOptions, sampler: Sampler, length: int, as_json: bool
    ) -> None:
        self.lm, self.options, self.sampler, self.length, self.as_json = lm, options, sampler, length, as_json
        self.guidance, self.seed = options.build_guidance(), options.seed
        self.messages: list[dict[str, Any]] = []
        self.commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "reset": self._reset,
            "system": self.set_system,
            "undo": self._undo,
            "retry": self._retry,
            "history": self._history,
            "save": self._save,
            "load": self._load,
            "seed": self._seed,
            "exit": self._exit,
        }

    def take(self, text: str) -> None:
        """Obey a command, or answer a message; two slashes begin a message that begins with one."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text[1:].partition(" ")
            lookup(name, self.commands, "command")
            self.commands[name](argument.strip())
            return
        message = {"role": "user", "content": text[1:] if text.startswith("//") else text}
        self._answer([*self.messages, message])

    def set_system(self, text: str) -> None:
        """TEXT: the system message, before all others; without a text, there is none."""
        rest = self.messages[1:] if self.messages and self.messages[0]["role"] == "system" else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        """Answer a conversation, and keep it with its answer."""
        prompt, limit = self.lm.encode_chat(messages), self.lm.denoiser.max_length
        room = self.length if limit is None else min(self.length, limit - len(prompt))
        if room < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, which leaves no room for an answer in a model of {limit}:"
                " /undo or /reset shortens it"
            )
        steps = self.lm.complete_steps([prompt], room, sampler=self.sampler, seed=self.seed, guidance=self.guidance)
        done = self._last_step(steps, len(prompt))
        text = self.lm.require_chat_template().cut_answer(done.text)
        self.messages = [*messages, {"role": ASSISTANT, "content": text}]
        self._print(done, text, room)
        self.seed += 1

    def _last_step(self, steps: Iterator[Completions], start: int) -> Completions:
        """The finished answer; the drafts on the way are shown on a terminal, or with --watch."""
        if not self.options.watch and (self.as_json or not (sys.stdout.isatty() and sys.stderr.isatty())):
            *_, last = steps
            return last
        seen: list[Completions] = []

        def drafts() -> Iterator[Samples]:
            for step in steps:
                seen[:] = [step]
                yield Samples(step.tokens[:, start:], step.nfe, step.num_queries, step.tokenizer)

        watch(drafts(), self.lm.vocab.mask_id, self.options.delay)
        return seen[-1]

    def _print(self, done: Completions, text: str, room: int) -> None:
        if not self.as_json:
            print(text.translate(CONTROL_PICTURES) if sys.stdout.isatty() else text, flush=True)
            return
        tokens = len(done.ids[0])
        reason = "length" if tokens == room and text == done.text else "stop"
        print_json({"content": text, "finish_reason": reason, "seed": self.seed, "tokens": tokens, "nfe": done.nfe})
        sys.stdout.flush()

    def _help(self, _: str) -> None:
        """: this list."""
        lines = [f"/{name} {(command.__doc__ or '').removeprefix(': ')}" for name, command in self.commands.items()]
        print("\n".join(lines), file=sys.stderr)

    def _reset(self, _: str) -> None:
        """: forget all messages but the system's."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]

    def _undo(self, _: str) -> None:
        """: forget the last message and its answer."""
        self.messages = self.messages[: self._last_question()]

    def _retry(self, _: str) -> None:
        """: answer the last message again, with the next seed."""
        self._answer(self.messages[: self._last_question() + 1])

    def _last_question(self) -> int:
        users = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            raise ValueError("there is no message yet")
        return users[-1]

    def _history(self, _: str) -> None:
        """: show the conversation."""
        for message in self.messages:
            print(f"{message['role']}: {message['content']}", file=sys.stderr)

    def _save(self, file: str) -> None:
        """FILE: write the conversation as JSON, which training reads too."""
        if not file:
            raise ValueError("name a file, as in /save chat.json")
        line = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"  # so that files can be joined
        try:
            with atomic_file(Path(file)) as new:
                new.write_text(line, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{file} cannot be written: {error.strerror}") from None

    def _load(self, file: str) -> None:
        """FILE: go on with a saved conversation."""
        if not file:
            raise ValueError("name a file, as in /load chat.json")
        stored = read_json(Path(file))
        self.messages = parse_messages(stored.get("messages") if isinstance(stored, dict) else stored, file)

    def _seed(self, number: str) -> None:
        """N: the seed of the next answer."""
        if not number.isdecimal() or len(number) > 18:
            raise ValueError(f"a seed is a whole number of at most 18 digits, as in /seed 7; got {number[:40]!r}")
        self.seed = int(number)

    def _exit(self, _: str) -> None:
        """: end."""
        raise EOFError
