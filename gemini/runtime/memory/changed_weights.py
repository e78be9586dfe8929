"""What steps have changed of a rank's shards since a version of the weights: a bit an element.

A parameter is known if every change of its counter since then was a step's, whose update has set
its bits (`optim.update.changed_bits`). Whatever else writes to weights (the user, a load, a rewind,
an average that is swapped in) raises the counter alone, and says by that: all of it has changed. A
step that was undone has set bits of elements that are as they were, which costs bytes and nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from gemini.chunk.layout import ChunkSpec
from gemini.units import ChunkId, ParamId


class ChangedWeights:
    """Bits of all elements of shards [S] of some chunks, where the update runs.

    bits: uint8 [ceil(S / 8)] by chunk.
    is_open: spans of a step that may come have set bits while backward ran; what they change is
        changed with that step.
    """

    def __init__(
        self,
        chunks: Iterable[ChunkSpec],
        zeros: Callable[[int], Tensor],
        counters: Sequence[int],
        *,
        on_device: bool,
    ) -> None:
        """zeros: memory of so many bytes. counters: of the parameters' changes, now."""
        self.bits = {chunk.id: zeros(bytes_of(chunk)) for chunk in chunks}
        self.on_device = on_device
        self.is_open = False
        self._since = list(counters)
        self._by_steps = [0] * len(counters)

    def restart(self, counters: Sequence[int]) -> None:
        """Keep what changes from now on, unless spans of a coming step are among it already."""
        if self.is_open:
            return
        self._since, self._by_steps = list(counters), [0] * len(counters)
        for bits in self.bits.values():
            bits.zero_()

    def stepped(self, params: Sequence[int]) -> None:
        """Note a step, or its undoing, that has raised the counters of these parameters."""
        self.is_open = False
        for param in params:
            self._by_steps[param] += 1

    def knows(self, param: ParamId, since: int, now: int) -> bool:
        """Whether bits have all changes of a parameter, of a chunk with bits, between two counts of
        its counter."""
        started = self._since[param]
        return since >= started and now == started + self._by_steps[param]

    def of(self, chunk: ChunkId, start: int, stop: int) -> Tensor | None:
        """Bits of elements [start, stop) of a shard; `start` is a multiple of 8."""
        bits = self.bits.get(chunk)
        return None if bits is None else bits[start // 8 : -(-stop // 8)]

    @property
    def nbytes(self) -> int:
        return sum(bits.nbytes for bits in self.bits.values())


def bytes_of(chunk: ChunkSpec) -> int:
    """Bytes of the bits of one shard of a chunk."""
    return -(-chunk.shard_numel // 8)
