"""transformers is imported without the packages that nothing here uses, and others may import them later."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from mmrl.engine.network.optional_imports import UNUSED, without_unused

with without_unused():
    from transformers import MODEL_MAPPING, AutoProcessor, AutoTokenizer
assert "transformers.generation.utils" in sys.modules
print(sorted({name.partition(".")[0] for name in sys.modules} & {*UNUSED, "pandas"}))
import importlib.util
print([importlib.util.find_spec(name) is not None for name in UNUSED])
"""


def test_transformers_is_imported_without_unused_packages_which_may_be_imported_later() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.stdout.split("\n")[:2] == ["[]", "[True]"], done.stderr
