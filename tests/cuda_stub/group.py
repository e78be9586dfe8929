"""One rank of two whose collectives are on the stream that NCCL would give them.

As NCCL's, a collective begins after what the current stream was given before, on a stream of the
group's own, and whoever waits for its work lets the current stream come after it. The other rank
has what this one has. Collectives of torch's `fake` group are on no stream: a checker would find
races that NCCL does not have, and none of those that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.optim.state.memory import StreamMark
from tests.support.alike import one_of_many

NAME = "gemini-cuda-stub"


class _Work(dist.Work):
    """As NCCL's, it keeps its tensors until it is waited for."""

    def __init__(self, mark: StreamMark, *tensors: Tensor) -> None:
        super().__init__()
        self._mark, self._tensors = mark, tensors

    def is_completed(self) -> bool:
        return self._mark.ready()

    def wait(self, timeout: Any = None) -> bool:
        self._mark.order(torch.cuda.current_stream())
        self._tensors = ()
        return True


class _Group(dist.ProcessGroup):
    def __init__(self, store: object, rank: int, world_size: int, timeout: object) -> None:
        super().__init__(rank, world_size)
        self._world_size, self._stream = world_size, torch.cuda.Stream()

    def getBackendName(self) -> str:
        return NAME

    def _by_rank(self, tensor: Tensor) -> Tensor:
        return tensor.view(self._world_size, -1)

    def _begin(self, work: Callable[[], object], *tensors: Tensor) -> _Work:
        StreamMark(torch.cuda.current_stream()).order(self._stream)
        with torch.cuda.stream(
            self._stream
        ):  # an operator, so that a recorder sees what it touches
            work()
        return _Work(StreamMark(self._stream), *tensors)

    def _allgather_base(self, output: Tensor, shard: Tensor, options: Any = None) -> _Work:
        def gather() -> None:
            for row in self._by_rank(output):
                if row.data_ptr() != shard.data_ptr():  # it may be a part of the output
                    row.copy_(shard.view(-1))

        return self._begin(gather, output, shard)

    def _reduce_scatter_base(self, shard: Tensor, payload: Tensor, options: Any = None) -> _Work:
        rows = self._by_rank(payload)
        return self._begin(lambda: torch.sum(rows, 0, out=shard.view(-1)), shard, payload)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Work:
        (tensor,) = tensors
        return self._begin(lambda: tensor.mul_(self._world_size), tensor)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> _Work:
        (tensor,) = tensors
        return self._begin(lambda: tensor.mul_(1), tensor)


def _known_as(real: Callable[..., str]) -> Callable[..., str]:
    return lambda group=None: "nccl" if real(group) == NAME else real(group)


def _of_host(real: Callable[..., Any]) -> Callable[..., Any]:
    """What a thread of ours says to other ranks by the host: torch's gloo would look for them."""
    return lambda ranks, **options: real(ranks, **(options | {"backend": "fake"}))


@contextmanager
def over_nccl() -> Iterator[None]:
    """One rank of two, whose collectives take tensors of a GPU."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _Group, devices=["cuda"])
    with (
        one_of_many(2, backend=NAME, store=dist.HashStore()),
        patch.object(dist, "get_backend", _known_as(dist.get_backend)),
        patch.object(dist, "new_group", _of_host(dist.new_group)),
    ):
        yield
