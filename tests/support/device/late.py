"""Collectives over chunks that end when they are waited for, and not before."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from gemini.comm.communicator import Communicator
from gemini.tickets import Ticket


@dataclass
class _Late:
    """Until `wait` what it fills is NaN, and what it reads must stay as it was."""

    filled: Tensor
    values: Tensor
    read: Tensor
    before: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.read.clone()
        self.filled.fill_(float("nan"))

    def ready(self) -> bool:
        return False

    def wait(self) -> None:
        if not torch.equal(self.read, self.before):
            raise AssertionError("what a collective reads was written before it ended")
        self.filled.copy_(self.values)


def end_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers and reductions of chunks, from now on."""
    gather, reduce = Communicator.all_gather, Communicator.reduce_scatter

    def all_gather(self: Communicator, payload: Tensor, shard: Tensor, label: int) -> Ticket[None]:
        values, sent = torch.empty_like(payload), shard.clone()
        gather(self, values, sent, label).wait()
        in_place = shard.untyped_storage()._cdata == payload.untyped_storage()._cdata
        return _Late(payload, values, sent if in_place else shard)

    def reduce_scatter(
        self: Communicator, shard: Tensor, payload: Tensor, label: int
    ) -> Ticket[None]:
        values = torch.empty_like(shard)
        reduce(self, values, payload.clone(), label).wait()
        return _Late(shard, values, payload)

    monkeypatch.setattr(Communicator, "all_gather", all_gather)
    monkeypatch.setattr(Communicator, "reduce_scatter", reduce_scatter)
