"""What ``HubRepo`` fetches, how often, and what it says when a hub fails; each case in a process of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

WEIGHTS = "model.safetensors"
FILES = {"config.json": b"{}", WEIGHTS: bytes(range(256)) * 2000, "pytorch_model.bin": b"the same once more"}
PREFIX_LIMITING_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
PREFIX_FORBIDDING_CONNECTIONS = """
import socket, mmrl.data.hub

def connect(*_):
    raise PermissionError(1, "Operation not permitted")

socket.socket.connect = connect
mmrl.data.hub.RETRY_AFTER_S = ()
"""
FETCH = """
import json, sys, time, traceback
import huggingface_hub.hf_api
from mmrl.errors import MMRLError
from mmrl.data.hub import HubRepo

started = time.monotonic()
name, revision, *patterns = sys.argv[1:]
try:
    repo = HubRepo("model", name, revision or None).pinned()
    answer = {"commit": repo.revision, "folder": str(repo.download(patterns))}
except MMRLError as error:
    traceback.print_exc()  # as a cluster shows what fails elsewhere
    answer = {"error": type(error).__name__, "code": error.exit_code, "message": str(error)}
print(json.dumps(answer | {"seconds": time.monotonic() - started}))
"""


@pytest.fixture
def fetch(python: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., dict[str, Any]]:
    """Fetches files of a revision; answers with commit and folder, or with the error, and the seconds it took."""

    def run(
        name: str = "org/model", revision: str = "", *patterns: str, code: str = FETCH, **variables: str
    ) -> dict[str, Any]:
        done = python("-c", code, name, revision, *(patterns or [WEIGHTS]), **variables)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return run


@pytest.fixture
def model(hub: Any) -> Any:
    """A model whose tag v1 has ``FILES``, and whose main has moved on."""
    repo = hub.repo("models/org/model")
    repo.push(FILES, "v1")
    repo.push(FILES | {WEIGHTS: b"other weights"})
    return repo


def content(answer: Mapping[str, str]) -> bytes:
    return Path(answer["folder"], WEIGHTS).read_bytes()


def test_a_tag_and_a_commit_give_the_bytes_of_their_commit_after_main_has_moved(fetch: Any, model: Any) -> None:
    for revision in ("v1", model.refs["v1"]):
        answer = fetch("org/model", revision)
        assert answer["commit"] == model.refs["v1"] and content(answer) == FILES[WEIGHTS]
    newest = fetch()
    assert newest["commit"] == model.refs["main"] and content(newest) == b"other weights"


def test_what_is_not_asked_for_is_not_fetched(fetch: Any, hub: Any, model: Any) -> None:
    folder = Path(fetch("org/model", "v1")["folder"])
    assert {path.name for path in folder.iterdir()} == {WEIGHTS}
    assert hub.count("GET /cdn/") == 1 and hub.count(r"\.bin|config\.json") == 0


def test_two_processes_at_once_fetch_each_file_once(fetch: Any, hub: Any) -> None:
    shards = {f"model-{i}.safetensors": bytes([i]) * 3_000_000 for i in range(4)}
    hub.repo("models/org/model").push(shards)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: fetch("org/model", "", "*.safetensors"), range(2))
    assert first["folder"] == second["folder"]
    for name, data in shards.items():
        assert Path(first["folder"], name).read_bytes() == data
        assert hub.count(f"GET /cdn/{hashlib.sha256(data).hexdigest()}") == 1


def test_what_is_cached_needs_no_request(fetch: Any, hub: Any, model: Any) -> None:
    fetch("org/model", "v1")
    hub.requests.clear()
    for revision in ("v1", model.refs["v1"]):
        answer = fetch("org/model", revision, HF_HUB_OFFLINE="1")
        assert content(answer) == FILES[WEIGHTS] and answer["seconds"] < 3
    fetch("org/model", model.refs["v1"])  # nor does a commit when the hub is there
    assert hub.count("/org/model/") == 0


@pytest.mark.full
def test_a_hub_that_is_away_leaves_what_is_cached_and_says_so(fetch: Any, python: Any, hub: Any, model: Any) -> None:
    fetch("org/model", "v1")
    hub.fail("/api/", 503)
    done = python("-c", FETCH, "org/model", "v1", WEIGHTS)
    assert json.loads(done.stdout)["commit"] == model.refs["v1"]
    assert "the hub answers 503; the cache has model org/model, revision v1 at commit" in done.stderr


@pytest.mark.parametrize("times", [1, 2])
def test_a_hub_that_fails_for_a_while_is_asked_again(times: int, fetch: Any, hub: Any, model: Any) -> None:
    hub.fail("GET /api/models/org/model/tree", 503, 1)
    hub.fail("GET /cdn/", 503, times - 1)
    assert content(fetch("org/model", "v1")) == FILES[WEIGHTS]
    assert hub.count("GET /api/models/org/model/tree") == 2 and hub.count("GET /cdn/") == times


def test_a_download_that_breaks_off_is_continued(fetch: Any, hub: Any, model: Any) -> None:
    hub.fail("GET /cdn/", "cut", 1)
    assert content(fetch("org/model", "v1")) == FILES[WEIGHTS]
    assert hub.count("GET /cdn/") == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "fault", "reason"),
    [
        ("/api/", 503, "the hub answers 503"),
        ("GET /cdn/", 418, "model org/model cannot be used: the hub answers 418"),
        ("GET /cdn/", "corrupt", "does not have the sha256 that the hub announced"),
        ("GET /cdn/", "short", "file should be of size 512000 but has size 511999"),
    ],
)
def test_a_hub_that_keeps_failing_is_an_error(
    pattern: str, fault: Any, reason: str, fetch: Any, hub: Any, home: Path, model: Any
) -> None:
    hub.fail(pattern, fault)
    answer = fetch("org/model", "v1")
    assert answer["code"] == 3 and reason in answer["message"], answer
    assert answer["seconds"] < 12
    hub.heal()
    assert content(fetch("org/model", "v1")) == FILES[WEIGHTS]  # nothing damaged was kept


@pytest.mark.full
def test_nobody_at_the_hubs_address_is_soon_an_error(fetch: Any) -> None:
    answer = fetch(HF_ENDPOINT="http://user:password@127.0.0.1:9")
    assert answer["error"] == "HubUnreachableError" and "Connection refused" in answer["message"]
    assert "from http://[redacted]@127.0.0.1:9" in answer["message"]
    assert 3 < answer["seconds"] < 10


def test_a_connection_that_a_firewall_forbids_says_nothing_of_the_cache(fetch: Any) -> None:
    answer = fetch(code=PREFIX_FORBIDDING_CONNECTIONS + FETCH)
    assert answer["error"] == "HubUnreachableError" and "fetched: Operation not permitted" in answer["message"]


@pytest.mark.parametrize("cached", [(), ("config.json",)], ids=["nothing", "a part"])
def test_offline_without_the_files_is_at_once_an_error(cached: tuple[str], fetch: Any, hub: Any, model: Any) -> None:
    if cached:
        fetch("org/model", "v1", *cached)
    hub.requests.clear()
    answer = fetch("org/model", "v1", HF_HUB_OFFLINE="1")
    assert answer["error"] == "HubUnreachableError" and answer["seconds"] < 3
    assert "HF_HUB_OFFLINE is set" in answer["message"] and "hf download org/model --revision" in answer["message"]
    assert hub.count("/org/model") == 0


@pytest.mark.parametrize("token", ["in a variable", "in a file"])
@pytest.mark.parametrize(
    ("access", "revision", "message"),
    [
        ("open", "v9", "model org/model has no revision v9"),
        ("open", "0" * 40, "model org/model has no revision 0000"),
        ("gated", "", "accept its licence at http://127.0.0.1"),
        ("private", "", "the hub has no model org/model, or it is private"),
    ],
)
def test_what_the_hub_refuses_is_at_once_an_error(
    access: Any, revision: str, message: str, token: str, fetch: Any, hub: Any, home: Path, environment: dict[str, str]
) -> None:
    hub.repo("models/org/model", access).push(FILES, "v1")
    if token == "in a file":
        home.mkdir()
        (home / "token").write_text(environment.pop("HF_TOKEN"))
    answer = fetch("org/model", revision)
    assert (answer["error"], answer["code"]) == ("HubError", 3) and message in answer["message"], answer
    assert answer["seconds"] < 3 and "  do:  " in answer["message"]


def test_a_name_without_a_repository_is_an_error(fetch: Any) -> None:
    answer = fetch("nobody/nothing")
    assert "the hub has no model nobody/nothing, or it is private" in answer["message"]
    assert "a path here" in answer["message"] and "HF_TOKEN" in answer["message"]


def test_a_full_disk_is_an_error_that_names_the_cache(fetch: Any, model: Any, home: Path) -> None:
    answer = fetch("org/model", "v1", code=PREFIX_LIMITING_FILES + FETCH)
    assert (answer["error"], answer["code"]) == ("ResourceError", 5)
    assert "cannot be written: File too large" in answer["message"] and str(home / "hub") in answer["message"]


def test_a_token_is_not_sent_to_where_large_files_are(fetch: Any, hub: Any, model: Any) -> None:
    fetch("org/model", "v1")
    assert hub.count("GET /cdn/") == 1 and hub.leaks == []
