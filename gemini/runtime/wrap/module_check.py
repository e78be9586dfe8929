"""Check that a module still has the parameters that were wrapped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as in calls.py
from torch.distributed._composable.contract import REGISTRY_KEY

from gemini.chunk.parameter import handle_of


class ModuleChanged(RuntimeError):
    """Error: the module has other parameters than when it was wrapped."""


class ModuleCheck:
    """Parameters of every module below a root at wrapping, compared before each forward.

    The check keeps no module alive: a parameter that outlives its module keeps its engine alive.
    ignored: ids of parameters that may be replaced, as merged adapters do with quantised weights.
    """

    def __init__(self, root: nn.Module, ignored: Collection[int] = ()) -> None:
        self._modules = []
        self._ignored: dict[str, frozenset[str]] = {}  # by module, where it has any
        for name, module in root.named_modules():
            left = {key for key, param in module._parameters.items() if id(param) in ignored}
            if left:
                self._ignored[name] = frozenset(left)
            params = _without(left, module._parameters)
            self._modules.append((name, weakref.ref(module), params, _weakly(module._modules)))

    def persistent_buffers(self) -> Iterator[Tensor]:
        """Persistent buffers of all modules that are alive."""
        for _, reference, _, _ in self._modules:
            if (module := reference()) is not None:
                for name, buffer in module._buffers.items():
                    if buffer is not None and name not in module._non_persistent_buffers_set:
                        yield buffer

    @_disable_dynamo
    def check(self) -> None:
        """Raise ModuleChanged, with the name, for a parameter added or replaced, and RuntimeError
        where torch's `replicate` reduces gradients too.

        Modules without parameters may come and go.
        """
        for name, reference, params, children in self._modules:
            if (module := reference()) is None:
                continue  # its parent has another child now, or is gone too
            if REGISTRY_KEY in module.__dict__ and "replicate" in module.__dict__[REGISTRY_KEY]:
                raise RuntimeError(
                    "torch's replicate() on a wrapped module: both reduce gradients over ranks; "
                    "use the GeminiDDP alone"
                )
            now = module._parameters
            if name in self._ignored:
                now = _without(self._ignored[name], now)
            if now.keys() != params.keys():
                self._refuse(name, now, params)
            for key, param in params.items():
                if now[key] is not param:
                    self._refuse(name, now, params)
            for key, child in module._modules.items():
                if child is None or (key in children and children[key]() is child):
                    continue
                for param_name, param in child.named_parameters():
                    if handle_of(param) is None:
                        raise changed(_join(name, key, param_name), "is new")

    @staticmethod
    def _refuse(name: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        for key in (*before, *now):
            if now.get(key) is before.get(key) and key in now and key in before:
                continue
            what = "is new" if key not in before else "is gone" if key not in now else "is another"
            raise changed(_join(name, key), what)


def _without(left: Collection[str], params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: param for key, param in params.items() if key not in left}


def _weakly(modules: Mapping[str, nn.Module | None]) -> dict[str, Callable[[], nn.Module | None]]:
    return {
        key: _nothing if child is None else weakref.ref(child) for key, child in modules.items()
    }


def _nothing() -> None:
    return None


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def changed(name: str, what: str) -> ModuleChanged:
    return ModuleChanged(
        f"the module changed after wrapping: parameter {name} {what}; "
        "make all changes before GeminiDDP, or copy new values into the parameter in place; "
        "torch.func.functional_call takes a plain module (unwrap() gives one)"
    )
