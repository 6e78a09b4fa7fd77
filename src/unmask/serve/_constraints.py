"""What an answer must be, as guidance: the one place where a chat request's form becomes a pattern."""

from __future__ import annotations

from unmask.data.chat import ToolFormat
from unmask.serve._chat_schemas import ChatRequest


def constrained(request: ChatRequest, form: ToolFormat | None) -> ChatRequest:
    """The request with what its answer must match, which `Service.guidance` compiles: its own, or that of a call.

    A call that must be made is one of the chosen functions, in the form of the model's family.
    """
    if not request.must_call:
        return request
    if form is None:
        raise ValueError("the form in which this model calls tools is not known: take tool_choice auto or none")
    return request.model_copy(update={"regex": form.pattern(request.chosen_functions)})
