"""Begin and end of module calls, forward and backward, on any `nn.Module`, wrapped or not.

Tracing and the engine listen to the same. A module that has parameters of its own is a caller. Its
call begins before its forward and ends after it; in backward it begins with the first gradient of
an output, and ends when the gradients of its inputs and of its own parameters have arrived: what
reads parameters in backward lies between. Where there are neither, it ends with the backward; so
too where an input takes no part in it. A module that is gathered whole calls for everything below
it: one whose children run or not by its data (experts), and one that is compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once
from torch.autograd.graph import get_gradient_edge

from gemini.saved_names import wrapped_child
from gemini.trees import tensors_in
from gemini.units import ChunkId, ParamId

GatherWhole = Callable[[nn.Module], bool]


@dataclass(eq=False, slots=True)
class Caller:
    """Caller: a module, or operators that use parameters outside of their module.

    own: parameters that no other caller has; a shared one's gradient comes after the last of its
        callers, so no call waits for it.
    """

    name: str
    params: tuple[ParamId, ...]
    own: tuple[ParamId, ...] = ()
    awaited: tuple[ParamId, ...] = ()  # of its own, those that are trained
    whole: bool = False  # it uses everything below the module at once
    chunks: tuple[ChunkId, ...] = ()  # in an engine: where its parameters lie
    traced: tuple[ParamId, ...] = ()  # those that stand for it in a trace, if not all


class CallListener(Protocol):
    """Listener to calls, told in the order in which they happen."""

    def begins(self, caller: Caller) -> None: ...

    def ends(self, caller: Caller, outputs: Sequence[Tensor], *, recorded: bool) -> bool:
        """outputs: all outputs of the call. recorded: the call may have a backward; the answer is
        `in_pass` of that one."""
        ...

    def backward_begins(self, caller: Caller, *, in_pass: bool) -> None: ...

    def backward_ends(self, caller: Caller, *, in_pass: bool) -> None: ...


class ModuleCalls:
    """Calls of one module's callers, told to one listener.

    params: by id, with those that stand for the module's while it runs.
    """

    def __init__(self, listener: CallListener, params: Sequence[Tensor]) -> None:
        self._listener = listener
        self._params = params
        self._callers: list[Caller] = []
        self._open: list[BackwardCall] = []  # whose backward is under way

    def hook(self, callers: Sequence[tuple[nn.Module, Caller]]) -> list[Any]:
        """Listen to these callers. Returns hooks, which `remove()` undoes. `trained` must
        follow."""
        handles: list[Any] = []
        for module, caller in callers:
            hooks = _Hooks(self, self._listener, caller)
            handles += around_forward(module, hooks.before, hooks.after)
            self._callers.append(caller)
        return handles

    def trained(self, is_trained: Callable[[ParamId], bool]) -> None:
        """Set which parameters are trained from now on."""
        for caller in self._callers:
            caller.awaited = tuple(filter(is_trained, caller.own))

    def watch(
        self, caller: Caller, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, in_pass: bool
    ) -> None:
        """Hook the place of a recorded call in the graph. All tensors require a gradient."""
        BackwardCall(self, self._listener, caller, in_pass).watch(outputs, inputs)

    def gradient_arrived(self, param: ParamId) -> None:
        """Note that the gradient of one parameter has arrived, wherever it was used."""
        if self._open:
            for call in tuple(self._open):
                call.gradient_arrived(param)

    def forget(self) -> None:
        """End the backward, and with it every call."""
        for call in self._open:
            call.abandon()
        self._open.clear()


def callers_of(
    root: nn.Module,
    params_of: Callable[[nn.Module, bool], Sequence[ParamId]],
    gather_whole: GatherWhole,
) -> list[tuple[nn.Module, Caller]]:
    """Every caller with the module whose calls it has.

    params_of: ids of a module's own parameters, or of all below it.
    """
    callers: dict[nn.Module, Caller] = {}
    for name, module, whole in _using(root, "", gather_whole):
        params = tuple(dict.fromkeys(params_of(module, whole)))
        # a compiler around the whole module goes through another's wrapper without its hooks
        child = wrapped_child(module) if is_compiled(module) else None
        inner = module if child is None else module.get_submodule(child)
        if params and inner not in callers:
            callers[inner] = Caller(name, params, whole=whole)
    uses = Counter(param for caller in callers.values() for param in caller.params)
    for caller in callers.values():
        caller.own = tuple(param for param in caller.params if uses[param] == 1)
    return list(callers.items())


def _using(
    module: nn.Module, name: str, gather_whole: GatherWhole
) -> Iterator[tuple[str, nn.Module, bool]]:
    whole = is_compiled(module) or gather_whole(module)
    yield name, module, whole
    if not whole:
        around = wrapped_child(module)  # which has the name of the wrapper
        for child_name, child in module.named_children():
            below = f"{name}.{child_name}" if name else child_name
            yield from _using(child, name if child_name == around else below, gather_whole)


def blocks_of(module: nn.Module, *, is_listed: bool = False) -> Iterator[nn.Module]:
    """What a model runs one after the other: members of its lists, and what has no children.

    Nothing inside of a member of a `ModuleList`, or of what is compiled. is_listed: it is a member.
    """
    if is_compiled(module):
        return
    lists = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if not lists and (is_listed or not any(True for _ in module.children())):
        yield module
        return
    chain = isinstance(module, nn.Sequential)
    for child in module.children():
        is_part = chain and not any(isinstance(inner, nn.ModuleList) for inner in child.modules())
        yield from blocks_of(child, is_listed=lists or is_part)


def has_experts(module: nn.Module) -> bool:
    """Whether a module's children run or not by its data: a child is named `experts`."""
    return isinstance(getattr(module, "experts", None), nn.Module)


def repeated_blocks(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children of ModuleLists, by name, but those inside of others, compiled ones, and those that
    their model checkpoints itself."""
    taken: list[str] = []
    for path, parent in root.named_modules():
        if not isinstance(parent, nn.ModuleList) or any(path.startswith(one) for one in taken):
            continue
        taken.append(f"{path}.")
        owner = root.get_submodule(path.rpartition(".")[0])
        if getattr(owner, "gradient_checkpointing", False):
            continue
        for name, block in parent.named_children():
            if any(True for _ in block.parameters()) and not (
                getattr(block, "gradient_checkpointing", False)
                or any(is_compiled(inner) for inner in block.modules())
            ):
                yield f"{path}.{name}" if path else name, block


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made it; the compiler is not imported, which takes seconds."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def in_backward() -> bool:
    """Whether this code runs inside a backward (recomputation in checkpointing does)."""
    return torch._C._current_graph_task_id() != -1


def around_forward(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> list[Any]:
    """Hooks around a module's forward and its other hooks, also where it raises."""
    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


class _Hooks:
    """Hooks on one module."""

    def __init__(self, calls: ModuleCalls, listener: CallListener, caller: Caller) -> None:
        self._calls = calls
        self._listener = listener
        self._caller = caller

    @_disable_dynamo
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._listener.begins(self._caller)

    @_disable_dynamo
    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        outputs = tensors_in(output)
        recorded: list[Tensor] = []
        if torch.is_grad_enabled():
            for tensor in outputs:
                if tensor.requires_grad:
                    recorded.append(tensor)
        in_pass = self._listener.ends(self._caller, outputs, recorded=bool(recorded))
        if recorded:
            inputs = tensors_in((args, kwargs) if kwargs else args)
            self._calls.watch(self._caller, recorded, inputs, in_pass=in_pass)


class BackwardCall:
    """Backward of one call.

    Its hooks are on the graph, where the garbage collector cannot see them: they must not keep a
    node of the graph, as `register_multi_grad_hook` does, or neither graph nor listener would ever
    die.

    in_pass: false for an operator outside any forward, in whose order ranks may differ.
    """

    def __init__(
        self, calls: ModuleCalls, listener: CallListener, caller: Caller, in_pass: bool
    ) -> None:
        self._calls = calls
        self._listener = listener
        self._caller = caller
        self._in_pass = in_pass
        self._awaited: set[ParamId] = set()  # not arrived yet in this backward
        self._num_inputs = 0
        self._inputs_pending = 0
        self._ends_with_backward = False
        self._open = False
        self._task = -1  # the backward in which it was open last

    def watch(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Hook the gradients of all of these that need one."""
        for tensor in outputs:
            tensor.register_hook(self._output_arrived)
        hooked: set[int] = set()
        has_leaf = False  # autograd.grad cannot count these
        for tensor in inputs:
            if not tensor.requires_grad:
                continue
            if tensor.is_leaf:
                has_leaf = True
            elif id(tensor) not in hooked:
                hooked.add(id(tensor))
                tensor.register_hook(self._input_arrived)
        self._num_inputs = len(hooked)
        self._ends_with_backward = has_leaf or not (hooked or self._caller.awaited)

    def gradient_arrived(self, param: ParamId) -> None:
        """Note the gradient of one parameter, of this caller or of another."""
        if param in self._awaited:
            self._awaited.discard(param)
            if not (self._awaited or self._inputs_pending):
                self._close()

    def abandon(self) -> None:
        """End a backward that ended before this call did."""
        self._open = False

    def _output_arrived(self, grad: Tensor) -> None:
        """Note the gradient of an output; the first of a backward begins the call."""
        # a call begins with its first output of each backward; a second backward through the same
        # graph begins it again
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        self._listener.backward_begins(self._caller, in_pass=self._in_pass)
        self._open = True
        self._calls._open.append(self)
        self._inputs_pending = self._num_inputs
        self._awaited = set(self._caller.awaited)
        # Some may take no part: experts, branches, what was frozen. A single one does, as an output
        # of its call has a gradient.
        if len(self._awaited) > 1:
            params = self._calls._params
            self._awaited = {p for p in self._awaited if gets_gradient(params[p])}
        if not (self._awaited or self._inputs_pending):
            self._close()

    def _input_arrived(self, grad: Tensor) -> None:
        """Note the gradient of an input, from this call and from all others that took it."""
        if self._open:
            self._inputs_pending -= 1
            if not (self._awaited or self._inputs_pending):
                self._close()

    def _close(self) -> None:
        """End the call: all gradients that end it have arrived."""
        if self._open and not self._ends_with_backward:
            self._open = False
            self._calls._open.remove(self)
            self._listener.backward_ends(self._caller, in_pass=self._in_pass)


def gets_gradient(param: Tensor) -> bool:
    """Whether this backward will accumulate a gradient into `param`."""
    with torch._C.DisableTorchFunctionSubclass():
        if not param.requires_grad:  # frozen since it was wrapped
            return False
        try:
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(param).node))
        except RuntimeError:  # autograd.grad takes it out instead
            return False
