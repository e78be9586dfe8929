"""Memory of the simulated device: whose it is, what of it is free, how much is in use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal

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
        self._in_use: dict[int, tuple[weakref.ref[Any], int]] = {}  # bytes of the device
        self._freed: dict[int, weakref.ref[Tensor]] = {}
        self._pinned: list[range] = []  # addresses
        self.device_bytes = self.peak_device_bytes = self.period_peak_bytes = 0
        self._of_operators: set[int] = set()  # keys of `_in_use`
        self.limit_bytes: int | None = None  # beyond which an operator finds no memory

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
        self._drop(key)
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
        pages = range(address, address + nbytes)
        self._pinned.append(pages)
        for key, (reference, _) in list(self._in_use.items()):  # an operator made it for the host
            storage = reference()
            if storage is not None and storage.data_ptr() in pages:
                self._drop(key)

    def unpin(self, address: int, nbytes: int) -> None:
        self._pinned.remove(range(address, address + nbytes))

    def place_of(self, tensor: Tensor) -> Place | None:
        """Whose memory it is; None for what was not made here."""
        found = self._places.get(tensor.untyped_storage()._cdata)
        if found is not None and not found[0].expired():
            return found[1]
        return "host" if any(tensor.data_ptr() in pages for pages in self._pinned) else None

    @property
    def asked_bytes(self) -> int:
        """Bytes in use on the device that a backend was asked for."""
        return self.device_bytes - sum(self._in_use[key][1] for key in sorted(self._of_operators))

    def put(self, tensor: Tensor, place: Place) -> None:
        """From now on its memory is known to be there."""
        storage = tensor.untyped_storage()
        self._places[storage._cdata] = StorageWeakRef(storage), place

    def operator_made(self, tensor: Tensor) -> None:
        """Count memory of the device that no backend was asked for, and that holds values."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._in_use or storage._cdata in self._freed or not storage.nbytes():
            return
        if self.place_of(tensor) == "host":
            return
        self._count(tensor, storage.nbytes())
        self._of_operators.add(storage._cdata)
        limit = self.limit_bytes
        if limit is not None and self.device_bytes > limit:
            raise torch.OutOfMemoryError(
                f"the simulated device has {limit} bytes, {self.device_bytes} are asked for"
            )

    def _take(self, tensor: Tensor) -> None:
        """What was freed is handed out at once, so who still writes it writes here."""
        self.check_freed()
        self._count(tensor, tensor.nbytes)

    def _count(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._drop(key)
        # no reference to the storage is kept: it must die when the program drops it
        self._in_use[key] = weakref.ref(storage, self._gone(key)), nbytes
        self.device_bytes += nbytes
        self.period_peak_bytes = max(self.period_peak_bytes, self.device_bytes)
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def _gone(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._drop(key)

    def _drop(self, key: int) -> None:
        self._of_operators.discard(key)
        self.device_bytes -= self._in_use.pop(key, (None, 0))[1]
