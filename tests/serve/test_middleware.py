"""What is refused at the door."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import httpx
import pytest

from live_server import LiveServer, live_server
from unmask.serve._middleware import validate_origin
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
def locked() -> Iterator[LiveServer]:
    with live_server(token="ünique secret", limits=Limits(body_bytes=500)) as served:
        yield served


def told(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("path", ROUTES)
def test_without_the_token_only_health_answers(locked: LiveServer, path: str) -> None:
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
def test_wrong_tokens(locked: LiveServer, header: str) -> None:
    assert locked.http.get("/ready", headers={"Authorization": header.encode()}).status_code == 401


def test_the_token_opens_for_programs_and_browsers(locked: LiveServer) -> None:
    token = "ünique secret".encode()
    for header in (b"Bearer " + token, b"Basic " + base64.b64encode(b"anybody:" + token)):
        assert locked.http.get("/ready", headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1"])
def test_other_names_are_not_ours(server: LiveServer, host: str) -> None:
    refused = server.http.get("/health", headers={"Host": host})
    assert refused.status_code == 400
    for name in ("localhost", "LOCALHOST:99", "127.0.0.1"):
        assert server.http.get("/health", headers={"Host": name}).status_code == 200


def test_other_sites_may_not_ask(server: LiveServer) -> None:
    body = {"text": "abc"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"):
        refused = server.http.post("/v1/score", json=body, headers={"Origin": origin})
        assert refused.status_code == 403
        assert "requests from other sites are not allowed" in told(refused)
    assert server.http.post("/v1/score", json=body, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    own = server.http.post("/v1/score", json=body, headers={"Origin": server.url})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_read(server: LiveServer, kind: str) -> None:
    refused = server.http.post("/v1/score", content=b'{"text": "abc"}', headers={"Content-Type": kind})
    assert refused.status_code == 415
    fine = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.http.post("/v1/score", content=b'{"text": "abc"}', headers=fine).status_code == 200


def test_large_bodies_are_refused_whether_they_say_so_or_not(locked: LiveServer) -> None:
    headers = {"Authorization": "Bearer ünique secret".encode(), "Content-Type": "application/json"}
    large = b'{"text": "' + b"a" * 600 + b'"}'
    said = locked.http.post("/v1/score", content=large, headers=headers)
    unsaid = locked.http.post("/v1/score", content=iter([large[:300], large[300:]]), headers=headers)
    for refused in (said, unsaid):
        assert refused.status_code == 413
        assert "at most 500 bytes" in told(refused)


def test_pages_may_load_nothing_from_elsewhere(server: LiveServer) -> None:
    for path in ("/", "/docs", "/health"):
        headers = server.http.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    page = server.http.get("/").text + server.http.get("/page.css").text
    assert "http:" not in page
    assert "https:" not in page
    assert "style=" not in page


@pytest.mark.parametrize("origin", ["http://[", "http://]", "//[::1", "http://[::1]x[", "\x80", "http://a b", ""])
def test_malformed_origins_are_refused_with_and_without_a_token(
    server: LiveServer, locked: LiveServer, origin: str
) -> None:
    for served in (server, locked):
        for path in ("/health", "/v1/models"):
            assert served.http.get(path, headers={"Origin": origin.encode("latin-1")}).status_code == 403


def test_head_is_get_without_the_body(server: LiveServer) -> None:
    for path in ("/", "/docs", "/openapi.json", "/health", "/ready", "/metrics", "/v1/models", "/page.js"):
        head, get = server.http.head(path), server.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert int(head.headers["content-length"]) > 0
    assert server.http.head("/nowhere").status_code == 404
    assert server.http.head("/v1/infill").status_code == 405


SITE = "https://my.site:3000"


def test_pages_of_an_allowed_origin_may_ask() -> None:
    with live_server(token="x", allowed_origins=[SITE]) as server:
        asking = {
            "Origin": SITE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
            "Access-Control-Request-Private-Network": "true",
        }
        first = server.http.options("/v1/score", headers=asking)  # browsers send no token with it
        assert (first.status_code, first.headers["access-control-allow-origin"]) == (204, SITE)
        assert "POST" in first.headers["access-control-allow-methods"]
        assert "authorization" in first.headers["access-control-allow-headers"].lower()
        assert first.headers["access-control-allow-private-network"] == "true"
        own = {"Origin": SITE, "Sec-Fetch-Site": "cross-site"}
        for headers, status in ((own, 401), ({**own, "Authorization": "Bearer x"}, 200)):
            answer = server.http.post("/v1/score", json={"text": "abc"}, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, SITE)
            assert answer.headers["vary"] == "Origin"
        for origin in ("https://my.site", "https://evil.example", "null", "http://["):
            for refused in (
                server.http.options("/v1/score", headers={**asking, "Origin": origin}),
                server.http.post("/v1/score", json={}, headers={"Origin": origin, "Authorization": "Bearer x"}),
            ):
                assert refused.status_code == 403
                assert "access-control-allow-origin" not in refused.headers
    with live_server(allowed_origins=["*"]) as server:
        answer = server.http.get("/v1/models", headers={"Origin": "null"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "null")


def test_what_an_origin_is() -> None:
    assert [validate_origin(each) for each in ("HTTPS://My.site/", "http://[::1]:80", "*")] == [
        "https://my.site",
        "http://[::1]:80",
        "*",
    ]
    for wrong in ("my.site", "https://my.site/path", "https://", "http://[", "", "null"):
        with pytest.raises(ValueError, match="is not an origin"):
            validate_origin(wrong)
