"""What an answer must be: the one place where the calls that a chat request asks for become a structure."""

from __future__ import annotations

from dataclasses import replace

from unmask.data.chat import ToolFormat
from unmask.guidance.structure.structure import Structure
from unmask.serve._chat_schemas import ChatRequest


def constrained(request: ChatRequest, form: ToolFormat | None) -> ChatRequest:
    """The request with what its answer must match, which `Service.guidance` compiles: its own, or that of a call.

    A call that must be made is one of the chosen functions, in the form of the model's family.
    """
    if not request.must_call:
        return request
    if form is None:
        raise ValueError("the form in which this model calls tools is not known: take tool_choice auto or none")
    before, after = form.tags
    call = Structure.json_schema(form.schema(request.chosen_functions))
    return request.with_structure(replace(call, before=before, after=after))
