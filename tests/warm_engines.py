"""What a process with an engine imports, in some 20 seconds of a processor; a template of forks imports this module."""

from __future__ import annotations

from tests.faults.harness import REAL, warm

warm(REAL)
