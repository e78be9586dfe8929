"""Memory of the simulated device that operators make, and its monitor."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .pages import Place, SimPages

# what takes tensors of two devices on a real one
COPIES = {"aten::copy_", "aten::_to_copy", "aten::set_"}


class Device(Protocol):
    """What the mode asks the device."""

    pages: SimPages
    counts_operators: bool

    @property
    def is_copying(self) -> bool:
        """Whether what this thread computes is how copies are simulated."""
        ...

    def computes(self) -> None: ...


class Operators(TorchDispatchMode):
    """The program inside runs on the simulated device: what its operators make is memory there.

    Memory that operators make is where what they were given is. What torch made of nothing counts
    as the device's until it is pinned, and may be used beside either. A copy that a program asks of
    the CPU by name is in host memory.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._simulated = device

    def __enter__(self) -> Any:
        self._simulated.counts_operators = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._simulated.counts_operators = False
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        device, name = self._simulated, func._schema.name
        if device.is_copying:
            return func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {device.pages.place_of(t) for t in given if t.dim()} - {None}
        self.check(name, places)
        if "device" in places and name not in COPIES and not func.is_view:
            device.computes()
        out = func(*args, **(kwargs or {}))
        (place,) = places if len(places) == 1 and name not in COPIES else (None,)
        if name == "aten::_to_copy" and _is_for_host(given[0], kwargs or {}):
            place = "host"
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                if place is not None and device.pages.place_of(made) is None:
                    device.pages.put(made, place)
                device.pages.operator_made(made)
        return out

    def check(self, name: str, places: set[Place | None]) -> None:
        """Look at an operator and where the memory is that it is given."""


def _is_for_host(source: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether it is `to("cpu", copy=True)`: unless asked to, torch copies nothing in place."""
    return kwargs.get("device") is not None and kwargs.get("dtype") in (None, source.dtype)


class SimMonitor:
    """Monitor of all that is in use on the device, as `CudaMonitor` is; 0 outside of `Operators`,
    where nobody counts what operators make."""

    includes_model_data = True

    def __init__(self, device: Device) -> None:
        self._simulated = device
        self.certain_bytes = self._base = 0

    def start(self) -> None:
        self._base = self._begin()

    def stop(self) -> None:
        return

    def period(self) -> int:
        most = self._simulated.pages.period_peak_bytes
        self._begin()
        counts = self._simulated.counts_operators
        self.certain_bytes = most - self._base if counts else 0
        return self.certain_bytes

    def _begin(self) -> int:
        pages = self._simulated.pages
        pages.period_peak_bytes = pages.device_bytes
        return pages.device_bytes
