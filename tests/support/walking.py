"""A device that is not the CPU and holds no data: torch's meta tensors, walked without a GPU.

`Walk` refuses what a real device refuses: tensors of two devices in one operator, and memory of the
host in a kernel. What the host reads of the device is made up: zeros, and a loss scale of 1.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemini.memtracer.monitor import ProcessMonitor, process_monitor
from kernels_triton.control_fields import BAD, LOSS_SCALE, NUM_CONTROL, USED_SCALE
from optim.state.memory import DeviceMemory

META = torch.device("meta")
# what takes tensors of two devices on a real one too
COPIES = ("aten::copy_", "aten::_to_copy", "aten::set_")


class MetaBackend(DeviceMemory):
    """Memory of a device whose kernels reach nothing but it."""

    has_host_tier = True
    updates_by_triton = True
    shards_start_on_host = False

    def __init__(self) -> None:
        super().__init__(META)
        self._addresses: dict[tuple[int, int], int] = {}
        self._seen: list[Tensor] = []  # so that no id of a storage comes again

    def monitor(self) -> ProcessMonitor | None:
        return process_monitor()

    def bytes_in_use(self) -> None:
        return None

    def address(self, tensor: Tensor) -> int:
        super().address(tensor)
        key = tensor.untyped_storage()._cdata, tensor.storage_offset()
        self._seen.append(tensor)
        return self._addresses.setdefault(key, 4096 * (1 + len(self._addresses)))


class Walk(TorchDispatchMode):
    """Fails where an operator is given memory of both devices, or a kernel the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()  # launches, by name
        self.reads = 0  # of the device, by the host
        self.finds_bad = False  # what the host reads of a step says that a gradient is not finite

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name in COPIES:
            return self._copy(func, name, args, kwargs)
        if name == "aten::_local_scalar_dense" and given[0].is_meta:
            self.reads += 1
            return self._made_up(given[0]).item()
        if name == "aten::equal" and any(t.is_meta for t in given):
            self.reads += 1
            return True
        _check_together(name, [t for t in given if t.dim()])
        return func(*args, **kwargs)

    def _copy(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "aten::copy_" and args[1].is_meta and not args[0].is_meta:
            self.reads += 1
            args[0].fill_(0).view(-1)[:] = self._made_up(args[1]).view(-1).to(args[0].dtype)
            return args[0]
        if name == "aten::_to_copy" and args[0].is_meta:
            to = kwargs.get("device")
            if to is not None and torch.device(to) != META:
                self.reads += 1
                return self._made_up(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)

    def _made_up(self, tensor: Tensor) -> Tensor:
        values = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        if tensor.shape == (NUM_CONTROL,):
            values[LOSS_SCALE] = values[USED_SCALE] = 1.0
            values[BAD] = float(self.finds_bad)
        return values

    def launched(self, name: str, tensors: list[Tensor]) -> None:
        """A kernel is, with these."""
        self.kernels[name] += 1
        devices = {tensor.device for tensor in tensors}
        if devices != {META}:
            raise AssertionError(f"{name} is given memory of {devices}; expected {META}")


def _check_together(name: str, tensors: list[Tensor]) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise AssertionError(f"{name} is given tensors of {sorted(map(str, devices))}")
