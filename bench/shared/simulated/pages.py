"""Memory of the simulated device: whose it is, what of it is free, how much is in use."""

from __future__ import annotations

import weakref
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Place = Literal["device", "host"]
_TRUE = torch.tensor(True)


def poison(dtype: torch.dtype) -> float:
    """What memory is full of that holds no values."""
    if dtype.is_floating_point:
        return float("nan")
    return {torch.uint8: 0xAA, torch.int8: -0x80}.get(dtype, -0x5556)


def _is_poison(tensor: Tensor) -> Tensor:
    return tensor.isnan() if tensor.is_floating_point() else tensor == poison(tensor.dtype)


class SimPages:
    """Memory by storage; nothing is kept alive.

    Bytes of the device count until nothing holds them: a copy that reads them does, until what the
    device does next comes behind it.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[StorageWeakRef, Place]] = {}
        self._in_use: dict[int, tuple[StorageWeakRef, int]] = {}  # bytes of the device
        self._freed: dict[int, weakref.ref[Tensor]] = {}
        self._pinned: list[range] = []  # addresses
        self.peak_device_bytes = 0

    @property
    def device_bytes(self) -> int:
        for key in [key for key, (storage, _) in self._in_use.items() if storage.expired()]:
            del self._in_use[key]
        return sum(nbytes for _, nbytes in self._in_use.values())

    def made(self, tensor: Tensor, place: Place) -> Tensor:
        """Fresh memory; on the device that of what was freed before is taken first."""
        self.put(tensor, place)
        if place == "device":
            self._take(tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if self.is_freed(tensor):
            raise AssertionError("freed twice")
        self._freed[key] = weakref.ref(tensor)
        self._in_use.pop(key, None)
        tensor.fill_(poison(tensor.dtype))

    def refill(self, tensor: Tensor) -> None:
        if not self.is_freed(tensor):
            raise AssertionError("refilled, and never freed")
        self._take(tensor)
        del self._freed[tensor.untyped_storage()._cdata]

    def is_freed(self, tensor: Tensor) -> bool:
        found = self._freed.get(tensor.untyped_storage()._cdata)
        return found is not None and found() is not None

    def check_freed(self) -> None:
        """What was freed is somebody else's memory: AssertionError where it was written."""
        for key, reference in list(self._freed.items()):
            tensor = reference()
            if tensor is None:
                del self._freed[key]
            elif not torch.equal(_is_poison(tensor).all(), _TRUE):  # no read a wait is counted by
                raise AssertionError("memory was written that was freed, and is another's by now")

    def pin(self, address: int, nbytes: int) -> None:
        """These addresses are host memory."""
        self._pinned.append(range(address, address + nbytes))

    def unpin(self, address: int, nbytes: int) -> None:
        self._pinned.remove(range(address, address + nbytes))

    def place_of(self, tensor: Tensor) -> Place | None:
        """Whose memory it is; None for what was not made here."""
        found = self._places.get(tensor.untyped_storage()._cdata)
        if found is not None and not found[0].expired():
            return found[1]
        return "host" if any(tensor.data_ptr() in pages for pages in self._pinned) else None

    def put(self, tensor: Tensor, place: Place) -> None:
        """From now on its memory is known to be there."""
        storage = tensor.untyped_storage()
        self._places[storage._cdata] = StorageWeakRef(storage), place

    def _take(self, tensor: Tensor) -> None:
        """What was freed is handed out at once, so who still writes it writes here."""
        self.check_freed()
        storage = tensor.untyped_storage()
        self._in_use[storage._cdata] = StorageWeakRef(storage), tensor.nbytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
