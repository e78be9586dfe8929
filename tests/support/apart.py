"""Host and device of the simulated device are different memory to every operator of torch too."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.shared.simulated import SimBackend

# what takes tensors of two devices on a real one
COPIES = {"aten::copy_", "aten::_to_copy", "aten::set_"}


class Apart(TorchDispatchMode):
    """Fails where an operator is given memory of both, or a kernel the host's.

    Memory that operators make is where what they were given is; what torch made of nothing is
    nobody's, and passes.
    """

    def __init__(self, backend: SimBackend) -> None:
        super().__init__()
        self._backend = backend
        self.operators = 0  # that were given memory of either

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        places = {self._backend.place_of(t) for t in given if t.dim()} - {None}
        self.operators += bool(places)
        if "device" in places and name not in COPIES and not func.is_view:
            self._backend.computes()
        if len(places) > 1 and name not in COPIES:
            raise AssertionError(f"{name} is given memory of the device and of the host")
        if "host" in places and name.startswith("gemini::"):
            raise AssertionError(f"{name} is given host memory")
        out = func(*args, **(kwargs or {}))
        if len(places) == 1 and name not in COPIES:
            (place,) = places
            for made in tree_leaves(out):
                if isinstance(made, Tensor) and self._backend.place_of(made) is None:
                    self._backend.put(made, place)
        return out
