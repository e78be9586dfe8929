"""Parameters that the user changed in place, and how shards and masters follow.

Re-initialisation, an EMA swapped in and weights loaded by hand write to the payload of a gathered
chunk. The version of the parameter shows a write, or that `.data` was taken or written to. Shards
and fp32 masters follow before the payload is released and before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gemini.chunk.storage import Chunk
from gemini.units import ChunkId, ParamId

if TYPE_CHECKING:
    from .changed_weights import ChangedWeights


class UserWrites:
    """Watcher of user writes to the parameters of one engine.

    stale: chunks whose shard was changed by the user since the optimizer's masters followed.
    keeping: sees a chunk whose payload the user has changed, and its shard as it was.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        keeping: Callable[[Chunk], None] = lambda chunk: None,
    ) -> None:
        self._params = params
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [param._version for param in params]
        self._written: set[ParamId] = set()
        self._unseen = [0] * len(params)  # possible writes that no version shows
        self.stale: set[ChunkId] = set()
        self._keeping = keeping

    def written(self, param: ParamId) -> None:
        """Note a possible write that the parameter's version does not show."""
        self._written.add(param)
        self._unseen[param] += 1

    def counters(self) -> tuple[int, ...]:
        """Number of changes of every parameter, by anybody: another one means another value."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = [param._version for param in self._params]
        return tuple(map(sum, zip(versions, self._unseen, strict=True)))

    def stepped(self, params: Sequence[int], marks: ChangedWeights | None = None) -> None:
        """Raise the versions of parameters that a step changed. marks: have what it changed.

        So autograd refuses a graph that was recorded before, as with torch's optimizers.
        """
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([self._params[param] for param in params])
            for param in params:
                self._versions[param] += 1
        if marks is not None:
            marks.stepped(params)

    def write_back(self, chunk: Chunk) -> None:
        """Copy the user's values from a gathered payload to its shard, if there are any."""
        if self._changed(chunk):
            self._keeping(chunk)
            chunk.keep_shard()
            self.stale.add(chunk.spec.id)

    def forget(self, chunk: Chunk) -> None:
        """Forget writes to this payload: they do not count."""
        self._changed(chunk)

    def _changed(self, chunk: Chunk) -> bool:
        """Whether the chunk's parameters were written to since this was last asked."""
        changed = False
        with torch._C.DisableTorchFunctionSubclass():
            for slot in chunk.spec.slots:
                version = self._params[slot.param]._version
                if version != self._versions[slot.param] or slot.param in self._written:
                    self._versions[slot.param] = version
                    self._written.discard(slot.param)
                    changed = True
        return changed


def refresh_master(master: Tensor, shard: Tensor) -> None:
    """Make fp32 `master` [n] round to `shard` [n] of any memory; if it does, it keeps its bits."""
    shard = shard.to(master.device)
    differs = master.to(shard.dtype) != shard
    master.copy_(torch.where(differs, shard.float(), master))
