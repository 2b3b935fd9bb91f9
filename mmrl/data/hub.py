"""Models and datasets on a hub: the commit of a revision, its files in the local cache, errors that say what to do.

Everything goes through ``huggingface_hub``, so its environment variables hold: HF_ENDPOINT, HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from mmrl.errors import HubError, HubUnreachableError, MMRLError, ResourceError
from mmrl.system.redaction import Redactor

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

T = TypeVar("T")

RETRY_AFTER_S = (1.0, 3.0)
PATIENCE_S = 10.0
"""Seconds for the first answer. Nothing is tried again later, as huggingface_hub itself retries for up to 23 s."""

PASSING = frozenset({408, 429, 500, 502, 503, 504})
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository on the hub at one revision.

    Attributes:
        name: ``owner/name``.
        revision: A branch, a tag or a commit; None for the default branch.
    """

    kind: Literal["model", "dataset"]
    name: str
    revision: str | None = None

    def pinned(self) -> HubRepo:
        """The same at the commit that the revision is now, or last was if the hub cannot be asked.

        Raises:
            HubError: There is no such repository or revision, or the hub refuses it; ``HubUnreachableError`` if the
                hub cannot be asked and the cache does not know.
        """
        from huggingface_hub import constants, errors

        if _COMMIT.fullmatch(self.revision or ""):
            return self
        try:
            return replace(self, revision=self.ask(lambda: self._commit(cached_only=False)))
        except HubUnreachableError as error:
            try:
                commit = self._commit(cached_only=True)
            except errors.RevisionResolutionError:
                raise error from None
            if not constants.HF_HUB_OFFLINE:
                print(f"mmrl: {error.what}; the cache has {self} at commit {commit}", file=sys.stderr)
            return replace(self, revision=commit)

    def download(self, patterns: Sequence[str]) -> Path:
        """The cache's folder with the files of a pinned repository that match; fetches only those that it lacks.

        Large files are compared with their sha256 as they arrive. Processes of one machine may call this at once:
        each file is fetched by one of them.

        Raises:
            HubError: As ``pinned``; or a file arrives damaged.
            ResourceError: The cache cannot be written.
        """
        from huggingface_hub import constants, snapshot_download

        def fetch() -> str:
            return snapshot_download(
                self.name, repo_type=self.kind, revision=self.revision, allow_patterns=list(patterns)
            )

        root = Path(constants.HF_HUB_CACHE, f"{self.kind}s--{self.name.replace('/', '--')}")
        cached = set(_links(root / "snapshots" / str(self.revision)))
        folder = Path(self.ask(fetch))
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._verify, [file for file in _links(folder) if file not in cached]))
        return folder

    def ask(self, call: Callable[[], T]) -> T:
        """The result of a call to the hub, which is made again if it fails in a way that may pass.

        Raises:
            MMRLError: The call's error, explained.
        """
        started = time.monotonic()
        waits = iter(RETRY_AFTER_S)
        while True:
            try:
                with quiet():
                    return call()
            except MMRLError:
                raise
            except Exception as error:
                wait = next(waits, None)
                if wait is None or not _may_pass(error) or time.monotonic() - started > PATIENCE_S:
                    raise explained(error, self) from None  # servers may echo a request
                time.sleep(wait)

    def lacks(self, what: str) -> HubError:
        """The error that the repository, or as much of it as is in the cache, lacks something."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return _offline(self, f"the cache has no {what} of {self.kind} {self.name}")
        return HubError(
            f"{self.kind} {self.name} does not give {what}", where=str(self), remedy="try later, or choose another"
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.name}, {f'revision {self.revision}' if self.revision else 'default branch'}"

    def _commit(self, *, cached_only: bool) -> str:
        from huggingface_hub import HfApi

        api = HfApi()
        if not cached_only:  # raises where the next call would quietly take the cached files
            api.repo_info(self.name, repo_type=self.kind, revision=self.revision, timeout=PATIENCE_S)
        return api.resolve_revision(
            self.name, repo_type=self.kind, revision=self.revision, local_files_only=cached_only
        ).resolved

    def _verify(self, file: Path) -> None:
        digest = file.readlink().name  # large files are stored under their sha256
        if not _SHA256.fullmatch(digest):
            return
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() == digest:
                return
        for path in (file.resolve(), file):
            path.unlink(missing_ok=True)
        raise _damaged(self, f"{file.name} does not have the sha256 that the hub announced")


def explained(error: Exception, repo: HubRepo) -> MMRLError:
    """An error of ``huggingface_hub`` or ``datasets`` about a repository, as one that says what to do."""
    from huggingface_hub import constants, errors

    chain = list(chain_of(error))
    failure = outage(chain)
    for raised in chain:
        if isinstance(raised, errors.HfHubHTTPError):
            if answer := _refusal(raised, repo):
                return answer
        elif isinstance(raised, OSError):
            if str(raised).startswith("Consistency check failed"):
                return _damaged(repo, str(raised).splitlines()[0])
            if raised.errno in _DISK and not failure:  # a firewall refuses connections with the same numbers
                return _unwritable(raised)
    if constants.HF_HUB_OFFLINE:
        return _offline(repo, f"{repo.kind} {repo.name} is not, or not wholly, in the cache")
    if failure:
        return HubUnreachableError(
            f"{repo.kind} {repo.name} cannot be fetched: {failure}",
            where=f"{repo}, from {endpoint()}",
            remedy="check the network and HF_ENDPOINT, or try later",
        )
    what = f"{repo.kind} {repo.name} cannot be used: {public_line(error)}"
    return HubError(what, where=str(repo), remedy="check path and revision")


def _refusal(error: HfHubHTTPError, repo: HubRepo) -> HubError | None:
    """The hub's refusal; None if the error is the hub's own failure, or says that there is no such file."""
    from huggingface_hub import errors

    name, status, possible = f"{repo.kind} {repo.name}", error.response.status_code, ""
    if isinstance(error, errors.EntryNotFoundError) or status in PASSING:
        return None
    if isinstance(error, errors.GatedRepoError):
        what = f"{name} is gated"
        remedy = f"accept its licence at {_page(repo)} and set HF_TOKEN to a token of the account that did"
    elif isinstance(error, errors.RevisionNotFoundError):
        what, possible = f"{name} has no revision {repo.revision}", "a branch, a tag or a whole commit hash"
        remedy = f"look for it at {_page(repo)}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what, possible = f"the hub has no {name}, or it is private", f"a path here, or a {repo.kind} on the hub"
        remedy = "check the spelling; for a private one, set HF_TOKEN to a token that may read it"
    elif status in (401, 403):
        what = f"the hub refuses to give {name}"
        remedy = "set HF_TOKEN to a valid token that may read it, or unset it for a public one"
    else:
        what, remedy = f"{name} cannot be used: the hub answers {status}", "check path, revision and HF_ENDPOINT"
    return HubError(what, where=str(repo), possible=possible, remedy=remedy)


def _unwritable(error: OSError) -> ResourceError:
    from huggingface_hub import constants

    return ResourceError(
        f"the hub's cache cannot be written: {error.strerror}",
        where=str(constants.HF_HUB_CACHE),
        remedy="make room there, or set HF_HOME to another folder",
    )


def _offline(repo: HubRepo, what: str) -> HubError:
    from huggingface_hub import constants

    command = "mmrl check"
    if repo.kind == "model":
        command = f"hf download {repo.name}{f' --revision {repo.revision}' if repo.revision else ''}"
    return HubUnreachableError(
        f"{what}, and HF_HUB_OFFLINE is set",
        where=f"{repo}, in {constants.HF_HOME}",
        remedy=f"unset HF_HUB_OFFLINE, or run `{command}` where there is a network",
    )


def _damaged(repo: HubRepo, what: str) -> HubError:
    return HubError(
        f"a file arrived damaged: {what}",
        where=f"{repo}, from {endpoint()}",
        remedy="try again; if it happens again, doubt the mirror or proxy in between",
    )


def _may_pass(error: Exception) -> bool:
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and bool(outage(list(chain_of(error))))


def outage(chain: Sequence[BaseException]) -> str:
    """A failure of the hub for everybody: no connection, a broken one, or a server's own error; empty for others."""
    from huggingface_hub.errors import HfHubHTTPError

    for raised in chain:
        if isinstance(raised, HfHubHTTPError) and raised.response.status_code in PASSING:
            return f"the hub answers {raised.response.status_code}"
        # By name, because huggingface_hub has changed its HTTP library, and does not export the classes.
        if {"TransportError", "ConnectionError"} & {each.__name__ for each in type(raised).__mro__}:
            reasons = [each.strerror for each in chain if isinstance(each, OSError) and each.strerror]
            return f"{reasons[-1] if reasons else type(raised).__name__}"
    return ""


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def quiet() -> Iterator[None]:
    """Silence huggingface_hub's warnings, which repeat a server's words and signed addresses, unless asked for."""
    from huggingface_hub import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    if "HF_HUB_VERBOSITY" not in os.environ:
        hub_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)


def public_line(error: BaseException) -> str:
    """An error's first line without the token, which a server may echo and which may come from a file."""
    text = redactor()(str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def redactor() -> Redactor:
    """A redactor that knows the hub's token too, which may come from a file."""
    from huggingface_hub import get_token

    return Redactor({**os.environ, "HF_TOKEN": get_token() or ""})


def endpoint() -> str:
    """The hub's address without the password that it may hold."""
    from huggingface_hub import constants

    return Redactor()(constants.ENDPOINT)


def _page(repo: HubRepo) -> str:
    return "/".join([endpoint(), *(["datasets"] if repo.kind == "dataset" else []), repo.name])


def _links(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_symlink())
