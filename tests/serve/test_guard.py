"""What is refused at the door."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import httpx
import pytest

from served import Served, serving
from unmask.serve.limits import Limits

ROUTES = [
    "/",
    "/docs",
    "/openapi.json",
    "/page.js",
    "/write.js",
    "/ready",
    "/metrics",
    "/v1/models",
    "/nowhere",
]


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(token="ünique secret", limits=Limits(body_bytes=500)) as served:
        yield served


def told(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("path", ROUTES)
def test_without_the_token_only_health_answers(locked: Served, path: str) -> None:
    refused = locked.http.get(path)
    assert refused.status_code == 401
    assert "Authorization: Bearer" in told(refused)
    assert locked.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer secret",
        "Bearer ünique secre",
        "secret",
        "Basic x",
        "Basic !!!!",
        "Digest ünique secret",
    ],
)
def test_wrong_tokens(locked: Served, header: str) -> None:
    assert locked.http.get("/ready", headers={"Authorization": header.encode()}).status_code == 401


def test_the_token_opens_for_programs_and_browsers(locked: Served) -> None:
    token = "ünique secret".encode()
    for header in (b"Bearer " + token, b"Basic " + base64.b64encode(b"anybody:" + token)):
        assert locked.http.get("/ready", headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1"])
def test_other_names_are_not_ours(server: Served, host: str) -> None:
    refused = server.http.get("/health", headers={"Host": host})
    assert refused.status_code == 400
    for name in ("localhost", "LOCALHOST:99", "127.0.0.1"):
        assert server.http.get("/health", headers={"Host": name}).status_code == 200


def test_other_sites_may_not_ask(server: Served) -> None:
    body = {"text": "abc"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"):
        refused = server.http.post("/v1/score", json=body, headers={"Origin": origin})
        assert (refused.status_code, told(refused)) == (403, "requests from other sites are not answered")
    assert (
        server.http.post("/v1/score", json=body, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    )
    own = server.http.post("/v1/score", json=body, headers={"Origin": server.url})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_only_json_is_read(server: Served, kind: str) -> None:
    refused = server.http.post("/v1/score", content=b'{"text": "abc"}', headers={"Content-Type": kind})
    assert refused.status_code == 415
    fine = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.http.post("/v1/score", content=b'{"text": "abc"}', headers=fine).status_code == 200


def test_large_bodies_are_refused_whether_they_say_so_or_not(locked: Served) -> None:
    headers = {"Authorization": "Bearer ünique secret".encode(), "Content-Type": "application/json"}
    large = b'{"text": "' + b"a" * 600 + b'"}'
    said = locked.http.post("/v1/score", content=large, headers=headers)
    unsaid = locked.http.post("/v1/score", content=iter([large[:300], large[300:]]), headers=headers)
    for refused in (said, unsaid):
        assert refused.status_code == 413
        assert "at most 500 bytes" in told(refused)


def test_pages_may_load_nothing_from_elsewhere(server: Served) -> None:
    for path in ("/", "/docs", "/health"):
        headers = server.http.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = server.http.get("/").text + server.http.get("/page.css").text
    assert "http:" not in page
    assert "https:" not in page
    assert "style=" not in page
