"""One rank of many that all say what this one says: no other is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gemini.comm import meeting
from gemini.comm.communicator import Communicator


class Alike:
    """A meeting of ranks that all want what this one wants."""

    def __init__(self, store: object, rank: int, world_size: int) -> None:
        self._world_size = world_size

    def arrive(self, wants: str) -> None:
        self._wants = wants

    def is_complete(self, seconds: float) -> bool:
        return True

    def said(self) -> list[str]:
        return [self._wants] * self._world_size

    def waiting(self) -> None:
        pass

    def leave(self) -> None:
        pass


def said_by_all(comm: Communicator, value: Any) -> list[Any]:
    return [value] * comm.world_size


@contextmanager
def one_of_many(
    world_size: int, rank: int = 0, *, backend: str = "fake", store: dist.Store | None = None
) -> Iterator[None]:
    """In a group whose collectives do nothing, or are the backend's."""
    with (
        patch.object(Communicator, "gather_objects", said_by_all),
        patch.object(meeting, "MeetingPoint", Alike),
    ):
        dist.init_process_group(
            backend, store=store or FakeStore(), rank=rank, world_size=world_size
        )
        try:
            yield
        finally:
            dist.destroy_process_group()
