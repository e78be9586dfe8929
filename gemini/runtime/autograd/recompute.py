"""Layers that are computed again in backward, switched from outside by iteration, as plans say."""

from __future__ import annotations

import random
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini.activations.saved_tensors import SavedTensors
from gemini.memtracer.layers import chosen
from gemini.memtracer.module_calls import in_backward, repeated_blocks
from gemini.memtracer.trace import Kind, Layer
from gemini.placement.overruns import user_stacklevel
from gemini.runtime.parts import Parts
from gemini.trees import tensors_in
from gemini.units import Bytes

from .attempt import Versions

_PLAIN = (type(None), bool, int, float, str, Tensor, torch.dtype, torch.device)


class Layers:
    """Repeated blocks of one module. In an iteration, those of `names` are computed again.

    The first time that a block is, this is proved: it runs twice in one forward, and must change
    neither buffers nor what it is given, and give the same bits. Else it never is.
    """

    def __init__(self, parts: Parts, saved: SavedTensors, root: nn.Module) -> None:
        self._parts, self._saved = weakref.proxy(parts), saved
        self._collector = parts.sampler.collector
        self._switches = {name: Switch(self, name, block) for name, block in repeated_blocks(root)}
        self._proved: set[str] = set()
        self._refused: dict[str, str] = {}  # with the reason
        self._untold: list[str] = []
        self._known: dict[str, Layer] = {}  # as measured last, where it was not computed again
        self.names: frozenset[str] = frozenset()
        parts.sampler.layers = self

    # -- by iteration --

    def choose(self, kind: Kind, signature: str) -> str:
        """Choose layers for an iteration with inputs of this signature; returns that of both."""
        self._tell()
        planned = self._parts.planning.recomputed_for(signature) if kind == "train" else None
        names = () if planned is None else planned.names
        self.names = frozenset(n for n in names if n in self._switches and n not in self._refused)
        return chosen(signature, len(self.names))

    @property
    def proves(self) -> bool:
        """Whether some layer of this iteration runs twice, for the first time: it is not
        sampled."""
        return not self.names <= self._proved

    def _tell(self) -> None:
        """Say which layers were refused, and plan without them."""
        if not self._untold:
            return
        self._parts.planning.refuse_layers(frozenset(self._refused))
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
        if name not in self._proved:
            return self._first(name, forward, args, kwargs)
        given = self._input_bytes(args)
        if self._collector.collecting:
            known = self._known.get(name, Layer(name, Bytes(0), Bytes(0)))
            # longer inputs are taken to save as many times the bytes of what is given
            saved = known.saved_bytes * given // max(1, known.input_bytes)
            self._collector.add_layer(Layer(name, Bytes(saved), Bytes(given), known.seconds))
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def _measured(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name in self._refused or not (self._collector.collecting or name in self.names):
            return forward(*args, **kwargs)
        before, begun = self._saved.live_bytes, time.perf_counter()
        outputs = forward(*args, **kwargs)
        saved = Bytes(max(0, self._saved.live_bytes - before))
        seconds, given = time.perf_counter() - begun, Bytes(self._input_bytes(args))
        self._known[name] = Layer(name, saved, given, seconds)
        if self._collector.collecting:
            self._collector.add_layer(self._known[name])
        return outputs

    def _input_bytes(self, args: Any) -> int:
        """Bytes that stay of what a block was given by position: so checkpointing saves it."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors_in(args)}
        sizes = (storage.nbytes() for storage in storages.values())
        return sum(n for n in sizes if n >= self._saved.least_bytes)

    def _first(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block twice. Returns what the second run gives, which backward computes again, if
        nothing tells it from the first; else what the first gives."""
        buffers = list(self._switches[name].block.buffers())
        versions = Versions([*buffers, *tensors_in((args, kwargs))])
        strange = next((x for x in _leaves((args, kwargs)) if not isinstance(x, _PLAIN)), None)
        device = self._parts.backend.device
        before = _Random(device)
        outputs = self._measured(name, forward, args, kwargs)
        reason, second = None, None
        if strange is not None:
            kind = type(strange).__name__
            reason = f"it is given a {kind}, which it may change (use_cache=False)"
        elif versions.have_changed:
            reason = "its forward changes buffers, or what it is given, in place"
        if self._any_rank(reason is not None):
            return self._refuse(name, reason, outputs)
        after, values = _Random(device), [buffer.clone() for buffer in buffers]
        before.set_torch()
        second = checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if versions.have_changed:
            reason = "its forward changes buffers, or what it is given, the second time"
        elif not _same_bits(outputs, second) or not after.is_torch_now():
            reason = "it gives other values the second time"
        after.set_all()
        if self._any_rank(reason is not None):
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)
            return self._refuse(name, reason, outputs)
        self._proved.add(name)
        return second

    def _any_rank(self, refused: bool) -> bool:
        """Whether a rank refuses: all ranks run a block as often, since they gather for it.
        Collective."""
        comm = self._parts.comm
        if comm.world_size == 1:
            return refused
        return bool(comm.largest(int(refused), "whether a layer gives the same bits twice"))

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
        return type(self.block).forward.__get__(memo[id(self.block)])

    def off(self) -> None:
        if self.block.__dict__.get("forward") is self:
            del self.block.__dict__["forward"]
            if self._own is not None:
                self.block.__dict__["forward"] = self._own


class _Random:
    """State of the generators that a forward may draw from: of torch, Python and numpy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = self._torch_states()

    def _torch_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def set_torch(self) -> None:
        """As checkpointing does: the others go on."""
        torch.set_rng_state(self._torch[0])
        if len(self._torch) > 1:
            torch.cuda.set_rng_state(self._torch[1], self._device)

    def set_all(self) -> None:
        self.set_torch()
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def is_torch_now(self) -> bool:
        pairs = zip(self._torch, self._torch_states(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _same_bits(first: Any, second: Any) -> bool:
    mine, theirs = list(tensors_in(first)), list(tensors_in(second))
    if len(mine) != len(theirs):
        return False
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        for a, b in zip(mine, theirs, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
