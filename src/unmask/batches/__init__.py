"""Files of requests: read line by line, answered in batches, resumed after an interruption.

What a request is and how it is answered is a `Task` of the caller's; here is what all of them share.
"""

from __future__ import annotations

from unmask.batches._answers import AnswerFile, Answers, AnswersInMemory, Identity
from unmask.batches._lines import Line, RequestFile, read_requests
from unmask.batches._plan import Item, plan_batches
from unmask.batches._run import Task, answer_lines, parse_lines, run_batches

__all__ = [
    "AnswerFile",
    "Answers",
    "AnswersInMemory",
    "Identity",
    "Item",
    "Line",
    "RequestFile",
    "Task",
    "answer_lines",
    "parse_lines",
    "plan_batches",
    "read_requests",
    "run_batches",
]
