"""A checkpoint's manifest: its files with size and sha256, the roles that they belong to, and a seal of its own.

Version 1 had no roles: it knew the policy alone. It is read too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mmrl.engine_api import NetworkFiles
from mmrl.token_columns import POLICY

VERSION = 2


class LaterVersionError(Exception):
    """A manifest that a later version of mmrl wrote, whole as its seal tells."""


POLICY_ALONE: Mapping[str, NetworkFiles] = {POLICY: NetworkFiles.of(POLICY)}
"""The roles of a checkpoint of the policy alone."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest's content.

    Attributes:
        files: Size and sha256 by name.
        version: The version that it was written by.
    """

    step: int
    files: Mapping[str, Any]
    roles: Mapping[str, NetworkFiles]
    version: int = VERSION

    @classmethod
    def read(cls, text: str) -> Manifest:
        """The manifest of a file.

        Raises:
            LaterVersionError: A later version wrote it.
            ValueError: It is none, or its seal is not its own.
        """
        try:
            content = json.loads(text)
            version = content.get("version")
            if version not in (1, VERSION):
                what = f"it has version {version!r:.20}, and this mmrl reads 1 and {VERSION}"
                body = {name: value for name, value in content.items() if name != "seal"}
                raise LaterVersionError(what) if content.get("seal") == _seal(body) else ValueError(what)
            roles = POLICY_ALONE
            if version > 1:
                roles = {name: NetworkFiles(**role) for name, role in content["roles"].items()}
            manifest = cls(content["step"], content["files"], roles, version)
            sealed = manifest.text() == text
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if not sealed:
            raise ValueError("it was changed since it was written")
        return manifest

    def text(self) -> str:
        """The file, byte by byte; its seal makes a change in the manifest itself visible."""
        body: dict[str, Any] = {"version": self.version, "step": self.step, "files": self.files}
        if self.version > 1:
            body["roles"] = {name: asdict(role) for name, role in self.roles.items()}
        return json.dumps({**body, "seal": _seal(body)}, indent=1, sort_keys=True) + "\n"

    @property
    def has_optimizer(self) -> bool:
        """True if every role that is trained has its optimizer's state."""
        return all(role.optimizer for role in self.roles.values() if role.state)

    def without_optimizer(self) -> Manifest:
        """The manifest of a checkpoint whose optimizers' states were dropped."""
        roles = {name: replace(role, optimizer=False) for name, role in self.roles.items()}
        thinner = Manifest(self.step, {}, roles)
        return replace(thinner, files={name: kept for name, kept in self.files.items() if not thinner.drops(name)})

    def drops(self, name: str) -> bool:
        """True if the file belongs to an optimizer's state that was dropped, and may not have been removed yet."""
        dropped = (role.state for role in self.roles.values() if role.state and not role.optimizer)
        return any(name.startswith(f"{state}/optimizer") for state in dropped)


def _seal(body: Mapping[str, Any]) -> str:
    """The seal of everything else in a manifest; the same in all versions."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
