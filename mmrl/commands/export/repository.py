"""A repository on the hub that takes an exported folder: what it holds, and one commit on top of it.

Everything is asked before anything is written. All files go in one commit whose parent is the commit that was looked
at, so a repository has the whole export or nothing of it, and nobody's work is overwritten unseen. Large files are sent
before the commit, by their content: what has arrived is not sent again when the same push is tried once more.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmrl.data.hub import chain_of, endpoint, outage, public_line, quiet, redactor
from mmrl.errors import ConfigError, HubError, HubUnreachableError, MMRLError, plural

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
Tell = Callable[[str], None]

DEFAULT = "main"
STALL_S = 120.0
"""Seconds without a byte after which a request has failed, where huggingface_hub itself would wait for ever. It tries
most requests a few times."""
_WEIGHTS = re.compile(r"(?:model|pytorch_model|adapter_model)[\w.-]*\.(?:safetensors|bin)(?:\.index\.json)?")
_ADAPTER = "adapter_config.json"
_OWN_TEXTS = "README.md", "mmrl.json", "config.json", "adapter_config.json"
"""Files that an export writes or changes, or that its user may have edited."""
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Pushed:
    """The outcome of a push.

    Attributes:
        commit: The commit that has the folder's files.
        is_new: True if it was made now; False if the repository had all files.
    """

    repo: str
    revision: str
    commit: str
    url: str
    is_new: bool

    def lines(self) -> Iterator[str]:
        """For people."""
        how = "" if self.is_new else ", which had every file already"
        yield f"pushed    {self.url}: commit {self.commit[:12]} on {self.revision}{how}"


@dataclass(frozen=True, slots=True)
class Destination:
    """The user's wishes for a push.

    Attributes:
        repo: ``OWNER/NAME``, or ``NAME`` of the token's own.
        revision: A branch, which is made if there is none; None is the main one.
        private: True or False for who may see a repository that is made now; None is the hub's default.
        message: The commit's message; None has one made.
    """

    repo: str
    revision: str | None = None
    private: bool | None = None
    message: str | None = None

    @classmethod
    def wanted(cls, repo: str | None, **options: Any) -> Destination | None:
        """The wishes of a call; None if nothing is to be pushed.

        Args:
            options: The other attributes.

        Raises:
            ConfigError: There are some, and no repository.
        """
        if repo is not None:
            return cls(repo, **options)
        if given := [name for name, value in options.items() if value is not None]:
            what = f"nothing is pushed, so {', '.join(given)} {'has' if len(given) == 1 else 'have'} no use"
            raise ConfigError(what, where="mmrl export", remedy="name the repository: --push REPO, or push=REPO")
        return None

    def check(self) -> None:
        """Look at the words alone.

        Raises:
            ConfigError: They can be no repository, branch or message.
        """
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            possible = "OWNER/NAME or NAME, of letters, digits, dots, dashes and underscores, such as me/digits"
            what = f"{self.repo!r} is no name of a repository"
            raise ConfigError(what, where="--push", possible=possible, remedy="correct the name") from error
        if self.revision is not None and (not self.revision.strip() or _COMMIT.fullmatch(self.revision)):
            what = f"--revision is {self.revision!r}, and a push needs a branch"
            raise ConfigError(what, where="--revision", possible="a branch's name; a new one is made")
        if self.message is not None and not self.message.strip():
            raise ConfigError("--message is empty", where="--message", remedy="write one, or leave it out")

    def look(self) -> Repository:
        """Ask the hub whether the push can go well, and what is there.

        Raises:
            ConfigError: The words can be no repository, or the repository is seen by others than was asked for.
            HubError: There is no token, or it may not write there; ``HubUnreachableError`` if the hub cannot be asked.
        """
        from huggingface_hub import HfApi, constants, get_token

        self.check()
        if constants.HF_HUB_OFFLINE:
            what = "nothing can be pushed while HF_HUB_OFFLINE is set"
            raise HubUnreachableError(what, where=self.repo, remedy="unset it where there is a network")
        if not get_token():
            raise HubError(
                "there is no token to push with",
                where=f"{self.repo}, at {endpoint()}",
                remedy="`hf auth login`, or set HF_TOKEN to a token that may write",
            )
        with _hub(self.repo, "looked at"):
            return _look(HfApi(), self)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as the hub has it now.

    Attributes:
        name: ``OWNER/NAME``.
        is_there: False if the push makes it.
        head: The newest commit of the branch; None if the push makes the branch.
        files: Names of the files at ``head`` or, for a branch that is to be, at the main one.
    """

    wanted: Destination
    name: str
    is_there: bool
    head: str | None
    files: frozenset[str]

    @property
    def branch(self) -> str:
        """The branch that gets the commit."""
        return self.wanted.revision or DEFAULT

    @property
    def url(self) -> str:
        """The page of the repository's branch."""
        return f"{endpoint()}/{self.name}" + (f"/tree/{self.branch}" if self.branch != DEFAULT else "")

    def changes(self, names: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
        """The files that a push of these replaces, takes away, and leaves.

        Weights of an earlier push, or of an adapter, are taken away where the new ones have other names: transformers
        would load them in place of the new ones.
        """
        replaced = sorted(self.files & {*names})
        others = sorted(self.files - {*names} - {".gitattributes"})
        stale = [name for name in others if _WEIGHTS.fullmatch(name) or name == _ADAPTER]
        return replaced, stale, [name for name in others if name not in stale]

    def push(self, folder: Path, message: str, tell: Tell) -> Pushed:
        """Send the folder's files in one commit, and make the repository and the branch if they are not there.

        Args:
            message: The commit's, if the user gave none.
            tell: Gets a line for what is in the repository already.

        Raises:
            ConfigError: The folder's own texts hold a secret.
            HubError: The hub refuses it; ``HubUnreachableError`` if the network or the hub fails.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        _check_texts(folder)
        replaced, stale, left = self.changes(names)
        if replaced or left:
            tell(_told(self, replaced, stale, left))
        api, operations = HfApi(), [CommitOperationAdd(name, folder / name) for name in names]
        with _hub(self.name, "pushed", folder), _progress():
            head = self.head or self._made(api)
            done = api.create_commit(
                self.name,
                [*operations, *map(CommitOperationDelete, stale)],
                commit_message=self.wanted.message or message,
                revision=self.branch,
                parent_commit=head,
            )
        return Pushed(self.name, self.branch, str(done.oid), self.url, done.oid != head)

    def _made(self, api: HfApi) -> str:
        """Make what is missing of repository and branch; returns the branch's commit."""
        if not self.is_there:
            api.create_repo(self.name, private=self.wanted.private, exist_ok=True)
        if self.branch != DEFAULT and not self.branch.startswith("refs/"):
            api.create_branch(self.name, branch=self.branch, exist_ok=True)
        return str(api.model_info(self.name, revision=self.branch).sha)


def _look(api: HfApi, wanted: Destination) -> Repository:
    """The repository, once account and token are known to fit."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    account = api.whoami()
    if _role(account) == "read":
        raise _no_right(wanted.repo, "the token may read and not write")
    owner, name = wanted.repo.split("/") if "/" in wanted.repo else (account["name"], wanted.repo)
    full = f"{owner}/{name}"
    try:
        main = api.model_info(full)
    except RepositoryNotFoundError:
        owners = [account["name"], *(each["name"] for each in account.get("orgs") or ())]
        if owner not in owners:
            raise _no_right(full, f"there is no {full} that this token can see", ", ".join(owners)) from None
        return Repository(wanted, full, False, None, frozenset())
    if wanted.private is not None and bool(main.private) != wanted.private:
        is_now, other = ("private", "--private") if main.private else ("public", "--public")
        raise ConfigError(
            f"{full} is there already, and is {is_now}",
            where="--public" if main.private else "--private",
            remedy=f"use {other}, change it on {endpoint()}/{full}/settings, or push to another repository",
        )
    api.auth_check(full, write=True)
    head, found = main.sha, main
    if wanted.revision not in (None, DEFAULT):
        try:
            found = api.model_info(full, revision=wanted.revision)
            head = found.sha
        except RevisionNotFoundError:
            head = None
    files = frozenset(each.rfilename for each in found.siblings or ())
    return Repository(wanted, full, True, head, files)


def _role(account: dict[str, Any]) -> str | None:
    """``read``, ``write`` or ``fineGrained``; None if the hub does not say."""
    token = (account.get("auth") or {}).get("accessToken") or {}
    return token.get("role")


def _told(repository: Repository, replaced: Sequence[str], stale: Sequence[str], left: Sequence[str]) -> str:
    """A sentence on the files that are in a repository before the push."""
    parts = [f"{plural(len(replaced), 'file')} replaced"] if replaced else []
    parts += [f"removed, as old weights: {_listed(stale)}"] if stale else []
    parts += [f"left as they are: {_listed(left)}"] if left else []
    before = repository.head[:12] if repository.head else "its main branch"
    return f"{repository.name} holds files already; {'; '.join(parts)}. {before} on {repository.branch} keeps them all"


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _check_texts(folder: Path) -> None:
    """Raise if a text that the export or its user has written holds a secret."""
    redact = redactor()
    for name in _OWN_TEXTS:
        path = folder / name
        if path.is_file() and redact(text := path.read_text(encoding="utf-8", errors="replace")) != text:
            line = next(i for i, each in enumerate(text.splitlines(), 1) if redact(each) != each)
            what = "a file to push holds what looks like a token or a password"
            raise ConfigError(what, where=f"{path}, line {line}", remedy="take it out; nothing was pushed")


@contextmanager
def _progress() -> Iterator[None]:
    """Show huggingface_hub's bars on a terminal alone."""
    from huggingface_hub import utils

    bars: Any = utils  # which exports them, and does not say so to type checkers
    if sys.stderr.isatty() or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


@contextmanager
def _hub(repo: str, done: str, folder: Path | None = None) -> Iterator[None]:
    """Requests to the hub that do not wait for ever, and whose errors say what to do.

    Args:
        done: The participle that messages have, such as ``pushed``.
        folder: The export that is kept for another try.
    """
    from huggingface_hub import get_session

    session = get_session()
    before, session.timeout = session.timeout, STALL_S
    try:
        with quiet():
            yield
    except MMRLError:
        raise
    except Exception as error:
        raise _explained(error, repo, done, folder) from None  # servers may echo a request
    finally:
        session.timeout = before


def _explained(error: Exception, repo: str, done: str, folder: Path | None) -> HubError:
    """An error of a push as one that says what to do, and where the folder is."""
    from huggingface_hub.errors import HfHubHTTPError

    chain = list(chain_of(error))
    status = next((each.response.status_code for each in chain if isinstance(each, HfHubHTTPError)), None)
    again = f"; the export is whole in {folder}, and the same command goes on with it" if folder else ""
    where = f"{repo}, at {endpoint()}"
    if any("xet" in str(each) for each in chain):  # its storage, and the hub's address for a token of it
        remedy = f"check the network; for a hub or a proxy without this storage set HF_HUB_DISABLE_XET=1{again}"
        return HubUnreachableError(f"{repo} cannot be {done}: {public_line(error)}", where=where, remedy=remedy)
    if failure := outage(chain):
        remedy = f"check the network and HF_ENDPOINT, or try later{again}"
        return HubUnreachableError(f"{repo} cannot be {done}: {failure}", where=where, remedy=remedy)
    if status == 401 and done == "looked at":
        remedy = "`hf auth login`, or set HF_TOKEN to a valid one"
        return HubError("the hub does not know the token", where=where, remedy=remedy)
    if status in (401, 403, 404):
        return _no_right(repo, f"the hub refuses it ({status})", again=again)
    if status in (409, 412):
        remedy = f"look at it, and push again{again}"
        return HubError(f"somebody has changed {repo} meanwhile", where=where, remedy=remedy)
    remedy = f"check the name, the card's metadata and HF_ENDPOINT{again}"
    return HubError(f"{repo} cannot be {done}: {public_line(error)}", where=where, remedy=remedy)


def _no_right(repo: str, why: str, owners: str = "", again: str = "") -> HubError:
    return HubError(
        f"nothing can be pushed to {repo}: {why}",
        where=f"{repo}, at {endpoint()}",
        possible=f"repositories of {owners}" if owners else "",
        remedy=f"set HF_TOKEN to a token that may write there, or choose a repository of your own{again}",
    )
