"""/docs: the API for people, made from its own schema; nothing is fetched from elsewhere."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/infill": {"template": "def <mask:4>(self):\n    return <mask:6>", "steps": 16, "seed": 1},
    "/v1/completions": {"prompt": "def ", "suffix": "\n    return x", "max_tokens": 12, "seed": 1},
    "/v1/score": {"text": "def main():", "draws": 64},
}


def reference(schema: dict[str, Any]) -> str:
    """The page."""
    sections = "".join(
        _route(path, method, told, schema["components"]["schemas"])
        for path, methods in schema["paths"].items()
        for method, told in methods.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>unmask: the API</title><link rel="stylesheet" href="/page.css"></head>
<body><main class="reference"><h1>The API</h1>
<p>{escape(schema["info"]["description"])} <a href="/openapi.json">openapi.json</a> is the same for programs;
<a href="/">the page</a> is the same for people.</p>
{sections}</main></body></html>"""


def _route(path: str, method: str, told: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = told.get("description", "").split("\n\n")
    about = "".join(f"<p>{_marked(part)}</p>" for part in parts)
    fields, example = "", ""
    body = told.get("requestBody")
    if body is not None:
        reference = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
        fields = _fields(schemas[reference])
    if path in EXAMPLES:
        data = json.dumps(EXAMPLES[path])
        line = f"curl localhost:8000{path} -H 'Content-Type: application/json' -d '{data}'"
        example = f"<pre><code>{escape(line)}</code></pre>"
    return f"<section><h2><code>{method.upper()} {escape(path)}</code></h2>{about}{example}{fields}</section>"


def _fields(schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope='row'><code>{escape(name)}</code></th><td>{escape(_kind(field))}</td>"
        f"<td>{escape(_default(field))}</td><td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    head = "<tr><th>field</th><th>type</th><th>default</th><th>meaning</th></tr>"
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("const", field.get("type", "any")))


def _default(field: dict[str, Any]) -> str:
    return "" if field.get("default") is None else json.dumps(field["default"])


def _marked(text: str) -> str:
    """Names in backquotes become code."""
    return re.sub("`(.+?)`", r"<code>\1</code>", escape(text))
