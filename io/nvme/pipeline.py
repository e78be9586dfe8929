"""Pipelines of blocks through a few staging buffers: reads ahead of their use, and writes.

A buffer belongs to its transfer until that has ended, and then to the pool again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import TypeVar

from gemini.tickets import Ticket

from .errors import NvmeError
from .pool import Buffer, BufferPool

T = TypeVar("T")
R = TypeVar("R")


def settle(ticket: Ticket[object] | None) -> None:
    """Wait for a transfer, if there is one. Its error no longer matters, or is raised elsewhere."""
    if ticket is not None:
        with suppress(NvmeError):
            ticket.wait()


def read_ahead(
    pool: BufferPool, items: Iterable[T], begin: Callable[[T, Buffer], Ticket[R]]
) -> Generator[tuple[T, Buffer, R], None, None]:
    """(item, its buffer, the result of its ticket) of every item, in order.

    As many are under way as the pool has buffers. A buffer is good until the next item is asked
    for. Raises what a ticket does. Closed early, it waits for transfers under way.
    """
    coming, reads = iter(items), deque[tuple[T, Buffer, Ticket[R]]]()
    try:
        while True:
            while pool.num_free:
                for item in coming:
                    buffer = pool.take()
                    try:
                        reads.append((item, buffer, begin(item, buffer)))
                    except BaseException:
                        pool.give(buffer)
                        raise
                    break
                else:
                    break
            if not reads:
                return
            item, buffer, ticket = reads.popleft()
            try:
                yield item, buffer, ticket.wait()
            finally:
                pool.give(buffer)
    finally:
        # also where the consumer stops early: buffers of reads under way are the disk's until then
        for _, buffer, ticket in reads:
            settle(ticket)
            pool.give(buffer)


class WriteBehind:
    """Queue of buffers of one pool that are being written, oldest first. One thread at a time."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._leaving: deque[tuple[Ticket[object], Buffer]] = deque()

    def __len__(self) -> int:
        return len(self._leaving)

    def add(self, ticket: Ticket[object], buffer: Buffer) -> None:
        """Queue a buffer: the pool has it back when the ticket is done."""
        self._leaving.append((ticket, buffer))

    def take(self) -> Buffer:
        """Take a free buffer. Waits for writes where there is none, and raises what went wrong."""
        while not self._pool.num_free:
            self.end_oldest()
        return self._pool.take()

    def reap(self) -> None:
        """Take back buffers of writes that have ended, and raise what went wrong. Never waits."""
        while self._leaving and self._leaving[0][0].ready():
            self.end_oldest()

    def end_oldest(self) -> None:
        """Wait for the write that was begun first. Raises what went wrong."""
        ticket, buffer = self._leaving.popleft()
        try:
            ticket.wait()
        finally:
            self._pool.give(buffer)

    def drain(self) -> None:
        """Wait for all writes. Raises the first error; writes after it are still queued."""
        while self._leaving:
            self.end_oldest()

    def abandon(self) -> None:
        """Wait for all writes, and ignore their errors."""
        while self._leaving:
            ticket, buffer = self._leaving.popleft()
            settle(ticket)
            self._pool.give(buffer)
