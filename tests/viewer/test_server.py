"""Each rule of the viewer's server, asked over a real socket."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mmrl.errors import ResourceError
from mmrl.viewer.pages import Pages
from mmrl.viewer.server import ADDRESS, HEADERS, MAX_QUERY, ViewServer
from tests.viewer.made_run import make_run


@dataclass
class Answer:
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        (value,) = [value for known, value in self.headers if known.lower() == name]
        return value


class Browser:
    """Requests, each over a connection of its own, with any header."""

    def __init__(self, server: ViewServer) -> None:
        self.server, self.port = server, server.port
        self.token = server.url.partition("token=")[2]
        self.cookie = f"mmrl-view-{self.port}={self.token}"

    def ask(self, path: str, method: str = "GET", *, host: str | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection(ADDRESS, self.port, timeout=10)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"host": host or f"{ADDRESS}:{self.port}", **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = Answer(answer.status, answer.getheaders(), answer.read())
        connection.close()
        return found

    def known(self, path: str, method: str = "GET", **headers: str) -> Answer:
        return self.ask(path, method, cookie=self.cookie, **headers)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / "one"), make_run(folder / "two")]


@pytest.fixture(scope="module")
def browser(runs: list[Path]) -> Iterator[Browser]:
    server = ViewServer(Pages(runs))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield Browser(server)
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_it_listens_on_loopback_only(browser: Browser) -> None:
    here = [each.laddr for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in here if each.port == browser.port] == [ADDRESS]
    assert ADDRESS == "127.0.0.1"


PATHS = (
    "/",
    "/start.js",
    "/text.js",
    "/viewer.css",
    "/enter.js",
    "/data/runs",
    "/data/run/0",
    f"/media/0/{'0' * 64}",
    "/nothing",
)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_told_without_the_token(browser: Browser, path: str) -> None:
    port, token = browser.port, browser.token
    wrong = ["", "token", token[:-1], token + "x", token.swapcase()]
    cookies = [{}, *({"cookie": f"mmrl-view-{port}={each}"} for each in wrong), {"cookie": f"mmrl-view={token}"}]
    cookies += [{"cookie": f"mmrl-view-{port + 1}={token}"}, {"authorization": f"Bearer {token}"}]
    answers = [browser.ask(path, **headers) for headers in cookies]
    answers += [browser.ask(f"{path}?token={each}") for each in wrong[:4]]
    if path != "/":
        answers.append(browser.ask(f"{path}?token={token}"))
    assert {each.status for each in answers} == {403}
    assert all(set(json.loads(each.body)) == {"problem"} for each in answers)
    assert all(name.lower() != "set-cookie" for each in answers for name, _ in each.headers)


def test_the_token_becomes_a_strict_cookie_named_by_the_port(browser: Browser) -> None:
    answer = browser.ask(f"/?token={browser.token}")
    assert answer.status == 200
    name, *attributes = answer.header("set-cookie").split("; ")
    assert name == f"mmrl-view-{browser.port}={browser.token}"
    assert {each.lower() for each in attributes} == {"httponly", "samesite=strict", "path=/"}
    assert len(browser.token) >= 43  # 256 bits
    assert browser.token.encode() not in answer.body
    assert browser.known("/enter.js").body == b'location.replace("/" + location.hash);'  # out of the address bar
    assert (
        browser.known("/").body.startswith(b"<!doctype html>") and browser.token.encode() not in browser.known("/").body
    )


def test_every_server_has_a_token_of_its_own(runs: list[Path]) -> None:
    servers = [ViewServer(Pages(runs)) for _ in range(2)]
    assert len({server.url.partition("token=")[2] for server in servers}) == 2
    for server in servers:
        server.close()


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
@pytest.mark.parametrize("path", ["/", "/data/runs", "/nothing"])
def test_only_get_is_answered(browser: Browser, method: str, path: str) -> None:
    assert browser.known(path, method).status == 405


def test_host_and_origin_are_exact(browser: Browser) -> None:
    port = browser.port
    hosts = [
        "localhost",
        f"localhost:{port}",
        ADDRESS,
        f"{ADDRESS}:{port + 1}",
        f"evil.example:{port}",
        f"[::1]:{port}",
    ]
    hosts += [f"{ADDRESS}.evil.example:{port}", f"{ADDRESS}:{port}.evil.example", f"127.1:{port}", f"0.0.0.0:{port}"]
    for path in ("/data/runs", f"/?token={browser.token}"):
        assert [browser.known(path, host=host).status for host in hosts] == [403] * len(hosts)
    own = f"http://{ADDRESS}:{port}"
    origins = [
        "null",
        "http://evil.example",
        f"https://{ADDRESS}:{port}",
        f"http://localhost:{port}",
        f"{own}0",
        f"{own}/",
    ]
    assert [browser.known("/data/runs", origin=origin).status for origin in origins] == [403] * len(origins)
    assert browser.known("/data/runs", origin=own).status == browser.known("/data/runs").status == 200


def test_a_request_of_another_page_is_refused_also_with_the_cookie(browser: Browser) -> None:
    for path in PATHS:
        for site in ("same-site", "cross-site", "", "None", "same-origin, none"):
            assert browser.known(path, **{"sec-fetch-site": site}).status == 403, (path, site)
    for site in ("none", "same-origin"):
        assert browser.known("/data/runs", **{"sec-fetch-site": site}).status == 200
    # A link in another page may lead here: whoever has the token in it needs no cookie.
    assert browser.ask(f"/?token={browser.token}", **{"sec-fetch-site": "cross-site"}).status == 200


@pytest.mark.parametrize("hosts", [[], ["evil.example", None], [None, None]])
def test_a_request_has_one_host(browser: Browser, hosts: list[str | None]) -> None:
    own = f"{ADDRESS}:{browser.port}"
    lines = [
        "GET /data/runs HTTP/1.1",
        *(f"Host: {host or own}" for host in hosts),
        f"Cookie: {browser.cookie}",
        "",
        "",
    ]
    with socket.create_connection((ADDRESS, browser.port), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode())
        answer = connection.recv(100)
    assert answer.split()[1] in (b"400", b"403")


def test_media_are_named_by_hash_and_stay_in_the_runs_folder(browser: Browser, runs: list[Path]) -> None:
    media = runs[0] / "media"
    (name, other, *_) = sorted(file.stem for file in media.glob("*.png"))
    answer = browser.known(f"/media/0/{name}")
    assert (answer.status, answer.header("content-type")) == (200, "image/png")
    assert answer.body == (media / f"{name}.png").read_bytes()

    secret = runs[0].parent / "secret.png"
    secret.write_bytes(b"secret")
    away, within, broken = ("".join(digit * 64) for digit in "abc")
    (media / f"{away}.png").symlink_to(secret)
    (media / f"{within}.png").symlink_to(media / f"{other}.png")
    (media / f"{broken}.png").symlink_to(media / f"{broken}.png")
    (runs[1] / "media" / f"{name}.png").rename(runs[1] / "moved.png")
    assert browser.known(f"/media/0/{within}").status == 200
    refused = [away, broken, name.upper(), name[:-1], f"{name}0", f"{name}.png", "../config.yaml", "..%2fconfig.yaml"]
    refused += [
        f"%2e%2e/{name}",
        f"{'0' * 61}%2f..",
        "",
        f"..%2fmedia%2f{name}",
        "config.yaml",
        f"{name}%00",
        f"{name}%0a",
    ]
    for each in refused:
        found = browser.known(f"/media/0/{each}")
        assert found.status == 404 and b"secret" not in found.body, each
    assert browser.known(f"/media/1/{name}").status == 404  # of that run alone
    assert [browser.known(f"/media/{run}/{name}").status for run in ("2", "-1", "x", "00")] == [404, 404, 404, 200]


@pytest.mark.parametrize("path", [*PATHS, "/?token=wrong", "/data/run/0/step/9", "/data/run/0/step/1"])
def test_every_answer_has_the_headers(browser: Browser, path: str) -> None:
    for answer in (
        browser.known(path),
        browser.ask(path),
        browser.known(path, "POST"),
        browser.known(path, host="evil"),
    ):
        for name, value in HEADERS.items():
            assert answer.header(name) == value
        assert all(name.lower() != "server" for name, _ in answer.headers)
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["script-src"] == "'self'"
    assert policy["base-uri"] == policy["form-action"] == "'none'"
    assert not any("unsafe" in value or "*" in value or "http" in value for value in policy.values())
    assert HEADERS["x-content-type-options"] == "nosniff" and HEADERS["cache-control"] == "no-store"
    assert HEADERS["referrer-policy"] == "no-referrer"
    assert not any(name.startswith("access-control") for name in HEADERS)


def test_documents_are_json_that_no_browser_takes_for_a_page(browser: Browser) -> None:
    answer = browser.known("/data/run/0/step/1")
    assert answer.header("content-type") == "application/json" and answer.body.isascii()
    assert json.loads(answer.body)["step"] == 1
    missing = browser.known("/data/run/0/step/9")
    assert missing.status == 404 and "no rollouts of step 9" in json.loads(missing.body)["problem"]
    found = browser.known("/data/run/0/step/1/search?q=look%20at")
    assert json.loads(found.body) == {"rows": [1]}
    assert browser.known(f"/data/run/0/step/1/search?q={'x' * MAX_QUERY}").status == 414
    assert browser.known("/data/run/0/prompt?id=shapes%2F0").status == 200


def test_a_websocket_is_no_way_in(browser: Browser) -> None:
    headers = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13"}
    answer = browser.ask("/data/runs", **headers, **{"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="})
    assert answer.status == 403


def test_a_port_in_use_is_an_error_that_says_what_to_do(browser: Browser, runs: list[Path]) -> None:
    with pytest.raises(ResourceError, match=f"cannot have port {browser.port}: Address already in use") as caught:
        ViewServer(Pages(runs), browser.port)
    assert "leave out --port" in caught.value.remedy
