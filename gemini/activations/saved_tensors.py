"""SavedTensors: what autograd saves, in memory up to a bound, and the rest on a tier below.

What was saved first is read last. So over the bound the oldest leaves, which is the best choice
whatever comes, and nothing moves where all fits.
"""

from __future__ import annotations

import bisect
import heapq
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from gemini.nvme import NvmeError, WriteMeter
from gemini.placement.saved import Spilling

from .lower import LowerTier
from .saved import Death, Handle, Kept, SavedStorage, guard_of


@dataclass(frozen=True, slots=True)
class SavedTraffic:
    """Bytes of saved tensors that left the device's memory, and came back, since the last forward
    began."""

    host_out: int = 0
    host_in: int = 0
    nvme_out: int = 0
    nvme_in: int = 0


class SavedTensors:
    """Saved tensors of one engine.

    room: bytes that may stay now, where nobody has said so by `keep_at_most`.
    leave_alone: whether a tensor's memory is somebody's who keeps it anyway.
    changed: called when something was saved, or is read; and with True when what then had to leave
        or to come back has begun to.
    failed: called with an error of a disk that a backward is about to raise. What a forward raises,
        whoever calls the forward can catch.

    Between forward and backward, bytes in memory are at most what may stay; during a forward also
    what is on its way out (at most `in_flight_bytes`) and the tensor that was saved last; during a
    backward, if less may stay than is read ahead, at most that, and the storage in use.
    """

    def __init__(
        self,
        lower: LowerTier,
        device: torch.device,
        *,
        room: Callable[[], int | None] = lambda: None,
        leave_alone: Callable[[Tensor], bool] = lambda tensor: False,
        changed: Callable[[bool], None] = lambda moved: None,
        failed: Callable[[NvmeError], None] = lambda error: None,
        least_bytes: int = Spilling().least_bytes,
        ahead_bytes: int = Spilling().ahead_bytes,
    ) -> None:
        self._lower, self._device = lower, device
        self._room, self._leave_alone = room, leave_alone
        self._changed, self._failed = changed, failed
        self.least_bytes, self._ahead_bytes = least_bytes, ahead_bytes
        self._is_told = False  # by `keep_at_most`
        self._keep: int | None = None
        # Finalizers that the collector runs may end records while one is looked at; see `_reap`.
        self._lock = threading.RLock()
        self._dead: deque[Death] = deque()
        self._count = 0
        self._alive: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        # by storage: it, and its record
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], weakref.ref[SavedStorage]]] = {}
        self._here: list[int] = []  # heap of records in memory that may leave; some have left
        self._done: deque[weakref.ref[SavedStorage]] = deque()  # read, with a copy below
        self._leaving: deque[weakref.ref[SavedStorage]] = deque()  # copies under way
        self._away: list[int] = []  # records below alone, by number
        self._live_bytes = self._resident_bytes = 0
        self._largest_bytes = 0, 0  # of a storage, in the forward before and in this one
        self._leaving_bytes = self._arriving_bytes = 0
        self._buffers: set[int] = set()  # storages of the module's buffers
        self._moved_before = lower.moved()

    # -- what others read and set --

    @property
    def live_bytes(self) -> int:
        """Bytes of storages that have a record, wherever they are."""
        with self._lock:
            self._reap()
            return self._live_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of those that are in the device's memory."""
        with self._lock:
            self._reap()
            return self._resident_bytes

    def holds(self, storage: UntypedStorage) -> bool:
        """Whether a storage has a record."""
        known = self._known.get(storage._cdata)
        return known is not None and known[0]() is storage and known[1]() is not None

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory through which they pass."""
        return self._lower.staging_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes beyond the bound that a forward may have on their way out."""
        return self._lower.in_flight_bytes

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest storage of this forward, and of the one before."""
        return max(self._largest_bytes)

    @property
    def may_stay_bytes(self) -> float:
        """Bytes that may stay in the device's memory now; infinite where all may."""
        keep = self._keep if self._is_told else self._room()
        return float("inf") if keep is None else max(keep, 0)

    @property
    def traffic(self) -> SavedTraffic:
        """Bytes that moved since the last forward began."""
        moved = zip(self._lower.moved(), self._moved_before, strict=True)
        return SavedTraffic(*(now - before for now, before in moved))

    def attach_meter(self, meter: WriteMeter) -> None:
        """Count what files are written in the meter of an optimizer's budget."""
        self._lower.attach_meter(meter)

    def keep_at_most(self, nbytes: int | None) -> None:
        """Let at most `nbytes` stay in the device's memory; None: all."""
        self._keep, self._is_told = nbytes, True
        if nbytes is None:
            self.release_staging()

    def release_staging(self) -> None:
        """Free the host memory through which bytes leave until some do: where nothing leaves, no
        plan counts it."""
        with self._lock:
            self._lower.release_staging()

    def keep_what_fits(self) -> None:
        """Let as many bytes stay as there is room for now."""
        self._is_told = False

    # -- hooks --

    @property
    def takes_all(self) -> bool:
        """Whether what is saved now comes here, and not to hooks of somebody else."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and hooks[0] == self._pack

    @contextmanager
    def saving(self, buffers: Iterable[Tensor] = ()) -> Iterator[None]:
        """Context of a forward. Inside hooks of somebody else, theirs are used.

        buffers: of the module, which has them anyway.
        """
        if _hooks_are_taken():
            yield
            return
        self._begin(buffers)
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        with self._lock:
            self._changed(False)
            self._shrink(self.may_stay_bytes, in_flight=0)
            self._changed(True)

    def _begin(self, buffers: Iterable[Tensor]) -> None:
        """Begin a forward, and forget what earlier ones have left in queues."""
        plain = [buffer for buffer in buffers if type(buffer) in (Tensor, nn.Parameter)]
        self._buffers = {buffer.untyped_storage()._cdata for buffer in plain}
        self._largest_bytes = self._largest_bytes[1], 0
        self._moved_before = self._lower.moved()
        with self._lock:
            alive = self._alive.items()  # in their order, which a heap has too
            self._here = [number for number, record in alive if record.storage is not None]
            self._done = deque(known for known in self._done if known() is not None)

    def _takes(self, tensor: Tensor) -> bool:
        """Whether a tensor may leave: it is plain, large, and nobody else's."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device != self._device or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor._is_zerotensor():  # a tangent of forward-mode AD, without memory
            return False
        if tensor.is_leaf and tensor.requires_grad:  # its owner has it
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < self.least_bytes or not tensor.numel():
            return False
        return storage._cdata not in self._buffers and not self._leave_alone(tensor)

    def _pack(self, tensor: Tensor) -> Handle | Kept:
        if not self._takes(tensor):
            return Kept(tensor)
        guard = guard_of(tensor)
        with self._lock:
            self._reap()
            handle = Handle(self._record_of(tensor, guard), tensor, guard)
            self._changed(False)
            self._shrink(self.may_stay_bytes, in_flight=self._lower.in_flight_bytes)
            self._changed(True)
        return handle

    def keep(self, tensor: Tensor) -> Handle | Kept:
        """What stands for a tensor that a caller keeps itself, between forward and backward: it may
        leave as what autograd saves, and the last one kept is expected first by `brought`."""
        return self._pack(tensor)

    def brought(self, packed: Handle | Kept) -> Tensor:
        """Tensor that `keep` has taken, in the device's memory. Raises NvmeError."""
        return self._unpack(packed)

    def _record_of(self, tensor: Tensor, guard: Tensor) -> SavedStorage:
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and known[0]() is storage:
            record = known[1]()
            if record is not None and record.has(tensor):
                return record
        self._count += 1
        record = SavedStorage(self._count, storage, guard, self._dead)
        self._alive[record.number] = record
        self._known[storage._cdata] = self._forgotten_with(storage), weakref.ref(record)
        heapq.heappush(self._here, record.number)
        self._live_bytes += record.nbytes
        before, largest = self._largest_bytes
        self._largest_bytes = before, max(largest, record.nbytes)
        self._resident_bytes += record.nbytes
        return record

    def _forgotten_with(self, storage: UntypedStorage) -> weakref.ref[UntypedStorage]:
        key, known = storage._cdata, self._known

        def forget(gone: weakref.ref[UntypedStorage]) -> None:
            # an address is given to another storage at once
            if key in known and known[key][0] is gone:
                del known[key]

        return weakref.ref(storage, forget)

    def _unpack(self, packed: Handle | Kept) -> Tensor:
        if isinstance(packed, Kept):
            return packed.checked()
        packed.check()
        try:
            return self._read(packed)
        except NvmeError as error:
            self._failed(error)
            raise

    def _read(self, packed: Handle) -> Tensor:
        """Tensor that a handle stands for. Raises NvmeError."""
        record = packed.record
        with self._lock:
            self._reap()
            self._changed(False)
            if record.storage is None:
                self._come_back(record)
            if not packed.is_read:
                packed.is_read = True
                record.num_unread -= 1
                if not record.num_unread and record.copy is not None:
                    self._done.append(weakref.ref(record))
            assert record.storage is not None
            tensor = packed.tensor(record.storage)
            self._look_ahead(record.number)
            self._changed(True)
        return tensor

    # -- leaving --

    def _shrink(self, limit: float, *, in_flight: int, spared: SavedStorage | None = None) -> None:
        """Let the oldest leave until what stays is within the limit. in_flight: bytes beyond it
        that may still be on their way."""
        self._let_go_of_copied()
        while self._resident_bytes - self._leaving_bytes > limit:
            victim = self._next_to_leave(spared)
            if victim is None or not self._leave(victim):
                break
        while self._leaving and self._resident_bytes > limit + in_flight:
            self._let_go_of_copied(wait=True)

    def _next_to_leave(self, spared: SavedStorage | None) -> SavedStorage | None:
        """What nobody is known to read again, and need not be written; else the oldest."""
        while self._done:
            record = self._done.popleft()()
            if record is not None and record is not spared and self._may_leave(record):
                return record
        skipped = None
        while self._here:
            record = self._alive.get(heapq.heappop(self._here))
            if record is not None and record is spared:
                skipped = record
            elif record is not None and self._may_leave(record):
                break
        else:
            record = None
        if skipped is not None:
            heapq.heappush(self._here, skipped.number)
        return record

    @staticmethod
    def _may_leave(record: SavedStorage) -> bool:
        storage = record.storage
        if storage is None or record.is_leaving:
            return False
        return storage.nbytes() == record.nbytes  # else its owner has freed it for a while

    def _leave(self, record: SavedStorage) -> bool:
        """Let a record leave; False: no tier has room for it."""
        assert record.storage is not None
        if record.copy is not None:
            self._let_go(record)
            return True
        copy = None
        try:
            copy = self._lower.save(record.storage)
        finally:
            if copy is None:
                heapq.heappush(self._here, record.number)
        if copy is None:
            return False
        record.begin_copy(copy)
        self._leaving.append(weakref.ref(record))
        self._leaving_bytes += record.nbytes
        return True

    def _let_go_of_copied(self, *, wait: bool = False) -> None:
        """Let go of storages whose copies have ended. wait: at least of the oldest.

        A copy that failed raises; then its storage stays.
        """
        while self._leaving:
            record = self._leaving[0]()
            if record is None:  # `_reap` has counted it
                del self._leaving[0]
                continue
            assert record.copy is not None
            try:
                if not self._lower.is_saved(record.copy, wait=wait):
                    return
            except BaseException as error:
                if isinstance(error, Exception):
                    self._stay(record)
                raise
            wait = False
            del self._leaving[0]
            record.is_leaving = False
            self._leaving_bytes -= record.nbytes
            self._let_go(record)

    def _stay(self, record: SavedStorage) -> None:
        """Keep the storage of the oldest that was leaving: its copy is worth nothing."""
        del self._leaving[0]
        self._leaving_bytes -= record.nbytes
        assert record.copy is not None
        self._lower.drop(record.copy, None)
        record.copy, record.is_leaving = None, False
        heapq.heappush(self._here, record.number)

    def _let_go(self, record: SavedStorage) -> None:
        record.storage = None
        self._resident_bytes -= record.nbytes
        bisect.insort(self._away, record.number)

    # -- coming back --

    def _come_back(self, record: SavedStorage) -> None:
        """Wait for a record that is below, unless somebody has kept its storage."""
        origin = record.origin()
        if record.arrival is None and origin is not None:
            self._is_away_no_more(record.number)
            record.storage, record.shift = origin, 0
            self._resident_bytes += record.nbytes
            heapq.heappush(self._here, record.number)
            return
        if record.arrival is None:
            self._begin_to_come(record)
        assert record.arrival is not None
        arrival, record.arrival = record.arrival, None
        self._arriving_bytes -= record.nbytes
        try:
            record.storage, record.shift = arrival.wait()
        except BaseException:  # its copy is there, for whoever asks again
            self._resident_bytes -= record.nbytes
            bisect.insort(self._away, record.number)
            raise
        heapq.heappush(self._here, record.number)

    def _begin_to_come(self, record: SavedStorage) -> None:
        assert record.copy is not None
        room = max(self.may_stay_bytes, self._ahead_bytes) - record.nbytes
        self._shrink(max(room, 0), in_flight=0, spared=record)
        record.arrival = self._lower.load(record.copy)
        self._resident_bytes += record.nbytes
        self._arriving_bytes += record.nbytes
        self._is_away_no_more(record.number)

    def _is_away_no_more(self, number: int) -> None:
        place = bisect.bisect_left(self._away, number)
        assert self._away[place] == number
        del self._away[place]

    def _look_ahead(self, number: int) -> None:
        """Begin to read what was saved before, the last first, as far as there is room."""
        limit = max(self.may_stay_bytes, self._ahead_bytes)
        place = bisect.bisect_left(self._away, number)
        while place:
            place -= 1
            record = self._alive.get(self._away[place])
            if record is None or record.origin() is not None:
                continue
            nbytes = record.nbytes
            too_far = self._arriving_bytes + nbytes > self._ahead_bytes
            if too_far or self._resident_bytes + nbytes > limit:
                return
            self._begin_to_come(record)

    # -- ends --

    def _reap(self) -> None:
        """Count out records that no graph has any more, and give back what they had below."""
        while self._dead:
            dead = self._dead.popleft()
            self._live_bytes -= dead.nbytes
            if dead.is_here:
                self._resident_bytes -= dead.nbytes
            else:
                self._is_away_no_more(dead.number)
            if dead.arrival is not None:
                self._arriving_bytes -= dead.nbytes
            if dead.is_leaving:
                self._leaving_bytes -= dead.nbytes
            if dead.copy is not None:
                self._lower.drop(dead.copy, dead.arrival)

    def close(self) -> None:
        """Give all below back; graphs that have something there can run no backward any more."""
        with self._lock:
            self._reap()
            self._lower.close()


def _hooks_are_taken() -> bool:
    """Whether somebody has hooks of his own for what is saved now, or allows none."""
    autograd = torch._C._autograd
    if autograd._top_saved_tensors_default_hooks(False) is not None:
        return True
    return not autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
