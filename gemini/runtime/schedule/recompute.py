"""Layers that are computed again in backward, switched from outside by iteration, as plans say."""

from __future__ import annotations

import copy
import time
import warnings
import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from gemini.activations.saved_tensors import SavedTensors
from gemini.comm.communicator import Communicator
from gemini.memtracer.blocks import BlockMeter
from gemini.memtracer.layers import chosen
from gemini.memtracer.module_calls import in_backward, repeated_blocks
from gemini.memtracer.trace import Kind, Layer
from gemini.placement.overruns import user_stacklevel
from gemini.trees import tensors_in
from gemini.units import Bytes

from .planning import Planning
from .proof import Random, Seen, kind_of_call, reason_against, same_bits

if TYPE_CHECKING:
    from .sampler import Sampler


class Layers:
    """Repeated blocks of one module. In an iteration, those of `names` are computed again.

    The first time that a block is, this is proved: it runs twice in one forward, must change
    nothing that `Seen` sees, and give the same bits. Else it never is. A call of another kind
    (`kind_of_call`) is proved anew, and at one rank a call with longer inputs too. What changes in
    a call that was proved is an error: its first values are gone.
    """

    def __init__(
        self,
        sampler: Sampler,
        planning: Planning,
        saved: SavedTensors,
        root: nn.Module,
        device: torch.device,
    ) -> None:
        self._sampler, self._planning = weakref.proxy(sampler), planning
        self._saved, self._device, self._comm = saved, device, planning.comm
        self._collector = sampler.collector
        self._switches = {name: Switch(self, name, block) for name, block in repeated_blocks(root)}
        self.proved: dict[str, set[Any]] = {}  # kinds of calls
        self.longest: dict[str, int] = {}  # elements that a proved call was given
        self._refused: dict[str, str] = {}  # with the reason
        self._untold: list[str] = []
        # as measured last, where it was not computed again, and elements that it was given
        self._known: dict[str, tuple[Layer, int]] = {}
        self._meter = BlockMeter(saved, saved.least_bytes)
        self.names: frozenset[str] = frozenset()
        sampler.recompute(self)

    # -- by iteration --

    def choose(self, kind: Kind, signature: str) -> str:
        """Choose layers for an iteration with inputs of this signature; returns that of both."""
        self._tell()
        self._meter = BlockMeter(self._saved, self._saved.least_bytes)
        planned = self._planning.recomputed_for(signature) if kind == "train" else None
        names = () if planned is None else planned.names
        self.names = frozenset(n for n in names if n in self._switches and n not in self._refused)
        return chosen(signature, len(self.names))

    @property
    def proves(self) -> bool:
        """Whether some layer of this iteration runs twice, for the first time: it is not
        sampled."""
        return not self.names <= self.proved.keys()

    def _tell(self) -> None:
        """Say which layers were refused, and plan without them."""
        if not self._untold:
            return
        self._planning.refuse_layers(frozenset(self._refused))
        names, self._untold = self._untold, []
        of = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
        warnings.warn(
            f'activations="auto" computes {of} never again in backward: {self._refused[names[0]]}',
            UserWarning,
            stacklevel=user_stacklevel(),
        )

    # -- calls --

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call of a block: as it is, or so that backward computes it again."""
        is_ours = torch.is_grad_enabled() and not in_backward() and self._saved.takes_all
        if not is_ours or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if name not in self.names or name in self._refused:
            return self._measured(name, forward, args, kwargs)
        if not self._is_proved(name, args, kwargs):
            return self._first(name, forward, args, kwargs)
        if self._collector.collecting:
            known, numel = self._known.get(name, (Layer(name, Bytes(0), Bytes(0)), 1))
            # longer inputs are taken to save as many times the bytes
            longer = Fraction(_numel((args, kwargs)), max(1, numel))
            saved, given = Bytes(int(known.saved_bytes * longer)), int(known.input_bytes * longer)
            self._collector.add_layer(Layer(name, saved, Bytes(given), known.seconds))
        block = self._switches[name].block
        before = Seen(block, (args, kwargs))
        outputs = self._again_in_backward(name, block, forward, args, kwargs)
        if before.differs(Seen(block, (args, kwargs))):
            self._refuse(name, "its forward changed what it had left alone before", None)
            raise _changed(name, "in a later forward than the one that was proved", self._comm)
        return outputs

    def _is_proved(self, name: str, args: Any, kwargs: Any) -> bool:
        block = self._switches[name].block
        if kind_of_call(block, args, kwargs) not in self.proved.get(name, ()):
            return False
        # ranks run a block as often as others do, and their inputs differ
        if self._comm.world_size > 1:
            return True
        return _numel((args, kwargs)) <= self.longest[name]

    def _measured(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name in self._refused or not (self._collector.collecting or name in self.names):
            return forward(*args, **kwargs)
        call, begun = self._meter.begin((args, kwargs)), time.perf_counter()
        outputs = forward(*args, **kwargs)
        layer = self._meter.end(name, call, outputs, time.perf_counter() - begun)
        self._known[name] = layer, _numel((args, kwargs))
        if self._collector.collecting:
            self._collector.add_layer(layer)
        return outputs

    def _first(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block twice. Returns what the second run gives, which backward computes again, if
        nothing tells it from the first; else what the first gives."""
        block = self._switches[name].block
        if self._collector.collecting:  # a call of another kind than before, and it runs twice
            self._sampler.abandon()
        kind, numel = kind_of_call(block, args, kwargs), _numel((args, kwargs))
        seen, before = Seen(block, (args, kwargs)), Random(self._device)
        reason = reason_against(block, args, kwargs)
        outputs = self._measured(name, forward, args, kwargs)
        if reason is None and seen.differs(Seen(block, (args, kwargs))):
            reason = (
                "its forward changes buffers, attributes, what it is given, in place, or draws "
                "from random or numpy"
            )
        if self._any_rank(reason is not None):
            return self._refuse(name, reason, outputs)
        after, values = Random(self._device), [(b, b.clone()) for b in block.buffers()]
        before.set_torch()
        second = self._again_in_backward(name, block, forward, args, kwargs)
        if seen.differs(Seen(block, (args, kwargs))):
            reason = "its forward changes buffers, or what it is given, the second time"
        elif not same_bits(outputs, second) or not after.is_torch_now():
            reason = "it gives other values the second time"
        after.set_all()
        if self._any_rank(reason is not None):
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)
            return self._refuse(name, reason, outputs)
        self.proved.setdefault(name, set()).add(kind)
        self.longest[name] = max(numel, self.longest.get(name, 0))
        return second

    def _again_in_backward(
        self, name: str, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call of a block that backward computes again. Of all tensors that it is given, by
        position or by name, autograd keeps the version, and checkpointing the device."""
        leaves, tree = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        given = [leaves[i] for i in places]
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        before, comm = Seen(block, ()), self._comm

        def run(*tensors: Tensor) -> Any:
            if in_backward() and before.differs(Seen(block, ()), of_random=False):
                raise _changed(name, "between its forward and its backward", comm)
            filled = list(rest)
            for i, tensor in zip(places, tensors, strict=True):
                filled[i] = tensor
            positional, keywords = tree_unflatten(filled, tree)
            return forward(*positional, **keywords)

        return checkpoint(run, *given, use_reentrant=False)

    def _any_rank(self, refused: bool) -> bool:
        """Whether a rank refuses: all ranks run a block as often, since they gather for it.
        Collective."""
        if self._comm.world_size == 1:
            return refused
        return bool(self._comm.largest(int(refused), "whether a layer gives the same bits twice"))

    def _refuse(self, name: str, reason: str | None, outputs: Any) -> Any:
        self._refused[name] = reason or "another rank refuses it"
        self._untold.append(name)
        return outputs

    def close(self) -> None:
        """Give the blocks their own forward back."""
        for switch in self._switches.values():
            switch.off()
        self._switches = {}


class Switch:
    """Forward of a block, in the place of its own, inside of its hooks."""

    def __init__(self, layers: Layers, name: str, block: nn.Module) -> None:
        self._layers, self._name, self.block = weakref.ref(layers), name, block
        self._own = block.__dict__.get("forward")
        self.__wrapped__ = block.forward  # whose signature is this one's
        block.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layers = self._layers()
        if layers is None:
            return self.__wrapped__(*args, **kwargs)
        return layers.call(self._name, self.__wrapped__, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Forward of the copied block alone."""
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        return type(self.block).forward.__get__(memo[id(self.block)])

    def off(self) -> None:
        if self.block.__dict__.get("forward") is self:
            del self.block.__dict__["forward"]
            if self._own is not None:
                self.block.__dict__["forward"] = self._own


def _changed(name: str, when: str, comm: Communicator) -> RuntimeError:
    """Error of a block that changed; the other ranks are told of it, since they may not have it."""
    error = RuntimeError(
        f"{name} is computed again in backward, and buffers, attributes or inputs of it changed "
        f'{when}: its gradients would be others. activations="spill" computes nothing again'
    )
    comm.say_failed(error)
    return error


def _numel(given: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(given))
