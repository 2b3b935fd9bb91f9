"""A hub on the loopback: the routes that huggingface_hub 2 and datasets 5 ask for, and the ways in which hubs fail."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "canary-6f1e0c7d-not-to-be-seen"
SIGNATURE = "signature-5d1f-of-an-address-that-serves-whoever-has-it"
LARGE = (".safetensors", ".bin", ".parquet")
"""Files that the hub keeps elsewhere, under their sha256, and redirects to."""

_API = re.compile(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")

Fault = int | Literal["cut", "corrupt", "short"]
"""An HTTP status, or a body's defect: it stops in the middle, holds other bytes, or ends before the announced size."""


@dataclass
class Repo:
    """One repository: files by commit, commits by branch or tag."""

    access: Literal["open", "gated", "private"] = "open"
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
            self._refuse(fault, "", "the hub has a bad day")
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

    do_HEAD = do_POST = do_GET

    def log_message(self, *arguments: object) -> None:
        """Silence."""

    def _answer(self, path: str, route: str | None, revision: str, below: str) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if (found := self._commit(path, revision)) is None:
            return
        commit, files = found
        if route in (None, "revision"):
            siblings = [{"rfilename": name} for name in files]
            answer: Any = {"id": path.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []}
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
        if repo is None or repo.access == "private":
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
    """What the hub tells of each file and folder, by path."""
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


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty hub."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def sums() -> Callable[[Iterable[int]], dict[str, bytes]]:
    """The files of a dataset, one row for each number; the answer is its double."""

    def write(numbers: Iterable[int]) -> dict[str, bytes]:
        from pyarrow import Table, parquet

        buffer = io.BytesIO()
        rows = [{"problem": f"what is {n}+{n}?", "answer": str(2 * n)} for n in numbers]
        parquet.write_table(Table.from_pylist(rows), buffer)
        return {"README.md": b"# sums", "data/train-00000-of-00001.parquet": buffer.getvalue()}

    return write


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """HF_HOME of the user's commands."""
    return tmp_path / "hf"


@pytest.fixture
def environment(hub: Hub, home: Path) -> dict[str, str]:
    """What the user has set: the hub's address, and a token."""
    kept = ("PATH", "HOME", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": TOKEN,
    }


@pytest.fixture
def python(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with the user's environment and the variables given by name; no output may hold a secret."""

    def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, env=environment | variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert not [secret for secret in (TOKEN, SIGNATURE) if secret in done.stdout + done.stderr]
        return done

    return run
