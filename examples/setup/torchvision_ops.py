"""Lets a torchvision whose compiled part cannot load be imported beside a CPU torch: an import hook.

torchvision's Python half needs the operators ``nms`` and ``qnms`` to exist. A build linked to CUDA cannot load
them beside a CPU torch, and ``import torchvision`` fails, taking transformers' vision processors and vLLM with it.
Images need neither operator, so declaring them is enough. Where the compiled part loads, nothing changes.

Run as a script, it installs itself into its interpreter's site-packages, for every process of that environment. Each
of them executes this file when it starts, so the top level imports next to nothing.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_declared: list[object] = []  # torch takes declarations back when their library object dies


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        if not _compiled_part_loads(self.path):
            _declare_operators()
        super().exec_module(module)


class _Finder:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _compiled_part_loads(init_file: str) -> bool:
    from pathlib import Path

    import torch

    try:
        for library in Path(init_file).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
            return True
    except (ImportError, OSError):
        pass
    return False


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def _install() -> None:
    import sysconfig
    from pathlib import Path

    site_packages = Path(sysconfig.get_path("purelib"))
    (site_packages / "_torchvision_ops.py").write_bytes(Path(__file__).read_bytes())
    (site_packages / "_torchvision_ops.pth").write_text("import _torchvision_ops\n")


if __name__ == "__main__":
    _install()
else:
    sys.meta_path.insert(0, _Finder())
