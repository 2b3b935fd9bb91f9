"""Modules under the names that plugins of version 0.2.0 import."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from mmrl.system.old_names import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_module_that_moved_is_the_same_under_its_old_name(old, new):
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is now {new}"):
        assert import_module(old) is import_module(new)
    assert import_module(new).__spec__.name == new


def test_importing_the_package_imports_none_of_them():
    program = "import sys, mmrl; print([name for name in sys.modules if name.startswith('mmrl.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['mmrl.system', 'mmrl.system.old_names', 'mmrl.system.version']"
