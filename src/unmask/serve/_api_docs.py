"""/docs: a readable page of the API, generated from its OpenAPI schema; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from unmask.serve._compat import IGNORED_FIELDS, NEUTRAL_VALUES
from unmask.serve._llama_cpp_schemas import IGNORED_BY_INFILL
from unmask.serve._ollama_schemas import IGNORED_BY_OLLAMA
from unmask.serve._schemas import MAX_STOPS

_EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/infill": (
        {"template": "def <mask:2>(self):", "steps": 2, "seed": 1},
        {
            "id": "infill-4f1c0d",
            "object": "infill",
            "created": 1760000000,
            "model": "demo",
            "results": [
                {
                    "index": 0,
                    "seed": 1,
                    "text": "def close(self):",
                    "spans": [
                        {
                            "start": 4,
                            "end": 9,
                            "text": "close",
                            "tokens": [
                                {"id": 262, "text": "cl", "logprob": -3.2, "step": 1, "alternatives": []},
                                {"id": 810, "text": "ose", "logprob": -0.4, "step": 2, "alternatives": []},
                            ],
                        }
                    ],
                    "steps": 2,
                }
            ],
            "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
        },
    ),
    "/v1/completions": (
        {"prompt": "def ", "suffix": "\n    return x", "max_tokens": 12, "seed": 1},
        {
            "id": "cmpl-93ab20",
            "object": "text_completion",
            "created": 1760000000,
            "model": "demo",
            "choices": [{"index": 0, "text": "first(self, x):\n", "logprobs": None, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18},
        },
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 32, "seed": 1},
        {
            "id": "chatcmpl-5be102",
            "object": "chat.completion",
            "created": 1760000000,
            "model": "demo",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "4.", "refusal": None, "tool_calls": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 18, "completion_tokens": 3, "total_tokens": 21},
            "seed": 1,
        },
    ),
    "/v1/fim/completions": (
        {"prompt": "def ", "suffix": "\n    return x", "max_tokens": 12, "random_seed": 1},
        {
            "id": "fim-2f10ab",
            "object": "chat.completion",
            "created": 1760000000,
            "model": "demo",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": "first(self, x):",
                        "refusal": None,
                        "tool_calls": None,
                    },
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12},
            "seed": 1,
        },
    ),
    "/v1/embeddings": (
        {"input": ["def main():", "class Main:"]},
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.031, -0.112, 0.008]}],
            "model": "demo",
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
        },
    ),
    "/v1/score": (
        {"text": "def main():", "draws": 64},
        {
            "object": "score",
            "model": "demo",
            "exact": False,
            "nats": 12.4,
            "nats_per_token": 4.13,
            "standard_error": 0.11,
            "perplexity": 62.4,
            "perplexity_error": 6.9,
            "bits_per_byte": 1.63,
            "bits_per_byte_error": 0.04,
            "tokens": [{"id": 270, "text": "def", "nats": 4.9}],
            "by_time": [{"start": 0.0, "end": 0.125, "nats_per_token": 0.3, "standard_error": 0.05}],
        },
    ),
    "/v1/classify": (
        {"texts": ["a good film", "a bad film"]},
        {
            "object": "classification",
            "model": "reviews",
            "results": [
                {
                    "index": 0,
                    "label": "positive",
                    "probabilities": {"negative": 0.1, "positive": 0.9},
                    "value": None,
                    "cut": False,
                }
            ],
        },
    ),
    "/v1/tokenize": (
        {"text": "def main"},
        {"tokens": [{"id": 270, "text": "def"}, {"id": 918, "text": " main"}]},
    ),
}
"""Example requests and responses (lists are shortened)."""

_COMPATIBILITY_HTML = """<p>The routes <code>/v1/completions</code> and <code>/v1/chat/completions</code> are compatible
with OpenAI's. Differences:</p><ul>
<li>A chat needs a model with a chat template. Its messages are text only. With <code>tool_choice</code>
<code>required</code> or a named function, the answer is a valid call.</li>
<li>Of a completion, exactly <code>max_tokens</code> tokens are generated. Beyond the model's length the response is
400 with the code <code>context_length_exceeded</code>. 0 generates nothing, and returns the prompt with
<code>echo</code>.</li>
<li><code>stop</code> may be up to {stops} texts. <code>top_p</code> 0 takes the most probable token.
<code>top_k</code> 0 or -1 is no limit. <code>seed</code> -1 is random.</li>
<li>null means not given.</li>
<li>Accepted and ignored: {labels}.</li>
<li>Accepted with their neutral value only: {neutral}; <code>best_of</code> up to <code>n</code>.</li>
<li>llama.cpp's clients (<code>/infill</code>, <code>/completion</code>) may also send, without effect:
{llama_cpp}.</li>
<li>Ollama's clients (<code>/api</code>) may also send, without effect: {ollama}.</li>
<li>Any other field is refused.</li></ul>"""


def render_api_docs(schema: dict[str, Any], base_url: str, requires_token: bool = False) -> str:
    """The page; `base_url` is used in its examples."""
    sections = "".join(
        _route_section(path, method, operation, schema["components"]["schemas"], base_url, requires_token)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>unmask: the API</title><link rel="icon" href="/favicon.ico">
<link rel="stylesheet" href="/page.css"></head>
<body><header><p class="brand"><a href="/">unmask</a></p><nav><a href="/">the page</a></nav></header>
<main class="reference"><h1>The API</h1>
<p>{escape(schema["info"]["description"])} <a href="/openapi.json">openapi.json</a> is the same for programs;
<a href="/">the page</a> lets you try the model.</p>
{sections}<section><h2>OpenAI's and other clients</h2>{_compatibility_section()}</section></main></body></html>"""


def _compatibility_section() -> str:
    def codes(names: Iterable[str]) -> str:
        return ", ".join(f"<code>{name}</code>" for name in names)

    neutral = ", ".join(
        f"<code>{name}</code> {' or '.join(escape(json.dumps(value)) for value in values)}"
        for name, values in NEUTRAL_VALUES.items()
    )
    return _COMPATIBILITY_HTML.format(
        labels=codes(IGNORED_FIELDS),
        neutral=neutral,
        stops=MAX_STOPS,
        llama_cpp=codes(IGNORED_BY_INFILL),
        ollama=codes(IGNORED_BY_OLLAMA),
    )


def _route_section(
    path: str,
    method: str,
    operation: dict[str, Any],
    schemas: dict[str, Any],
    base_url: str,
    requires_token: bool,
) -> str:
    parts = operation.get("description", "").split("\n\n")
    about = "".join(f"<p>{_inline_code(part)}</p>" for part in parts)
    fields, example = "", ""
    body = operation.get("requestBody")
    if body is not None:
        reference = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
        fields = _fields_table(schemas[reference])
    if path in _EXAMPLES:
        request, response = _EXAMPLES[path]
        token = ' -H "Authorization: Bearer $UNMASK_TOKEN"' if requires_token else ""
        line = f"curl {base_url}{path}{token} -H 'Content-Type: application/json' -d '{json.dumps(request)}'"
        shown = json.dumps(response, indent=1)
        example = f"<pre><code>{escape(line)}</code></pre><pre><code>{escape(shown)}</code></pre>"
    return f"<section><h2><code>{method.upper()} {escape(path)}</code></h2>{about}{example}{fields}</section>"


def _fields_table(schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'><code>{escape(name)}</code></th><td>{escape(_type_name(field))}</td>"
        f"<td>{escape(_default_value(field))}</td><td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    head = "<tr><th>field</th><th>type</th><th>default</th><th>meaning</th></tr>"
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _type_name(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_name(option) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_type_name(field.get('items', {}))}"
    return str(field.get("const", field.get("type", "any")))


def _default_value(field: dict[str, Any]) -> str:
    return "" if field.get("default") is None else json.dumps(field["default"])


def _inline_code(text: str) -> str:
    """HTML with text in backquotes as code."""
    return re.sub("`(.+?)`", r"<code>\1</code>", escape(text))
