"""One section, in a process of its own: its rows are appended to a file as they are found.

python -m tests.gpu.section MODULE AREA DEVICE whole|small FILE
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.gpu.bench import Bench
from tests.gpu.row import Row, append


def main(module: str, area: str, kind: str, size: str, path: str) -> None:
    """Run the section that a module has: ``run(bench)``."""
    from mmrl.cluster.process import prepare_process
    from mmrl.commands.doctor.finding import failure

    found = prepare_process()
    with tempfile.TemporaryDirectory(prefix="mmrl-proof-") as folder:
        try:
            if found != kind:
                raise RuntimeError(f"asked for {kind}, and torch offers {found}")
            emit = partial(append, Path(path))
            importlib.import_module(module).run(Bench(area, kind, size == "small", Path(folder), emit))
        except Exception as error:
            append(Path(path), Row(area, "section", "bad", "", failure(error)))


if __name__ == "__main__":
    main(*sys.argv[1:])
