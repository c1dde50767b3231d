"""Who may ask for what: keys on every route, other origins, other names; and routes that there are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.server.guard import ADMIN_PATHS, OPEN_PATHS
from app.server.openapi import document
from tests.support.asking import COMPLETIONS, Asker, body, error_of
from tests.support.raw_http import connect, head, read_reply
from tests.support.server import MODEL, RunningServer, running_server

CLIENT, ADMIN = "client-key", "admin-key"
ROUTES = [(method.upper(), path) for path, methods in document("0")["paths"].items() for method in methods]
BODIES = {
    "/v1/completions": body(prompt="x", max_tokens=1),
    "/v1/chat/completions": body(messages=[{"role": "user", "content": "x"}], max_tokens=1),
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/flush_cache": {},
    "/abort_request": {"rid": "none"},
    "/hicache/storage-backend": {"hicache_storage_backend": "memory"},
    "/clear_hicache_storage_backend": {},
}
OF_STORAGE = {"/hicache/storage-backend", "/clear_hicache_storage_backend"}
KEYS = {"none": None, "wrong": "wrong-key", "client": CLIENT, "admin": ADMIN}
SETTINGS = {
    "no key": {},
    "a key": {"api_key": CLIENT},
    "two keys": {"api_key": CLIENT, "admin_api_key": ADMIN},
    "an admin key": {"admin_api_key": ADMIN},
}


@pytest.fixture(scope="module", params=SETTINGS)
def keyed(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """-> which keys the server has, its url."""
    with running_server(http=SETTINGS[request.param]) as server:
        yield request.param, server.url


@pytest.fixture(scope="module")
def local() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def expected_status(path: str, settings: str, key: str) -> int:
    let_in = 409 if path in OF_STORAGE else 200  # these servers have no tiers
    if path in OPEN_PATHS or settings == "no key":
        return let_in
    if path in ADMIN_PATHS:
        allowed = {"a key": CLIENT}.get(settings, ADMIN)
        if KEYS[key] == allowed:
            return let_in
        return 403 if (settings, key) == ("two keys", "client") else 401
    allowed_keys = {"a key": {CLIENT}, "two keys": {CLIENT, ADMIN}, "an admin key": set(KEYS.values())}[settings]
    return 200 if KEYS[key] in allowed_keys else 401


@pytest.mark.parametrize("key", KEYS)
def test_every_route_asks_for_its_own_key(keyed: tuple[str, str], key: str) -> None:
    settings, url = keyed
    with Asker(url, KEYS[key]) as asker:
        for method, route in ROUTES:
            reply = asker.http.request(method, route.replace("{model}", MODEL), json=BODIES.get(route))
            assert reply.status_code == expected_status(route, settings, key), (method, route, reply.text)
            if reply.status_code == 401:
                assert reply.headers["www-authenticate"] == "Bearer"


def test_a_refusal_says_the_same_whatever_was_sent() -> None:
    with running_server(http={"api_key": CLIENT}) as server:
        values = ["Bearer x", "Bearer", "Basic eDp5", CLIENT, "Bearer é"]
        sent = [{}, *({"authorization": value.encode("latin-1")} for value in values)]
        with Asker(server.url) as asker:
            replies = [asker.http.get("/v1/models", headers=headers) for headers in sent]
            right = asker.http.get("/v1/models", headers={"authorization": f"bearer  {CLIENT}"})

    assert {reply.status_code for reply in replies} == {401}
    assert len({reply.content for reply in replies}) == 1
    assert error_of(replies[0])["code"] == "invalid_api_key"
    assert CLIENT not in replies[0].text
    assert right.status_code == 200


def test_without_its_key_nothing_is_told_about_a_route(keyed: tuple[str, str]) -> None:
    """Neither that it is not there, nor that the method is wrong, nor what is wrong with the body."""
    settings, url = keyed
    with Asker(url) as asker:
        asked = [("GET", "/nowhere", None), ("GET", COMPLETIONS, None), ("POST", COMPLETIONS, {"temperature": -1})]
        statuses = [asker.http.request(method, path, json=json).status_code for method, path, json in asked]

    assert statuses == ([404, 405, 400] if settings in ("no key", "an admin key") else [401] * 3)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://127.0.0.1", "null", "http://127.0.0.1.evil.example", "http://[", "x"]
)
def test_a_page_of_another_origin_is_refused(local: RunningServer, origin: str) -> None:
    with Asker(local.url) as asker:
        for method, route in ROUTES:
            path = route.replace("{model}", MODEL)
            reply = asker.http.request(method, path, headers={"origin": origin}, json=BODIES.get(route))
            assert (reply.status_code, error_of(reply)["code"]) == (403, "forbidden"), (path, reply.text)


def test_the_servers_own_page_is_served(local: RunningServer) -> None:
    with Asker(local.url) as asker:
        reply = asker.http.get("/cache_state", headers={"origin": local.url})
    assert reply.status_code == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:80", 200),
        ("[::1]:80", 200),
        ("127.9.9.9", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.1.1:30000", 403),
        ("[", 403),
        ("", 403),
    ],
)
def test_a_server_without_a_key_answers_under_local_names_only(local: RunningServer, host: str, status: int) -> None:
    for path in ("/health", "/v1/models"):
        lines = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        with connect(local.url) as connection:
            connection.sendall(lines.encode())
            assert read_reply(connection)[0] == status


def test_a_server_with_a_key_answers_under_any_name() -> None:
    with running_server(http={"api_key": CLIENT}) as server:
        with Asker(server.url, CLIENT) as asker:
            assert asker.http.get("/v1/models", headers={"host": "llm.example"}).status_code == 200


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/embeddings", "//", "/%2e%2e/etc"])
def test_an_unknown_route_is_told_as_an_error_body(local: RunningServer, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        with connect(local.url) as connection:
            connection.sendall(head(path, {"connection": "close", "content-length": "0"}, method))
            status, reply = read_reply(connection)
        assert status == 404
        assert b'"code":"unknown_url"' in reply


def test_a_wrong_method_names_the_right_one(local: RunningServer) -> None:
    with Asker(local.url) as asker:
        for route in {route for _, route in ROUTES}:
            right = {method for method, path in ROUTES if path == route}
            for wrong in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - right:
                reply = asker.http.request(wrong, route.replace("{model}", MODEL))
                assert (reply.status_code, error_of(reply)["code"]) == (405, "method_not_allowed"), (wrong, route)
                assert set(reply.headers["allow"].split(", ")) == right
