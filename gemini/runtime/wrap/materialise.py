"""Values for parameters on the meta device, a module at a time.

with gemini.init_empty():
    module = Model(config)          # parameters have shapes, and no memory
model = GeminiDDP(module)           # values are made chunk by chunk; a rank keeps its shard
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gemini.saved_names import SavedNames, params_by_path

InitFn = Callable[[nn.Module], Any]


@contextmanager
def init_empty() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device, and their buffers as usual.

    For the whole process until it ends: it replaces `nn.Module.register_parameter`.
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _OthersOnMeta(TorchFunctionMode):
    """Mode in which no parameter has values but those of one module.

    Those of others may be in a chunk already, or released.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._own = {id(param) for param in module.parameters(recurse=False)}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        seen = {name: self._seen(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._seen, args), **seen)

    def _seen(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and id(value) not in self._own:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return value


class Materialiser:
    """Maker of the values of one root module's meta parameters.

    A module is initialised by its `reset_parameters`, then by the `_init_weights` of the outermost
    model around it that has one (as those of Hugging Face have), as at construction; by `init_fn`
    where there is neither. With a state dict, values come from it and nothing is initialised.
    """

    def __init__(
        self,
        root: nn.Module,
        init_fn: InitFn | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        keep_theirs: Collection[int] = (),  # ids of parameters that have values, and keep them
    ) -> None:
        self._root = root
        self._init_fn = init_fn
        self._state_dict = state_dict
        # makers of values, by id of a quantised parameter without memory
        self._quantised: Mapping[int, Callable[[], Tensor]] = getattr(state_dict, "quantised", {})
        self._names: dict[int, list[str]] = {}
        self._owner: dict[int, str] = {}
        self._kept: list[str] = []
        self._saved = SavedNames(root).saved
        for name, param in params_by_path(root):
            alike = dict.fromkeys(
                (name, self._saved(name))
            )  # a state dict has the one or the other
            if id(param) in keep_theirs:
                self._kept += alike
                continue
            self._names.setdefault(id(param), []).extend(alike)
            self._owner.setdefault(id(param), name.rpartition(".")[0])
        self._ready: dict[int, tuple[nn.Parameter, Tensor]] = {}  # made, and not yet taken

    def check(self) -> None:
        """Raise ValueError for the first module whose parameters or buffers cannot be made."""
        if self._state_dict is not None:
            missing = [
                names[0]
                for names in self._names.values()
                if not any(name in self._state_dict for name in names)
            ]
            given = next((name for name in self._kept if name in self._state_dict), None)
            if given is not None:
                raise ValueError(
                    f"init_state_dict has {given}, which is quantised or in ignored_params and "
                    "keeps what it has; expected its values in the module before it is wrapped"
                )
            if missing:
                raise ValueError(f"the state dict has no values for {', '.join(missing)}")
            return
        for name, module in self._root.named_modules():
            own = [
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ]
            if any(tensor.is_meta for _, tensor in own) and not self._can_init(name, module):
                raise ValueError(
                    f"{own[0][0]} of {name or 'the root module'} ({type(module).__name__}) is on "
                    "the meta device and has no values, and the module has no reset_parameters; "
                    "give init_fn=, or the values as state_dict="
                )

    def take(self, param: nn.Parameter) -> Tensor:
        """Values of a parameter, which is real or on the meta device."""
        if id(param) in self._quantised:
            return self._quantised[id(param)]()
        if self._state_dict is not None:
            for name in self._names.get(id(param), ()):
                if name in self._state_dict:
                    return self._checked(name, param, self._state_dict[name])
        if not param.is_meta:
            return param.data
        if id(param) not in self._ready:
            self._initialise(self._owner[id(param)])
        return self._ready.pop(id(param))[1]

    def waiting(self) -> list[nn.Parameter]:
        """Parameters whose values were made with their module's, and take memory until taken."""
        return [param for param, _ in self._ready.values()]

    def fill_buffers(self) -> None:
        """Give buffers that are still on the meta device their values."""
        for name, module in self._root.named_modules():
            for key, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:
                    continue
                full = f"{name}.{key}" if name else key
                given = self._state_dict or {}
                saved = given.get(full, given.get(self._saved(full)))
                if saved is not None:
                    module._buffers[key] = saved.detach().clone()
                else:
                    self._initialise(name)
                    break

    def _can_init(self, name: str, module: nn.Module) -> bool:
        if hasattr(module, "reset_parameters") or self._init_fn is not None:
            return True
        return any(hasattr(outer, "_init_weights") for outer in self._around(name))

    def _around(self, name: str) -> list[Any]:
        """Modules from the root down to the one of this name."""
        parts = name.split(".") if name else []
        return [self._root.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1)]

    def _initialise(self, name: str) -> None:
        """Run a module's initialisation on real memory, and keep the values for `take`."""
        module = self._root.get_submodule(name)
        before = dict(module._parameters)
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
        for key, param in before.items():
            if param is not None:  # one that is real keeps its values, and may be released
                real = torch.empty(param.shape, dtype=param.dtype)
                module._parameters[key] = nn.Parameter(real, requires_grad=param.requires_grad)
        try:
            with torch.no_grad():
                self._run_init(name, module)
            for key, param in before.items():
                made = module._parameters[key]
                if param is not None and param.is_meta and made is not None:
                    self._ready[id(param)] = (param, made.data)
        finally:
            module._parameters.update(before)

    def _run_init(self, name: str, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        around = self._around(name)
        while around and not hasattr(around[0], "_init_weights"):
            del around[0]
        if around:
            # A model may scale a child's weight when it initialises the parent, so all are run;
            # what they do to meta tensors has no effect, and others' are meta tensors to them.
            with _OthersOnMeta(module):
                for outer in reversed(around):
                    around[0]._init_weights(outer)
        elif reset is None and self._init_fn is not None:
            self._init_fn(module)

    @staticmethod
    def _checked(name: str, param: nn.Parameter, values: Tensor) -> Tensor:
        if values.shape != param.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)} in the state dict and "
                f"{tuple(param.shape)} in the module"
            )
        return values


def fill_empty(module: nn.Module) -> list[nn.Parameter]:
    """Replace a module's meta parameters by new ones with values, and fill its buffers; returns the
    new ones. Tied parameters stay tied.

    Raises ValueError, before anything is made, for a module that cannot be initialised.
    """
    maker = Materialiser(module)
    maker.check()
    empty = {id(param): param for param in module.parameters() if param.is_meta}
    made = {
        key: nn.Parameter(maker.take(param), param.requires_grad) for key, param in empty.items()
    }
    for inner in module.modules():
        for name, param in inner._parameters.items():
            if param is not None and id(param) in made:
                inner._parameters[name] = made[id(param)]
    maker.fill_buffers()
    return [*made.values()]
