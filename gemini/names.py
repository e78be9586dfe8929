"""Short names of our packages: `optim` for `gemini.optim`, `nvme`, `kernels_triton`.

No code of ours imports short names, so a program's own `optim` or `nvme.py` hides the short name
and breaks nothing. A short name that is ours, and every module below it, is the same module object
as under its long name.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

SHORT = ("optim", "nvme", "kernels_triton")


class _ShortNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of the modules below our short names."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top == fullname or top not in SHORT:
            return None
        if sys.modules.get(top) is not sys.modules.get(f"gemini.{top}"):
            return None  # of somebody else
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"gemini.{spec.name}")
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the long name; the module ran under that name."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


_short_names = _ShortNames()


def is_long(name: str) -> None:
    """Replace the module that is being imported under the short `name` by the long name's."""
    sys.modules[name] = importlib.import_module(f"gemini.{name}")
    if _short_names not in sys.meta_path:
        sys.meta_path.insert(0, _short_names)


def shadowed() -> dict[str, str]:
    """Short names that another package hides -> the path of that package."""
    installed = Path(__file__).parents[1]
    found = {}
    for name in SHORT:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        ours = [Path(__file__).with_name(name), installed / name]  # a wheel has a copy
        if spec.origin is None or Path(spec.origin).resolve() not in [
            (folder / "__init__.py").resolve() for folder in ours
        ]:
            found[name] = str(spec.origin or spec.submodule_search_locations)
    return found
