"""A hub on the loopback: the routes that huggingface_hub 2 and datasets 5 ask for, and the ways in which hubs fail.

It takes pushes in the older way of large files (LFS), which huggingface_hub falls back to where HF_HUB_DISABLE_XET is
set: the newer one speaks to a storage of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

TOKEN = "canary-6f1e0c7d-not-to-be-seen"
SIGNATURE = "signature-5d1f-of-an-address-that-serves-whoever-has-it"
LARGE = (".safetensors", ".bin", ".parquet")
"""Files that the hub keeps elsewhere, under their sha256, and redirects to."""

_API = re.compile(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?")
_PUSH = re.compile(r"/api/(models/[^/]+/[^/]+)/(auth-check/write|branch|preupload|commit)(?:/(.+))?")
_LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")

Fault = int | Literal["cut", "corrupt", "short", "stall", "lost"]
"""An HTTP status, or a body's defect: it stops in the middle, holds other bytes, or ends before the announced size.
``stall``: no answer, for a second. ``lost``: the request is served, and its answer does not arrive."""
PART_BYTES = 300_000
"""Larger files are uploaded in parts of this size."""


@dataclass
class Repo:
    """One repository: files by commit, commits by branch or tag."""

    access: Literal["open", "gated", "private"] = "open"
    is_private: bool = False
    takes_pushes: bool = True
    messages: list[str] = field(default_factory=list)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def push(self, files: Mapping[str, bytes], *tags: str) -> str:
        """Make a commit with exactly these files the newest of ``main``; returns its hash."""
        content = [*self.commits, *(f"{name} {hashlib.sha1(data).hexdigest()}" for name, data in files.items())]
        commit = hashlib.sha1("\n".join(content).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs |= dict.fromkeys(("main", *tags), commit)
        return commit


@dataclass
class Failure:
    pattern: re.Pattern[str]
    fault: Fault
    times: float


class Hub(ThreadingHTTPServer):
    """Serves repositories, remembers requests, and fails when it is told to.

    Attributes:
        repos: By path: ``models/owner/name`` or ``datasets/owner/name``.
        requests: ``METHOD /path`` of every request; large files are at ``/cdn/<sha256>``.
        leaks: The requests for large files, which lie elsewhere, that carried a token.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.account: dict[str, Any] = {
            "name": "me",
            "orgs": [{"name": "team"}],
            "auth": {"accessToken": {"role": "write"}},
        }
        self.uploads: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        self.leaks: list[str] = []
        self._failures: list[Failure] = []
        self._lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may leave in the middle of an answer; a bug here still fails the test that asked."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def repo(self, path: str, access: Literal["open", "gated", "private"] = "open") -> Repo:
        """A new repository."""
        return self.repos.setdefault(path, Repo(access))

    def fail(self, pattern: str, fault: Fault, times: float = float("inf")) -> None:
        """Let the next requests whose ``METHOD /path`` matches fail."""
        self._failures.append(Failure(re.compile(pattern), fault, times))

    def heal(self) -> None:
        self._failures.clear()

    def count(self, pattern: str) -> int:
        """How many requests matched."""
        return sum(bool(re.search(pattern, request)) for request in self.requests)

    def note(self, request: str) -> Fault | None:
        """Remember a request; how it is to fail."""
        with self._lock:
            self.requests.append(request)
            for failure in self._failures:
                if failure.times > 0 and failure.pattern.search(request):
                    failure.times -= 1
                    return failure.fault
        return None

    def digests(self, path: str, branch: str = "main") -> dict[str, str]:
        """The sha256 of each file of a repository's branch."""
        repo = self.repos[path]
        return {name: hashlib.sha256(data).hexdigest() for name, data in repo.commits[repo.refs[branch]].items()}

    def large(self, digest: str) -> bytes:
        files = (data for repo in self.repos.values() for files in repo.commits.values() for data in files.values())
        return next(data for data in files if hashlib.sha256(data).hexdigest() == digest)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        fault = self.server.note(f"{self.command} {path}")
        if isinstance(fault, int):
            self._body()
            self._refuse(fault, "", "the hub has a bad day")
        elif fault == "stall":
            time.sleep(1)
            self.close_connection = True
        elif self._push(path, fault):
            pass
        elif path.startswith("/cdn/"):
            if "Authorization" in self.headers:
                self.server.leaks.append(path)
            self._send(self.server.large(path.removeprefix("/cdn/")), {}, fault)
        elif api := _API.fullmatch(path):
            self._answer(api[1], api[2], api[3] or "main", (api[4] or "/")[1:])
        elif file := _FILE.fullmatch(path):
            self._file(f"{file[1] or 'models/'}{file[2]}", file[3], file[4], fault)
        else:
            self._refuse(404, "", "no such route")

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *arguments: object) -> None:
        """Silence."""

    def _push(self, path: str, fault: Fault | None) -> bool:
        """Serve a request of a push; False if it is none."""
        if path == "/api/whoami-v2":
            self._json(self.server.account) if self._is_known() else self._refuse(
                401, "", "Invalid username or password."
            )
        elif path == "/api/repos/create":
            self._create()
        elif path == "/api/validate-yaml":
            header = json.loads(self._body())["content"].split("---")[1]
            self._json(
                {"errors": [], "warnings": []} if "library_name" in header else {"errors": [{"message": header}]}
            )
        elif path.startswith("/lfs/"):
            self._upload(path)
        elif batch := _LFS.fullmatch(path):
            self._batch(f"models/{batch[1]}")
        elif push := _PUSH.fullmatch(path):
            repo, body = self.server.repos.get(push[1]), self._body()
            if repo is None:
                self._refuse(404, "RepoNotFound", "Repository not found")
            elif not self._is_known() or not repo.takes_pushes:
                self._refuse(403, "", "You don't have the rights to write here")
            elif push[2] == "auth-check/write":
                self._json({})
            elif push[2] == "branch":
                self._branch(repo, push[3])
            elif push[2] == "preupload":
                self._preupload(repo, push[3], body)
            else:
                self._take(push[1], push[3], body, fault)
        else:
            return False
        return True

    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _body(self) -> bytes:
        """The request's body, of a known length or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _json(self, answer: Any, status: int = 200) -> None:
        self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"}, status=status)

    def _create(self) -> None:
        asked = json.loads(self._body())
        owner, name = asked["organization"] or self.server.account["name"], asked["name"]
        if not self._is_known() or owner not in ("me", "team"):
            self._refuse(403, "", f"You don't have the rights to create a model under the namespace {owner!r}")
        elif f"models/{owner}/{name}" in self.server.repos:
            self._refuse(409, "", "You already created this model repo")
        else:
            repo = self.server.repo(f"models/{owner}/{name}")
            repo.is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
            repo.push({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
            self._json({"url": f"{self.server.url}/{owner}/{name}", "name": f"{owner}/{name}"})

    def _branch(self, repo: Repo, branch: str) -> None:
        if branch in repo.refs:
            self._refuse(409, "", "Reference already exists")
        else:
            repo.refs[branch] = repo.refs["main"]
            self._json({})

    def _preupload(self, repo: Repo, branch: str, body: bytes) -> None:
        files = repo.commits[repo.refs[branch]]
        entries = _entries(files)

        def mode(asked: Mapping[str, Any]) -> dict[str, Any]:
            name = asked["path"]
            kind = "lfs" if name.endswith(LARGE) else "regular"
            found = {"path": name, "uploadMode": kind, "shouldIgnore": False}
            if name in files:
                found["oid"] = entries[name]["lfs"]["oid"] if kind == "lfs" else _git_hash(files[name])
            return found

        self._json({"files": [mode(each) for each in json.loads(body)["files"]]})

    def _batch(self, path: str) -> None:
        """Where to send each large file: nowhere if its content is here."""
        asked, objects, repo = json.loads(self._body()), [], self.server.repos[path]
        here = {*self.server.uploads, *(h for c in repo.commits.values() for h in map(_sha256, c.values()))}
        for each in asked["objects"]:
            oid, size = each["oid"], each["size"]
            entry = {"oid": oid, "size": size}
            if oid not in here:
                url, header = f"{self.server.url}/lfs/{oid}", dict[str, str]()
                if size > PART_BYTES:
                    numbers = range(1, -(-size // PART_BYTES) + 1)
                    header = {"chunk_size": str(PART_BYTES), **{str(n): f"{url}/{n}" for n in numbers}}
                entry["actions"] = {"upload": {"href": url, "header": header}}
                entry["actions"]["verify"] = {"href": f"{url}/verify"}
            objects.append(entry)
        self._json({"objects": objects, "transfer": "basic"})

    def _upload(self, path: str) -> None:
        """Content of a file, a part of it, or the word that all parts are sent."""
        _, _, oid, *part = path.split("/")
        body = self._body()
        if part == ["verify"]:
            self._json({}, 200 if oid in self.server.uploads else 404)
            return
        if part:
            self.server.parts.setdefault(oid, {})[int(part[0])] = body
        else:
            pieces = self.server.parts.pop(oid, {})
            whole = body if self.command == "PUT" else b"".join(pieces[n] for n in sorted(pieces))
            assert _sha256(whole) == oid
            self.server.uploads[oid] = whole
        self._send(b"{}", {"ETag": '"part"'})

    def _take(self, name: str, branch: str, body: bytes, fault: Fault | None) -> None:
        """Make a commit of the operations, whose files are all here."""
        repo = self.server.repos[name]
        header, *operations = [json.loads(line) for line in body.splitlines()]
        parent = repo.refs[branch]
        if header["value"].get("parentCommit", parent) != parent:
            self._refuse(412, "", "A commit has happened since. Please refresh and try again.")
            return
        files = dict(repo.commits[parent])
        for each in operations:
            value = each["value"]
            if each["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif each["key"] == "lfsFile":
                known = {_sha256(data): data for data in repo.commits[parent].values()} | self.server.uploads
                files[value["path"]] = known[value["oid"]]
            else:
                del files[value["path"]]
        main = repo.refs["main"]
        commit = repo.push(files, branch)
        repo.refs |= {} if branch == "main" else {"main": main}
        repo.messages.append(header["value"]["summary"])
        if fault == "lost":
            self.close_connection = True
        else:
            url = f"{self.server.url}/{name.removeprefix('models/')}/commit/{commit}"
            self._json({"commitUrl": url, "commitOid": commit})

    def _answer(self, path: str, route: str | None, revision: str, below: str) -> None:
        body = json.loads(self._body() or "{}")
        if (found := self._commit(path, revision)) is None:
            return
        commit, files = found
        if route in (None, "revision"):
            siblings = [{"rfilename": name} for name in files]
            private = self.server.repos[path].is_private
            answer: Any = {"id": path.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []}
            answer |= {"private": private, "cardData": _card_data(files.get("README.md", b""))}
        else:
            entries = _entries(files)
            inside = [path for path in entries if path.startswith(f"{below}/" if below else "")]
            if "recursive=true" not in self.path.lower():
                inside = [path for path in inside if path.rpartition("/")[0] == below]
            answer = [entries[path] for path in body.get("paths", inside) if path in entries]
        self._send(json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, path: str, revision: str, name: str, fault: Fault | None) -> None:
        if (found := self._commit(path, revision)) is None:
            return
        commit, files = found
        headers = {"X-Repo-Commit": commit}
        if name not in files:
            self._refuse(404, "EntryNotFound", f"no {name}", headers)
        elif name.endswith(LARGE):
            digest = hashlib.sha256(files[name]).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(files[name]))}
            elsewhere = f"http://localhost:{self.server.server_port}/cdn/{digest}?{SIGNATURE}"
            self._send(b"", headers | {"Location": elsewhere}, status=302)
        else:
            self._send(files[name], headers | {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'}, fault)

    def _commit(self, path: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit of a revision and its files, or None once the request is refused."""
        repo = self.server.repos.get(path)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or repo.access == "private" or (repo.is_private and not known):
            self._refuse(404 if known else 401, "RepoNotFound", "Repository not found")
        elif repo.access == "gated":
            self._refuse(403 if known else 401, "GatedRepo", "Access is restricted")
        elif (commit := repo.refs.get(revision, revision)) not in repo.commits:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return commit, repo.commits[commit]
        return None

    def _refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """Say why, and be so careless as to repeat the token."""
        message = f"{message} (you sent {self.headers.get('Authorization')})"
        named = {"X-Error-Code": code} if code else {}
        body = json.dumps({"error": message}).encode()
        self._send(body, {**(headers or {}), **named, "X-Error-Message": message}, status=status)

    def _send(self, body: bytes, headers: Mapping[str, str], fault: Fault | None = None, status: int = 200) -> None:
        if fault == "corrupt":
            body = bytes(255 - byte for byte in body)
        elif fault == "short":
            body = body[:-1]
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start and status == 200:
            status, headers = 206, {**headers, "Content-Range": f"bytes {start[1]}-{len(body) - 1}/{len(body)}"}
            body = body[int(start[1]) :]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
        self.close_connection |= fault == "cut"


def _entries(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """The hub's entry of each file and folder, by path."""
    entries: dict[str, dict[str, Any]] = {}
    for path, data in files.items():
        digest = hashlib.sha1(data).hexdigest()
        for folder in Path(path).parents[:-1]:
            entries[str(folder)] = {"type": "directory", "path": str(folder), "size": 0, "oid": digest}
        entries[path] = {"type": "file", "path": path, "size": len(data), "oid": digest}
        if path.endswith(LARGE):
            lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries[path]["lfs"] = lfs
    return entries


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _card_data(card: bytes) -> dict[str, Any] | None:
    """The metadata of a model card."""
    import yaml

    parts = card.decode().split("---\n")
    return yaml.safe_load(parts[1]) if len(parts) > 2 else None


@contextmanager
def serving() -> Iterator[Hub]:
    """An empty hub."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
