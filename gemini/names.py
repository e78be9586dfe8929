"""Short names of packages of ours: `optim` for `gemini.optim`, `nvme`, `kernels_triton`.

Nothing of ours imports them, so that a program's own `optim` or `nvme.py` takes a name and nothing
else. Where a short name is ours, it and what is below it are the same modules as the long names'.
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
    """Modules below short names that are ours."""

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
        """It ran under its long name, whose spec it keeps."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


_short_names = _ShortNames()


def is_long(name: str) -> None:
    """Have the module that is being imported as `name`, a short one, be that of the long one."""
    sys.modules[name] = importlib.import_module(f"gemini.{name}")
    if _short_names not in sys.meta_path:
        sys.meta_path.insert(0, _short_names)


def shadowed() -> dict[str, str]:
    """Short names that an import here finds elsewhere, and where."""
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
