"""Host memory below a device's, for saved tensors, and a file below that.

Copies are on the device's streams. Over what the host may hold, the oldest goes to the file, whose
writes and reads pass through host memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from gemini.nvme import NvmeError, WriteMeter
from gemini.optim.state.memory import Memory
from gemini.tickets import CopyTicket
from gemini.units import PAGE_BYTES, align_up

from .file import FileCopy, FileRead, SavedFile
from .lower import Moved
from .saved import Arrival, Copy


@dataclass(slots=True, eq=False)
class HostCopy:
    """Copy of a storage in host memory, in the file, or in both.

    host: [n] uint8, whole pages. ticket: of the last copy from or to it. in_file: begun or ended;
    until it has ended, the bytes in host memory are those that count.
    """

    nbytes: int
    host: Tensor | None
    ticket: CopyTicket | None = None
    in_file: FileCopy | None = None
    is_let_go: bool = False  # the device's work comes behind the copy


@dataclass(slots=True, eq=False)
class HostArrival:
    """A storage on its way to the device; `read`: first from the file to host memory."""

    tier: HostTier
    copy: HostCopy
    read: FileRead | None = None
    on_device: Tensor | None = None  # [nbytes] uint8

    def wait(self) -> tuple[UntypedStorage, int]:
        return self.tier.arrive(self), 0


class HostTier:
    """Host memory, and a file where there is one. The device waits for copies, the host does not.

    room: bytes that the host may hold of saved tensors; None is no limit.
    """

    def __init__(
        self,
        memory: Memory,
        file: SavedFile | None,
        room: Callable[[], int | None] = lambda: None,
        *,
        in_flight_bytes: int,
    ) -> None:
        self._memory, self._file, self._room = memory, file, room
        self._in_flight_bytes = in_flight_bytes
        self._buffers = Buffers(memory)
        self._oldest: deque[HostCopy] = deque()  # in host memory; some have left it
        self._writing: deque[HostCopy] = deque()
        self._writing_bytes = 0
        self._out_bytes = self._in_bytes = 0

    @property
    def staging_bytes(self) -> int:
        return 0 if self._file is None else self._file.staging_bytes

    @property
    def in_flight_bytes(self) -> int:
        return self._in_flight_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold saved tensors."""
        return self._buffers.used_bytes

    def moved(self) -> Moved:
        file = self._file
        of_file = (0, 0) if file is None else (file.written_bytes, file.read_bytes)
        return self._out_bytes, self._in_bytes, *of_file

    def attach_meter(self, meter: WriteMeter) -> None:
        if self._file is not None:
            self._file.attach_meter(meter)

    def release_staging(self) -> None:
        if self._file is not None:
            self._file.release_staging()

    # -- out --

    def save(self, storage: UntypedStorage) -> Copy | None:
        nbytes = storage.nbytes()
        room = self._room()
        if self._file is None and room is not None and self.host_bytes + nbytes > room:
            return None
        self._make_room(nbytes, room)
        host, behind = self._buffers.take(nbytes)
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
        copy = HostCopy(nbytes, host)
        copy.ticket = self._memory.copy(host[:nbytes], flat, behind)
        self._out_bytes += nbytes
        self._oldest.append(copy)
        return copy

    def is_saved(self, copy: Copy, *, wait: bool = False) -> bool:
        assert isinstance(copy, HostCopy)
        if not copy.is_let_go:
            assert copy.ticket is not None
            if not (wait or copy.ticket.ready()):
                return False
            copy.ticket.order()
            copy.is_let_go = True
        return True

    def _make_room(self, nbytes: int, room: int | None) -> None:
        """Send the oldest to the file until the host has room for `nbytes` more."""
        if self._file is None or room is None:
            return
        self._end_writes()
        while self._oldest and self.host_bytes - self._writing_bytes + nbytes > room:
            copy = self._oldest[0]
            if copy.host is not None and copy.in_file is None:
                self.is_saved(copy, wait=True)
                assert copy.ticket is not None
                copy.ticket.settle()
                copy.in_file = self._file.write(copy.host.data_ptr(), copy.nbytes)
                self._writing.append(copy)
                self._writing_bytes += copy.host.nbytes
            del self._oldest[0]
        while self._writing and self.host_bytes + nbytes > room + self._in_flight_bytes:
            self._end_writes(wait=True)

    def _end_writes(self, *, wait: bool = False) -> None:
        """Let go of host memory whose writes have ended. A write that failed raises, and the bytes
        stay in host memory."""
        while self._writing and self._file is not None:
            copy = self._writing[0]
            assert copy.in_file is not None
            try:
                if not self._file.ended(copy.in_file, wait=wait):
                    return
            except NvmeError:
                self._write_ended(copy)
                self._file.drop(copy.in_file)
                copy.in_file = None
                self._oldest.appendleft(copy)
                raise
            self._write_ended(copy)
            self._give_host(copy)
            wait = False

    def _write_ended(self, copy: HostCopy) -> None:
        assert copy.host is not None
        self._writing.remove(copy)
        self._writing_bytes -= copy.host.nbytes

    def _give_host(self, copy: HostCopy) -> None:
        if copy.host is not None:
            self._buffers.give(copy.host, copy.ticket)
            copy.host = None

    # -- back --

    def load(self, copy: Copy) -> Arrival:
        assert isinstance(copy, HostCopy)
        if copy.host is not None:
            arrival = HostArrival(self, copy)
            self._to_device(arrival)
            return arrival
        assert self._file is not None and copy.in_file is not None
        self._make_room(copy.nbytes, self._room())
        host, behind = self._buffers.take(copy.nbytes)
        for ticket in behind:
            ticket.settle()
        try:
            read = self._file.read(copy.in_file, host)
        except BaseException:
            self._buffers.give(host, None)
            raise
        return HostArrival(self, copy, read)

    def _to_device(self, arrival: HostArrival) -> None:
        copy = arrival.copy
        assert copy.host is not None
        arrival.on_device = self._memory.allocate(copy.nbytes, torch.uint8)
        behind = () if copy.ticket is None else (copy.ticket,)
        copy.ticket = self._memory.copy(arrival.on_device, copy.host[: copy.nbytes], behind)
        self._in_bytes += copy.nbytes

    def arrive(self, arrival: HostArrival) -> UntypedStorage:
        """Wait for a storage: the host for its read, the device for its copy. Raises NvmeError."""
        copy, read = arrival.copy, arrival.read
        if read is not None:
            try:
                read.wait()
            except NvmeError:
                self._buffers.give(read.landing, None)
                raise
            copy.host, copy.ticket = read.landing, None
            self._to_device(arrival)
        assert copy.ticket is not None and arrival.on_device is not None
        copy.ticket.order()
        if read is not None:  # the file has it still
            self._give_host(copy)
        return arrival.on_device.untyped_storage()

    def drop(self, copy: Copy, arrival: Arrival | None) -> None:
        assert isinstance(copy, HostCopy) and isinstance(arrival, HostArrival | None)
        if arrival is not None and arrival.read is not None:
            with suppress(NvmeError):  # nobody asks for it any more
                arrival.read.wait()
            self._buffers.give(arrival.read.landing, None)
        if copy.ticket is not None:
            copy.ticket.order()
        if copy in self._writing:
            self._write_ended(copy)
        self._give_host(copy)
        if copy.in_file is not None and self._file is not None:
            self._file.drop(copy.in_file)

    def close(self) -> None:
        self._buffers.clear()
        if self._file is not None:
            self._file.close()


class Buffers:
    """Host memory by size, used again: to pin memory takes longer than to copy into it.

    A size is rounded up by at most an eighth, so that other lengths of a batch use it too.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._free: defaultdict[int, list[tuple[Tensor, CopyTicket | None]]] = defaultdict(list)
        self.used_bytes = 0

    def take(self, nbytes: int) -> tuple[Tensor, tuple[CopyTicket, ...]]:
        """Whole pages for `nbytes`, and the copies that they must come behind."""
        size = _rounded(nbytes)
        free = self._free[size]
        self.used_bytes += size
        if free:
            host, ticket = free.pop()
            return host, () if ticket is None else (ticket,)
        self._trim(size)
        whole = self._memory.allocate_host(size + PAGE_BYTES, torch.uint8)
        skipped = -whole.data_ptr() % PAGE_BYTES
        return whole[skipped : skipped + size], ()

    def give(self, host: Tensor, ticket: CopyTicket | None) -> None:
        """Take memory back. ticket: of the last copy that reads or fills it."""
        self.used_bytes -= host.nbytes
        self._free[host.nbytes].append((host, ticket))

    def _trim(self, nbytes: int) -> None:
        """Free as much as is asked anew: other sizes come, and the sum must not grow for ever."""
        for size in sorted(self._free):
            while self._free[size] and nbytes > 0:
                _, ticket = self._free[size].pop()
                if ticket is not None:
                    ticket.settle()
                nbytes -= size

    def clear(self) -> None:
        """Free what nobody uses."""
        for free in self._free.values():
            for _, ticket in free:
                if ticket is not None:
                    ticket.settle()
        self._free.clear()


def _rounded(nbytes: int) -> int:
    """Bytes in whole pages, with four digits in binary."""
    step = max(PAGE_BYTES, 1 << max(nbytes.bit_length() - 4, 0))
    return align_up(nbytes, step)
