"""Tiny real runs of a copy of the tree, in forks of a process that has imported the engines' packages and no mmrl.

A fork imports mmrl from the copy, with whatever fault was put into it, and is ``mmrl check`` or ``mmrl train``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants import FOLDERS, ROOT, Fault, copied
from tests.pins import QUIET, merged, written

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "pandas", "PIL.Image")
VLLM = ("vllm", "vllm.v1.engine.llm_engine")
MAY_TAKE_S = 400.0
"""Seconds after which a command is taken to hang."""
SIZES = (56, 84), (84, 56), (56, 84), (112, 56)
"""Of the rows' images; the first and the third have one size."""
PLUGINS = '''\
"""A reward, and a game that shows pictures."""

import hashlib

import numpy as np

from mmrl import Environment, Observation


def even(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]


class Shown(Environment):
    def reset(self, prompt, seed):
        self._seed = seed

    def step(self, turn):
        drawn = list(hashlib.sha256(f"{self._seed} {turn.text}".encode("utf-8", "replace")).digest())
        image = np.random.default_rng(drawn).integers(0, 256, (56, 84, 3), np.uint8)
        return Observation(["here", image, "so?"], drawn[0] / 256, turn.index > 1, role="user")
'''
MODELS = """
import sys
from pathlib import Path
from mmrl.engine.aids.tiny_model import write_model

for family in sys.argv[1:]:
    write_model(Path(family), family, gain=4.0)
"""
FAMILIES = "qwen2", "qwen2_5_vl", "qwen3_vl", "qwen3_5_text", "qwen3_moe", "gemma4"
Sections = Mapping[str, Any]
SEEN: Sections = {
    "model": {"path": "models/qwen2_5_vl"},
    "data": {"train": {"name": "table", "path": "seen.jsonl"}},
}
RUNS: Mapping[str, Sections] = {
    "text": {},
    "pictures": SEEN,
    "deep": merged(SEEN, {"model": {"path": "models/qwen3_vl"}}),
    "states": {"model": {"path": "models/qwen3_5_text"}},
    "windows": {"model": {"path": "models/gemma4"}},
    "experts": {"model": {"path": "models/qwen3_moe"}, "learner": {"routing": "replayed"}},
    "adapters": {"model": {"lora": {"rank": 4, "targets": ["language"]}}},
    "episodes": merged(
        SEEN,
        {
            "rewards": [],
            "environment": {
                "name": "plugins.py:Shown",
                "max_turns": 3,
                "max_turn_tokens": 5,
                "max_observation_tokens": 60,
                "max_images": 3,
                "workers": 1,
            },
            "sampler": {"max_new_tokens": 18},
        },
    ),
    "taught": {"algorithm": {"name": "sft"}},
    "vllm": merged(SEEN, {"sampler": {"name": "vllm", "engine": {"kv_cache_memory_bytes": 2**26, "block_size": 32}}}),
}
"""Runs by name; what they share is in ``write_config``."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code; None if it hung.
        log: What it printed.
        folder: The run's.
    """

    code: int | None
    log: str
    seconds: float
    folder: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        """The run's events."""
        path = self.folder / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def steps(self) -> int:
        """Steps that were finished."""
        path = self.folder / "metrics.jsonl"
        found = [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []
        return max(found, default=0)


class Bench:
    """A copy of the tree, and the rows and models that its runs read.

    Args:
        root: The copy's folder.
        folder: For inputs and runs.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self._folder = root, folder
        self._runs = 0
        write_inputs(folder)

    @contextmanager
    def changed(self, changes: Sequence[Fault]) -> Iterator[None]:
        """The copy with these changes."""
        before = {each.file(self._root): each.file(self._root).read_text() for each in changes}
        try:
            for each in changes:
                file = each.file(self._root)
                self._write(file, file.read_text().replace(each.old, each.new))
            yield
        finally:
            for file, text in before.items():
                self._write(file, text)

    def command(self, verb: str, run: str) -> Ended:
        """``mmrl check`` or ``mmrl train`` of a run, to its end."""
        self._runs += 1
        name = f"{run}-{self._runs}"
        folder, log = self._folder / "runs" / name, self._folder / f"{name}.log"
        config, start = write_config(self._folder, run, folder), time.monotonic()
        pid = os.fork()
        if not pid:
            os._exit(self._become([verb, str(config)], log))
        code = _waited(pid, start + MAY_TAKE_S)
        return Ended(code, log.read_text(errors="replace"), time.monotonic() - start, folder)

    def _become(self, words: Sequence[str], log: Path) -> int:
        """Be mmrl; returns the exit code."""
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(self._folder)
        path = [str(self._root / each) for each in FOLDERS]
        sys.path[:] = [*path, *(each for each in sys.path if not _is_tree(Path(each)))]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        try:
            cli = importlib.import_module("mmrl.commands.cli")
            assert Path(str(cli.__file__)).is_relative_to(self._root), cli.__file__
            code: int = cli.main(list(words))
        except BaseException as error:
            import traceback

            traceback.print_exc()
            code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 99
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def _write(self, file: Path, text: str) -> None:
        """Write a file of the copy, so that no compiled one of another text is taken for it."""
        newest = max(time.time(), file.stat().st_mtime) + 2
        file.write_text(text)
        os.utime(file, (newest, newest))


@contextmanager
def bench(folder: Path, runs: Sequence[str]) -> Iterator[Bench]:
    """A bench for runs of these names; imports what they need."""
    os.environ.update(QUIET)
    for name in (*PACKAGES, *(VLLM if "vllm" in runs else ())):
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    # As in faults/harness.py: the fork's first thread replaces torch's pool of threads.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    loaded = [name for name in sys.modules if name.partition(".")[0] == "mmrl" or name.startswith("mmrl_")]
    assert not loaded, f"{loaded[0]} is imported here already: the forks would not see the fault"
    with copied() as root:
        yield Bench(root, folder)


def write_inputs(folder: Path) -> None:
    """Rows, plugins and tiny models; the models are kept in the checkout for the next time."""
    from PIL import Image

    from tests.mutants import environment

    folder.mkdir(parents=True, exist_ok=True)
    source = (ROOT / "mmrl/engine/aids/tiny_model.py").read_text()
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers")]
    written = hashlib.sha256("\n".join([MODELS, *FAMILIES, source, *versions]).encode()).hexdigest()[:8]
    kept = ROOT / ".pytest_cache" / "silent" / written
    if not kept.exists():
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.mkdir(parents=True)
        os.spawnve(
            os.P_WAIT,
            sys.executable,
            [sys.executable, "-c", f"import os; os.chdir({str(unfinished)!r})\n{MODELS}", *FAMILIES],
            environment(ROOT),
        )
        unfinished.rename(kept)
    shutil.copytree(kept, folder / "models")
    (folder / "plugins.py").write_text(PLUGINS)
    long = "what is one plus one and one plus one, and then the half of it? " * 2
    rows = [{"id": f"r{n}", "prompt": long + "again " * n, "answer": str(n), "written": f"it is {n}"} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for index, size in enumerate(SIZES):
        pixels = bytes(hashlib.shake_256(bytes([index])).digest(size[0] * size[1] * 3))
        Image.frombytes("RGB", size, pixels).save(folder / f"{index}.png")
    for n, row in enumerate(rows):
        row["images"] = [f"{(n + i) % 4}.png" for i in range(1 + n % 2)]  # type: ignore[assignment]
        row["prompt"] = "<image>" * (1 + n % 2) + "what is it?" + " again" * n
    (folder / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(folder: Path, run: str, run_dir: Path) -> Path:
    """The config of a run."""
    config: dict[str, Any] = {
        "model": {"path": "models/qwen2", "dtype": "float32"},
        "data": {"train": {"name": "table", "path": "rows.jsonl"}, "max_prompt_tokens": 300},
        "algorithm": {"name": "grpo"},
        "rewards": [{"name": "plugins.py:even", "workers": 1}],
        "sampler": {"name": "hf", "group_size": 3, "max_new_tokens": 12, "temperature": 0.8},
        "learner": {"lr": 1e-2, "zero_stage": 0, "tokens_per_microbatch": 600},
        "trainer": {"steps": 2, "prompts_per_step": 4, "save_every": 0, "run_dir": str(run_dir)},
    }
    config = merged(config, RUNS[run])
    if run == "taught":
        del config["sampler"], config["rewards"]
        config["data"]["train"]["demonstration"] = "written"
    return written(folder, run_dir.name, config)


def _is_tree(path: Path) -> bool:
    """True for a folder of a checkout's packages."""
    return (path / "mmrl" / "__init__.py").exists() or bool(list(path.glob("mmrl_*/__init__.py")))


def _waited(pid: int, deadline: float) -> int | None:
    """The exit code of a fork that leads its own group; what is left of the group is ended."""
    code: int | None = None
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return code
