"""Figures of mmrl's structure, of any checkout: `python tests/architecture.py [--root DIR] [--walk] [--json]`.

Imports are read from the files, those inside functions and under TYPE_CHECKING too, and nothing is imported.

- Room: a direct child of ``mmrl/``, module or package; ``mmrl/__init__.py`` is none.
- Arrow: a pair of rooms A -> B where a file of A imports anything of B.
- Floors: rooms on the longest chain of arrows; those that reach each other count as one.
- Circle: rooms, or modules, that reach each other.
- Lines: all lines of the ``*.py`` files.
- Class: a class statement in a file of ``mmrl/``.
- Column: a quantity of each token (``COLUMNS``). A file of ``mmrl/`` or of ``plugins/`` spells it if the name is
  anywhere in its text, within a longer name or in prose too.
- Place of the step: a folder of ``mmrl/`` with a module that imports a part of the step (``STEP_PARTS``), so that it
  puts one together, or a piece of one. The folder that defines the whole step is one of them; the modules that define
  parts, and import none, are not. Whoever only calls the whole is none.

``--walk`` trains a tiny vision-language model for one step on one row with one image (``mmrl train`` on a CPU, without
Ray, ``sampler.name: hf``, GRPO) and follows the row from the call of ``Trainer.train_step`` to that of DeepSpeed's
optimizer step, in all threads and in the reward's process. The check of log-probs, which the first step alone has, is
on the way.

- A value carries the prompt if a word that is in this row alone, the bytes or the hash of its image, or the token ids
  of the prompt or of a completion are in it: in a text, in an array of integers, in a part of a container, a dataclass
  or a named tuple. Pixels and numbers about it (rewards, advantages, log-probs) are not followed, nor is what other
  objects, closures, futures and iterators hold.
- Call: a function of mmrl that takes (not as ``self``), returns or yields such a value. It counts once; properties,
  lambdas, comprehensions and generated methods do not count.
- File: a file with such a function.
- Carrier: a dataclass or named tuple of mmrl, seen as such a value or on the way to one.

Plugins' functions and records are listed apart, and not counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Graph = Mapping[str, set[str]]

FOLDERS = ("mmrl", "plugins", "datasets")
LONG = 400
SPELLING = ("mmrl", "plugins")
COLUMNS = ("sampler_logprobs", "old_logprobs", "reference_logprobs")
STEP_PARTS = {"Updater", "TrainBatch", "demonstrations_batch", "assign_credit", "training_rows"}
"""Names, of any version, of what a step is made of: batches, credit, rows, and what takes the optimizer steps."""
WORD = "quokka"
ROW = {"id": WORD, "problem": "<image>Where is the quokka?", "answer": WORD, "images": ["quokka.png"]}
MODEL = """
from importlib.util import find_spec
from pathlib import Path
from PIL import Image

if find_spec("mmrl.engine.aids"):
    from mmrl.engine.aids.tiny_model import write_model
else:  # before the engine had folders
    from mmrl.engine.tiny_model import write_model
write_model(Path("model"), "qwen2_5_vl")
Image.effect_noise((56, 56), 99).save("quokka.png")
"""


@dataclass(frozen=True)
class Structure:
    """Figures of a checkout.

    Attributes:
        long_files: Lines by path.
        lines: Lines by folder.
        room_lines: Lines by room.
        column_files: Files that spell each column.
        step_places: The modules of each place of the step, and the parts that they import.
    """

    rooms: list[str]
    floors: int
    arrows: list[tuple[str, str]]
    room_circles: list[tuple[str, ...]]
    module_circles: list[tuple[str, ...]]
    long_files: dict[str, int]
    lines: dict[str, int]
    room_lines: dict[str, int]
    classes: int
    column_files: dict[str, list[str]]
    step_places: dict[str, dict[str, list[str]]]


def structure(root: Path) -> Structure:
    """The figures of the checkout in ``root``."""
    modules = import_graph(root / "mmrl")
    rooms: dict[str, set[str]] = {_room(module): set() for module in modules if "." in module}
    for module, targets in modules.items():
        if room := _room(module):
            rooms[room] |= {_room(target) for target in targets} - {room, ""}
    files = [path.relative_to(root) for folder in (*FOLDERS, "tests") for path in sorted((root / folder).rglob("*.py"))]
    texts = {path: (root / path).read_text() for path in files}
    sizes = {path: len(text.splitlines()) for path, text in texts.items()}
    core = {path: ast.parse(text) for path, text in texts.items() if path.parts[0] == "mmrl"}
    return Structure(
        rooms=sorted(rooms),
        floors=floors(rooms),
        arrows=sorted((room, target) for room, targets in rooms.items() for target in targets),
        room_circles=circles(rooms),
        module_circles=circles(modules),
        long_files={str(path): size for path, size in sizes.items() if size > LONG and path.parts[0] != "tests"},
        lines={name: sum(n for path, n in sizes.items() if path.parts[0] == name) for name in (*FOLDERS, "tests")},
        room_lines={
            room: sum(sizes[path] for path in core if Path(path.parts[1]).stem == room) for room in sorted(rooms)
        },
        classes=sum(isinstance(node, ast.ClassDef) for tree in core.values() for node in ast.walk(tree)),
        column_files={
            column: [str(path) for path, text in texts.items() if path.parts[0] in SPELLING and column in text]
            for column in COLUMNS
        },
        step_places=step_places(core),
    )


def step_places(core: Mapping[Path, ast.AST]) -> dict[str, dict[str, list[str]]]:
    """The parts of a step that modules import, by folder and module."""
    places: dict[str, dict[str, list[str]]] = {}
    for path, tree in core.items():
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        if parts := sorted({alias.name for node in imports for alias in node.names} & STEP_PARTS):
            places.setdefault(str(path.parent), {})[path.name] = parts
    return places


def import_graph(package: Path) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports."""
    files = {path: path.relative_to(package.parent).with_suffix("").parts for path in package.rglob("*.py")}
    # A folder without a file of Python's, such as that of a new plugin's template, is no package.
    folders = {path.parent for path in files}
    modules = {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for path, parts in files.items()
        if all(folder in folders for folder in path.parents if folder.is_relative_to(package))
    }
    graph = {}
    for module, path in modules.items():
        names = {name for node in ast.walk(ast.parse(path.read_text())) for name in _imported(node, files[path])}
        # ``from a import b`` names a.b, which is a module, or a name in the module a.
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = targets & modules.keys() - {module}
    return graph


def _imported(node: ast.AST, importer: Sequence[str]) -> Iterator[str]:
    """The dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = importer[: len(importer) - node.level] if node.level else ()
        base = ".".join([*package, *filter(None, [node.module])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _room(module: str) -> str:
    """Empty of the package's root."""
    return module.split(".")[1] if "." in module else ""


def reachable(graph: Graph) -> dict[str, set[str]]:
    """All nodes to which a path of at least one arrow leads from each node."""
    found = {}
    for node in graph:
        seen, left = set[str](), list(graph[node])
        while left:
            if (target := left.pop()) not in seen:
                seen.add(target)
                left += graph[target]
        found[node] = seen
    return found


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Sets of nodes that reach each other."""
    reach = reachable(graph)
    return sorted({tuple(sorted(other for other in reach[n] if n in reach[other])) for n in graph if n in reach[n]})


def floors(graph: Graph) -> int:
    """Nodes on the longest path, where nodes that reach each other are one."""
    reach = reachable(graph)
    height: dict[str, int] = {}
    # Whoever reaches fewer nodes comes first, so that all below a node are known.
    for node in sorted(graph, key=lambda each: len(reach[each] | {each})):
        height[node] = 1 + max(
            (height[other] for other in reach[node] if node not in reach[other] | {other}), default=0
        )
    return max(height.values(), default=0)


@dataclass(frozen=True)
class Walk:
    """The way of one prompt: each is (where, name) in the order of first appearance, where a file or a module."""

    calls: list[tuple[str, str]]
    carriers: list[tuple[str, str]]
    plugin_calls: list[tuple[str, str]]
    plugin_carriers: list[tuple[str, str]]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.calls))


def walk(root: Path) -> Walk:
    """Train for one step with the code in ``root``, and follow the prompt."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("site", "notes"):
            (folder / part).mkdir()
        # Python imports a module of this name in every process, before anything else.
        shutil.copy(Path(__file__).with_name("follower.py"), folder / "site" / "sitecustomize.py")
        (folder / "rows.jsonl").write_text(json.dumps(ROW))
        config = {
            "model": {"path": "model"},
            "data": {"train": {"name": "table", "path": "rows.jsonl"}, "max_prompt_tokens": 128},
            "rewards": [{"name": "exact"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"name": "hf", "group_size": 3, "max_new_tokens": 6},
            "learner": {"zero_stage": 0},
            "trainer": {"steps": 1, "prompts_per_step": 1, "run_dir": "run"},
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        paths = list(map(str, [root, root / "plugins", root / "datasets"]))
        _run(folder, paths, "-c", MODEL)
        told = {"WALK_ROOT": str(root), "WALK_NOTES": str(folder / "notes"), "WALK_WORD": WORD}
        _run(folder, [str(folder / "site"), *paths], "-m", "mmrl", "train", "config.yaml", **told)
        lines = [line for path in (folder / "notes").iterdir() for line in path.read_text().splitlines()]
    notes = sorted(map(json.loads, lines))  # by time
    kinds = [kind for _, kind, *_ in notes]
    if "end" not in kinds:
        raise SystemExit("the step did not get to DeepSpeed's optimizer step")
    notes = notes[: kinds.index("end")]
    found = {kind: list(dict.fromkeys((where, name) for _, k, where, name in notes if k == kind)) for kind in kinds}
    core = {kind: [each for each in found[kind] if re.match(r"mmrl\W", each[0])] for kind in found}
    plugins = {kind: [each for each in found[kind] if each not in core[kind]] for kind in found}
    return Walk(core["call"], core["carrier"], plugins["call"], plugins["carrier"])


def _run(folder: Path, paths: Sequence[str], *words: str, **environment: str) -> None:
    machine = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = {**os.environ, **machine, **environment, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words[:3]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def report(found: Structure) -> Iterator[str]:
    """The figures, and what is too large or goes in circles."""
    yield f"{len(found.rooms)} rooms, {found.floors} floors, {len(found.arrows)} arrows"
    yield f"lines: {', '.join(f'{folder} {count:,}' for folder, count in found.lines.items())}"
    yield f"lines of rooms: {', '.join(f'{room} {count:,}' for room, count in found.room_lines.items())}"
    yield f"classes: {found.classes}"
    spelled = {path for paths in found.column_files.values() for path in paths}
    each_column = ", ".join(f"{column} {len(paths)}" for column, paths in found.column_files.items())
    yield f"files that spell a column: {len(spelled)} ({each_column})"
    yield f"places of the step: {len(found.step_places)}"
    for place, modules in found.step_places.items():
        yield from (f"  {place}/{module}: {', '.join(parts)}" for module, parts in modules.items())
    for kind, each in (("rooms", found.room_circles), ("modules", found.module_circles)):
        yield f"circles of {kind}: {len(each)}"
        yield from (f"  {', '.join(names)}" for names in each)
    yield f"files above {LONG} lines: {len(found.long_files)}"
    yield from (f"  {size} {path}" for path, size in sorted(found.long_files.items(), key=lambda each: -each[1]))


def report_walk(found: Walk) -> Iterator[str]:
    """The figures, the carriers, and the way, function by function."""
    yield f"the walk of a prompt: {len(found.calls)} calls, {len(found.files)} files, {len(found.carriers)} carriers"
    yield f"  carriers: {', '.join(name for _, name in found.carriers)}"
    yield from (f"  {file}: {name}" for file, name in found.calls)
    yield f"in plugins: {len(found.plugin_calls)} calls"
    yield f"  carriers: {', '.join(name for _, name in found.plugin_carriers)}"
    yield from (f"  {file}: {name}" for file, name in found.plugin_calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout; by default this one")
    parser.add_argument("--walk", action="store_true", help="also follow one prompt, which takes a minute")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    found, way = structure(root), walk(root) if arguments.walk else None
    if arguments.json:
        print(json.dumps({"structure": asdict(found), "walk": None if way is None else asdict(way)}, indent=1))
    else:
        print(*report(found), *([] if way is None else report_walk(way)), sep="\n")


if __name__ == "__main__":
    main()
