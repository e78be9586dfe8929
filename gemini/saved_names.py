"""Names under which tensors of a module are saved: torch's own without those of its wrappers.

torch.compile, checkpoint_wrapper and the like put a module around another one, which adds a part to
the names below it. Files, optimizer state and reports have names without these parts, as
`get_model_state_dict` of torch.distributed.checkpoint has them; so a module loads what it saved
with other wrappers. `state_dict()` and `named_parameters()` are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

# class of torch -> the child that it is around; by name, since importing the compiler takes seconds
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
_PARTS = frozenset(_WRAPPERS.values())


def wrapped_child(module: nn.Module) -> str | None:
    """Name of the child around which torch has put this module; None for any other module."""
    for base in type(module).__mro__:
        if base.__name__ in _WRAPPERS and base.__module__.startswith("torch."):
            return _WRAPPERS[base.__name__]
    return None


def peeled(module: nn.Module) -> nn.Module:
    """Module that torch's wrappers are around; a module without any is itself."""
    while (child := wrapped_child(module)) is not None:
        module = module.get_submodule(child)
    return module


@contextmanager
def wrappers_aside(module: nn.Module) -> Iterator[None]:
    """Context in which a module's children stand without torch's wrappers around them: libraries
    that read names from the tree find those that are saved."""
    places = [
        (parent._modules, key, child)
        for parent in module.modules()
        for key, child in parent._modules.items()
        if child is not None and wrapped_child(child) is not None
    ]
    try:
        for children, key, child in places:
            children[key] = peeled(child)
        yield
    finally:
        for children, key, child in places:
            children[key] = child


def params_by_path(module: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """(path, parameter) under each of its names, in registration order. `named_parameters()` of a
    wrapper leaves parts of a path out."""
    for path, inner in module.named_modules(remove_duplicate=False):
        for key, param in inner._parameters.items():
            if param is not None:
                yield f"{path}.{key}" if path else key, param


class SavedNames:
    """Names of one module's parameters, buffers and extra state, and the names that are saved."""

    def __init__(self, module: nn.Module) -> None:
        self._wrappers: dict[str, str] = {}  # path of each wrapper -> the child that it is around
        for path, inner in module.named_modules(remove_duplicate=False):
            if (child := wrapped_child(inner)) is not None:
                self._wrappers[path] = child

    def saved(self, name: str) -> str:
        """Saved name of what the module has under `name`; a saved name stays as it is.

        Some wrappers take their own part out of a state dict, so any of the parts may be missing.
        """
        if not self._wrappers:
            return name
        kept, path = [], ""
        for part in name.split("."):
            while (child := self._wrappers.get(path)) not in (None, part):
                path = f"{path}.{child}" if path else f"{child}"
            if child is None:
                kept.append(part)
            path = f"{path}.{part}" if path else part
        return ".".join(kept)

    def found(self, names: Iterable[str]) -> Callable[[str], str]:
        """Function from a saved name to the one of `names`, of this module, that it stands for."""
        there = {self.saved(name): name for name in names} if self._wrappers else {}
        return lambda name: there.get(name, name)


def without_wrappers(known: Iterable[str]) -> Callable[[Any], Any]:
    """Function that takes the wrappers out of a name in a file, whose module nobody has; a position
    in its place stays.

    known: saved names of the module that loads it; a part that these have is a child of its own.
    """
    own = {part for name in known for part in name.split(".")}
    parts = _PARTS - own

    def saved(name: Any) -> Any:
        if not isinstance(name, str) or not any(part in name for part in parts):
            return name
        return ".".join(part for part in name.split(".") if part not in parts)

    return saved


def renamed(values: Mapping[str, T], name_of: Callable[[str], str]) -> Mapping[str, T]:
    """Mapping under the names of `name_of`; the same object if these are its names. A name that two
    values would have is that of the one which has it already."""
    names = {name: name_of(name) for name in values}
    if all(name == other for name, other in names.items()):
        return values
    return {
        name if other != name and other in names else other: values[name]
        for name, other in names.items()
    }
