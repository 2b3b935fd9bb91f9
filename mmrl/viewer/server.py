"""Serves pages of runs on 127.0.0.1, to the browser that has the printed address and to nobody else.

Nothing is changed by a request, so GET is the only method. A request without the cookie gets a sentence and nothing of
the run. Media are named by run and hash, never by a path.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmrl.errors import ResourceError
from mmrl.viewer.documents import Document, NotThere
from mmrl.viewer.pages import MODULES, Pages, page_file

ADDRESS = "127.0.0.1"
MAX_QUERY = 2000
"""Characters of what follows the question mark; a search for more is no search."""
HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer, refusals too."""
_SITES = {"none", "same-origin"}
"""Where a request that tells it comes from: a person, or the page itself. Browsers send the cookie also from pages of
other servers on 127.0.0.1."""
_STRANGER = "This browser is not known here. Open the address that `mmrl view` printed, or reload this page."
_PAGE_FILES = {
    "": "text/html",
    "viewer.css": "text/css",
    **{f"{name}.js": "text/javascript" for name in MODULES},
}
_LANDING = b'<!doctype html><meta charset="utf-8"><title>mmrl</title><script src="enter.js"></script>'
"""Takes the token out of the address bar and the history. A redirect would not do: where a link in another page led
here, browsers send no strict cookie along with it."""
_ENTER = b'location.replace("/" + location.hash);'


def application(pages: Pages, token: str, port: int) -> ASGIApp:
    """The server of these pages, behind its guard."""

    def file(request: Request) -> Response:
        name = request.url.path[1:]
        return Response(page_file(name or "viewer.html"), media_type=_PAGE_FILES[name])

    def data(request: Request) -> Response:
        try:
            document = pages.document(request.path_params["resource"], request.query_params)
        except NotThere as error:
            return _problem(404, str(error))
        return Response(_json(document), media_type="application/json")

    def media(request: Request) -> Response:
        try:
            image = pages.run(request.path_params["run"]).image(request.path_params["hash"])
        except NotThere as error:
            return _problem(404, str(error))
        return Response(image, media_type="image/png")

    def enter(request: Request) -> Response:
        return Response(_ENTER, media_type="text/javascript")

    app = Starlette(
        routes=[
            *(Route(f"/{name}", file, methods=["GET"]) for name in _PAGE_FILES),
            Route("/enter.js", enter, methods=["GET"]),
            Route("/data/{resource:path}", data, methods=["GET"]),
            Route("/media/{run}/{hash}", media, methods=["GET"]),
        ]
    )
    return Guard(app, token, port)


class Guard:
    """Lets a request through to the application if it comes from the page that it serves itself."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._host = f"{ADDRESS}:{port}"
        self.cookie = f"mmrl-view-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, nothing to start
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        refusal = self._refusal(request)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The answer in place of the application's; None if the request may pass."""
        if request.method != "GET":
            return _problem(405, "The viewer answers GET only.")
        if request.headers.getlist("host") != [self._host]:
            return _problem(403, f"The viewer's address is http://{self._host}, and by no other name.")
        if any(origin != f"http://{self._host}" for origin in request.headers.getlist("origin")):
            return _problem(403, "The viewer answers its own page only.")
        if len(request.url.query) > MAX_QUERY:
            return _problem(414, f"A query has at most {MAX_QUERY} characters.")
        given = request.query_params.get("token") if request.url.path == "/" else None
        if given is not None and _is(given, self._token):
            cookie = f"{self.cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            return Response(_LANDING, media_type="text/html", headers={"set-cookie": cookie})
        if not _SITES.issuperset(request.headers.getlist("sec-fetch-site")):
            return _problem(403, "The viewer answers its own page only.")
        if not _is(request.cookies.get(self.cookie, ""), self._token):
            return _problem(403, _STRANGER)
        return None


def _is(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode(errors="replace"), token.encode())


def _json(document: Document) -> bytes:
    from pydantic_core import PydanticSerializationError, to_json

    try:
        return to_json(document, inf_nan_mode="null")  # a fifth of the standard library's time
    except PydanticSerializationError:  # half of a surrogate pair, which only an escape can tell
        return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def _problem(status: int, text: str) -> Response:
    return Response(json.dumps({"problem": text}), status, media_type="application/json")


class ViewServer:
    """A server that has its port, and serves once ``run`` is called.

    Attributes:
        url: The address to open, with the token.

    Raises:
        ResourceError: The port is in use, or may not be used.
    """

    def __init__(self, pages: Pages, port: int = 0) -> None:
        self._socket, self._pages = _bound(port), pages
        self.port: int = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(32)
        self.url = f"http://{ADDRESS}:{self.port}/?token={token}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                application(pages, token, self.port),
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=64,
                timeout_graceful_shutdown=1,
            )
        )

    def run(self) -> None:
        """Serve until a signal or ``stop``."""
        threading.Thread(target=self._pages.prepare, daemon=True).start()
        with self._socket:
            self._server.run(sockets=[self._socket])

    def close(self) -> None:
        """Give the port back without serving."""
        self._socket.close()

    def stop(self) -> None:
        """Have ``run`` end; may be called from another thread."""
        self._server.should_exit = True


def _bound(port: int) -> socket.socket:
    # With its protocol named, asyncio sends small packets at once; else each answer waits 40 ms for the last one's end.
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((ADDRESS, port))
        found.listen()
    except OSError as error:
        found.close()
        what = f"the viewer cannot have port {port}: {error.strerror}"
        remedy = "name another one, or leave out --port to get a free one"
        raise ResourceError(what, where="--port", remedy=remedy) from error
    return found
