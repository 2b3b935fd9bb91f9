"""The licence of the model that an exported one began from, as its card states it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml

from mmrl.commands.export.card import CARD, BaseModel
from mmrl.data.hub import quiet

_KEYS = "license", "license_name", "license_link"


def licence_of(base: BaseModel | None, folder: Path | None, *, asks_hub: bool) -> dict[str, str]:
    """The keys of the base's metadata that tell its licence; empty if no card is known, or it states none.

    Args:
        folder: The base's folder, if it is none of the hub's.
        asks_hub: Ask the hub; else, and where it does not answer, its cache.
    """
    if base is None or not base.is_public:
        return _of_card(folder / CARD) if folder else {}
    return (_on_hub(base) if asks_hub else {}) or _in_cache(base)


def _on_hub(base: BaseModel) -> dict[str, str]:
    from huggingface_hub import HfApi

    try:
        with quiet():
            card = HfApi().model_info(base.name, revision=base.commit, timeout=10).card_data
    except Exception:  # a base that is private or gone does not stop a push
        return {}
    return _stated(vars(card)) if card else {}


def _in_cache(base: BaseModel) -> dict[str, str]:
    from huggingface_hub import try_to_load_from_cache

    card = try_to_load_from_cache(base.name, CARD, revision=base.commit)
    return _of_card(Path(card)) if isinstance(card, str) else {}


def _of_card(path: Path) -> dict[str, str]:
    from huggingface_hub import metadata_load

    with suppress(OSError, ValueError, yaml.YAMLError):
        return _stated((metadata_load(path) if path.is_file() else None) or {})
    return {}


def _stated(metadata: Mapping[str, object]) -> dict[str, str]:
    found = {key: str(metadata[key]) for key in _KEYS if isinstance(metadata.get(key), str)}
    return found if "license" in found else {}
