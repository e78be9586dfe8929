"""Tensors that autograd saves, and what stands for them in a graph: records and handles.

A storage that graphs have saved is one record, whatever views of it were saved how often. A handle
is what autograd keeps in place of one tensor.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage


class Copy(Protocol):
    """Copy of a storage on a tier below; only the tier that made it looks inside."""

    nbytes: int


class Arrival(Protocol):
    """A storage on its way back."""

    def wait(self) -> tuple[UntypedStorage, int]:
        """Storage, and the byte in it at which the values begin. Raises NvmeError."""
        ...


class Death:
    """What a record held when the last graph let go of it."""

    __slots__ = ("arrival", "copy", "is_here", "is_leaving", "nbytes", "number")

    def __init__(self, record: SavedStorage) -> None:
        self.number, self.nbytes = record.number, record.nbytes
        self.copy, self.arrival = record.copy, record.arrival
        self.is_here = record.storage is not None or record.arrival is not None
        self.is_leaving = record.is_leaving


class SavedStorage:
    """One storage that graphs have saved, once.

    number: by order of saving. storage: while it is in the device's memory. copy: on a tier below,
    begun or ended; is_leaving: the storage is to be let go when it has ended. arrival: while it is
    read back. num_unread: handles that nobody has unpacked.
    """

    __slots__ = (
        *("__weakref__", "arrival", "copy", "copied_version", "dead", "guard", "is_leaving"),
        *("nbytes", "num_unread", "number", "_origin", "shift", "storage"),
    )

    def __init__(
        self, number: int, storage: UntypedStorage, guard: Tensor, dead: deque[Death]
    ) -> None:
        """guard: shares the version counter of the tensor that was saved first. dead: gets a
        `Death`."""
        self.number, self.nbytes = number, storage.nbytes()
        self.storage: UntypedStorage | None = storage
        self._origin = weakref.ref(storage)
        self.shift = 0  # byte of `storage` at which the values begin
        self.copy: Copy | None = None
        self.arrival: Arrival | None = None
        self.is_leaving = False
        self.guard, self.copied_version = guard, 0
        self.num_unread = 0
        self.dead = dead

    # Graphs are collected at any moment and by any thread, so here is only noted what ends.
    def __del__(self) -> None:
        self.dead.append(Death(self))

    def origin(self) -> UntypedStorage | None:
        """The storage, where somebody else has kept it."""
        storage = self._origin()
        # an owner frees and refills a storage, as that of a parameter which is gathered
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    def begin_copy(self, copy: Copy) -> None:
        """Note a copy of the values as they are now."""
        self.copy, self.is_leaving = copy, True
        self.copied_version = self.guard._version

    def has(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor of this storage, as they are now, are the record's.

        While there is no copy they are, as in a graph without us. A copy has them if nothing wrote
        to the tensor since, which its version says, if it has the guard's counter: parts that
        `unsafe_chunk` makes of a tensor have counters of their own.
        """
        if self.copy is None:
            return True
        return tensor._version == self.copied_version and share_counter(self.guard, tensor)


def share_counter(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one version counter."""
    before = other._version
    with torch.autograd._unsafe_preserve_version_counter(one):  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(one)
        return other._version != before


_NOTHING: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def guard_of(tensor: Tensor) -> Tensor:
    """Tensor of no elements that shares the version counter of `tensor`, and none of its memory."""
    guard = tensor.detach()
    key = tensor.dtype, tensor.device
    nothing = _NOTHING.get(key)
    if nothing is None:
        nothing = _NOTHING[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    guard.data = nothing
    return guard


class Handle:
    """What autograd keeps in place of a tensor whose storage has a record."""

    __slots__ = ("dtype", "guard", "is_read", "offset", "record", "size", "stride", "version")

    def __init__(self, record: SavedStorage, tensor: Tensor, guard: Tensor) -> None:
        self.record, self.dtype = record, tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        # autograd does not look at versions of what hooks packed
        self.guard, self.version = guard, tensor._version
        self.is_read = False
        record.num_unread += 1

    def check(self) -> None:
        """Raise the error of autograd where the tensor was written to since it was saved."""
        if self.guard._version != self.version:
            kind = self.guard.type()
            raise _changed(kind, list(self.size), self.guard._version, self.version)

    def tensor(self, storage: UntypedStorage) -> Tensor:
        """The tensor, of the record's storage."""
        offset = self.offset + self.record.shift // self.dtype.itemsize
        out = torch.empty(0, dtype=self.dtype, device=storage.device)
        return out.set_(storage, offset, self.size, self.stride)  # type: ignore[call-overload, no-any-return]


class Kept:
    """What autograd keeps in place of a tensor that stays as it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A node that saves its own output would keep itself through the output's `grad_fn`.
        self.tensor = tensor if tensor.is_leaf else _detached(tensor)
        self.version = _version_of(self.tensor)

    def checked(self) -> Tensor:
        """The tensor. Raises the error of autograd where it was written to since."""
        version = _version_of(self.tensor)
        if version != self.version:
            with torch._C.DisableTorchFunctionSubclass():
                kind, size = self.tensor.type(), list(self.tensor.size())
            raise _changed(kind, size, version, self.version)
        return self.tensor


def _detached(tensor: Tensor) -> Tensor:
    """The tensor without its graph, of the same class and with the same version counter."""
    kind = type(tensor)
    if kind is Tensor:
        return tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():  # a view of a chunk would gather it
        found = tensor.detach()
        has_parts = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        return found if type(found) is kind or has_parts else found.as_subclass(kind)


def _version_of(tensor: Tensor) -> int:
    if type(tensor) is Tensor:
        return tensor._version
    with torch._C.DisableTorchFunctionSubclass():  # a parameter's class would gather its chunk
        return tensor._version


def _changed(kind: str, size: list[Any], version: int, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{kind} {size}] is at version {version}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        "with torch.autograd.set_detect_anomaly(True)."
    )
