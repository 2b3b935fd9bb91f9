"""The plugins that plugins/WRITING.md shows are sound."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mmrl.testing import check_algorithm, check_reward

PAGE = Path(__file__).parents[2] / "plugins/WRITING.md"


def shown(name: str) -> Any:
    """The class of that name in the page's Python."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if f"class {name}(" in code]
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(block, namespace)
    return namespace[name]


@pytest.mark.parametrize("name", ["Reinforce", "Mine"])
def test_the_algorithms_of_the_page_pass_the_checks(name: str) -> None:
    check_algorithm(shown(name))


def test_the_reward_of_the_page_passes_the_checks() -> None:
    check_reward(shown("Shortest"), options={"per_token": 0.01})
