"""Whether the short tier notices faults: seeds them one at a time into a copy of the tree and runs a few tests there.

    python tests/mutants.py [NAME...]

The faults are in ``mutants.toml``. Their tests must pass without any fault, and one of them must fail with it. The exit
code is 1 unless every fault is caught.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "plugins", "datasets")
"""Where the tree's packages are."""
OPTIONS = ("-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow and not full")
TIMEOUT_S = 600
"""After which a fault's tests are taken to hang."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fault:
    """A small change that makes the program wrong.

    Attributes:
        place: The file, or a folder of Python files, in which ``old`` occurs exactly once.
        harm: Why a user would suffer.
        tests: Files, or ids of tests, of which one must fail.
    """

    name: str
    place: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]

    def file(self, root: Path) -> Path:
        """The file that it changes.

        Raises:
            LookupError: The text does not occur exactly once: the fault is stale.
        """
        path = root / self.place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        found = [file for file in files if file.exists() for _ in range(file.read_text().count(self.old))]
        if len(found) != 1:
            raise LookupError(
                f"{self.name}: the text occurs {len(found)} times in {self.place}, not once: {self.old!r}"
            )
        return found[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How some tests ended.

    Attributes:
        code: pytest's exit code; None if it hung.
        failed: The tests that failed.
        end: The last lines of its output.
    """

    code: int | None
    failed: tuple[str, ...]
    end: str
    seconds: float


def faults() -> list[Fault]:
    """All of ``mutants.toml``."""
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the tree as it is now, without what git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory(prefix="mmrl-mutant-") as folder:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder).resolve()


def environment(root: Path) -> dict[str, str]:
    """In which Python imports the packages of a copy."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return {**kept, "PYTHONPATH": os.pathsep.join(str(root / folder) for folder in FOLDERS)}


def run(root: Path, tests: Sequence[str], *options: str) -> Outcome:
    """The outcome of some tests of a copy; whatever they started is ended."""
    command = [sys.executable, "-m", "pytest", *OPTIONS, *options, *tests]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=root, env=environment(root), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read()
    return Outcome(code, tuple(FAILED.findall(text)), "\n".join(text.splitlines()[-30:]), time.monotonic() - start)


def check_imports(root: Path) -> None:
    """Raises RuntimeError if a copy's tests would import other packages than the copy's."""
    program = (
        "import mmrl, mmrl_algorithms, mmrl_datasets as d; print(mmrl.__file__, mmrl_algorithms.__file__, d.__file__)"
    )
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=True).stdout
    if not all(Path(path).is_relative_to(root) for path in found.split()):
        raise RuntimeError(f"the tests of {root} would import {found}")


def failing(chosen: Sequence[Fault]) -> dict[str, str]:
    """Of each fault whose tests do not pass without it, why; all tests in one process.

    Raises:
        RuntimeError: They do not run at all.
    """
    with copied() as root:
        check_imports(root)
        outcome = run(root, list(dict.fromkeys(test for fault in chosen for test in fault.tests)), "--maxfail=1000")
    print(f"without a fault: {outcome.seconds:.0f} s", flush=True)
    if outcome.code not in (0, 1):
        raise RuntimeError(f"the tests do not run without a fault:\n{outcome.end}")
    return {
        fault.name: f"{test} fails without the fault"
        for fault in chosen
        for test in outcome.failed
        if any(test == own or test.startswith((f"{own}::", f"{own}[", f"{own}/")) for own in fault.tests)
    }


def verdict(fault: Fault) -> tuple[str, str, float]:
    """``caught``, ``survived`` or ``broken``; by which test, or why; and the seconds that it took."""
    with copied() as root:
        try:
            file = fault.file(root)
        except LookupError as error:
            return "broken", str(error), 0.0
        file.write_text(file.read_text().replace(fault.old, fault.new))
        outcome = run(root, fault.tests)
    if outcome.code is None:
        return "caught", f"its tests hang for {TIMEOUT_S} s", outcome.seconds
    if outcome.code == 1:
        return "caught", ", ".join(outcome.failed), outcome.seconds
    if outcome.code == 0:
        return "survived", fault.harm, outcome.seconds
    return "broken", f"the tests do not run with the fault:\n{outcome.end}", outcome.seconds


def main(names: Sequence[str]) -> int:
    """Check the faults of these names, or all; the exit code."""
    known = faults()
    if unknown := set(names) - {fault.name for fault in known}:
        print(f"no fault is called {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in known)}")
        return 2
    chosen = [fault for fault in known if not names or fault.name in names]
    broken, found = failing(chosen), list[str]()
    width = max(len(fault.name) for fault in chosen)
    for fault in chosen:
        said, why, seconds = ("broken", broken[fault.name], 0.0) if fault.name in broken else verdict(fault)
        found.append(said)
        print(f"{fault.name:{width}}  {said:8}  {seconds:4.0f} s  {why}", flush=True)
    print(", ".join(f"{found.count(said)} {said}" for said in ("caught", "survived", "broken")))
    return int(found.count("caught") < len(found))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its copy and its tests end with it
    sys.exit(main(sys.argv[1:]))
