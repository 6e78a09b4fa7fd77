"""From lines to answers: parse every line, compute batch after batch, put the answers in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from unmask.batches._answers import Answers, Results
from unmask.batches._lines import Line
from unmask.batches._plan import Item
from unmask.types import NonFiniteError, ProgressFn

_ERROR = "error"


class Task(Protocol):
    """What requests are, and how they are answered."""

    max_tokens: int
    """Tokens of a batch."""

    def parse(self, line: Line) -> Sequence[Item]:
        """The sequences that a line asks for; ValueError if the line is wrong."""
        ...

    def run(self, items: Sequence[Item]) -> Sequence[Any]:
        """The result of each sequence of a batch, as JSON; ValueError if one of them cannot be computed."""
        ...

    def answer(self, line: Line, results: Sequence[Any]) -> dict[str, Any]:
        """The answer to a line, from the results of its sequences."""
        ...


def parse_lines(task: Task, lines: Sequence[Line]) -> tuple[list[Item], dict[int, str]]:
    """The sequences of all good lines, and the sentence that says what is wrong of each bad one, by its number."""
    items: list[Item] = []
    errors: dict[int, str] = {}
    for line in lines:
        try:
            if line.error is not None:
                raise ValueError(line.error)
            items += task.parse(line)
        except ValueError as error:
            errors[line.number] = str(error)
    return items, errors


def run_batches(
    task: Task,
    items: Sequence[Item],
    plan: Sequence[Sequence[int]],
    answers: Answers,
    numbers: Sequence[int],
    progress: ProgressFn,
) -> None:
    """Compute the batches with these numbers; `progress` gets the tokens so far."""
    tokens = 0
    for number in numbers:
        batch = [items[index] for index in plan[number]]
        answers.append(number, _run_batch(task, batch))
        tokens += sum(item.length for item in batch)
        progress(tokens)


def _run_batch(task: Task, batch: Sequence[Item]) -> Sequence[Any]:
    """If a sequence cannot be computed, the others are computed one by one."""
    try:
        return task.run(batch)
    except NonFiniteError:  # no line is to blame
        raise
    except ValueError as error:
        if len(batch) == 1:
            return [{_ERROR: str(error)}]
        return [result for item in batch for result in _run_batch(task, [item])]


def answer_lines(
    task: Task,
    lines: Sequence[Line],
    items: Sequence[Item],
    plan: Sequence[Sequence[int]],
    results: Results,
    errors: Mapping[int, str],
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The answer to each line in its order, and all errors by line number, those of the computation too."""
    of_line: dict[int, dict[int, Any]] = {}
    for number, batch in enumerate(plan):
        for index, result in zip(batch, results[number], strict=True):
            of_line.setdefault(items[index].line, {})[items[index].index] = result
    failed, answers = dict(errors), list[dict[str, Any]]()
    for line in lines:
        found = [result for _, result in sorted(of_line.get(line.number, {}).items())]
        wrong = next((str(result[_ERROR]) for result in found if _ERROR in result), failed.get(line.number))
        if wrong is not None:
            failed[line.number] = wrong
            answers.append({"line": line.number, **_own_id(line), _ERROR: {"message": wrong}})
        else:
            answers.append({"line": line.number, **_own_id(line), **task.answer(line, found)})
    return answers, failed


def _own_id(line: Line) -> dict[str, Any]:
    """The name that a request gives itself."""
    own = line.fields.get("id")
    return {"id": own} if isinstance(own, str | int) else {}
