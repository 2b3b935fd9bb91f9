"""Names of functions and classes for other processes: by their module, their file, or a file of their source.

Nothing is pickled. A definition in a running script or a notebook's cell is written to a file with all that its source
names: modules as imports, simple constants as they are, functions and classes of the same place by their own source.
Anything else is refused by name. The file is run here once, and is refused if it does not give the same: defaults,
decorators' arguments and class bodies use the value that a name has when they are run.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import inspect
import linecache
import re
import symtable
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mmrl.api.origins import Origins
from mmrl.config.plugin_specs import Kind
from mmrl.errors import ConfigError
from mmrl.plugin_host.registry import list_plugins
from mmrl.runs.files import making, replace_file
from mmrl.system.redaction import Redactor

GIVEN = "given"
"""The folder in RUN for the arguments of ``mmrl.train``."""
_IN_FILE = "put it into a file, with all that it uses, and name that: path/to/file.py:Name"
_MAX_CONSTANT = 1 << 16
_GIVEN_FILE = "<given>"
_POSTPONED = annotations.compiler_flag
"""Flag of code under ``from __future__ import annotations``."""
_PARTS = (
    *("__name__", "__defaults__", "__kwdefaults__", "__closure__", "cell_contents", "__func__", "fget", "fset", "fdel"),
    *("func", "args", "keywords", "__bases__", "__dict__"),
)
"""Attributes of functions, classes and their wrappers that hold values which their source was run with."""


def reference(kind: Kind, value: Any, folder: Path, origins: Origins | None = None) -> str:
    """The name by which other processes find a function or class; a text is one already.

    Args:
        kind: The plugin's kind.
        folder: A folder in the run's, for its source if that must be written.
        origins: Gets the places of what is written there.

    Raises:
        ConfigError: They cannot find it, or the folder cannot be made.
        ResourceError: The file cannot be written.
    """
    if isinstance(value, str):
        return value
    if not (isinstance(value, type) or inspect.isfunction(_inner(value))):
        wanted = "a name, a class, or a function" if kind == "reward" else "a name, or a class"
        _refuse(kind, f"{type(value).__name__} {_shown(value):.60} is no function or class", possible=wanted)
    module, name = value.__module__, value.__qualname__
    installed = [info for info in list_plugins() if info.kind == kind and info.target == f"{module}:{name}"]
    if installed:
        return f"{installed[0].distribution}:{installed[0].name}" if len(installed) > 1 else installed[0].name
    if found := _place(value):
        return found
    source = (captured := _Source(kind, value)).text()
    version = hashlib.sha256(source.encode()).hexdigest()[:12]
    path = folder / f"{value.__name__}-{version}.py"
    with making(folder.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        replace_file(path, source)
    if origins is not None:
        origins.add(path, source, captured.definitions())
    return f"{path}:{value.__name__}"


def _place(value: Any) -> str | None:
    """Its module or, if that cannot be imported by its name, its file; None if it has neither."""
    module, name = sys.modules.get(value.__module__), value.__name__
    if module is None or module.__name__ == "__main__" or vars(module).get(name) is not value:
        return None
    if _is_importable(module):
        return f"import:{module.__name__}:{name}"
    file = getattr(module, "__file__", None) or ""
    return f"{Path(file).absolute()}:{name}" if file.endswith(".py") and Path(file).is_file() else None


def _is_importable(module: ModuleType) -> bool:
    """True if another process that looks in the same places finds it under its name."""
    name, origin = module.__name__, getattr(module, "__file__", None)
    if name == "__main__":
        return False
    parent = sys.modules.get(name.rpartition(".")[0])
    folders = None if parent is None else getattr(parent, "__path__", None)
    specs = (finder.find_spec(name, folders) for finder in sys.meta_path)
    found = next((spec for spec in specs if spec is not None), None)
    return found is not None and (origin is None or found.origin in (origin, "frozen"))


def _inner(value: Any) -> Any:
    """The value without its decorators."""
    return inspect.unwrap(value) if callable(value) else value


def _refuse(kind: str, what: str, possible: str = "", remedy: str = _IN_FILE) -> NoReturn:
    raise ConfigError(what, where=f"{kind} given to mmrl.train", possible=possible, remedy=remedy)


class _Source:
    """The source of a file that defines a function or class, and all that it needs."""

    def __init__(self, kind: Kind, value: Any) -> None:
        self._kind, self._value = kind, value
        self._names: Mapping[str, Any] = {}
        self._imports: dict[str, None] = {}
        self._constants: dict[str, str] = {}
        self._definitions: dict[str, str] = {}
        self._known: dict[str, Any] = {}
        self._postpones = False

    def text(self) -> str:
        """The whole file.

        Raises:
            ConfigError: It is not complete.
        """
        self._define(self._value, self._value.__qualname__)
        text, made = self._run()
        if Redactor()(text) != text:
            self._no(
                "its source holds a secret, and would be written to the run's folder",
                "have it read an environment variable when it is called, or make the value an option",
            )
        if found := self._compared(text, made):
            self._no(f"its source, run again, does not give the same: {found}")
        return text

    def definitions(self) -> list[tuple[Any, str]]:
        """The functions and classes of the file, with their sources."""
        return [(self._known[name], source) for name, source in self._definitions.items()]

    def _compared(self, text: str, made: dict[str, Any]) -> str:
        """The first difference between the file's definitions and these; empty if none."""
        seen: dict[tuple[int, int], Any] = {}
        try:
            for name, value in self._known.items():
                if found := _difference(value, made.get(name), seen):
                    return f"in {name}, {found}"
            for live, again in seen.values():
                is_written = inspect.isfunction(again) and again.__code__.co_filename == _GIVEN_FILE
                if is_written and inspect.getsource(live).rstrip() not in text:
                    return f"{live.__qualname__} has been defined again"
        except Exception as error:  # compared values may raise anything, or have no end
            return f"{type(error).__name__}: {error}"
        return ""

    def _run(self) -> tuple[str, dict[str, Any]]:
        """The whole file, and its definitions once it is run."""
        future = ["from __future__ import annotations\n"] if self._postpones else []
        constants = [f"{name} = {shown}" for name, shown in self._constants.items()]
        lines = [*future, *sorted(self._imports), "", *constants, "", *self._definitions.values()]
        text = "\n".join(lines).rstrip() + "\n"
        made: dict[str, Any] = {"__name__": self._value.__module__}
        try:
            exec(compile(text, _GIVEN_FILE, "exec", dont_inherit=True), made)
        except Exception as error:
            if isinstance(error, NameError) and self._mends(error.name, text):
                return self._run()
            self._no(f"its source, written to a file, does not run ({type(error).__name__}: {error})")
        return text, made

    def _mends(self, missing: str | None, text: str) -> bool:
        """Supply a name that was missing when the file was run; False if that is impossible."""
        if missing in self._known:  # defined further down; an annotation that names it can wait
            postponed, self._postpones = self._postpones, True
            return not postponed
        if missing and missing in self._names:  # a class body reads it for its attribute of that name
            after, self._definitions = self._definitions, {}
            self._need(missing, self._names, ast.parse(text))
            self._definitions |= after
        return missing in self._known

    def _no(self, why: str, remedy: str = _IN_FILE) -> NoReturn:
        _refuse(self._kind, f"{self._value.__qualname__} cannot be used in other processes: {why}", remedy=remedy)

    def _define(self, value: Any, known_as: str) -> None:
        """The source of a function or class, after that of all it names."""
        if self._known.setdefault(value.__name__, value) is not value:
            self._no(f"two things that it uses are called {value.__name__}")
        source, node = self._found(value, known_as)
        inner = _inner(value)
        names = vars(sys.modules[value.__module__]) if isinstance(inner, type) else inner.__globals__
        self._names = self._names or names
        decorated = getattr(node, "decorator_list", []) and names.get(value.__name__, value) is value
        if value is not inner and not decorated:
            self._no(f"{known_as} is wrapped in another function, which its source does not show")
        functions = [*_methods(inner)] if isinstance(inner, type) else [inner]
        if closed := [name for each in functions for name in each.__code__.co_freevars if name != "__class__"]:
            self._no(
                f"{known_as} uses {', '.join(closed)} of the function that it is defined in",
                "make that an argument with a default, which is an option in the config; or " + _IN_FILE,
            )
        self._postpones |= any(each.__code__.co_flags & _POSTPONED for each in functions)
        quoted = {each for each in _quoted_names(node) if isinstance(names.get(each), type) or _origin(names.get(each))}
        for name in sorted((_global_names(source) | quoted) - {value.__name__}):
            self._need(name, names, node)
        self._definitions[value.__name__] = f"\n{source}"

    def _found(self, value: Any, known_as: str) -> tuple[str, ast.AST]:
        """The source of a definition, and its tree."""
        name = value.__name__
        if name == "<lambda>":
            self._no("a lambda has no name by which it could be found", "write it as def name(rollouts): return [...]")
        try:
            source = _class_source(value) if isinstance(value, type) else inspect.getsource(value)
            indented = source[:1].isspace()
            source = f"if True:\n{source}" if indented else source  # taking the indent away would change texts
            (node,) = ast.parse(source).body
            (node,) = node.body if indented and isinstance(node, ast.If) else (node,)
            if getattr(node, "name", None) != name:
                raise ValueError(f"its source defines {getattr(node, 'name', 'something else')}")
        except (OSError, TypeError, ValueError, SyntaxError) as error:
            self._no(f"the source of {known_as} cannot be found ({error})")
        return source.rstrip() + "\n", node

    def _need(self, name: str, names: Mapping[str, Any], tree: ast.AST) -> None:
        """Have the file define ``name``."""
        if name not in names:
            if not hasattr(builtins, name):
                self._no(f"it names {name}, which is not defined")
            return
        value = names[name]
        if isinstance(value, ModuleType):
            self._import(name, value, tree)
        if name in self._known:
            if self._known[name] is not value:
                self._no(f"two things that it uses are called {name}")
            return
        self._known[name] = value
        if isinstance(value, ModuleType):
            return
        if (shown := _constant(value)) is not None:
            self._constants[name] = shown
            self._imports |= {"import re": None} if isinstance(value, re.Pattern) else {}
        elif origin := _origin(value):
            self._imports[f"from {origin[0]} import {origin[1]}" + _renamed(origin[1], name)] = None
        elif isinstance(value, type) or inspect.isfunction(_inner(value)):
            self._define(value, name)
            if value.__name__ != name:
                self._definitions[name] = f"\n{name} = {value.__name__}\n"
        else:
            self._no(
                f"it uses {name}, a live object of this process: {type(value).__name__} {_shown(value):.60}",
                f"make {name} within the function, or an argument with a default, which is an option; or {_IN_FILE}",
            )

    def _import(self, name: str, module: ModuleType, tree: ast.AST) -> None:
        """Have the file import a module, and its submodules that are used."""
        for each in _modules(module, name, tree):
            if not _is_importable(each):
                self._no(f"it uses the module {each.__name__}, which no other process can import")
            renamed = _renamed(module.__name__, name) if each is module else ""
            self._imports[f"import {each.__name__}{renamed}"] = None


def _renamed(name: str, known_as: str) -> str:
    return "" if name == known_as else f" as {known_as}"


def _methods(cls: type) -> Iterator[Any]:
    """The functions in a class's source, with those of inner classes."""
    for value in vars(cls).values():
        value = _inner(getattr(value, "__func__", getattr(value, "fget", value)))
        if isinstance(value, type) and value.__qualname__.startswith(f"{cls.__qualname__}."):
            yield from _methods(value)
        elif (
            inspect.isfunction(value)
            and value.__qualname__.startswith(f"{cls.__qualname__}.")
            and not value.__code__.co_filename.startswith("<string")  # a dataclass makes such
        ):
            yield value


def _class_source(cls: type) -> str:
    """The source of a class; a notebook's class, which has no file, has it in a cell.

    That is the cell of its methods; without methods, the last cell that defines such a class.
    """
    try:
        return inspect.getsource(cls)
    except (TypeError, OSError):
        cells = [method.__code__.co_filename for method in _methods(cls)]
    if not cells and vars(sys.modules[cls.__module__]).get(cls.__name__) is cls:
        cells = [name for name in reversed([*linecache.cache]) if not Path(name).exists()]
    for cell in dict.fromkeys(cells):
        lines = linecache.getlines(cell)
        with contextlib.suppress(SyntaxError):  # no Python
            for name, node in _classes(ast.parse("".join(lines))):
                if name == cls.__qualname__:
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno])
    raise OSError("no cell of a notebook defines it")


def _classes(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes that a cell defines, by their qualified names; the last one first."""
    scopes = {ast.ClassDef: ".", ast.FunctionDef: ".<locals>.", ast.AsyncFunctionDef: ".<locals>."}
    for node in reversed([*ast.iter_child_nodes(tree)]):
        name = f"{within}{getattr(node, 'name', '')}"
        if isinstance(node, ast.ClassDef):
            yield name, node
        yield from _classes(node, f"{name}{scopes[type(node)]}" if type(node) in scopes else within)


def _global_names(source: str) -> set[str]:
    """The names that a definition takes from its module, in annotations and decorators too."""

    def search(table: symtable.SymbolTable) -> Iterator[str]:
        yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
        for child in table.get_children():
            yield from search(child)

    found = set(search(symtable.symtable(source, "captured", "exec")))
    return {name for name in found if not (name.startswith("__") and name.endswith("__"))}


def _quoted_names(tree: ast.AST) -> Iterator[str]:
    """The names in annotations that are written as texts."""
    annotations = [getattr(node, key, None) for node in ast.walk(tree) for key in ("annotation", "returns")]
    for node in (each for found in annotations if found for each in ast.walk(found)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(SyntaxError, ValueError):
                yield from (each.id for each in ast.walk(ast.parse(node.value)) if isinstance(each, ast.Name))


def _modules(module: ModuleType, name: str, tree: ast.AST) -> Iterator[ModuleType]:
    """A module and those of its submodules that are used under its name, such as ``os.path``."""
    yield module
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        found: Any = module
        if isinstance(inner, ast.Name) and inner.id == name:
            for part in parts:
                found = getattr(found, part, None)
                if not isinstance(found, ModuleType):
                    break
                if found.__name__.startswith(f"{module.__name__}."):
                    yield found


def _constant(value: Any) -> str | None:
    """Python for a simple value; None if it is none."""
    if isinstance(value, re.Pattern):
        return f"re.compile({value.pattern!r}, {value.flags})"
    try:
        if type(value) in (set, frozenset) and all(map(_is_simple, value)):  # in an order that is always the same
            shown = _constant(sorted(value, key=repr))
            return None if shown is None else f"{type(value).__name__}({shown})"
        shown = repr(value) if _is_simple(value) else None
        if shown is None or len(shown) > _MAX_CONSTANT or ast.literal_eval(shown) != value:
            return None
    except (ValueError, SyntaxError, RecursionError):  # such as infinity
        return None
    return shown


def _is_simple(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_simple, value))
    if type(value) is dict:
        return all(_is_simple(key) and _is_simple(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _origin(value: Any) -> tuple[str, str] | None:
    """The module that others can import it from, and its name there."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None), getattr(value, "_name", None)):
        if module and isinstance(name, str) and vars(module).get(name) is value and _is_importable(module):
            return module.__name__, name
    return None


def _difference(live: Any, made: Any, seen: dict[tuple[int, int], Any]) -> str:
    """The first difference of two results of the same source; empty if none."""
    if live is made or (id(live), id(made)) in seen:
        return ""
    seen[id(live), id(made)] = live, made  # kept, so that nothing else gets their ids
    if found := _difference(type(live), type(made), seen):
        return found
    left, right = _parts(live), _parts(made)
    if only := left.keys() ^ right.keys():
        return f"only one of the two has {', '.join(sorted(map(str, only)))}"
    if left not in ({}, {"__dict__": {}}):
        return next((found for key in left if (found := _difference(left[key], right[key], seen))), "")
    same = live == made if isinstance(live, int | str | bytes) else _shown(live) == _shown(made)
    return "" if same else f"{_shown(live):.60} has become {_shown(made):.60}"


def _parts(value: Any) -> dict[Any, Any]:
    """The values that a value consists of; empty for a simple one."""
    if isinstance(value, list | tuple | Mapping):
        return dict(value if isinstance(value, Mapping) else enumerate(value))
    found = {}
    for name in _PARTS:
        with contextlib.suppress(AttributeError, ValueError):  # an empty cell has no contents
            found[name] = getattr(value, name)
    if isinstance(value, type):
        functions = [name for name, each in vars(value).items() if inspect.isfunction(getattr(each, "__func__", each))]
        names = {name for name in vars(value) if not name.startswith("__")}.union(functions)
        found["__dict__"] = {name: vars(value)[name] for name in names}
        found["model_fields"] = getattr(value, "model_fields", None)  # of pydantic, with their defaults and bounds
    return found


def _shown(value: Any) -> str:
    """How Python shows a value, without its address and the function that its class is defined in; sets in order."""
    try:
        shown = repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value)
    except Exception:  # such as for a number of 5000 digits
        shown = object.__repr__(value)
    return re.sub(r" at 0x[0-9a-f]+|\w+\.<locals>\.", "", shown)
