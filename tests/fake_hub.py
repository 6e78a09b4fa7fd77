"""A stand-in for the hub on a port of its own: what its real client asks for when it uploads, and nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of-the-tests"


@dataclass
class FakeHub:
    """What was uploaded."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    """Repositories, and whether they are private."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of each."""
    messages: list[str] = field(default_factory=list)
    """Of all commits."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256, before they are part of a commit."""
    refused: str | None = None
    """If given, commits are refused with this sentence."""

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if match := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            sent = json.loads(body)["files"]
            modes = {"shouldIgnore": False, "oid": None}
            large = ("lfs" if file["path"].endswith(".safetensors") else "regular" for file in sent)
            return 200, {
                "files": [
                    {"path": file["path"], "uploadMode": mode, **modes} for file, mode in zip(sent, large, strict=True)
                ]
            }
        if re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [self._upload_action(each) for each in objects]}
        if path == "/verify":
            return (200, {}) if json.loads(body)["oid"] in self.blobs else (404, {"error": "not uploaded"})
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            return self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        return 404, {"error": f"no {path} here"}

    def _create(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if name in self.private:
            return 409, {"url": f"{self.url}/{name}", "error": "it exists"}
        self.private[name], self.files[name] = asked.get("visibility") == "private", {}
        return 200, {"url": f"{self.url}/{name}"}

    def _upload_action(self, asked: dict[str, Any]) -> dict[str, Any]:
        actions = {"upload": {"href": f"{self.url}/blob/{asked['oid']}"}, "verify": {"href": f"{self.url}/verify"}}
        return {**asked, "authenticated": True, "actions": actions}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        if self.refused is not None:
            return 403, {"error": self.refused}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
            else:
                self.files[repo][value["path"]] = self.blobs[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40, "success": True}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self._body()
            is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self._send(*(hub.answer(self.path, body) if is_known else (401, {"error": "Invalid credentials"})))

        def do_PUT(self) -> None:
            body = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self._body()
            hub.blobs[hashlib.sha256(body).hexdigest()] = body
            self._send(200, {})

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def _chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if "error" in answer:
                self.send_header("X-Error-Message", answer["error"])
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
