"""Colossal-AI's modules under their own names, so that its scripts run with no line changed.

Import this file before them, or start the script with `python -m gemini run --colossalai`. What
has which name is in `gemini/migrate/colossal.toml`; a name without a door says what is used in its
place, when it is used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from gemini.migrate.colossal import ROOT, names


def put_up() -> None:
    """Put the modules under their names in this process. Raises ImportError beside the real one."""
    there = sys.modules.get(ROOT)
    if isinstance(there, _Module):
        return
    spec = getattr(there, "__spec__", None)
    if there is not None and not getattr(spec, "_initializing", False):
        raise ImportError(f"{ROOT} is imported already, from {there}; import {__name__} before it")
    sys.meta_path.insert(0, _Finder())
    sys.modules.pop(ROOT, None)
    importlib.import_module(ROOT)


class _Module(ModuleType):
    """A module of theirs: names are imported on first use."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "What has these names here: gemini/migrate/colossal.toml.")
        self.__path__: list[str] = []
        below = len(name) + 1
        known = (*names().moved, *names().missing, *names().modules)
        self.__all__ = sorted(
            {one[below:].partition(".")[0] for one in known if one.startswith(f"{name}.")}
        )
        if name == ROOT:
            self.__version__ = names().version

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        found: Any
        if full in names().moved:
            module, _, own = names().moved[full].rpartition(".")
            found = getattr(importlib.import_module(module), own)
        elif full in names().modules:
            found = importlib.import_module(full)
        elif full in names().missing:
            found = _Missing(full)
        elif name.startswith("__"):
            raise AttributeError(name)
        else:
            raise AttributeError(names().said_of(full))
        setattr(self, name, found)
        return found

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self.__all__]


class _Missing:
    """A name without a door: importing it is free, using it says what is used in its place."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, which is not here>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(names().said_of(self._name))

    __call__ = __getitem__ = __setitem__ = __iter__ = __enter__ = __contains__ = _refuse
    __mro_entries__ = __instancecheck__ = __or__ = __ror__ = _refuse


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of their modules, and of modules from here that have a name of theirs."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != ROOT:
            return None
        if fullname in names().modules or self._moved(fullname) is not None:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        # without its name: `from module import name` would hide the sentence of one that has it
        raise ModuleNotFoundError(names().said_of(fullname))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        moved = self._moved(spec.name)
        if moved is None:
            return _Module(spec.name)
        self._specs[spec.name] = moved.__spec__
        return moved

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of a module from here, which ran under its own name."""
        spec = module.__spec__
        if spec is not None and spec.name in self._specs:
            module.__spec__ = self._specs.pop(spec.name)

    @staticmethod
    def _moved(name: str) -> ModuleType | None:
        if name not in names().moved:
            return None
        module, _, own = names().moved[name].rpartition(".")
        found = getattr(importlib.import_module(module), own)
        return found if isinstance(found, ModuleType) else None


put_up()
